"""The cost model `fitted`: step time as a sum of terms in what the step does, with coefficients measured on an engine.

Matrix products over few tokens wait for the weights and over many for arithmetic, so their time is flat and then
steep, with steps between: it is interpolated linearly between measured sizes (`Curve`). So is the time of what decoding
rows read. All other terms are proportional.

The cost model `constant`: a fixed time plus linear terms. It is the textbook's, and the clock of the golden traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Final, NamedTuple

from cbsim.cost.base import NS, CpuCost, cpu_cost, nanoseconds
from cbsim.cost.table import Ladder
from cbsim.policy.plan import StepPlan
from cbsim.policy.value import value
from cbsim.scenario.costs import ConstantSettings, CurvePoint, FittedSettings
from cbsim.scenario.scenario import Scenario

TERMS = (  # in the order of FittedCost
    *("per_chunk", "per_prefill_token", "per_cached_token", "per_prefill_attention"),
    *("per_decode_row", "per_context_token", "h2d", "d2h", "per_uneven_token"),
)
MOST_SPLITS: Final = 64  # the engine's reduction holds this many partial outputs of a head in registers


class Work(NamedTuple):
    """The counts of a step that its time depends on.

    `tokens` are the query tokens computed, padding to a CUDA graph included; `cached` the tokens in the cache before
    its chunks; `pairs` the query tokens of the chunks times the KV tokens that each attends to, itself included;
    `context` the KV tokens that decoding rows read, their own included, `longest` those of the row that reads most.
    `decodes` and all else count padding, too.
    """

    tokens: int
    chunks: int
    prefill_tokens: int
    cached: int
    pairs: float
    decodes: int
    context: int
    longest: int


def work(plan: StepPlan, tokens: int) -> Work:
    """Return the counts of `plan` when `tokens` query tokens are computed."""
    planned = plan.work
    prefill, cached, pairs = 0, 0, 0.0
    for c in planned.chunks:
        width = c.tokens + c.padding
        prefill += width
        cached += c.start
        pairs += width * c.start + width * (width + 1) / 2
    rows = planned.decodes + planned.padding_rows
    context = planned.decode_context + rows + planned.padding_context
    longest = planned.longest_context + 1 if planned.decodes else 0
    return Work(tokens, len(planned.chunks), prefill, cached, pairs, tokens - prefill, context, longest)


def splits(times: float) -> int:
    """Return into how many parts the engine's attention splits every decoding row on a device that `times` as many rows
    would fill: the power of two that is nearest, in ratio.
    """
    return min(1 << max(0, round(log2(times))), MOST_SPLITS)


def uneven(decodes: float, context: float, longest: float, unsplit_rows: float) -> float:
    """Return the KV tokens that the longest part of a decoding row has beyond an even share, which is all `context`
    over the `unsplit_rows` that fill the device: attention ends with its longest part. 0 if that number is unknown.
    """
    times = unsplit_rows / decodes if decodes else 0.0
    return max(0.0, longest / splits(times) - context / unsplit_rows) if times else 0.0


class Curve:
    """A piecewise linear curve through (at[i], values[i]), `at` ascending: constant below the first point, with the
    last slope above the last, never negative; 0 without points.
    """

    def __init__(self, at: Sequence[float], values: Sequence[float]) -> None:
        points = zip(at, values, strict=True)
        self._ladder = Ladder(((x,), value) for x, value in points) if at else None

    def __call__(self, x: float) -> float:
        return max(0.0, self._ladder(x)) if self._ladder else 0.0


@value(frozen=True)
class FittedCost:
    """A cost model with coefficients in ns: one, or a curve, for each count in `Work`, and times of every step."""

    cpu_ns: CpuCost
    launch_ns: int  # CPU time to launch the kernels of a step one by one
    unsplit_rows: float
    base: float
    query_tokens: Curve
    context_tokens: Curve
    per_chunk: float
    per_prefill_token: float
    per_cached_token: float
    per_prefill_pair: float
    per_decode_row: float
    per_context_token: float
    h2d: float
    d2h: float
    per_uneven_token: float

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        if not plan.work.rows:
            return 0, 0, 0
        does = work(plan, tokens)
        kernels = self.base + self.query_tokens(does.tokens) + self.context_tokens(does.context)
        kernels += self.per_decode_row * does.decodes + self.per_context_token * does.context
        kernels += self.per_uneven_token * uneven(does.decodes, does.context, does.longest, self.unsplit_rows)
        if does.chunks:
            kernels += self.per_chunk * does.chunks + self.per_prefill_token * does.prefill_tokens
            kernels += self.per_cached_token * does.cached + self.per_prefill_pair * does.pairs
        return round(self.h2d), round(kernels), round(self.d2h)


@value(frozen=True)
class ConstantCost:
    """A linear cost model, nanoseconds. `per_context` counts KV tokens after the step; an empty step takes no time."""

    cpu_ns: CpuCost
    step: float
    per_token: float = 0.0
    per_prefill_token: float = 0.0
    per_context: float = 0.0
    launch_ns: int = 0

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        if not tokens:
            return 0, 0, 0
        work = plan.work
        time = self.step + self.per_token * tokens
        if self.per_prefill_token:
            time += self.per_prefill_token * work.prefill_tokens
        if self.per_context:
            rows = work.decodes + work.padding_rows
            chunks = sum([c.start + c.tokens + c.padding for c in work.chunks])
            time += self.per_context * (work.decode_context + rows + work.padding_context + chunks)
        return 0, round(time), 0


def constant(scenario: Scenario, settings: ConstantSettings) -> ConstantCost:
    """Build the cost model `constant`."""
    step, token, prefill, context = nanoseconds(settings, "step", "per_token", "per_prefill_token", "per_context_token")
    return ConstantCost(cpu_cost(settings.cpu), step, token, prefill, context)


def fitted(scenario: Scenario, settings: FittedSettings) -> FittedCost:
    """Build the cost model `fitted`."""
    curves = _curve(settings.query_tokens), _curve(settings.context_tokens)
    launch_ns = round(settings.launch_s_per_layer * scenario.model.layers * NS)
    terms = nanoseconds(settings, *TERMS)
    return FittedCost(cpu_cost(settings.cpu), launch_ns, settings.unsplit_rows, settings.base_s * NS, *curves, *terms)


def _curve(points: Sequence[CurvePoint]) -> Curve:
    return Curve([point.tokens for point in points], [point.s * NS for point in points])
