"""Iteration-level batching on a contiguous cache: all that a request may need is one piece, reserved at admission.

The servers of Orca and FasterTransformer kept their caches so before they were paged; `orca` and `faster_transformer`
are those servers' rules as Sarathi-Serve states them, on paged blocks. Here every running request decodes in every
step; then prompts that were begun go on, then the queue is admitted from, while a slot, tokens of the step and a piece
are there. A request that does not fit stops those behind it. Nothing is shared.
"""

from __future__ import annotations

from cbsim.kv.reservation import PiecePool, free_pieces, reserved_tokens
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request, RequestSpec, Status
from cbsim.schedulers.simple.fcfs import Fcfs
from cbsim.schedulers.simple.settings import ContiguousOptions, ContiguousSettings, resolve_contiguous


class Contiguous:
    """The rule that reserves all of the cache that a request may need."""

    def __init__(self, options: ContiguousOptions) -> None:
        self.options = o = options
        self.pool = PiecePool(o.block_size, o.num_blocks, free_pieces(o.placement, o.num_blocks))

    def refusal(self, spec: RequestSpec) -> str | None:
        o = self.options
        if spec.prompt_tokens >= o.max_model_len:
            return f"prompt of {spec.prompt_tokens} tokens, max_model_len is {o.max_model_len}"
        needed, largest = self.piece(spec), self.pool.pieces.most
        if needed > largest:
            tokens = reserved_tokens(o.reserve, spec, o.max_model_len)
            piece = f"a piece of {needed} blocks, the largest of {o.num_blocks} has {largest}"
            return f"reserves {tokens} tokens ({o.reserve}): {piece}"
        return None

    def piece(self, spec: RequestSpec) -> int:
        """Return the blocks that a request reserves."""
        return self.pool.blocks_for(reserved_tokens(self.options.reserve, spec, self.options.max_model_len))

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        rows: dict[Request, Chunk] = {}
        left = self.options.max_num_batched_tokens - fcfs.go_on()
        for request in sorted(fcfs.decoding.unbatched, key=_turn):
            if left and request.scheduled < request.limit:  # else its last token is in flight
                rows[request] = fcfs.decoding.row(request, min(request.uncomputed, left), ())
                left -= rows[request].tokens
        self.pool.sought = 0
        self._admit(fcfs, rows, left)
        return rows

    def _admit(self, fcfs: Fcfs, rows: dict[Request, Chunk], left: int) -> None:
        """Admit the queue, head first: none is passed over."""
        chunked = self.options.enable_chunked_prefill
        while fcfs.waiting and left and len(fcfs.running) < self.options.max_num_seqs:
            request = fcfs.waiting[0]
            tokens = min(request.uncomputed, left)
            blocks = self.piece(request.spec)
            if (tokens < request.uncomputed and not chunked) or not self.pool.fits(blocks):
                break
            rows[request] = fcfs.admit(tokens, self.pool.reserve(request, blocks))
            left -= tokens


def _turn(request: Request) -> tuple[bool, int]:
    """Return the sort key: decoding requests, then partly computed prompts; each in order of admission."""
    return request.status is Status.PREFILL, request.order


CONTIGUOUS = SchedulerKind(
    name="contiguous",
    about="iteration-level batching, all that a request may need reserved in one piece (Orca, FasterTransformer)",
    settings=ContiguousSettings,
    resolve=resolve_contiguous,
    make=lambda options: Fcfs(options, Contiguous(options)),
)
