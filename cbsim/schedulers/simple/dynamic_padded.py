"""Dynamic batching on padded tensors: what stands between static and ragged continuous batching.

Whoever waits takes a place as soon as one is free. A step has one width, that of its longest row: the rows of those
who decode have one token and are padded on the left to the prompts that come in beside them. So a prompt of n tokens
that joins a batch, B rows with its own, costs (n - 1)(B - 1) tokens of padding. Only query tokens are padded; the cache
holds none of it. All that a request may write is reserved, so nobody grows and nobody is preempted.
"""

from __future__ import annotations

from cbsim.policy.decode_batch import by_order
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.value import replace
from cbsim.schedulers.base import plain_pool, too_large
from cbsim.schedulers.simple.fcfs import Fcfs, blocks_to_end
from cbsim.schedulers.simple.settings import DynamicPaddedSettings, PaddedOptions, resolve_padded


class DynamicPadded:
    """Into a rectangle."""

    def __init__(self, options: PaddedOptions) -> None:
        self._slots = options.batch_size
        self.pool = plain_pool(options)

    def refusal(self, spec: RequestSpec) -> str | None:
        tokens = spec.prompt_tokens + spec.max_tokens
        return too_large(tokens, blocks_to_end(self.pool, spec), self.pool.num_blocks)

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        decoding = fcfs.decoding
        joining = self._joining(fcfs) if fcfs.waiting else []
        if joining:
            decoding.split()
        rows = {r: decoding.row(r, 1, ()) for r in sorted(decoding.unbatched, key=by_order) if r.scheduled < r.limit}
        for request in joining:
            blocks = self.pool.grow(request, blocks_to_end(self.pool, request.spec))
            rows[request] = fcfs.admit(request.target, blocks)
        fcfs.go_on()
        width = max([row.tokens for row in rows.values()], default=1)
        return {request: replace(row, padding=width - row.tokens) for request, row in rows.items()}

    def _joining(self, fcfs: Fcfs) -> list[Request]:
        """The head of the queue, as far as slots and cache go: none is passed over."""
        joining: list[Request] = []
        free = self.pool.free
        for request in fcfs.waiting:
            free -= blocks_to_end(self.pool, request.spec)
            if free < 0 or len(fcfs.running) + len(joining) == self._slots:
                break
            joining.append(request)
        return joining


DYNAMIC_PADDED = SchedulerKind(
    name="dynamic_padded",
    about="dynamic batching: who waits joins at once, every row padded to the longest of its step",
    settings=DynamicPaddedSettings,
    resolve=resolve_padded,
    make=lambda options: Fcfs(options, DynamicPadded(options)),
)
