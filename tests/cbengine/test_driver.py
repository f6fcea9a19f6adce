"""The engine's driver and devices: what fails alone ends alone, a run that is cut short stays readable, times are those
of what happened, and nobody waits for a worker that is gone.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cbsim.errors import RunError
from cbsim.runs import reading

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.oracle import toy_run, toy_text
from support.engine.served import (
    INLINE,
    LOOPS,
    MS,
    SCHEDULERS,
    VOCAB,
    Case,
    Run,
    asked,
    cases,
    check_derived,
    check_text,
    check_texts,
    closed,
    server,
    shared,
    spec,
)

import cbengine
from cbengine import build, servers
from cbengine.build import Setup
from cbengine.cli.parser import main
from cbengine.device import process
from cbengine.device.base import DeviceError
from cbengine.device.layout import Header
from cbengine.device.process import Process
from cbsim.draw import render
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record import invariants
from cbsim.record.record import PHASES
from cbsim.runs import replan, run_command
from cbsim.runs.run_command import RunOptions
from cbsim.scenario import scenario
from cbsim.scenario.scenario import depth
from cbsim.workload.requests import Workload

WHY = "the logits of a token were not numbers"
PROCESS, MODELLED = Setup(device="process"), Setup(device="modelled")


def some(count: int = 6) -> list[RequestSpec]:
    """Requests that begin alike, apart by a few steps."""
    return [spec(i, 13, 6 + i, arrival_ns=5 * MS * i, **shared(0, 4)) for i in range(count)]


# -- logits that are no numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(data=st.data(), broken=st.integers(0, VOCAB - 1))
@settings(max_examples=8)
def test_whoever_meets_a_broken_token_fails(scheduler: str, loop: str, broken: int, data: st.DataObject) -> None:
    """... in its prompt or in what it says, at any time and in any state; and only they. The plans follow from the
    record all the same.
    """
    run, _ = toy_run(data.draw(cases(scheduler)), loop, broken=broken)
    assert len(run.rows) == run.load.total  # clients whose request fails go on
    for one, text in run.engine.sequences.items():
        wanted = toy_text(text.prompt, one.output_tokens)
        readable = [int(text.prompt[-1]), *wanted[:-1]]  # the token before each of them
        length = readable.index(broken) if broken in readable else one.output_tokens
        row = run.rows[one.index]
        if row.status == "failed":
            assert length < one.output_tokens
            assert row.reason == WHY
            assert len(text.outputs) == length or row.cancelled_poll >= 0
        elif row.status != "aborted":
            assert len(text.outputs) == length == one.output_tokens
        assert len(text.outputs) <= length
        assert text.outputs == wanted[: len(text.outputs)]
        event(row.status)
    check_derived(run, loop)


# -- refusals, waiting, hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_refused_request_is_told_why(scheduler: str, loop: str) -> None:
    """Two that can never fit are refused, with the reason; their clients go on, and the others are served."""
    specs = [spec(0, 13, 4), spec(1, 400, 4), spec(2, 300, 8), spec(3, 8, 5), spec(4, 13, 6)]
    run = Case(server(scheduler, 4, 20, 64, 4, sharing=True), closed(specs, 2)).run(loop)
    assert run.statuses == {"refused": 2, "length": 3}
    for index, row in run.rows.items():
        if row.status == "refused":
            assert index in (1, 2)
            assert f"{(0, 400, 300)[index]} tokens" in row.reason or "the cache has 20" in row.reason
            assert run.texts[index] == []
    for one, text in run.engine.sequences.items():
        assert len(text.outputs) == (0 if one.index in (1, 2) else one.output_tokens)
        check_text(text)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_nobody_is_served_before_it_arrives(scheduler: str) -> None:
    """With nothing to do the engine waits for the next arrival, and no longer."""
    specs = [spec(i, 8, 3, arrival_ns=i * 1000 * MS) for i in range(4)]
    run = Case(server(scheduler, 4, 60, 64, 4, sharing=True), Workload(specs, 4)).run("async")
    check_texts(run)
    for row in run.rows.values():
        assert 0 <= row.queued_ns - row.arrival_ns < 10 * MS
        assert run.steps["schedule_start_ns"][row.first_step] >= row.arrival_ns


# -- times ------------------------------------------------------------------------------------------------------------


def check_times(run: Run, loop: str) -> None:
    total = run.engine.scheduler.pool.num_blocks
    invariants.check(run.steps, depth=depth(loop), overlap=True, total_blocks=total)


@pytest.mark.parametrize("setup", [INLINE, MODELLED], ids=["inline", "modelled"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_times_are_those_of_a_machine(scheduler: str, loop: str, setup: Setup) -> None:
    """Phases follow each other, lanes do one thing at a time, nothing is read before it is there."""
    specs = [spec(i, 13, 6 + i, arrival_ns=MS * i, max_tokens=9 + i, **shared(0, 12)) for i in range(6)]
    run = Case(server(scheduler, 4, 24, 16, 4, sharing=True), Workload(specs, 6)).run(loop, setup, tick_ns=0)
    check_times(run, loop)
    assert run.statuses == {"stop": 6}
    if setup is INLINE:
        check_texts(run)
        assert (run.steps["compute_end_ns"] <= run.steps["launch_end_ns"]).all()  # computed while launched


@pytest.mark.parametrize("phase", ["schedule", "prepare", "launch", "update"])
def test_extra_work_shows_where_it_was_done(phase: str) -> None:
    """Every step's phase is longer by it, on a clock that counts only what it is asked; the others are as before."""

    def spent(injected: tuple[tuple[str, int], ...]) -> dict[str, Any]:
        case = Case(server("vllm", 4, 60, 64, 4, sharing=True), Workload([spec(0, 13, 8)], 1))
        table = case.run("async", Setup(device="inline", injected=injected)).steps
        return {name: table[f"{name}_end_ns"] - table[f"{name}_start_ns"] for name in PHASES}

    before, after = spent(()), spent(((phase, 50 * MS),))
    for name in PHASES:
        more = after[name] - before[name]
        assert (more >= 50 * MS).all() if name == phase else (more == 0).all(), (name, more)


