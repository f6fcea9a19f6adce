"""What a client measured: its requests one by one, or their distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cbsim.draw.chart import Floats
from cbsim.results import metrics
from cbsim.results.metrics import Ints

MEASURES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
STATISTICS = ("mean", "p50", "p99")

Distribution = Mapping[str, float]
"""Statistics by name, in seconds; those that are not known are not there."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A request that succeeded, in seconds of the client's clock, NaN for what it does not say.

    `key` is its name at the server, "" if the client does not know; `number` its place among all that were issued.
    `gaps_s` are those between chunks.
    """

    key: str
    number: int
    start_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: float
    output_tokens: float
    gaps_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """What one file says. `requests` is None if it has statistics only, which `told` has then.

    `numbered`: its server knows requests by a prefix of the client's and their `number`. Tokens are sums over requests
    that succeeded, NaN if they are not said.
    """

    path: Path
    tool: str
    succeeded: int
    failed: int
    prompt_tokens: float
    output_tokens: float
    requests: Sequence[Measured] | None = None
    numbered: bool = False
    told: Mapping[str, Distribution] = field(default_factory=dict)

    @property
    def issued(self) -> int:
        return self.succeeded + self.failed

    def values(self, measure: str) -> Floats:
        """Every value of a measure, of all requests that succeeded; none if the file does not list them."""
        requests = self.requests or ()
        if measure == "itl_s":
            return np.array([gap for request in requests for gap in request.gaps_s], dtype=np.float64)
        values = np.array([getattr(request, measure) for request in requests], dtype=np.float64)
        return values[np.isfinite(values)]

    def distribution(self, measure: str) -> Distribution:
        """Of all its requests that succeeded; {} if it does not say."""
        return self.told.get(measure, {}) if self.requests is None else distribution(self.values(measure))


def distribution(values: Floats, counts: Ints | None = None) -> Distribution:
    """Mean and percentiles of values, each occurring `counts` times (None: once); {} of nothing."""
    whole = metrics.distribution(values, counts)
    return {name: whole[name] for name in STATISTICS} if whole["n"] else {}


def listed(path: Path, tool: str, requests: Sequence[Measured], failed: int, *, numbered: bool = False) -> Client:
    """The client whose file lists these requests."""
    prompt, output = (sum(getattr(each, name) for each in requests) for name in ("prompt_tokens", "output_tokens"))
    return Client(path, tool, len(requests), failed, prompt, output, requests, numbered)
