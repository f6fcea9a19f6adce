"""vLLM with a connector that keeps KV on the host: what a block holds is what its reader expects, whatever is evicted,
preempted or cancelled on the way; no block is handed out under a move; nothing is lost or left."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import DEPTHS, MOST_TOKENS, asks, ran
from support.contents import Mover
from support.helpers import Ask, Drive, Overridden

from cbsim.kv.host_cache import Arc, HostCache, Lru, Visitor
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import DEVICE, HOST
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VllmOptions


class OffloadDrive(Drive):
    """A run with tiers, whose accounts are checked after every effect."""

    def __init__(
        self, scheduler: VllmScheduler, workload: list[Ask], depth: int, latency: Callable[[], int] = lambda: 1
    ) -> None:
        super().__init__(scheduler, workload, depth)
        self.tiers = self.executor = Mover(workload, scheduler.pool.block_size, latency)

    def check(self) -> None:
        super().check()
        assert isinstance(self.scheduler, VllmScheduler)
        assert self.scheduler.transfers is not None
        self.scheduler.transfers.check()


def options(depth: int, **given: Any) -> VllmOptions:
    usual = {"block_size": 2, "num_blocks": 13, "max_model_len": MOST_TOKENS, "max_num_seqs": 8}
    usual |= {"max_num_batched_tokens": 16, "host_blocks": 9, "async_scheduling": depth > 1}
    return VllmOptions(**usual | given)


def tight(pick: Callable[[Sequence[Any]], Any], depth: int, least: int = 1) -> VllmOptions:
    """Any options, with a cache that holds the longest request or little more, and at least so many host places. By
    priority, chunks are not cut short and no blocks are spared: as in vLLM, a victim that has a row in the step loses
    it, but its blocks keep the keys that planning gave them: others would read what was never computed."""
    size, kind = pick([1, 2, 4]), pick(["simple_cpu", "offloading"])
    per_chunk = pick([1, 2, 3]) if kind == "offloading" else 1
    policy = pick(["fcfs", "fcfs", "priority"])
    return options(
        depth,
        policy=policy,
        block_size=size,
        num_blocks=1 + pick(range(MOST_TOKENS // size, 2 * MOST_TOKENS // size + 1)),
        max_num_seqs=pick(range(1, 9)),
        max_num_batched_tokens=pick([1, 3, 8, 16, 30]),
        long_prefill_token_threshold=pick([0, 0, 3]) if policy == "fcfs" else 0,
        scheduler_reserve_full_isl=pick([True, False]),
        watermark=pick([0.0, 0.0, 0.2]) if policy == "fcfs" else 0.0,
        prefill_schedule_interval=pick([1, 1, 3]),
        kv_connector=kind,
        host_blocks=pick(range(least, 4 * MOST_TOKENS // size + least)) * per_chunk + (kind == "simple_cpu"),
        lazy_offload=kind == "simple_cpu" and pick([True, False]),
        blocks_per_chunk=per_chunk,
        eviction_policy=pick(["lru", "arc"]),
        offload_prompt_only=pick([True, False]),
    )


def run(made: VllmOptions, workload: list[Ask], depth: int, latency: Callable[[], int]) -> None:
    scheduler = VllmScheduler(made)
    drive = ran(OffloadDrive(scheduler, workload, depth, latency))
    assert scheduler.transfers is not None
    assert not scheduler.transfers.busy
    assert not drive.tiers.underway.jobs


@DEPTHS
@given(seed=st.integers(0, 2**32))
def test_long_runs_on_tight_caches(depth: int, seed: int) -> None:
    """The same as below where nearly every request loads something, since three texts come back after the device has
    lost them, and many are cancelled while they do."""
    dice = random.Random(seed)
    made = tight(dice.choice, depth, least=8)
    run(made, [_turn(dice, index) for index in range(30)], depth, lambda: dice.randint(0, 6))


@DEPTHS
@given(data=st.data())
def test_blocks_hold_what_is_expected_and_nothing_is_left(depth: int, data: st.DataObject) -> None:
    """Loads that take a while, stores that take longer, cancellations in either: every row reads what was computed for
    it, every request gets its tokens, all blocks and places come back."""
    made = tight(lambda choices: data.draw(st.sampled_from(choices)), depth)
    run(made, data.draw(asks(made.block_size)), depth, lambda: data.draw(st.integers(0, 6)))


def _turn(dice: random.Random, index: int) -> Ask:
    prompt, outputs = dice.randint(4, 16), dice.randint(1, 8)
    text, common = dice.randint(0, 2), dice.choice([dice.randint(0, prompt), prompt + outputs])
    content = tuple((1000 * text if i < common else 1000 * (10 + index)) + i for i in range(prompt + outputs))
    priority = dice.randint(0, 2)
    spec = RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs, priority, content, 1, prompt + outputs)
    arrives = dice.randint(0, 150)
    cancelled = arrives + dice.randint(0, 15) if dice.random() < 0.25 else None
    return Ask(spec, arrives, cancelled, dice.randint(1, outputs) if dice.random() < 0.3 else None, content)


def told(index: int, prompt: int, outputs: int, arrives: int, first: int = 0) -> Ask:
    """A request whose tokens all have declared content: those of the requests with the same `first`."""
    content = tuple(1000 * first + i for i in range(prompt + outputs))
    spec = RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs, 0, content, 1, prompt + outputs)
    return Ask(spec, arrives, None, None, content)


KINDS = pytest.mark.parametrize(
    "kind",
    [
        {"kv_connector": "simple_cpu"},
        {"kv_connector": "simple_cpu", "lazy_offload": True},
        {"kv_connector": "offloading"},
        {"kv_connector": "offloading", "eviction_policy": "arc", "blocks_per_chunk": 2},
    ],
    ids=["eager", "lazy", "lru", "arc"],
)


@KINDS
@DEPTHS
def test_what_the_device_has_lost_comes_back(depth: int, kind: dict[str, Any]) -> None:
    """A prompt, others that need all blocks, the prompt again: it is loaded, not computed a second time."""
    workload = [told(0, 12, 2, 0), *[told(i, 20, 2, 20 * i, first=i) for i in (1, 2)], told(3, 12, 2, 80)]
    scheduler = VllmScheduler(options(depth, host_blocks=60, **kind))
    drive = ran(OffloadDrive(scheduler, workload, depth))
    again = drive.requests[workload[3].spec]
    assert again.cached is not None
    assert again.cached >= 8
    assert drive.tiers.contents.moved[DEVICE] >= 4


@DEPTHS
def test_a_prompt_of_one_token_is_loaded_once(depth: int) -> None:
    """... into a block of one token. Its last token is computed in any case, so none counts as loaded; it is not looked
    up and loaded again into another block, which nobody would free. Its client leaves while it is loaded, or after."""
    first, others = told(0, 1, 2, 0), [told(i, 20, 2, 20 * i, first=i) for i in (1, 2)]
    for after in (None, *range(1, 12)):
        again = told(3, 1, 2, 80)._replace(cancelled=None if after is None else 80 + after)
        made = options(depth, kv_connector="offloading", block_size=1, num_blocks=25, host_blocks=60)
        drive = OffloadDrive(VllmScheduler(made), [first, *others, again], depth, lambda: 4)
        ran(drive)
        assert drive.tiers.contents.moved[DEVICE] <= 1 if after else drive.tiers.contents.moved[DEVICE] == 1


@pytest.mark.parametrize("kind", ["simple_cpu", "offloading"])
@DEPTHS
def test_a_block_handed_out_under_a_store_is_caught(depth: int, kind: str) -> None:
    """Slow stores, and a second request that needs the blocks of the first: with the connector's rule it waits or the
    store is flushed; `Underway` sees the block handed out on a pool that does not hold what the simple connector
    stores, or without the native one's flushes."""
    workload = [told(0, 12, 1, 0), *[told(i, 22, 1, 6, first=i) for i in (1, 2)]]
    build = partial(VllmScheduler, options(depth, kv_connector=kind, host_blocks=60))
    drive = ran(OffloadDrive(build(), workload, depth, lambda: 12))
    assert drive.tiers.contents.moved[HOST] >= 6

    scheduler = build()
    assert scheduler.transfers is not None
    inner, decoding = scheduler.transfers.connector, scheduler.decoding

    def order(step: int, ahead: Any) -> None:
        before = len(decoding.transfers)
        inner.order(step, ahead)
        if kind == "offloading":
            decoding.awaited.clear()
            return
        for move in decoding.transfers[before:]:
            scheduler.pool.let_go(list(move.sources))

    scheduler.transfers.connector = Overridden(inner, order=order)  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="handed out under a transfer"):
        OffloadDrive(scheduler, workload, depth, lambda: 12).run()


