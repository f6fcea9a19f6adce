"""From which context on, and from which link on, swapping costs less GPU time than recomputing: in closed form.

A preempted request has n tokens in the cache. Swapped, their KV of k bytes each goes over a link of B bytes/s twice,
and the row that goes on computes one token. Recomputed, its row computes m = n + 1. On a roofline that takes longer by

    extra(n) = n e + max(m l, i) - i + max(p m (m + 1) / 2, m v) - max(p m, m v)

with e and l the seconds of a token in the embedding and in the linear layers, p those of a pair of tokens in attention,
v to read a cached token, and i what the linear layers take for the one token: as long as a step reads the weights for
longer than it computes, more tokens cost nothing there. Beyond i / l and 2 v / p tokens this is a parabola, and
swapping pays where

    p/2 m^2 + (e + l + p/2 - v - s) m - (i + e - s) > 0,    s = c k / B

with c = 2 if the GPU waits for both ways, 1 if one of them goes on beside the steps. Below i / l tokens it cannot pay,
because a link is slower than the memory: s > e + v. So it pays from the larger root on.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

from cbsim.scenario.costs import RooflineSettings
from cbsim.scenario.scenario import Scenario

BOTH_WAYS, ONE_WAY = 2, 1


class Terms(NamedTuple):
    """Seconds of the roofline for a dense model in one type on one GPU, and bytes of a cached token."""

    embedding_s: float  # a query token
    linear_s: float  # a query token
    weights_s: float  # to read those of the linear layers
    pair_s: float  # a query token and a token up to it
    cached_s: float  # to read a token of the cache
    kv_bytes: int

    @classmethod
    def of(cls, scenario: Scenario) -> Terms:
        model, gpu, cost = scenario.model, scenario.hardware, scenario.cost
        assert isinstance(cost, RooflineSettings)
        assert not model.experts
        assert model.weights_dtype is None
        assert scenario.gpus == 1
        flops = getattr(gpu.flops, model.dtype) * cost.compute_efficiency.prefill
        weights = gpu.memory_bandwidth_bytes_s * cost.memory_efficiency.weights
        matrices = model.layers * model.layer_parameters
        return cls(
            embedding_s=model.hidden * model.dtype_bytes / weights,
            linear_s=2 * matrices / flops,
            weights_s=matrices * model.dtype_bytes / weights,
            pair_s=4 * model.layers * model.heads * model.head_dim / flops,
            cached_s=model.kv_bytes_per_token / (gpu.memory_bandwidth_bytes_s * cost.memory_efficiency.kv),
            kv_bytes=model.kv_bytes_per_token,
        )

    def least_s(self, others: int) -> float:
        """What the linear layers of a step take for one token beside `others`, which have theirs."""
        return max(self.linear_s, self.weights_s - others * self.linear_s)

    def extra_s(self, tokens: int, others: int = 0) -> float:
        """How much longer a step takes in which so many tokens are computed again, in one chunk with the next one."""
        m, least = tokens + 1, self.least_s(others)
        linear = max(m * self.linear_s, least) - least
        attention = max(self.pair_s * m * (m + 1) / 2, m * self.cached_s) - max(self.pair_s * m, m * self.cached_s)
        return tokens * self.embedding_s + linear + attention

    def moved_s(self, tokens: int, link_bytes_s: float, ways: int = BOTH_WAYS) -> float:
        """How long the GPU waits for the KV of so many tokens."""
        return ways * tokens * self.kv_bytes / link_bytes_s

    def link_bytes_s(self, tokens: int, others: int = 0, ways: int = BOTH_WAYS) -> float:
        """The link from which on it pays to swap so many tokens; inf if none is fast enough."""
        extra = self.extra_s(tokens, others)
        return ways * tokens * self.kv_bytes / extra if extra > 0 else inf

    def tokens(self, link_bytes_s: float, others: int = 0, ways: int = BOTH_WAYS) -> float:
        """The context from which on swapping over such a link pays: the larger root of the parabola, less one token."""
        s, square = ways * self.kv_bytes / link_bytes_s, self.pair_s / 2
        slope = self.embedding_s + self.linear_s + square - self.cached_s - s
        square_of_root = slope * slope + 4 * square * (self.least_s(others) + self.embedding_s - s)
        root = (sqrt(max(0.0, square_of_root)) - slope) / (2 * square)
        return max(0.0, root - 1)
