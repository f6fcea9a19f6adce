"""The cost model `table` with a profile of vLLM's layers, as LLMServingSim's profiler writes it for one GPU, model and
type: a step takes the sum of its kernels' measured times and of times that the scenario adds.

Measured: linear layers and small kernels by query tokens, attention by what it reads, head and sampler by rows, experts
by tokens. Added: ring all-reduces of tensor parallelism and the exchange of tokens between expert-parallel GPUs, from
latency and bandwidth of the link; and times a step, a layer and a row for what no table holds.

    meta.yaml                  what was profiled, and whether skew is to be corrected
    tp<n>/dense.csv            layer, tokens, time_us
    tp<n>/per_sequence.csv     layer, sequences, time_us
    tp<n>/attention.csv        prefill_chunk, kv_prefill, n_decode, kv_decode, time_us
    tp<n>/skew.csv             decode batches with a few long contexts: alpha = (t_skew - t_mean) / (t_max - t_mean)
    tp<n>/moe.csv              tokens, activated_experts, time_us
    .../arch/<name>.yaml       the order of layers, in a folder `arch` beside or above

Times are those of one layer, launched eagerly, without gaps. `Ladder` interpolates linearly between points.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from math import inf, log2
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.cost.base import NS, cpu_cost
from cbsim.cost.table import MOST_TIME_S, Attention, Ladder, attention_work, reached
from cbsim.errors import ScenarioError
from cbsim.policy.plan import StepPlan
from cbsim.scenario import catalog, documents
from cbsim.scenario.costs import TableSettings
from cbsim.scenario.fields import bare, shown
from cbsim.scenario.rows import CsvTable, document, open_text
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import ModelShape

NS_A_US = 1000.0
ONCE = ("prologue", "head")
EVERY_LAYER = ("pre_attn", "post_attn", "mlp_dense", "mlp_moe")
MULTIPROCESSORS = {"NVIDIA GeForce RTX 4090": 128, "NVIDIA RTX PRO 6000 Blackwell Server Edition": 188}


def table_cost(scenario: Scenario, settings: TableSettings) -> TableCost:
    """Build a cost model from a profile of the scenario's model and GPU. Raises ScenarioError."""
    model, folder, tensor = scenario.model, catalog.tables(settings.path), settings.tensor_parallel
    if next(folder.glob("gemm__*.csv.gz"), None) is not None:
        raise ScenarioError(f"cost.engine: is required: {folder} holds tables of several engines")
    meta = folder / "meta.yaml"
    if not meta.is_file():
        problem = f"{folder} holds neither a profile of vLLM's layers (meta.yaml) nor an engine's tables"
        raise ScenarioError(f"cost.path: {problem}: `python -m cbsim fetch-tables CARD` brings those, for cost.engine")
    if len(model.kinds) > 1 or model.latent or not model.sees_all:
        other = "a latent" if model.latent else "states" if model.linear else "windows"
        what = f"{len(model.kinds)} kinds of layers" if len(model.kinds) > 1 else other
        raise ScenarioError(f"model: got {model.name} with {what}, must have one kind of layer of separate KV heads")
    source = documents.read(meta).data
    for field, of, name in (("model", "model", model.name), ("hardware", "hardware", scenario.hardware.name)):
        profiled = str(source.get(field, "")).rsplit("/", maxsplit=1)[-1]
        if bare(profiled) not in bare(name):
            raise ScenarioError(f"cost.path: {meta} is of {profiled}, but {of}.name is {name!r}")
    return TableCost(Bundle(folder, model, tensor), settings, model.layers, model.hidden * model.dtype_bytes)


