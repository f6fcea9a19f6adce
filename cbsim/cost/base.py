"""The interface of cost models, and what all of them share: CPU time by phase, whole nanoseconds, KV transfers, lanes.

The CPU cost of a phase is a constant plus terms in what the step holds and in what is new in it. Requests are the rows
of the step, tokens its query tokens, blocks those in the block tables of its rows, chunks the rows that are listed one
by one, changes the decoding requests that get a block, leave or end (a loop that keeps its state from step to step
works on these), and drafts the guesses that it verifies. Without a plan a phase costs its constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cbsim.policy.plan import WORKED, Chunk, StepPlan, StepWork
from cbsim.policy.transfers import IN_ORDER, Direction
from cbsim.policy.value import mypyc_attr
from cbsim.scenario.costs import CpuSettings

NS = 1e9  # nanoseconds of a second


class Cost(Protocol):
    """A function from a plan to integer nanoseconds, without state or clock."""

    @property
    def cpu_ns(self) -> CpuCost:
        """CPU time of the phases of a plan."""

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        """Return (H2D copy, kernels, D2H copy), ns, when `tokens` query tokens are computed, padding included."""

    @property
    def launch_ns(self) -> int:
        """The CPU time to launch the kernels of a step one by one, without a CUDA graph."""


PHASES = WORKED


class PhaseCost(NamedTuple):
    """Coefficients of one phase, in nanoseconds."""

    base: float = 0.0
    per_request: float = 0.0
    per_token: float = 0.0
    per_block: float = 0.0
    per_chunk: float = 0.0
    per_change: float = 0.0
    per_draft: float = 0.0


def changes(plan: StepPlan) -> int:
    """Return the number of decoding requests that get a block, leave or end."""
    new = plan.changes
    return len(new.grown) + len(new.left) + len(new.ended)


class CpuCost:
    """The CPU time of a plan by phase. `phases` maps a phase to its coefficients; a missing one costs nothing."""

    def __init__(self, phases: Mapping[str, PhaseCost]) -> None:
        self._coefficients = [phases.get(name, PhaseCost()) for name in PHASES]
        self._base = tuple([round(c.base) for c in self._coefficients])
        self._by_rows = not any(any(c[2:]) for c in self._coefficients)
        self._known: dict[int, tuple[int, ...]] = {}  # by rows, if nothing else matters

    def __call__(self, plan: StepPlan | None) -> tuple[int, ...]:
        """Return the nanoseconds of the four phases."""
        if plan is None:
            return self._base
        work = plan.work
        chunks = len(work.chunks)
        rows = work.decodes + chunks
        if not self._by_rows:
            tokens = work.prefill_tokens + work.decodes
            return self._evaluate(rows, tokens, plan.counts.table_blocks, chunks, changes(plan), work.guesses)
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._evaluate(rows)
        return known

    def _evaluate(
        self, rows: int, tokens: int = 0, blocks: int = 0, chunks: int = 0, changes: int = 0, drafts: int = 0
    ) -> tuple[int, ...]:
        phases = [
            round(
                c.base
                + c.per_request * rows
                + c.per_token * tokens
                + c.per_block * blocks
                + c.per_chunk * chunks
                + c.per_change * changes
                + c.per_draft * drafts
            )
            for c in self._coefficients
        ]
        return tuple(phases)


def nanoseconds(settings: object, *terms: str) -> list[float]:
    """Return terms of a cost model, declared in seconds, in nanoseconds."""
    return [getattr(settings, f"{term}_s") * NS for term in terms]


def cpu_cost(settings: CpuSettings) -> CpuCost:
    """Return CPU coefficients in nanoseconds."""
    phases = {name: nanoseconds(getattr(settings, name), *PhaseCost._fields) for name in PHASES}
    return CpuCost({name: PhaseCost(*[settings.factor * ns for ns in terms]) for name, terms in phases.items()})


def nearest(number: float) -> int:
    """Return `round(number)` of a non-negative number, half to even; compiled, it takes a tenth of `round`'s time."""
    whole = int(number)
    rest = number - whole
    if rest > 0.5 or (rest == 0.5 and whole % 2):
        return whole + 1
    return whole


