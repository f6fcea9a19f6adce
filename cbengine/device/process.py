"""Worker processes as a device, with real overlap with the driver on two cores, as between a CPU and a GPU.

Each rank of a model has a worker. Steps and results cross in shared memory; pipes carry the buffer's index, the
lengths, and a step's KV transfers if it has any. All ranks get the same, so the driver alone decides; the first one
returns results. Each says what it has received and computed by a digest, and they must be equal. No wait is unbounded:
the waiting process checks regularly that the others live. A worker ends when its pipe closes, so it never outlives the
driver.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cbengine.batch import Capacity
from cbengine.device.base import DeviceError, EngineDevice, Lanes
from cbengine.device.cuda import LOOK_S as POLL_S
from cbengine.device.cuda import Cuda
from cbengine.device.executor import Executor
from cbengine.device.layout import Header, Ints, arrays
from cbengine.device.moves import Moved
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import Direction, Transfer

PROC = Path("/proc")
SHARED = 0.05  # share of the time wanted on a core: a process that waits for more counts as having no core of its own
PAUSE_NS = 5_000_000  # that a step without rows waits for a transfer to end
DYING_S = 3.0  # in which a rank that has died, or lacks another's part, is known to have ended
LOOK_S = 0.2  # interval of checks that the other processes live
STEP_S = 600.0  # the longest that a step may take: a stopped worker never answers, and no step of a CPU is that long
Build = Callable[[], Executor | Cuda]
Packed = tuple[int, list[tuple[int, tuple[int, ...], tuple[int, ...], int]], tuple[int, ...]]
"""Step, transfers, jobs to wait for."""


class Answer(NamedTuple):
    """A worker's step: when its rows began and ended, or a GPU's lanes; the transfers that have ended; its digest."""

    slot: int
    times: tuple[int, ...]
    moved: list[Moved]
    digest: str = ""


class Failure(NamedTuple):
    """The error that ends a worker."""

    at_ns: int
    message: str


class Process(EngineDevice):
    """A worker process for each rank. Its build makes its executor, or its GPU, in the worker: it must be picklable."""

    def __init__(self, build: Build, capacity: Capacity, depth: int, others: Sequence[Build] = ()) -> None:
        """Start the workers, of `others` those of further ranks, and wait until they are ready. Raises DeviceError."""
        spawning = multiprocessing.get_context("spawn")
        shared = [spawning.RawArray("i", size) for size in (capacity.staging, capacity.results) * depth]
        views = [np.frombuffer(memory, dtype=np.int32) for memory in shared]
        self.staging, self._results = views[0::2], views[1::2]
        self._sent: dict[int, tuple[int, int]] = {}  # staging buffer -> (result values, time of sending)
        self._idle_ns = self._arrived_ns = 0  # end of the last step or transfer known, and when its result came
        self._moved: list[Moved] = []  # ended, and not reported yet
        self._unreported: dict[tuple[int, int], list[Moved]] = {}  # ended on some ranks
        self._compared = 0  # steps whose digests were equal
        self._pipes: list[Connection] = []
        self._workers: list[SpawnProcess] = []
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: an interrupt is the driver's
        try:
            for each in (build, *others):
                pipe, far_end = spawning.Pipe()
                self._pipes.append(pipe)
                self._workers.append(spawning.Process(target=_work, args=(each, shared, far_end), daemon=True))
                self._workers[-1].start()
                far_end.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        names = [f"rank {rank}" if others else "worker" for rank in range(len(self._workers))]
        pids = {name: worker.pid or 0 for name, worker in zip(names, self._workers, strict=True)}
        self._waits = Waits({"driver": os.getpid(), **pids})
        self.facts: dict[str, Any] = {"ranks": len(self._workers)} if others else {}
        try:
            self.facts |= self._receive(120.0)[0]  # the longest that it may take to load the model
        except BaseException:
            self.close()
            raise
        self._sizes = self.facts.get("captured_batches", ())

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        self._sent[slot] = header.results, time.perf_counter_ns()
        packed: Packed | None = None  # without the requests whose KV it is
        if plan.transfers or plan.awaited:
            transfers = [(int(move.direction), move.sources, move.targets, move.job) for move in plan.transfers]
            packed = plan.step, transfers, plan.awaited
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((slot, tuple(header), packed, excess))
            except (BrokenPipeError, ConnectionResetError):
                raise self._failed(rank) from None

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        count, sent = self._sent.pop(slot)
        begun_ns = time.perf_counter_ns()
        answers: list[Answer] = self._receive(STEP_S)
        for rank, answer in enumerate(answers):
            assert answer.slot == slot, (answer, slot)
            if answer.digest != answers[0].digest:
                step = f"step {self._compared} of this run, by their digests {answer.digest}, {answers[0].digest}"
                raise DeviceError(f"rank {rank} has not received and computed what rank 0 has in {step}")
        self._compared += 1
        moved, times = self._ended(answers), answers[0].times
        self._moved += moved
        if len(times) > 2:
            return self._results[slot][:count].copy(), Lanes(*times)
        start, end = times
        if moved:  # all of them before this step's rows, outside its lanes' times
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

    def _ended(self, answers: list[Answer]) -> list[Moved]:
        """Return the transfers that have ended on all ranks, at the times of the first one."""
        if len(answers) == 1:
            return answers[0].moved
        over = list[Moved]()
        for answer in answers:
            for move in answer.moved:
                ranks = self._unreported.setdefault((move.step, move.at), [])
                ranks.append(move)
                if len(ranks) == len(answers):
                    over.append(self._unreported.pop((move.step, move.at))[0])
        return over

    def _receive(self, limit_s: float) -> list[Any]:
        """Return each worker's next message. Raises DeviceError if one is dead, or silent for longer than `limit_s`."""
        messages: dict[int, Any] = {}
        waited = 0.0
        while len(messages) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in messages}
            ready = connection.wait(list(waiting), LOOK_S)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]  # a pipe
                try:
                    messages[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    raise self._failed(rank) from None
                if isinstance(messages[rank], Failure):
                    raise self._failed(rank, messages[rank])
            if not ready:
                waited += LOOK_S
                for rank, worker in enumerate(self._workers):
                    if not worker.is_alive():
                        raise self._failed(rank)
                if waited > limit_s:
                    silent = self._named(min(waiting.values()))
                    raise DeviceError(f"{silent} has not answered for {limit_s:.0f} s")
        return [messages[rank] for rank in range(len(self._pipes))]

    def _named(self, rank: int) -> str:
        return f"the worker process of rank {rank}" if len(self._pipes) > 1 else "the worker process"

    def _failed(self, rank: int, failure: Failure | None = None) -> DeviceError:
        """Return the error of the rank that failed first, after one has ended: the others fail for lack of its part."""
        errors, until = {rank: failure} if failure else {}, time.monotonic() + DYING_S
        for other, worker in enumerate(self._workers):
            worker.join(10.0 if other == rank else max(0.0, until - time.monotonic()))
            with suppress(EOFError, OSError):
                while other != rank and self._pipes[other].poll():
                    if isinstance(message := self._pipes[other].recv(), Failure):
                        errors[other] = message
        codes = {other: worker.exitcode or 0 for other, worker in enumerate(self._workers)}
        killed = [other for other in codes if codes[other]]
        if errors and not killed:
            first = min(errors, key=lambda each: errors[each].at_ns)
            return DeviceError(f"{self._named(first)} failed: {errors[first].message}")
        first = min(killed, key=lambda each: codes[each] == -signal.SIGABRT, default=rank)  # libraries abort for lack
        how = f"was killed by signal {-codes[first]}" if codes[first] < 0 else f"ended with exit code {codes[first]}"
        return DeviceError(f"{self._named(first)} {how}")

    def close(self) -> None:
        """End the workers. `facts` then include how they shared the machine's cores, if they lived until now."""
        if all(worker.is_alive() for worker in self._workers):
            self.facts |= self._waits.facts()
        if len(self._workers) > 1:
            self.facts["steps_with_equal_digests"] = self._compared
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + 2.0
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()
        self.staging, self._results = [], []


def _work(build: Build, shared: list[Any], pipe: Connection) -> None:
    """Run the worker: one step after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    torch.set_num_threads(1)
    try:
        buffers = [np.frombuffer(memory, dtype=np.int32) for memory in shared]
        made = build()
        if isinstance(made, Executor):
            _compute(made, buffers, pipe)
        else:
            _drive(made, buffers, pipe)
    except (EOFError, ConnectionError):  # the driver has gone
        return
    except Exception as error:  # any error is reported by the driver
        with suppress(ConnectionError):
            pipe.send(Failure(time.perf_counter_ns(), f"{type(error).__name__}: {error}"))
    finally:
        if torch.distributed.is_initialized():
            os._exit(0)  # its threads, which may wait for a rank that has gone, would abort the process


def _compute(executor: Executor, buffers: list[Ints], pipe: Connection) -> None:
    """Compute steps on this CPU. A plan's jobs are done behind its result, so that the next one names them."""
    mover, tensors = executor.mover(), [torch.from_numpy(buffer) for buffer in buffers]
    group = executor.group
    pipe.send({"device": "cpu, worker process", "threads": 1})
    while True:
        slot, lengths, packed, excess = pipe.recv()
        header = Header(*lengths)
        plan = _unpacked(packed)
        mover.carry(plan, in_order=True)
        start = time.perf_counter_ns()
        step = arrays(tensors[2 * slot], header)
        executor.update_tables(step, excess)
        results = tensors[2 * slot + 1][: header.results]
        tokens = executor.run(step, header)
        if not group.rank.index:
            results.copy_(tokens)
        times, digest = (start, time.perf_counter_ns()), ""
        if group.rank.count > 1:
            received = buffers[2 * slot][: header.size], lengths, packed, excess, group.calls
            digest = _digest(*received, tokens.numpy())
        pipe.send(Answer(slot, times, mover.finished() if mover.over else [], digest))
        mover.carry(plan, in_order=False)


def _drive(device: Cuda, buffers: list[Ints], pipe: Connection) -> None:
    """Launch steps on this rank's GPU as they come, and answer each once it is over."""
    pipe.send(device.facts)
    launched: deque[tuple[int, Header, str]] = deque()
    transfers = 0
    while True:
        if not launched or pipe.poll():
            slot, lengths, packed, excess = pipe.recv()
            header, plan = Header(*lengths), _unpacked(packed)
            step = device.staging[slot][: header.size]
            step[:] = buffers[2 * slot][: header.size]
            device.launch(slot, header, plan, excess)
            transfers += len(plan.transfers)
            launched.append((slot, header, _digest(step, lengths, packed, excess, device.group.calls)))
        elif device.done(launched[0][0]):
            slot, header, received = launched.popleft()
            tokens, lanes = device.wait(slot)
            if not device.group.rank.index:
                buffers[2 * slot + 1][: header.results] = tokens
            until_ns = None if header.rows else time.perf_counter_ns() + PAUSE_NS
            moved = device.moved(until_ns) if transfers else []
            transfers -= len(moved)
            pipe.send(Answer(slot, tuple(lanes), moved, _digest(received, tokens)))
        else:
            time.sleep(POLL_S)


def _unpacked(packed: Packed | None) -> StepPlan:
    """Return what a device needs of a plan."""
    number, listed, awaited = packed or (0, (), ())
    transfers = [Transfer(Direction(kind), old, new, None, job) for kind, old, new, job in listed]
    return StepPlan(number, transfers=tuple(transfers), awaited=awaited)


def _digest(*parts: Any) -> str:
    """Return a digest of what a rank has received and computed."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
    return digest.hexdigest()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Waits:
    """A measurement of the share of its wanted time that a process waits for a core. `processes`: name to pid."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._begun = {(name, pid): _demand(pid) for name, pid in processes.items()}

    def facts(self) -> dict[str, Any]:
        """Return the entries of env.json: the shares of the processes for which the system reports them, with a notice
        if driver and workers did not have a core each, because a loop's gain from overlap then cannot be seen.
        """
        shares, count, needed = {}, cores(), max(2, len(self._begun))
        for (name, pid), before in self._begun.items():
            after = _demand(pid)
            if before is not None and after is not None:
                computed, waited = after[0] - before[0], after[1] - before[1]
                shares[name] = waited / max(computed + waited, 1)
        facts = {"cores": count, "waited_for_core": {name: round(share, 4) for name, share in shares.items()}}
        if count >= needed and max(shares.values(), default=0.0) < SHARED:
            return facts
        each = ", ".join(f"the {name} {share:.0%}" for name, share in shares.items())
        figures = f": of the time that it had work, {each} waited for a core" if each else ""
        workers = "worker" if needed == 2 else f"{needed - 1} ranks"
        reason = f"driver and {workers} want a core each, here is {count} for all that runs{figures}"
        return facts | {"notices": [f"sync against async cannot be judged on this machine: {reason}"]}


def _demand(pid: int) -> tuple[int, int] | None:
    """Return the ns that a process's main thread computed, and waited for a core; None if not reported."""
    with suppress(OSError, ValueError, TypeError):
        computed, waited, _ = map(int, (PROC / str(pid) / "schedstat").read_bytes().split())
        return computed, waited
    return None
