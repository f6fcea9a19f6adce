"""A scenario run under each of its loops, by whatever serves it. The simulator and the engine share it.

In memory: nothing is written or printed here. A `Watch` sees a run while it works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cbsim.metrics import coverage, metrics
from cbsim.record import directory, environment, optional_tables
from cbsim.record.directory import RunWriter
from cbsim.record.pieces import OnSteps, Pieces
from cbsim.record.record import Record
from cbsim.runs.result import Result, Results
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.costs import TableSettings
from cbsim.scenario.scenario import Scenario
from cbsim.workload import csv_requests, generators
from cbsim.workload.requests import Workload

OnStep = Callable[[int], None]


class Server(Protocol):
    """A server made for one run, on a simulated clock or a real one."""

    measured: bool  # on a real clock?

    @property
    def record(self) -> Record:
        """What has happened so far."""

    @property
    def now_ns(self) -> int:
        """How far the run has come."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What env.json holds of the device, and of anything that the scenario lacks. Read before the run,
        and again after it. `notices`: lines that its user has to know with the result.
        """

    def run(self, on_step: OnStep) -> None:
        """Run to the end of the workload; call `on_step` with the time after every step, and stop if it raises."""

    def files(self) -> Mapping[str, bytes]:
        """Further files of the run directory, by name. Asked for when the run has ended or was cut short."""


Maker = Callable[[Scenario, str, Workload], Server]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a run besides its scenario.

    `command` makes it again, `window_s` bounds the arrivals of the requests that count, `requests` are served in place
    of the scenario's own: the text of a CSV file (cbsim.workload.csv_requests). `process` is what
    environment.of_process returns, if it is known already.
    """

    command: str
    window_s: tuple[float, float] | None = None
    requests: str | None = None
    process: Mapping[str, Any] | None = None


class Session:
    """One loop of a scenario and its server. Nothing has run yet. Raises ScenarioError if it cannot."""

    def __init__(self, scenario: Scenario, loop: str, serve: Maker, terms: Terms) -> None:
        if terms.requests is not None:
            scenario = csv_requests.scenario_of(scenario)
        self.scenario = scenario.model_copy(update={"loop": scenario.loop.model_copy(update={"mode": loop})})
        self.loop, self.resolved = loop, scenarios.dump(self.scenario)
        workload = generators.build(self.scenario, terms.requests)
        self.requests, self.notices = workload.total, workload.notices
        self.server = serve(self.scenario, loop, workload)
        self._terms = terms
        self._pieces: Pieces | None = None
        self._facts = environment.environment(terms.command, workload.fingerprint(), scenario.seed, terms.process)
        self._facts |= self.server.facts

    @property
    def environment(self) -> dict[str, Any]:
        """What env.json holds, by now."""
        return self._facts | dict(self.server.facts)

    def write_to(self, writer: RunWriter, early: OnSteps | None = None) -> None:
        """Write the tables there piece by piece, should the run become a long one. A measured run is written when it
        is over: nothing may keep its CPU from it.
        """
        if not self.server.measured:
            counted = self._counted | {"window_s": metrics.named_window(self._terms.window_s)}
            self._pieces = Pieces(writer, {"about": self._about(complete=False), "counted": counted}, early)
            self.server.record.hand_to(self._pieces, writer.group)

    @property
    def _counted(self) -> dict[str, Any]:
        """What the numbers of a summary depend on beside the tables."""
        return counted(self.scenario, self.server.record.total_blocks, self._terms.window_s)

    def _about(self, *, complete: bool) -> dict[str, Any]:
        """The fields of a summary beside its numbers."""
        scenario = self.scenario
        about = {"name": scenario.name, "question": scenario.question, "loop": self.loop, "seed": scenario.seed}
        return {"schema_version": directory.SCHEMA_VERSION, "complete": complete} | about

    def set_requests(self, requests: str) -> None:
        """The requests that a server got which no workload knew before its run, as `Terms.requests` has them."""
        self._terms = replace(self._terms, requests=requests)
        self._facts["workload_hash"] = generators.build(self.scenario, requests).fingerprint()

    def result(self, incomplete: str | None = None) -> Result:
        """What has happened; `incomplete` says why that is not all."""
        record = self.server.record
        rows, steps = self._pieces.tables(record) if self._pieces else directory.contents(record)
        numbers = metrics.summarise(rows, steps, **self._counted)
        if record.transfers.rows:
            numbers["kv_moves"] = optional_tables.summarise_transfers(record.transfers, numbers["makespan_s"])
        requests = self._terms.requests
        files = {} if requests is None else {csv_requests.file_of(self.scenario): requests.encode()}
        files |= {**optional_tables.files_of(record), **self.server.files()}
        environment, summary = self.environment, self._about(complete=incomplete is None) | numbers
        notices = *self.notices, *self._sureness(), *(f"{self.loop}: {line}" for line in environment.get("notices", ()))
        resolved = self.resolved
        return Result(self.scenario, environment, summary, steps, rows, resolved, files, incomplete, notices=notices)

    def _sureness(self) -> list[str]:
        """How sure the times of a simulation are, where that is known."""
        cost = self.scenario.cost
        return coverage.sureness(cost) if isinstance(cost, TableSettings) and not self.server.measured else []


def counted(scenario: Scenario, total_blocks: int, window_s: tuple[float, float] | None) -> dict[str, Any]:
    """What the numbers of a summary depend on beside the tables, as metrics.summarise takes it."""
    price = scenario.hardware.price_usd_hour
    return {
        "total_blocks": total_blocks,
        "slo": scenario.slo.model_dump(exclude={"preset"}, exclude_none=True),
        "price_usd_hour": None if price is None else price * scenario.gpus,
        "window_s": window_s,
    }


Watch = Callable[[Session], AbstractContextManager[OnStep]]
"""Sees a session before it runs; what it yields is called with the time after every step, and may end it by raising."""


@contextmanager
def unwatched(session: Session) -> Iterator[OnStep]:
    """A watch that does nothing."""
    del session
    yield lambda _: None


def run(scenario: Scenario, serve: Maker, terms: Terms, watch: Watch = unwatched) -> Results:
    """Serve a scenario under each of its loops, one after the other."""
    return Results([one_loop(scenario, loop, serve, terms, watch) for loop in scenarios.loops(scenario)])


def answer(
    scenario: Scenario, serve: Maker, command: str, requests: Any, window_s: tuple[float, float] | None
) -> Result | Results:
    """What the front doors give: the Result of one loop, or the Results of both. `requests`: a table or None."""
    rows = None if requests is None else csv_requests.table_text(requests)
    results = run(scenario, serve, Terms(command, window_s, rows))
    return results if len(results) > 1 else next(iter(results.values()))


def one_loop(scenario: Scenario, loop: str, serve: Maker, terms: Terms, watch: Watch = unwatched) -> Result:
    """Serve a scenario under one loop."""
    session = Session(scenario, loop, serve, terms)
    with watch(session) as on_step:
        session.server.run(on_step)
    return session.result()
