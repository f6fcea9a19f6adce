"""A worker process as a device: real overlap with the driver on two cores, as between a CPU and a GPU.

Steps and results cross in shared memory; a pipe carries which buffer and the lengths, and what KV moves with a step
where any does. Nobody waits for ever: whoever waits looks at the other side's life every now and then. The worker ends
when its pipe closes, so it never outlives the driver.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np
import torch

from cbengine.batch import Capacity
from cbengine.device.base import DeviceError, Ints, Lanes
from cbengine.device.cores import Waits
from cbengine.device.executor import Executor
from cbengine.device.layout import Header, arrays
from cbengine.device.moves import Moved
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import Direction, Transfer

LOOK_S = 0.2  # how often the other side's life is looked at
START_S = 120.0  # the longest that a worker may take to load its model
STEP_S = 600.0  # ... and to answer for a step: a stopped one never does, and no step of a CPU is that long
Build = Callable[[], Executor]


class Process:
    """`build` makes the executor, in the worker: it must be picklable."""

    def __init__(self, build: Build, capacity: Capacity, depth: int) -> None:
        """Starts the worker and waits until it is ready. Raises DeviceError."""
        spawning = multiprocessing.get_context("spawn")
        shared = [spawning.RawArray("i", size) for size in (capacity.staging, capacity.results) * depth]
        views = [np.frombuffer(memory, dtype=np.int32) for memory in shared]
        self.staging, self._results = views[0::2], views[1::2]
        self._sent: dict[int, tuple[int, int]] = {}  # staging buffer -> (values that come back, when it was sent)
        self._idle_ns = self._arrived_ns = 0  # end of the last step or move known of, and when its result came
        self._moved: list[Moved] = []  # over, and nobody has been told
        self._pipe, theirs = spawning.Pipe()
        self._worker: SpawnProcess = spawning.Process(target=_work, args=(build, shared, theirs), daemon=True)
        held = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # inherited: an interrupt is the driver's alone
        try:
            self._worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()
        self.facts: dict[str, Any] = {"device": "cpu, worker process", "threads": 1}
        self._receive(START_S)
        self._waits = Waits({"driver": os.getpid(), "worker": self._worker.pid or 0})

    def bucket(self, rows: int) -> int:
        return rows

    def launch(self, slot: int, header: Header, plan: StepPlan) -> None:
        self._sent[slot] = header.results, time.perf_counter_ns()
        try:
            self._pipe.send((slot, tuple(header), _said(plan) if plan.transfers or plan.awaited else None))
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        count, sent = self._sent.pop(slot)
        begun_ns = time.perf_counter_ns()
        done, start, end, moved = self._receive(STEP_S)
        assert done == slot, (done, slot)
        if moved:  # all of it before this step's rows, and no time of its lanes
            self._moved += moved
            self._idle_ns = max(self._idle_ns, moved[-1].end_ns)
        arrived = time.perf_counter_ns() if begun_ns < end else end  # a result that lay waiting took no time to come
        d2h_start = max(end, self._arrived_ns)
        self._arrived_ns = max(arrived, d2h_start)
        lanes = Lanes(max(sent, self._idle_ns), start, start, end, d2h_start, self._arrived_ns)
        self._idle_ns = end
        return self._results[slot][:count].copy(), lanes

    def moved(self, until_ns: int | None) -> list[Moved]:
        del until_ns  # results say what was over before their rows ran, so the next one says more
        told, self._moved = self._moved, []
        return told

    def _receive(self, limit_s: float) -> tuple[int, int, int, list[Moved]]:
        """The worker's next word. A worker that is dead or silent for longer than `limit_s` is an error."""
        waited = 0.0
        while not self._pipe.poll(LOOK_S):
            waited += LOOK_S
            if not self._worker.is_alive():
                raise self._died()
            if waited > limit_s:
                raise DeviceError(f"the worker process has not answered for {limit_s:.0f} s")
        try:
            word = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if isinstance(word, str):
            raise DeviceError(f"the worker process failed: {word}")
        return int(word[0]), int(word[1]), int(word[2]), word[3]

    def _died(self) -> DeviceError:
        self._worker.join(1.0)
        code = self._worker.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return DeviceError(f"the worker process {how}")

    def close(self) -> None:
        """End the worker. `facts` say how it shared the machine's cores, if it lived until now."""
        if self._worker.is_alive():
            self.facts |= self._waits.facts()
        self._pipe.close()
        self._worker.join(2.0)
        if self._worker.is_alive():
            self._worker.kill()
            self._worker.join()
        self.staging, self._results = [], []


Said = tuple[int, list[tuple[int, tuple[int, ...], tuple[int, ...], int]], tuple[int, ...]]


def _said(plan: StepPlan) -> Said:
    """What a plan moves, without the requests whose KV it is: step, moves, jobs to wait for."""
    return plan.step, [(int(m.direction), m.sources, m.targets, m.job) for m in plan.transfers], plan.awaited


def _heard(said: Said) -> tuple[int, list[Transfer], tuple[int, ...]]:
    step, moves, awaited = said
    return (
        step,
        [Transfer(Direction(way), sources, targets, None, job) for way, sources, targets, job in moves],
        awaited,
    )


def _work(build: Build, shared: list[Any], pipe: Connection) -> None:
    """The worker: one step after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    torch.set_num_threads(1)
    try:
        executor = build()
        mover = executor.mover()
        buffers = [torch.from_numpy(np.frombuffer(memory, dtype=np.int32)) for memory in shared]
        pipe.send((0, 0, 0, []))
        while True:
            slot, lengths, said = pipe.recv()
            header = Header(*lengths)
            if said is not None:
                step_number, moves, awaited = _heard(said)
                mover.before_rows(step_number, moves, awaited)
            start = time.perf_counter_ns()
            step = arrays(buffers[2 * slot], header)
            executor.update_tables(step)
            buffers[2 * slot + 1][: header.results] = executor.run(step, header)
            pipe.send((slot, start, time.perf_counter_ns(), mover.told() if mover.over else []))
            if said is not None:
                mover.after_rows(step_number, moves)
    except (EOFError, ConnectionError):  # the driver has gone
        return
    except Exception as error:  # whatever it is, the driver is to say it
        with suppress(ConnectionError):
            pipe.send(f"{type(error).__name__}: {error}")
