"""KV that is handed over between servers: the transport by itself, and fleets whose servers prefill or decode."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

pytest.importorskip("transformers", reason="the text is compared with transformers'")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.fleets import Killed, Served, apart
from support.engine.served import (
    CHUNKS,
    INLINE,
    LOOPS,
    MS,
    PROMPTS,
    SHAPE,
    closed,
    least_blocks,
    requests,
    server,
    shared,
    spec,
)

from cbengine.build import Setup
from cbengine.device import hand_over
from cbengine.device.base import DeviceError, Inline
from cbengine.device.hand_over import Channel, Task, joined
from cbengine.device.moves import Moved
from cbengine.errors import UsageError
from cbengine.model.kvcache import KvCache
from cbengine.model.weights import Architecture
from cbengine.serving import fleet, member
from cbsim.policy.request import PREFILL, RequestSpec
from cbsim.policy.transfers import Direction
from cbsim.record import optional_tables
from cbsim.runs.hand_offs import HandOffs
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

BLOCKS = 12


def cache(seed: int) -> KvCache:
    """A cache of random numbers."""
    made = KvCache(Architecture(name="m", max_position=99, **SHAPE), BLOCKS, 4, torch.float32, torch.device("cpu"))
    for part in (made.keys, made.values):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))
    return made


class End:
    """One end of a channel, and what has ended there."""

    def __init__(self, folder: Path, server: int, peer: int) -> None:
        self.cache, self.over, self.news = cache(server), deque[Moved](), threading.Semaphore(0)
        self.channel = Channel(self.cache, int(server < peer), partial(self._join, folder, server, peer), self._ended)
        self.group: Any = None

    def _join(self, *place: Any) -> Any:
        self.group = joined(*place)
        return self.group

    def _ended(self, moved: Moved) -> None:
        self.over.append(moved)
        self.news.release()

    def ended(self, count: int = 1) -> list[Moved]:
        for _ in range(count):
            assert self.news.acquire(timeout=30)
        return [self.over.popleft() for _ in range(count)]


@contextmanager
def ends(folder: Path) -> Iterator[tuple[End, End]]:
    """Both ends of a channel, servers 1 and 3."""
    pair = End(folder, 1, 3), End(folder, 3, 1)
    assert all(each.channel.meet() for each in pair)
    yield pair
    for each in pair:
        each.channel.close()


def block(of: KvCache, at: int) -> Any:
    return torch.stack(of.block(at))


@pytest.mark.parametrize("piece", [1, 1 << 30])
def test_blocks_cross_in_order_and_nothing_else_changes(tmp_path: Path, piece: int) -> None:
    """Both ways, one block a message or all; each end names every task once."""
    with mock.patch.object(hand_over, "PIECE_BYTES", piece), ends(tmp_path) as (low, high):
        before = cache(1), cache(3)
        tasks = [(low, high, [3, 0, 7], [5, 6, 1]), (high, low, [11], [2]), (low, high, [4], [0])]
        for step, (source, target, out, into) in enumerate(tasks):
            target.channel.go(Task(step, 1, Direction.IN, into))
            source.channel.go(Task(step, 0, Direction.OUT, out))
        for each, at in ((low, (0, 1, 0)), (high, (1, 0, 1))):
            moved = each.ended(3)
            assert [(one.step, one.at, one.broken) for one in moved] == [(n, at[n], False) for n in range(3)]
            assert all(one.start_ns <= one.end_ns for one in moved)
        filled = {5: 3, 6: 0, 1: 7, 0: 4}
        for at in range(BLOCKS):
            expected = block(before[0], filled[at]) if at in filled else block(before[1], at)
            assert torch.equal(block(high.cache, at), expected)
            assert torch.equal(block(low.cache, at), block(before[1], 11) if at == 2 else block(before[0], at))


def test_a_peer_that_goes_breaks_what_is_under_way_and_what_follows(tmp_path: Path) -> None:
    """At once, without waiting for the bound."""
    with ends(tmp_path) as (low, high):
        low.channel.go(Task(0, 0, Direction.IN, [1]))
        low.channel.go(Task(1, 0, Direction.OUT, [1]))
        high.channel._group = high.group = None
        assert [moved.broken for moved in low.ended(2)] == [True, True]


def test_a_peer_that_does_not_answer_breaks_it_after_the_bound(tmp_path: Path) -> None:
    with mock.patch.object(hand_over, "STALLED_S", 0.2), ends(tmp_path) as (low, _):
        low.channel.go(Task(0, 0, Direction.IN, [1]))
        assert [moved.broken for moved in low.ended()] == [True]


def test_a_peer_that_never_comes_is_reported(tmp_path: Path) -> None:
    with mock.patch.object(hand_over, "MEET_S", 0.3):
        alone = End(tmp_path, 0, 1)
        assert not alone.channel.meet()
        alone.channel.go(Task(0, 0, Direction.OUT, [1]))
        assert alone.ended()[0].broken
        alone.channel.close()


# -- fleets -----------------------------------------------------------------------------------------------------------


def moves(run: Served) -> Any:
    """The transfers of all servers, as their columns."""
    return optional_tables.values_of(optional_tables.TRANSFERS, run.fleet.record.logs["moves"])


@st.composite
def loads(draw: st.DrawFn) -> tuple[Scenario, Workload]:
    """Caches that are mostly too small, prompts that begin alike, clients that give up, users that go on."""
    specs = [replace(one, arrival_ns=one.arrival_ns // 4, priority=0) for one in draw(requests())]
    blocks = least_blocks("vllm", 4, specs) + draw(st.sampled_from((0, 2, 40)))
    sizes = server("vllm", 4, blocks, draw(st.sampled_from(CHUNKS)), draw(st.integers(1, 5)), sharing=True)
    if draw(st.booleans()):
        return sizes, closed([replace(one, arrival_ns=one.index) for one in specs], draw(st.integers(1, 4)))
    gone = draw(st.lists(st.sampled_from(specs), unique=True, max_size=2))
    cancels = [(one.arrival_ns + draw(st.integers(0, 40)) * MS, one) for one in gone]
    return sizes, Workload(specs, len(specs), sorted(cancels, key=lambda cancel: (cancel[0], cancel[1].index)))


@pytest.mark.parametrize("loop", LOOPS)
@given(
    load=loads(),
    pools=st.sampled_from(((1, 1), (2, 1), (1, 2))),
    transfer=st.sampled_from(("pull", "push")),
    local=st.sampled_from((0, 0, 9)),
    queue=st.sampled_from(("server", "global")),
    most=st.sampled_from((None, 1)),
)
@settings(max_examples=6, deadline=None)
def test_texts_are_those_of_generate(
    loop: str, load: Any, pools: Any, transfer: str, local: int, queue: str, most: int | None
) -> None:
    """Prefix hits, preemptions and cancellations included; all blocks of all servers are free at the end."""
    sizes, work = load
    queued = {"prefill_queue": queue, "most_waiting_prefills": most}
    Served(apart(sizes, *pools, transfer=transfer, local_below_tokens=local, **queued), loop, work).check()


def plain(count: int = 6, **more: Any) -> Workload:
    return Workload([spec(i, PROMPTS[i % 5], 12 - i, **more) for i in range(count)], count)


SIZES = server("vllm", 4, 60, 64, 4, sharing=True)


@pytest.mark.parametrize(
    ("queue", "transfer", "most", "handed_over", "at_once"),
    [
        ("server", "pull", None, 6, 6),
        ("global", "pull", None, 6, 1),
        ("global", "pull", 2, 3, 1),
        ("global", "push", None, 6, 1),
        ("global", "push", 2, 2, 1),
    ],
)
def test_with_a_global_queue_a_server_prefills_one_prompt_at_a_time(
    queue: str, transfer: str, most: int | None, handed_over: int, at_once: int
) -> None:
    """Of six that arrive at once, one begins and two wait if as many may; with push all wait that have no blocks."""
    give, counts = fleet.Fleet.give, []

    def counted(self: fleet.Fleet, *leg: Any) -> None:
        give(self, *leg)
        counts.append(sum(PREFILL in routed.at for routed in self._rules.requests.values()))

    with mock.patch.object(fleet.Fleet, "give", counted):
        terms = {"transfer": transfer, "prefill_queue": queue, "most_waiting_prefills": most}
        run = Served(apart(SIZES, **terms), "async", plain())
    run.check()
    assert run.statuses[0]["handed_off"] == handed_over
    assert max(counts) == at_once


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_cached_where_it_decodes_is_not_sent(loop: str) -> None:
    """Of equal prompts one after the other, the second one's last block alone crosses."""
    specs = [spec(i, 12, 3, **shared(1, 12)) for i in range(3)]
    run = Served(apart(SIZES), loop, closed(specs, 1))
    run.check()
    table = moves(run)
    assert table["blocks"][table["way"] == Direction.IN].tolist() == [3, 1, 1]
    assert table["blocks"][table["way"] == Direction.OUT].tolist() == [3, 3, 3]