@DEPTHS
def test_a_lazy_connector_comes_to_rest(depth: int) -> None:
    """With fewer places than the device caches it has always something to store; left alone, it stops after a while."""
    workload = [told(i, 20, 2, 10 * i, first=i) for i in range(3)]
    given = {"kv_connector": "simple_cpu", "lazy_offload": True, "host_blocks": 9, "max_num_batched_tokens": 4}
    drive = ran(OffloadDrive(VllmScheduler(options(depth, **given)), workload, depth, lambda: 2))
    assert drive.tiers.contents.moved[HOST] > 24


def test_what_is_read_or_written_is_not_evicted() -> None:
    """A store that would need such chunks is refused, and nothing has changed."""
    for eviction in (Lru(), Arc(3)):
        cache, visitor = HostCache(3, eviction), Visitor()
        assert cache.store(visitor, 0, [1, 2, 3]) == [1, 2, 3]
        cache.has_written([1, 2])
        cache.read(visitor, 0, [1])
        assert cache.store(Visitor(), 0, [7, 8]) is None
        assert cache.store(Visitor(), 0, [2, 8]) is None, "what is offered stays"
        assert (cache.free, cache.resting, cache.writing) == (0, 1, 1)
        cache.has_read([1])
        assert cache.store(Visitor(), 0, [7, 8]) == [7, 8]
        cache.check()


