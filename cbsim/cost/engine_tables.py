"""Kernel times of a step by the tables of an engine, on one of the GPUs that share a model.

Linear layers are looked up by the type of the weights, the output head in the model's own; attention by a GPU's heads;
experts by a GPU's share of them; all-reduces are those of the residual stream. Between measured points Ladder and
Products interpolate; numbers of heads that were not measured are interpolated linearly.

A product takes the time of the fastest of the card's engines, in its own type or in 16 bits: all compute it with the
same few libraries, fewer bits are no more work, and some tables were taken with the host launching every kernel, which
can only add time. Optionally only the engine's own tables are used. Latent attention likewise is that of the fastest
engine that has tables of the kernel alone. A layer with a state takes a convolution, of the fastest engine, and the
rule of its state, of the own; without rows of both it takes what its data sheet allows (curves.py).

Single rows are wrong by up to 40 times, and would stand for all work near them. So all tables are read by one rule:

- No work takes longer than was measured for as much or more on every axis (rows, tokens, widths, elements).
- Versions of an engine are witnesses: a row that takes more than `DOUBTED` times the median of what the card's other
  versions took, by the table's usual ratio to them, is read as that median by that ratio. Where kernels stayed the same
  99 % of rows are within 1.2 to 1.5 of it. It is read no faster than the card's other engines by their median: some
  versions were measured with caches that stayed warm. Of products the other engines are witnesses enough, the fastest
  counts.

Kernel tables of serving engines as aiconfigurator publishes them: one folder a card, one file an operation.

    gemm__vllm_0.14.0         gemm_dtype, m, n, k
    context_attention__...    batch_size, isl, num_heads, num_key_value_heads, attn_dtype, kv_cache_dtype, step
    generation_attention__... the same: rows that read isl + step tokens each
    ..._attention_heads__...  with head_dim, window_size
    context_mla__..., generation_mla__...  batch_size, isl, num_heads (on a GPU), kv_cache_dtype, step
    dsa_context_module__..., dsa_generation_module__...  the same, with architecture, gemm_type, op_name
    moe__...                  moe_dtype, num_tokens, hidden_size, inter_size, topk, num_experts, moe_tp_size,
                              moe_ep_size, distribution
    gdn__..., kda__...        phase, kernel_source, batch_size sequences of seq_len tokens, num_k_heads and num_v_heads
                              on a GPU, head_k_dim, head_v_dim; a row is one kernel
    custom_allreduce__...     num_gpus, message_size (elements); backend, where graph and eager are distinguished
    nccl__nccl_<version>      op_name, nccl_dtype, num_gpus, message_size (elements)
    wideep_deepep_ll__..., wideep_deepep_normal__...  node_num, hidden_size, num_topk, num_experts, num_token (a rank),
                              times in microseconds

All end in .csv.gz and have a column latency_ms.

A module (dsa) is a layer's sparse attention with its products. Its work is query tokens and their mean context, of
prompts and decoding rows alike; the context says whether an engine chose dense kernels or the indexer. Decode batches
beyond the largest graph took the host's launches: more than `DOUBTED` times twice what half of the rows take is read as
twice that. Longer contexts than were measured with so many tokens add what they add with the next number, by ratio.
Prompts are the newest version's, measured behind caches. They hold launches, too, which steps outside a graph pay; in a
graph a chunk takes at most what as many decoding rows would.

An engine is a name and a version, as in the names of the files. Where one row was measured several times, or with
several kernels, the fastest counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from cbsim.cost import engine_files
from cbsim.cost.curves import state_times
from cbsim.cost.engine_files import DamagedError, NoRowsError, State, engines, kernels, meant, nearest, number, rows
from cbsim.cost.table import HEAD_DIM, LAUNCHES, Curve, Exchange, KernelTimes, Ladder, Measured, neighbours
from cbsim.errors import ScenarioError
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.policy.value import value
from cbsim.scenario.layers import Heads, Indexer, Latent, Layer, Linear, Matrix
from cbsim.scenario.shapes import Hardware, ModelShape

NS_A_MS = 1e6
GEMM = {"fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4": "int4_wo", "int4_g32": "int4_wo"}
GEMM |= {"mxfp4": "w4a16_mxfp4"}  # the tables' names of weights_dtype
WIDE = "bfloat16"
MXFP4 = ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")
"""Experts in mxfp4. SGLang and TensorRT-LLM take 8 bits where the card can (Blackwell), and only there have such
rows; vLLM does by option, and its tables have none."""
PROMPTS, ROWS = "context", "generation"  # operations begin so
MODULES = {
    (1536, 512, 128, 64, 128, 64, 128, 2048): "DeepseekV32ForCausalLM",
    (2048, 512, 192, 64, 256, 32, 128, 2048): "GlmMoeDsaForCausalLM",
}
"""The tables' names of sparse attention, by the widths of its latents and of its indexer."""
MODULE = "_module__"
STATES = {"gated_delta": "gdn", "kda": "kda"}  # tables of Mamba-2 hold no scan
CONVOLUTION = "causal_conv1d"  # its kernels begin so
T = TypeVar("T")
DOUBTED = 1.5


