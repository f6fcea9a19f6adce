"""Prefix-cache hit rate by capacity: the LRU against other ways to count, and against the Mooncake paper.

The paper (FAST'25, Figure 9) gives twelve hit rates of its conversation trace. It does not say how much of a block is
shared where two prompts part, so its points must lie between counting whole blocks and counting the next block too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.reference import data

from cbsim.workload import traces
from cbsim.workload.traces import Arrival
from reports.fidelity.cache_curve.make import TRACE, curve

B = traces.BLOCK_TOKENS


def request(*hash_ids: int, short_by: int = 0) -> Arrival:
    """A prompt of whole blocks, less `short_by` tokens of the last one."""
    return Arrival(0, len(hash_ids) * B - short_by, 1, hash_ids)


@st.composite
def conversations(draw: st.DrawFn) -> list[Arrival]:
    """Prompts that share beginnings as Mooncake's do: equal ids if and only if all up to there is equal."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for _ in range(draw(st.integers(1, 25))):
        text = draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
        short_by = draw(st.sampled_from([0, 0, 100, B - 1]))
        paths = [tuple(text[: i + 1]) for i in range(len(text))]
        paths[-1] = (*paths[-1], -short_by) if short_by else paths[-1]
        rows.append(request(*(ids.setdefault(path, len(ids)) for path in paths), short_by=short_by))
    return rows


def rates(rows: Sequence[Arrival], *capacities: int, block_tokens: int = B) -> list[tuple[float, float]]:
    """(whole blocks, next block shared) by capacity, the infinite cache last."""
    return [point[1:] for point in curve(rows, capacities, block_tokens).points]


# -- properties -------------------------------------------------------------------------------------------------------


@given(conversations(), st.sampled_from([B, 2 * B, 3 * B]))
def test_rates_never_fall_with_capacity(rows: list[Arrival], block_tokens: int) -> None:
    """LRU is a stack algorithm: what a cache holds, a larger one holds too. So both curves rise, up to the infinite
    cache; and as sharing more of a block never finds less, one lies above the other.
    """
    points = rates(rows, *range(B, 40 * B, B), block_tokens=block_tokens)
    for low, high in points:
        assert 0 <= low <= high <= 1
    for curve_ in zip(*points, strict=True):
        assert list(curve_) == sorted(curve_)


@given(conversations(), st.integers(1, 30))
def test_hits_are_stack_distances(rows: list[Arrival], blocks: int) -> None:
    """A block is in an LRU of n blocks if fewer than n others were touched since it was (Mattson's stack distance)."""
    touched: list[int] = []
    hit_tokens = 0
    for row in rows:
        for depth, block in enumerate(row.hash_ids):
            since = touched[len(touched) - touched[::-1].index(block) :] if block in touched else range(blocks)
            if len(set(since)) >= blocks:
                break
            hit_tokens += min(B, row.prompt_tokens - depth * B)
        touched += reversed(row.hash_ids)
    assert rates(rows, blocks * B)[0][0] == hit_tokens / sum(row.prompt_tokens for row in rows)


@given(conversations())
def test_infinite_cache_finds_all_seen_before(rows: list[Arrival]) -> None:
    """Without eviction a block is found if any request before had it; its distinct blocks are all the room it takes."""
    low = high = 0
    for n, row in enumerate(rows):
        before = {block for other in rows[:n] for block in other.hash_ids}
        found = sum(block in before for block in row.hash_ids)
        low += min(row.prompt_tokens, found * B)
        high += min(row.prompt_tokens, (found + 1) * B) if n else 0
    total = sum(row.prompt_tokens for row in rows)
    enough = curve(rows, ()).distinct_blocks * B
    assert rates(rows, enough) == [(low / total, high / total)] * 2


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_the_start_of_a_prompt_is_evicted_last() -> None:
    """A cache of two blocks keeps the first two of three: the same prompt finds 2/3 of itself the second time, and the
    block after these is the third. If the start were evicted first, nothing would be made.
    """
    twice = [request(1, 2, 3), request(1, 2, 3)]
    assert rates(twice, 2 * B) == [(2 / 6, 3 / 6), (3 / 6, 3 / 6)]


def test_a_cache_without_a_block_shares_nothing() -> None:
    """512 tokens are one block, 511 none; and the first request has nothing to share with."""
    twice = [request(1), request(1)]
    assert rates(twice, B - 1, B) == [(0, 0), (0.5, 0.5), (0.5, 0.5)]
    assert rates([request(1)]) == [(0, 0)]


def test_two_blocks_as_one() -> None:
    """With blocks of 1,024 tokens, 1 2 3 is two blocks, 1 2 and a short one; 1 4 shares no whole block with it."""
    rows = [request(1, 2, 3), request(1, 2, 5), request(1, 4)]
    made = curve(rows, (2 * B,), 2 * B)
    assert made.distinct_blocks == 4 and made.block_tokens == 2 * B
    assert [point[1:] for point in made.points] == [(2 / 8, 5 / 8)] * 2


# -- the paper --------------------------------------------------------------------------------------------------------


def test_all_points_of_the_paper_lie_between() -> None:
    paper = json.loads(data("traces/mooncake/fast25_figure9.json").read_text())["conversation"]
    made = curve(traces.mooncake(data(TRACE)), [capacity for capacity, _ in paper])
    assert len(paper) == 12
    for (capacity, published), point in zip(paper, made.points, strict=False):
        assert point.capacity_tokens == capacity
        assert point.whole_blocks < published < point.next_block_shared
    assert [round(rate, 3) for rate in made.points[-1][1:]] == [0.374, 0.414]
    assert (made.requests, made.prompt_tokens, made.distinct_blocks) == (12_031, 144_793_823, 182_790)
