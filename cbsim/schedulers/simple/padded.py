"""Static batches on padded tensors: the baseline of ragged continuous batching."""

from __future__ import annotations

from collections import deque

from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import mypyc_attr, replace
from cbsim.schedulers.base import SchedulerBase, plain_pool, too_large
from cbsim.schedulers.simple.settings import PaddedOptions, StaticSettings, resolve_padded


@mypyc_attr(allow_interpreted_subclasses=True)
class StaticScheduler(SchedulerBase):
    """Static batching: a batch is formed, left-padded to its longest prompt, and run until its last request has ended.

    This is `generate()` on a padded batch, the baseline of every introduction to continuous batching. No request is
    admitted in between; the row of a request that has ended is computed on, and every row attends to as many positions
    as the longest. The cache is reserved when the batch is formed: for every row the longest prompt and the largest
    output limit.
    """

    def __init__(self, options: PaddedOptions) -> None:
        self.pool = plain_pool(options)
        super().__init__(options, Decoding(self.pool, together=True))
        self.options = options
        self.waiting: deque[Request] = deque()
        self._batch: list[Request] = []
        self._length = 0  # positions of every row, padding included

    @property
    def running(self) -> list[Request]:
        return [request for request in self._batch if request.status is not Status.FINISHED]

    def refusal(self, spec: RequestSpec) -> str | None:
        tokens = spec.prompt_tokens + spec.max_tokens
        return too_large(tokens, self.pool.blocks_for(tokens), self.pool.num_blocks)

    def add(self, spec: RequestSpec) -> None:
        self.waiting.append(self.decoding.add(spec, spec.max_tokens))

    def cancel(self, spec: RequestSpec) -> None:
        super().cancel(spec)
        self._disband()

    def schedule(self) -> StepPlan | None:
        if not self._batch:
            return self._prefill()
        return self._decode() if self.decoding.batched else None

    def _prefill(self) -> StepPlan:
        prompt, blocks = self._form()
        rows = {}
        for request in self._batch:
            self.decoding.admit(request)
            row = self.decoding.row(request, request.target, self.pool.grow(request, blocks))
            rows[request] = replace(row, padding=prompt - request.target)
        self._length = prompt
        return self._commit(rows)

    def _form(self) -> tuple[int, int]:
        """Fill the batch from the queue, in order, as slots and cache allow: (longest prompt, blocks a row)."""
        prompt = limit = blocks = 0
        while self.waiting and len(self._batch) < self.options.batch_size:
            spec = self.waiting[0].spec
            longest, largest = max(prompt, spec.prompt_tokens), max(limit, spec.max_tokens)
            reserve = self.pool.blocks_for(longest + largest)
            if self._batch and reserve * (len(self._batch) + 1) > self.pool.num_blocks:
                break
            prompt, limit, blocks = longest, largest, reserve
            self._batch.append(self.waiting.popleft())
        return prompt, blocks

    def _decode(self) -> StepPlan:
        """Plan a row for every member of the batch, ended ones included, over the positions of the longest."""
        rows, context = len(self._batch), len(self._batch) * self._length
        self._length += 1
        self.decoding.go_on()
        plan = self._commit({})
        ended, beyond = rows - plan.work.decodes, context - plan.work.decode_context
        return replace(plan, work=replace(plan.work, padding_rows=ended, padding_context=beyond))

    def _commit(self, rows: dict[Request, Chunk]) -> StepPlan:
        plan = self.decoding.plan(rows, running=len(self.running), waiting=len(self.waiting))
        return replace(plan, counts=replace(plan.counts, table_blocks=self.pool.num_blocks - self.pool.free))

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = super().update(plan, result)
        self._disband()
        return outcome

    def _finish(self, request: Request, reason: Finish) -> None:
        """End a request; its row and its blocks stay with the batch."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        self.decoding.end(request, reason, keeps_blocks=True)

    def _disband(self) -> None:
        """Free the batch once its last request has ended."""
        if self.running:
            return
        for request in self._batch:
            self.pool.release(request)
        self._batch = []


STATIC = SchedulerKind(
    name="static",
    about="batched generation: padded, nobody is admitted until the last of the batch has ended",
    settings=StaticSettings,
    resolve=resolve_padded,
    make=StaticScheduler,
    padded=True,
)