@pytest.mark.parametrize("fails", [Direction.OUT, Direction.IN])
def test_a_broken_transfer_is_computed_where_it_decodes(fails: Direction) -> None:
    """At either end; a channel that has failed stays broken, so nothing crosses."""
    perform = Channel._perform

    def broken(self: Channel, task: Task) -> None:
        if task.direction is fails or self._group is None:
            raise RuntimeError("planted")
        perform(self, task)

    with mock.patch.object(Channel, "_perform", broken), mock.patch.object(hand_over, "STALLED_S", 0.3):
        run = Served(apart(SIZES), "sync", plain())
    run.check()
    assert run.fleet.record.records[1].sampled_tokens == sum(one.output_tokens for one in run.load.open)


@pytest.mark.parametrize("end", ["lease", "no prefill"])
def test_a_hand_over_that_does_not_take_place_frees_its_blocks(end: str) -> None:
    """A lease that ends while the server that decodes is full; a server that decodes alone."""
    sizes = server("vllm", 4, 12, 64, 1, sharing=True)
    more = {"lease_s": 0.001} if end == "lease" else {"local_below_tokens": 99}
    Served(apart(sizes, **more), "sync", plain()).check()


@pytest.mark.parametrize(("role", "taken", "fails"), [(0, 6, 3), (0, 2, 2), (1, 6, 3)])
def test_a_server_that_fails_takes_nothing_with_it_but_what_it_decodes(role: int, taken: int, fails: int) -> None:
    """One that prefills: its prompts are computed where they decode, also those behind `taken` that it has been sent
    and never took in. One that decodes: its requests have failed.
    """
    wait, came, first, sent = Inline.wait, member.Member.came, [], []

    def taking(self: member.Member, *values: Any) -> None:
        sent.append(self._place.number)
        if self._place.number != role or sent.count(role) <= taken:
            came(self, *values)
        else:
            self._specs[values[0][0]] = RequestSpec(*values[0])

    def failing(self: Inline, slot: int) -> Any:
        if threading.current_thread().name == f"server {role}":
            first.append(slot)
            if len(first) == fails:
                raise DeviceError("planted")
        return wait(self, slot)

    with mock.patch.object(Inline, "wait", failing), mock.patch.object(member.Member, "came", taking):
        run = Served(apart(SIZES), "sync", plain(), fails=True)
    assert run.problem == f"server {role} ({('prefill', 'decode')[role]}) planted"
    if role == 0:
        run.check()
        assert run.statuses[1]["length"] == run.statuses[0]["handed_off"] == len(run.texts)
    else:
        assert run.statuses[1]["failed"] == len(run.texts) - run.statuses[1]["length"] > 0