# -- a worker process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worked() -> Run:
    """A run of a worker process on the real clock."""
    sizes = server("transformers_fifo", 4, 16, 16, 4, sharing=True)
    return Case(sizes, Workload(some(), 6)).run("async", PROCESS, tick_ns=0)


def test_a_worker_process_computes_the_same(worked: Run) -> None:
    """The text of a worker is that of `generate`. It can be closed once more."""
    check_texts(worked)
    worked.device.close()


def test_a_workers_times_are_those_of_a_machine(worked: Run) -> None:
    """... beside this one: its lanes start no step before the last one is through."""
    check_times(worked, "async")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_worker_ends_the_run(tmp_path: Path, ranks: int) -> None:
    """... at once, saying which signal it was; what was measured until then is kept."""

    def maker(*of: Any) -> servers.Measured:
        server = servers.maker(PROCESS)(*of)
        run = server.run

        def killing(progress: Any) -> None:
            def tell(now_ns: int) -> None:
                if server.record.step_count == 5:
                    os.kill(server.engine._device._workers[-1].pid, signal.SIGKILL)
                progress(now_ns)

            run(tell)

        server.run = killing
        return server

    options = RunOptions("tiny", (), tmp_path, (0, 100), None, (), as_json=False, quiet=True)
    asking = asked("vllm", "workload.requests=8", f"cost.tensor_parallel={ranks}")
    with mock.patch.object(render, "images", return_value=[b""]), pytest.raises(RunError) as error:
        run_command.one_loop(asking, "async", options, maker)
    which = "the worker process of rank 1" if ranks > 1 else "the worker process"
    assert str(error.value).startswith(f"{which} was killed by signal 9: what was measured until then is in ")
    (path,) = tmp_path.iterdir()
    run = reading.load(path)
    assert "killed by signal 9" in str(run.incomplete)
    assert replan.rederive(path) == (len(run.steps), len(run.steps), None)


def executor_plan() -> build.ExecutorPlan:
    return build.executor_plan(asked("vllm"), "sync", some(), PROCESS)


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(DeviceError, match=r"^the worker process ended with exit code 3$"):
        Process(partial(os._exit, 3), executor_plan().capacity, 1)


