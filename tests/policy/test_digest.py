"""The digest of a plan, against a second implementation written from docs/run_directory.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any

import pytest

from cbsim.policy.digest import MANY, digest
from cbsim.policy.plan import Chunk, Preempted, StepChanges, StepCounts, StepPlan, StepWork, packed
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import Direction, Transfer

A, B, C = (RequestSpec(index, f"r{index}", 0, 40, 9, 9) for index in (3, 5, 1 << 40))
FULL = StepPlan(
    7,
    StepWork(
        chunks=(
            Chunk(A, order=4, start=16, tokens=20, listed=(8, 9), outputs=0, admitted=True, cached=16, recomputed=2),
            Chunk(B, order=2, start=50, tokens=4, listed=(), outputs=4, resumed=True, padding=3),
        ),
        lead=1,
        decodes=12,
        decode_context=13,
        longest_context=14,
        prefill_tokens=24,
        padding_rows=15,
        padding_context=16,
        fast_decode=True,
    ),
    StepChanges(
        grown=(C, B),
        listed=(17, 18),
        joined=(A,),
        left=(B, C),
        ends=(C,),
        ended=(A, B, C),
        preempted=(Preempted(B, lost_tokens=19, blocks=20),),
        replaced=((A, 21, 22),),
    ),
    StepCounts(table_blocks=23, new_blocks=24, running=25, waiting=26, free_blocks=27, cached_blocks=28),
)
MOVING = replace(
    FULL,
    transfers=(Transfer(Direction.COPY, (29,), (30,), B), Transfer(Direction.IN, (31, 32), (33, 34), None, job=35)),
    awaited=(36, 37),
    ranked=((A, B), (C,)),
)


DRAFTED = replace(MOVING, work=replace(FULL.work, drafts=45))


def words(plan: StepPlan) -> list[int]:
    """The integers of the documentation, in its order."""
    drafts = [plan.work.drafts] if plan.work.drafts else []
    return [*without_drafts(plan), *drafts]


def without_drafts(plan: StepPlan) -> list[int]:
    w, c, n = plan.work, plan.changes, plan.counts
    head = [plan.step, w.lead, w.decodes, w.decode_context, w.longest_context, w.prefill_tokens]
    head += [w.padding_rows, w.padding_context, w.fast_decode]
    head += [n.table_blocks, n.new_blocks, n.running, n.waiting, n.free_blocks, n.cached_blocks]
    head += [len(items) for items in (w.chunks, c.grown, c.joined, c.left, c.ends, c.ended, c.preempted, c.replaced)]
    for k in w.chunks:
        head += [k.spec.index, k.order, k.start, k.tokens, k.outputs, k.admitted, k.resumed, k.cached, k.recomputed]
        head += [k.padding, len(k.blocks), *k.blocks]
    head += [number for spec, block in zip(c.grown, c.blocks, strict=True) for number in (spec.index, block)]
    head += [spec.index for spec in (*c.joined, *c.left, *c.ends, *c.ended)]
    head += [number for p in c.preempted for number in (p.spec.index, p.lost_tokens, p.blocks)]
    head += [number for spec, at, block in c.replaced for number in (spec.index, at, block)]
    if not (plan.transfers or plan.awaited or plan.ranked):
        return head
    head += [len(plan.transfers), len(plan.awaited), len(plan.ranked)]
    for m in plan.transfers:
        head += [m.direction.value, m.spec.index if m.spec else -1, m.job, len(m.sources), *m.sources, *m.targets]
    head += plan.awaited
    return head + [number for group in plan.ranked for number in (len(group), *(spec.index for spec in group))]


def by_the_book(plan: StepPlan) -> int:
    content = b"".join(int(word).to_bytes(8, "little", signed=True) for word in words(plan))
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)


def altered(value: Any) -> Iterator[Any]:
    """A plan, or a part of it, with one number changed, one request exchanged, one item taken out or doubled."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, Direction):
        yield Direction((value + 1) % len(Direction))
    elif isinstance(value, Transfer):
        yield replace(value, sources=(*value.sources, 1), targets=(*value.targets, 1))
        for name in ("direction", "spec", "job"):
            yield from (replace(value, **{name: other}) for other in altered(getattr(value, name)))
        for name in ("sources", "targets"):
            first, *others = getattr(value, name)
            yield replace(value, **{name: (first + 1, *others)})
    elif value is None:
        yield A
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, RequestSpec):
        yield replace(value, index=value.index + 1)
    elif isinstance(value, StepChanges):
        for pairs in altered(tuple(zip(value.grown, value.blocks, strict=True))):
            yield replace(value, grown=tuple(spec for spec, _ in pairs), listed=tuple(block for _, block in pairs))
        for name in ("joined", "left", "ends", "ended", "preempted", "replaced"):
            yield from (replace(value, **{name: other}) for other in altered(getattr(value, name)))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from (replace(value, **{field.name: other}) for other in altered(getattr(value, field.name)))
    else:
        make = type(value)._make if hasattr(value, "_make") else tuple
        fixed = make is not tuple or {type(item) for item in value} == {RequestSpec, int}
        for at, item in enumerate(value):
            yield from (make([*value[:at], other, *value[at + 1 :]]) for other in altered(item))
            if not fixed:
                yield value[:at] + value[at + 1 :]
                yield (*value[:at], item, *value[at:])


@pytest.mark.parametrize(
    "plan",
    [FULL, MOVING, DRAFTED, StepPlan(0), StepPlan(-1), StepPlan(3, FULL.work), StepPlan(3, StepWork(), FULL.changes)],
)
def test_the_digest_is_that_of_the_documented_bytes(plan: StepPlan) -> None:
    assert digest(plan) == by_the_book(plan)


@pytest.mark.parametrize("count", [MANY - 1, MANY, 3 * MANY])
def test_long_lists_of_blocks_are_said_as_short_ones(count: int) -> None:
    """Numbers that are written together and those written one by one are the same bytes."""
    chunk, blocks = replace(FULL.work.chunks[0], listed=tuple(range(count))), tuple(range(count, 2 * count))
    changes = replace(FULL.changes, grown=(A, B, C) * count, listed=blocks * 3)
    plan = replace(FULL, work=replace(FULL.work, chunks=(chunk,)), changes=changes)
    assert digest(plan) == by_the_book(plan)
    chunk, changes = (replace(each, listed=packed(each.blocks)) for each in (chunk, changes))
    same = replace(FULL, work=replace(FULL.work, chunks=(chunk,)), changes=changes)
    assert digest(same) == digest(plan) and same.changes.blocks == plan.changes.blocks


def test_known_digests() -> None:
    """As any implementation must find them."""
    assert (digest(StepPlan(0)), digest(FULL)) == (-4957537924016086018, -5533961073351706377)


def test_the_digest_covers_everything_that_a_plan_says() -> None:
    """Whatever is changed, it is another digest; a request is its index."""
    plans = [DRAFTED, *altered(DRAFTED)]
    assert len({digest(plan) for plan in plans}) == len({tuple(words(plan)) for plan in plans}) == len(set(plans))
    assert len(plans) > 80
    twin = replace(FULL, changes=replace(FULL.changes, joined=(replace(A, id="another", prompt_tokens=1),)))
    assert digest(twin) == digest(FULL)
