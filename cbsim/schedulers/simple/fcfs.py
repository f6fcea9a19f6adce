"""First come, first served, all reserved: the scheduler that tgi, dynamic_padded and contiguous have in common.

An admitted request has blocks for all that it may write until its end, so none grows and none is preempted. What is
left is a rule: which requests join, and which get a row.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from cbsim.kv.blocks import BlockPool
from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import Options
from cbsim.policy.plan import Chunk, StepPlan
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.base import SchedulerBase


class Rule(Protocol):
    """A rule for which waiting requests join, and which requests get a row."""

    @property
    def pool(self) -> BlockPool:
        """The KV cache."""

    def refusal(self, spec: RequestSpec) -> str | None:
        """Return why a request can never be served, or None."""

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        """Return the rows of the next step, beside those that `go_on` counted; joining requests have been admitted."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Fcfs(SchedulerBase):
    """A scheduler of a queue, the running requests in order of admission, and a rule."""

    def __init__(self, options: Options, rule: Rule) -> None:
        super().__init__(options, Decoding(rule.pool, together=True))
        self.options = options
        self.rule = rule
        self.pool = rule.pool
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self.decodes = 0  # rows of the step being planned that are counted, not listed

    def refusal(self, spec: RequestSpec) -> str | None:
        return self.rule.refusal(spec)

    def add(self, spec: RequestSpec) -> None:
        longest = self.limits.longest
        limit = spec.max_tokens if longest is None else min(spec.max_tokens, longest - spec.prompt_tokens)
        self.waiting.append(self.decoding.add(spec, limit))

    def schedule(self) -> StepPlan | None:
        self.decodes = 0
        rows = self.rule.rows(self)
        if not (rows or self.decodes):
            return None
        return self.decoding.plan(rows, running=len(self.running), waiting=len(self.waiting))

    def go_on(self) -> int:
        """Plan a token for every request of the decode batch. Return their number."""
        self.decodes = self.decoding.go_on()
        return self.decodes

    def admit(self, tokens: int, blocks: list[int]) -> Chunk:
        """Admit the head of the queue and return a row of its first tokens. `blocks` are those that it got."""
        request = self.waiting.popleft()
        self.decoding.admit(request)
        self.running[request] = None
        return self.decoding.row(request, tokens, blocks)

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request]
        self.decoding.end(request, reason)


def blocks_to_end(pool: BlockPool, spec: RequestSpec) -> int:
    """Return the blocks of all that a request may write; its last token is never computed."""
    return pool.blocks_for(spec.prompt_tokens + spec.max_tokens - 1)
