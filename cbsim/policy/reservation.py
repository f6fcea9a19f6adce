"""A cache in which a request reserves all it will need when it is admitted, in one piece of consecutive blocks.

So caches were kept before they were paged (FasterTransformer, Orca): nobody grows, so nobody is ever preempted, and
what is reserved but not used serves nobody. Any scheduler may compose it: it asks `fits`, calls `reserve`, and lets
`Decoding` do the rest; a piece is a table like any other, so executors need not know.
"""

from __future__ import annotations

from typing import Literal

from cbsim.policy.blocks import BlockPool
from cbsim.policy.buddies import Buddies
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.pieces import Extents, FreePieces
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.value import mypyc_attr

Reserve = Literal["max_model_len", "max_tokens", "power_of_two", "exact"]
Placement = Literal["first_fit", "best_fit", "buddy"]


def reserved_tokens(rule: Reserve, spec: RequestSpec, longest: int) -> int:
    """Tokens that a request reserves, never more than a sequence's `longest`.

    `max_model_len`: the longest there is. `max_tokens`: prompt and limit, what is known. The last two know what the
    workload declares and no server can: `exact` prompt and outputs, `power_of_two` prompt and the least power of two
    that is not below the outputs.
    """
    if rule == "max_model_len":
        return longest
    outputs = spec.max_tokens if rule == "max_tokens" else spec.output_tokens
    if rule == "power_of_two":
        outputs = 1 << (outputs - 1).bit_length()
    return min(spec.prompt_tokens + outputs, longest)


def free_pieces(placement: Placement, blocks: int) -> FreePieces:
    """A cache of so many blocks, all free."""
    return Buddies(blocks) if placement == "buddy" else Extents(blocks, best=placement == "best_fit")


@mypyc_attr(allow_interpreted_subclasses=True)
class PiecePool(BlockPool):
    """A block pool whose tables are one piece each. `spare` are blocks of a table that its request has not asked for:
    the placement rounds. `sought` is the piece that was asked for last and is not there, in blocks, else 0.
    """

    def __init__(self, block_size: int, num_blocks: int, pieces: FreePieces, observer: Observer = NOBODY) -> None:
        super().__init__(block_size, num_blocks, pieces, observer)
        self.pieces = pieces
        self.spare: dict[Request, int] = {}
        self.sought = 0

    @property
    def saved(self) -> int:
        """None: nobody shares a piece."""
        return 0

    def fits(self, blocks: int) -> bool:
        """Is there a piece of so many blocks?"""
        found = self.pieces.largest >= blocks
        self.sought = 0 if found else blocks
        return found

    def reserve(self, request: Request, blocks: int) -> list[int]:
        """The piece, which there is, as the table of a request that has none."""
        assert request not in self.tables, request.spec.id
        piece = self.grow(request, blocks)
        if len(piece) > blocks:
            self.spare[request] = len(piece) - blocks
        return piece

    def release(self, request: Request, *, returns: bool = False) -> int:
        self.spare.pop(request, None)
        return super().release(request, returns=returns)

    def check(self) -> None:
        super().check()
        self.pieces.check()
        for table in self.tables.values():
            assert table[-1] - table[0] == len(table) - 1, ("not one piece", table)
        assert self.spare.keys() <= self.tables.keys(), "spare blocks of nobody"
