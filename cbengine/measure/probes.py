"""Short runs that measure what a step costs: their choice, and the table of their steps.

A probe is a scenario of its own, run by the engine with the synchronous loop. Its prompts and outputs have all lengths,
so that one run passes through many batch sizes, contexts and chunks. Every step gives one line: its content and the
time of its kernels, its copies and each CPU phase. Some probes also run with two steps in flight: the kernels of a step
launched ahead do not wait for the CPU, so their times are the kernels' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from cbengine import build
from cbengine.batch import Load
from cbengine.build import Setup
from cbengine.errors import UsageError
from cbengine.model.ops import PARTS_PER_MULTIPROCESSOR
from cbsim.cost.base import PHASES, changes
from cbsim.cost.fitted import work
from cbsim.errors import ScenarioError
from cbsim.policy.captures import captured, captured_sizes
from cbsim.policy.kind import SettingsError, for_probe
from cbsim.policy.plan import StepPlan
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Floats, Ints, Mask, Steps
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import LARGEST_WHOLE
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.schedulers import plain
from cbsim.workload import generators

SETTLING = 3  # first steps of a run, left out because caches are cold
SHORTEST = 8  # the least number of tokens of the longest sequence and of the largest step
SPREAD = 1.2  # sigma of the lognormal prompt lengths: many short ones and some as long as allowed
Kinds = dict[tuple[int, ...], list[int]]
FEWEST = 8  # kinds of equal steps that contention can be told from


class Reach(NamedTuple):
    """The limits of the probes: requests in a step, tokens of a sequence, query tokens of a step, KV tokens of all."""

    rows: int
    longest: int
    tokens: int
    context: int


GPU_REACH, CPU_REACH = Reach(256, 8192, 8192, 300_000), Reach(32, 320, 128, 5000)


class Probe(NamedTuple):
    """A short run: prompts of `low` to `prompt` tokens, outputs of up to `output`, `chunk` query tokens a step."""

    about: str
    requests: int
    slots: int
    low: int
    prompt: int
    output: int
    chunk: int
    ahead: bool = False  # also run with two steps in flight


class ProbeStep(NamedTuple):
    """A step of a probe: its content and size, and times in nanoseconds."""

    tokens: int  # computed, padding and decodes included
    chunks: int
    prefill_tokens: int
    cached: int
    pairs: float
    decodes: int
    context: int
    longest: int
    requests: int
    query_tokens: int  # without padding
    blocks: int  # in the tables of its rows
    changes: int  # decoding requests that got a block, left or ended
    read: int  # KV tokens, as the step table counts them
    eager: bool  # launched kernel by kernel
    bound: bool  # launched so slowly that the kernels waited
    schedule: int
    prepare: int
    launch: int
    update: int
    h2d: int  # from the end of the launch to the start of the kernels, which may be earlier
    compute: int
    d2h: int  # from the end of the kernels until the CPU has the result
    ahead: bool = False  # launched while the step before it computed: only its kernels' time is used


class EqualStepTimes(NamedTuple):
    """A comparison of equal decode steps that both loops ran: the median kernel times in seconds over their kinds. A
    step's time begins at an event before its kernels. If the GPU is idle there, as with one step in flight, it waits,
    within that time, for the CPU to issue the rest of the launch; a step launched while the one before it runs does not
    wait. The difference is therefore what synchronous kernel times are too long by.
    """

    steps: int
    sync_s: float
    async_s: float
    difference_s: float  # median of the differences; above 0: synchronous steps are measured as longer

    def __str__(self) -> str:
        share = self.difference_s / self.async_s if self.async_s else 0.0
        both = f"{self.sync_s * 1e6:,.1f} us synchronous, {self.async_s * 1e6:,.1f} us asynchronous"
        difference = f"{self.difference_s * 1e6:+,.1f} us ({share:+.2%})"
        return f"kernels of {self.steps} equal steps: {both}, median of their differences {difference}"


@dataclass(slots=True)
class ProbeTable:
    """The steps of all probes; beside them the gap between two, a graph's time to capture, the decoding rows that fill
    the device, and how both loops compare.
    """

    lines: list[ProbeStep] = field(default_factory=list)
    gap_s: float = 0.0
    capture_s: float = 0.0
    unsplit_rows: float = 0.0
    equal: EqualStepTimes | None = None

    def add_ahead(self, plans: Sequence[StepPlan], steps: Steps, sizes: Sequence[int]) -> None:
        """Add the asynchronous loop's steps that were launched as a whole before the kernels of the last one ended."""
        ahead = np.zeros(len(steps), dtype=bool)
        ahead[1:] = steps["launch_end_ns"][1:] < steps["compute_end_ns"][:-1]
        self.lines += [line._replace(ahead=True) for line in _lines(plans, steps, sizes, ahead)]

    def column(self, name: str) -> Floats:
        return np.array([getattr(line, name) for line in self.lines], dtype=np.float64)

    def alone(self) -> ProbeTable:
        """Return the table of the synchronous loop's steps, to which the CPU's times are fitted."""
        return ProbeTable([line for line in self.lines if not line.ahead])

    def _medians(self) -> Floats:
        """Return the median nanoseconds of the kernels of decode steps that both loops ran: [loop, kind]. Of the
        asynchronous loop there are only steps that were launched ahead.
        """
        known: tuple[Kinds, Kinds] = {}, {}
        for step in self.lines:
            if not (step.chunks or step.eager):
                known[step.ahead].setdefault((step.tokens, step.requests, step.read), []).append(step.compute)
        both = sorted(known[0].keys() & known[1].keys())
        return np.array([[np.median(kinds[key]) for key in both] for kinds in known])

    def equal_steps(self) -> EqualStepTimes | None:
        """Compare the kernels of both loops; None if they have no decode step in common."""
        sync_s, async_s = self._medians() / 1e9
        if not len(sync_s):
            return None
        return EqualStepTimes(len(sync_s), *(float(np.median(of)) for of in (sync_s, async_s, sync_s - async_s)))

    def contention(self) -> float:
        """Return by what share the kernels of equal decode steps take longer in the asynchronous loop, in the median; 0
        if that is no more than twice its standard error, or with fewer than FEWEST kinds of steps. It is the least
        share: synchronous kernels also wait for their launch. CPU phases differ more from run to run than by the loop.
        """
        alone, beside = self._medians()
        if len(alone) < FEWEST:
            return 0.0
        ratios = beside / np.maximum(alone, 1) - 1
        share, error = float(np.median(ratios)), 1.25 * float(ratios.std(ddof=1)) / len(ratios) ** 0.5
        return float(f"{share:.3g}") if share > 2 * error else 0.0

    @classmethod
    def of(cls, table: pa.Table) -> Self:
        """Read what `arrow` made. Raises KeyError for a missing column, ValueError for what is no count or time."""
        older = {"ahead", "longest"} - set(table.column_names)  # columns that older files lack
        absent = [0] * len(table)
        columns = [absent if name in older else table.column(name).to_pylist() for name in ProbeStep._fields]
        for name, values in zip(ProbeStep._fields, columns, strict=True):
            numbers = np.array(values)
            least = 1 if name in ("tokens", "compute") else -LARGEST_WHOLE if name == "h2d" else 0
            if numbers.dtype.kind not in "biuf" or not ((numbers >= least) & (numbers <= LARGEST_WHOLE)).all():
                raise ValueError(f"{name}: expected numbers from {least} to {LARGEST_WHOLE:,}")
        return cls([ProbeStep(*values) for values in zip(*columns, strict=True)])

    def arrow(self) -> pa.Table:
        """Return a table for a file, so that other terms can be fitted without measuring again."""
        return pa.table({name: [getattr(line, name) for line in self.lines] for name in ProbeStep._fields})


