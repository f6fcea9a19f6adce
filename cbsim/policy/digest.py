"""A plan as 64 bits, made from declared bytes, so that any implementation can check that two plans say the same.

The bytes are little-endian signed 64-bit integers. A request is its index, a flag is 0 or 1. First come 23:

    step
    work     lead, decodes, decode_context, longest_context, prefill_tokens, padding_rows, padding_context, fast_decode
    counts   table_blocks, new_blocks, running, waiting, free_blocks, cached_blocks
    lengths  of chunks, grown, joined, left, ends, ended, preempted, replaced

Then the items of these eight lists, in this order:

    chunk      request, order, start, tokens, outputs, admitted, resumed, cached, recomputed, padding, number of its
               blocks, then these
    grown      request, block
    joined, left, ends, ended   request
    preempted  request, lost_tokens, blocks
    replaced   request, index, block

The digest is BLAKE2b of these bytes with 8 bytes of output and no key, read as one such integer.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbsim.policy.plan import StepPlan

_HEAD = Struct("<23q").pack
_PACKERS: dict[int, Callable[..., bytes]] = {}  # by the number of integers
_WORD = Struct("<q").unpack


def digest(plan: StepPlan) -> int:
    """The digest of everything that `plan` says."""
    said, items = _head(plan), _items(plan)
    if items:
        said += (_PACKERS.get(len(items)) or _packer(len(items)))(*items)
    word: int = _WORD(blake2b(said, digest_size=8).digest())[0]
    return word


def _head(plan: StepPlan) -> bytes:
    work, changes, counts = plan.work, plan.changes, plan.counts
    return _HEAD(
        plan.step,
        work.lead,
        work.decodes,
        work.decode_context,
        work.longest_context,
        work.prefill_tokens,
        work.padding_rows,
        work.padding_context,
        work.fast_decode,
        counts.table_blocks,
        counts.new_blocks,
        counts.running,
        counts.waiting,
        counts.free_blocks,
        counts.cached_blocks,
        len(work.chunks),
        len(changes.grown),
        len(changes.joined),
        len(changes.left),
        len(changes.ends),
        len(changes.ended),
        len(changes.preempted),
        len(changes.replaced),
    )


def _items(plan: StepPlan) -> list[int]:
    """What is in the lists of a plan, in the declared order, as integers."""
    items: list[int] = []
    for chunk in plan.work.chunks:
        blocks = chunk.blocks
        items += (
            chunk.spec.index,
            chunk.order,
            chunk.start,
            chunk.tokens,
            chunk.outputs,
            chunk.admitted,
            chunk.resumed,
            chunk.cached,
            chunk.recomputed,
            chunk.padding,
            len(blocks),
        )
        items += blocks
    changes = plan.changes
    for spec, block in changes.grown:
        items.append(spec.index)
        items.append(block)
    for group in (changes.joined, changes.left, changes.ends, changes.ended):
        for spec in group:
            items.append(spec.index)
    for spec, lost_tokens, held in changes.preempted:
        items += (spec.index, lost_tokens, held)
    for spec, index, block in changes.replaced:
        items += (spec.index, index, block)
    return items


def _packer(length: int) -> Callable[..., bytes]:
    """Packs so many integers, little-endian, 8 bytes each."""
    if len(_PACKERS) > 4096:
        _PACKERS.clear()
    pack = _PACKERS[length] = Struct(f"<{length}q").pack
    return pack
