"""The description of a scheduler for the rest of the project: one value, in the scheduler's own file.

Scenario, both worlds, replay and reports read a `SchedulerKind`; none of them knows a scheduler by name. Settings are
what a user may write, options are settings with everything solved from model and GPU. What holds of one setting (its
bounds, where its default comes from, what a calibration's probe makes of it) stands in its annotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, get_type_hints

from cbsim.errors import ScenarioError
from cbsim.policy.groups import Attention, Sight
from cbsim.policy.loop import Limits, Scheduler
from cbsim.policy.marks import AtLeast, Below, InProbe, ProbeSize, Solved

CHECK_POLICY = "CBSIM_CHECK_POLICY"  # set to 1: everything of a user's own scheduler is checked in every step
Padding = Literal["transformers", "vllm", "cbengine", "none"]
Method = Literal["ngram", "eagle", "draft_model"]
Role = Literal["prefill", "decode", "both"]
Count = Annotated[int, AtLeast(1)]
Natural = Annotated[int, AtLeast(0)]
Share = Annotated[float, AtLeast(0), Below(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The scheduler's part of a scenario. A kind's settings are a frozen dataclass that inherits this one: fields of
    plain types with defaults, bounds in the annotation, a text for each field (`#:` behind it or a docstring under it).
    `__post_init__` may raise SettingsError for values that contradict each other.
    """

    name: str  #: Which scheduler.


class SettingsError(ValueError):
    """A setting that cannot be used. `field` names it; the message gives its value and what would be allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def require(holds: bool, field: str, message: str) -> None:
    """Raise SettingsError unless a rule about a setting holds."""
    if not holds:
        raise SettingsError(field, message)


class Options(Protocol):
    """A scheduler's settings with all sizes solved. `num_blocks` counts every block of the cache."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def limits(self) -> Limits: ...


@dataclass(frozen=True, slots=True)
class Speculation:
    """Each row that samples brings `k` draft tokens, or by the rows of a step: `by_rows` has pairs of (most rows,
    drafts) in ascending order, the last of them also for more rows. `eagle` stands for all heads on the target's
    states, such as MTP modules. A runner that `skips` drafts does not propose those that no row would verify.
    """

    method: Method
    k: int
    by_rows: Sequence[tuple[int, int]] = ()
    skips: bool = True

    def drafts(self, rows: int) -> int:
        """Return the drafts that a step of so many rows proposes for each."""
        if not self.by_rows:
            return self.k
        return next((drafts for most, drafts in self.by_rows if rows <= most), self.by_rows[-1][1])

    @property
    def ahead(self) -> int:
        """The tokens behind a row for which it takes room in the cache, since a drafter will write them."""
        return 0 if self.method == "ngram" else self.k

    @property
    def slots(self) -> int:
        """The tokens of a step's budget that a row takes beside its own."""
        return int(self.method == "draft_model")

    @property
    def hashed_ahead(self) -> int:
        """The tokens behind a block that its content covers: a head reads the next token with each state."""
        return int(self.method == "eagle")


class Model(Protocol):
    """The shape of a model, as far as memory rules use it."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def dtype_bytes(self) -> int: ...
    @property
    def latent(self) -> object: ...
    @property
    def kv_dtype(self) -> str | None: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...


class Site(Protocol):
    """The model, GPU and cache of a scenario, from which a scheduler's sizes follow. Its methods raise ScenarioError if
    the model does not fit.

    `depth` steps are in flight, in a pipeline of `stages`. `block_size` is tokens; a block has `block_bytes` of KV in
    all layers on one of `gpus` GPUs, which share every layer. The model has `layers` layers and is made for
    `max_position` tokens at most; `attention` is that of the layers one by one, and again from the first if there are
    more. `gpu` is the GPU's name; a process sees `memory_bytes` on the empty device, of which the cache may fill
    `memory_fraction`, as the scheduler's rule counts it. `num_blocks` are the blocks of all layers that the scenario
    gives, or None for as many as fit. A layer that keeps a state by the rule `state_rule`, which is empty if none does,
    has one of `state_bytes` for a request, one that keeps tokens `token_bytes` for each, on one GPU. `role`: what a
    server does of requests that others do the rest of; None if there are no others.
    """

    depth: int
    stages: int
    block_size: int
    gpus: int
    block_bytes: int
    max_position: int
    layers: int

    @property
    def attention(self) -> Sequence[Attention]: ...

    gpu: str
    memory_bytes: int
    memory_fraction: float
    num_blocks: int | None
    state_rule: str
    state_bytes: int
    speculation: Speculation | None
    role: Role | None

    @property
    def token_bytes(self) -> int: ...
    @property
    def model(self) -> Model: ...

    def blocks(self, tokens: int, requests: int, layers: int | None = None, page_bytes: int = 0) -> int:
        """Return the blocks of the cache, of `layers` layers each or of all, perhaps of `page_bytes` each: those that
        the scenario gives, or as many as fit beside the weights and a step of `tokens` query tokens and `requests`
        sampling rows, by vLLM's rule.
        """

    def misfit(self, left_bytes: int, needed_bytes: int | None = None) -> ScenarioError:
        """Return the error for a cache that does not fit in `left_bytes`: one of the blocks given, or any."""


S = TypeVar("S", bound=Settings)
O = TypeVar("O", bound=Options)  # noqa: E741
M = TypeVar("M")


def resolved(settings: Settings, options: type[O], **solved: Any) -> O:
    """Return `options`, a dataclass that inherits that of `settings`, with the same values but for those solved."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return options(**(values | solved))


