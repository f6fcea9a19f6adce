"""The matrix products of a step, by the rows that go through them: half of a decode step's time is here.

Few rows are held against the bandwidth of a copy, since a product reads its weights whatever the batch; many against
the rate of a large product. Copies of a matrix take turns, so that none is found in the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from cbengine.bench import timing
from cbengine.bench.figures import Budget
from cbengine.bench.timing import Ceilings
from cbengine.errors import UsageError
from cbengine.model.architecture import from_shape
from cbsim.scenario.shapes import ModelShape

DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILLS = (512, 1024, 2048, 4096, 8192)
SPAN_BYTES = 1 << 28
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight as `linear` takes it, [outputs, inputs], and how often a step multiplies by one of its shape."""

    name: str
    outputs: int
    inputs: int
    times: int


@dataclass(frozen=True, slots=True)
class Product:
    """Rows times one matrix. Shares are of the copy's bandwidth and of the large product's rate."""

    matrix: str
    rows: int
    outputs: int
    inputs: int
    bytes: int
    flop: int
    seconds: float
    of_copy: float
    of_rate: float

    def __str__(self) -> str:
        shape = f"[{self.outputs}, {self.inputs}]"
        shares = f"{self.of_copy:6.1%} of the copy {self.of_rate:6.1%} of the product"
        return f"{self.rows:>5} rows  {self.matrix:<8} {shape:<16} {self.seconds * 1e6:>10,.1f} us {shares}"


@dataclass(frozen=True, slots=True)
class StepProducts:
    """All matrix products of a step; `head_rows` of its rows go through the output layer."""

    rows: int
    head_rows: int
    bytes: int
    flop: int
    seconds: float
    of_copy: float
    of_rate: float

    def __str__(self) -> str:
        shares = f"{self.of_copy:6.1%} of the copy {self.of_rate:6.1%} of the product"
        return f"{self.rows:>5} rows  GEMMs of a step           {self.seconds * 1e3:>10,.3f} ms {shares}"


def matrices(model: ModelShape) -> list[Matrix]:
    """The matrices of model/decoder.py, where what is multiplied by the same input is one. Raises UsageError."""
    if model.experts:
        raise UsageError(f"model.experts: got {model.experts}, where the engine has dense models only")
    shape = from_shape(model)
    attended = shape.heads * shape.head_dim
    return [
        Matrix("qkv", attended + 2 * shape.kv_heads * shape.head_dim, shape.hidden, shape.layers),
        Matrix("o", shape.hidden, attended, shape.layers),
        Matrix("gate_up", 2 * shape.intermediate, shape.hidden, shape.layers),
        Matrix("down", shape.hidden, shape.intermediate, shape.layers),
        Matrix(HEAD, shape.vocab, shape.hidden, 1),
    ]


def table(
    model: ModelShape,
    best: Ceilings,
    device: str = "cuda",
    *,
    decodes: Sequence[int] = DECODES,
    prefills: Sequence[int] = PREFILLS,
    budget_s: float = 50.0,
    span: int = SPAN_BYTES,
) -> Iterator[Product | StepProducts]:
    """Each matrix at each number of rows, then their sum over a step. Rows that decode all go through the output layer,
    of a prefill one does. Rows that are not begun within `budget_s` are named on stderr and left out.
    """
    weights = {matrix: _weights(matrix, model, device, span) for matrix in matrices(model)}
    sampled: dict[int, Product] = {}
    for rows in Budget(budget_s).left([*decodes, *prefills], "GEMMs, rows"):
        head_rows = rows if rows in decodes else 1
        products = []
        for matrix, copies in weights.items():
            if matrix.name == HEAD and head_rows in sampled:
                products.append((matrix, sampled[head_rows]))
                continue
            timed = product(matrix, copies, head_rows if matrix.name == HEAD else rows, best)
            yield timed
            if matrix.name == HEAD:
                sampled[head_rows] = timed
            products.append((matrix, timed))
        yield _step(rows, head_rows, products, best)


def product(matrix: Matrix, copies: Sequence[Tensor], rows: int, best: Ceilings) -> Product:
    """Timed over all copies of the weight, one after the other."""
    x = torch.randn(rows, matrix.inputs, dtype=copies[0].dtype, device=copies[0].device)

    def one_after_the_other() -> Tensor:
        for weight in copies:
            out = linear(x, weight)
        return out

    seconds = timing.timed(one_after_the_other, x.device.type) / len(copies)
    elements = matrix.outputs * matrix.inputs + rows * (matrix.inputs + matrix.outputs)
    moved, flop = elements * x.element_size(), 2 * rows * matrix.outputs * matrix.inputs
    return Product(
        matrix=matrix.name,
        rows=rows,
        outputs=matrix.outputs,
        inputs=matrix.inputs,
        bytes=moved,
        flop=flop,
        seconds=seconds,
        of_copy=moved / seconds / best.bandwidth,
        of_rate=flop / seconds / best.rate,
    )


def _step(rows: int, head_rows: int, products: Sequence[tuple[Matrix, Product]], best: Ceilings) -> StepProducts:
    moved = sum(matrix.times * timed.bytes for matrix, timed in products)
    flop = sum(matrix.times * timed.flop for matrix, timed in products)
    seconds = sum(matrix.times * timed.seconds for matrix, timed in products)
    return StepProducts(
        rows, head_rows, moved, flop, seconds, moved / seconds / best.bandwidth, flop / seconds / best.rate
    )


def _weights(matrix: Matrix, model: ModelShape, device: str, span: int) -> list[Tensor]:
    """Copies of a random matrix, `span` bytes or more together."""
    dtype = getattr(torch, model.dtype)
    size = matrix.outputs * matrix.inputs * model.dtype_bytes
    return [
        torch.randn(matrix.outputs, matrix.inputs, dtype=dtype, device=device) for _ in range(max(2, -(-span // size)))
    ]
