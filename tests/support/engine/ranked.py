"""Ranks for tests: threads of this process that share a model, and workers with a planted fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cbengine.build import ExecutorPlan
from cbengine.device.base import EngineDevice, Inline
from cbengine.device.executor import Executor
from cbengine.device.layout import Header, Ints
from cbengine.device.process import Process
from cbengine.model.ranks import Group, Rank
from cbsim.policy.plan import StepPlan
from cbsim.scenario.scenario import Scenario, depth

WAIT_S = 60.0  # for the other ranks: longer means that one has failed


def on_ranks(scenario: Scenario, ranks: int = 2) -> Scenario:
    """The same server on several ranks."""
    return scenario.model_copy(update={"cost": scenario.cost.model_copy(update={"tensor_parallel": ranks})})


class Meeting:
    """What the ranks in threads exchange."""

    def __init__(self, count: int) -> None:
        self._barrier, self._parts = Barrier(count), [torch.empty(0)] * count

    def parts(self, index: int, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, by rank."""
        self._parts[index] = part
        self._barrier.wait(WAIT_S)
        parts = list(self._parts)
        self._barrier.wait(WAIT_S)
        return parts


class Threaded(Group):
    """A rank's group whose others are threads."""

    def __init__(self, rank: Rank, meeting: Meeting) -> None:
        super().__init__(rank)
        self._meeting = meeting

    def reduce(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.stack(self.parts(x)).sum(dim=0)

    def parts(self, x: Tensor) -> list[Tensor]:
        return self._meeting.parts(self.rank.index, x)


@dataclass(frozen=True)
class ThreadRank(Rank):
    """One of the ranks in threads."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def join(self, device: torch.device) -> Group:
        return Threaded(self, self.meeting)


class Threads(EngineDevice):
    """Ranks in threads: each computes a step while it is launched, and all must have sampled the same."""

    def __init__(self, plan: ExecutorPlan, steps: int) -> None:
        count = plan.rank.count
        meeting = Meeting(count)
        ranks = [plan.of(ThreadRank(index, count, meeting=meeting)) for index in range(count)]
        self._pool = ThreadPoolExecutor(count)
        self.devices = [Inline(each(), plan.capacity, steps) for each in ranks]
        self.staging, self.facts = self.devices[0].staging, {}

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        def launched(device: Inline) -> None:
            device.staging[slot][:] = self.staging[slot]
            device.launch(slot, header, plan, excess)

        list(self._pool.map(launched, self.devices))

    def wait(self, slot: int) -> Any:
        results = [device.wait(slot) for device in self.devices]
        for tokens, _ in results:
            np.testing.assert_array_equal(tokens, results[0][0])
        return results[0]

    def moved(self, until_ns: int | None) -> Any:
        moved = [device.moved(until_ns) for device in self.devices]
        assert {tuple((one.step, one.at) for one in each) for each in moved} == {
            tuple((one.step, one.at) for one in moved[0])
        }
        return moved[0]

    def close(self) -> None:
        self._pool.shutdown()


def threads(_: Scenario, loop: str, plan: ExecutorPlan, *__: Any) -> Threads:
    """Makes such a device, in place of build.device."""
    return Threads(plan, depth(loop))


@dataclass(frozen=True)
class Faulty:
    """Makes a rank's executor with a fault in one step. Can be sent to a worker process."""

    plan: ExecutorPlan
    fault: str = ""
    step: int = 4

    def __call__(self) -> Executor:
        executor, steps = self.plan(), iter(range(1 << 30))
        run = executor.run

        def faulty(step: Any, header: Header) -> Tensor:
            if next(steps) != self.step or not self.fault:
                return run(step, header)
            if self.fault == "dies in a step":
                os.kill(os.getpid(), signal.SIGKILL)
            group = executor.group
            reduce: Callable[[Tensor], Tensor] = group.reduce
            skipped = iter([True])
            group.reduce = lambda x: x if next(skipped, False) else reduce(x)  # type: ignore[method-assign]
            return run(step, header)

        executor.run = faulty  # type: ignore[method-assign]
        return executor


def processes(faults: tuple[str, str], store: str, limit_s: float = 5.0) -> Callable[..., Process]:
    """Makes a device of workers with these faults, in place of build.device."""

    def made(_: Scenario, loop: str, plan: ExecutorPlan, *__: Any) -> Process:
        ranks = [replace(plan.rank, index=index, store=store, limit_s=limit_s) for index in range(2)]
        first, *others = [Faulty(plan.of(rank), fault) for rank, fault in zip(ranks, faults, strict=True)]
        return Process(first, plan.capacity, depth(loop), others)

    return made


class LikeAGpu(Inline):
    """A rank's device that a worker drives as it does a GPU: it launches ahead, and asks whether steps are over."""

    def __init__(self, executor: Executor, plan: ExecutorPlan, steps: int) -> None:
        super().__init__(executor, plan.capacity, steps)
        self.group = executor.group

    def done(self, slot: int) -> bool:
        return slot in self._done


def like_a_gpu(plan: ExecutorPlan, steps: int, _: Any) -> LikeAGpu:
    """Stands for build._gpu."""
    return LikeAGpu(plan(), plan, steps)
