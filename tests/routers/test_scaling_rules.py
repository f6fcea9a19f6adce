"""Kubernetes' rule of autoscaling: examples of its documentation, and a second implementation of its source's text."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from support.routed import SEEDS, Counting, Seen, Texts, steps

from cbsim.routers.llmd import Llmd
from cbsim.routers.preble import Preble
from cbsim.routers.production_stack import PrefixAware
from cbsim.routers.registry import OURS
from cbsim.routers.scaling import Hpa, HpaSettings
from cbsim.routers.sglang import CacheAware

S = 1_000_000_000


def rule(least: int = 1, most: int = 100, **fields: Any) -> Hpa:
    return Hpa(HpaSettings(name="hpa", **fields), least, most)


def ready(*waiting: int) -> Any:
    return [Seen(waiting=each) for each in waiting]


@pytest.mark.parametrize(
    ("waiting", "starting", "wanted", "expected"),
    [
        ((8, 8), 0, 2, 4),  # twice the target: twice the replicas
        ((2, 2), 0, 2, 1),  # half of it: half of them
        ((4, 4, 5), 0, 3, 3),  # within the tolerance
        ((5, 5), 0, 2, 3),  # rounded up
        ((8, 8), 2, 4, 4),  # starting ones count as 0: the mean is the target
        ((8,), 9, 10, 10),  # and would turn the direction round
        ((12,), 1, 2, 3),
        ((), 1, 1, 1),  # nothing is known
        ((2, 2), 2, 4, 1),  # for fewer, only ready ones count
    ],
)
def test_replicas_are_the_ceiling_of_their_number_times_mean_over_target(
    waiting: tuple[int, ...], starting: int, wanted: int, expected: int
) -> None:
    assert rule(target=4, down_window_s=0).desired(ready(*waiting), starting, wanted, S) == expected


def test_fewer_replicas_wait_for_all_results_of_the_window() -> None:
    """The most that any of the last 300 s said; more come at once."""
    fresh = rule(target=1)
    assert [fresh.desired(ready(0, 0), 0, 2, at * S) for at in (15, 314, 315)] == [2, 2, 1]  # from the first call on
    hpa = rule(target=1, up_percent=None, up_pods=None)
    assert hpa.desired(ready(*[4] * 2), 0, 2, 0) == 8
    assert [hpa.desired(ready(*[0] * 8), 0, 8, at * S) for at in (15, 150, 299)] == [8, 8, 8]
    assert hpa.desired(ready(*[0] * 8), 0, 8, 301 * S) == 1


def test_changes_are_bounded_in_a_period() -> None:
    """By default double or four more in 15 s, whichever is more: 1, 5, 10, 20; once within a period."""
    hpa, wanted, seen = rule(target=1), 1, []
    for at in range(0, 60, 15):
        wanted = hpa.desired(ready(*[99] * wanted), 0, wanted, at * S)
        seen.append(wanted)
        assert hpa.desired(ready(*[99] * wanted), 0, wanted, (at + 14) * S) == wanted
    assert seen == [5, 10, 20, 40]
    slow = rule(target=1, down_window_s=0, down_percent=None, down_pods=1, down_period_s=60)
    assert [slow.desired(ready(0, 0, 0), 0, 3, 0), slow.desired(ready(0, 0), 0, 2, 59 * S)] == [2, 2]
    assert slow.desired(ready(0, 0), 0, 2, 60 * S) == 1


class Plain:
    """The rule once more, from the text of the source: lists that are never cut, one loop a sentence."""

    def __init__(self, form: HpaSettings, least: int, most: int) -> None:
        self.form, self.least, self.most = form, least, most
        self.said: list[tuple[int, int]] = []
        self.changed: list[tuple[int, int]] = []

    def desired(self, waiting: list[int], starting: int, current: int, now: int) -> int:
        form, metrics = self.form, [float(each) for each in waiting]
        proposed = current
        if metrics:
            usage = sum(metrics) / len(metrics) / form.target
            unready = starting > 0 and usage > 1.0
            if not unready:
                proposed = current if abs(1 - usage) <= form.tolerance else math.ceil(round(usage * len(metrics), 9))
            else:
                metrics += [0.0] * starting
                new = sum(metrics) / len(metrics) / form.target
                replicas = math.ceil(round(new * len(metrics), 9))
                if abs(1 - new) > form.tolerance and new > 1.0 and replicas >= current:
                    proposed = replicas
        if not self.said:
            self.said.append((now, current))
        ups = [count for at, count in self.said if at > now - form.up_window_s * S]
        downs = [count for at, count in self.said if at > now - form.down_window_s * S]
        self.said.append((now, proposed))
        up, down, wished = min([proposed, *ups]), max([proposed, *downs]), current
        if wished < up:
            wished = up
        if wished > down:
            wished = down
        result = wished
        if wished > current:
            start = current - sum(n for at, n in self.changed if at > now - form.up_period_s * S)
            limits = [] if form.up_percent is None else [math.ceil(start * (1 + form.up_percent / 100))]
            limits += [] if form.up_pods is None else [start + form.up_pods]
            if limits:
                result = min(wished, max(current, (max if form.select_policy == "max" else min)(limits)))
        elif wished < current:
            start = current - sum(n for at, n in self.changed if at > now - form.down_period_s * S)
            limits = [] if form.down_percent is None else [int(start * (1 - form.down_percent / 100))]
            limits += [] if form.down_pods is None else [start - form.down_pods]
            if limits:
                result = max(wished, min(current, (min if form.select_policy == "max" else max)(limits)))
        result = max(self.least, min(self.most, result))
        if result != current:
            self.changed.append((now, result - current))
        return result


@given(seed=SEEDS)
def test_a_second_implementation_says_the_same(seed: int) -> None:
    dice = random.Random(seed)
    form = HpaSettings(
        name="hpa",
        target=dice.choice([0.5, 1, 3]),
        tolerance=dice.choice([0, 0.1, 0.4]),
        up_window_s=dice.choice([0, 30]),
        down_window_s=dice.choice([0, 40, 300]),
        up_period_s=dice.choice([15, 60]),
        down_period_s=dice.choice([15, 60]),
        up_percent=dice.choice([None, 50, 100]),
        up_pods=dice.choice([None, 0, 2]),
        down_percent=dice.choice([None, 25, 100]),
        down_pods=dice.choice([None, 1]),
        select_policy=dice.choice(["max", "min"]),
    )
    hpa, plain, wanted, now = Hpa(form, 1, 30), Plain(form, 1, 30), 4, 0
    for _ in range(40):
        now += dice.choice([5, 15, 31]) * S
        starting = dice.randint(0, min(2, wanted))
        waiting = [dice.randint(0, 6) for _ in range(wanted - starting)]
        expected = plain.desired(waiting, starting, wanted, now)
        assert hpa.desired(ready(*waiting), starting, wanted, now) == expected
        wanted = expected


@pytest.mark.parametrize("name", OURS)
@given(seed=SEEDS)
def test_routers_cope_with_servers_that_come_and_go(name: str, seed: int) -> None:
    """Only ready ones are chosen; of one that has gone the books keep nothing, and the next of its index gets its
    share again.
    """
    kind, dice, texts = OURS[name], random.Random(seed), Texts()
    router = kind.make(kind.settings(name=name), 3, 1)
    fleet, now = Counting(router, 3), 0
    for what, value, *more in steps(seed, 80):
        now += S
        if dice.random() < 0.2:
            server = dice.randrange(3)
            if fleet.views[server].ready and sum(view.ready for view in fleet.views) > 1:
                fleet.views[server].ready = False
                for each in [each for each, (_, at) in fleet.at.items() if at == server]:
                    fleet.end(each, now)
                router.left(server)
                assert server not in remembered(router)
            else:
                fleet.views[server].ready = True
        if what == "send" and value:
            chosen = fleet.send(texts.request(value, more[1]), now)
            assert fleet.views[chosen].ready
        elif fleet.at and what in ("answer", "end"):
            (fleet.answer if what == "answer" else fleet.end)(sorted(fleet.at)[value % len(fleet.at)], now)


def remembered(router: Any) -> set[int]:
    """The servers whose prompts a router knows."""
    if isinstance(router, CacheAware):
        return {server for node in router.tree._tree.nodes() for server in node.used}
    if isinstance(router, Llmd):
        return {at for at, sent in enumerate(router.index._sent) if sent} | {*router._cold}
    if isinstance(router, PrefixAware):
        return {server for servers in router.servers.values() for server in servers}
    if isinstance(router, Preble):
        return {server for node in router.tree.nodes() for server in node.servers}
    return {at for at, amount in enumerate(getattr(router, "queued", ())) if amount}