class Bundle:
    """The tables of `model` on one of `tensor` GPUs that share it. Raises ScenarioError."""

    def __init__(self, folder: Path, model: ModelShape, tensor: int) -> None:
        meta = documents.read(folder / "meta.yaml").data
        tables = _of_degree(folder, tensor)
        order = _order(folder, meta)
        self._model, self._layers_ns = model, NS_A_US * model.layers
        dense, head = _curves(tables / "dense.csv", "tokens"), _curves(tables / "per_sequence.csv", "sequences")
        in_layers = [name for part in EVERY_LAYER for name in order[part]]
        once = [name for part in ONCE for name in order[part]]
        self._linear = [
            (model.layers, dense[n]) for n in _known(in_layers, dense, tables / "dense.csv", ("attention", "moe"))
        ]
        self._linear += [(1, dense[n]) for n in _known(once, dense, tables / "per_sequence.csv", tuple(head))]
        self._head = [head[name] for name in once if name in head]
        at = ("prefill_chunk", "n_decode", "kv_prefill", "kv_decode")  # the last one is the mean
        self._attention = _ladder(tables / "attention.csv", *at)
        self._moe = _ladder(tables / "moe.csv", "tokens", "activated_experts") if "moe" in in_layers else None
        if (self._moe is None) == bool(model.experts):
            problem = f"got {meta.get('architecture')!r}; either it or the model has experts, but not both"
            raise ScenarioError(f"{folder / 'meta.yaml'}: architecture: {problem}")
        if self._moe is not None:  # what one more expert to read adds, at the fewest tokens that reach all
            each, half = model.experts / model.experts_per_token, model.experts / 2
            self._expert_us = (self._moe(each, model.experts) - self._moe(each, half)) / half
        fit = meta.get("skew_fit")
        sound = isinstance(fit, dict) and fit.get("enabled")  # as the authors of the tables found
        self._skew = _Skew(tables / "skew.csv", _whole_rows(meta, max(1, model.kv_heads // tensor))) if sound else None

    def linear_ns(self, tokens: int) -> float:
        return NS_A_US * sum([times * curve(tokens) for times, curve in self._linear])

    def head_ns(self, rows: int) -> float:
        return NS_A_US * sum([curve(rows) for curve in self._head])

    def attention_ns(self, work: Attention, *, skew: bool) -> float:
        prefill, cached, decodes, context, longest, *_ = work
        mean = self._attention(prefill, decodes, cached, context)
        if skew and self._skew and decodes > 1 and longest > context:
            alpha = self._skew(work)
            if alpha:
                mean += alpha * (self._attention(prefill, decodes, cached, longest) - mean)
        return self._layers_ns * mean

    def experts_ns(self, tokens: int, ranks: int) -> float:
        """Return the ns of all layers' experts. A GPU computes the token-expert pairs of its own experts, on average as
        many as its own `tokens` have, over the experts that all `ranks` x `tokens` tokens reach on it.

        vLLM's kernels run over all gathered pairs. For another GPU's both products write zeros, the activation between
        them runs, and the sum behind them adds zeros; what was just written is read from the cache. So each takes as
        long as to read as much of an expert's weights.
        """
        model = self._model
        if self._moe is None:
            return 0.0
        skipped = (ranks - 1) * tokens * model.experts_per_token
        written = (3 * model.intermediate + model.hidden) / (3 * model.hidden * model.intermediate)
        hit = model.experts / ranks * reached(model.experts_per_token / model.experts, ranks * tokens)
        return self._layers_ns * (self._moe(tokens, hit) + skipped * written * self._expert_us)


class Link(NamedTuple):
    """The link between the GPUs of a group: nanoseconds a message, bytes a nanosecond."""

    latency_ns: float
    bytes_ns: float

    def all_reduce_ns(self, size_bytes: float, ranks: int) -> float:
        """Return the ns of a ring: 2 (p - 1) messages of a p-th of the data."""
        return 2 * (ranks - 1) * (self.latency_ns + size_bytes / ranks / self.bytes_ns)

    def gather_ns(self, sizes_bytes: Sequence[float]) -> float:
        """Return the ns of an all-gather of so much from each, or a reduce-scatter back: p - 1 messages of mean size.
        The two directions of a link share it: one that carries less leaves its part to the other.
        """
        ranks = len(sizes_bytes)
        return (ranks - 1) * (self.latency_ns + sum(sizes_bytes) / ranks / self.bytes_ns)


class TableCost:
    """A table cost model of `layers` layers, and of `row_bytes` bytes of residual stream a token."""

    def __init__(self, tables: Bundle, settings: TableSettings, layers: int, row_bytes: int) -> None:
        self.cpu_ns, self.launch_ns = cpu_cost(settings.cpu), round(settings.launch_s_per_layer * layers * NS)
        self._tables, self._tensor, self._layers, self._row_bytes = tables, settings.tensor_parallel, layers, row_bytes
        link = settings.link
        self._link = Link(link.latency_s * NS, link.bytes_s / NS) if link else None
        self._step_ns, self._row_ns = (settings.step_s + settings.layer_s * layers) * NS, settings.row_s * NS
        self._linear_ns, self._head_ns, self._skew = cache(tables.linear_ns), cache(tables.head_ns), settings.skew

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        return 0, self.lockstep_ns([plan], [tokens]), 0

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: Sequence[int]) -> int:
        """Every layer ends with an exchange, so all GPUs take as long as the slowest (machine.lockstep.WaveCost)."""
        own = max((self._own_ns(*at) for at in zip(plans, tokens, strict=False) if at[0].work.rows), default=-1.0)
        if own < 0:
            return 0
        ranks = len(tokens)
        experts = self._tables.experts_ns(-(-sum(tokens) // ranks), ranks)
        return round(own + experts + self._exchange_ns(tokens) + self._step_ns)

    def _own_ns(self, plan: StepPlan, tokens: int) -> float:
        work = plan.work
        rows = work.rows + work.padding_rows
        attention = self._tables.attention_ns(attention_work(plan), skew=self._skew)
        return self._linear_ns(tokens) + attention + self._head_ns(rows + work.guesses) + rows * self._row_ns

    def _exchange_ns(self, tokens: Sequence[int]) -> float:
        """Return the ns of two all-reduces a layer (tensor-parallel), a gather and a scatter (expert-parallel)."""
        link = self._link
        if link is None:
            return 0.0
        sizes = [count * self._row_bytes for count in tokens]
        reduced = 2 * link.all_reduce_ns(max(sizes), self._tensor) if self._tensor > 1 else 0.0
        gathered = 2 * link.gather_ns(sizes) if len(sizes) > 1 else 0.0
        return self._layers * (reduced + gathered)


class _Skew:
    """The interpolation weight between the times at mean and longest context, from batches with a few long rows.

    A batch is looked up by its size, longest context and ratio of mean to longest, sizes on a logarithmic scale. Rows
    of equal length do not wait for each other: at ratio 1 the weight is 0. Beyond the smallest and the largest value
    of an axis the edge value holds; a line that ends earlier is extrapolated, its weight kept between 0 and 1.

    From `whole` decoding rows on, and not below, attention leaves each context to one multiprocessor, so a batch is
    looked up among those of its side. What the longest row adds does not depend on the number of other rows, so
    between `whole` and the next measured size the weight is inversely proportional to the rows.
    """

    COLUMNS = ("n", "pc", "kp", "kv_big", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us")

    def __init__(self, path: Path, whole: float) -> None:
        shots: dict[tuple[float, ...], list[float]] = defaultdict(list)
        for n, pc, kp, big, mean, at_mean, at_longest, measured in _rows(path, self.COLUMNS):
            if at_longest > at_mean and big > 0 and n > 0:
                batch = log2(1 + pc), log2(1 + kp), log2(n), log2(big)
                shots[(*batch, mean / big)].append((measured - at_mean) / (at_longest - at_mean))
                shots[(*batch, 1.0)] = [0.0]
        if not shots:
            raise ScenarioError(f"{path}: holds no usable rows")
        self._share = Ladder((at, sum(values) / len(values)) for at, values in shots.items())
        self._most = [max(at[axis] for at in shots) for axis in range(5)]
        sizes = {round(2 ** at[2]) for at in shots}
        self._whole = whole
        self._split_size = float(max((size for size in sizes if size < whole), default=0))
        self._whole_size = float(min((size for size in sizes if size >= whole), default=inf))

    def __call__(self, work: Attention) -> float:
        prefill, cached, decodes, context, longest, *_ = work
        rows = float(decodes)
        if not prefill and self._split_size < rows < self._whole_size:
            rows = self._split_size if rows < self._whole else self._whole_size
        at = log2(1 + prefill), log2(1 + cached), log2(rows or decodes), log2(longest), context / longest
        return min(1.0, max(0.0, self._share(*map(min, at, self._most)) * max(1.0, rows / decodes)))


def _rows(path: Path, columns: Sequence[str], keys: int = 0) -> list[list[Any]]:
    """Return these columns of a CSV file row by row: names of layers, times, and numbers >= 0. No two rows have the
    same `keys`, their first cells. Raises ScenarioError, also if there is no row, or if the last line is cut off.
    """
    rows: dict[tuple[Any, ...], list[Any]] = {}
    with open_text(path) as file:
        content = document(path, file)
        table = CsvTable(path, io.StringIO(content, newline=""), columns)
        for cells in table.rows(None):
            row: list[Any] = [
                cell if columns[at] == "layer" else table.number(at, cell) for at, cell in enumerate(cells)
            ]
            for at, name in enumerate(columns):
                if name.endswith("_us") and not 0 < row[at] <= MOST_TIME_S * 1e6:
                    raise table.bad(at, cells[at], f"microseconds > 0 and <= {MOST_TIME_S * 1e6:g}, an hour")
            key = tuple(row[:keys]) or (len(rows),)
            if key in rows:
                raise table.bad(keys - 1, cells[keys - 1], f"no second row of {', '.join(cells[:keys])}")
            rows[key] = row
        if content and not content.endswith("\n"):
            raise ScenarioError(f"{path}:{table.line}: has no end of line: the file is cut off", file=path)
    if not rows:
        raise ScenarioError(f"{path}: holds no rows")
    return list(rows.values())


def _of_degree(folder: Path, tensor_parallel: int) -> Path:
    """Return the folder of the tables of one tensor-parallel degree. Raises ScenarioError."""
    tables = folder / f"tp{tensor_parallel}"
    if not tables.is_dir():
        known = ", ".join(sorted(path.name for path in folder.glob("tp*"))) or "none"
        raise ScenarioError(f"{folder}: holds no tables for tensor parallelism {tensor_parallel} (found: {known})")
    return tables


def _order(folder: Path, meta: dict[str, Any]) -> dict[str, list[str]]:
    """Return the layers of the profiled architecture in sequence, by part of a step."""
    name = meta.get("architecture")
    for above in (folder, *folder.resolve().parents):
        path = above / "arch" / f"{name}.yaml"
        if path.is_file():
            order = documents.read(path).data.get("sequence")
            if not isinstance(order, dict):
                raise ScenarioError(f"{path}: sequence: is missing, expected the parts of a step")
            parts = {part: order.get(part) or [] for part in (*ONCE, *EVERY_LAYER)}
            for part, names in parts.items():
                if not (isinstance(names, list) and all(isinstance(each, str) for each in names)):
                    raise ScenarioError(f"{path}: sequence.{part}: got {shown(names)}, expected a list of layers")
            return parts
    raise ScenarioError(f"{folder / 'meta.yaml'}: architecture: got {name!r}, and no folder above has arch/{name}.yaml")


def _whole_rows(meta: dict[str, Any], kv_heads: int) -> float:
    """Return the decoding rows from which FlashAttention 2 splits no context, by its `num_splits_heuristic`: at a block
    for a row and KV head they fill four fifths of two blocks a multiprocessor. Infinite if the GPU is not known.
    """
    multiprocessors = MULTIPROCESSORS.get(meta.get("gpu", ""))
    return 0.8 * 2 * multiprocessors / kv_heads if multiprocessors else inf


def _known(names: Sequence[str], curves: dict[str, Ladder], path: Path, elsewhere: tuple[str, ...]) -> list[str]:
    """Return the names that are not in `elsewhere`. Raises ScenarioError, naming `path`, for one without a curve."""
    required = [name for name in names if name not in elsewhere]
    for name in required:
        if name not in curves:
            raise ScenarioError(f"{path}: no layer {name!r}, which the architecture has")
    return required


def _curves(path: Path, axis: str) -> dict[str, Ladder]:
    """Return a curve of microseconds for each layer, by `axis`."""
    points: dict[str, dict[float, float]] = defaultdict(dict)
    for layer, at, time in _rows(path, ("layer", axis, "time_us"), 2):
        points[layer][at] = time
    return {layer: Ladder(((x,), y) for x, y in curve.items()) for layer, curve in points.items()}


def _ladder(path: Path, *axes: str) -> Ladder:
    return Ladder((at, time) for *at, time in _rows(path, (*axes, "time_us"), len(axes)))
