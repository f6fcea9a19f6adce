"""The result of a run: its numbers, tables and picture, in memory or as a run directory; and what limits the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from cbsim.errors import RunError
from cbsim.files import access
from cbsim.metrics import catalogue, checks, coverage, metrics
from cbsim.metrics.checks import Verdict
from cbsim.metrics.terminal import aligned
from cbsim.policy.request import Finish
from cbsim.policy.transfers import Direction
from cbsim.record import directory, optional_tables, parquet, timeline
from cbsim.record.directory import RunWriter
from cbsim.record.environment import SIMULATED
from cbsim.record.record import FAILED
from cbsim.record.tables import Floats, Ints, Mask, Requests, RequestTable, Steps, token_times
from cbsim.scenario import demand
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario, solved_lines
from cbsim.workload import generators

if TYPE_CHECKING:
    from cbsim.draw.render import Picture
    from cbsim.runs.occupancy import Occupancy

TIMELINE = (0, 2000)  # steps
BOTH = "figures/sync_above_async.png"
TABLES = ("steps.parquet", "requests.parquet")
OURS = (
    *("scenario.resolved.yaml", "env.json", *TABLES, "summary.json", "timeline.json.gz"),
    *(directory.MARKER, optional_tables.TRANSFERS, directory.TERMS),
)


class Printed:
    """A value that a notebook shows as it prints."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True, eq=False, repr=False)
