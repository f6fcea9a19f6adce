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

A plan that moves KV, waits for moves, ranks texts or changes tables of layer groups goes on with the numbers of each of
the first three, then

    move       way (0 copy, 1 out, 2 in), request or -1, job, number of its blocks, their sources, their targets
    awaited    job
    ranked     number of texts, then the request of each

and if it changes tables, with the number of changes, then

    table      request, group, passed, number of its blocks, these, number of entries replaced, entry and block of each

The digest is BLAKE2b of these bytes with 8 bytes of output and no key, read as one such integer.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import pack

from librt.strings import BytesWriter, read_i64_le, write_i64_le

from cbsim.policy.plan import StepPlan

MANY = 64  # numbers from which on it is faster to write them together
_UNFED = blake2b(digest_size=8)


def digest(plan: StepPlan) -> int:
    """The digest of everything that `plan` says."""
    said = BytesWriter()
    _say_head(said, plan)
    _say_items(said, plan)
    if plan.transfers or plan.awaited or plan.ranked or plan.tables:
        _say_further(said, plan)
        if plan.tables:
            _say_tables(said, plan)
    fed = _UNFED.copy()
    fed.update(said.getvalue())
    return read_i64_le(fed.digest(), 0)


def _say_head(said: BytesWriter, plan: StepPlan) -> None:
    work, changes, counts = plan.work, plan.changes, plan.counts
    write_i64_le(said, plan.step)
    write_i64_le(said, work.lead)
    write_i64_le(said, work.decodes)
    write_i64_le(said, work.decode_context)
    write_i64_le(said, work.longest_context)
    write_i64_le(said, work.prefill_tokens)
    write_i64_le(said, work.padding_rows)
    write_i64_le(said, work.padding_context)
    write_i64_le(said, work.fast_decode)
    write_i64_le(said, counts.table_blocks)
    write_i64_le(said, counts.new_blocks)
    write_i64_le(said, counts.running)
    write_i64_le(said, counts.waiting)
    write_i64_le(said, counts.free_blocks)
    write_i64_le(said, counts.cached_blocks)
    write_i64_le(said, len(work.chunks))
    write_i64_le(said, len(changes.grown))
    write_i64_le(said, len(changes.joined))
    write_i64_le(said, len(changes.left))
    write_i64_le(said, len(changes.ends))
    write_i64_le(said, len(changes.ended))
    write_i64_le(said, len(changes.preempted))
    write_i64_le(said, len(changes.replaced))


def _say_items(said: BytesWriter, plan: StepPlan) -> None:
    """What is in the lists of a plan, in the declared order."""
    for chunk in plan.work.chunks:
        blocks = chunk.blocks
        write_i64_le(said, chunk.spec.index)
        write_i64_le(said, chunk.order)
        write_i64_le(said, chunk.start)
        write_i64_le(said, chunk.tokens)
        write_i64_le(said, chunk.outputs)
        write_i64_le(said, chunk.admitted)
        write_i64_le(said, chunk.resumed)
        write_i64_le(said, chunk.cached)
        write_i64_le(said, chunk.recomputed)
        write_i64_le(said, chunk.padding)
        write_i64_le(said, len(blocks))
        if len(blocks) < MANY:
            for block in blocks:
                write_i64_le(said, block)
        else:
            said.write(pack(f"<{len(blocks)}q", *blocks))
    changes = plan.changes
    if len(changes.grown) < MANY:
        for i, spec in enumerate(changes.grown):
            write_i64_le(said, spec.index)
            write_i64_le(said, changes.blocks[i])
    else:
        numbers = [0] * (2 * len(changes.grown))
        numbers[::2], numbers[1::2] = [spec.index for spec in changes.grown], changes.blocks
        said.write(pack(f"<{len(numbers)}q", *numbers))
    for group in (changes.joined, changes.left, changes.ends, changes.ended):
        for spec in group:
            write_i64_le(said, spec.index)
    for spec, lost_tokens, held in changes.preempted:
        write_i64_le(said, spec.index)
        write_i64_le(said, lost_tokens)
        write_i64_le(said, held)
    for spec, index, block in changes.replaced:
        write_i64_le(said, spec.index)
        write_i64_le(said, index)
        write_i64_le(said, block)


def _say_further(said: BytesWriter, plan: StepPlan) -> None:
    write_i64_le(said, len(plan.transfers))
    write_i64_le(said, len(plan.awaited))
    write_i64_le(said, len(plan.ranked))
    for transfer in plan.transfers:
        write_i64_le(said, int(transfer.direction))
        write_i64_le(said, transfer.spec.index if transfer.spec else -1)
        write_i64_le(said, transfer.job)
        write_i64_le(said, len(transfer.sources))
        for block in transfer.sources:
            write_i64_le(said, block)
        for block in transfer.targets:
            write_i64_le(said, block)
    for job in plan.awaited:
        write_i64_le(said, job)
    for group in plan.ranked:
        write_i64_le(said, len(group))
        for spec in group:
            write_i64_le(said, spec.index)


def _say_tables(said: BytesWriter, plan: StepPlan) -> None:
    write_i64_le(said, len(plan.tables))
    for change in plan.tables:
        write_i64_le(said, change.spec.index)
        write_i64_le(said, change.group)
        write_i64_le(said, change.passed)
        write_i64_le(said, len(change.blocks))
        for block in change.blocks:
            write_i64_le(said, block)
        write_i64_le(said, len(change.replaced))
        for entry, block in change.replaced:
            write_i64_le(said, entry)
            write_i64_le(said, block)
