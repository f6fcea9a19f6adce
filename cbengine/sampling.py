"""From logits to tokens, on the device and without looking at it: greedy, or drawn with a number for each row.

A row's token follows from its logits and its number alone. So the draw is exact arithmetic: probabilities become whole
multiples of the likeliest one's 2**-40, and sums of those do not depend on the order in which a device adds them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbengine.errors import UsageError

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
ONE = float(1 << 40)  # the weight of the likeliest token; a vocabulary of 2**22 sums to less than 2**63


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: temperature 0 is greedy. `top_k` 0 keeps all tokens, as `top_p` 1 does.

    `top_p` keeps the fewest likeliest of the `top_k` tokens that have that share of their probability, one at least.
    Among equally likely tokens the one with the lower id comes first. Raises UsageError.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, float, (0, sys.float_info.max), "a finite number >= 0 (0: greedy)")
        _check("top_k", self.top_k, int, (0, math.inf), "a whole number >= 0 (0: all tokens)")
        _check("top_p", self.top_p, float, (sys.float_info.min, 1), "a number > 0 and <= 1")
        _check("seed", self.seed, int, (0, math.inf), "a whole number >= 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _check(field: str, value: float, kind: type, bounds: tuple[float, float], expected: str) -> None:
    right = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not right or not bounds[0] <= value <= bounds[1]:
        raise UsageError(f"sampling.{field}: got {value!r}, expected {expected}")


def sample(logits: Tensor, uniforms: Tensor | None, how: Sampling) -> Tensor:
    """Logits float32 [S, V], numbers in [0, 1) float32 [S] (None if greedy) -> tokens int32 [S].

    A row that holds a NaN gives -1; so does one without a finite largest logit, unless it is greedy.
    """
    if how.greedy:
        largest, tokens = logits.max(dim=-1)  # a NaN is larger than all
        return tokens.masked_fill(largest.isnan(), -1).int()
    assert uniforms is not None, "a row that is not greedy needs a number"
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    if how.top_k:
        ordered, tokens = ordered[:, : how.top_k], tokens[:, : how.top_k]
    largest = ordered[:, :1]
    broken = ~largest.isfinite()  # a NaN comes first
    gaps = (ordered - largest).masked_fill(broken, 0.0)
    reach = ((gaps / how.temperature).exp() * ONE).long().cumsum(dim=-1)  # [S, K]: the weight up to each token
    kept = reach[:, -1:]
    if how.top_p < 1:
        wanted = (kept.double() * how.top_p).ceil().long().minimum(kept)
        kept = reach.gather(1, torch.searchsorted(reach, wanted))
    drawn = (kept.double() * uniforms[:, None].double()).floor().long()
    at = torch.searchsorted(reach, drawn, right=True)  # the first token that reaches beyond what was drawn
    return tokens.gather(1, at).masked_fill(broken, -1).squeeze(1).int()


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """A number in [0, 1) for each (seed of a request, position of the token to sample): float32 [S], 24 random bits."""
    return (_hash(seeds, positions) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def request_seed(seed: int, index: int) -> int:
    """The seed of a run's request: 64 bits."""
    return int(_hash(np.array([seed & MASK], dtype=np.uint64), np.array([index]))[0])


def _hash(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Number `counters` of the SplitMix64 stream that starts at the mixed seed (Steele, Lea, Flood, OOPSLA 2014)."""
    steps = (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return _mixed(_mixed(seeds) + steps)


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser. Products of arrays wrap at 64 bits without a warning."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