class Result(Printed):
    """The result of one scenario under one loop, simulated or measured. It prints as the command's table.

    `summary` and `environment` are the contents of summary.json and env.json. `incomplete` is the reason why the run
    was cut short, None if it was not. `path` is the run directory if there is one.
    """

    scenario: Scenario
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    step_numbers: Steps
    request_rows: RequestTable
    resolved: str  # scenario.resolved.yaml
    files: Mapping[str, bytes] = field(default_factory=dict)  # further files of the directory
    incomplete: str | None = None
    path: Path | None = None
    notices: tuple[str, ...] = ()  # likely mistakes and limits of the result, a line each

    @property
    def loop(self) -> str:
        return str(self.summary["loop"])

    @property
    def first(self) -> tuple[Scenario, Steps, int]:
        """The scenario, the steps, and the blocks of the first server that has any steps; where prefill and decode are
        apart, of the one with the longest queue, or else the busiest one.
        """
        parts, fleet = self.step_numbers.parts(), self.scenario.fleet
        steps = max(parts, key=self._fullness) if fleet and fleet.hand_off else parts[0]
        number = int(steps.server[0]) if fleet and steps.server is not None and len(steps) else 0
        blocks = self.summary["per_server"][number]["total_blocks"] if fleet else self.summary["total_blocks"]
        return self.scenario.replicas(self.summary)[number], steps, int(blocks)

    def _fullness(self, steps: Steps) -> tuple[float, float]:
        """The mean length of a server's queue, to a tenth, and the share of the time that its GPU is active."""
        if steps.server is None or not len(steps):
            return 0.0, 0.0
        spans = np.diff(steps["schedule_start_ns"], append=steps["update_end_ns"][-1:]).astype(np.float64)
        waiting = float((self._queue(steps) * spans).sum() / max(spans.sum(), 1.0))
        return round(waiting, 1), self.summary["per_server"][int(steps.server[0])]["gpu_active"]

    def _queue(self, steps: Steps) -> Ints:
        """The requests that wait for a server beside each of its steps: for more than KV that is on its way there."""
        transfers = self.transfers
        loads = (transfers["way"] == Direction.IN) & (transfers["job"] >= 0) & np.isin(transfers["step"], steps["step"])
        ordered, reported = (transfers[name][loads] for name in ("step", "reported_step"))
        over = np.sort(np.where(reported < 0, np.iinfo(np.int64).max, reported))
        loading = np.searchsorted(np.sort(ordered), steps["step"], "right") - np.searchsorted(over, steps["step"])
        return np.maximum(steps["waiting"] - loading, 0)

    @property
    def folder(self) -> Path:
        """The run directory. Raises RunError if it was never written."""
        if self.path is None:
            raise RunError(f"{self.summary['name']}: {self.loop}: is in memory only; save it first")
        return self.path

    @property
    def measured(self) -> bool:
        """Whether the run was measured on a real clock."""
        return self.environment.get("device") != SIMULATED

    @property
    def units(self) -> dict[str, str]:
        """The unit of every number of `summary` that has one, by dotted name."""
        return {name: catalogue.METRICS[name].unit for name in catalogue.quantities(self.summary)}

    @property
    def warnings(self) -> list[str]:
        """The ways in which a simulated run, of a fleet the first server, leaves the range that its cost model was
        calibrated on.
        """
        server, steps, _ = self.first
        table = self.step_numbers if self.scenario.fleet is None else steps
        return [] if self.measured else coverage.warnings(server.model_dump(mode="json"), table)

    @property
    def binding(self) -> list[str]:
        """The resources that limit the run, the first of its servers, with a remedy: a sentence or two; where prefill
        and decode are apart, the link and the fuller pool.
        """
        server, steps, _ = self.first
        made = _binding(server, server.loop.mode, steps, self._times, self._queue(steps) > 0)
        fleet = self.scenario.fleet
        if fleet is None or not (fleet.hand_off and steps.server is not None and len(steps)):
            return made
        number, busy = int(steps.server[0]), self.summary["hand_off"]["link_busy"]
        pool = f"pool: {self.summary['per_server'][number]['pool']} is the fuller one (server {number})"
        link = [f"link: the busiest NIC carries KV {busy:.0%} of the time"] if busy > LINK_FULL else []
        return [*link, *made, pool]

    @property
    def overload(self) -> str | None:
        """How far the load is above the capacity, if requests arrive over time and their queue grows."""
        return metrics.overload(self._times) if demand.is_open(self.scenario.workload.model_dump()) else None

    @property
    def lost(self) -> list[str]:
        """The requests that were refused or failed: how many, and why."""
        return _lost(self.request_rows)

    @cached_property
    def steps(self) -> pa.Table:
        """The step table: one row a step, the columns of steps.parquet."""
        return parquet.table(directory.step_declared(self.step_numbers), directory.step_columns(self.step_numbers))

    @cached_property
    def requests(self) -> pa.Table:
        """The request table: one row a request, the columns of requests.parquet, then `ttft_s`, `tpot_s` and `e2e_s`,
        which are null without a last token; `tpot_s` needs two.
        """
        declared = directory.request_declared(self._times.rows, self.step_numbers.server is not None)
        table = parquet.table(declared, directory.request_columns(self._times))
        done, latencies = self._times.done, metrics.latencies(self._times)
        for name, has in (("ttft_s", done), ("tpot_s", done & (self._times.generated > 1)), ("e2e_s", done)):
            values = np.zeros(len(done))
            values[has] = latencies[name]
            table = table.append_column(name, pa.array(values, mask=~has))
        return table

    @cached_property
    def transfers(self) -> Mapping[str, Ints]:
        """The KV transfers, the columns of moves.parquet; without rows if there were none. Raises RunError."""
        return optional_tables.read(self.path or self.files, optional_tables.TRANSFERS)

    @cached_property
    def occupancy(self) -> Occupancy:
        """The use of the KV cache by step; the plans are derived again for it. Raises RunError, ScenarioError."""
        from cbsim.runs import occupancy, reading

        path, files = self.path, None
        if path is None:
            path, files = Path(f"{self.summary['name']} {self.loop}"), self.files
        documents = self.resolved, dict(self.environment), dict(self.summary)
        run = reading.Run(path, *documents, self.step_numbers, self.request_rows, self.incomplete, files)
        rows = self._requests_handed_over
        if rows is None and self.path is not None:
            return occupancy.of(run, self.scenario, generators.build_of_run(self.scenario, path))
        requests = None if rows is None else rows.decode()
        return occupancy.of(run, self.scenario, generators.build(self.scenario, requests))

    @property
    def _requests_handed_over(self) -> bytes | None:
        from cbsim.workload import csv_requests

        return self.files.get(csv_requests.file_of(self.scenario))

    def check(self, condition: str) -> Verdict:
        """Evaluate a condition such as `gpu_active>=99%`. Raises CheckError if it cannot be parsed."""
        return checks.parse(condition).verdict(self.summary)

    def figure(self) -> Picture:
        """Draw CPU and GPU over a few steps. Raises RunError if no step ran."""
        return figure([self])

    def save(self, path: Path | str, timeline_steps: tuple[int, int] = TIMELINE) -> Path:
        """Write the run directory to `path`, a new or an empty folder. Raises RunError."""
        writer = RunWriter.at(Path(path))
        kept = self.path is not None or self._requests_handed_over is not None
        writer.scenario(self.resolved, {} if kept else generators.inputs(self.scenario))
        return self.write(writer, timeline_steps).folder

    def write(self, writer: RunWriter, timeline_steps: tuple[int, int]) -> Self:
        """Write everything but the scenario, which is written before a run; complete the directory if the run is.
        Return the result with its path. Raises RunError, and a directory that could not be written says why.
        """
        if self.incomplete is not None:
            writer.note(self.incomplete)
        try:
            writer.json("env.json", self.environment)
            with writer.writing(self.step_numbers, lambda: self._times):
                title = f"{self.summary['name']} {self.loop}"
                trace = timeline.chrome_trace(self.step_numbers.parts(), timeline_steps, title, self.transfers)
                writer.file("timeline.json.gz", trace)
            writer.json("summary.json", {**self.summary, "complete": False})
            writer.drop_pieces()
            for name, content in self._beside().items():
                writer.file(name, content)
            if self.incomplete is None:
                if len(self.step_numbers):
                    writer.file("figures/timeline.png", self.figure().png())
                writer.json("summary.json", self.summary)
                writer.complete()
        except RunError as error:
            if self.incomplete is None:
                with suppress(RunError):
                    writer.note(str(error))
            raise
        return replace(self, path=writer.path)

    @cached_property
    def _times(self) -> Requests:
        return token_times(self.request_rows, self.step_numbers)

    def _beside(self) -> Mapping[str, bytes]:
        """Return further files of the directory, by name."""
        if self.path is None:
            return self.files
        with access(self.path, RunError):
            files = sorted(file for file in self.path.iterdir() if file.is_file() and file.suffix != directory.PART)
            return {file.name: file.read_bytes() for file in files if file.name not in OURS}

    def __str__(self) -> str:
        return _printed([self])

    def __repr__(self) -> str:
        state = "" if self.incomplete is None else ", incomplete"
        return f"<Result {self.summary['name']} {self.loop}: {self.summary['makespan_s']:.6g} s{state}>"


