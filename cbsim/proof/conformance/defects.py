"""Defects of transformers' continuous batching 5.17, put back into our rules, which do not share them.

Blocks that a finishing step completes get no content key. Keys are counted out from the first block that has none; so
async mode loses those of a chunk before the last, and after a whole-prompt hit names a block that is not full. Sampling
goes on for a request cancelled in flight. One request too large for the cache fails all. Admission stays closed if all
active requests are cancelled after a soft reset.
"""

from __future__ import annotations

from dataclasses import replace

from cbsim.policy.blocks import BlockPool, FreeList, Replaced
from cbsim.policy.cohort import Landing
from cbsim.policy.keys import Keys, KeysWhenLanded
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.schedulers.transformers import TransformersScheduler
from cbsim.policy.schedulers.transformers_settings import TransformersOptions


class MisnamingPool(BlockPool):
    """From the first block on that got its key before it was full, keys are ones that no request can ask for."""

    def __init__(self, block_size: int, num_blocks: int, free: FreeList, observer: Observer) -> None:
        super().__init__(block_size, num_blocks, free, observer)
        self._misnamed: dict[Request, int] = {}

    def misname(self, request: Request, block: int) -> None:
        self._misnamed.setdefault(request, block)
        request.name_all()

    def key(self, request: Request, block: int) -> int:
        if block >= self._misnamed.get(request, block + 1):
            return -(((1 << 40) + request.spec.index << 24) + block)
        return super().key(request, block)

    def release(self, request: Request, *, returns: bool = False) -> int:
        held = super().release(request, returns=returns)
        self._misnamed.pop(request, None)
        return held


class CountedKeys(KeysWhenLanded):
    """Keys for so many blocks as the row has filled, counted out from the first that has none."""

    def __init__(self, pool: MisnamingPool, scheduler: TransformersScheduler) -> None:
        super().__init__(pool)
        self._misname, self._scheduler = pool.misname, scheduler

    def completes(self, request: Request, row: Chunk) -> int:
        """Blocks that the row fills, and with the first row after a stay on the host those that came back."""
        size = self.pool.block_size
        before = 0 if request in self._scheduler.returned else row.start // size
        return (row.start + row.tokens) // size - before

    def landed(self, landing: Landing, over: bool) -> list[Replaced]:
        request = landing.request
        if not landing.completes or over or not (landing.outputs or request.status is Status.PREFILL):
            return []
        blocks = min(request.hashed + landing.completes, self.pool.held(request))
        if blocks * self.pool.block_size > request.known:
            self._misname(request, blocks - 1)
        return self.merge(request, blocks)


class Ghosts(Observer):
    """Requests that were cancelled in flight and sample on; their last token finishes them once more."""

    def __init__(self) -> None:
        self.finished: list[tuple[RequestSpec, Finish]] = []  # in the order of the rows, ghosts or not

    def landed(self, landing: Landing, over: bool) -> None:
        if over:
            self._finish(landing.request)

    def wasted(self, landing: Landing, step: int) -> None:
        request = landing.request
        if request.finish is Finish.ABORTED and landing.outputs:
            request.receive(step)
            if request.seen == request.last:
                self.ghost_finished(landing)
                self._finish(request)

    def ghost_finished(self, landing: Landing) -> None:
        """A request that is over already is about to be finished."""

    def _finish(self, request: Request) -> None:
        self.finished.append((request.spec, request.natural_end))

    def take(self) -> list[tuple[RequestSpec, Finish]]:
        """Who has finished since the last call."""
        finished, self.finished = self.finished, []
        return finished


class DefectiveTransformers(TransformersScheduler):
    """The rules of transformers 5.17 as they are, faults included."""

    def __init__(self, options: TransformersOptions, observer: Observer = NOBODY) -> None:
        assert observer is NOBODY or isinstance(observer, Ghosts), "ghosts are heard, so they come with the observer"
        self._ghosts = observer if isinstance(observer, Ghosts) else Ghosts()
        super().__init__(options, self._ghosts)

    def make_pool(self, observer: Observer) -> MisnamingPool:
        return MisnamingPool(self.options.block_size, self.options.num_blocks, self.free_list, observer)

    def make_keys(self) -> Keys:
        assert isinstance(self.pool, MisnamingPool)
        return CountedKeys(self.pool, self)

    def refusal(self, spec: RequestSpec) -> None:  # noqa: ARG002  (nobody is refused)
        return None

    def cancel(self, spec: RequestSpec) -> None:
        closed = self.block_new_requests
        super().cancel(spec)
        self.block_new_requests = closed

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = super().update(plan, result)
        finished = self._ghosts.take()
        if len(finished) > len(outcome.finished):
            self.block_new_requests = False
        return replace(outcome, finished=tuple(finished))
