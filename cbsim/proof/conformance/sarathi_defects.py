"""Defects of Sarathi-Serve, put back into our rules, which do not share them.

A preempted request has its output limit once more. Until its pass is over it counts as read as far as it was; so half
a prompt may come back in the pass that threw it out, and asks for the rest only. With one stage a pass without rows is
forgotten, though its blocks are gone: such a request never asks for its prompt again. A request above the limit comes
as far as the head of the queue, also one that has grown so long, and disappears.
"""

from __future__ import annotations

from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.policy.schedulers.sarathi_serve import Policy, SarathiServe, Step
from cbsim.policy.schedulers.sarathi_settings import ServeOptions


class DefectiveServe(SarathiServe):
    """A scheduler of Sarathi-Serve as it is. Its prompt grows with each preemption by what it has said. `longest` is
    what is not ignored.
    """

    def __init__(self, options: ServeOptions, policy: Policy, longest: int) -> None:
        super().__init__(options, policy)
        self._longest = longest
        self.prompts: dict[Request, int] = {}
        self.claims: dict[Request, int] = {}  # tokens of a prompt that count as read and are lost
        self.claimed: dict[Request, int] = {}  # those with which requests were let in by the pass
        self.ignored: list[RequestSpec] = []  # by the pass
        self.preempted: list[Request] = []  # by the pass
        self.lost = False  # the pass was forgotten

    def refusal(self, spec: RequestSpec) -> None:  # noqa: ARG002  (nobody is refused)
        return None

    def add(self, spec: RequestSpec) -> None:
        request = self.decoding.add(spec, spec.max_tokens)
        self.prompts[request] = spec.prompt_tokens
        self.waiting.append(request)

    def attempt(self) -> Step:
        self.claimed, self.ignored, self.preempted = {}, [], []
        step = super().attempt()
        changed = bool(self.preempted or self.ignored)
        self.lost = step.empty and changed and not self.staged
        if not self.lost:
            for request in self.preempted:
                self.claims.pop(request, None)
                self.prompts[request] = request.spec.prompt_tokens + request.seen
                request.limit = request.last = request.seen + request.spec.max_tokens
        return step

    def done(self, request: Request) -> int:
        return self.claims.get(request, request.computed)

    def left(self, request: Request) -> int:
        return self.prompts[request] - self.done(request)

    def preempt(self, request: Request, step: Step) -> None:
        self.claims[request] = min(request.computed, self.prompts[request])
        self.preempted.append(request)
        super().preempt(request, step)
        step.preempts = False

    def head(self, step: Step) -> Request | None:
        while self.waiting and self.waiting[0].target > self._longest:
            step.taken = True
            request = self.waiting.popleft()
            self.ignored.append(request.spec)
            self.decoding.end(request, Finish.REFUSED)
        return super().head(step)

    def admit(self, request: Request, tokens: int, step: Step) -> None:
        self.claimed[request] = self.done(request)
        self.claims.pop(request, None)
        if tokens:
            super().admit(request, tokens, step)
            return
        step.taken = True
        self.waiting.popleft()
        self.decoding.admit(request, request.target - 1)  # without what it lost
        self.running[request] = None
        step.decodes[request] = self.decoding.row(request, 1, self.pool.grow(request, self._needed(request)))
        step.tokens += 1
