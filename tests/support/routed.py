"""What the tests of routers share: views as plain values, prompts of texts, and a fleet that only counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from cbsim.policy.request import RequestSpec
from cbsim.routers.base import Router

SEEDS = st.integers(0, 1 << 32)


@dataclass
class Seen:
    """A view of a server whose every value a test sets."""

    in_flight: int = 0
    sent: int = 0
    waiting: int = 0
    running: int = 0
    kv_use: float = 0.0
    age_ns: int = 0
    ready: bool = True
    cached: dict[str, int] = field(default_factory=dict)  # tokens, by request

    def cached_tokens(self, request: RequestSpec) -> int:
        return self.cached.get(request.id, 0)


class Texts:
    """Requests whose prompts are texts: a token is a character, and equal beginnings have equal content."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}  # of each beginning
        self.count = 0

    def request(self, text: str, outputs: int = 1, name: str = "") -> RequestSpec:
        ids = tuple(self.ids.setdefault(text[: end + 1], len(self.ids)) for end in range(len(text)))
        self.count += 1
        name = name or str(self.count)
        return RequestSpec(self.count, name, 0, max(1, len(text)), outputs, outputs, 0, ids, 1, len(text))


def steps(seed: int, count: int = 60) -> Iterator[tuple[Any, ...]]:
    """Yield steps of random requests whose texts begin alike: ("send", text, three numbers, outputs), and ("answer",
    which), ("end", which) or ("evict", any).
    """
    rng = Random(seed)
    stems = ["".join(rng.choices("ab", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 4))]
    for _ in range(count):
        what = rng.choices(("send", "answer", "end", "evict"), (6, 2, 3, 1))[0]
        if what == "send":
            stem = rng.choice(stems)
            text = stem[: rng.randint(0, len(stem))] + "".join(rng.choices("ab", k=rng.randint(0, 4)))
            yield what, text, [rng.randint(0, 12) for _ in range(3)], rng.randint(1, 4)
        else:
            yield what, rng.randrange(99)


class Counting:
    """Servers that do nothing but count what a router sends them."""

    def __init__(self, router: Router, servers: int) -> None:
        self.router, self.views = router, [Seen() for _ in range(servers)]
        self.at: dict[str, tuple[RequestSpec, int]] = {}

    def send(self, request: RequestSpec, now_ns: int = 0) -> int:
        views: Any = self.views
        return self.take(request, self.router.choose(request, views, now_ns), now_ns)

    def take(self, request: RequestSpec, server: int, now_ns: int = 0) -> int:
        self.router.sent(request, server, now_ns)
        self.views[server].in_flight += 1
        self.views[server].sent += 1
        self.at[request.id] = request, server
        return server

    def answer(self, name: str, now_ns: int = 0) -> None:
        self.router.answered(*self.at[name], now_ns)

    def end(self, name: str, now_ns: int = 0) -> None:
        request, server = self.at.pop(name)
        self.router.ended(request, server, now_ns)
        self.views[server].in_flight -= 1
