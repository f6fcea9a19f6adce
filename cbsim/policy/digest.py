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
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbsim.policy.plan import Chunk, StepChanges, StepPlan

_HEAD = Struct("<23q").pack
_VALUE = Struct("<q").unpack
_NOTHING = ((),) * 7  # no changes


def digest(plan: StepPlan) -> int:
    """The digest of everything that `plan` says."""
    step, (chunks, *rest), changes, counts = plan
    if not chunks and changes == _NOTHING:
        content = _HEAD(step, *rest, *counts, 0, 0, 0, 0, 0, 0, 0, 0)
    else:
        items = [*_chunks(chunks), *_changes(changes)]
        content = _HEAD(step, *rest, *counts, len(chunks), *map(len, changes)) + _packer(len(items))(*items)
    value: int = _VALUE(blake2b(content, digest_size=8).digest())[0]
    return value


def _chunks(chunks: tuple[Chunk, ...]) -> list[int]:
    items: list[int] = []
    for spec, order, start, tokens, blocks, outputs, admitted, resumed, cached, recomputed, padding in chunks:
        items += (spec.index, order, start, tokens, outputs, admitted, resumed, cached, recomputed, padding)
        items.append(len(blocks))
        items += blocks
    return items


def _changes(changes: StepChanges) -> list[int]:
    grown, joined, left, ends, ended, preempted, replaced = changes
    items: list[int] = []
    for spec, block in grown:
        items += (spec.index, block)
    items += [spec.index for spec in (*joined, *left, *ends, *ended)]
    for spec, lost_tokens, blocks in preempted:
        items += (spec.index, lost_tokens, blocks)
    for spec, index, block in replaced:
        items += (spec.index, index, block)
    return items


@lru_cache(maxsize=4096)
def _packer(length: int) -> Callable[..., bytes]:
    return Struct(f"<{length}q").pack