@pytest.mark.parametrize("transfer", ["pull", "push"])
@pytest.mark.parametrize(("dies", "pools"), [(0, (1, 1)), (1, (1, 1)), (2, (1, 2))])
def test_a_killed_server_takes_no_request_out_of_the_count(transfer: str, dies: int, pools: tuple[int, int]) -> None:
    """How requests ended is in the tables, though what the server recorded is lost: each is counted once. Without a
    server that prefills, prompts are computed where they decode. One that decodes dies behind its own first end.
    """
    wait, report, ended, steps = Inline.wait, member.Member._report, threading.Event(), []

    def killed(self: Inline, slot: int) -> Any:
        if threading.current_thread().name == f"server {dies}":
            steps.append(slot)
            if ended.is_set() if dies else len(steps) == 3:
                raise Killed
        return wait(self, slot)

    def reported(self: member.Member, happened: Any) -> None:
        report(self, happened)
        if self._place.number == dies and happened.ended:
            ended.set()

    planted = mock.patch.object(member.Member, "_report", reported), mock.patch.object(Inline, "wait", killed)
    with planted[0], planted[1], mock.patch.object(hand_over, "STALLED_S", 0.3):
        run = Served(apart(SIZES, *pools, transfer=transfer), "sync", plain(12), fails=True)
    assert "what it recorded is lost" in run.problem
    ends = sum(run.statuses, Counter())
    del ends["handed_off"]
    assert ends["length"] > 0 and (ends["failed"] > 0) is (dies > 0)
    assert ends["length"] + ends["failed"] == ends.total() == run.load.total
    rows = [row for rows in run.rows for row in rows if row.status != "handed_off"]
    assert len({row.index for row in rows}) == run.load.total


