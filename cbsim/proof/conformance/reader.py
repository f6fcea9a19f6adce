"""What it takes to read the traces of a scheduler. The list of those that there are is in readers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cbsim.proof.conformance.files import Line


class Replay(Protocol):
    """A workload on our policy."""

    def lines(self) -> Iterator[Line]:
        """Our lines for it, in order, without the header."""

    def check(self) -> None:
        """Raise AssertionError unless the policy's accounts are right at this moment."""


@dataclass(frozen=True, slots=True)
class Case:
    """What the header of a trace says, and the replay of its workload unless there is a reason to skip it.

    `name` is its workload's, `version` may say in a word more how the trace was made. `header` has the fields of the
    header that follow from the workload, as we make them; they are compared before any line.
    """

    name: str
    scheduler: str
    version: str
    mode: str = ""
    replay: Replay | None = None
    skipped: str | None = None
    header: Line = field(default_factory=dict)


def as_recorded(line: Line) -> Line:
    return line


@dataclass(frozen=True, slots=True)
class Reader:
    """One family of traces. `reads` tells them by their header, `case` may raise UnreadableError; `comparable` is a
    recorded line without what two recorders may write differently.
    """

    reads: Callable[[Line], bool]
    case: Callable[[Path, Line], Case]
    comparable: Callable[[Line], Line] = as_recorded


def not_followed(version: str, followed: Sequence[str]) -> str | None:
    """Why this version is not one that the policies follow, or None."""
    if ".".join(version.split(".")[:2]) in followed:
        return None
    return f"version {version} is not followed, only {', '.join(followed)}"


def not_modelled(config: Line, options: frozenset[str]) -> str | None:
    """Why this configuration is not one that the policies follow, or None."""
    unknown = [key for key in config if key not in options]
    return f"option {', '.join(unknown)} is not modelled" if unknown else None
