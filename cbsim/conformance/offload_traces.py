"""The additional fields of traces of vLLM's connectors. Offload: lookups, loads, stores, the host's tier; and the
workers of the recording, which complete a job a set number of steps after it was ordered. Hand-off between a prefill
and a decode side: the transfers sent and received, with times of the recording's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from cbsim.conformance.reader import Line
from cbsim.kv.host_cache import Arc
from cbsim.policy.observer import Observer
from cbsim.policy.plan import StepPlan, Underway
from cbsim.policy.request import Request
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from cbsim.schedulers.hand_off import HandOff
from cbsim.schedulers.vllm.offload import NativeOffload, SimpleOffload
from cbsim.schedulers.vllm.scheduler import VllmScheduler

CONNECTORS = {
    "simple_cpu": {"cpu_blocks", "lazy"},
    "offloading": {"cpu_chunks", "blocks_per_chunk", "eviction_policy", "extra"},
    "pd": {"role"},
}
EXTRA = {"offload_prompt_only"}
STEPS = {Direction.IN: "load_steps", Direction.OUT: "store_steps"}


def unsupported(config: Line) -> str | None:
    """Return why the policy does not model a workload's `connector`, None if it does."""
    connector = config.get("connector")
    if connector is None:
        return None
    if connector["kind"] not in CONNECTORS:
        return f"connector {connector['kind']} is not modelled"
    known = {"kind", "load_steps", "store_steps", *CONNECTORS[connector["kind"]]}
    unknown = [*(connector.keys() - known), *(connector.get("extra", {}).keys() - EXTRA)]
    return f"connector's option {', '.join(sorted(unknown))} is not modelled" if unknown else None


def options(config: Line) -> Line:
    """Return the scheduler options of a workload's `connector`, by name."""
    connector = config.get("connector")
    if connector is None:
        return {}
    if connector["kind"] == "pd":
        return {"kv_connector": "hand_off", "kv_role": connector["role"]}
    if connector["kind"] == "simple_cpu":
        blocks, lazy = connector["cpu_blocks"], connector.get("lazy", False)
        return {"kv_connector": "simple_cpu", "host_blocks": blocks, "lazy_offload": lazy}
    per_chunk = connector.get("blocks_per_chunk", 1)
    return {
        "kv_connector": "offloading",
        "host_blocks": connector["cpu_chunks"] * per_chunk,
        "blocks_per_chunk": per_chunk,
        "eviction_policy": connector.get("eviction_policy", "lru"),
        **connector.get("extra", {}),
    }


class Heard(Observer):
    """An observer of planning: lookups, loads, blocks that left tables, block counts of released tables."""

    def __init__(self) -> None:
        self.match: list[list[Any]] = []
        self.alloc: list[list[Any]] = []
        self.dropped: list[list[Any]] = []
        self.tables: dict[Request, list[int]] = {}

    def matched(self, request: Request, local: int, external: int | None) -> None:
        self.match.append([request.spec.id, local, external, bool(external)])

    def loading(self, request: Request, external: int, blocks: Sequence[int]) -> None:
        self.alloc.append([request.spec.id, external, list(blocks)])

    def left(self, request: Request, group: int, blocks: Sequence[int]) -> None:
        self.dropped.append([request.spec.id, group, list(reversed(blocks))])

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        self.tables.setdefault(request, []).append(len(blocks))

    def take(self) -> Line:
        line: Line = {"match": self.match, "alloc": self.alloc}
        self.match, self.alloc = [], []
        return line

    def take_tables(self) -> tuple[list[list[Any]], dict[Request, list[int]]]:
        taken = self.dropped, self.tables
        self.dropped, self.tables = [], {}
        return taken


