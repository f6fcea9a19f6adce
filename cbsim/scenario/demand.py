"""The fields of a scenario's workload: what is sent, and when; a reader or generator of cbsim/workload makes it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from cbsim.scenario import catalog, documents
from cbsim.scenario.fields import By, ByKey, DataPath, Frozen, Many, Number, Positive, Real, Whole, complaint, one_of

# -- lengths ----------------------------------------------------------------------------------------------------------

R = TypeVar("R", "Range", "Lognormal")


def _low_to_high(part: R) -> R:
    if part.high is not None and part.high < part.low:
        raise complaint(f"got {part.high}, must be >= low ({part.low})", "high")
    return part


class Range(Frozen):
    """Whole numbers of tokens from low to high, all equally likely, both ends included."""

    low: Number  #: Least tokens.
    high: Number  #: Most tokens.

    _in_order = model_validator(mode="after")(_low_to_high)


class Lognormal(Frozen):
    """Log-normal lengths, rounded, then clipped to low .. high (which moves the mean that is given here)."""

    mean: Positive  #: Mean of the distribution before clipping, tokens.
    sigma: Annotated[Real, Field(ge=0, le=5)]  #: Standard deviation of the logarithm.
    low: Number = 1  #: Shorter draws become this many tokens.
    high: Number | None = None  #: Longer draws become this many tokens; null for no bound.

    _in_order = model_validator(mode="after")(_low_to_high)


class Sample(Frozen):
    """Draws with replacement from given lengths: either `values`, or a `column` of the CSV file at `path`."""

    values: Annotated[Many[Number], Field(max_length=5000)] = ()  #: Lengths in tokens; more of them belong into a file.
    path: DataPath | None = None  #: CSV file with a header.
    column: str | None = None  #: Its column of lengths in tokens.

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.values) == bool(self.path) or bool(self.path) != bool(self.column):
            raise complaint("needs either `values`, or `path` and `column`")
        return self


class Uniform(Frozen):
    """Uniform lengths."""

    uniform: Range  #: Bounds in tokens.


class LognormalLength(Frozen):
    """Log-normal lengths."""

    lognormal: Lognormal  #: Mean and spread.


class Empirical(Frozen):
    """Lengths drawn from a sample."""

    empirical: Sample  #: Where the sample comes from.


Length = Annotated[Number | Uniform | LognormalLength | Empirical, ByKey("a number of tokens")]
LENGTH_TABLES = "lengths"


def _in_order(quantiles: tuple[int, ...]) -> tuple[int, ...]:
    for before, after in pairwise(quantiles):
        if after < before:
            raise complaint(f"got {after} after {before}, expected quantiles in order")
    return quantiles


Quantiles = Annotated[Many[Number], Field(min_length=2), AfterValidator(_in_order)]


class LengthTable(Frozen):
    """A table of length quantiles at equal steps from the least to the most. Requests are grouped by their prompts into
    groups of equal size; `output_tokens` holds the quantiles of each, that of the shortest prompts first.
    """

    name: str
    source: str
    most_tokens: Whole  #: Prompt and output together are no longer.
    prompt_tokens: Quantiles
    output_tokens: Annotated[Many[Quantiles], Field(min_length=1)]


def length_table(name: str) -> LengthTable:
    """Read the distribution of that name, or in the file of that path. Raises ScenarioError."""
    return documents.read(catalog.shape(LENGTH_TABLES, name)).checked(LengthTable)


LengthsName = Annotated[str, one_of(partial(catalog.names, LENGTH_TABLES))]

Rate = Annotated[Real, Field(ge=1e-9)]  # a request in 30 years


class AtOnce(Frozen):
    """All requests arrive at the start."""

    kind: Literal["at_once"]


class Constant(Frozen):
    """Evenly spaced arrivals, the first at the start."""

    kind: Literal["constant"]
    rate_per_s: Rate  #: Requests a second.


class Poisson(Frozen):
    """Independent exponential gaps."""

    kind: Literal["poisson"]
    rate_per_s: Rate  #: Mean requests a second.


class Gamma(Frozen):
    """Independent gamma gaps, as vLLM and aiperf define burstiness."""

    kind: Literal["gamma"]
    rate_per_s: Rate  #: Mean requests a second.
    burstiness: Annotated[Real, Field(ge=0.001, le=1e6)]
    """Shape of the gamma: 1 is Poisson, less is burstier; the gaps' coefficient of variation is its root's inverse."""


class ClosedLoop(Frozen):
    """A fixed number of users, each with one request at a time, which is over when all its samples are."""

    kind: Literal["closed_loop"]
    users: Number  #: Requests in progress or being thought about.
    think_s: Annotated[Real, Field(ge=0)] = 0.0
    """Seconds from the end of a request to the user's next one, or their mean."""
    think: Literal["constant", "exponential"] = "constant"
    """Are all of them think_s, or exponentially distributed with that mean?"""
    duration_s: Positive | None = None
    """No request is sent later, even if fewer than `requests` have been; null for no bound."""