@cache
def _hints(settings: Any) -> Mapping[str, Any]:
    return get_type_hints(settings, include_extras=True)


def _marked(settings: Settings, mark: type[M]) -> Iterator[tuple[str, M]]:
    """Yield the settings whose annotation has a mark of this type, each with its mark."""
    kind: Any = type(settings)
    for name, hint in _hints(kind).items():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, mark):
                yield name, each


def pinned(settings: S, options: Options) -> S:
    """Return the settings with the pinned solved sizes, which stay as they are whatever the cache becomes."""
    return replace(
        settings, **{name: getattr(options, name) for name, mark in _marked(settings, Solved) if mark.pinned}
    )


def for_probe(settings: S, slots: int, tokens: int) -> S:
    """Return the settings of the same rules for a probe of `slots` slots and `tokens` query tokens a step."""
    defaults = {field.name: field.default for field in fields(settings)}
    sizes = {ProbeSize.SLOTS: slots, ProbeSize.STEP_TOKENS: max(tokens, slots), ProbeSize.PROMPT_TOKENS: max(tokens, 1)}
    values: dict[str, Any] = {}
    for name, mark in _marked(settings, InProbe):
        size = mark.value
        values[name] = defaults[name] if size is ProbeSize.DEFAULT else sizes.get(size, size)
    return replace(settings, **values)


def sources(settings: Settings, site: Site) -> dict[str, str]:
    """Return, for each setting that may be left open, the rule that solves it."""
    marks = {name: mark.source for name, mark in _marked(settings, Solved)}
    names = {"gpu": site.gpu, "name": settings.name}
    return {at: one.format(**names) if isinstance(one, str) else one(settings, site) for at, one in marks.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerKind(Generic[S, O]):
    """A scheduler: its name, what it is in a sentence, its settings, and how an instance comes from them.

    `padding` is the rule by which its steps are padded to captured CUDA graphs. `memory` is the rule that sizes the
    cache, where it is not vLLM's: the end of a sentence in which {gpu} stands for the GPU's name. `samples` gives how
    many texts of equal length a request is to this scheduler. `serves`: what layers may see. `rings`: what a row writes
    may then lie where tokens are that it still reads, so it has to read them before. `whole`: layers with sliding
    windows are cached whole like others, so that windows change only the time of steps; otherwise the scheduler lists
    every row of such a model, none is counted. `balance` names the rule by which requests are shared among servers that
    step together (machine.lockstep), None if the scheduler cannot be one of them. `drafts` are the methods by which it
    speculates. `hands_off`: it can be that of a server which hands requests to others, or gets them. `staged`: its
    rules for steps of a pipeline's stages are followed.
    """

    name: str
    about: str
    settings: type[S]
    resolve: Callable[[S, Site], O]
    make: Callable[[O], Scheduler]
    block_size: int = 16  # tokens, if the scenario does not give it
    least_block_size: int = 1
    padding: Padding = "none"
    padded: bool = False  # every row is computed at the length of the longest
    serves: tuple[Sight, ...] = (Sight.FULL,)
    rings: bool = False
    whole: bool = False
    memory: str | None = None
    samples: Callable[[S], int] = lambda _: 1
    balance: Callable[[S], str | None] = lambda _: None
    drafts: tuple[Method, ...] = ()
    hands_off: bool = False
    brings_first: bool = False  # the first output of a request that is handed over comes with its KV
    staged: bool = False

    @property
    def windows(self) -> bool:
        """Whether layers may see less than the whole sequence, in tables of their own."""
        return len(self.serves) > 1 and not self.whole
