"""The choice of tokens from logits, on the device without a synchronisation: greedy, or drawn by a number a row; the
continuations of a beam search; and the settings of single requests.

A row's token follows from its logits, its number and its request's settings alone. The draw is therefore exact
arithmetic: probabilities become whole multiples of the likeliest one's 2**-40, and sums of those do not depend on the
order in which a device adds them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbengine.errors import UsageError
from cbsim.policy.request import RequestSpec
from cbsim.scenario import rows
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import near, shown

Words = TypeVar("Words", npt.NDArray[np.int64], Tensor)
GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
SHIFTS, FACTORS = (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64's finaliser
ONE = float(1 << 40)  # the weight of the likeliest token; a vocabulary of 2**22 sums to less than 2**63
LEAST_TEMPERATURE, MOST_TEMPERATURE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
SLICE = 128  # rows whose tokens are drawn at a time, which bounds the memory: sorted copies, weights, their sums
DRAWN_BYTES = 32  # a logit of a slice at that peak, beside the logit itself
FILE = "sampling.jsonl"  # in a run directory: settings of single requests


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings by which tokens are chosen: temperature 0 is greedy; `top_k` 0 keeps all tokens, as `top_p` 1 does.
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

    @property
    def on_device(self) -> tuple[float, int, float]:
        """Temperature, top_k and top_p clamped to the types of `Draws`; larger or smaller values change nothing."""
        temperature = 0.0 if self.greedy else min(max(self.temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE)
        return temperature, min(self.top_k, np.iinfo(np.int32).max), self.top_p


def _check(field: str, value: float, kind: type, bounds: tuple[float, float], expected: str) -> None:
    right = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not right or not bounds[0] <= value <= bounds[1]:
        raise UsageError(f"sampling.{field}: got {value!r}, expected {expected}")


class Draws(NamedTuple):
    """The inputs of each row's draw besides its logits: [S] each."""

    uniforms: Tensor  # float32, in [0, 1)
    temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int32; 0: all tokens
    top_p: Tensor  # float64; 1: all of them


def sample(logits: Tensor, draws: Draws | None) -> Tensor:
    """Map logits float32 [S, V] and each row's draw (None: all rows are greedy) to tokens int32 [S]. A row that holds a
    NaN gives -1; so does one without a finite largest logit, unless it is greedy.
    """
    if draws is None:
        largest, tokens = logits.max(dim=-1)  # max returns a NaN if there is one
        return tokens.masked_fill(largest.isnan(), -1).int()
    slices = zip(logits.split(SLICE), *(draw.split(SLICE) for draw in draws), strict=True)
    return torch.cat([_drawn(rows, Draws(*own)) for rows, *own in slices])


def _drawn(logits: Tensor, draws: Draws) -> Tensor:
    uniforms, temperature, top_k, top_p = (draw[:, None] for draw in draws)
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    largest, greedy = ordered[:, :1], temperature == 0
    infinite = ~largest.isfinite()  # sort puts a NaN first
    gaps = (ordered - largest).masked_fill(infinite, 0.0) / temperature.masked_fill(greedy, 1.0)
    reach = (gaps.exp() * ONE).long().cumsum(dim=-1)  # [S, V]: the weight up to each token
    drawn = (_kept(reach, top_k, top_p).double() * uniforms.double()).floor().long()
    at = torch.searchsorted(reach, drawn, right=True)  # the first token that reaches beyond what was drawn
    broken = torch.where(greedy, largest.isnan(), infinite)
    return tokens.gather(1, at.masked_fill(greedy, 0)).masked_fill(broken, -1).squeeze(1).int()