def test_a_worker_that_fails_in_a_step_says_why() -> None:
    """A block table entry far outside of the tables: torch's own words come through. After that there is no worker; the
    device can be closed, and closed again.
    """
    plan = executor_plan()
    device = Process(plan, plan.capacity, 1)
    header = Header(0, 0, 0, 0, 1, 0, updates=1, random=False, padded=False)
    device.staging[0][: header.size] = np.array([0, 1 << 30, 0])
    device.launch(0, header, StepPlan(0))
    with pytest.raises(DeviceError, match=r"the worker process failed: IndexError: index 1073741824 is out of bounds"):
        device.wait(0)
    with pytest.raises(DeviceError, match=r"^the worker process ended with exit code 0$"):
        device._receive(60.0)
    device.close()
    device.close()


def test_a_worker_that_is_stopped_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives, so that only a limit ends the wait; closing the device ends it, too."""
    monkeypatch.setattr(process, "STEP_S", 0.5)
    plan = executor_plan()
    device = Process(plan, plan.capacity, 1)
    worker = device._workers[0]
    os.kill(int(worker.pid or 0), signal.SIGSTOP)
    device.launch(0, Header(0, 0, 0, 0, 1, 0, updates=0, random=False, padded=False), StepPlan(0))
    with pytest.raises(DeviceError, match=r"^the worker process has not answered for "):
        device.wait(0)
    device.close()
    assert not worker.is_alive()


@pytest.mark.parametrize("setup", [INLINE, MODELLED], ids=["inline", "modelled"])
def test_devices_close_twice(setup: Setup) -> None:
    _, device = build.engine(asked("vllm"), "async", Workload(some(), 6), setup)
    device.close()
    device.close()


# -- whether driver and worker had a core each ------------------------------------------------------------------------


SMALL = ["workload.requests=3", "workload.output_tokens=4", "model.layers=1"]


def counted(folder: Path, pid: int, computed_ms: int, waited_ms: int) -> None:
    (folder / str(pid)).mkdir(exist_ok=True)
    (folder / str(pid) / "schedstat").write_text(f"{computed_ms * 10**6} {waited_ms * 10**6} 99\n")


@pytest.mark.parametrize(
    ("waited_ms", "count", "noticed"),
    [
        (2, 2, ""),
        (100, 2, "here is 2 for all that runs: of the time that it had work, the driver 0%, the worker 10% waited"),
        (0, 1, "here is 1 for all that runs: of the time that it had work, the driver 0%, the worker 0% waited"),
    ],
)
def test_who_waits_for_a_core_is_no_device_beside_the_cpu(
    waited_ms: int, count: int, noticed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 5% of the time that it wanted one; what was before the run does not count."""
    monkeypatch.setattr(process, "PROC", tmp_path)
    monkeypatch.setattr(process, "cores", lambda: count)
    counted(tmp_path, 1, 10, 5000)
    counted(tmp_path, 2, 10, 7000)
    waits = process.Waits({"driver": 1, "worker": 2})
    counted(tmp_path, 1, 510, 5000)
    counted(tmp_path, 2, 910, 7000 + waited_ms)
    facts = waits.facts()
    assert facts["waited_for_core"] == {"driver": 0.0, "worker": round(waited_ms / (900 + waited_ms), 4)}
    assert noticed in "".join(facts.get("notices", [])) and bool(noticed) == ("notices" in facts)


def test_a_system_that_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the counts nothing is said but of a single core."""
    monkeypatch.setattr(process, "PROC", tmp_path)
    monkeypatch.setattr(process, "cores", lambda: 2)
    assert process.Waits({"driver": 1}).facts() == {"cores": 2, "waited_for_core": {}}
    monkeypatch.setattr(process, "cores", lambda: 1)
    (notice,) = process.Waits({"driver": 1}).facts()["notices"]
    assert notice.endswith("driver and worker want a core each, here is 1 for all that runs")


def test_the_terminal_says_that_the_loops_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one core a worker process is no device of its own: each loop's result says so, on stderr, and so does the
    Result and env.json.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        words = [word for field in SMALL for word in ("--set", field)]
        assert main(["replay", "tiny_cpu", "--device", "process", *words, "--out", str(tmp_path), "--quiet"]) == 0
        result = cbengine.run(scenario.load("tiny_cpu", [*SMALL, "loop.mode=sync"]), device="process")
    finally:
        os.sched_setaffinity(0, allowed)
    said = capsys.readouterr().err
    for loop in ("sync", "async"):
        assert f"notice: {loop}: sync against async cannot be judged on this machine: driver and worker want" in said
    (notice,) = result.notices  # type: ignore[union-attr]
    assert notice == f"sync: {result.environment['notices'][0]}"  # type: ignore[union-attr]
