"""Triton's interpreter, with bf16 as a GPU has it: as it comes, it truncates to bf16 and multiplies raw bits.

A missing or unfit triton skips the module that imports this.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _probe(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    value = tl.load(x + i, mask=i < tl.cdiv(n, 2), other=0.0)
    for _ in range(0, tl.load(x).to(tl.int32), 1):  # bounds that a kernel reads trip some versions
        value += tl.sum(value, 0)
    tl.store(out + i, value)


def _interpret() -> None:
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain_cast, plain_dot = builder.cast_impl, builder.create_dot

    def cast(self, source, to):
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, source, to)
        bits = torch.tensor(source.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    def dot(self, a, b, *others):
        wide = [plain_cast(self, t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b)]
        return plain_dot(self, *wide, *others)

    builder.cast_impl, builder.create_dot = cast, dot
    x, found = torch.tensor([1.0, 2.0, 7.0, 7.0]), torch.zeros(4)
    try:
        _probe[(1,)](x, found, 4)
    except Exception as error:  # whatever this pair of versions trips over
        versions = f"triton {triton.__version__} with numpy {np.__version__}"
        pytest.skip(f"no CUDA device, and Triton's interpreter fails: {versions}: {error!r}", allow_module_level=True)
    assert found.tolist() == [4.0, 5.0, 3.0, 3.0]


if not torch.cuda.is_available():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)
    _interpret()
