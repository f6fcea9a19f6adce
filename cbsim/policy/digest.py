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

_PACKERS: dict[int, Callable[..., bytes]] = {}  # by the number of integers


def digest(plan: StepPlan) -> int:
    """The digest of everything that `plan` says."""
    items = _integers(plan)
    pack = _PACKERS.get(len(items)) or _packer(len(items))
    return int.from_bytes(blake2b(pack(*items), digest_size=8).digest(), "little", signed=True)


def _integers(plan: StepPlan) -> list[int]:
    """What a plan says as a flat list, in the declared order. One is made for every step, so it is made in one go."""
    step, (chunks, *work), changes, counts = plan
    grown, joined, left, ends, ended, preempted, replaced = changes
    items: list[int] = [step, *work, *counts, len(chunks), *map(len, changes)]
    for spec, order, start, tokens, blocks, outputs, admitted, resumed, cached, recomputed, padding in chunks:
        items += (
            spec.index,
            order,
            start,
            tokens,
            outputs,
            admitted,
            resumed,
            cached,
            recomputed,
            padding,
            len(blocks),
        )
        items += blocks
    for spec, block in grown:
        items += (spec.index, block)
    if joined or left or ends or ended or preempted or replaced:
        items += [spec.index for spec in (*joined, *left, *ends, *ended)]
        for spec, lost_tokens, held in preempted:
            items += (spec.index, lost_tokens, held)
        for spec, index, block in replaced:
            items += (spec.index, index, block)
    return items


def _packer(length: int) -> Callable[..., bytes]:
    """Packs so many integers, little-endian, 8 bytes each."""
    if len(_PACKERS) > 4096:
        _PACKERS.clear()
    pack = _PACKERS[length] = Struct(f"<{length}q").pack
    return pack
