"""What the schedulers of Sarathi-Serve may be told, and what they make of it on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from cbsim.policy.kind import Count, Settings, SettingsError, Site, resolved
from cbsim.policy.limits import Limits

PROFILE_TOKENS = 8192
"""Query tokens of the step that sizes memory, where no option bounds a step."""
WATERMARK = 0.01
"""Share of the blocks that admission leaves free, where sequences grow."""
SCHEDULE = ("low_chunk_size", "high_chunk_size", "chunk_schedule_max_tokens", "chunk_schedule_stages")
ROUNDING = 32  # tokens: chunk sizes of a schedule are multiples of it, or of the smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(Settings):
    """What all schedulers of Sarathi-Serve may be told."""

    max_num_seqs: Count = 128
    """Requests that may run."""
    max_model_len: Count | None = None
    """Longest sequence, tokens; null: the model's, capped by what the cache holds of one."""
    pipeline_stages: Count = 1
    """Stages of a pipeline, each with a batch of its own; 1 in every run: of more, only the decisions are followed."""

    def __post_init__(self) -> None:
        if self.pipeline_stages != 1:
            text = f"got {self.pipeline_stages}, must be 1: neither the simulated machine nor the engine has a pipeline"
            raise SettingsError("pipeline_stages", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaSettings(ServeSettings):
    """Orca: iteration-level batching of whole prompts, the longest sequence reserved for each."""

    name: str = "orca"


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterTransformerSettings(ServeSettings):
    """FasterTransformer: a batch runs until its last request has ended, the longest sequence reserved for each."""

    name: str = "faster_transformer"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmV0Settings(ServeSettings):
    """vLLM as it began (V0): steps of whole prompts before steps that decode."""

    name: str = "vllm_v0"
    max_batched_tokens: Count | None = None
    """Prompt tokens in a step, and so the longest sequence; null, or more than that: max_model_len."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleChunkingSettings(ServeSettings):
    """Simple chunking: steps of prompt chunks and steps that decode, by turns."""

    name: str = "simple_chunking"
    chunk_size: Count = 512
    """Prompt tokens in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SarathiSettings(ServeSettings):
    """Sarathi: everybody decodes in every step, and chunks of prompts fill it up."""

    name: str = "sarathi"
    chunk_size: Count = 512
    """Tokens up to which chunks of prompts fill a step, decoding rows included."""
    enable_dynamic_chunking_schedule: bool = False
    """Chunks that become smaller the further a prompt has been read, in place of chunk_size."""
    low_chunk_size: Count | None = None
    """With the schedule: the last chunk size."""
    high_chunk_size: Count | None = None
    """With the schedule: the first chunk size."""
    chunk_schedule_max_tokens: Count | None = None
    """With the schedule: prompt tokens over which its stages stretch; what lies beyond belongs to the last."""
    chunk_schedule_stages: Count | None = None
    """With the schedule: how many chunk sizes it has."""

    def __post_init__(self) -> None:
        ServeSettings.__post_init__(self)
        for name in SCHEDULE:
            given = getattr(self, name)
            if self.enable_dynamic_chunking_schedule and given is None:
                raise SettingsError(name, "got null, must be given with enable_dynamic_chunking_schedule")
            if not self.enable_dynamic_chunking_schedule and given is not None:
                raise SettingsError(name, f"got {given}, must be left out without enable_dynamic_chunking_schedule")
        low, high = self.low_chunk_size or 0, self.high_chunk_size or 0
        if low > high:
            raise SettingsError("low_chunk_size", f"got {low}, must be <= high_chunk_size ({high})")


class ServeOptions(Protocol):
    """What all of them read. `num_blocks` are all usable."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def pipeline_stages(self) -> int: ...
    @property
    def limits(self) -> Limits: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaOptions(OrcaSettings):
    """All resolved."""

    block_size: int
    num_blocks: int
    max_model_len: int

    def __post_init__(self) -> None:
        """Recorded schedulers have pipelines."""

    @property
    def limits(self) -> Limits:
        return _whole(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterTransformerOptions(FasterTransformerSettings):
    """All resolved."""

    block_size: int
    num_blocks: int
    max_model_len: int

    def __post_init__(self) -> None:
        """As above."""

    @property
    def limits(self) -> Limits:
        return _whole(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmV0Options(VllmV0Settings):
    """All resolved. Who is preempted is read again in one step, so no sequence is longer than a step."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_batched_tokens: int

    def __post_init__(self) -> None:
        """As above."""

    @property
    def limits(self) -> Limits:
        return _limits(self, self.max_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleChunkingOptions(SimpleChunkingSettings):
    """All resolved."""

    block_size: int
    num_blocks: int
    max_model_len: int

    def __post_init__(self) -> None:
        """As above."""

    @property
    def limits(self) -> Limits:
        return _limits(self, self.chunk_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SarathiOptions(SarathiSettings):
    """All resolved."""

    block_size: int
    num_blocks: int
    max_model_len: int

    def __post_init__(self) -> None:
        """As above."""

    @property
    def limits(self) -> Limits:
        return _limits(self, max(self.chunk_sizes))

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """By stage: equally spaced from high to low, cut to whole tokens, rounded half to even; or the only one."""
        low, high, stages = self.low_chunk_size, self.high_chunk_size, self.chunk_schedule_stages
        if not self.enable_dynamic_chunking_schedule or low is None or high is None or stages is None:
            return (self.chunk_size,)
        unit = min(ROUNDING, low)
        spaced = [low + (high - low) * i // max(1, stages - 1) for i in range(stages)]
        return tuple(round(size / unit) * unit for size in reversed(spaced))

    @property
    def stage_tokens(self) -> int:
        """Prompt tokens that a stage of the schedule stretches over."""
        return -(-(self.chunk_schedule_max_tokens or 1) // (self.chunk_schedule_stages or 1))


def _limits(options: ServeOptions, tokens: int | None) -> Limits:
    """A step has the tokens that prompts may have in it, or a token of everybody who runs."""
    most = None if tokens is None else max(tokens, options.max_num_seqs)
    return Limits(seats=options.max_num_seqs, tokens=most, longest=options.max_model_len)


def _whole(options: ServeOptions) -> Limits:
    """Of a server that reserves the longest sequence for everybody; a step may have any prompts."""
    return _limits(options, None)._replace(table=-(-options.max_model_len // options.block_size))


S = TypeVar("S", bound=ServeSettings)


def watermark_blocks(num_blocks: int) -> int:
    """Blocks that admission leaves free where sequences grow."""
    return int(WATERMARK * num_blocks)


def _sizes(settings: ServeSettings, site: Site, tokens: int, *, grows: bool) -> dict[str, int]:
    """A cache beside a step of so many query tokens, and the longest sequence. Raises SettingsError if that is reserved
    for each and the cache does not hold it.
    """
    blocks = site.blocks(max(tokens, settings.max_num_seqs), settings.max_num_seqs)
    most = (blocks - watermark_blocks(blocks) * grows) * site.block_size
    longest = settings.max_model_len or min(site.max_position, most)
    if longest > most and not grows:
        text = f"got {longest}, must be <= {most}: every request reserves it, and the cache has {blocks} blocks"
        raise SettingsError("max_model_len", text)
    return {"block_size": site.block_size, "num_blocks": blocks, "max_model_len": longest}


def resolve_orca(settings: OrcaSettings, site: Site) -> OrcaOptions:
    return resolved(settings, OrcaOptions, **_sizes(settings, site, PROFILE_TOKENS, grows=False))


def resolve_faster_transformer(settings: FasterTransformerSettings, site: Site) -> FasterTransformerOptions:
    return resolved(settings, FasterTransformerOptions, **_sizes(settings, site, PROFILE_TOKENS, grows=False))


def resolve_vllm_v0(settings: VllmV0Settings, site: Site) -> VllmV0Options:
    longest = settings.max_model_len or site.max_position
    tokens = min(settings.max_batched_tokens or longest, longest)
    sizes = _sizes(settings, site, tokens, grows=True)
    sizes["max_model_len"] = sizes["max_batched_tokens"] = min(tokens, sizes["max_model_len"])
    return resolved(settings, VllmV0Options, **sizes)


def resolve_simple_chunking(settings: SimpleChunkingSettings, site: Site) -> SimpleChunkingOptions:
    return resolved(settings, SimpleChunkingOptions, **_sizes(settings, site, settings.chunk_size, grows=True))


def resolve_sarathi(settings: SarathiSettings, site: Site) -> SarathiOptions:
    tokens = max(settings.chunk_size, settings.high_chunk_size or 0)
    return resolved(settings, SarathiOptions, **_sizes(settings, site, tokens, grows=True))


def reasons(settings: ServeSettings, site: Site) -> dict[str, str]:
    """Where what the settings leave open comes from."""
    del settings, site
    return {"max_model_len": "the model's, or what the cache holds", "max_batched_tokens": "max_model_len"}


def widened(settings: S, seats: int, tokens: int) -> S:
    """Other seats, for a probe; its prompts decide how many tokens a step has."""
    del tokens
    return replace(settings, max_num_seqs=seats, max_model_len=None)


def widened_v0(settings: VllmV0Settings, seats: int, tokens: int) -> VllmV0Settings:
    """The same; a step is as long as the longest sequence."""
    return replace(widened(settings, seats, tokens), max_batched_tokens=None)


def widened_chunks(settings: SimpleChunkingSettings, seats: int, tokens: int) -> SimpleChunkingSettings:
    """The same rules with chunks of so many tokens."""
    return replace(widened(settings, seats, tokens), chunk_size=max(tokens, seats))


def widened_sarathi(settings: SarathiSettings, seats: int, tokens: int) -> SarathiSettings:
    """The same rules with one chunk size, in which every seat decodes and so many tokens of prompts are read."""
    return replace(
        widened(settings, seats, tokens),
        chunk_size=max(tokens, seats),
        enable_dynamic_chunking_schedule=False,
        low_chunk_size=None,
        high_chunk_size=None,
        chunk_schedule_max_tokens=None,
        chunk_schedule_stages=None,
    )