def test_a_ghost_moves_the_goal_of_arc() -> None:
    """A chunk that was evicted from those seen once and is wanted again: they should have been more."""
    arc = Arc(2)
    cache = HostCache(2, arc)
    for key in (1, 2, 3):
        cache.store(Visitor(), 0, [key])
        cache.has_written([key])
    assert list(arc.once_ghosts) == [1]
    cache.store(Visitor(), 0, [1])
    assert arc.goal == 1
    assert list(arc.once_ghosts) == [2]
    cache.has_written([1])
    found = Visitor()
    cache.has_read([key for key in (3,) if cache.read(found, 0, [key])])
    cache.eviction.left(found)
    assert (list(arc.once), list(arc.often)) == ([1], [3])


@given(data=st.data())
def test_lru_follows_its_ranks(data: st.DataObject) -> None:
    """Any stores, reads and ends: victims are always those of least rank among the resting."""
    lru = Lru()
    cache, last = HostCache(5, lru), 0
    ranks: dict[int, tuple[int, int]] = {}  # of what the cache holds
    visitors = [Visitor() for _ in range(4)]
    for _ in range(data.draw(st.integers(1, 30))):
        at = data.draw(st.integers(0, 3))
        visitor, first = visitors[at], data.draw(st.integers(0, 4))
        keys = [100 * (at % 2) + first + i for i in range(data.draw(st.integers(1, 3)))]
        lacking = len([key for key in keys if not cache.has(key)]) - cache.free
        last += not visitor.rank
        rank = visitor.rank or last
        for i, key in enumerate(keys):
            if key in ranks:
                ranks[key] = max(ranks[key], (rank, -first - i))
        victims = sorted(ranks.keys() - {*keys}, key=lambda key: ranks[key])[: max(0, lacking)]
        new = cache.store(visitor, first, keys)
        assert new is not None
        assert [key for key in ranks if not cache.has(key)] == [key for key in ranks if key in victims]
        ranks = {key: ranked for key, ranked in ranks.items() if key not in victims}
        ranks |= {key: (rank, -first - keys.index(key)) for key in new}
        cache.has_written(new)
        cache.check()
        if data.draw(st.booleans()):
            lru.left(visitor)
            visitors[at] = Visitor()
            for key, number in sorted(visitor.numbers.items(), key=lambda entry: -entry[1]):
                last += key in ranks
                ranks |= {key: (last, -number)} if key in ranks else {}
