"""What the rest of the project has to know of a scheduler: one value, in the scheduler's own file.

Scenario, both worlds, replay and reports ask a `SchedulerKind`; none of them knows a scheduler by name. Settings are
what a user may write, options are settings with everything solved from model and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from cbsim.policy.groups import Attention
from cbsim.policy.limits import Limits
from cbsim.policy.loop import Scheduler

Padding = Literal["transformers", "vllm", "cbengine", "none"]


# -- settings ---------------------------------------------------------------------------------------------------------


class AtLeast(NamedTuple):
    """A bound in the annotation of a setting: the value is not smaller."""

    least: float


class Below(NamedTuple):
    """A bound in the annotation of a setting: the value is smaller."""

    bound: float


class AsText(NamedTuple):
    """In the annotation of a setting: a number that a user writes is taken as text, 0.33 as "0.33"."""


Count = Annotated[int, AtLeast(1)]
Natural = Annotated[int, AtLeast(0)]
Share = Annotated[float, AtLeast(0), Below(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a scenario says of its scheduler. A kind's settings are a frozen dataclass that inherits this one: fields of
    plain types with defaults, bounds in the annotation, under each field a docstring. `__post_init__` may raise
    SettingsError for values that contradict each other.
    """

    name: str
    """Which scheduler."""


class SettingsError(ValueError):
    """A setting that cannot be used. `field` names it; the text says what it is and what would be allowed."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


# -- options ----------------------------------------------------------------------------------------------------------


class Options(Protocol):
    """Settings with all sizes solved. `num_blocks` counts every block of the cache."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def limits(self) -> Limits: ...


class Size(NamedTuple):
    """A solution: query tokens in a step, cache blocks."""

    max_batch_tokens: int
    num_blocks: int


class Sectors(NamedTuple):
    """What transformers 5.23 cuts its cache in: each of `pages` pages, which are blocks of `layers` layers; at most
    `tokens` tokens lie in one, those of the smallest blocks; `kinds` of layers share them.
    """

    pages: int
    layers: int
    tokens: int
    kinds: int


class Site(Protocol):
    """What a scheduler's sizes follow from: model, GPU and cache of a scenario. Its methods raise ScenarioError if the
    model does not fit.
    """

    @property
    def depth(self) -> int:
        """Steps in flight."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def gpus(self) -> int:
        """GPUs that share every layer."""

    @property
    def block_bytes(self) -> int:
        """KV of a block on one GPU."""

    @property
    def max_position(self) -> int:
        """Longest sequence that the model is made for, tokens."""

    @property
    def layers(self) -> int:
        """Layers of the model."""

    @property
    def attention(self) -> Sequence[Attention]:
        """What they see, layer by layer, and again from the first if there are more."""

    @property
    def gpu(self) -> str:
        """What the GPU is called."""

    @property
    def memory_bytes(self) -> int:
        """Its memory, as a process sees it on the empty device."""

    def blocks(self, tokens: int, requests: int, layers: int | None = None) -> int:
        """Blocks of the cache: those that the scenario gives, or as many as fit beside the weights and a step of so
        many query tokens and sampling rows, by vLLM's rule. A block is of so many layers, or of all.
        """

    def transformers_size(
        self, max_blocks_per_request: int, max_batch_tokens: int | None, layers: int, groups: int
    ) -> Size:
        """The solution of transformers 5.17 for the sizes that the scenario leaves open, so many layers in a group."""

    def transformers_sectors(
        self, sectors: Sectors, max_blocks_per_request: int, max_batch_tokens: int, max_requests: int
    ) -> Size:
        """That of 5.23 in pages: of the blocks of all layers that are given, or as many as fit, in whole sectors."""


S = TypeVar("S", bound=Settings)
O = TypeVar("O", bound=Options)  # noqa: E741


def resolved(settings: Settings, options: type[O], **solved: Any) -> O:
    """`options`, a dataclass that inherits that of `settings`, with the same values but for those solved."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return options(**(given | solved))


# -- the kind ---------------------------------------------------------------------------------------------------------


def _as_they_are(settings: S, options: Any) -> S:
    del options
    return settings


def _without_reasons(settings: S, site: Site) -> Mapping[str, str]:
    del settings, site
    return {}


def _one_answer(settings: Settings) -> int:
    del settings
    return 1


def _unchanged(settings: S, seats: int, tokens: int) -> S:
    del seats, tokens
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerKind(Generic[S, O]):
    """A scheduler: its name, what it is in a sentence, its settings, and how an instance comes from them.

    `padding` is the rule by which its steps are padded to captured CUDA graphs. `settled` writes sizes that were solved
    into the settings, so that a smaller cache does not change them. `widened` gives settings for a probe: so many
    seats, so many query tokens a step, nothing shared between requests. `reasons` says of settings that may be left
    open by which rule they are solved. `samples` gives how many texts of equal length a request is to this scheduler.
    `windows`: layers may see less than the whole sequence; then it lists every row, none is counted. `rings`: what a
    row writes may then lie where tokens are that it still reads, so it has to read them before.
    """

    name: str
    about: str
    settings: type[S]
    resolve: Callable[[S, Site], O]
    make: Callable[[O], Scheduler]
    block_size: int = 16  # tokens, if the scenario does not say
    least_block_size: int = 1
    padding: Padding = "none"
    padded: bool = False  # every row is computed at the length of the longest
    windows: bool = False
    rings: bool = False
    settled: Callable[[S, O], S] = _as_they_are
    widened: Callable[[S, int, int], S] = _unchanged
    reasons: Callable[[S, Site], Mapping[str, str]] = _without_reasons
    samples: Callable[[S], int] = _one_answer
