"""Mooncake's Conductor (FAST'25, algorithm 1), the part that picks a server: the least expected TTFT.

For each server the queue of prompts sent to it and not answered, and this one: computed behind its own cached prefix,
or behind the longest of any server, fetched first, where that is more than `kvcache_balancing_threshold` times longer.
Prompts take time in proportion to their uncached tokens. Nothing is rejected, no prefix is copied ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Annotated

from cbsim.policy.kind import Settings
from cbsim.policy.marks import AtLeast
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import S_IN_NS, Queues, RouterKind, View, ready


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorSettings(Settings):
    """The settings of Mooncake's Conductor."""

    prefill_tokens_s: Annotated[float, AtLeast(1)] = 15_928.0  #: Rate at which a server computes prompts.
    transfer_tokens_s: Annotated[float, AtLeast(1)] | None = None
    """Rate at which a server fetches a prefix from another; null: it never does."""
    kvcache_balancing_threshold: Annotated[float, AtLeast(1)] = 4.0  #: How much longer a prefix worth fetching is.


class Conductor(Queues):
    """Mooncake's rule; the first of several servers. Its queues are in ns."""

    def __init__(self, settings: ConductorSettings, servers: int) -> None:
        super().__init__(servers)
        self._settings = settings

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        prompt = request.prompt_tokens
        cached = [min(view.cached_tokens(request), prompt) for view in views]
        self.amounts = [round(self._time_s(prompt, own, max(cached)) * S_IN_NS) for own in cached]
        ttft_ns = list(map(add, self.queued, self.amounts))
        return min(ready(views), key=ttft_ns.__getitem__)

    def _time_s(self, prompt_tokens: int, own_tokens: int, best_tokens: int) -> float:
        settings, rate = self._settings, self._settings.transfer_tokens_s
        if rate is None or best_tokens <= own_tokens * settings.kvcache_balancing_threshold:
            return (prompt_tokens - own_tokens) / settings.prefill_tokens_s
        return (best_tokens - own_tokens) / rate + (prompt_tokens - best_tokens) / settings.prefill_tokens_s


CONDUCTOR = RouterKind(
    name="mooncake_conductor",
    about="Mooncake's Conductor: the least expected TTFT",
    settings=ConductorSettings,
    make=lambda settings, servers, _: Conductor(settings, servers),
)
