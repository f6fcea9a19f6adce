"""Prefix-cache hit rate by cache capacity: what a trace's prompts would find in one cache that all of them share.

The hit rate is weighted by tokens: tokens found over prompt tokens, all requests of the trace in order. Only the order
counts, no time passes: a request has filled the cache before the next one looks. Outputs are not cached, as a Mooncake
trace names the blocks of prompts only (a next turn names what was said before as part of its prompt).

The cache is an LRU of capacity // block_tokens blocks, each of them found by its id. A request looks up its blocks from
the start until one is missing; then all of its blocks are touched, the last one first. So the start of a prompt is
evicted after its end, and what is cached of a prompt never has a hole; vLLM frees blocks in this order too. Whether
blocks are evicted one by one or after the whole prompt makes no difference: an LRU holds the blocks touched most
recently, and if a prompt is larger than the cache these are its first ones. A larger cache holds all that a smaller
one does, so no hit rate falls with capacity.

Two figures enclose what a cache that shares single tokens would find (surely if it never evicts; one that does also
evicts by tokens, which may move a figure by part of a block a prompt):

- whole blocks: the blocks found. A short last block counts with the tokens it has, if its id is found: equal ids mean
  equal text up to the end of the block. (Full blocks alone, as servers cache them, would be 0.02 points less on
  Mooncake's conversations: 37.34 % instead of 37.36 % with an infinite cache.)
- next block shared: the block after those too, where the cache holds anything at all. Its text differs somewhere,
  perhaps in its last token only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cbsim.scenario import catalog
from cbsim.scenario.fields import LARGEST_WHOLE, ScenarioError, shown
from cbsim.workload.traces import BLOCK_TOKENS, Arrival

PAPER_TOKENS = tuple(map(int, (1e4, 1e5, 1e6, 2e6, 4e6, 5e6, 8e6, 1e7, 5e7, 1e8, 5e8, 1e9)))
"""The capacities of Figure 9 of the Mooncake paper (FAST'25), rounded."""


class HitRates(NamedTuple):
    """Hit rates, from 0 to 1, of a cache of `capacity_tokens`; None is a cache that never evicts."""

    capacity_tokens: int | None
    whole_blocks: float
    next_block_shared: float


class HitRateCurve(NamedTuple):
    """Hit rates by rising capacity, the infinite cache last, and what they are counted over."""

    requests: int
    prompt_tokens: int
    block_tokens: int
    distinct_blocks: int
    points: tuple[HitRates, ...]


def curve(
    rows: Sequence[Arrival], capacities: Sequence[int] = PAPER_TOKENS, block_tokens: int = BLOCK_TOKENS
) -> HitRateCurve:
    """The hit rates of a trace whose rows have hash ids. Raises ScenarioError if `block_tokens` does not fit them."""
    many = _merged(block_tokens)
    chains = [_chain(row.hash_ids, many) for row in rows]
    prompts = [row.prompt_tokens for row in rows]
    distinct = len({block for chain in chains for block in chain})
    points = []
    for capacity in (*capacities, None):
        blocks = distinct if capacity is None else capacity // block_tokens
        whole = following = 0
        for prompt, (held, reached) in zip(prompts, _lookups(chains, blocks), strict=True):
            whole += min(held * block_tokens, prompt)
            following += min(reached * block_tokens, prompt)
        points.append(HitRates(capacity, whole / sum(prompts), following / sum(prompts)))
    return HitRateCurve(len(rows), sum(prompts), block_tokens, distinct, tuple(points))


def _lookups(chains: Sequence[Sequence[int]], blocks: int) -> Iterator[tuple[int, int]]:
    """For every request the blocks that an LRU of `blocks` blocks holds from its start, and these with the next one."""
    cache: OrderedDict[int, None] = OrderedDict()
    for chain in chains:
        held = 0
        for block in chain:
            if block not in cache:
                break
            held += 1
        yield held, held + bool(cache)
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)


def _merged(block_tokens: int) -> int:
    """Blocks of the trace in a block of the cache."""
    many, rest = divmod(block_tokens, BLOCK_TOKENS)
    if rest or not 1 <= many <= LARGEST_WHOLE // BLOCK_TOKENS:
        expected = f"a multiple of {BLOCK_TOKENS}, the tokens of a hash id, up to {LARGEST_WHOLE:,}"
        raise ScenarioError(f"--block-tokens: got {shown(block_tokens)}, expected {expected}")
    return many


def _chain(hash_ids: Sequence[int], many: int) -> Sequence[int]:
    """The last of every `many` ids. It stands for the others: an id names its block and all before it."""
    return (*hash_ids[many - 1 :: many], *(hash_ids[-1:] if len(hash_ids) % many else ()))


def capacities(text: str) -> tuple[int, ...]:
    """Capacities in tokens as a user lists them, such as 1e4,1e5,1e6. Raises ScenarioError unless they rise."""
    values = tuple(_tokens(part.strip()) for part in text.split(","))
    for before, after in pairwise(values):
        if after <= before:
            raise ScenarioError(
                f"--capacities: got {after:,} after {before:,}, expected each larger than the one before"
            )
    return values


def _tokens(part: str) -> int:
    try:
        value = float(part)
    except ValueError:
        value = float("nan")
    if not (1 <= value <= LARGEST_WHOLE and value.is_integer()):
        expected = (
            f"whole numbers of tokens from 1 to {LARGEST_WHOLE:,}, such as 1e4,1e5 (an infinite cache comes last)"
        )
        raise ScenarioError(f"--capacities: got {shown(part)}, expected {expected}")
    return int(value)


def find(name: str) -> Path:
    """The trace file: a path as it is, or below a folder of data."""
    places = [Path(name), *(folder / name for folder in catalog.data_folders())]
    for place in places:
        if place.is_file():
            return place
    looked = "; ".join(str(place) for place in dict.fromkeys(places))
    raise ScenarioError(f"TRACE: no file {shown(name)}, looked at {looked}; docs/data.md says where to get traces")