def test_a_lease_ends_the_wait_for_a_prefill_that_takes_too_long() -> None:
    """With push the decoding server has taken blocks first; it computes the prompt, and the prefill is cancelled."""
    wait, lease_over, ended = Inline.wait, HandOffs.lease_over, threading.Event()

    def slow(self: Inline, slot: int) -> Any:
        assert threading.current_thread().name != "server 0" or ended.wait(30)
        return wait(self, slot)

    def noted(self: HandOffs, now_ns: int) -> None:
        lease_over(self, now_ns)
        ended.set()

    with mock.patch.object(Inline, "wait", slow), mock.patch.object(HandOffs, "lease_over", noted):
        run = Served(apart(SIZES, transfer="push", lease_s=0.01), "sync", plain(1))
    run.check()
    assert run.fleet.record.hand_offs[9::10].tolist() == [optional_tables.LEASE_OVER]


@pytest.mark.parametrize("loop", LOOPS)
def test_servers_without_roles_are_a_fleet_too(loop: str) -> None:
    data = SIZES.model_dump(mode="json") | {"fleet": {"pools": [{"count": 2}], "router": {"name": "round_robin"}}}
    run = Served(Scenario.model_validate(data), loop, plain())
    run.check()
    assert [sum(each.values()) for each in run.statuses] == [3, 3]


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_servers_that_do_both_hand_over_to_each_other(transfer: str) -> None:
    """Where one server is chosen for both parts, it serves the request alone."""
    data = apart(SIZES, transfer=transfer).model_dump(mode="json")
    data["fleet"] |= {"pools": [{"name": "any", "role": "both", "count": 2}, {"name": "first", "role": "prefill"}]}
    data["fleet"]["router"]["name"] = data["fleet"]["hand_off"]["router"]["name"] = "random"
    run = Served(Scenario.model_validate(data), "async", plain(12))
    run.check()
    assert 0 < sum(each["handed_off"] for each in run.statuses) < 12


def test_what_the_engine_has_no_fleet_for_is_refused_by_name() -> None:
    several = SIZES.model_dump(mode="json") | {"fleet": {"pools": [{"count": 2}], "router": {"name": "random"}}}
    failing, ranks = (json.loads(json.dumps(several)) for _ in range(2))
    failing["fleet"]["failures"] = [{"server": 0, "at_s": 1}]
    ranks["cost"]["tensor_parallel"] = 2
    drafting = several | {"speculation": {"method": "ngram", "k": 2, "acceptance": {"rate": 0.5}}}
    own = several | {"fleet": several["fleet"] | {"pools": [{"server": {"model": {"dtype": "float16"}}}, {}]}}
    for scenario, setup, word in (
        (apart(SIZES), Setup(device="modelled"), "--device modelled"),
        (apart(SIZES, transfer="layerwise"), INLINE, "fleet.hand_off.transfer"),
        (Scenario.model_validate(failing), INLINE, "fleet.failures"),
        (apart(server("sglang", 4, 60, 64, 4, sharing=True)), INLINE, "fleet.pools.0.server.scheduler.name"),
        (Scenario.model_validate(ranks), INLINE, "cost.tensor_parallel"),
        (Scenario.model_validate(drafting), INLINE, "fleet.pools.0.server.speculation"),
        (Scenario.model_validate(own), INLINE, "fleet.pools.0.server.model.dtype"),
    ):
        with pytest.raises(UsageError, match=word):
            fleet.adapted(scenario, setup)
