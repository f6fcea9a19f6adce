"""The seam of routers: how a router is called, what it sees of a server, and how one comes from its settings.

Originals compare prompts as characters or tokens. Requests have no text: a router sees a prompt as the content keys of
its full blocks of `block_tokens` tokens. Equal keys mean equal content up to and including the block, so trees and
indexes are over blocks, and so are their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partialmethod
from typing import Any, Generic, Protocol, TypeVar

from cbsim.errors import RunError, in_line
from cbsim.policy.kind import Settings
from cbsim.policy.request import RequestSpec

S_IN_NS = 1_000_000_000


class View(Protocol):
    """What a router sees of a server. `in_flight` and `sent` are the router's own books: requests that it sent and that
    have not ended, requests that it ever sent. `waiting`, `running` and `kv_use` (a share) are metrics as they were
    `age_ns` ago, zero before the first. One that is not `ready` takes no requests: it drains, or is not there.
    """

    @property
    def ready(self) -> bool: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def sent(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def kv_use(self) -> float: ...
    @property
    def age_ns(self) -> int: ...

    def cached_tokens(self, request: RequestSpec) -> int:
        """Return how many tokens at the start of a prompt the server has cached, by the KV events that have come in."""


class Router(Protocol):
    """A rule that chooses a server for each request. `choose` is called once when a request arrives, with a view of
    every server; the calls after it tell what became of the request. At least one server is ready.
    """

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        """Return the index of the server that gets the request, a ready one."""

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        """Record that the request is on its way to the server."""

    def answered(self, request: RequestSpec, server: int, now_ns: int) -> None:
        """Record the first token of the answer."""

    def ended(self, request: RequestSpec, server: int, now_ns: int) -> None:
        """Record that the request has ended, for whatever reason, perhaps without a token."""

    def left(self, server: int) -> None:
        """Forget a server that has gone: all its requests have ended, and another may come under its index."""


class RouterBase:
    """The part of the `Router` protocol that routers without books leave as it is."""

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        """Record nothing."""

    answered = ended = sent

    def left(self, server: int) -> None:
        """Forget nothing."""


def ready(views: Sequence[View]) -> list[int]:
    """Return the indices of the servers that take requests."""
    return [server for server, view in enumerate(views) if view.ready]


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKind(Generic[S]):
    """A router: its name, what it is in a sentence, its settings (as a scheduler's), and how an instance for so many
    servers comes from them and the seed of its random choices. A `blind` one chooses by requests and their order alone,
    so that servers can be simulated one by one.
    """

    name: str
    about: str
    settings: type[S]
    make: Callable[[S, int, int], Router]
    blind: bool = False


def shared_blocks(request: RequestSpec, block_tokens: int) -> tuple[int, ...]:
    """Return the content keys (`RequestSpec.block_key`) of the blocks that other prompts may share."""
    return _keys(request.prefix, request.prefix_block_tokens, request.shared_blocks(block_tokens), block_tokens)


@lru_cache(1 << 10)  # many prompts begin alike
def _keys(prefix: tuple[int, ...], of_tokens: int, count: int, block_tokens: int) -> tuple[int, ...]:
    return tuple([(prefix[((block + 1) * block_tokens - 1) // of_tokens] << 24) + block for block in range(count)])


def blocks(request: RequestSpec, block_tokens: int) -> tuple[int, ...]:
    """Return the content keys of all full blocks of a prompt."""
    shared, own = shared_blocks(request, block_tokens), -(request.index << 24) - 1
    return shared + tuple(range(own - len(shared), own - request.prompt_tokens // block_tokens, -1))


class Queues(RouterBase):
    """The part of a router that knows what each server has to do before it answers. `choose` leaves in `amounts` what
    the request would add on each.
    """

    def __init__(self, servers: int) -> None:
        self.queued = [0] * servers
        self.amounts: Sequence[int] = ()
        self._open: dict[RequestSpec, int] = {}  # amounts of requests sent and not answered

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        self._open[request] = amount = self.amounts[server]
        self.queued[server] += amount

    def answered(self, request: RequestSpec, server: int, now_ns: int) -> None:
        self.queued[server] -= self._open.pop(request, 0)

    ended = answered


class RouterError(RunError):
    """An error of a router that is not ours. The message has its name, the request and the reason."""


class Guarded:
    """A router of a user, made by `make`, whose every answer is checked. Raises RouterError."""

    what = "router"

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._name = name
        self._router = self._safe("make", make)

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        server = self._called("choose", request, tuple(views), now_ns)
        place = f"{self.what} {self._name}, choose, request {request.id}"
        if type(server) is not int or not 0 <= server < len(views):
            raise RouterError(f"{place}: got {server!r}, expected 0 to {len(views) - 1}")
        if not views[server].ready:
            some = ", ".join(map(str, ready(views)[:9]))
            raise RouterError(f"{place}: got {server}, which is not ready, expected one of {some}")
        return server

    def left(self, server: int) -> None:
        if hasattr(self._router, "left"):  # a router may do without
            self._safe("left", lambda: self._router.left(server))

    def _called(self, act: str, request: RequestSpec, *arguments: Any) -> Any:
        return self._safe(f"{act}, request {request.id}", lambda: getattr(self._router, act)(request, *arguments))

    sent = partialmethod(_called, "sent")
    answered = partialmethod(_called, "answered")
    ended = partialmethod(_called, "ended")

    def _safe(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's own code may raise anything
            raise RouterError(f"{self.what} {self._name}, {what}: {in_line(error)}") from error
