"""Dynamo's KV router (lib/kv-router/src/scheduling/selector/default.rs): the least cost in blocks.

    cost = prefill_load_scale * max(0, P - O) + D + decode_active_request_weight * active requests

P are the blocks of prompt that the server has still to compute with this one, O those of this prompt that are cached
there, D the blocks of its active prompts and this one, shared ones once. The router's own books say all but O. A prompt
is to be computed until its first token; a request is active until its end. Caches on the host are not known here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import Annotated

from cbsim.policy.kind import Settings
from cbsim.policy.marks import AtLeast
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import Queues, RouterKind, View, ready, shared_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSettings(Settings):
    """The settings of Dynamo's KV router."""

    overlap_score_credit: Annotated[float, AtLeast(0)] = 1.0  #: Blocks of cost that a cached block saves.
    overlap_score_credit_decay: Annotated[float, AtLeast(0)] = 0.0
    """How much that falls with the prompts a server has to compute more than the least loaded, in this prompt."""
    prefill_load_scale: Annotated[float, AtLeast(0)] = 1.0  #: Cost of a block to compute.
    decode_active_request_weight: Annotated[float, AtLeast(0)] = 0.0  #: Cost of an active request, in blocks.
    router_temperature: Annotated[float, AtLeast(0)] = 0.0  #: 0: the least cost; else drawn by softmax.
    block_tokens: Annotated[int, AtLeast(1)] = 16  #: Tokens of a block.


class Dynamo(Queues):
    """Dynamo's rule. Of several least costs any is taken. Its queues are uncached tokens of prompts."""

    def __init__(self, settings: DynamoSettings, servers: int, seed: int) -> None:
        super().__init__(servers)
        self._settings, self._random = settings, Random(seed)
        self._fewest = 0  # of the queues of ready servers, at the latest choice
        self._own = [0] * servers  # blocks of active prompts that no other shares
        self._active: list[dict[int, int]] = [{} for _ in range(servers)]  # other blocks, each with how many prompts

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        cached = [min(view.cached_tokens(request), request.prompt_tokens) for view in views]
        self.amounts = [request.prompt_tokens - tokens for tokens in cached]
        shared = shared_blocks(request, self._settings.block_tokens)
        servers = ready(views)
        self._fewest = min([self.queued[server] for server in servers])
        costs = [self._cost(request, shared, server, cached[server], views[server]) for server in servers]
        if self._settings.router_temperature:
            return servers[self._drawn(costs)]
        least = min(costs)
        return self._random.choice([server for server, cost in zip(servers, costs, strict=True) if cost == least])

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        super().sent(request, server, now_ns)
        self._count(request, server, 1)

    def ended(self, request: RequestSpec, server: int, now_ns: int) -> None:
        self.answered(request, server, now_ns)
        self._count(request, server, -1)

    def _count(self, request: RequestSpec, server: int, prompts: int) -> None:
        """Count the blocks of a prompt in, or out."""
        shared, active = shared_blocks(request, self._settings.block_tokens), self._active[server]
        self._own[server] += prompts * (request.prompt_tokens // self._settings.block_tokens - len(shared))
        for key in shared:
            active[key] = active.get(key, 0) + prompts
            if not active[key]:
                del active[key]

    def _cost(
        self, request: RequestSpec, shared: tuple[int, ...], server: int, cached_tokens: int, view: View
    ) -> float:
        settings, size, computing = self._settings, self._settings.block_tokens, self.queued
        behind = (computing[server] - self._fewest) / size / -(-request.prompt_tokens // size)
        credit = settings.overlap_score_credit / (1 + settings.overlap_score_credit_decay * behind)
        prefill = (computing[server] + request.prompt_tokens) / size - credit * (cached_tokens // size)
        active = self._active[server]
        had = bisect_left(shared, True, key=lambda key: key not in active)  # whoever has a block has those before it
        new = request.prompt_tokens // size - had
        decode = len(active) + self._own[server] + new
        requests = settings.decode_active_request_weight * view.in_flight
        return settings.prefill_load_scale * max(0.0, prefill) + decode + requests

    def _drawn(self, costs: Sequence[float]) -> int:
        least, span = min(costs), max(costs) - min(costs)
        scale = span * self._settings.router_temperature
        weights = [exp((least - cost) / scale) if span else 1.0 for cost in costs]
        return self._random.choices(range(len(costs)), weights)[0]


DYNAMO = RouterKind(
    name="dynamo", about="Dynamo's KV router: least blocks to compute and to keep", settings=DynamoSettings, make=Dynamo
)