class StagedCost:
    """The cost model of a pipeline: that of each of its `stages`, one after the other. From one to the next a step is
    sent, which takes `latency_ns` and `token_ns` for each of its query tokens.
    """

    def __init__(self, stages: Sequence[Cost], latency_ns: float, token_ns: float) -> None:
        self.stages = stages
        self.cpu_ns = stages[0].cpu_ns
        self.launch_ns = max([stage.launch_ns for stage in stages])  # each is launched by a process of its own
        self._latency_ns, self._token_ns = latency_ns, token_ns

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        """Return what a step takes that has the pipeline to itself."""
        h2d_ns, stages_ns, d2h_ns = self.stages_ns(plan, tokens)
        return h2d_ns, sum(stages_ns) + (len(stages_ns) - 1) * self.send_ns(tokens), d2h_ns

    def stages_ns(self, plan: StepPlan, tokens: int) -> tuple[int, list[int], int]:
        """Return (H2D copy, kernels of each stage, D2H copy), ns."""
        each = [stage.gpu_ns(plan, tokens) for stage in self.stages]
        return each[0][0], [kernels_ns for _, kernels_ns, _ in each], each[-1][2]

    def send_ns(self, tokens: int) -> int:
        """Return the ns from the end of a step's kernels on a stage until the next one has what it needs."""
        return nearest(self._latency_ns + tokens * self._token_ns)


class DraftingCost:
    """The cost model of a server that speculates: its `target`'s step, and behind it at most `passes` of the drafter.

    A drafter proposes one token after the other. Its first pass also takes in the query tokens of the step, as its own
    cache has to; each later one has a token for every row that samples. `drafter` is a model, a layer of the target's
    with its output head, or the target, of whose passes with as many tokens drafts take the share `fraction`. A step
    that proposes nothing has no passes, and neither has prompt lookup, which is CPU time (`per_draft_s`).
    """

    def __init__(self, target: Cost, drafter: Cost, fraction: float, passes: int) -> None:
        self.cpu_ns = target.cpu_ns
        self.launch_ns = target.launch_ns + nearest(passes * fraction * drafter.launch_ns)
        self._target, self._drafter, self._fraction = target, drafter, fraction

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        h2d_ns, kernels_ns, d2h_ns = self._target.gpu_ns(plan, tokens)
        if plan.work.drafts:
            kernels_ns += nearest(self._fraction * self._passes_ns(plan, tokens))
        return h2d_ns, kernels_ns, d2h_ns

    def _passes_ns(self, plan: StepPlan, tokens: int) -> int:
        """Return the ns of the passes. Rows with guesses read their context once in the first one, like decoding ones;
        contexts of later ones are those of the pass in the middle.
        """
        work = plan.work
        prompts: list[Chunk] = []
        rows, context, longest = work.decodes, work.decode_context, work.longest_context
        sampled, ends, furthest = rows, context + rows, longest + 1
        for chunk in work.chunks:
            end = chunk.start + chunk.tokens
            if chunk.reads_once:
                rows, context, longest = rows + 1, context + end - 1, max(longest, end - 1)
            else:
                prompts.append(chunk)
            if chunk.outputs:
                sampled, ends, furthest = sampled + 1, ends + end, max(furthest, end)
        prefill = sum([chunk.tokens for chunk in prompts])
        first = StepWork(tuple(prompts), 0, rows, context, longest, prefill)
        time = self._drafter.gpu_ns(StepPlan(plan.step, first), tokens)[1]
        if (later := work.drafts - 1) and sampled:
            between = (later - 1) // 2
            each = StepWork((), 0, sampled, ends + sampled * between, furthest + between)
            time += later * self._drafter.gpu_ns(StepPlan(plan.step, each), sampled)[1]
        return time