class Results(Printed, dict[str, Result]):
    """The results of one scenario by loop. They print side by side."""

    def __init__(self, results: Iterable[Result]) -> None:
        super().__init__({result.loop: result for result in results})

    def compare(self) -> Comparison:
        """Compare the second loop with the first."""
        results = list(self.values())
        return Comparison(results[0], results[-1])

    def check(self, condition: str) -> Verdict:
        """Evaluate a condition on every loop; the verdict is true if all hold."""
        verdicts = {loop: result.check(condition) for loop, result in self.items()}
        return Verdict(all(verdicts.values()), "\n".join(f"{loop:<6} {verdict}" for loop, verdict in verdicts.items()))

    def figure(self) -> Picture:
        """Draw the loops on one time axis. Raises RunError if one of them ran no step."""
        return figure(list(self.values()))

    def save(self, path: Path | str, timeline_steps: tuple[int, int] = TIMELINE) -> list[Path]:
        """Write a run directory for each loop, `path`/LOOP. Raises RunError."""
        paths = [result.save(Path(path) / loop, timeline_steps) for loop, result in self.items()]
        self.draw(paths[-1])
        return paths

    def draw(self, path: Path) -> None:
        """Write a picture of two loops on one time axis to `path`, the second one's directory. Raises RunError."""
        if len(self) == 2 and all(len(result.step_numbers) for result in self.values()):
            with access(path / BOTH, RunError, "written"):
                directory.write_whole(path / BOTH, self.figure().png())

    def __str__(self) -> str:
        return _printed(list(self.values()))

    def __repr__(self) -> str:
        return f"<Results {', '.join(map(repr, self.values()))}>"


