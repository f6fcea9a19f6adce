"""Free pieces against the simplest model that could be right: a list that says of every block whether it is free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cbsim.kv.reservation import Buddies, Extents, FreePieces, PiecePool, Reserve, free_pieces, reserved_tokens
from cbsim.policy.request import Request, RequestSpec

MOST = 40  # blocks


def runs(free: list[bool]) -> Iterator[tuple[int, int]]:
    """(start, length) of every maximal run of free blocks."""
    for is_free, group in groupby(range(len(free)), key=free.__getitem__):
        if is_free:
            blocks = list(group)
            yield blocks[0], len(blocks)


def first_fit(free: list[bool], count: int) -> int | None:
    """The lowest address from which on `count` blocks are free."""
    return next((at for at in range(len(free) - count + 1) if all(free[at : at + count])), None)


def best_fit(free: list[bool], count: int) -> int | None:
    """The lowest of the shortest runs that are long enough."""
    return min(((length, start) for start, length in runs(free) if length >= count), default=(0, None))[1]


class Pieces(RuleBasedStateMachine):
    """Random pieces taken and given back, in any order."""

    @initialize(blocks=st.integers(1, MOST), best=st.booleans())
    def start(self, blocks: int, best: bool) -> None:
        self.pieces: FreePieces = Extents(blocks, best=best)
        self.place: Callable[[list[bool], int], int | None] = best_fit if best else first_fit
        self.found: Callable[[list[bool]], Iterable[tuple[int, int]]] = runs
        self.taken: list[list[int]] = []
        self.model = [True] * blocks

    @rule(count=st.integers(1, MOST))
    def take(self, count: int) -> None:
        """A piece lies where the rule of the placement says; where there is none, none is said to be."""
        at = self.place(self.model, count)
        assert (at is not None) == (count <= self.pieces.largest)
        if at is None:
            return
        piece = self.pieces.take(count)
        assert piece == list(range(at, at + count))
        self.mark(piece, False)
        self.taken.append(piece)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        piece = data.draw(st.sampled_from(self.taken), label="piece")
        self.taken.remove(piece)
        self.pieces.give(piece, 0)
        self.mark(piece, True)

    def mark(self, piece: list[int], free: bool) -> None:
        for block in piece:
            assert self.model[block] is not free
            self.model[block] = free

    @invariant()
    def agrees(self) -> None:
        self.pieces.check()
        assert self.pieces.order() == [block for block, free in enumerate(self.model) if free]
        assert self.pieces.free == sum(self.model)
        assert self.pieces.largest == max((length for _, length in self.found(self.model)), default=0)

    def teardown(self) -> None:
        """All given back, the cache is one piece again, or the pieces that it was."""
        for piece in self.taken:
            self.pieces.give(piece, 0)
        self.pieces.check()
        assert self.pieces.free == len(self.model)
        assert self.pieces.largest == self.pieces.most == max(size for _, size in self.found([True] * len(self.model)))


class BuddyPieces(Pieces):
    """The buddy system: its pieces are the aligned powers of two, free if all of their blocks are. One is taken from
    the front of the smallest free one that will do, the lowest of these."""

    @initialize(blocks=st.integers(1, MOST), best=st.just(True))
    def start(self, blocks: int, best: bool) -> None:
        super().start(blocks, best)
        self.pieces, self.place, self.found = Buddies(blocks), buddy_fit, aligned

    @rule(count=st.integers(1, MOST))
    def take(self, count: int) -> None:
        assert self.pieces.granted(count) == next(1 << i for i in range(9) if 1 << i >= count)
        super().take(self.pieces.granted(count))


def aligned(free: list[bool]) -> list[tuple[int, int]]:
    """(start, size) of the largest aligned powers of two that are free: none lies in another."""
    found: list[tuple[int, int]] = []
    for size in (1 << i for i in range(8, -1, -1)):
        for start in range(0, len(free) - size + 1, size):
            inside = any(a <= start < a + b for a, b in found)
            if not inside and all(free[start : start + size]):
                found.append((start, size))
    return found


def buddy_fit(free: list[bool], count: int) -> int | None:
    return min(((size, start) for start, size in aligned(free) if size >= count), default=(0, None))[1]


TestPieces, TestBuddies = Pieces.TestCase, BuddyPieces.TestCase
for case in (TestPieces, TestBuddies):
    case.settings = settings(max_examples=80, stateful_step_count=30)


# -- a pool of pieces -------------------------------------------------------------------------------------------------


def request(index: int, prompt: int = 3, outputs: int = 5, most: int = 8) -> Request:
    return Request(RequestSpec(index, f"r{index}", 0, prompt, outputs, most), most, 1)


@given(
    blocks=st.integers(8, MOST),
    asked=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=40),
    placement=st.sampled_from(["first_fit", "best_fit", "buddy"]),
)
def test_a_pool_of_pieces_loses_none(blocks: int, asked: list[tuple[int, int]], placement: str) -> None:
    """Requests come and go: no two tables overlap, each is one piece, and at the end all is free and merged."""
    pool = PiecePool(1, blocks, free_pieces(placement, blocks))  # type: ignore[arg-type]
    running: list[Request] = []
    for index, (count, gone) in enumerate(asked):
        if pool.fits(count):
            running.append(request(index))
            piece = pool.reserve(running[-1], count)
            assert pool.spare.get(running[-1], 0) == len(piece) - count
            assert pool.sought == 0
        else:
            assert pool.sought == count
        for one in running[: gone if running else 0]:
            pool.release(one)
            running.remove(one)
        pool.check()
    for one in running:
        pool.release(one)
    pool.check()
    assert (pool.free, pool.pieces.largest) == (blocks, pool.pieces.most)


@pytest.mark.parametrize(
    ("rule_", "tokens"), [("max_model_len", 100), ("max_tokens", 19), ("power_of_two", 11 + 8), ("exact", 16)]
)
def test_what_is_reserved(rule_: Reserve, tokens: int) -> None:
    """A prompt of 11, five outputs, at most eight; and never beyond the longest sequence."""
    spec = RequestSpec(0, "r", 0, 11, 5, 8)
    assert reserved_tokens(rule_, spec, 100) == tokens
    assert reserved_tokens(rule_, spec, 14) == 14


def test_powers_of_two_are_of_the_outputs() -> None:
    """As in the vLLM paper: outputs of 25 reserve 32, of 32 no more."""
    reserved = [reserved_tokens("power_of_two", RequestSpec(0, "r", 0, 1, n, 99), 999) - 1 for n in (1, 2, 25, 32, 33)]
    assert reserved == [1, 2, 32, 32, 64]


@pytest.mark.parametrize("pieces", [Extents(8, best=False), Buddies(8)], ids=["extents", "buddies"])
def test_mistakes_are_noticed(pieces: FreePieces) -> None:
    """What was not handed out in one piece cannot come back, and no block is free twice."""
    pieces.take(4)
    with pytest.raises(AssertionError, match="not one piece"):
        pieces.give([0, 2], 0)
    pieces.free += 1
    with pytest.raises(AssertionError, match="free blocks"):
        pieces.check()
