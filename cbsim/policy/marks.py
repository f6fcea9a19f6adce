"""The marks in the annotation of a setting: its bounds, the rule that solves it, its value in a probe."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple


class AtLeast(NamedTuple):
    """A bound in the annotation of a setting: the value is not smaller."""

    least: float


class Below(NamedTuple):
    """A bound in the annotation of a setting: the value is smaller."""

    bound: float


class AsText(NamedTuple):
    """A mark in the annotation of a setting: a number that a user writes is taken as text, 0.33 as "0.33"."""


class Solved(NamedTuple):
    """A mark in the annotation of a setting that may be null: the rule by which it is then solved, as a sentence's end
    where {gpu} and {name} are those of site and settings, or a function of both. A `pinned` one keeps its value if the
    scenario gets a smaller cache afterwards.
    """

    source: str | Callable[[Any, Any], str]
    pinned: bool = False


class ProbeSize(Enum):
    """A value that a setting gets in a probe and that depends on the probe's size or the setting's default."""

    SLOTS = "requests that may run"
    STEP_TOKENS = "query tokens of a step, in which every slot may decode"
    PROMPT_TOKENS = "query tokens of a step"
    DEFAULT = "the setting's default"


class InProbe(NamedTuple):
    """A setting's value in a calibration's probe, which bounds slots and query tokens; its requests share nothing."""

    value: Any


SLOTS, STEP_TOKENS = InProbe(ProbeSize.SLOTS), InProbe(ProbeSize.STEP_TOKENS)
PROMPT_TOKENS, DEFAULT_IN_PROBE = InProbe(ProbeSize.PROMPT_TOKENS), InProbe(ProbeSize.DEFAULT)
