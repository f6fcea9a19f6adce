"""text-generation-inference v3's batching: a batch decodes; now and then it stops for prompts, which then join it.

Before a decode step, prompts are taken from the queue, first come, first served, as far as three bounds go: tokens of
the step, tokens of all that run (prompts and limits), blocks for all that the new ones may ever write. The batch stops
for them if they are enough beside it (`waiting_served_ratio`), or if it has not stopped for long
(`max_waiting_tokens`); then they are prefilled by themselves. Everything is reserved, so no table grows and no request
is preempted.
"""

from __future__ import annotations

from cbsim.policy.decode_batch import by_order
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request, RequestSpec
from cbsim.schedulers.base import plain_pool, too_large
from cbsim.schedulers.simple.fcfs import Fcfs, blocks_to_end
from cbsim.schedulers.simple.settings import TgiOptions, TgiSettings, resolve_tgi


class Tgi:
    """The rule by which prompts and decoding alternate."""

    def __init__(self, options: TgiOptions) -> None:
        self.options = options
        self.pool = plain_pool(options)
        self._steps = 0  # since the batch stopped for prompts last, that stop included
        self._joined = False  # prompts have just joined a batch, which decodes next

    def refusal(self, spec: RequestSpec) -> str | None:
        o, tokens = self.options, _tokens(spec)
        if spec.prompt_tokens > o.max_batch_prefill_tokens:
            return f"prompt of {spec.prompt_tokens} tokens, max_batch_prefill_tokens is {o.max_batch_prefill_tokens}"
        if tokens > o.max_batch_total_tokens:
            return f"{tokens} tokens with its limit, max_batch_total_tokens is {o.max_batch_total_tokens}"
        return too_large(tokens, blocks_to_end(self.pool, spec), self.pool.num_blocks)

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        decoding = fcfs.decoding
        stopped = [r for r in sorted(decoding.unbatched, key=by_order) if r.scheduled < r.limit]
        decodes = bool(stopped or decoding.batched)
        if fcfs.waiting and not (self._joined and decodes):
            fitting = self._fitting(fcfs)
            if len(fitting) >= max(1, self._least(len(fcfs.running))):
                return self._prefill(fitting, fcfs)
        if not decodes:
            return {}
        self._joined = False
        self._steps += 1
        fcfs.go_on()
        return {request: decoding.row(request, 1, ()) for request in stopped}

    def _least(self, running: int) -> int:
        """Return the number of prompts for which the batch stops."""
        o = self.options
        return 0 if self._steps >= o.max_waiting_tokens else int(running * o.waiting_served_ratio)

    def _fitting(self, fcfs: Fcfs) -> list[Request]:
        """Return the head of the queue, as far as the bounds go: none is passed over."""
        o = self.options
        fitting: list[Request] = []
        step, free = o.max_batch_prefill_tokens, self.pool.free
        total = o.max_batch_total_tokens - sum([_tokens(request.spec) for request in fcfs.running])
        for request in fcfs.waiting:
            step -= request.spec.prompt_tokens
            total -= _tokens(request.spec)
            free -= blocks_to_end(self.pool, request.spec)
            if min(step, total, free) < 0 or len(fcfs.running) + len(fitting) == o.max_batch_size:
                break
            fitting.append(request)
        return fitting

    def _prefill(self, fitting: list[Request], fcfs: Fcfs) -> dict[Request, Chunk]:
        """Return rows of these prompts alone: no other request has a row."""
        self._joined = bool(fcfs.running)
        self._steps = 1
        fcfs.decoding.split()
        rows: dict[Request, Chunk] = {}
        for request in fitting:
            blocks = self.pool.grow(request, blocks_to_end(self.pool, request.spec))
            rows[request] = fcfs.admit(request.target, blocks)
        return rows


def _tokens(spec: RequestSpec) -> int:
    """Return the tokens of a prompt and its limit."""
    return spec.prompt_tokens + spec.max_tokens


TGI = SchedulerKind(
    name="tgi",
    about="text-generation-inference v3: prompts by themselves, then joined to the batch; all reserved",
    settings=TgiSettings,
    resolve=resolve_tgi,
    make=lambda options: Fcfs(options, Tgi(options)),
)