def _kept(reach: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the weight of the tokens that may be drawn: [S, 1]."""
    vocab = reach.shape[1]
    likeliest = reach.gather(1, top_k.long().masked_fill(top_k == 0, vocab).clamp(max=vocab) - 1)
    mass = (likeliest.double() * top_p).ceil().long().minimum(likeliest)
    return torch.where(top_p < 1, reach.gather(1, torch.searchsorted(reach, mass)), likeliest)


def rank(logits: Tensor, scores: Tensor, beams: int) -> Tensor:
    """Rank logits float32 [S, V] with the beams' scores so far [S], of which every `beams` are a search; return the
    arrays of `Ranked`, one after the other: int32 [3 S]. While no beam ends, the choice is that of
    `generate(num_beams=k)` of transformers: the likeliest continuations of a search's beams by one token, as many as
    there are beams, where a beam's score is the sum of its tokens' log probabilities.
    """
    vocab = logits.shape[1]
    scored = (logits.log_softmax(dim=-1) + scores[:, None]).view(-1, beams * vocab)
    best, at = scored.topk(beams)  # topk ranks a NaN above all
    tokens = (at % vocab).masked_fill(best.isnan().any(dim=-1, keepdim=True), -1)
    return torch.stack((tokens.int(), (at // vocab).int(), best.view(torch.int32))).view(-1)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Return a number in [0, 1) for each (request's seed, position of the token): float32 [S], 24 random bits."""
    words = _words(seeds.view(np.int64), positions.astype(np.int64))
    return _shifted(words, 40).astype(np.float32) * np.float32(2**-24)


def uniforms_on_device(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return what `uniforms` does, of int64 tensors, the bits of seeds among them."""
    return _shifted(_words(seeds, positions), 40).float() * 2**-24


def request_seed(seed: int, index: int) -> int:
    """Return the seed of a run's request: 64 bits."""
    return int(_words(np.array([seed & MASK], dtype=np.uint64).view(np.int64), np.array([index]))[0]) & MASK


def _words(seeds: Words, counters: Words) -> Words:
    """Return number `counters` of the SplitMix64 stream from the mixed seed (Steele, Lea, Flood, OOPSLA 2014)."""
    return _mixed(_mixed(seeds) + (counters + 1) * _signed(GOLDEN))


def _mixed(z: Words) -> Words:
    """Apply SplitMix64's finaliser to the bits of int64: products wrap at 64 bits, right shifts have to be masked."""
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return z ^ _shifted(z, SHIFTS[-1])


def _shifted(z: Words, bits: int) -> Words:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Sampling settings of single requests, by request id; the other requests have the run's settings. Further samples
    of a request have that one's, or their own. `path` and `lines` locate each in the file that gives them, JSON Lines:
    the `id` of a request and any of `temperature`, `top_k`, `top_p`, `seed`; what a line leaves out is the run's.
    """

    by_id: Mapping[str, Sampling] = field(default_factory=dict, hash=False)
    path: Path | None = None
    lines: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def read(cls, path: Path, usual: Sampling) -> Self:
        """Read a file of settings; `usual` has the fields that lines leave out. Raises ScenarioError, UsageError."""
        by_id: dict[str, Sampling] = {}
        lines: dict[str, int] = {}
        with rows.open_text(path) as file:
            for line in rows.lines(path, file):
                name = line.data.get("id")
                if not isinstance(name, str):
                    raise line.bad("id", "the id of a request, a text")
                if name in by_id:
                    raise line.bad("id", f"another id: line {lines[name]} has that")
                by_id[name] = _sampling(line, usual)
                lines[name] = line.at or 0
        return cls(by_id, path, lines)

    def of(self, spec: RequestSpec, usual: Sampling) -> Sampling:
        if self.by_id and spec.sample_of is not None:
            usual = self.of(spec.sample_of, usual)
        return self.by_id.get(spec.id, usual)

    @property
    def facts(self) -> dict[str, Any]:
        """The entries of env.json."""
        return {"file": str(self.path) if self.path else None, "requests": len(self.by_id)}

    def check(self, specs: Collection[RequestSpec]) -> None:
        """Raise UsageError for an id that no request has."""
        known = {spec.id for spec in specs}
        for name in self.by_id:
            if name not in known:
                expected = f"expected the id of one of the {len(known)} requests{near(name, sorted(known))}"
                source = f"{self.path}:{self.lines[name]}" if self.path else "sampling"
                raise UsageError(f"{source}: id: got {shown(name)}, {expected}")

    def file(self) -> bytes:
        """Return all settings with every field, in the form that `read` takes."""
        lines = ({"id": name, **asdict(sampling)} for name, sampling in self.by_id.items())
        return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def _sampling(line: Document, usual: Sampling) -> Sampling:
    known = tuple(setting.name for setting in fields(Sampling))
    values = {name: value for name, value in line.data.items() if name != "id"}
    for name in values:
        if name not in known:
            expected = f"{', '.join(('id', *known[:-1]))} or {known[-1]}{near(name, known)}"
            raise UsageError(f"{line.where(())}: {name}: is unknown, expected {expected}")
    try:
        return replace(usual, **values)
    except UsageError as error:
        raise UsageError(f"{line.where(())}: {str(error).removeprefix('sampling.')}") from None