class Share(NamedTuple):
    """The distribution of a model over GPUs: `tensor` share attention and dense layers; experts are spread over
    `experts` groups of those of all `ranks`, each of which shares its own. `routing` names how unevenly tokens choose
    experts. `experts_engine`: whose experts are used before those of the engine; `all_to_all`: how tokens go there.
    """

    tensor: int = 1
    experts: int = 1
    routing: str = "balanced"
    experts_engine: str | None = None
    ranks: int = 1
    all_to_all: str = "allgather"

    @property
    def gpus(self) -> int:
        """GPUs of all ranks, which share the experts."""
        return self.tensor * self.ranks


class EngineTables(KernelTimes):
    """The tables of `engine` in `folder`, for one GPU's share of `model`. `fastest`: products take the time of the
    card's fastest engine. Raises ScenarioError.
    """

    def __init__(
        self,
        folder: Path,
        engine: str,
        model: ModelShape,
        share: Share,
        *,
        fastest: bool = True,
        gpu: Hardware | None = None,
    ) -> None:
        _check(model, share)
        tables = _Tables(folder, engine, engines(folder) if fastest else [engine], fastest)
        super().__init__(
            model,
            share.tensor,
            NS_A_MS,
            product=tables.product,
            experts=partial(tables.experts, share),
            attention=partial(tables.attention, model, share.tensor, gpu),
            reduce=tables.all_reduces(share.tensor) if share.tensor > 1 else {},
            gather=tables.nccl("all_gather", share.tensor) if share.tensor > 1 else None,
            exchange=partial(tables.exchange, share) if share.ranks > 1 else None,
            modules=True,
        )


