"""A simulated run that is interrupted leaves tables that agree with each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from support.helpers import Overridden
from support.machines import DEPTHS, NAMES, STEP, check_tokens, load, run, server, spec, table, vllm_options

from cbsim.machine.driver import Machine
from cbsim.policy.plan import StepPlan
from cbsim.record import invariants
from cbsim.record.tables import requests_of, token_times


@dataclass
class Interrupted:
    """STEP until the call number `at` of any of its methods, which is interrupted."""

    at: int

    def _count(self) -> None:
        self.at -= 1
        if self.at < 0:
            raise KeyboardInterrupt

    def cpu_ns(self, plan: StepPlan | None) -> tuple[int, int, int, int]:
        self._count()
        return 1, 1, 1, 1

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        self._count()
        return 2, 30, 2


def check_partial(machine: Machine, depth: int) -> None:
    """The tables agree: no request refers to a step that is not there, and the steps obey the rules."""
    steps, rows = table(machine.record), requests_of(machine.record)
    invariants.check(steps, depth=depth, overlap=True, total_blocks=machine.record.total_blocks)
    assert all(row.first_step < len(steps) and sum(row.token_runs[-2:]) <= len(steps) for row in rows)
    requests = token_times(rows, steps)
    assert (requests.generated[requests.done] == [r.output_tokens for r in rows if r.status == "length"]).all()
    assert (requests.first_token_ns[requests.done] > 0).all()
    check_tokens(steps, [row.token_runs for row in rows])


@NAMES
@DEPTHS
def test_an_interrupted_run_leaves_tables_that_agree(name: str, depth: int) -> None:
    """Interrupted while the n-th step is planned or launched, for every n, with one or two steps in flight."""
    asked = [spec(i, 3 + i, 4 + i % 3, at=20 * i) for i in range(5)]
    for at in range(200):
        machine = server(load(*asked), Interrupted(at), name=name, depth=depth)
        try:
            run(machine)
        except KeyboardInterrupt:
            check_partial(machine, depth)
        else:
            break
    assert 10 < at < 199


@NAMES
@DEPTHS
@pytest.mark.parametrize("applied", [1, 3, 6])
def test_an_interruption_between_result_and_record(name: str, depth: int, applied: int) -> None:
    """The policy has taken a step's result, and the driver does not get to write it down: that step never was."""
    asked = [spec(i, 3 + i, 4 + i % 3, at=20 * i) for i in range(5)]
    machine = server(load(*asked), STEP, name=name, depth=depth)
    update, calls = machine.scheduler.update, []

    def counted(*arguments: Any) -> Any:
        outcome = update(*arguments)
        calls.append(outcome)
        if len(calls) == applied:
            raise KeyboardInterrupt
        return outcome

    machine.scheduler = Overridden(machine.scheduler, update=counted)
    with pytest.raises(KeyboardInterrupt):
        run(machine)
    assert machine.record.step_count == applied - 1
    check_partial(machine, depth)


def test_progress_is_reported_and_may_interrupt() -> None:
    """`on_step` hears the simulated time; if it raises, the run stops there, with the step it was told of recorded."""
    options = vllm_options(max_model_len=1024, num_blocks=257)
    heard: list[int] = []

    def stop_late(now_ns: int) -> None:
        heard.append(now_ns)
        if now_ns > 2000:
            raise KeyboardInterrupt

    machine = server(load(spec(0, 4, 600)), STEP, options=options, depth=2)
    with pytest.raises(KeyboardInterrupt):
        run(machine, stop_late)
    assert heard[0] == 10
    assert machine.record.step_count == heard[-1] // 10
    check_partial(machine, 2)
