"""What a GPU does before a run: steps after which nothing is done for the first
time. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from cbengine.batch import Capacity, Header
from cbengine.device import Ints


def warm_ups(capacity: Capacity, reach: int, *, graphs: bool, random: bool) -> Iterator[tuple[Header, Ints]]:
    """Steps that between them need every kernel of a run, but for those that were run to be captured, and as much
    memory as its largest step: every row samples, and together they have all query tokens there can be, though no row
    more than the `reach` of a slot.
    """
    most = capacity.rows
    largest = [min(reach, (capacity.tokens + i) // most) for i in range(most)]
    sizes = sorted({most, *(1 << i for i in range(most.bit_length()))})  # twice the rows, half the splits of each
    for padded in (False,) if graphs else (False, True):
        for rows in () if graphs else sizes:
            yield scratch_step([1] * rows, capacity.slots, random=random, padded=padded)
        yield scratch_step(largest, capacity.slots, random=random, padded=padded)


def scratch_step(counts: list[int], slot: int, *, random: bool, padded: bool) -> tuple[Header, Ints]:
    """A step on the scratch slot, which nobody reads: rows of so many tokens, the first of their sequences. All of them
    sample; they decode if none has more than one token.
    """
    rows = len(counts)
    decodes = rows if max(counts) == 1 else 0
    header = Header(
        rows=rows,
        decodes=decodes,
        live=decodes,
        tokens=sum(counts),
        longest=max(counts),
        further=rows - decodes,
        updates=0,
        random=random,
        padded=padded,
    )
    at = header.offsets()
    values: Ints = np.zeros(at[-1], dtype=np.int32)
    values[at[0] : at[1]], values[at[1] : at[2]] = slot, counts
    values[at[2] : at[3]] = [0, *accumulate(counts)]
    values[at[5] : at[6]] = range(decodes, rows)
    return header, values
