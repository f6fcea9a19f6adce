"""The common part of all schedulers that is no rule: a plain pool, cancellations, results, a refusal's message."""

from __future__ import annotations

from cbsim.kv.blocks import BlockPool, FreeQueue
from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import Options
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.policy.value import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class SchedulerBase:
    """The part of the `Scheduler` protocol that most rules leave as it is."""

    polls_before_update = False
    awaits_when_idle = True

    def __init__(self, options: Options, decoding: Decoding) -> None:
        self.limits = options.limits
        self.decoding = decoding
        self.requests = decoding.requests
        self.refused: list[tuple[RequestSpec, str]] = []

    @property
    def idle(self) -> bool:
        return not self.requests

    def cancel(self, spec: RequestSpec) -> None:
        request = self.requests.get(spec)
        if request is not None:
            self._finish(request, Finish.ABORTED)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return True

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        return self.decoding.complete(plan, result, self._finish)

    def refuse(self, request: Request, reason: str) -> None:
        """Refuse a request that waits."""
        self.decoding.end(request, Finish.REFUSED)
        self.refused.append((request.spec, reason))

    def _finish(self, request: Request, reason: Finish) -> None:
        """End a request, whether it waits or runs."""
        raise NotImplementedError


def plain_pool(options: Options, observer: Observer = NULL_OBSERVER) -> BlockPool:
    """Return a pool of the cache's blocks, of which those without content are taken first."""
    free = FreeQueue(range(options.num_blocks), unhashed_first=True)
    return BlockPool(options.block_size, options.num_blocks, free, observer)


def too_large(tokens: int, needed: int, blocks: int, drafts: int = 0) -> str | None:
    """Return why a request of `tokens` tokens, and of `drafts` behind them, can never be served, or None if the cache
    has the blocks it needs.
    """
    beside = f" and {drafts} drafts" if drafts else ""
    return f"{tokens} tokens{beside} need {needed} blocks, the cache has {blocks}" if needed > blocks else None
