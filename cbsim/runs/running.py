"""Running a scenario under each of its loops, on any server. The simulator and the engine share it.

It works in memory: nothing is printed here, and nothing is written but by `Session.open`. A `Watch` sees a run while it
is under way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from cbsim.collector import no_collections
from cbsim.metrics import coverage, metrics
from cbsim.policy.request import Finish
from cbsim.record import directory, environment, optional_tables
from cbsim.record.columns import NS
from cbsim.record.directory import OnSteps, Pieces, RunWriter
from cbsim.record.record import Record, Records
from cbsim.record.tables import RequestTable
from cbsim.routers import registry as routers
from cbsim.routers.scaling import HPA
from cbsim.runs.result import Result, Results
from cbsim.scenario import demand
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators
from cbsim.workload.requests import Workload

OnStep = Callable[[int], None]


class Server(Protocol):
    """A server made for one run, on a simulated clock or a real one."""

    measured: bool  # whether it has a real clock

    @property
    def record(self) -> Record | Records:
        """The run so far."""

    @property
    def now_ns(self) -> int:
        """The time of the run so far."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """The entries of env.json on the device, and on anything that the scenario lacks. Read before the run,
        and again after it. `notices`: lines that its user has to know with the result.
        """

    def run(self, on_step: OnStep) -> None:
        """Run to the end of the workload; call `on_step` with the time after every step, and stop if it raises."""

    def files(self) -> Mapping[str, bytes]:
        """Return further files of the run directory, by name. Called when the run has ended or was cut short."""


Maker = Callable[[Scenario, str, Workload], Server]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a run besides its scenario.

    `command` makes it again, `window_s` bounds the arrivals of the requests that count, `requests` are served in place
    of the scenario's own: the text of a CSV file (cbsim.workload.csv_requests). `digests`: whether steps have those of
    their plans. `warmup`: in place of a window, the share of requests, the first to arrive, that do not.
    """

    command: str
    window_s: tuple[float, float] | None = None
    requests: str | None = None
    digests: bool = True
    warmup: float = 0.0


