"""The rules of hand-offs by themselves: whatever happens in whatever order, each request ends once, and each side that
keeps blocks for a transfer is told of its end once."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.policy.request import DECODE, PREFILL, WHOLE, RequestSpec
from cbsim.policy.transfers import Direction
from cbsim.record.columns import HAND_OFFS
from cbsim.record.optional_tables import BROKEN, ENDED, FETCHED, LEASE_OVER
from cbsim.runs.hand_offs import HandOffs, RoutedRequest
from cbsim.runs.inbox import NEVER_NS
from cbsim.scenario.fleet import HandOff, Link

SLOTS = {PREFILL: (0, 1, 4), DECODE: (2, 3, 4)}  # server 4 does both


class World:
    """Servers that do what they are asked for at any later time, or never, if they die."""

    def __init__(self, dice: random.Random, transfer: str, lease_s: float | None, **queue: Any) -> None:
        self.dice, self.now_ns, self.lease_ns = dice, 0, NEVER_NS
        self.rows = array("q")
        terms = HandOff(transfer=transfer, lease_s=lease_s, link=Link(bandwidth_gb_s=1), **queue)
        self.rules, self.one_each = HandOffs(self, terms, self.rows), terms.prefill_queue == "global"
        self.slots = SLOTS if not self.one_each else {PREFILL: (0, 1, 4), DECODE: (2, 3)}
        self.alive = {0, 1, 2, 3, 4}
        self.legs: dict[tuple[int, int], tuple[int, int]] = {}  # by request and leg: server, form
        self.keeping: dict[tuple[int, Direction], int] = {}
        self.crossing: list[RoutedRequest] = []
        self.ends, self.cancelled = Counter[int](), set[int]()
        self.booked: dict[tuple[int, int], int] = {}  # by request and leg: the server that a router counts it at

    def route(self, spec: RequestSpec, which: int) -> int | None:
        up = [server for server in self.slots[which] if server in self.alive]
        if not up:
            return None
        assert (spec.index, which) not in self.booked
        if self.one_each and which == PREFILL:
            up = [min(up, key=self.prefills)]  # as least_in_flight
        self.booked[spec.index, which] = self.dice.choice(up)
        return self.booked[spec.index, which]

    def prefills(self, server: int) -> int:
        return sum(which == PREFILL and at == server for (_, which), at in self.booked.items())

    def prefilling(self) -> list[int]:
        assert self.one_each
        return [self.prefills(server) for server in self.slots[PREFILL] if server in self.alive]

    def cached_tokens(self, server: int, spec: RequestSpec) -> int:
        return 0

    def give(self, server: int, spec: RequestSpec, form: int) -> None:
        assert server in self.alive
        leg = spec.index, PREFILL if form == PREFILL else DECODE
        assert leg not in self.legs
        assert not (self.one_each and form == PREFILL and (server, PREFILL) in self.legs.values())
        self.legs[leg] = server, form

    def cancel(self, server: int, spec: RequestSpec) -> None:
        self.cancelled.add(spec.index)

    def release(self, spec: RequestSpec, which: int) -> None:
        self.booked.pop((spec.index, which), None)

    def begin(self, routed: RoutedRequest) -> int:
        assert {(routed.spec.index, way): at for way, at in routed.sides.items()}.items() <= self.keeping.items()
        self.crossing.append(routed)
        return 100

    def cut(self, routed: RoutedRequest) -> None:
        self.end_transfer(routed, broken=True)

    def drop(self, server: int, index: int, direction: Direction) -> None:
        assert self.keeping.pop((index, direction)) == server

    def lease(self, until_ns: int) -> None:
        self.lease_ns = until_ns

    def unserved(self, spec: RequestSpec) -> None:
        self.ends[spec.index] += 1

    def end_transfer(self, routed: RoutedRequest, *, broken: bool) -> None:
        assert routed.handing, "a transfer ends a hand-off that is under way"
        assert broken or self.alive >= {*routed.sides.values()}
        self.crossing.remove(routed)
        for way, server in routed.sides.items():
            assert self.keeping.pop((routed.spec.index, way)) == server
        self.rules.transferred(routed.spec.index, self.now_ns, self.now_ns, broken=broken)

    def keep(self, server: int, index: int, way: Direction) -> None:
        self.keeping[index, way] = server
        self.rules.ordered(server, index, way, 3, self.now_ns)

    def dies(self, server: int) -> None:
        self.alive.discard(server)
        self.rules.gone(server, self.now_ns)
        for leg in [leg for leg, (at, _) in self.legs.items() if at == server]:
            self.end_leg(*leg, died=True)

    def end_leg(self, index: int, which: int, *, died: bool = False, cancelled: bool = False) -> None:
        server, _ = self.legs.pop((index, which))
        if which == DECODE:
            self.rules.decoded(index, self.now_ns, died=died)
            self.ends[index] += 1
            return
        keeps_kv = not (died or cancelled or index in self.cancelled)
        over = self.rules.prefilled(index, self.now_ns, keeps_kv=keeps_kv, died=died)
        self.ends[index] += over  # read when `unserved` may have counted it
        if keeps_kv:
            self.keep(server, index, Direction.OUT)

    def step(self) -> None:
        """Let anything happen that may."""
        waits = {
            (index, DECODE) for index, way in self.keeping if way is Direction.IN and index % 5
        }  # others: cancelled
        legs = [leg for leg in self.legs if leg not in waits]
        acts = [lambda leg=leg: self.end_leg(*leg, cancelled=self.dice.random() < 0.1) for leg in legs]
        for (index, _), (server, form) in self.legs.items():
            if form == DECODE and (index, Direction.IN) not in self.keeping:
                acts.append(lambda at=server, index=index: self.keep(at, index, Direction.IN))
        acts += [lambda one=one: self.end_transfer(one, broken=self.dice.random() < 0.1) for one in self.crossing]
        if self.alive and self.dice.random() < 0.05:
            acts.append(lambda: self.dies(self.dice.choice(sorted(self.alive))))
        self.now_ns += self.dice.randrange(3) * 10**8
        if self.lease_ns <= self.now_ns:
            self.rules.lease_over(self.now_ns)
        elif acts:
            self.dice.choice(acts)()


@pytest.mark.parametrize("transfer", ["pull", "push"])
@pytest.mark.parametrize("queue", ["server", "global"])
@given(
    seed=st.integers(0, 1 << 32),
    lease_s=st.sampled_from([None, 0.0, 0.5, 30.0]),
    most=st.sampled_from([None, None, 0, 1, 3]),
)
def test_every_request_ends_once_and_every_side_is_told_once(
    transfer: str, queue: str, seed: int, lease_s: float | None, most: int | None
) -> None:
    world = World(random.Random(seed), transfer, lease_s, prefill_queue=queue, most_waiting_prefills=most)
    for index in range(12):
        spec = RequestSpec(index, f"{index}", world.now_ns, 20, 3, 3)
        if not world.rules.arrived(spec, world.now_ns):
            world.unserved(spec)
        for _ in range(world.dice.randrange(6)):
            world.step()
    while world.legs or world.crossing or world.rules.requests:
        assert world.legs or world.crossing or world.lease_ns < NEVER_NS, "a request waits for nothing"
        world.step()
    assert world.ends == Counter(range(12))
    assert not world.keeping and not world.booked
    assert not (world.rules._queue or world.rules._waiting)
    fates = world.rows[len(HAND_OFFS) - 1 :: len(HAND_OFFS)]
    assert set(fates) <= {FETCHED, LEASE_OVER, BROKEN, ENDED}
    assert len({*world.rows[:: len(HAND_OFFS)]}) == len(fates), "a row a hand-off"


@pytest.mark.parametrize(
    ("queue", "transfer", "handed_over"),
    [("server", "pull", 2), ("global", "pull", 3 + 2), ("server", "push", 2), ("global", "push", 2)],
)
def test_prompts_are_computed_where_they_decode_while_as_many_prefills_wait_as_may(
    queue: str, transfer: str, handed_over: int
) -> None:
    """Eight at once, two may wait: behind those at three idle servers if these have one each, unless with push no
    decoding server has taken blocks yet. When a prefill is over another may wait."""
    world = World(random.Random(1), transfer, None, prefill_queue=queue, most_waiting_prefills=2)
    for index in range(8):
        assert world.rules.arrived(RequestSpec(index, f"{index}", 0, 20, 3, 3), 0)
    local = [index for (index, _), (_, form) in world.legs.items() if form == WHOLE]
    assert local == [*range(handed_over, 8)]
    if transfer == "push":
        for index in range(handed_over):
            world.keep(world.legs[index, DECODE][0], index, Direction.IN)
    world.end_leg(0, PREFILL)
    assert world.rules.arrived(RequestSpec(8, "8", 0, 20, 3, 3), 0)
    assert (8, WHOLE) not in [(index, form) for (index, _), (_, form) in world.legs.items()]


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_without_a_server_that_prefills_there_is_no_hand_off_to_wait(transfer: str) -> None:
    world = World(random.Random(1), transfer, None, prefill_queue="global")
    world.alive = {2, 3}
    assert world.rules.arrived(RequestSpec(0, "0", 0, 20, 3, 3), 0)
    assert [form for _, form in world.legs.values()] == [WHOLE]
    world.end_leg(0, DECODE)
    assert not world.rows and not world.rules.requests


def test_without_roles_a_request_has_one_leg_that_answers() -> None:
    world = World(random.Random(1), "pull", None)
    world.rules = HandOffs(world, None, world.rows)
    assert world.rules.arrived(RequestSpec(0, "0", 0, 20, 3, 3), 0)
    assert [form for _, form in world.legs.values()] == [WHOLE]
