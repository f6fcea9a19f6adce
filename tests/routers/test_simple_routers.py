"""Routers that know no prompts, the blocks of prompts, the registry, and the guard of a user's router."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from hashlib import blake2b
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routed import Counting, Seen, Texts

from cbsim.policy.kind import Settings
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import S_IN_NS, Guarded, RouterBase, RouterError, RouterKind, blocks, shared_blocks
from cbsim.routers.registry import GROUP, OURS, ROUTERS
from cbsim.routers.simple import KubernetesService, PlainSettings, ServiceSettings
from cbsim.schedulers.registry import KindError

LOADS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def made(name: str, servers: int, seed: int = 0) -> Any:
    kind = OURS[name]
    return kind.make(kind.settings(name=name), servers, seed)


def views(loads: list[int]) -> Any:
    return [Seen(in_flight=load) for load in loads]


def one(index: int = 0, prefix: tuple[int, ...] = ()) -> RequestSpec:
    return RequestSpec(index, str(index), 0, 8, 1, 1, 0, prefix, 1, len(prefix))


@given(st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(0, 99), max_size=9), st.integers(1, 9), st.data())
def test_blocks_have_the_content_keys_of_the_request(
    prompt: int, of: int, ids: list[int], size: int, data: Any
) -> None:
    covered = data.draw(st.integers(0, min(prompt, len(ids) * of)))
    spec = RequestSpec(data.draw(st.integers(0, 99)), "a", 0, prompt, 1, 1, 0, tuple(ids), of, covered)
    keys = [spec.block_key(block, size) for block in range(prompt // size)]
    assert list(blocks(spec, size)) == keys
    assert list(shared_blocks(spec, size)) == [key for key in keys if key >= 0]


@given(st.integers(1, 5), st.integers(1, 20))
def test_turns_are_taken_in_order(servers: int, requests: int) -> None:
    fleet = Counting(made("round_robin", servers), servers)
    assert [fleet.send(one(index)) for index in range(requests)] == [index % servers for index in range(requests)]


@given(LOADS)
def test_the_first_server_with_the_fewest_requests_is_taken(loads: list[int]) -> None:
    assert made("least_in_flight", len(loads)).choose(one(), views(loads), 0) == loads.index(min(loads))


@given(LOADS, st.integers(0, 99))
def test_of_two_servers_drawn_the_less_loaded_is_taken(loads: list[int], seed: int) -> None:
    """Never the single most loaded of several, and the same seed draws the same."""
    router, again = made("power_of_two", len(loads), seed), made("power_of_two", len(loads), seed)
    chosen = [router.choose(one(), views(loads), 0) for _ in range(20)]
    assert chosen == [again.choose(one(), views(loads), 0) for _ in range(20)]
    if len(loads) > 1 and loads.count(max(loads)) == 1:
        assert loads.index(max(loads)) not in chosen
    if len(loads) == 2:
        draws = Random(seed)
        pairs = [draws.sample(range(2), 2) for _ in range(20)]
        assert chosen == [a if loads[a] <= loads[b] else b for a, b in pairs]


def test_random_takes_all_servers_equally_often() -> None:
    """4,000 draws of 4: each count is within five standard deviations (27) of 1,000."""
    router = made("random", 4, 3)
    counts = Counter(router.choose(one(), views([0] * 4), 0) for _ in range(4000))
    assert all(abs(counts[server] - 1000) < 137 for server in range(4))


SESSIONS = st.lists(st.tuples(st.sampled_from(["", "a/b/", "c/"]), st.sampled_from([(), (3,), (4, 5)])), max_size=12)


@given(SESSIONS, st.integers(1, 6))
def test_a_session_stays_on_the_server_of_the_next_place_on_the_ring(
    sessions: list[tuple[str, tuple[int, ...]]], servers: int
) -> None:
    def hashed(text: str) -> int:
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    places = [(hashed(f"{server}/{place}"), server) for server in range(servers) for place in range(160)]
    router = made("session_hash", servers)
    for index, (name, prefix) in enumerate(sessions):
        request = RequestSpec(index, f"{name}{index}", 0, 8, 1, 1, 0, prefix, 1, len(prefix))
        session = f"session {name[:-1]}" if name else f"block {prefix[0]}" if prefix else f"request {index}"
        behind = [place for place in places if place[0] > hashed(session)] or places
        assert router.choose(request, views([0] * servers), 0) == min(behind)[1]


def test_requests_that_do_not_overlap_keep_one_connection() -> None:
    """A second after the last one ended: the connection is idle, and leads where it led. It is random where that is."""
    reached = set()
    for seed in range(20):
        fleet, servers = Counting(made("kubernetes_service", 2, seed), 2), set()
        for number in range(50):
            servers.add(fleet.send(one(number), 2 * number * S_IN_NS))
            fleet.end(str(number), (2 * number + 1) * S_IN_NS)
        assert len(servers) == 1
        reached |= servers
    assert reached == {0, 1}


def test_a_connection_that_was_idle_for_long_is_closed() -> None:
    """Each request opens its own: servers are drawn anew. Of 400, 200 to either within four standard deviations, 40."""
    fleet, servers = Counting(made("kubernetes_service", 2, 1), 2), []
    for number in range(400):
        servers.append(fleet.send(one(number), number * 10 * S_IN_NS))
        fleet.end(str(number), (number * 10 + 1) * S_IN_NS)
    assert abs(sum(servers) - 200) < 40


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=40), st.integers(0, 4))
def test_a_request_takes_the_oldest_connection_that_is_idle(rows: list[tuple[int, int]], ahead: int) -> None:
    """Recounted: connections are opened in turns here, and a request takes one `ahead` before it comes."""
    opened, turns = list[list[int]](), count()
    settings = ServiceSettings(name="", keep_alive_s=5 / S_IN_NS)
    fleet, now = Counting(KubernetesService(lambda: next(turns), settings, ahead), 40), 0
    ends = list[tuple[int, int]]()
    for number, (gap, lasts) in enumerate(rows):
        now += gap
        for at, ended in [each for each in ends if each[0] <= now]:
            ends.remove((at, ended))
            fleet.end(str(ended), at)
        sent = now - ahead
        usable = [at for at, until in enumerate(opened) if until[0] <= sent < until[0] + 5]
        opened += [] if usable else [[0]]
        expected = usable[0] if usable else len(opened) - 1
        assert fleet.send(one(number), now) == expected
        opened[expected][0] = now + lasts
        ends.append((now + lasts, number))


@pytest.mark.parametrize("name", OURS)
def test_every_router_chooses_a_server_and_the_same_ones_again(name: str) -> None:
    """Also of prompts that are shorter than a block, and where only one server is."""
    for servers in (1, 3):
        runs = []
        for _ in range(2):
            fleet, texts, chosen = Counting(made(name, servers, 7), servers), Texts(), []
            for number in range(60):
                request = texts.request("abcdefgh" * (number % 7 * 9) + str(number % 5), outputs=1 + number % 3)
                chosen.append(fleet.send(request, number))
                if number % 3 == 0:
                    fleet.answer(request.id, number)
                if number % 2 == 0:
                    fleet.end(request.id, number)
            runs.append(chosen)
        assert runs[0] == runs[1]
        assert {*runs[0]} <= {*range(servers)}


def test_blind_routers_look_at_no_view() -> None:
    """But at whether there is a server."""
    for name, kind in OURS.items():
        if kind.blind:
            router = made(name, 3, 1)
            assert [router.choose(one(index), [Seen()] * 3, 0) for index in range(9)]


def test_routers_are_found_by_name_by_entry_point_and_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ROUTERS.names() == [*OURS]
    assert ROUTERS.find("dynamo") is OURS["dynamo"]
    assert ROUTERS.find("cbsim.routers.dynamo:DYNAMO") is OURS["dynamo"]
    for name, message in {
        "dinamo": "no router 'dinamo'",
        "cbsim.routers.registry:GROUP": "is a str, expected a RouterKind",
        "cbsim.nowhere:X": "cannot be loaded: ModuleNotFoundError",
    }.items():
        with pytest.raises(KindError, match=message):
            ROUTERS.find(name)
    entry = importlib.metadata.EntryPoint("mine", "cbsim.routers.llmd:LLMD", GROUP)
    monkeypatch.setattr("cbsim.schedulers.registry.entry_points", lambda group, name=None: [entry])
    assert ROUTERS.names()[-1] == "mine"
    assert ROUTERS.find("mine") is OURS["llmd"]


class Mine(RouterBase):
    """A user's router with an answer to give."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def choose(self, request: RequestSpec, seen: Any, now_ns: int) -> int:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def ended(self, request: RequestSpec, server: int, now_ns: int) -> None:
        raise KeyError("gone")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (2, "router mine, choose, request 4: got 2, expected 0 to 1"),
        (-1, "router mine, choose, request 4: got -1, expected 0 to 1"),
        (None, "router mine, choose, request 4: got None, expected 0 to 1"),
        (True, "router mine, choose, request 4: got True, expected 0 to 1"),
        (SystemExit(3), "router mine, choose, request 4: SystemExit: 3"),
    ],
)
def test_a_wrong_choice_is_one_line_with_router_and_request(answer: Any, message: str) -> None:
    with pytest.raises(RouterError) as error:
        Guarded(lambda: Mine(answer), "mine").choose(one(4), views([0, 0]), 0)
    assert str(error.value) == message


def test_what_a_router_raises_anywhere_is_one_line() -> None:
    router = Guarded(lambda: Mine(1), "mine")
    assert router.choose(one(4), views([0, 0]), 0) == 1
    router.sent(one(4), 1, 0)
    router.answered(one(4), 1, 0)
    with pytest.raises(RouterError, match="router mine, ended, request 4: KeyError: 'gone'"):
        router.ended(one(4), 1, 0)
    with pytest.raises(RouterError, match="router mine, make: ZeroDivisionError"):
        Guarded(lambda: Mine(1 // 0), "mine")
    incomplete: Any = object()
    with pytest.raises(RouterError, match="router mine, sent, request 4: AttributeError: 'object' object has no attr"):
        Guarded(lambda: incomplete, "mine").sent(one(4), 1, 0)


def test_a_kind_of_a_user_is_a_value() -> None:
    kind = RouterKind(name="mine", about="mine", settings=PlainSettings, make=lambda *_: Mine(0))
    assert isinstance(kind.settings(name="mine"), Settings)
    assert not kind.blind