Arrivals = Annotated[AtOnce | Constant | Poisson | Gamma | ClosedLoop, By("kind")]
MOST_REQUESTS = 100_000_000  # of a run, samples of one prompt counted each


class Synthetic(Frozen):
    """Requests drawn from distributions."""

    kind: Literal["synthetic"]
    requests: Annotated[Whole, Field(ge=1, le=MOST_REQUESTS)]
    """How many requests in all. A run takes about 1.3 KB of memory for each, and for each further sample."""
    samples: Annotated[Whole, Field(ge=1, le=10_000)] = 1
    """Answers to each request: so many requests with the same prompt, sent together, each with an output of its own."""
    prompt_tokens: Length | None = None
    """Prompt length: a number, or {uniform}, {lognormal}, {empirical}. It includes the shared prefix."""
    output_tokens: Length | None = None  #: Output length: a number, or {uniform}, {lognormal}, {empirical}.
    lengths: LengthsName | None = None
    """Prompt and output lengths together, in place of the two above: a name in scenarios/lengths."""
    arrivals: Arrivals = AtOnce.model_construct(kind="at_once")  #: When they arrive.
    shared_prefix_tokens: Annotated[Whole, Field(ge=0)] = 0
    """All prompts begin with the same so many tokens (a system prompt)."""
    shared_prefixes: Number = 1  #: So many different ones of that length; a request has any, all equally likely.
    stop_early: bool = False  #: The end is a stop token, a surprise to the scheduler, which knows `max_tokens` only.
    max_tokens: Number | None = None
    """No output is longer; with stop_early also the limit that the scheduler knows (null: the longest drawn)."""
    priorities: Annotated[Many[Whole], Field(min_length=1)] | None = None
    """Priorities drawn from, all equally likely; the least is the most urgent. Null: all 0."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.requests * self.samples > MOST_REQUESTS:
            most = MOST_REQUESTS // self.requests
            raise complaint(f"got {self.samples:,}, must be <= {most:,} for {self.requests:,} requests", "samples")
        for field in ("prompt_tokens", "output_tokens"):
            drawn = getattr(self, field) is not None
            if drawn and self.lengths is not None:
                remedy = "leave out lengths, or prompt_tokens and output_tokens (or null)"
                raise complaint(f"is given by lengths ({self.lengths}) too; {remedy}", field)
            if not drawn and self.lengths is None:
                raise complaint("is required, or `lengths` in place of prompt_tokens and output_tokens", field)
        return self


class Trace(Frozen):
    """A recorded file of requests: the fields that all traces share."""

    path: DataPath  #: The file: beside the scenario, or below $CBSIM_DATA or the project's data folder.
    limit: Number | None = None  #: Read no more than so many of its first requests; null for all.


class Timed(Trace):
    """A trace with arrival times."""

    time_scale: Positive = 1.0  #: All times of the trace are multiplied by it: 2 halves the load.


class Azure(Timed):
    """Azure's 2023 traces: TIMESTAMP, ContextTokens, GeneratedTokens. The first request arrives at 0."""

    kind: Literal["azure"]


class Mooncake(Timed):
    """Mooncake's JSONL: timestamp (ms), input_length, output_length, hash_ids of 512-token prefix blocks."""

    kind: Literal["mooncake"]
    spread: bool = True
    """Timestamps on a 3 s grid: spread the requests of a cell evenly at random over its 3 s, order kept."""


