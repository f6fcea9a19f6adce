"""The steps that a GPU executes before a run, so that nothing in it is a first time. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from cbengine.batch import Capacity
from cbengine.device.base import Ints
from cbengine.device.layout import Header, arrays

LEAST_TOKENS = 64  # query tokens of the least warm-up that mixes prefill and decode; then twice as many, and so on


def warm_ups(capacity: Capacity, reach: int, *, graphs: bool, random: bool) -> Iterator[tuple[Header, Ints]]:
    """Yield steps that need every kernel of a run, except for decode steps replayed as graphs, and as much memory as
    its largest step. That one comes last: every row samples, and the rows have the most query tokens possible, though
    no row more than the `reach` of a slot.
    """
    most, beams = capacity.rows, capacity.beams
    sizes = sorted({most, *(1 << i for i in range(most.bit_length()))})  # doubling the rows halves the splits of each
    for rows in sizes if beams else ():
        if rows >= beams:
            yield scratch_step(
                [], capacity.slots, decodes=rows // beams * beams, random=random, padded=False, beams=beams
            )
    for tokens in mixed_sizes(capacity.tokens):
        decodes, chunks = mixed(tokens, most, reach)
        yield scratch_step(chunks, capacity.slots, decodes=decodes, random=random, padded=False)
    for padded in (False,) if graphs else (False, True):
        for rows in () if graphs else sizes:
            yield scratch_step([], capacity.slots, decodes=rows, random=random, padded=padded)
        largest = spread(capacity.tokens, most, reach)
        if max(largest) > 1:
            yield scratch_step(largest, capacity.slots, random=random, padded=padded)
        else:
            yield scratch_step([], capacity.slots, decodes=most, random=random, padded=padded)


def mixed_sizes(budget: int) -> list[int]:
    """Return the query tokens of the steps that warm up matrix products: kernels differ with the size."""
    return [LEAST_TOKENS << i for i in range(64) if LEAST_TOKENS << i < budget]


def mixed(tokens: int, rows: int, reach: int) -> tuple[int, list[int]]:
    """Return (decode rows, tokens of each chunk) of a step with about `tokens` query tokens: as many decodes as leave
    half of the tokens and one of the rows to chunks. Few rows or a short reach allow fewer tokens.
    """
    decodes = min(rows - 1, tokens // 2)
    chunks = min(rows - decodes, max(1, -(-(tokens - decodes) // reach)))
    return decodes, spread(tokens - decodes, chunks, reach)


def spread(tokens: int, rows: int, reach: int) -> list[int]:
    """Distribute `tokens` evenly over this many rows, none above `reach`."""
    return [min(reach, (tokens + i) // rows) for i in range(rows)]


def scratch_step(
    chunks: list[int], slot: int, *, decodes: int = 0, random: bool, padded: bool, beams: int = 0
) -> tuple[Header, Ints]:
    """Return a step on the scratch slot, whose results are not used: decode rows, then chunks of these tokens, each the
    first of its sequence. Every row samples.
    """
    counts = [1] * decodes + chunks
    header = Header(
        rows=len(counts),
        decodes=decodes,
        live=decodes,
        tokens=sum(counts),
        longest=max(chunks, default=1),
        further=len(chunks),
        updates=0,
        random=random,
        padded=padded,
        beams=beams,
    )
    values: Ints = np.zeros(header.size, dtype=np.int32)
    step = arrays(values, header)
    step.slots[:], step.kv_tokens[:] = slot, counts
    step.starts[:] = [0, *accumulate(counts)]
    step.sampled[:] = range(decodes, header.rows)
    return header, values
