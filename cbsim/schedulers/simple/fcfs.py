"""First come, first served, all reserved: the scheduler that tgi, dynamic_padded and contiguous have in common.

A request that is admitted holds blocks for all that it may write until its end, so none grows and none is preempted.
What is left is a rule: which requests join, and who gets a row.
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
    """Which waiting requests join, and who gets a row."""

    @property
    def pool(self) -> BlockPool:
        """The KV cache."""

    def refusal(self, spec: RequestSpec) -> str | None:
        """Why a request can never be served, or None."""

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        """The rows of the next step, beside those that `go_on` counted; joining requests have been admitted."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Fcfs(SchedulerBase):
    """A queue, the requests that run in order of admission, and a rule."""

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
        """Everybody in the decode batch gets a token. Returns how many they are."""
        self.decodes = self.decoding.go_on()
        return self.decodes

    def admit(self, tokens: int, blocks: list[int]) -> Chunk:
        """The head of the queue runs: a row of its first tokens. `blocks` are those that it has been given."""
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
    """Blocks of all that a request may write; its last token is never computed."""
    return pool.blocks_for(spec.prompt_tokens + spec.max_tokens - 1)