Column = Annotated[str, Field(min_length=1)] | None


class CsvColumns(Frozen):
    """Names of a CSV file's columns. Null: the column of our own name, else the only one with a common name."""

    arrival: Column = None
    """Seconds from the start of the run, or times such as 2023-11-16 18:17:03.97, the first of which is the start."""
    prompt: Column = None  #: Tokens of the prompt.
    output: Column = None  #: Tokens that are generated.
    max_tokens: Column = None  #: Limit that the scheduler knows; without such a column the output.
    priority: Column = None  #: The least is the most urgent; without such a column 0.
    id: Column = None  #: Text, each once; without such a column the number of the row, from 0.


class Csv(Timed):
    """A CSV file of requests with a header; what its columns are called can be said."""

    kind: Literal["csv"]
    columns: CsvColumns = CsvColumns.model_construct()  #: Which column holds what.


class Lengths(Trace):
    """A CSV file with columns num_prefill_tokens, num_decode_tokens; arrivals are generated."""

    kind: Literal["lengths"]
    arrivals: Arrivals = AtOnce.model_construct(kind="at_once")  #: When they arrive.


class Golden(Trace):
    """Requests of a recorded scheduler test of vLLM or transformers, with prompt contents, aborts and stop tokens."""

    kind: Literal["golden"]
    step_s: Positive = 0.01  #: The transformers files count arrivals in loop passes: so many seconds each.


class Agentic(Timed):
    """Sessions of turns, each with the whole conversation as its context; a turn comes its delay after the last one."""

    kind: Literal["agentic"]
    limit: Number | None = None  #: Read no more than so many of its first sessions; null for all.


class VllmBench(Timed):
    """Requests of a recorded vLLM run: JSON lines of id, arrival_ns, input_toks, output_toks, prompt_block_runs."""

    kind: Literal["vllm_bench"]
    recorded: DataPath | None = None
    """requests.jsonl of the run: requests arrive when its engine took them in (queued_ts). Null: as they were sent."""


class Served(Trace):
    """The requests that clients sent to a served session: arrivals.jsonl of its run directory."""

    kind: Literal["served"]


Demand = Annotated[Synthetic | Azure | Mooncake | Csv | Lengths | Golden | Agentic | VllmBench | Served, By("kind")]


def is_open(workload: Mapping[str, Any]) -> bool:
    """True if a workload, given by its fields, is open: arrivals over time that do not depend on the server."""
    arrivals = (workload.get("arrivals") or {}).get("kind")
    timed = workload.get("kind") in ("azure", "mooncake", "csv", "golden", "vllm_bench")
    return timed or arrivals in ("constant", "poisson", "gamma")


PRESETS: dict[str, tuple[float, float]] = {
    "llama3.1-8b-server": (2.0, 0.1),
    "llama3.1-8b-interactive": (0.5, 0.03),
    "llama2-70b-server": (2.0, 0.2),
    "llama2-70b-interactive": (0.45, 0.04),
    "llama3.1-405b-server": (6.0, 0.175),
    "llama3.1-405b-interactive": (4.5, 0.08),
    "deepseek-r1-server": (2.0, 0.08),
    "deepseek-r1-interactive": (1.5, 0.015),
}
"""MLPerf inference limits for the 99th percentile: (time to first token, time per output token), seconds."""

Preset = Annotated[str, one_of(lambda: PRESETS), Field(json_schema_extra={"enum": [*PRESETS]})]


class Slo(Frozen):
    """Limits that a request has to keep, all of them, to count as good. Null: no limit."""

    preset: Preset | None = None  #: MLPerf's limits for ttft_s and tpot_s, where they are not given.
    ttft_s: Positive | None = None  #: Time to first token, seconds.
    tpot_s: Positive | None = None  #: Time per output token after the first, seconds.
    e2e_s: Positive | None = None  #: Whole request, seconds.

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        name = data.get("preset") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in PRESETS:
            return data
        limits = dict(zip(("ttft_s", "tpot_s"), PRESETS[name], strict=True))
        return data | {field: limit for field, limit in limits.items() if data.get(field) is None}