def _lines(plans: Sequence[StepPlan], steps: Steps, sizes: Sequence[int], which: Mask | None = None) -> list[ProbeStep]:
    """Return lines of the chosen steps (all) but first and empty ones. Without captured `sizes` each is one launch."""
    columns = {name: i for i, name in enumerate(STEP_COLUMNS)}
    chosen = np.ones(len(steps), dtype=bool) if which is None else which
    rows = zip(plans[SETTLING:], steps.table[SETTLING:], chosen[SETTLING:], strict=True)
    return [
        _line(plan, {name: int(row[i]) for name, i in columns.items()}, sizes)
        for plan, row, counts in rows
        if counts and plan.work.rows
    ]


def _line(plan: StepPlan, at: dict[str, int], sizes: Sequence[int]) -> ProbeStep:
    eager = bool(sizes) and captured(plan, sizes) is None
    compute = at["compute_end_ns"] - at["compute_start_ns"]
    return ProbeStep(
        *work(plan, at["padded_tokens"]),
        requests=plan.work.rows,
        query_tokens=plan.work.tokens,
        blocks=plan.counts.table_blocks,
        changes=changes(plan),
        read=at["context_tokens"],
        eager=eager,
        bound=eager and at["compute_end_ns"] - at["launch_end_ns"] < 0.05 * compute,
        **{phase: at[f"{phase}_end_ns"] - at[f"{phase}_start_ns"] for phase in PHASES},
        h2d=at["compute_start_ns"] - at["launch_end_ns"],
        compute=compute,
        d2h=at["await_end_ns"] - at["compute_end_ns"],
        ahead=False,
    )