class ConnectorLines:
    """The fields of schedule and update lines on a connector, and the recording's workers; a kind of connector adds to
    both. A transfer completes a set time after the start of the step that ordered it, and the first step that ends then
    or later, perhaps that step itself, reports it. A job that a plan awaits completes with that step. Some expected
    blocks never arrive. Time is that of the trace's clock, or steps (`by_step`). The workers check that no block that
    they read or write is allocated.
    """

    by_step = True
    sorts_received = False  # by id, not by their completion
    connector: Any
    unfetched: Iterable[Request] = ()  # requests whose blocks wait to be sent
    jobs: Callable[[StepPlan], Line]  # the transfers of a plan
    done: Callable[[int, tuple[int, ...]], Line]  # what a step's result, which reports jobs, says of transfers

    def __init__(self, scheduler: VllmScheduler, heard: Heard, recorded: Line, workload: Line) -> None:
        assert scheduler.transfers is not None
        self._transfers, self._heard, self._recorded = scheduler.transfers, heard, recorded
        self.connector = scheduler.transfers.connector
        self._requests = {request["id"]: request for request in workload["requests"]}
        self._underway = Underway(scheduler.pool.block_size)
        self._due: dict[int, int] = {}  # job -> time at which it completes
        self._bad: dict[int, tuple[int, ...]] = {}  # job -> blocks that never arrive
        self._broken: tuple[int, ...] = ()  # the missing blocks reported last
        self._reports: dict[int, tuple[int, ...]] = {}  # step -> jobs that its result reports
        self._loading: dict[int, list[str]] = {}  # job -> ids of requests

    def lasts(self, transfer: Transfer) -> int:
        """Return the time that a transfer takes."""
        return int(self._recorded[STEPS[transfer.direction]])

    def tier(self) -> Line:
        """Return the state of the host's tier, if there is one."""
        return {}

    def planned(self, plan: StepPlan) -> Line:
        """Return the connector's fields of a schedule line."""
        for transfer in plan.transfers:
            if transfer.direction is Direction.IN and transfer.spec is not None:
                self._loading.setdefault(transfer.job, []).append(transfer.spec.id)
        holding = list(self._transfers.holding)
        remote = [request.spec.id for request in holding if not self._transfers.loads[request].named]
        line = {"holding": [request.spec.id for request in holding], "remote": remote, **self._heard.take()}
        return line | {"jobs": self.jobs(plan)} | self.tier()

    def launched(self, plan: StepPlan, start: int, end: int) -> None:
        """Take the transfers of a plan, whose step runs from start to end. Must be called for every plan, in order."""
        if self.by_step:
            start = end = plan.step
        self._underway.planned(plan)
        for transfer in plan.transfers:
            if transfer.job != IN_ORDER:
                self._due[transfer.job] = start + self.lasts(transfer)
        self._due.update(dict.fromkeys(self._due.keys() & plan.awaited, end))  # others are reported already
        over = sorted([job for job, at in self._due.items() if at <= end], key=lambda job: (self._due[job], job))
        self._reports[plan.step] = tuple(over)
        for job in over:
            del self._due[job]

    def over(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the jobs that the result of a step reports, and their blocks that never arrived."""
        jobs = self._reports[step]
        self._underway.completed(jobs)
        self._broken = tuple(block for job in jobs for block in self._bad.pop(job, ()))
        return jobs, self._broken

    def updated(self, plan: StepPlan) -> Line:
        """Return the connector's fields of an update line."""
        jobs = self._reports.pop(plan.step)
        received = [name for job in jobs for name in self._loading.pop(job, ())]
        received = sorted(received) if self.sorts_received else received
        unreleased = [*self.unfetched, *(request for request, load in self._transfers.loads.items() if load.dead)]
        unreleased.sort(key=lambda request: (request.spec.arrival_ns, request.spec.index))
        line: Line = {"recved": received, "sent": [], "bad": [], "kept": [request.spec.id for request in unreleased]}
        return line | self.done(plan.step, jobs) | self.tier()


class SimpleLines(ConnectorLines):
    """The lines of SimpleCPUOffloadConnector: a step's transfers are an event; loads and stores are numbered apart."""

    connector: SimpleOffload

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._numbers = {direction: count() for direction in Direction}
        self._events: dict[int, int] = {}  # job -> number of the store

    def jobs(self, plan: StepPlan) -> Line:
        line: Line = {"flush": bool(plan.changes.preempted)}
        if loads := [transfer for transfer in plan.transfers if transfer.direction is Direction.IN]:
            line["load"] = {"event": next(self._numbers[Direction.IN]), "reqs": [m.spec.id for m in loads if m.spec]}
            line["load"] |= {"cpu": _joined(m.sources for m in loads), "gpu": _joined(m.targets for m in loads)}
        if stores := [transfer for transfer in plan.transfers if transfer.direction is Direction.OUT]:
            event = self._events[stores[0].job] = next(self._numbers[Direction.OUT])
            line["store"] = {"event": event, "gpu": _joined(m.sources for m in stores)}
            line["store"]["cpu"] = _joined(m.targets for m in stores)
        return line

    def done(self, step: int, jobs: tuple[int, ...]) -> Line:
        del step
        return {"stored": [self._events[job] for job in jobs if job in self._events]}

    def tier(self) -> Line:
        return {"cpu": {"free": self.connector.host.free, "cached": self.connector.host.keyed}}


def _joined(sides: Iterable[tuple[int, ...]]) -> list[int]:
    return [block for side in sides for block in side]


class NativeLines(ConnectorLines):
    """The lines of OffloadingConnector: a request's load or store in a step is a job, all numbered together."""

    sorts_received = True
    connector: NativeOffload

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._per_chunk = self._recorded.get("blocks_per_chunk", 1)
        self._count = count()  # as the policy numbers jobs, those in order with a step too
        self._at_once: dict[int, list[int]] = {}  # step -> stores completed before its rows

    def jobs(self, plan: StepPlan) -> Line:
        loads: list[list[Any]] = []
        stores: list[list[Any]] = []
        at_once: list[int] = []
        for transfer in plan.transfers:
            assert transfer.spec is not None
            number = next(self._count)
            if transfer.job == IN_ORDER:
                at_once.append(number)
            if transfer.direction is Direction.IN:
                chunks = self._chunks(transfer.sources)
                loads.append([number, transfer.spec.id, chunks, list(transfer.targets), False])
            else:
                stores.append([number, transfer.spec.id, list(transfer.sources), self._chunks(transfer.targets)])
        self._at_once[plan.step] = at_once
        return {"load": loads, "store": stores, "flush": sorted([*at_once, *plan.awaited])}

    def lasts(self, transfer: Transfer) -> int:
        return super().lasts(transfer) + (transfer.direction is Direction.OUT)  # a store takes a step more

    def _chunks(self, blocks: tuple[int, ...]) -> list[int]:
        return list(dict.fromkeys(block // self._per_chunk for block in blocks))

    def done(self, step: int, jobs: tuple[int, ...]) -> Line:
        return {"jobs_done": sorted([*self._at_once.pop(step), *jobs])}

    def tier(self) -> Line:
        cache = self.connector.cache
        line: Line = {"free": cache.free, "evictable": cache.resting, "writing": cache.writing}
        arc = cache.eviction
        if isinstance(arc, Arc):
            line |= {"t1": len(arc.once), "t2": len(arc.often)}
            line |= {"b1": len(arc.once_ghosts), "b2": len(arc.often_ghosts), "target": round(arc.goal, 6)}
        return {"cpu": line}


LATENCY = {Direction.IN: "recv_us", Direction.OUT: "send_us"}


class HandOffLines(ConnectorLines):
    """The lines of the transfers of a prefill or decode side; a request states how long its transfers take."""

    by_step = False
    connector: HandOff

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._sending: dict[int, str] = {}  # job -> id
        self.unfetched = self.connector.unfetched

    def lasts(self, transfer: Transfer) -> int:
        assert transfer.spec is not None
        return int(self._requests[transfer.spec.id].get(LATENCY[transfer.direction], 0))

    def jobs(self, plan: StepPlan) -> Line:
        line: Line = {"recv": [], "send": []}
        for transfer in plan.transfers:
            assert transfer.spec is not None
            name = transfer.spec.id
            if transfer.direction is Direction.IN:
                line["recv"].append([name, list(transfer.targets)])
                bad = self._requests[name].get("fail_blocks", ())
                self._bad[transfer.job] = tuple(b for i, b in enumerate(transfer.targets) if i in bad)
            else:
                line["send"].append([name, len(transfer.sources)])
                self._sending[transfer.job] = name
        return line

    def done(self, step: int, jobs: tuple[int, ...]) -> Line:
        del step
        sent = [self._sending.pop(job) for job in jobs if job in self._sending]
        return {"sent": sent, "bad": sorted(self._broken)}


LINES = {"simple_cpu": SimpleLines, "offloading": NativeLines, "pd": HandOffLines}
