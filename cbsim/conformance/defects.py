"""Defects of transformers' continuous batching, put back into our rules, which do not share them.

Blocks that a finishing step completes get no content key. Keys are counted out from the first block that has none; so
async mode loses those of a chunk before the last, and 5.17 after a whole-prompt hit names a block that is not full.
Sampling goes on for a request cancelled in flight. One request too large for the cache fails all. Admission stays
closed if all active requests are cancelled after a soft reset. In 5.23 a row without tokens is not asked what it reads.
"""

from __future__ import annotations

from cbsim.kv.blocks import BlockPool, FreeList, Replaced
from cbsim.kv.keys import Keys, KeysWhenCompleted
from cbsim.policy.decode_batch import Completion
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import replace
from cbsim.schedulers.transformers.scheduler import Step, TransformersScheduler
from cbsim.schedulers.transformers.scheduler_523 import Transformers523
from cbsim.schedulers.transformers.settings import TransformersOptions


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
        released = super().release(request, returns=returns)
        self._misnamed.pop(request, None)
        return released


class CountedKeys(KeysWhenCompleted):
    """Keys for so many blocks as the row has filled, counted out from the first that has none."""

    def __init__(self, pool: BlockPool, scheduler: TransformersScheduler) -> None:
        super().__init__(pool)
        self._scheduler = scheduler

    def fills(self, request: Request, row: Chunk) -> int:
        """Blocks that the row fills, and with the first row after a stay on the host those that came back."""
        size = self.pool.block_size
        before = 0 if request in self._scheduler.returned else row.start // size
        return (row.start + row.tokens) // size - before

    def completed(self, completion: Completion, over: bool) -> list[Replaced]:
        request = completion.request
        if not completion.fills or over or not (completion.outputs or request.status is Status.PREFILL):
            return []
        return self.merge(request, self.reach(request, completion.fills))

    def reach(self, request: Request, count: int) -> int:
        """Where the key of the last of `count` blocks comes, be it full or not."""
        blocks = min(request.hashed + count, self.pool.entries(request))
        if blocks * self.pool.block_size > request.known:
            assert isinstance(self.pool, MisnamingPool)
            self.pool.misname(request, blocks - 1)
        return blocks


class FullKeys(CountedKeys):
    """As 5.23 counts: blocks that have keys are passed over, and none gets one before it is full."""

    def reach(self, request: Request, count: int) -> int:
        pool = self.pool
        for i, block in enumerate(pool.tables[request]):
            if pool.key_of(block) is not None:
                continue
            if not count or (i + 1) * pool.block_size > request.known:
                return i
            count -= 1
        return pool.allocated(request)


class Ghosts(Observer):
    """Requests that were cancelled in flight and sample on; their last token finishes them once more."""

    def __init__(self) -> None:
        self.finished: list[tuple[RequestSpec, Finish]] = []  # in the order of the rows, ghosts or not

    def completed(self, completion: Completion, over: bool) -> None:
        if over:
            self._finish(completion.request)

    def wasted(self, completion: Completion, step: int) -> None:
        request = completion.request
        if request.finish is Finish.ABORTED and completion.outputs:
            request.receive(step)
            if request.seen == request.last:
                self.ghost_finished(completion)
                self._finish(request)

    def ghost_finished(self, completion: Completion) -> None:
        """A request that is over already is about to be finished."""

    def _finish(self, request: Request) -> None:
        self.finished.append((request.spec, request.natural_end))

    def take(self) -> list[tuple[RequestSpec, Finish]]:
        """Who has finished since the last call."""
        finished, self.finished = self.finished, []
        return finished


class DefectiveTransformers(TransformersScheduler):
    """The rules of transformers as they are, faults included: 5.17's, or those of a version inherited beside it."""

    def __init__(self, options: TransformersOptions, ghosts: Ghosts) -> None:
        self._ghosts = ghosts
        super().__init__(options, ghosts)

    def make_keys(self) -> Keys:
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


class DefectiveSectors(DefectiveTransformers, Transformers523):
    """The rules of 5.23, faults included; but the host counts the sectors that it lacks once it has reclaimed some."""

    def make_keys(self) -> Keys:
        return FullKeys(self.pool, self)

    def _fits(self, request: Request, step: Step) -> bool:
        return TransformersScheduler._fits(self, request, step)