def probes(reach: Reach, *, quick: bool) -> list[Probe]:
    """Return the probes that cover steps of all kinds up to `reach`."""
    rows, longest, tokens, _ = reach
    assert min(longest, tokens) >= SHORTEST
    output = min(longest // 2, 48 if quick else 192)
    prompt = longest - output
    slots = max(1, min(rows, reach.context // prompt))
    short, few, half = max(4, prompt // 32), max(1, slots // 4), max(1, rows // 2)
    least, long = max(1, prompt // 64), max(1, 15 * prompt // 16)
    return [
        Probe("prompts, one a step", 16, 1, least, min(prompt, tokens), 4, tokens),
        Probe("long prompts, then a batch that shrinks", slots, slots, long, prompt, output, tokens, ahead=True),
        Probe("prompts half as long, likewise", slots, slots, long // 2 or 1, prompt // 2, output, tokens),
        Probe("chunks of long prompts beside decodes", 2 * few, few, least, prompt, output // 4, tokens // 16),
        Probe("small chunks beside many decodes", 2 * half, half, 1, max(1, prompt // 8), output // 2, tokens // 4),
        Probe("a large batch of short requests that shrinks", rows, rows, 1, short, output, tokens, ahead=True),
        Probe("one request alone", 2, 1, long, prompt, output // 2, tokens, ahead=True),
    ]


def measure(base: Scenario, setup: Setup, runs: Sequence[Probe], progress: Callable[[str], None]) -> ProbeTable:
    """Run all probes on the device of `setup`, with the model and the scheduler of `base`."""
    table, gaps = ProbeTable(), []
    scenarios = [_scenario(base, probe) for probe in runs]  # one beyond its bounds is refused before any runs
    for number, (probe, scenario) in enumerate(zip(runs, scenarios, strict=True), start=1):
        progress(f"probe {number} of {len(runs)}: {probe.about}{', in both loops' if probe.ahead else ''}")
        ready = build.adapted(scenario, setup)
        load = Load.of(generators.build(ready).specs())
        rows = load.capacity(ready.options("sync")).rows
        sizes = captured_sizes(rows) if ready.graph_padding == "cbengine" else []
        plans, steps, facts = _run(ready, "sync", setup)
        table.lines += _lines(plans, steps, sizes)
        table.capture_s = max(table.capture_s, facts.get("capture_s", 0.0))
        table.unsplit_rows = PARTS_PER_MULTIPROCESSOR * facts.get("multiprocessors", 0) / ready.model.kv_heads
        if probe.ahead:
            plans, ahead, _ = _run(ready, "async", setup)
            table.add_ahead(plans, ahead, sizes)
            gaps.append(_gaps(ahead))
    followed = np.concatenate([*gaps, np.zeros(0)])
    table.gap_s = float(np.median(followed)) / 1e9 if len(followed) else 0.0
    table.equal = table.equal_steps()
    if table.equal:
        progress(str(table.equal))
    return table


def _run(ready: Scenario, loop: str, setup: Setup) -> tuple[list[StepPlan], Steps, dict[str, Any]]:
    """Return the plans and steps of a run, and the device's facts."""
    plans: list[StepPlan] = []
    engine, device = build.engine(ready, loop, generators.build(ready), setup, on_plan=plans.append)
    try:
        engine.run()
    finally:
        engine.close()
    return plans, Steps.of(engine.record), device.facts


def _gaps(steps: Steps) -> Ints:
    """Return the nanoseconds from one step's kernels to the next one's, where that had been launched in time."""
    ends, starts = steps["compute_end_ns"][:-1], steps["compute_start_ns"][1:]
    middle = steps["compute_start_ns"][:-1] + (ends - steps["compute_start_ns"][:-1]) // 2
    gaps: Ints = (starts - ends)[steps["launch_end_ns"][1:] < middle]
    return gaps


def _scenario(base: Scenario, probe: Probe) -> Scenario:
    """Return the probe as a scenario like `base`, with a cache that suffices. Raises UsageError beyond its bounds."""
    size = base.block_size
    blocks = probe.slots * (-(-(probe.prompt + probe.output) // size) + 2) + 2
    data = base.model_dump(mode="json")
    data["kv_cache"] |= {"num_blocks": blocks, "block_size": size}
    mean = max(1.0, (probe.low + probe.prompt) / 2)
    data["workload"] = {
        "kind": "synthetic",
        "requests": probe.requests,
        "prompt_tokens": {"lognormal": {"mean": mean, "sigma": SPREAD, "low": probe.low, "high": probe.prompt}},
        "output_tokens": {"uniform": {"low": max(1, probe.output // 3), "high": max(1, probe.output)}},
    }
    too_large = "calibrate: --rows, --longest or --tokens is too large"
    try:
        data["scheduler"] = plain(for_probe(base.scheduler, probe.slots, probe.chunk))
        ready = Document(too_large, None, data, error_type=UsageError).checked(Scenario)
        ready.options("sync")
    except (ScenarioError, SettingsError) as error:
        raise UsageError(f"{too_large}: {error}") from None
    return ready