class Copies:
    """The time of KV transfers. `block_bytes` are one block's keys and values in all layers, on one GPU; rates are the
    data sheet's bytes a second: the host's link in each direction, the memory for reading and writing together.
    """

    def __init__(self, block_bytes: int, link_bytes_s: float, memory_bytes_s: float) -> None:
        self._host_ns = block_bytes / link_bytes_s * 1e9
        self._device_ns = 2 * block_bytes / memory_bytes_s * 1e9

    def ns(self, direction: Direction, blocks: int) -> int:
        """Return the nanoseconds of a transfer of so many blocks that has its lane to itself."""
        return nearest(blocks * (self._device_ns if direction is Direction.COPY else self._host_ns))


class Lane:
    """A unit of the machine that does one thing at a time; it is free from `free_ns` on."""

    def __init__(self) -> None:
        self.free_ns = 0

    def book(self, ready_ns: int, duration_ns: int) -> tuple[int, int]:
        """Submit work that may start at `ready_ns`; returns its start and end."""
        assert duration_ns >= 0, duration_ns
        start = ready_ns if ready_ns > self.free_ns else self.free_ns
        self.free_ns = end = start + duration_ns
        return start, end


@mypyc_attr(allow_interpreted_subclasses=True)
class Bookings:
    """The KV transfers of plans, booked: to and from the host on a lane for each direction, copies on the device in the
    time of the compute lane, before the rows of their plan. Whoever inherits takes note of each in `booked`.
    """

    def __init__(self, copies: Copies, kv_in: Lane, kv_out: Lane) -> None:
        self._copies, self._in, self._out = copies, kv_in, kv_out

    def booked(self, plan: StepPlan, at: int, start_ns: int, end_ns: int) -> None:
        """Note the start and end of the transfer that a plan lists at this index."""
        raise NotImplementedError

    def before(self, plan: StepPlan, at_ns: int) -> int:
        """Book the transfers that precede the rows of a plan, from `at_ns` on, the end of the rows of earlier plans and
        of the jobs that it awaits. Returns the earliest start of the plan's own rows.
        """
        rows_ns = at_ns
        for at, transfer in enumerate(plan.transfers):
            if transfer.job == IN_ORDER and transfer.direction is not Direction.COPY:
                rows_ns = self._book(plan, at, rows_ns)
        for at, transfer in enumerate(plan.transfers):  # into blocks that the other transfers may just have read
            if transfer.job != IN_ORDER and transfer.direction is Direction.IN:
                self._book(plan, at, rows_ns)
        return rows_ns

    def copying_ns(self, plan: StepPlan) -> int:
        """Return the time of the copies on the device that precede the rows of a plan."""
        copies = [transfer for transfer in plan.transfers if transfer.direction is Direction.COPY]
        return sum([self._copies.ns(copy.direction, len(copy.sources)) for copy in copies])

    def after(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """Book what follows a plan's copies and rows, which take the compute lane from `start_ns` to `end_ns`."""
        for at, transfer in enumerate(plan.transfers):
            if transfer.direction is Direction.COPY:
                until_ns = start_ns + self._copies.ns(transfer.direction, len(transfer.sources))
                self.booked(plan, at, start_ns, until_ns)
                start_ns = until_ns
            elif transfer.direction is Direction.OUT and transfer.job != IN_ORDER:
                self._book(plan, at, end_ns)

    def _book(self, plan: StepPlan, at: int, at_ns: int) -> int:
        """Book a transfer on the lane of its direction; returns its end."""
        transfer = plan.transfers[at]
        lane = self._in if transfer.direction is Direction.IN else self._out
        start_ns, end_ns = lane.book(at_ns, self._copies.ns(transfer.direction, len(transfer.sources)))
        self.booked(plan, at, start_ns, end_ns)
        return end_ns
