"""Servers among which requests can be shared without knowing them: simulated one after the other, or in processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

import numpy as np

from cbsim.cost.base import Cost
from cbsim.machine.driver import Machine
from cbsim.policy.request import RequestSpec
from cbsim.record.record import Record, Records
from cbsim.record.tables import FinishedRecord
from cbsim.runs import progress
from cbsim.runs.assemble import scheduler
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

Build = Callable[[Scenario, Workload, dict[int, Cost]], Machine]
Run = Callable[[Machine, Callable[[int], None] | None], None]
LOOKS_EVERY_S = 0.2  # at whether the run is to end


class Separate:
    """Servers, each with the requests that `choose` gives it. What is kept of one that is over are its tables. With
    `jobs` processes their tables are the same. `build` and `run` are those of one server.
    """

    def __init__(
        self,
        servers: Sequence[Scenario],
        workload: Workload,
        choose: Callable[[RequestSpec, int], int],
        build: Build,
        run: Run,
        jobs: int = 1,
    ) -> None:
        chosen = (choose(spec, spec.arrival_ns) for spec in workload.arriving())
        self._chosen = np.fromiter(chosen, dtype=np.int32, count=len(workload.open))
        self._workload = workload
        self._servers, self._build, self._run, self._jobs = servers, build, run, jobs
        self.schedulers: list[Any] = []  # of servers that are over, in this process
        self.now_ns = 0
        blocks = {id(one): scheduler(one, one.loop.mode).pool.num_blocks for one in servers}
        self.record = Records([Record(blocks[id(one)]) for one in servers])

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Run all servers to the end of their requests."""
        if self._jobs > 1:
            self._run_in_processes(on_step)
            return
        costs: dict[int, Cost] = {}
        for number, one in enumerate(self._servers):
            server = self._build(one, self._part(number), costs)
            self.record.put(number, server.record)
            self._run(server, on_step)
            self.record.put(number, FinishedRecord.of(server.record))
            self.now_ns = max(self.now_ns, server.now_ns)
            self.schedulers.append(server.scheduler)

    def _part(self, number: int) -> Workload:
        """Return the requests of a server, which exist while it runs."""
        return self._workload.part(np.flatnonzero(self._chosen == number))

    def _task(self, number: int) -> tuple[Any, ...]:
        part = self._part(number)
        cancels = [(at_ns, spec.index) for at_ns, spec in part.cancels]
        return self._servers[number], [*map(_fields, part.arriving())], cancels, self._build, self._run

    def _run_in_processes(self, on_step: Callable[[int], None] | None) -> None:
        pool = progress.worker_pool(min(self._jobs, len(self._servers)))
        try:
            left = {
                progress.submitted(pool, _served, self._task(number)): number for number in range(len(self._servers))
            }
            while left:
                done, _ = wait(left, LOOKS_EVERY_S, FIRST_COMPLETED)
                for future in done:
                    kept, now_ns = future.result()
                    self.record.put(left.pop(future), kept)
                    self.now_ns = max(self.now_ns, now_ns)
                if on_step:
                    on_step(self.now_ns)
        finally:
            progress.end_pool(pool)


def _fields(spec: RequestSpec) -> tuple[Any, ...]:
    """Return a request as plain values, which cross to another process whether the core is compiled or not."""
    of = None if spec.sample_of is None else spec.sample_of.index
    lengths = spec.prompt_tokens, spec.output_tokens, spec.max_tokens, spec.priority
    shared = spec.prefix, spec.prefix_block_tokens, spec.prefix_tokens
    return spec.index, spec.id, spec.arrival_ns, *lengths, *shared, of, spec.computed_elsewhere, spec.fetched_later


def _requests(rows: Iterable[tuple[Any, ...]]) -> dict[int, RequestSpec]:
    specs: dict[int, RequestSpec] = {}
    for index, *values, of, elsewhere, later in rows:
        made: tuple[Any, ...] = (index, *values, None if of is None else specs[of], elsewhere, later)
        specs[index] = RequestSpec(*made)
    return specs


def _served(task: tuple[Any, ...]) -> tuple[FinishedRecord, int]:
    """Run one server in this process; return its tables and the time of its end."""
    scenario, rows, cancelled, build, run = task
    specs = _requests(rows)
    cancels = [(at_ns, specs[index]) for at_ns, index in cancelled]
    server = build(scenario, Workload([*specs.values()], len(specs), cancels), {})
    run(server, None)
    return FinishedRecord.of(server.record), server.now_ns
