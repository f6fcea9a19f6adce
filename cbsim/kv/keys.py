"""Rules for the moment at which a full block gets its content key, so that other requests can find it."""

from __future__ import annotations

from cbsim.kv.blocks import BlockPool, Replaced
from cbsim.kv.group_pool import GroupPool
from cbsim.policy.decode_batch import Completion
from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request, Status
from cbsim.policy.value import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Keys:
    """The rule without keys: nothing is shared. A rule overrides what it needs; `Decoding` calls each at its moment."""

    hears_of_rows = False  # whether `fills` is called for every row

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def row(self, request: Request, end: int) -> None:
        """Record that a row is being planned after which `end` tokens of the request are computed."""

    def joins(self, request: Request) -> bool:
        """True if the rule has to know of the blocks that a request, about to join the decode batch, fills there."""
        return False

    def go_on(self, filling: list[Request]) -> list[Request]:
        """Note that every member gets a row in the step being planned and that these fill a block. Return the requests
        whose row has to be reported when it completes.
        """
        return []

    def leaves(self, request: Request) -> None:
        """Record that a member is about to leave the decode batch."""

    def fills(self, request: Request, row: Chunk) -> int:
        """Return the full blocks that get their keys when the row, which has just been scheduled, completes."""
        return 0

    def completed(self, completion: Completion, over: bool) -> list[Replaced]:
        """Give keys after a row has come back. Return the table entries that thereby became other blocks."""
        return []


class KeysWhenKnown(Keys):
    """The rule of vLLM: with the plan that fills the block, or once its last token is known; duplicates are kept."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._late: list[Request] = []  # filled a block whose last token is still in flight

    def row(self, request: Request, end: int) -> None:
        known = request.known - self.pool.hashed_ahead
        self.pool.publish(request, (known if known < end else end) // self.pool.block_size)

    def joins(self, request: Request) -> bool:
        """True if the blocks that a member fills get keys: not if no other request could ever look them up."""
        full = request.computed // self.pool.block_size
        named = min(full + 1, request.named) > request.hashed
        if named and request.hashed < full:
            self._late.append(request)
        return named

    def go_on(self, filling: list[Request]) -> list[Request]:
        if filling or self._late:
            filling = [*self._late, *filling]
            self._late = []
            for request in filling:
                self._fill(request)
        return []

    def _fill(self, request: Request) -> None:
        """Give the block that a member's row fills its key, as soon as its last token is known."""
        if request.batch is None:
            return
        size, after = self.pool.block_size, request.computed + 1
        self.pool.publish(request, min(after, request.known) // size)
        if request.known // size < after // size:
            self._late.append(request)

    def leaves(self, request: Request) -> None:
        """Count blocks that filled unwatched as hashed, as if each had got its key in time."""
        members = request.batch
        if members is not None and members.planned > request.since:
            self.pool.publish(request, members.known_at_plan(request) // self.pool.block_size)

    def completed(self, completion: Completion, over: bool) -> list[Replaced]:
        request = completion.request
        if request.status is Status.DECODE:
            self.pool.publish(request, (request.known - 1) // self.pool.block_size)
        return []


class GroupKeys(Keys):
    """The rule of vLLM with layer groups: as `KeysWhenKnown`, for blocks that stay cached."""

    def __init__(self, pool: GroupPool) -> None:
        super().__init__(pool)
        self._groups = pool

    def row(self, request: Request, end: int) -> None:
        self._groups.name_full(request, min(end, request.known))

    def completed(self, completion: Completion, over: bool) -> list[Replaced]:
        request = completion.request
        if request.status is not Status.WAITING:
            self._groups.name_full(request, request.computed - self._groups.in_flight(request))
        return []


@mypyc_attr(allow_interpreted_subclasses=True)
class KeysWhenCompleted(Keys):
    """The rule of transformers: when the row that fills the block is back; a duplicate is replaced by the first."""

    hears_of_rows = True

    def joins(self, request: Request) -> bool:
        return True

    def go_on(self, filling: list[Request]) -> list[Request]:
        return filling

    def fills(self, request: Request, row: Chunk) -> int:
        """Return the full blocks without a key: those that the row fills, and those that were copied to their place."""
        return max(0, (row.start + row.tokens) // self.pool.block_size - request.hashed)

    def completed(self, completion: Completion, over: bool) -> list[Replaced]:
        return self.merge(completion.request, completion.end // self.pool.block_size) if completion.fills else []

    def merge(self, request: Request, blocks: int) -> list[Replaced]:
        """Give the first `blocks` blocks of a request their keys."""
        return [(request.spec, *entry) for entry in self.pool.merge(request, blocks)]


class KeysOfPrefills(KeysWhenCompleted):
    """The rule of SGLang: when the batch that completes a prompt is back. Outputs get keys at the end."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self.prefilled: set[Request] = set()  # requests whose prompts the step being planned computes

    def joins(self, request: Request) -> bool:
        del request
        return False

    def fills(self, request: Request, row: Chunk) -> int:
        return (row.start + row.tokens) // self.pool.block_size if request in self.prefilled else 0

    def completed(self, completion: Completion, over: bool) -> list[Replaced]:
        return [] if over else super().completed(completion, over)
