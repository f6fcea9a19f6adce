"""vLLM production-stack's `prefixaware` (src/vllm_router/routers/routing_logic.py, prefix/hashtrie.py).

A trie of chunks of 128 characters knows, for each beginning of a prompt ever sent, the servers that it was sent to;
nothing is ever taken out. Chained keys name the beginning themselves, so that the trie is a table here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated

from cbsim.policy.kind import Settings
from cbsim.policy.marks import AtLeast
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import RouterBase, RouterKind, View, ready, shared_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAwareSettings(Settings):
    """The settings of production-stack's `prefixaware`."""

    min_match_tokens: Annotated[int, AtLeast(0)] = 0
    """Tokens of a prompt that must have been sent before; else the least requests in flight decide."""
    block_tokens: Annotated[int, AtLeast(1)] = 32  #: Tokens of a block; its 128 characters.


class PrefixAware(RouterBase):
    """production-stack's rule: any of the servers that have been sent most of the prompt."""

    def __init__(self, settings: PrefixAwareSettings, seed: int) -> None:
        self._settings, self._random = settings, Random(seed)
        self.servers: dict[int, set[int]] = {}  # by block

    def match(self, request: RequestSpec, servers: Collection[int]) -> tuple[int, list[int]]:
        """Return how many blocks of the prompt have been sent to any of the servers, and to which of them."""
        matched, found = 0, set(servers)
        for key in shared_blocks(request, self._settings.block_tokens):
            if not (holders := self.servers.get(key, set()).intersection(servers)):
                break
            matched, found = matched + 1, holders
        return matched, sorted(found)

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        matched, servers = self.match(request, at_hand := ready(views))
        if matched * self._settings.block_tokens < self._settings.min_match_tokens:
            return min(at_hand, key=lambda server: views[server].in_flight)
        return self._random.choice(servers)

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        for key in shared_blocks(request, self._settings.block_tokens):
            self.servers.setdefault(key, set()).add(server)

    def left(self, server: int) -> None:
        for servers in self.servers.values():
            servers.discard(server)


PREFIX_AWARE = RouterKind(
    name="production_stack_prefixaware",
    about="production-stack's prefixaware: any server that has been sent most of the prompt",
    settings=PrefixAwareSettings,
    make=lambda settings, _, seed: PrefixAware(settings, seed),
)