class Change(NamedTuple):
    """A number of two runs: its value in the first and in the second, and their difference."""

    before: float
    after: float
    difference: float
    relative: float | None  # of `before`; None if that is 0
    unit: str


@dataclass(frozen=True, slots=True, eq=False)
class Comparison(Printed):
    """A comparison of two runs. It prints as the table of both."""

    first: Result
    second: Result

    def __getitem__(self, metric: str) -> Change:
        """Return a metric's change by its name, as in `--check`. Raises CheckError, or KeyError if a run lacks it."""
        name = checks.named(metric, "compare")
        before, after = (catalogue.quantities(run.summary)[name] for run in (self.first, self.second))
        relative = after / before - 1 if before else None
        return Change(before, after, after - before, relative, catalogue.METRICS[name].unit)

    def __str__(self) -> str:
        return catalogue.table({run.loop: run.summary for run in (self.first, self.second)})


def read(path: Path | str) -> Result:
    """Read the result of a run directory. Raises RunError, ScenarioError."""
    from cbsim.runs import reading

    run = reading.load(Path(path))
    scenario = scenarios.load(run.path / "scenario.resolved.yaml")
    reading.check_run(run, scenario.loop.mode, fleet=scenario.fleet is not None)
    return Result(
        scenario=scenario,
        environment=run.environment,
        summary=run.summary,
        step_numbers=run.steps,
        request_rows=run.requests,
        resolved=run.scenario,
        incomplete=run.incomplete,
        path=run.path,
    )


def figure(results: Sequence[Result]) -> Picture:
    """Draw the lanes of one run, of its first servers at one time; or of several runs on one time axis, of the first
    server each. Raises RunError if one ran no step.
    """
    from cbsim.draw.lane_chart import lanes, of_servers
    from cbsim.draw.render import Picture

    for result in results:
        if not len(result.step_numbers):
            raise RunError(f"{result.summary['name']}: {result.loop}: no step ran: there is nothing to draw")
    parts = results[0].step_numbers.parts()
    if len(results) == 1 and len(parts) > 1:
        shown, moves = of_servers(parts), results[0].transfers
        mine = {name: np.isin(moves["step"], each["step"]) for name, each in shown.items()}
        theirs = {name: {key: values[its] for key, values in moves.items()} for name, its in mine.items()}
        return Picture(lanes(shown, as_given=True, transfers=theirs, at_one_time=True))
    steps = {result.loop: result.step_numbers.parts()[0] for result in results}
    transfers = {result.loop: result.transfers for result in results}
    active = {result.loop: float(result.summary["gpu_active"]) for result in results}
    return Picture(lanes(steps, as_given=True, active=active, transfers=transfers))


def _printed(results: Sequence[Result]) -> str:
    """Return the question, the solved values that the scenario left open, the numbers, and what binds each loop."""
    summary = results[0].summary
    table = catalogue.table({result.loop: result.summary for result in results})
    basis = results[0].environment.get("step_times")
    times = f"times   {basis if results[0].measured else f'by {basis}'}" if basis else ""
    heading = [f"{summary['name']}: {summary['question']}", solved_lines(results[0].scenario.servers[0]), times]
    below, lines = {result.loop: _below(result) for result in results}, list[str]()
    for word in ("KV", "load", "binds"):
        limits = [f"{loop:<7}{sentence}" for loop, sentences in below.items() for sentence in sentences[word]]
        lines += [f"{'' if at else word:<8}{limit}" for at, limit in enumerate(limits)]
    servers = [
        f"{result.loop}\n{aligned(catalogue.servers(result.summary))}\n"
        for result in results
        if "per_server" in result.summary
    ]
    return "\n".join([*filter(None, heading), "", table, "", *servers, *lines])


