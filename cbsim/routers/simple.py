"""Routers that know no prompts: in turns, at random, by requests in flight, by session, and by connection."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Annotated, Any

from cbsim.policy.kind import Settings
from cbsim.policy.marks import AtLeast
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import S_IN_NS, Router, RouterBase, RouterKind, View, ready


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings(Settings):
    """The settings of a router without choices of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings(Settings):
    """The settings of the hash of sessions."""

    virtual_nodes: Annotated[int, AtLeast(1)] = 160  #: Places on the ring that each server has.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(Settings):
    """The settings of a Kubernetes service and the connections to it."""

    keep_alive_s: Annotated[float, AtLeast(0)] = 5.0
    """Seconds until an idle connection is closed: httpx's keepalive_expiry and vLLM's timeout_keep_alive are 5."""


class RoundRobin(RouterBase):
    """The rule of turns: one server after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        self._turn += 1
        while not views[self._turn % len(views)].ready:
            self._turn += 1
        return self._turn % len(views)


class Uniform(RouterBase):
    """The rule of chance: any server, all equally likely."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        return self._random.choice(ready(views))


class LeastInFlight(RouterBase):
    """The rule of the fewest requests in flight, the first of several."""

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        return min(ready(views), key=lambda server: views[server].in_flight)


class PowerOfTwo(RouterBase):
    """The rule of SGLang's `power_of_two`: of two servers drawn, the one with fewer requests in flight, the first drawn
    if they have equally many.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        servers = ready(views)
        drawn = self._random.sample(servers, min(2, len(servers)))
        return min(drawn, key=lambda server: views[server].in_flight)


class SessionHash(RouterBase):
    """The rule of consistent hashing: the server of the next place on the ring behind the hash of the session.
    A place of a server that is not ready is passed over.

    That is the part of a request's id before the last slash, as agentic traces name their turns; without a slash the
    first block of content that the prompt shares with others, or the request itself if there is none.
    """

    def __init__(self, servers: int, places: int) -> None:
        ring = sorted((_hash(f"{server}/{place}"), server) for server in range(servers) for place in range(places))
        self._hashes, self._servers = [at for at, _ in ring], [server for _, server in ring]

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        named, _, _ = request.id.rpartition("/")
        begins = f"block {request.prefix[0]}" if request.prefix else f"request {request.index}"
        at = bisect_right(self._hashes, _hash(f"session {named}" if named else begins))
        while not views[server := self._servers[at % len(self._servers)]].ready:
            at += 1
        return server


class KubernetesService(RouterBase):
    """The rule of a Kubernetes service, which assigns a new connection to a server drawn, and sees no requests.

    A client like httpx keeps connections. A request takes the oldest idle one `ahead_ns` before it arrives, or opens
    one if there is none. A server that is not ready closes its idle ones.
    """

    def __init__(self, draw: Callable[[], int], settings: ServiceSettings, ahead_ns: int = 0) -> None:
        self._draw, self._keep_alive_ns, self._ahead_ns = draw, settings.keep_alive_s * S_IN_NS, ahead_ns
        self._opened = 0
        self._idle: dict[tuple[int, int], int] = {}  # connections, as (number, server): since when
        self._busy: dict[RequestSpec, tuple[int, int]] = {}

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        sent_ns = now_ns - self._ahead_ns
        self._idle = {each: since for each, since in self._idle.items() if sent_ns - since < self._keep_alive_ns}
        self._idle = {each: since for each, since in self._idle.items() if views[each[1]].ready}
        taken = min((each for each, since in self._idle.items() if since <= sent_ns), default=None)
        if taken is None:
            while not views[server := self._draw()].ready:
                pass
            taken = self._opened, server
            self._opened += 1
        self._idle.pop(taken, None)
        self._busy[request] = taken
        return taken[1]

    def ended(self, request: RequestSpec, server: int, now_ns: int) -> None:
        self._idle[self._busy.pop(request)] = now_ns


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _plain(
    name: str, about: str, make: Callable[[PlainSettings, int, int], Router], *, blind: bool = False
) -> RouterKind[PlainSettings]:
    return RouterKind(name=name, about=about, settings=PlainSettings, make=make, blind=blind)


SESSION_HASH = RouterKind(
    name="session_hash",
    about="a server for each session, by consistent hashing",
    settings=SessionSettings,
    make=lambda settings, servers, _: SessionHash(servers, settings.virtual_nodes),
    blind=True,
)
SERVICE = RouterKind(
    name="kubernetes_service",
    about="a random server for each connection of the client",
    settings=ServiceSettings,
    make=lambda settings, servers, seed: KubernetesService(partial(Random(seed).randrange, servers), settings),
)
SIMPLE: tuple[RouterKind[Any], ...] = (
    _plain("round_robin", "one server after the other", lambda *_: RoundRobin(), blind=True),
    _plain("random", "any server, all equally likely", lambda _, __, seed: Uniform(seed), blind=True),
    _plain("least_in_flight", "the server with the fewest requests in flight", lambda *_: LeastInFlight()),
    _plain("power_of_two", "the one with fewer requests in flight of two drawn", lambda _, __, seed: PowerOfTwo(seed)),
    SESSION_HASH,
    SERVICE,
)
