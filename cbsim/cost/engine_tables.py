"""What the kernels of a step take by the tables of an engine (engine_files), on one GPU of those that share a model.

Linear layers by the type of the weights, the output head in the model's own; attention by the heads that a GPU has;
experts by a GPU's share of them; all-reduces of the residual stream. Between measured points Ladder and Products
interpolate; heads that were not measured lie between those that were, linearly.

A product takes what the fastest of the card's engines takes, in its own type or in 16 bits: all compute it with the
same few libraries, fewer bits are no more work, and some tables were taken with the host launching every kernel, which
can only add. An engine's own tables alone are used if that is wanted. Attention takes no longer than was measured for
as many rows and tokens or more: single outliers, which tables have, would else stand for all work near them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import le
from pathlib import Path
from typing import NamedTuple

from cbsim.cost.engine_files import NoColumnError, NoRowsError, engines, select
from cbsim.cost.kernels import MeanCurve, Products
from cbsim.cost.ladder import Ladder
from cbsim.cost.lookup import Attention
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.shapes import ModelShape

NS_A_MS = 1e6
GEMM = {"fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4": "int4_wo"}  # by weights_dtype
WIDE = "bfloat16"
HEAD_DIM = 128  # of all attention tables


class Share(NamedTuple):
    """How a model lies on its GPUs: all `tensor` share attention and dense layers; experts are spread over `experts`
    groups of them, each of which shares its own. `routing`: how unevenly tokens choose.
    """

    tensor: int = 1
    experts: int = 1
    routing: str = "balanced"


class Fastest(NamedTuple):
    """The least of several curves, at each place."""

    curves: Sequence[MeanCurve]

    def __call__(self, m: float) -> float:
        return min([curve(m) for curve in self.curves])


class Blend(NamedTuple):
    """Between two tables: `weight` of the way from the first to the second."""

    low: Ladder
    high: Ladder
    weight: float

    def __call__(self, *at: float) -> float:
        low = self.low(*at)
        return low + self.weight * (self.high(*at) - low) if self.weight else low


class EngineTables:
    """The tables of `engine` in `folder`, for one GPU's share of `model`. `fastest`: products as above. Raises
    ScenarioError.
    """

    def __init__(self, folder: Path, engine: str, model: ModelShape, share: Share, *, fastest: bool = True) -> None:
        _check(folder, model, share)
        tensor, (query, kv) = share.tensor, _heads(model, share.tensor)
        tables = _Tables(folder, engine, engines(folder) if fastest else [engine], fastest)
        width = model.heads * model.head_dim / tensor
        pairs = [(width + 2 * kv * model.head_dim, model.hidden), (model.hidden, width)]
        if not model.experts:
            inner = model.intermediate / tensor
            pairs += [(2 * inner, model.hidden), (model.hidden, inner)]
        dtype = GEMM.get(model.weights_dtype or "", WIDE)
        self._layer = [tables.product(dtype, n, k) for n, k in pairs]
        self._head = tables.product(WIDE, model.vocab / tensor, model.hidden)
        self._experts = tables.experts(dtype, model, share) if model.experts else None
        kv_dtype = model.kv_dtype or WIDE
        self._decode = tables.attention("generation_attention", query, kv, kv_dtype, _rows)
        self._prompt = tables.attention("context_attention", query, kv, kv_dtype, _prompts)
        self._reduce = tables.all_reduces(tensor) if tensor > 1 else {}
        self._gather = tables.gathers(tensor) if tensor > 1 else None
        self._hidden, self._vocab, self._ns = model.hidden, model.vocab, NS_A_MS * model.layers

    def linear_ns(self, tokens: int) -> float:
        """Matrix products of all layers but the experts'."""
        return self._ns * sum([curve(tokens) for curve in self._layer])

    def experts_ns(self, tokens: int) -> float:
        """Experts of all layers, and who chooses them."""
        return self._ns * self._experts(tokens) if self._experts else 0.0

    def head_ns(self, rows: int) -> float:
        """The output head's product, and the gathering of its shares."""
        if not rows:
            return 0.0
        gathered = self._gather(rows * self._vocab) if self._gather else 0.0
        return NS_A_MS * (self._head(rows) + gathered)

    def reduce_ns(self, tokens: int, *, graph: bool) -> float:
        """One all-reduce of the residual stream; as part of a graph, or launched by itself."""
        if not self._reduce:
            return 0.0
        ladder = self._reduce.get("graph" if graph else "eager") or self._reduce["any"]
        return NS_A_MS * ladder(tokens * self._hidden)

    def decode_ns(self, rows: int, context: float) -> float:
        """Attention of decoding rows in all layers, each over `context` tokens, its own included."""
        return self._ns * self._decode(rows, context) if rows else 0.0

    def prompt_ns(self, work: Attention) -> float:
        """Attention of a chunk in all layers: what the whole prompt costs above its cached part, as in Kernels."""
        tokens, cached = work.prefill, work.cached
        if not tokens:
            return 0.0
        time = self._prompt(_pairs(tokens))
        if cached:
            behind = self._prompt(_pairs(cached + tokens)) - self._prompt(_pairs(cached))
            time = max(time, behind, self._decode(1, cached + tokens))
        return self._ns * time


Axes = Callable[[float, float, float], "tuple[float, ...] | None"]