def _below(result: Result) -> dict[str, Sequence[str]]:
    """Return what is below the numbers: KV blocks (tokens and bytes of all GPUs if of all layers), load, limits."""
    server, steps, total = result.first
    used, model, gpus = int(steps["used_blocks"].max(initial=0)), server.model, server.gpus
    tokens = used * server.options(server.loop.mode).block_size
    size = f": {tokens:,} tokens, {tokens * gpus * model.kv_token_bytes(gpus) / 1e9:,.3g} GB" if model.sees_all else ""
    held = f"at most {used:,} of {total:,} blocks in use at once{size}"
    of = "" if steps.server is None else f"server {steps.server[0]}: "
    return {
        "KV": [f"{of}{held}"],
        "load": [*filter(None, [result.overload])],
        "binds": [f"{of}{sentence}" for sentence in result.binding],
    }


# Times are shares of the run from its first plan to its last result. A step stands for the time until the next one is
# planned.
WORK = ("schedule", "prepare", "launch", "update")  # phases in which the CPU works, without `await`
LOST = (Finish.REFUSED.value, FAILED)
LINK_FULL = 0.9  # share of a NIC's time
SEEN = 0.1  # share of the time from which on something is reported to bind


def _binding(scenario: Scenario, loop: str, steps: Steps, requests: Requests, waiting: Mask) -> list[str]:
    """Return the resources that limit a run, a sentence each with the number that shows it and a remedy: why requests
    wait (slots, the tokens of a step, the cache, or the arrivals), and what limits a step: the CPU, or the GPU's
    bandwidth or arithmetic; first the requests that were lost. Without rows these alone.
    """
    lost = [f"lost: {sentence}" for sentence in _lost(requests.rows)]
    if not steps["rows"].any():
        return lost
    starts, ends = steps["schedule_start_ns"], steps["update_end_ns"]
    spans = np.diff(starts, append=ends[-1]).astype(np.float64)
    shares = spans / max(spans.sum(), 1.0)
    waits = _waits(scenario, loop, steps, shares, requests, waiting)
    return [*lost, *waits, _step(scenario, loop, steps, float(spans.sum()))]


def _lost(rows: RequestTable) -> list[str]:
    """Return how many requests were refused and how many failed, each with the most frequent reason."""
    sentences = []
    for status in LOST:
        lost = rows.is_in((status,))
        reasons = Counter(rows.rows(lost).texts("reason").to_pylist() if lost.any() else ())
        for reason, _ in reasons.most_common(1):
            more = f", {len(reasons) - 1:,} other reasons" if len(reasons) > 1 else ""
            share = f"{reasons.total():,} of {metrics.request_count(rows):,} requests"
            sentences.append(f"{share} {status}: {reason}{more}")
    return sentences


def _waits(scenario: Scenario, loop: str, steps: Steps, shares: Floats, requests: Requests, waiting: Mask) -> list[str]:
    """Return why requests wait, in the steps `waiting`, or that none waits while requests are still arriving."""
    waits = float(shares[waiting].sum())
    if waits < SEEN:
        arrivals, start = requests.arrival_ns, steps["schedule_start_ns"][0]
        end = max(steps["update_end_ns"][-1], requests.last_token_ns.max(), arrivals.max())  # of all servers
        coming = float((arrivals.max() - start) / max(end - start, 1))
        times = f"requests wait {waits:.0%} of the time, the last arrives at {coming:.0%} of the run"
        lost = requests.rows.is_in(LOST).any()
        return [f"arrivals: {times}; no queue limits this load"] if coming > 0.5 and not lost else []
    limits = scenario.options(loop).limits
    least = scenario.options(loop).block_size if scenario.model.linear else 1  # states lie at the ends of blocks
    slots, rows, budget = limits.slots or np.inf, limits.rows or np.inf, limits.tokens or np.inf
    full = waiting & ((steps["running"] >= slots) | (steps["rows"] >= rows))
    spent = waiting & ~full & (steps["tokens"] > budget - least)
    causes = {"seats": full, "tokens": spent, "cache": waiting & ~full & ~spent}
    cause, share = max(
        ((name, float(shares[limited].sum())) for name, limited in causes.items()), key=lambda pair: pair[1]
    )
    if cause == "cache" and scenario.kind.padded:
        cause, reason = "batch", "the static batch has to end first; continuous batching would admit them at once"
    elif cause == "seats":
        reason = f"all {min(slots, rows):,.0f} slots are taken; more slots would admit them"
    elif cause == "tokens":
        reason = f"a step's {budget:,.0f} tokens are used up; a larger token budget would admit them"
    else:
        used = np.average(steps["used_blocks"][causes[cause]], weights=shares[causes[cause]])
        blocks = f"{used:,.0f} of {scenario.options(loop).num_blocks:,} KV blocks are in use by then"
        reason = f"{blocks} and the next request does not fit; a larger KV cache would admit it"
    return [f"{cause}: requests wait {waits:.0%} of the time, {share:.0%} because {reason}"]


