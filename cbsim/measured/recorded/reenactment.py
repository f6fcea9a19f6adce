"""The replay of a case: its requests served by simulated servers, and the times that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from cbsim.cost.base import Cost
from cbsim.cost.table import TableCost
from cbsim.errors import ScenarioError
from cbsim.machine import simulate
from cbsim.machine.device import Device, OneGpu
from cbsim.machine.driver import Machine
from cbsim.machine.lockstep import Lockstep, balance
from cbsim.measured.recorded.case import Case
from cbsim.record.columns import NS
from cbsim.record.record import Record
from cbsim.record.tables import Steps, token_times
from cbsim.runs import assemble
from cbsim.runs.inbox import Client, Inbox
from cbsim.scenario.scenario import Scenario, depth
from cbsim.workload import generators
from cbsim.workload.requests import Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Served:
    """Times of requests by index, in seconds since the first was queued; a TTFT starts when its request is queued."""

    queued_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    output_tokens: npt.NDArray[np.int64]

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.queued_s

    @property
    def queue_s(self) -> Floats:
        """The times from queueing to the first step with the request, in seconds."""
        return self.scheduled_s - self.queued_s

    @property
    def prefill_s(self) -> Floats:
        """The times from the first step with the request to its first token, in seconds."""
        return self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> Floats:
        return self.last_token_s - self.queued_s

    @property
    def tpot_s(self) -> Floats:
        return (self.last_token_s - self.first_token_s) / np.maximum(1, self.output_tokens - 1)

    @property
    def makespan_s(self) -> float:
        return float(self.last_token_s.max() - self.queued_s.min())


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of the simulated servers. `steps` has a table per rank."""

    served: Served
    steps: Sequence[Steps]
    total_blocks: int  # cache blocks of one rank

    @property
    def step_count(self) -> int:
        return sum(len(table) for table in self.steps)

    @property
    def kv_use_peak(self) -> float:
        """The largest share of a rank's cache blocks in use."""
        return max(int(table["used_blocks"].max()) for table in self.steps if len(table)) / self.total_blocks

    @property
    def preemptions(self) -> int:
        return sum(int(table["preempted"].sum()) for table in self.steps)

    @property
    def recomputed_tokens(self) -> int:
        return sum(int(table["recomputed_tokens"].sum()) for table in self.steps)

    def at(self, seconds: Floats, column: str) -> Floats:
        """Return a step column at each of these times after the first token, summed over ranks; 0 before a rank's first
        step and after its last.
        """
        start = min(int(table["await_end_ns"][0]) for table in self.steps if len(table))
        total: Floats = np.sum([_at(table, seconds, column, start) for table in self.steps], axis=0)
        return total


def recorded(case: Case) -> Served:
    """Return the times that the real run recorded."""
    columns = np.array(case.taken, dtype=np.int64).T / NS
    outputs = np.array([row.output_tokens for row in case.arrivals], dtype=np.int64)
    queued, scheduled, first, last = columns
    return Served(queued, scheduled, first, last, outputs)


def replay(case: Case, scenario: Scenario) -> Replayed:
    """Serve the case's requests by `scenario`, which the case has made. Raises ScenarioError."""
    load = generators.build(scenario)
    if load.total != len(case.arrivals):
        raise ScenarioError(f"workload: got {load.total} requests, the recorded run has {len(case.arrivals)}")
    if scenario.loop.mode == "both":
        raise ScenarioError("loop.mode: got 'both', expected sync or async: a recorded run has one loop")
    if case.ranks == 1:
        server = simulate.machine(scenario, scenario.loop.mode, load)
        simulate.run(server)
        records = [server.record]
    else:
        records = _side_by_side(scenario, load, case.ranks)
    return replayed(records)


def replayed(records: Sequence[Record]) -> Replayed:
    """Return the outcome of the servers with these records. Raises ScenarioError if one has rejected a request."""
    for spec, reason in (each for record in records for each in record.refusals.items()):
        raise ScenarioError(f"kv_cache, scheduler: request {spec.id} cannot be served: {reason}")
    tables = [Steps.of(record) for record in records]
    return Replayed(_served(records, tables), tables, records[0].total_blocks)


def fed(
    env: simpy.Environment, scenario: Scenario, cost: Cost, device: Device, client: Client
) -> tuple[Machine, Inbox]:
    """Return a started server, and its inbox, which receives requests while it runs."""
    loop = scenario.loop.mode
    policy = assemble.scheduler(scenario, loop)
    record = Record(policy.pool.num_blocks)
    inbox = Inbox(client, record)
    inbox.news = env.event()
    machine = Machine(policy, cost, simulate.graphs(scenario, policy), device, inbox, record, depth(loop))
    env.process(machine.run(env))
    return machine, inbox


def _side_by_side(scenario: Scenario, load: Workload, ranks: int) -> list[Record]:
    """Serve a load by data-parallel servers: in lockstep if they share experts, else each at its own pace."""
    env, loop, cost = simpy.Environment(), scenario.loop.mode, assemble.cost_model(scenario)
    devices: Sequence[Device]
    if scenario.model.experts:
        if not isinstance(cost, TableCost):
            raise ScenarioError(f"cost.kind: got {scenario.cost.kind!r}, expected table: the servers share experts")
        devices = Lockstep(env, cost, ranks).ranks
    else:
        devices = [OneGpu(cost, depth=depth(loop), overlap=scenario.loop.streams) for _ in range(ranks)]
    fleet = [fed(env, scenario, cost, device, Workload([], 0)) for device in devices]
    env.process(balance(env, load.open, [inbox for _, inbox in fleet], [machine.scheduler for machine, _ in fleet]))
    env.run()
    return [machine.record for machine, _ in fleet]


def _served(records: Sequence[Record], tables: Sequence[Steps]) -> Served:
    """Return the times of all requests of all ranks, by index. All are served, as a recorded run has no others."""
    served: list[tuple[Any, ...]] = []
    for record, table in zip(records, tables, strict=True):
        rows = record.requests()
        columns = token_times(rows, table)
        marks = (columns.queued_ns, columns.scheduled_ns, columns.first_token_ns, columns.last_token_ns)
        served += zip(
            [row.index for row in rows], *(part.tolist() for part in (*marks, columns.generated)), strict=True
        )
    _, *times, generated = (np.array(part) for part in zip(*sorted(served), strict=True))
    queued, scheduled, first, last = ((part - times[0].min()) / NS for part in times)
    return Served(queued, scheduled, first, last, generated)


def _at(table: Steps, seconds: Floats, column: str, start_ns: int) -> Floats:
    ends, at_ns = table["await_end_ns"], start_ns + seconds * NS
    if not len(ends):
        return np.zeros_like(at_ns)
    step = np.searchsorted(ends, at_ns, side="right") - 1
    values: Floats = table[column][step].astype(float)
    return np.where((step < 0) | (at_ns > ends[-1]), 0.0, values)
