"""A worker process as a device, with real overlap with the driver on two cores, as between a CPU and a GPU.

Steps and results cross in shared memory; a pipe carries the buffer's index, the lengths, and a step's KV transfers if
it has any. No wait is unbounded: the waiting process checks regularly that the other one lives. The worker ends when
its pipe closes, so it never outlives the driver.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cbengine.batch import Capacity
from cbengine.device.base import DeviceError, EngineDevice, Lanes
from cbengine.device.executor import Executor
from cbengine.device.layout import Header, Ints, arrays
from cbengine.device.moves import Moved
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import Direction, Transfer

PROC = Path("/proc")
SHARED = 0.05  # share of the time wanted on a core: a process that waits for more counts as having no core of its own
LOOK_S = 0.2  # interval of checks that the other process lives
STEP_S = 600.0  # the longest that a step may take: a stopped worker never answers, and no step of a CPU is that long
Build = Callable[[], Executor]
Packed = tuple[int, list[tuple[int, tuple[int, ...], tuple[int, ...], int]], tuple[int, ...]]
"""Step, transfers, jobs to wait for."""


class Process(EngineDevice):
    """A worker process. `build` makes the executor in the worker, so it must be picklable."""

    def __init__(self, build: Build, capacity: Capacity, depth: int) -> None:
        """Start the worker and wait until it is ready. Raises DeviceError."""
        spawning = multiprocessing.get_context("spawn")
        shared = [spawning.RawArray("i", size) for size in (capacity.staging, capacity.results) * depth]
        views = [np.frombuffer(memory, dtype=np.int32) for memory in shared]
        self.staging, self._results = views[0::2], views[1::2]
        self._sent: dict[int, tuple[int, int]] = {}  # staging buffer -> (result values, time of sending)
        self._idle_ns = self._arrived_ns = 0  # end of the last step or transfer known, and when its result came
        self._moved: list[Moved] = []  # ended, and not reported yet
        self._pipe, far_end = spawning.Pipe()
        self._worker: SpawnProcess = spawning.Process(target=_work, args=(build, shared, far_end), daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: an interrupt is the driver's
        try:
            self._worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        far_end.close()
        self.facts: dict[str, Any] = {"device": "cpu, worker process", "threads": 1}
        self._receive(120.0)  # the longest that it may take to load its model
        self._waits = Waits({"driver": os.getpid(), "worker": self._worker.pid or 0})

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        self._sent[slot] = header.results, time.perf_counter_ns()
        packed: Packed | None = None  # without the requests whose KV it is
        if plan.transfers or plan.awaited:
            transfers = [(int(move.direction), move.sources, move.targets, move.job) for move in plan.transfers]
            packed = plan.step, transfers, plan.awaited
        try:
            self._pipe.send((slot, tuple(header), packed, excess))
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        count, sent = self._sent.pop(slot)
        begun_ns = time.perf_counter_ns()
        done, start, end, moved = self._receive(STEP_S)
        assert done == slot, (done, slot)
        if moved:  # all of them before this step's rows, outside its lanes' times
            self._moved += moved
            self._idle_ns = max(self._idle_ns, moved[-1].end_ns)
        arrived = time.perf_counter_ns() if begun_ns < end else end  # a result that lay waiting took no time to arrive
        d2h_start = max(end, self._arrived_ns)
        self._arrived_ns = max(arrived, d2h_start)
        lanes = Lanes(max(sent, self._idle_ns), start, start, end, d2h_start, self._arrived_ns)
        self._idle_ns = end
        return self._results[slot][:count].copy(), lanes

    def moved(self, until_ns: int | None) -> list[Moved]:
        del until_ns  # results list what ended before their rows ran, so only the next one lists more
        moved, self._moved = self._moved, []
        return moved

    def _receive(self, limit_s: float) -> tuple[int, int, int, list[Moved]]:
        """Return the worker's next message. Raises DeviceError if it is dead, or silent for longer than `limit_s`."""
        waited = 0.0
        while not self._pipe.poll(LOOK_S):
            waited += LOOK_S
            if not self._worker.is_alive():
                raise self._died()
            if waited > limit_s:
                raise DeviceError(f"the worker process has not answered for {limit_s:.0f} s")
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if isinstance(message, str):
            raise DeviceError(f"the worker process failed: {message}")
        slot, start, end, moved = message
        return slot, start, end, moved

    def _died(self) -> DeviceError:
        self._worker.join(10.0)
        code = self._worker.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return DeviceError(f"the worker process {how}")

    def close(self) -> None:
        """End the worker. `facts` then include how it shared the machine's cores, if it lived until now."""
        if self._worker.is_alive():
            self.facts |= self._waits.facts()
        self._pipe.close()
        self._worker.join(2.0)
        if self._worker.is_alive():
            self._worker.kill()
            self._worker.join()
        self.staging, self._results = [], []


def _work(build: Build, shared: list[Any], pipe: Connection) -> None:
    """Run the worker: one step after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    torch.set_num_threads(1)
    try:
        executor = build()
        mover = executor.mover()
        buffers = [torch.from_numpy(np.frombuffer(memory, dtype=np.int32)) for memory in shared]
        pipe.send((0, 0, 0, []))
        while True:
            slot, lengths, packed, excess = pipe.recv()
            header = Header(*lengths)
            if packed is not None:
                number, listed, awaited = packed
                transfers = [Transfer(Direction(kind), old, new, None, job) for kind, old, new, job in listed]
                mover.before_rows(number, transfers, awaited)
            start = time.perf_counter_ns()
            step = arrays(buffers[2 * slot], header)
            executor.update_tables(step, excess)
            buffers[2 * slot + 1][: header.results] = executor.run(step, header)
            pipe.send((slot, start, time.perf_counter_ns(), mover.finished() if mover.over else []))
            if packed is not None:
                mover.after_rows(number, transfers)
    except (EOFError, ConnectionError):  # the driver has gone
        return
    except Exception as error:  # any error is reported by the driver
        with suppress(ConnectionError):
            pipe.send(f"{type(error).__name__}: {error}")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Waits:
    """A measurement of the share of its wanted time that a process waits for a core. `processes`: name to pid."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._begun = {(name, pid): _demand(pid) for name, pid in processes.items()}

    def facts(self) -> dict[str, Any]:
        """Return the entries of env.json: the shares of the processes for which the system reports them, with a notice
        if driver and worker did not have a core each, because a loop's gain from overlap then cannot be seen.
        """
        shares, count = {}, cores()
        for (name, pid), before in self._begun.items():
            after = _demand(pid)
            if before is not None and after is not None:
                computed, waited = after[0] - before[0], after[1] - before[1]
                shares[name] = waited / max(computed + waited, 1)
        facts = {"cores": count, "waited_for_core": {name: round(share, 4) for name, share in shares.items()}}
        if count >= 2 and max(shares.values(), default=0.0) < SHARED:
            return facts
        each = ", ".join(f"the {name} {share:.0%}" for name, share in shares.items())
        figures = f": of the time that it had work, {each} waited for a core" if each else ""
        reason = f"driver and worker want a core each, here is {count} for all that runs{figures}"
        return facts | {"notices": [f"sync against async cannot be judged on this machine: {reason}"]}


def _demand(pid: int) -> tuple[int, int] | None:
    """Return the ns that a process's main thread computed, and waited for a core; None if not reported."""
    with suppress(OSError, ValueError, TypeError):
        computed, waited, _ = map(int, (PROC / str(pid) / "schedstat").read_bytes().split())
        return computed, waited
    return None
