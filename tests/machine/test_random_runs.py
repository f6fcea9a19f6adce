"""Random runs of every scheduler with random settings, from the scenario to the tables that reports read.

Caches are tiny, clients leave at any moment, requests share prefixes and have samples. After every step each block is
free or owned, once; at the end no request is lost, nothing is kept, and our own reader takes the directory that was
written and derives the same plans from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.random_scenarios import any_scenario, checks_of

from cbsim.errors import DeadlockError
from cbsim.machine.simulate import Simulation
from cbsim.record import invariants
from cbsim.record.tables import Steps, requests_of
from cbsim.runs import reading, replan, running
from cbsim.scenario.scenario import Scenario, depth
from cbsim.schedulers import registry
from cbsim.workload import generators
from cbsim.workload.requests import Workload

OFTEN = {"vllm": 10, "sglang": 5, "trtllm": 3, "transformers_fifo": 4, "transformers_prefill_first": 4}  # else 2
NAMES = pytest.mark.parametrize("name", registry.OURS)


def check_one_run(name: str, seed: int, folder: Path) -> None:
    scenario = any_scenario(name, random.Random(f"{name} {seed}"), folder)
    made: list[Simulation] = []

    def serve(scenario: Scenario, loop: str, workload: Workload) -> Simulation:
        made.append(Simulation(scenario, loop, workload))
        return made[0]

    @contextmanager
    def watch(session: running.Session) -> Iterator[Callable[[int], None]]:
        checks = checks_of(made[0].machine.scheduler)
        yield lambda _: [check() for check in checks] and None  # type: ignore[func-returns-value]

    mode, stuck = scenario.loop.mode, False
    try:
        result = running.one_loop(scenario, mode, serve, running.Terms("any"), watch)
    except DeadlockError:
        chosen: Any = scenario.scheduler
        assert name in ("vllm", "sglang")
        assert chosen.policy == "priority" if name == "vllm" else chosen.ignore_eos, "as in the original"
        stuck = True
    record, policy = made[0].record, made[0].machine.scheduler
    steps, blocks = Steps.of(record), record.total_blocks
    invariants.check(steps, depth=depth(mode), overlap=scenario.loop.streams, total_blocks=blocks)
    if stuck:
        return
    for check in checks_of(policy):
        check()
    rows = requests_of(record)
    assert len(rows) == generators.build(scenario).total
    for row in rows:
        tokens = sum(row.token_runs[1::2])
        assert row.status in ("length", "stop", "aborted", "refused"), row
        assert row.status == "aborted" or tokens <= row.output_tokens
        assert row.status != "stop" or tokens == row.output_tokens
        assert row.status != "refused" or not tokens
    assert policy.pool.free == policy.pool.num_blocks
    assert not policy.requests
    assert not len(policy.waiting) + len(policy.running)
    numbers = running.one_loop(scenario, mode, Simulation, running.Terms("any", digests=False))
    assert json.dumps(numbers.summary) == json.dumps(result.summary)
    assert numbers.binding == result.binding
    assert not numbers.step_numbers["plan_hash"].any()
    path = result.save(folder / "runs")
    reading.check_run(reading.load(path), mode)
    assert replan.rederive(path).difference is None


def check_runs(name: str, folder: Path, seeds: range) -> None:
    for seed in seeds:
        (run := folder / str(seed)).mkdir()
        check_one_run(name, seed, run)


@NAMES
def test_random_runs_lose_nothing_and_can_be_read(name: str, tmp_path: Path) -> None:
    check_runs(name, tmp_path, range(OFTEN.get(name, 2)))


@pytest.mark.slow
@NAMES
def test_many_random_runs(name: str, tmp_path: Path) -> None:
    check_runs(name, tmp_path, range(10, 10 + 8 * OFTEN.get(name, 2)))
