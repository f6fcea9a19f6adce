"""Settings of Sarathi-Serve's schedulers, and the sizes that follow from them on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Generic, TypeVar

from cbsim.policy.kind import Count, Settings, Site, require
from cbsim.policy.loop import Limits
from cbsim.policy.marks import DEFAULT_IN_PROBE, SLOTS, STEP_TOKENS, InProbe, Solved

PROFILE_TOKENS = 8192  # query tokens of the step that sizes memory, where no option bounds a step
WATERMARK = 0.01  # the share of the blocks that admission leaves free, where sequences grow
SCHEDULE = ("low_chunk_size", "high_chunk_size", "chunk_schedule_max_tokens", "chunk_schedule_stages")
SWITCH = "enable_dynamic_chunking_schedule"
ROUNDING = 32  # tokens: chunk sizes of a schedule are multiples of it, or of the smallest
ProbeCount = Annotated[Count | None, DEFAULT_IN_PROBE]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(Settings):
    """What all schedulers of Sarathi-Serve have in common."""

    grows: ClassVar[bool] = True  # blocks are taken as they are needed; else the longest sequence is reserved for each
    max_num_seqs: Annotated[Count, SLOTS] = 128  #: Requests that may run.
    max_model_len: Annotated[Count | None, Solved("the model's, or what the cache holds"), DEFAULT_IN_PROBE] = None
    """Longest sequence, tokens; null: the model's, capped by what the cache holds of one."""

    @property
    def step_tokens(self) -> int | None:
        """The most tokens that prompts may have in a step, or None for no limit."""
        return None

    @property
    def probe_tokens(self) -> int:
        """The query tokens of the step that sizes memory."""
        return self.step_tokens or PROFILE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaSettings(ServeSettings):
    """Orca: iteration-level batching of whole prompts, the longest sequence reserved for each."""

    grows: ClassVar[bool] = False
    name: str = "orca"


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterTransformerSettings(ServeSettings):
    """FasterTransformer: a batch runs until its last request has ended, the longest sequence reserved for each."""

    grows: ClassVar[bool] = False
    name: str = "faster_transformer"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmV0Settings(ServeSettings):
    """vLLM as it began (V0): steps of whole prompts before steps that decode."""

    name: str = "vllm_v0"
    max_batched_tokens: Annotated[Count | None, Solved("max_model_len"), DEFAULT_IN_PROBE] = None
    """Prompt tokens in a step, and so the longest sequence; null, or more than that: max_model_len."""

    @property
    def step_tokens(self) -> int | None:
        return self.max_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleChunkingSettings(ServeSettings):
    """Simple chunking: steps of prompt chunks and steps that decode, by turns."""

    name: str = "simple_chunking"
    chunk_size: Annotated[Count, STEP_TOKENS] = 512  #: Prompt tokens in a step.

    @property
    def step_tokens(self) -> int:
        return self.chunk_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SarathiSettings(ServeSettings):
    """Sarathi: everybody decodes in every step, and chunks of prompts fill it up."""

    name: str = "sarathi"
    chunk_size: Annotated[Count, STEP_TOKENS] = 512  #: Tokens of a step: decoding rows, then as many of prompt chunks.
    enable_dynamic_chunking_schedule: Annotated[bool, InProbe(False)] = False
    """Chunks that become smaller the further a prompt has been read, in place of chunk_size."""
    low_chunk_size: ProbeCount = None  #: With the schedule: the last chunk size.
    high_chunk_size: ProbeCount = None  #: With the schedule: the first chunk size.
    chunk_schedule_max_tokens: ProbeCount = None
    """With the schedule: prompt tokens over which its stages stretch; what lies beyond belongs to the last."""
    chunk_schedule_stages: ProbeCount = None  #: With the schedule: how many chunk sizes it has.

    def __post_init__(self) -> None:
        scheduled = self.enable_dynamic_chunking_schedule
        for name in SCHEDULE:
            value = getattr(self, name)
            require(not scheduled or value is not None, name, f"got null, must be given with {SWITCH}")
            require(scheduled or value is None, name, f"got {value}, must be left out without {SWITCH}")
        low, high = self.low_chunk_size or 0, self.high_chunk_size or 0
        require(low <= high, "low_chunk_size", f"got {low}, must be <= high_chunk_size ({high})")

    @property
    def step_tokens(self) -> int:
        return max(self.chunk_sizes)

    @property
    def probe_tokens(self) -> int:
        return max(self.chunk_size, self.high_chunk_size or 0)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """The chunk size by stage: equally spaced from high to low, in whole tokens, half to even; or the only one."""
        low, high, stages = self.low_chunk_size, self.high_chunk_size, self.chunk_schedule_stages
        if not self.enable_dynamic_chunking_schedule or low is None or high is None or stages is None:
            return (self.chunk_size,)
        unit = min(ROUNDING, low)
        spaced = [low + (high - low) * i // max(1, stages - 1) for i in range(stages)]
        return tuple(round(size / unit) * unit for size in reversed(spaced))

    @property
    def stage_tokens(self) -> int:
        """The prompt tokens that a stage of the schedule covers."""
        return -(-(self.chunk_schedule_max_tokens or 1) // (self.chunk_schedule_stages or 1))


S = TypeVar("S", bound=ServeSettings)


@dataclass(frozen=True, slots=True)
class ServeOptions(Generic[S]):
    """A scheduler of Sarathi-Serve with its sizes. All of `num_blocks` are usable. Each of `stages` of a pipeline has a
    batch of its own.
    """

    settings: S
    block_size: int
    num_blocks: int
    max_model_len: int
    stages: int = 1

    @property
    def limits(self) -> Limits:
        """The limits: a step's prompt tokens or its slots; without a bound, the blocks of the longest sequence."""
        slots, tokens = self.settings.max_num_seqs, self.settings.step_tokens
        if tokens is None:
            return Limits(slots=slots, longest=self.max_model_len, table=-(-self.max_model_len // self.block_size))
        return Limits(slots=slots, tokens=max(tokens, slots), longest=self.max_model_len)


def watermark_blocks(num_blocks: int) -> int:
    """Return the blocks that admission leaves free where sequences grow."""
    return int(WATERMARK * num_blocks)


def resolve(settings: S, site: Site, tokens: int | None = None) -> ServeOptions[S]:
    """Return the options: a cache beside a step of `tokens`, the longest sequence it holds. Raises SettingsError."""
    slots, grows = settings.max_num_seqs, settings.grows
    blocks = site.blocks(max(tokens or settings.probe_tokens, slots), slots)
    most = (blocks - watermark_blocks(blocks) * grows) * site.block_size
    longest = settings.max_model_len or min(site.max_position, most)
    message = f"got {longest}, must be <= {most}: every request reserves it, and the cache has {blocks} blocks"
    require(longest <= most or grows, "max_model_len", message)
    return ServeOptions(settings, site.block_size, blocks, longest, site.stages)


def resolve_vllm_v0(settings: VllmV0Settings, site: Site) -> ServeOptions[VllmV0Settings]:
    """Return the options. A step has whole prompts, recomputed ones too: no sequence is longer than a step."""
    longest = settings.max_model_len or site.max_position
    tokens = min(settings.max_batched_tokens or longest, longest)
    options = resolve(settings, site, tokens)
    longest = min(tokens, options.max_model_len)
    return replace(options, max_model_len=longest, settings=replace(settings, max_batched_tokens=longest))