@value(frozen=True)
class _Tables:
    """The folder of an engine's tables, and the engines whose products are used."""

    folder: Path
    engine: str
    products: Sequence[str]
    bounded: bool  # whether a product of fewer bits takes no longer than one of 16

    def first(self, operation: str, read: Callable[[Path], T], chosen: str | None = None) -> T:
        """Return what `read` makes of the first table that has the rows: of the `chosen` engine, of the version of the
        own one that is nearest, then of its others, then of the card's other engines. Raises ScenarioError: what the
        first lacks.
        """
        lacking: list[ScenarioError] = []
        for engine in [*([meant(self.folder, chosen)] if chosen else []), *self.order(operation)]:
            try:
                return read(self.folder / f"{operation}__{engine}.csv.gz")
            except NoRowsError as error:
                lacking.append(error)
        raise lacking[0] if lacking else ScenarioError(f"{self.folder}: no tables of {operation}")

    def fastest(self, operation: str, read: Callable[[Path], Measured]) -> Measured:
        """Return the milliseconds of the fastest of the card's engines that have the rows; if only the own engine
        counts, or none has them, of the `first`.
        """
        known: list[Measured] = []
        for engine in engines(self.folder, operation) if self.bounded else []:
            with suppress(NoRowsError):
                known.append(read(self.folder / f"{operation}__{engine}.csv.gz"))
        known = known or [self.first(operation, read)]
        return lambda *at: min([times(*at) for times in known])

    def order(self, operation: str) -> list[str]:
        """Return the engines with tables of an operation: this one, its versions by nearness, others by name."""
        name, required = self.engine.partition("_")[0], number(self.engine)

        def distance(engine: str) -> tuple[bool, list[int]]:
            apart = [abs(a - b) for a, b in zip(number(engine), required, strict=True)]
            return (False, apart) if engine.partition("_")[0] == name else (True, [-part for part in number(engine)])

        return sorted(engines(self.folder, operation), key=distance)

    def product(self, matrix: Matrix) -> Curve:
        """Return the milliseconds of a product, by tokens."""
        n, k, dtype = matrix.outputs, matrix.inputs, GEMM.get(matrix.dtype, WIDE)
        curves = self._curves(dtype, n, k)
        if not curves:
            raise ScenarioError(f"{self.folder}: no products of {dtype} in the tables of {', '.join(self.products)}")
        if self.bounded and dtype != WIDE:
            curves += self._curves(WIDE, n, k)
        return lambda m: min([curve(m) for curve in curves])

    def _curves(self, dtype: str, n: float, k: float) -> list[Curve]:
        paths = [self.folder / f"gemm__{engine}.csv.gz" for engine in self.products]
        known = [_products(path, engine_files.state_of(path), dtype) for path in paths]
        return [products.curve(n, k) for products in known if products is not None]

    def experts(self, share: Share, layer: Layer) -> Ladder:
        """Return the milliseconds of a layer's experts, by tokens."""
        part = layer.feed_forward
        required = {
            "hidden_size": layer.hidden,
            "inter_size": part.expert_inner,
            "topk": part.chosen,
            "num_experts": part.experts,
            "moe_tp_size": share.gpus // share.experts,
            "moe_ep_size": share.experts,
            "distribution": share.routing,
        }
        *more, last = MXFP4 if part.expert_dtype == "mxfp4" else (GEMM.get(part.expert_dtype, WIDE),)

        def read(path: Path) -> Ladder:
            for dtype in more:
                with suppress(NoRowsError):
                    return _ladder(path, "num_tokens", {"moe_dtype": dtype, **required})
            return _ladder(path, "num_tokens", {"moe_dtype": last, **required})

        return self.first("moe", read, share.experts_engine)

    def attention(
        self, model: ModelShape, tensor: int, gpu: Hardware | None, heads: Heads
    ) -> tuple[Measured, Measured]:
        """Return the milliseconds of a layer's attention: of its state's kernels, or as they attend."""
        if heads.state is None:
            return self.attended(tensor, model.kv_dtype or WIDE, heads)
        try:
            return self._stateful(heads.state, tensor, ROWS), self._stateful(heads.state, tensor, PROMPTS)
        except NoRowsError:
            if gpu is None:
                raise
            return state_times(model, tensor, gpu, NS_A_MS)

    def _stateful(self, of: Linear, tensor: int, phase: str) -> Measured:
        """Return the milliseconds of convolution and rule of a state: by rows, or sequences and their tokens."""
        if of.rule not in STATES or of.value_heads % of.key_heads:
            raise NoRowsError(f"{self.folder}: no tables of {of.rule}")
        operation = STATES[of.rule]
        read = partial(_state_kernel, of=of, heads=of.value_heads // tensor, phase=phase)
        rule = self.first(operation, partial(read, conv=False))
        convolution = self.fastest(operation, partial(read, conv=True))
        return lambda *at: rule(*at) + convolution(*at)

    def attended(self, tensor: int, kv_dtype: str, heads: Heads) -> tuple[Measured, Measured]:
        """Return the milliseconds of a layer's attention, of decoding rows and of a prompt."""
        query = heads.query // tensor
        required: dict[str, object] = {"kv_cache_dtype": kv_dtype}
        if (of := heads.latent) and (by := heads.indexer):
            required["gemm_type"] = GEMM.get(heads.dtype, WIDE)
            decode, prompt = (self._module(f"dsa_{w}_module", query, of, by, required) for w in (ROWS, PROMPTS))
            return decode, prompt
        if heads.latent:
            read = partial(_attention, query=query, required=required)
            decode, prompt = (self.fastest(f"{work}_mla", read) for work in (ROWS, PROMPTS))
            return decode, prompt
        required["num_key_value_heads"] = max(1, heads.kv // tensor)
        operation, span = "attention", heads.sees.span
        if heads.width != HEAD_DIM or span:
            operation, required = "attention_heads", required | {"head_dim": heads.width, "window_size": span}
        read = partial(_attention, query=query, required=required, span=span)
        decode, prompt = (self.first(f"{work}_{operation}", read) for work in (ROWS, PROMPTS))
        return decode, prompt

    def _module(self, operation: str, query: int, of: Latent, by: Indexer, required: dict[str, object]) -> Measured:
        """Return the milliseconds of a layer's sparse attention as a whole."""
        latents = of.query_rank, of.kv_rank, of.nope_dim, of.rope_dim, of.value_dim
        if (shape := (*latents, by.heads, by.head_dim, by.top_k)) not in MODULES:
            raise ScenarioError(f"{self.folder}: no tables of sparse attention of widths {shape}, only {[*MODULES]}")
        required = required | {"architecture": MODULES[shape], "op_name": operation}
        newest = nearest(self.folder, self.engine.partition("_")[0], None, operation) if PROMPTS in operation else None
        tables = _Tables(self.folder, newest or self.engine, self.products, self.bounded)
        return tables.first(operation, partial(_attention, query=query, required=required))

    def all_reduces(self, gpus: int) -> dict[str, Ladder]:
        """Return milliseconds by launch, the same for all if the table does not distinguish them."""
        return {launch: self.first("custom_allreduce", partial(_reduce, gpus, launch)) for launch in LAUNCHES}

    def nccl(self, operation: str, gpus: int) -> Ladder:
        """Return the milliseconds of an all-gather or a reduce-scatter by NCCL, by elements of the whole tensor."""
        newest = max(self.folder.glob("nccl__*.csv.gz"), default=self.folder / "nccl__nccl.csv.gz")
        required = {"op_name": operation, "nccl_dtype": "half", "num_gpus": gpus}
        return _ladder(newest, "message_size", required)

    def exchange(self, share: Share, layer: Layer) -> Exchange:
        """Return the milliseconds of a layer's exchange of tokens. All-gather and reduce-scatter, as vLLM does, bring
        all tokens to every rank and their sums back, in 16 bits. DeepEP sends tokens to their experts and back; it was
        measured by node, so fewer GPUs take what a whole node does. The rank with most tokens counts.
        """
        hidden, of = layer.hidden, layer.feed_forward
        if share.all_to_all == "allgather":
            gather, scatter = (self.nccl(each, share.ranks) for each in ("all_gather", "reduce_scatter"))
            return lambda tokens, _: gather(sum(tokens) * hidden) + scatter(sum(tokens) * hidden)
        required = {"hidden_size": hidden, "num_topk": of.chosen, "num_experts": of.experts, "node_num": 1}
        low, high = (self.first(f"wideep_deepep_{each}", partial(_deepep, required, each)) for each in DEEPEP)
        return lambda tokens, decode: (low if decode else high)(max(tokens))


DEEPEP = {
    "ll": ("dispatch_avg_t_us", "combine_avg_t_us"),
    "normal": ("dispatch_transmit_us", "dispatch_notify_us", "combine_transmit_us", "combine_notify_us"),
}
"""The times that add up to an exchange by DeepEP, of its low-latency kernels and of the others."""


def _deepep(required: Mapping[str, object], kernels: str, path: Path) -> Ladder:
    """Return the milliseconds of dispatch and combine by tokens a rank, with the number of SMs that is fastest."""
    times: dict[tuple[float, ...], float] = {}
    first, *more = DEEPEP[kernels]
    points, first_us = rows(path, ("num_token", *more), required, first)
    for (tokens, *parts), us in zip(points.tolist(), first_us.tolist(), strict=True):
        times[tokens,] = min((us + sum(parts)) / 1e3, times.get((tokens,), np.inf))
    return Ladder(_no_slower_than_more(times).items())


def _reduce(gpus: int, launch: str, path: Path) -> Ladder:
    required: dict[str, object] = {"num_gpus": gpus}
    if "backend" in engine_files.read_table(path, engine_files.state_of(path)).column_names:
        required["backend"] = f"{path.name.partition('__')[2].partition('_')[0]}_{launch}"
    return _ladder(path, "message_size", required)


def _ladder(path: Path, column: str, required: Mapping[str, object]) -> Ladder:
    return Ladder(_no_slower_than_more(_believed(path, (column,), required)).items())


def _attention(path: Path, *, query: int, required: Mapping[str, object], span: int = 0) -> Measured:
    return _read_attention(path, engine_files.state_of(path), query, tuple(required.items()), span)


def _state_kernel(path: Path, *, of: Linear, heads: int, phase: str, conv: bool) -> Measured:
    """Return milliseconds of one of the kernels of a state, its fastest, in layers of as many values a key."""
    required: dict[str, object] = {"phase": phase, "head_k_dim": of.key_dim, "head_v_dim": of.value_dim}
    columns = ("num_v_heads", "num_k_heads", "batch_size", *(["seq_len"] if phase == PROMPTS else []))
    sources = [each for each in kernels(path, required) if each.startswith(CONVOLUTION) == conv]
    by_heads: dict[float, dict[tuple[float, ...], float]] = defaultdict(dict)
    for source in sources:
        for (values, keys, *at), ms in _believed(path, columns, required | {"kernel_source": source}).items():
            if values * of.key_heads == keys * of.value_heads:
                by_heads[values][tuple(at)] = min(ms, by_heads[values].get(tuple(at), ms))
    return _between(path, by_heads, heads, required)


@lru_cache(maxsize=2048)
def _read_attention(path: Path, state: State, query: int, required: engine_files.Required, span: int) -> Measured:
    """Return milliseconds by decoding rows and the tokens that each reads; or of one prompt that is computed at once,
    by its query-key pairs. With a window of `span` tokens, work is what is in it; rows have to reach its end.
    """
    by_heads: dict[float, dict[tuple[float, ...], float]] = defaultdict(dict)
    sees, most = Attention(Sight.SLIDING, span) if span else FULL, 0.0
    columns = ("num_heads", "batch_size", "isl", "step")
    for (heads, batch, new, cached), ms in _believed(path, columns, dict(required)).items():
        if MODULE in path.name:
            at: tuple[float, ...] = (batch * new, cached + (new + 1) / 2)
        elif not path.name.startswith(PROMPTS):
            at = (batch, min(new + cached, span or engine_files.MOST))
        elif (batch, cached) == (1, 0):
            at = (sees.pairs(0, int(new)),)
        else:
            continue
        by_heads[heads][at], most = min(ms, by_heads[heads].get(at, ms)), max(most, new + cached)
    if most < span:
        raise NoRowsError(f"{path}: no rows of {span} tokens with window_size = {span} (found: up to {most:g})")
    return _between(path, by_heads, query, dict(required))


def _between(
    path: Path, by_heads: Mapping[float, Mapping[tuple[float, ...], float]], query: int, required: Mapping[str, object]
) -> Measured:
    """Return milliseconds with `query` heads on a GPU, between the neighbours that were measured."""
    fewer = max((heads for heads in by_heads if heads <= query), default=None)
    more = min((heads for heads in by_heads if heads >= query), default=None)
    if fewer is None or more is None:
        known = ", ".join(f"{heads:g}" for heads in sorted(by_heads)) or "none"
        where = ", ".join(f"{name} = {of}" for name, of in required.items())
        raise NoRowsError(f"{path}: no rows of {query} heads where {where} (found: {known})")
    bounded = _bounded_module if MODULE in path.name else _no_slower_than_more
    low, high = (Ladder(bounded(by_heads[heads]).items()) for heads in (fewer, more))
    if fewer == more:
        return low
    weight = (query - fewer) / (more - fewer)

    def between(*at: float) -> float:
        return low(*at) + weight * (high(*at) - low(*at))

    return between


class Products:
    """The milliseconds of a product [m, k] x [k, n], from `ms` at (m, n, k), as read from `path`.

    In m it is linear between the measured sizes of a pair (n, k). Between pairs it is a power law in n and in k: linear
    in log n, log k and log time. Below the first n or k the first holds; beyond the last, time grows in proportion.
    """

    def __init__(self, path: Path, at: np.ndarray, ms: np.ndarray) -> None:
        self._path, self._at, self._ms = path, at, _bounded(at, ms)
        self._between = cache(self._ladder)
        self._n, self._k = ([float(size) for size in np.unique(at[:, axis])] for axis in (1, 2))

    def curve(self, n: float, k: float) -> Curve:
        """Return the milliseconds of the product of that shape, by m. Raises ScenarioError."""
        in_n, in_k = neighbours(self._n, n), neighbours(self._k, k)
        corners = [(self._between(self._n[i], self._k[j]), a * b) for i, a in in_n for j, b in in_k]
        beyond = max(1.0, n / self._n[-1]) * max(1.0, k / self._k[-1])

        def mean(m: float) -> float:
            time = beyond
            for ladder, weight in corners:
                time *= ladder(m) ** weight
            return time

        return mean

    def _ladder(self, n: float, k: float) -> Ladder:
        chosen = (self._at[:, 1] == n) & (self._at[:, 2] == k)
        times = dict(zip(self._at[chosen, 0].tolist(), self._ms[chosen].tolist(), strict=True))
        if not times:
            raise ScenarioError(f"{self._path}: no rows with n = {n:g} and k = {k:g}, which the model's shape needs")
        return Ladder(((m,), ms) for m, ms in times.items())


@lru_cache(maxsize=128)
def _products(path: Path, state: State, dtype: str) -> Products | None:
    """Return the products of an engine in one type; None if its table has no such rows."""
    try:
        return Products(path, *rows(path, ("m", "n", "k"), {"gemm_dtype": dtype}))
    except NoRowsError:
        return None


def _bounded(at: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """Return for each point the least time measured there or at a point that is no smaller on any axis."""
    grid = [np.unique(column, return_inverse=True) for column in at.T]
    places = tuple(place for _, place in grid)
    least = np.full([len(values) for values, _ in grid], np.inf)
    np.minimum.at(least, places, ms)
    for axis in range(least.ndim):
        least = np.flip(np.minimum.accumulate(np.flip(least, axis), axis), axis)
    return least[places]


def _no_slower_than_more(times: Mapping[tuple[float, ...], float]) -> dict[tuple[float, ...], float]:
    bounded = _bounded(np.array(list(times)), np.array(list(times.values())))
    return dict(zip(times, bounded.tolist(), strict=True))


def _bounded_module(times: Mapping[tuple[float, ...], float]) -> dict[tuple[float, ...], float]:
    """Return bounded times of tokens and contexts, for contexts also that were measured with more or fewer tokens."""
    found: dict[float, dict[float, float]] = defaultdict(dict)
    for (tokens, context), ms in _no_slower_than_more(times).items():
        found[tokens][context] = ms
    order = sorted(found)
    for near, tokens in [*pairwise(order[::-1]), *pairwise(order)]:
        other, own, ratio = Ladder(((at,), ms) for at, ms in found[near].items()), found[tokens], tokens / near
        if ratio > 1:
            own |= {at: most for at, ms in own.items() if ms > DOUBTED * (most := ratio * other(at))}
        longest = max(own)
        own |= {at: own[longest] + ratio * (other(at) - other(longest)) for at in found[near] if at > longest}
    return {(tokens, context): ms for tokens, own in found.items() for context, ms in own.items()}


def _believed(path: Path, columns: Sequence[str], required: Mapping[str, object]) -> dict[tuple[float, ...], float]:
    """Return milliseconds as `select` does, rows that other versions of the engine contradict as these say, but no
    faster than other engines mostly are: a version whose caches were warm says less than the memory allows.
    """
    times, others = engine_files.select(path, columns, required), _elsewhere(path, columns, required, same=True)
    medians = _medians(times, others)
    usual = median([times[at] / ms for at, ms in medians.items()] or [1.0])
    doubted = {at: usual * ms for at, ms in medians.items() if times[at] > DOUBTED * usual * ms}
    rivals = _elsewhere(path, columns, required, same=False) if doubted else []
    least = _medians(doubted, rivals)
    return times | {at: min(times[at], max(ms, least.get(at, 0.0))) for at, ms in doubted.items()}


def _medians(
    points: Iterable[tuple[float, ...]], tables: Sequence[Mapping[tuple[float, ...], float]]
) -> dict[tuple[float, ...], float]:
    """Return the median of what tables say at points, of those that at least one has."""
    said = {at: known for at in points if (known := [table[at] for table in tables if at in table])}
    return {at: median(known) for at, known in said.items()}


def _elsewhere(
    path: Path, columns: Sequence[str], required: Mapping[str, object], *, same: bool
) -> list[dict[tuple[float, ...], float]]:
    """Return what the tables of an operation by other versions of the `same` engine say, or by other engines."""
    operation, _, engine = path.name.removesuffix(".csv.gz").partition("__")
    known = []
    for other in engines(path.parent, operation):
        if other != engine and (other.partition("_")[0] == engine.partition("_")[0]) == same:
            with suppress(NoRowsError, DamagedError):
                known.append(engine_files.select(path.parent / f"{operation}__{other}.csv.gz", columns, required))
    return known


def _check(model: ModelShape, share: Share) -> None:
    if model.heads % share.tensor:
        raise ScenarioError(f"cost.tensor_parallel: got {share.tensor}, must divide heads ({model.heads})")
    if share.gpus % share.experts:
        product = "tensor_parallel" if share.ranks == 1 else "tensor_parallel x data_parallel"
        raise ScenarioError(f"cost.expert_parallel: got {share.experts}, must divide {product} ({share.gpus})")
    if share.experts > 1 and not model.experts:
        raise ScenarioError(f"cost.expert_parallel: got {share.experts}, must be 1: {model.name} has no experts")
