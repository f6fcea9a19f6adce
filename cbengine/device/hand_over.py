"""KV that servers hand over to each other by torch.distributed: blocks of one's cache go to blocks of another's.

Two servers that may meet have a channel: a group of these two, since gloo ends all connections of a group in which one
wait has run out of time, and a thread at either end. Transfers go on beside the steps, in an order that is the same at
both ends. A wait ends when the peer's connection does, and after STALLED_S; a channel that has failed stays broken.
Blocks need no further order: policy hands out none that a row in flight reads or writes (schedulers/vllm/transfers.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cbengine.device.base import EngineDevice, Lanes
from cbengine.device.layout import Header, Ints
from cbengine.device.moves import Moved
from cbengine.model.kvcache import KvCache
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import Direction
from cbsim.policy.value import replace

STALLED_S = 20.0  # the longest wait for a peer that is connected: it was stopped, or its machine hangs
MEET_S = 60.0  # the longest wait for a peer at the start
CLOSE_S = 1.0  # the longest wait for a transfer whose result nobody needs any more
PIECE_BYTES = 16 << 20  # of a message: so much is staged beside the cache at a time


def joined(folder: Path, server: int, peer: int, backend: str = "gloo") -> Any:
    """Return the group of two servers, once both have joined. Raises RuntimeError."""
    groups: Any = dist  # torch types neither stores nor options
    low, high = sorted((server, peer))
    rank, limit = int(server == high), timedelta(seconds=MEET_S)
    store = groups.FileStore(str(folder / f"{low}-{high}"), 2)
    store.set_timeout(limit)
    if backend == "nccl":
        return groups.ProcessGroupNCCL(store, rank, 2)
    gloo = groups.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], limit
    return gloo(store, rank, 2, options)


class Task(NamedTuple):
    """A transfer that both ends have ordered: these blocks of this server, in order."""

    step: int
    at: int
    direction: Direction
    blocks: Sequence[int]


class Channel:
    """One end of what two servers hand over. `join` returns their group, in which the peer has the rank `peer`; `over`
    is called with each task that has ended.
    """

    def __init__(self, cache: KvCache, peer: int, join: Callable[[], Any], over: Callable[[Moved], None]) -> None:
        self._cache, self._peer, self._join, self._over = cache, peer, join, over
        self._device = cache.keys.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._met = threading.Event()
        self._group: Any = None
        self._thread = threading.Thread(target=self._work, name="hand over", daemon=True)
        self._thread.start()

    def meet(self) -> bool:
        """Wait until the peer is there, or cannot be reached; return whether it is."""
        return self._met.wait(MEET_S) and self._group is not None

    def go(self, task: Task) -> None:
        """Begin a transfer, behind those that were begun before."""
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after the transfers that were begun, and wait for it unless one does not end."""
        self._tasks.put(None)
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        try:
            self._group = self._join()
        except RuntimeError:  # every transfer fails
            self._group = None
        self._met.set()
        while (task := self._tasks.get()) is not None:
            start, broken = time.perf_counter_ns(), False
            try:
                self._perform(task)
            except RuntimeError:
                self._group, broken = None, True
            self._over(Moved(task.step, task.at, start, time.perf_counter_ns(), broken))
        self._group = None  # which ends the connection

    @torch.inference_mode()
    def _perform(self, task: Task) -> None:
        """Send or receive blocks. Raises RuntimeError."""
        if self._group is None:
            raise RuntimeError("the peer has gone")
        cache, each = self._cache, max(1, PIECE_BYTES // self._cache.block_bytes)
        with torch.cuda.stream(self._stream):
            for low in range(0, len(task.blocks), each):
                at = torch.tensor(task.blocks[low : low + each], device=self._device)
                if task.direction is Direction.OUT:
                    self._wait(self._group.send([self._near(cache.taken(at))], self._peer, 0))
                    continue
                staged = self._near(cache.like(len(at)))
                self._wait(self._group.recv([staged], self._peer, 0))
                cache.put(at, staged.to(self._device))
            if self._stream is not None:
                self._finish(self._stream.record_event())

    def _near(self, staged: torch.Tensor) -> torch.Tensor:
        """Return a tensor where the group takes it: gloo's are the host's."""
        return staged if self._stream is None or self._group.name() == "nccl" else staged.cpu()

    def _wait(self, work: Any) -> None:
        if not work.wait(timedelta(seconds=STALLED_S)):
            raise RuntimeError("the peer does not answer")

    def _finish(self, event: torch.cuda.Event) -> None:
        """Wait for what is queued on this stream: NCCL's waits do not block the host."""
        until = time.monotonic() + STALLED_S
        while not event.query():
            if time.monotonic() > until:
                raise RuntimeError("the peer does not answer")
            time.sleep(1e-4)


class HandOver(EngineDevice):
    """A device whose transfers are hand-overs. It tells the front which a plan orders, `begin` starts one when the peer
    has ordered it, too, or `drop` ends it without a transfer; and it tells of those that have brought KV, or not. The
    two may be called by another thread. `wait_until` waits for a time, or until anything has happened.
    """

    def __init__(
        self,
        device: EngineDevice,
        channels: Mapping[int, Channel],
        over: deque[Moved],
        tell: Callable[..., None],
        wait_until: Callable[[int], None],
    ) -> None:
        self.staging, self.facts = device.staging, device.facts
        self.bucket, self.settle = device.bucket, device.settle  # type: ignore[method-assign]
        self._device, self._channels, self._tell, self._wait_until = device, channels, tell, wait_until
        self._ordered: dict[tuple[int, Direction], Task] = {}
        self._coming: dict[tuple[int, int], int] = {}  # step and index of a transfer to here -> the request
        self._ended = over

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        if not plan.transfers:
            self._device.launch(slot, header, plan, excess)
            return
        self._device.launch(slot, header, replace(plan, transfers=(), awaited=()), excess)
        for at, move in enumerate(plan.transfers):
            assert move.spec is not None, "a hand-over is one request's"
            mine = move.sources if move.direction is Direction.OUT else move.targets
            self._ordered[move.spec.index, move.direction] = Task(plan.step, at, move.direction, mine)
            if move.direction is Direction.IN:
                self._coming[plan.step, at] = move.spec.index
            self._tell("ordered", move.spec.index, move.direction, len(mine))

    def begin(self, request: int, direction: Direction, peer: int, blocks: int) -> None:
        """Transfer the last so many blocks of a request's order: those before are cached at the other end."""
        task = self._ordered.pop((request, direction))
        self._channels[peer].go(task._replace(blocks=task.blocks[len(task.blocks) - blocks :]))

    def drop(self, request: int, direction: Direction) -> None:
        """End an order without a transfer, unless it has begun: nobody will send these blocks, or fetch them."""
        if (task := self._ordered.pop((request, direction), None)) is not None:
            now = time.perf_counter_ns()
            self._ended.append(Moved(task.step, task.at, now, now, broken=True))

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        return self._device.wait(slot)

    def moved(self, until_ns: int | None) -> list[Moved]:
        if until_ns is not None and not self._ended:
            self._wait_until(until_ns)
        over = [self._ended.popleft() for _ in range(len(self._ended))]
        for moved in over:
            if (request := self._coming.pop((moved.step, moved.at), None)) is not None:
                self._tell("moved", request, moved.start_ns, moved.end_ns, moved.broken)
        return over

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._device.close()