class Session:
    """A server of one loop of a scenario, before, during and after its run. Raises ScenarioError if it cannot run."""

    def __init__(self, scenario: Scenario, loop: str, serve: Maker, terms: Terms) -> None:
        if terms.requests is not None:
            from cbsim.workload import csv_requests

            scenario = csv_requests.scenario_of(scenario)
        self.scenario = scenario.model_copy(update={"loop": scenario.loop.model_copy(update={"mode": loop})})
        self.loop, self.resolved = loop, scenarios.dump(self.scenario)
        with no_collections():
            workload = generators.build(self.scenario, terms.requests)
        of_servers = [f"{within}{line}" for within, server in self.scenario.pools for line in scenarios.notices(server)]
        self.requests, self.notices = workload.total, (*of_servers, *workload.notices)
        self.server = serve(self.scenario, loop, workload)
        self.server.record.digests = terms.digests
        if not self.server.measured and workload.total:
            _check_drafts(self.scenario, workload)
        self._terms = terms
        self._pieces: Pieces | None = None
        self._facts = environment.environment(terms.command, workload.fingerprint(), scenario.seed)
        self._facts |= self.server.facts

    @property
    def environment(self) -> dict[str, Any]:
        """The entries of env.json so far."""
        return self._facts | dict(self.server.facts)

    def open(self, out: Path, words: str, early: OnSteps | None = None) -> RunWriter:
        """Make the run directory, with `words` in its name. Raises RunError."""
        digest = hashlib.sha256(self.resolved.encode()).hexdigest()
        writer = RunWriter.new(out, "-".join(filter(None, (self.scenario.name, self.loop, words))), digest)
        writer.scenario(self.resolved, {} if self._terms.requests is not None else generators.inputs(self.scenario))
        writer.json("env.json", self.environment)
        self.write_to(writer, early)
        return writer

    def write_to(self, writer: RunWriter, early: OnSteps | None = None) -> None:
        """Write the tables with `writer` piece by piece if the run becomes a long one. A measured run is written when
        it is over, so that nothing takes CPU time from it.
        """
        if not self.server.measured:
            counted = self._counted | {"window_s": metrics.named_window(self._terms.window_s)}
            record = self.server.record
            early = early if isinstance(record, Record) else None
            self._pieces = Pieces(writer, {"about": self._about(complete=False), "counted": counted}, early)
            record.hand_to(self._pieces.take, writer.group)

    @property
    def _counted(self) -> dict[str, Any]:
        """The inputs of a summary's numbers besides the tables."""
        record = self.server.record
        return counted(self.scenario, record.total_blocks, self._terms.window_s, servers_of(self.scenario, record))

    def _about(self, *, complete: bool) -> dict[str, Any]:
        """Return the fields of a summary besides its numbers."""
        scenario = self.scenario
        about = {"name": scenario.name, "question": scenario.question, "loop": self.loop, "seed": scenario.seed}
        return {"schema_version": directory.SCHEMA_VERSION, "complete": complete} | about

    def set_requests(self, requests: str) -> None:
        """Set the requests that a server received in its run, unknown before it, in the format of `Terms.requests`."""
        self._terms = replace(self._terms, requests=requests)
        self._facts["workload_hash"] = generators.build(self.scenario, requests).fingerprint()

    @no_collections()
    def result(self, incomplete: str | None = None) -> Result:
        """Return the result so far; `incomplete` is the reason if the run was cut short."""
        record = self.server.record
        rows, steps = self._pieces.tables(record) if self._pieces else directory.contents(record)
        warmed = self._behind_warmup(rows)
        numbers = metrics.summarise(rows, steps, **self._counted | warmed)
        numbers |= self._optional(numbers, rows)
        files = {**optional_tables.files_of(record), **self.server.files()}
        if (requests := self._terms.requests) is not None:
            from cbsim.workload import csv_requests

            files = {csv_requests.file_of(self.scenario): requests.encode()} | files
        environment, summary = self.environment, self._about(complete=incomplete is None) | numbers
        if warmed:
            environment["command"] += f" --window {warmed['window_s'][0]!r}:"
        basis = coverage.basis(self.scenario.servers[0], steps)
        environment["step_times"] = "measured" if self.server.measured else basis
        cost, told = self.scenario.servers[0].cost, environment.get("notices", ())
        sureness = () if self.server.measured else coverage.sureness(cost)
        seen = chain(_old_signals(self.scenario, numbers["makespan_s"]), _flapping(self.scenario, numbers))
        lines = *self.notices, *seen, *sureness, *(f"{self.loop}: {line}" for line in (*told, *self._cut(rows)))
        return Result(self.scenario, environment, summary, steps, rows, self.resolved, files, incomplete, notices=lines)

    def _behind_warmup(self, rows: RequestTable) -> dict[str, Any]:
        """Return the window behind the warm-up, and behind the first request of every user, who all begin at once."""
        if not (len(rows) and self._terms.warmup):
            return {}
        arrivals_ns, arrivals = np.sort(rows.numbers("arrival_ns")), getattr(self.scenario.workload, "arrivals", None)
        burst = arrivals.users if isinstance(arrivals, demand.ClosedLoop) else 0
        first_ns = float(arrivals_ns[min(max(int(self._terms.warmup * len(rows)), burst), len(rows) - 1)])
        return {"window_s": (max(first_ns - 0.5, 0.0) / NS, math.inf)}  # between two nanoseconds: no rounding matters

    def _optional(self, numbers: Mapping[str, Any], rows: RequestTable) -> dict[str, Any]:
        """Return those parts of a summary that only some runs have."""
        record, span_s, parts = self.server.record, numbers["makespan_s"], dict[str, Any]()
        logs = record.logs
        several = len(record.records) if isinstance(record, Records) else 1
        if isinstance(record, Records) and (scaling := record.scaling):
            parts["scaling"] = scaling
            if "cost" in numbers and span_s:
                parts["cost"] = metrics.price(numbers, cast("float", scaling["usd"]) / span_s * 3600)
        if isinstance(record, Record) and (stages := record.stages):
            parts["pipeline"] = optional_tables.summarise_stages(stages)
        if (fleet := self.scenario.fleet) and fleet.hand_off and isinstance(record, Records):
            table = optional_tables.values_of(optional_tables.HAND_OFFS, record.hand_offs)
            parts["hand_off"] = metrics.hand_offs(table, rows, fleet.hand_off.link.bandwidth_gb_s, span_s)
        elif rows_of := logs["moves"]:
            table = optional_tables.values_of(optional_tables.TRANSFERS, rows_of)
            parts["kv_moves"] = optional_tables.summarise_transfers(table, span_s * several)
        if drafts := logs["drafts"]:
            parts["drafts"] = optional_tables.summarise_drafts(drafts)
        return parts

    def _cut(self, rows: RequestTable) -> Iterator[str]:
        """Yield a sentence if outputs ended early, at the longest sequence that the scheduler takes."""
        servers = [server.options(server.loop.mode) for _, server in self.scenario.pools]
        longest = min((each.limits.longest for each in servers if each.limits.longest is not None), default=None)
        ended = rows.is_in((Finish.LENGTH.value,))
        made = rows.runs[1::2][np.repeat(ended, rows.lengths // 2)]
        left = int(rows.numbers("output_tokens")[ended].sum() - made.sum())
        if longest is not None and left > 0:
            yield f"requests end at {longest:,} tokens, as the scheduler has it: {left:,} output tokens were not made"


def _check_drafts(scenario: Scenario, workload: Workload) -> None:
    """Raise ScenarioError for a file of accepted drafts that is not of this workload's requests."""
    for _, server in scenario.pools:
        if (drafts := server.speculation) and drafts.acceptance.path is not None:
            specs = (workload.find(index) for index in range(workload.total))
            drafts.acceptance.recorded(
                drafts.k, [min(spec.output_tokens, spec.max_tokens) if spec else 0 for spec in specs]
            )


def _old_signals(scenario: Scenario, makespan_s: float) -> Iterator[str]:
    """Yield a line for each signal of a fleet that came only when the run was over, if its router looks."""
    fleet = scenario.fleet
    if fleet is None or routers.ROUTERS.find(fleet.router.name).blind:
        return
    for name, age_s in fleet.signals.model_dump().items():
        if age_s > makespan_s > 0:
            yield f"fleet.signals.{name}: got {age_s:g}, the run took {makespan_s:.3g} s: the router saw none"


def _flapping(scenario: Scenario, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each rule of autoscaling that more than once let replicas go for less than the time of a start,
    which saved nothing, as one that starts costs as much; and for each that started replicas which were never ready.
    For HPA it adds a lower bound of the down_window_s by which replicas would have stayed.
    """
    for at, pool in enumerate(scenario.fleet.pools if scenario.fleet else ()):
        if (scaled := pool.autoscale) is None:
            continue
        label, rule = pool.name or str(at), cast("Any", scaled.rule)
        events = [each for each in summary["scaling"]["events"] if each["pool"] == label]
        starts, ready = (sum(each["event"] == name for each in events) - pool.count for name in ("start", "ready"))
        if starts - ready > 1:
            late = f"{starts - ready} of {starts} replicas that were started and paid for were never ready"
            yield f"fleet.pools.{at}.autoscale.start_s: got {scaled.start_s:g}: {late}"
        dips, bridged_s = sorted(_dips_s(events)), 0.0
        if (count := sum(dip_s < scaled.start_s for dip_s in dips)) > 1:
            for dip_s in dips:
                bridged_s = dip_s if dip_s < bridged_s + scaled.start_s else bridged_s
            line = f"flaps: {count} times replicas went and were started again within start_s ({scaled.start_s:g})"
            if rule.name == HPA.name:
                line += f"; it takes a down_window_s of at least {rule.down_window_s + bridged_s:g}"
            yield f"fleet.pools.{at}.autoscale.rule: {rule.name} {line}"


def _dips_s(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the times from when a rule said fewer replicas until it said more."""
    changes = [(b["time_s"], b["desired"] > a["desired"]) for a, b in pairwise(events) if a["desired"] != b["desired"]]
    turns = [*changes[:1], *(each for before, each in pairwise(changes) if each[1] != before[1])]
    return [up_s - down_s for (down_s, _), (up_s, more) in pairwise(turns) if more]


def servers_of(scenario: Scenario, record: Record | Records) -> Sequence[Mapping[str, Any]]:
    """Return pool, GPUs and blocks of each server of a fleet, and what came of its drafts if it has any."""
    if scenario.fleet is None or not isinstance(record, Records):
        return ()
    each = zip(scenario.fleet.pool_names, scenario.servers, record.records, strict=not record.fleet)
    facts = record.fleet or [
        {"pool": of, "gpus": its.own_gpus, "total_blocks": one.total_blocks} for of, its, one in each
    ]
    drafts = [one.logs["drafts"] for one in record.records]
    summary = optional_tables.summarise_drafts
    return [own | ({"drafts": summary(rows)} if rows else {}) for own, rows in zip(facts, drafts, strict=True)]


def counted(
    scenario: Scenario,
    total_blocks: int,
    window_s: tuple[float, float] | None,
    fleet: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the inputs of a summary's numbers besides the tables, as arguments of metrics.summarise."""
    return {
        "total_blocks": total_blocks,
        **({"fleet": fleet} if fleet else {"servers": scenario.ranks}),
        "slo": scenario.slo.model_dump(exclude={"preset"}, exclude_none=True),
        "price_usd_hour": scenario.price_usd_hour,
        "window_s": window_s,
    }


Watch = Callable[[Session], AbstractContextManager[OnStep]]
"""A watch is entered before a run and yields a function called with the time after each step; raising ends the run."""


def answer(
    scenario: Scenario, serve: Maker, command: str, requests: Any, window_s: tuple[float, float] | None
) -> Result | Results:
    """What the front doors give: the Result of one loop, or the Results of both. `requests`: a table or None."""
    if requests is not None:
        from cbsim.workload import csv_requests

        requests = csv_requests.table_text(requests)
    terms = Terms(command, window_s, requests)
    results = Results(one_loop(scenario, loop, serve, terms) for loop in scenarios.loops(scenario))
    return results if len(results) > 1 else next(iter(results.values()))


def one_loop(scenario: Scenario, loop: str, serve: Maker, terms: Terms, watch: Watch | None = None) -> Result:
    """Serve a scenario under one loop."""
    session = Session(scenario, loop, serve, terms)
    with watch(session) if watch else nullcontext(lambda _: None) as on_step:
        session.server.run(on_step)
    return session.result()