def _step(scenario: Scenario, loop: str, steps: Steps, span_ns: float) -> str:
    """Return what limits a step: the CPU, or of the GPU what most of its time goes to."""
    ends, starts = steps["update_end_ns"][:-1], steps["schedule_start_ns"][1:]
    idle = float(np.maximum(starts - ends, 0).sum()) / max(span_ns, 1.0)  # there was nothing to plan
    compute = steps.lane("compute").astype(np.float64)
    waits = 1 - idle - float(compute.sum()) / max(span_ns, 1.0)
    if waits >= SEEN:
        if scenario.stages > 1:
            return f"pipeline: its last stage waits {waits:.0%} of the time for the stages before it, or for the CPU"
        cure = "loop.mode: async would hide it"
        if loop != "sync":
            longer = sum(float(steps.lane(phase).sum()) for phase in WORK)
            cure = "its work is longer than the GPU's"
            if longer <= compute.sum():
                cure = "its work is the shorter, but steps are launched late"
        return f"CPU: the GPU has work and waits {waits:.0%} of the time for it; {cure}"
    computes_s, weights_s, cache_s = _at_peak(scenario, steps)
    time, reads_s = compute / max(float(compute.sum()), 1.0), weights_s + cache_s
    large = float(time[computes_s >= reads_s].sum())
    mean = f"{steps['padded_tokens'][steps['rows'] > 0].mean():,.0f} tokens a step on average, padding included"
    if large >= 0.5:
        cure = "whose tokens take longer to compute than weights and KV to read"
        return f"GPU arithmetic: {large:.0%} of the GPU's time is in steps that are compute-bound, {cure} ({mean})"
    small = f"{1 - large:.0%} of the GPU's time is in steps that are memory-bound"
    share = float((time * cache_s).sum() / max((time * reads_s).sum(), 1e-30))
    cure = "more tokens a step would hardly take longer"
    if share >= SEEN:
        cure = f"{share:.0%} of what they read is KV, which every request adds to; the rest are weights"
    return f"GPU bandwidth: {small}: {cure} ({mean})"


def _at_peak(scenario: Scenario, steps: Steps) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of each step by the data sheet: 2 FLOP a token and weight that it goes through; the weights
    that its tokens reach, of a mixture those of the experts expected; the KV tokens that rows read.
    """
    model, gpu, gpus = scenario.model, scenario.hardware, scenario.gpus  # of the server all together
    tokens = steps["padded_tokens"].astype(np.float64)
    passed_over = 1 - model.experts_per_token / model.experts if model.experts else 0.0
    weights = model.parameters - passed_over * model.expert_parameters
    read = model.weight_bytes - passed_over**tokens * model.expert_bytes
    flops, bandwidth = gpu.flops.of_layers(model), gpu.memory_bandwidth_bytes_s
    cache = steps["context_tokens"].astype(np.float64) * gpus * model.kv_token_bytes(gpus) / bandwidth
    return 2 * weights * tokens / flops, np.asarray(read / bandwidth, np.float64), cache
