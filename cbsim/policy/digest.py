"""The digest of a plan: 64 bits made from bytes that docs/run_directory.md declares, by which any implementation can
check that plans are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from librt.strings import BytesWriter, read_i64_le, write_i64_le

from cbsim.policy.plan import PACKED, StepPlan, length, packed

MANY: Final = 64  # numbers from which on it is faster to write them together
_EMPTY: Final = blake2b(digest_size=8)


def digest(plan: StepPlan) -> int:
    """Return the digest of everything that `plan` contains."""
    out, hashed = BytesWriter(), _EMPTY.copy()
    _write_head(out, plan)
    _write_items(out, plan, hashed)
    if plan.transfers or plan.awaited or plan.ranked or plan.tables:
        _write_transfers(out, plan)
        if plan.tables:
            _write_tables(out, plan)
    if plan.work.drafts:
        write_i64_le(out, plan.work.drafts)
    hashed.update(out.getvalue())
    return read_i64_le(hashed.digest(), 0)


def _write_head(out: BytesWriter, plan: StepPlan) -> None:
    work, changes, counts = plan.work, plan.changes, plan.counts
    write_i64_le(out, plan.step)
    write_i64_le(out, work.lead)
    write_i64_le(out, work.decodes)
    write_i64_le(out, work.decode_context)
    write_i64_le(out, work.longest_context)
    write_i64_le(out, work.prefill_tokens)
    write_i64_le(out, work.padding_rows)
    write_i64_le(out, work.padding_context)
    write_i64_le(out, work.fast_decode)
    write_i64_le(out, counts.table_blocks)
    write_i64_le(out, counts.new_blocks)
    write_i64_le(out, counts.running)
    write_i64_le(out, counts.waiting)
    write_i64_le(out, counts.free_blocks)
    write_i64_le(out, counts.cached_blocks)
    write_i64_le(out, len(work.chunks))
    write_i64_le(out, len(changes.grown))
    write_i64_le(out, len(changes.joined))
    write_i64_le(out, len(changes.left))
    write_i64_le(out, len(changes.ends))
    write_i64_le(out, len(changes.ended))
    write_i64_le(out, len(changes.preempted))
    write_i64_le(out, len(changes.replaced))


def _write_items(out: BytesWriter, plan: StepPlan, hashed: blake2b) -> None:
    """Write the items of a plan's lists, in the declared order."""
    for chunk in plan.work.chunks:
        write_i64_le(out, chunk.spec.index)
        write_i64_le(out, chunk.order)
        write_i64_le(out, chunk.start)
        write_i64_le(out, chunk.tokens)
        write_i64_le(out, chunk.outputs)
        write_i64_le(out, chunk.admitted)
        write_i64_le(out, chunk.resumed)
        write_i64_le(out, chunk.cached)
        write_i64_le(out, chunk.recomputed)
        write_i64_le(out, chunk.padding)
        listed = chunk.listed
        write_i64_le(out, length(listed))
        if isinstance(listed, bytes) or len(listed) >= MANY:
            hashed.update(out.getvalue())
            out.truncate(0)
            hashed.update(listed if isinstance(listed, bytes) else packed(listed))
        else:
            for block in listed:
                write_i64_le(out, block)
    changes = plan.changes
    listed = changes.listed
    if isinstance(listed, bytes):
        pages = listed
        for i, spec in enumerate(changes.grown):
            write_i64_le(out, spec.index)
            write_i64_le(out, read_i64_le(pages, PACKED * i))
    elif len(changes.grown) < MANY:
        for i, spec in enumerate(changes.grown):
            write_i64_le(out, spec.index)
            write_i64_le(out, listed[i])
    else:
        numbers = [0] * (2 * len(changes.grown))
        numbers[::2], numbers[1::2] = [spec.index for spec in changes.grown], listed
        out.write(packed(numbers))
    for spec in changes.joined + changes.left + changes.ends + changes.ended:
        write_i64_le(out, spec.index)
    for spec, lost_tokens, count in changes.preempted:
        write_i64_le(out, spec.index)
        write_i64_le(out, lost_tokens)
        write_i64_le(out, count)
    for spec, index, block in changes.replaced:
        write_i64_le(out, spec.index)
        write_i64_le(out, index)
        write_i64_le(out, block)


def _write_transfers(out: BytesWriter, plan: StepPlan) -> None:
    _write(out, [len(plan.transfers), len(plan.awaited), len(plan.ranked)])
    for transfer in plan.transfers:
        index = transfer.spec.index if transfer.spec else -1
        _write(out, [int(transfer.direction), index, transfer.job, len(transfer.sources)])
        _write(out, [*transfer.sources, *transfer.targets])
    _write(out, plan.awaited)
    for group in plan.ranked:
        _write(out, [len(group), *[spec.index for spec in group]])


def _write_tables(out: BytesWriter, plan: StepPlan) -> None:
    write_i64_le(out, len(plan.tables))
    for change in plan.tables:
        _write(out, [change.spec.index, change.group, change.passed, len(change.blocks), *change.blocks])
        _write(out, [len(change.replaced), *[number for entry in change.replaced for number in entry]])


def _write(out: BytesWriter, numbers: Sequence[int]) -> None:
    for number in numbers:
        write_i64_le(out, number)
