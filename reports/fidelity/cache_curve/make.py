"""The prefix-cache hit rate of a trace's prompts by cache capacity, in one cache that all of them share.

The hit rate is weighted by tokens: tokens found over prompt tokens, all requests of the trace in order. Only the order
counts, no time passes: a request has filled the cache before the next one looks. Outputs are not cached, as a Mooncake
trace names the blocks of prompts only (a next turn names the conversation so far as part of its prompt).

The cache is an LRU of capacity // block_tokens blocks, each of them found by its id. A request looks up its blocks from
the start until one is missing; then all of its blocks are touched, the last one first. The start of a prompt is thus
evicted after its end, and the cached part of a prompt never has a hole; vLLM frees blocks in this order too. Whether
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

`python -m reports.fidelity.cache_curve.make` makes the report of Mooncake's conversation trace; with the path of a
trace of this form, and perhaps `--capacities 1e4,1e6` and `--block-tokens 1024`, it prints the curve of that trace.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cbsim.draw.report import Table
from cbsim.metrics.terminal import aligned
from cbsim.scenario import catalog
from cbsim.workload import traces
from cbsim.workload.traces import BLOCK_TOKENS, Arrival
from reports import page

TRACE = "traces/mooncake/conversation_trace.jsonl"
PAPER = {  # hit rates of Figure 9 of the Mooncake paper (FAST'25), by its capacities, rounded
    10_000: 0.0449,
    100_000: 0.0731,
    1_000_000: 0.0866,
    2_000_000: 0.1202,
    4_000_000: 0.2149,
    5_000_000: 0.2471,
    8_000_000: 0.2997,
    10_000_000: 0.3263,
    50_000_000: 0.3983,
    100_000_000: 0.4006,
    500_000_000: 0.4006,
    1_000_000_000: 0.4006,
}


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
    rows: Sequence[Arrival], capacities: Sequence[int] = tuple(PAPER), block_tokens: int = BLOCK_TOKENS
) -> HitRateCurve:
    """The hit rates of a trace whose rows have hash ids."""
    many = block_tokens // BLOCK_TOKENS  # blocks of the trace in a block of the cache
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


def _chain(hash_ids: Sequence[int], many: int) -> Sequence[int]:
    """The last of every `many` ids. It stands for the others: an id names its block and all before it."""
    return (*hash_ids[many - 1 :: many], *(hash_ids[-1:] if len(hash_ids) % many else ()))


def table(made: HitRateCurve) -> Table:
    rows = []
    for capacity, whole, following in made.points:
        published = f"{PAPER[capacity]:.4f}" if capacity in PAPER else ""
        rows.append(
            ("infinite" if capacity is None else f"{capacity:,}", f"{whole:.4f}", published, f"{following:.4f}")
        )
    return Table("", ("capacity, tokens", "whole blocks", "paper", "next block shared"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit rate of a prefix cache by its capacity, of a Mooncake trace.")
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--capacities", default="", help="rising, in tokens, such as 1e4,1e6")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS, help=f"a multiple of {BLOCK_TOKENS}")
    arguments = parser.parse_args()
    sizes = [int(float(part)) for part in arguments.capacities.split(",") if part] or tuple(PAPER)
    path = arguments.trace or catalog.data(TRACE, "the curve of the prefix cache")
    made = curve(traces.mooncake(path), sizes, arguments.block_tokens)
    if arguments.trace:
        print(aligned([table(made).header, *table(made).rows]))
    else:
        page.write(
            __file__,
            {"curve": table(made)},
            [],
            {
                **made._asdict(),
                "points": [p._asdict() | {"published": PAPER.get(p.capacity_tokens or 0)} for p in made.points],
            },
        )


if __name__ == "__main__":
    main()
