"""Defects of transformers' continuous batching, added to this project's rules, which do not have them.

Blocks that a finishing step completes get no content key. Keys are assigned by count, starting at the first block
without one; so async mode loses those of a chunk before the last, and 5.17 keys a block that is not full after a
whole-prompt hit. Sampling continues for a request cancelled in flight. A single request too large for the cache fails
all. Admission stays closed if all active requests are cancelled after a soft reset. In 5.23 the KV reads of a row
without tokens are not checked.
"""

from __future__ import annotations

from cbsim.kv.blocks import BlockPool, Replaced
from cbsim.kv.keys import Keys, KeysWhenCompleted
from cbsim.policy.decode_batch import Completion
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import replace
from cbsim.schedulers.transformers.scheduler import Step, TransformersScheduler
from cbsim.schedulers.transformers.scheduler_523 import Transformers523
from cbsim.schedulers.transformers.settings import TransformersOptions


class CountedKeys(KeysWhenCompleted):
    """A rule that keys as many blocks as the row has filled, starting at the first block without a key."""

    def __init__(self, pool: BlockPool, scheduler: TransformersScheduler) -> None:
        super().__init__(pool)
        self._scheduler = scheduler

    def fills(self, request: Request, row: Chunk) -> int:
        """Return the number of blocks that the row fills; the first row after a swap-in adds the swapped-in blocks."""
        size = self.pool.block_size
        before = 0 if request in self._scheduler.returned else row.start // size
        return (row.start + row.tokens) // size - before

    def completed(self, completion: Completion, over: bool) -> list[Replaced]:
        request = completion.request
        if not completion.fills or over or not (completion.outputs or request.status is Status.PREFILL):
            return []
        return self.merge(request, self.reach(request, completion.fills))

    def reach(self, request: Request, count: int) -> int:
        """Return the number of keyed blocks after `count` more; no request can hit the last one if it is not full."""
        blocks = min(request.hashed + count, self.pool.entries(request))
        if blocks * self.pool.block_size > request.known:
            request.name_all()
        return blocks


class FullKeys(CountedKeys):
    """The counting rule of 5.23: blocks with keys are skipped, and no block gets a key before it is full."""

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
    """An observer of ghosts: requests cancelled in flight that still sample; their last token finishes them again."""

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
        """Handle the event that a request that is over already is about to be finished."""

    def _finish(self, request: Request) -> None:
        self.finished.append((request.spec, request.natural_end))

    def take(self) -> list[tuple[RequestSpec, Finish]]:
        """Return the requests that finished since the last call."""
        finished, self.finished = self.finished, []
        return finished


class DefectiveTransformers(TransformersScheduler):
    """The rules of transformers with their defects: those of 5.17, or of a version that is inherited from as well."""

    def __init__(self, options: TransformersOptions, ghosts: Ghosts) -> None:
        self._ghosts = ghosts
        super().__init__(options, ghosts)

    def make_keys(self) -> Keys:
        return CountedKeys(self.pool, self)

    def refusal(self, spec: RequestSpec) -> None:  # noqa: ARG002  (no request is rejected)
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
    """The rules of 5.23 with their defects; but the host counts its missing sectors after it has reclaimed some."""

    def make_keys(self) -> Keys:
        return FullKeys(self.pool, self)

    def _fits(self, request: Request, step: Step) -> bool:
        return TransformersScheduler._fits(self, request, step)