class _Tables(NamedTuple):
    """Where the tables of an engine are, and whose products are taken."""

    folder: Path
    engine: str
    products: Sequence[str]
    bounded: bool  # does a product of fewer bits take no longer than one of 16?

    def file(self, operation: str) -> Path:
        return self.folder / f"{operation}__{self.engine}.csv.gz"

    def product(self, dtype: str, n: float, k: float) -> Fastest:
        """[m, k] x [k, n], by m."""
        known = [_products(self.folder, engine, dtype) for engine in self.products]
        curves = [products.curve(n, k) for products in known if products is not None]
        if curves and self.bounded and dtype != WIDE:
            curves += self.product(WIDE, n, k).curves
        if not curves:
            whose = ", ".join(self.products)
            raise ScenarioError(f"{self.folder}: no products of {dtype} in the tables of {whose}")
        return Fastest(curves)

    def experts(self, dtype: str, model: ModelShape, share: Share) -> Ladder:
        """By tokens."""
        wanted = {
            "moe_dtype": dtype,
            "hidden_size": model.hidden,
            "inter_size": model.intermediate,
            "topk": model.experts_per_token,
            "num_experts": model.experts,
            "moe_tp_size": share.tensor // share.experts,
            "moe_ep_size": share.experts,
            "distribution": share.routing,
        }
        return Ladder(select(self.file("moe"), ("num_tokens",), wanted).items())

    def attention(self, operation: str, query: int, kv: int, kv_dtype: str, axes: Axes) -> Blend:
        """By what `axes` make of batch, new and cached tokens; None leaves a row out."""
        path = self.file(operation)
        by_heads: dict[float, dict[tuple[float, ...], float]] = defaultdict(dict)
        wanted = {"kv_cache_dtype": kv_dtype, "num_key_value_heads": kv}
        for (heads, *row), ms in select(path, ("num_heads", "batch_size", "isl", "step"), wanted).items():
            at = axes(*row)
            if at is not None:
                by_heads[heads][at] = ms
        fewer = max((heads for heads in by_heads if heads <= query), default=None)
        more = min((heads for heads in by_heads if heads >= query), default=None)
        if fewer is None or more is None:
            known = ", ".join(f"{heads:g}" for heads in sorted(by_heads)) or "none"
            raise ScenarioError(f"{path}: no rows of {query} query heads with {kv} of keys and values (found: {known})")
        weight = (query - fewer) / (more - fewer) if more > fewer else 0.0
        low, high = (Ladder(_no_slower_than_more(by_heads[heads]).items()) for heads in (fewer, more))
        return Blend(low, high, weight)

    def all_reduces(self, gpus: int) -> dict[str, Ladder]:
        """By how they are launched: graph or eager, or any if that was not told apart."""
        path, columns = self.file("custom_allreduce"), ("message_size",)
        name = self.engine.partition("_")[0]
        try:
            return {
                way: Ladder(select(path, columns, {"num_gpus": gpus, "backend": f"{name}_{way}"}).items())
                for way in ("graph", "eager")
            }
        except NoColumnError:
            return {"any": Ladder(select(path, columns, {"num_gpus": gpus}).items())}

    def gathers(self, gpus: int) -> Ladder:
        """All-gathers by NCCL, by elements of the whole."""
        newest = max(self.folder.glob("nccl__*.csv.gz"), default=self.folder / "nccl__nccl.csv.gz")
        wanted = {"op_name": "all_gather", "nccl_dtype": "half", "num_gpus": gpus}
        return Ladder(select(newest, ("message_size",), wanted).items())


@lru_cache(maxsize=32)
def _products(folder: Path, engine: str, dtype: str) -> Products | None:
    """Those of an engine; None if it has none of that type."""
    path = folder / f"gemm__{engine}.csv.gz"
    points: dict[tuple[float, float], dict[float, float]] = defaultdict(dict)
    try:
        rows = select(path, ("m", "n", "k"), {"gemm_dtype": dtype})
    except NoRowsError:
        return None
    for (m, n, k), ms in rows.items():
        points[n, k][m] = ms
    return Products(path, points)


def _rows(batch: float, new: float, cached: float) -> tuple[float, ...]:
    """Decoding rows, and the tokens that each reads."""
    return batch, new + cached


def _prompts(batch: float, new: float, cached: float) -> tuple[float, ...] | None:
    """Query-key pairs of one prompt that is computed at once."""
    return (_pairs(new),) if (batch, cached) == (1, 0) else None


def _no_slower_than_more(times: Mapping[tuple[float, ...], float]) -> dict[tuple[float, ...], float]:
    """Of each point the least that was measured there or at one that is no smaller on any axis."""
    return {at: min([ms for other, ms in times.items() if all(map(le, at, other))]) for at in times}


def _pairs(tokens: float) -> float:
    return tokens * (tokens + 1) / 2


def _heads(model: ModelShape, tensor: int) -> tuple[int, int]:
    """Query heads and heads of keys and values of a GPU: one of the latter, if there are fewer than GPUs."""
    return model.heads // tensor, max(1, model.kv_heads // tensor)


def _check(folder: Path, model: ModelShape, share: Share) -> None:
    if model.head_dim != HEAD_DIM:
        raise ScenarioError(f"model.head_dim: got {model.head_dim}, must be {HEAD_DIM}: {folder} holds no other")
    if not model.sees_all:
        raise ScenarioError(f"model.attention: got windows, must be full: {folder} holds nothing else")
    if model.heads % share.tensor:
        raise ScenarioError(f"cost.tensor_parallel: got {share.tensor}, must divide heads ({model.heads})")
    if share.tensor % share.experts:
        text = f"got {share.experts}, must divide tensor_parallel ({share.tensor})"
        raise ScenarioError(f"cost.expert_parallel: {text}")
    if share.experts > 1 and not model.experts:
        raise ScenarioError(f"cost.expert_parallel: got {share.experts}, must be 1: {model.name} has no experts")
