"""Arrow arrays made of their bytes and read as such: Arrow's own way loads pandas, which takes half a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def whole(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Whole numbers; null where they are `missing`."""
    numbers = np.ascontiguousarray(values, dtype=np.int64)
    valid = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little").tobytes())
    return pa.Array.from_buffers(pa.int64(), len(numbers), [valid, pa.py_buffer(numbers)])


def texts(values: Sequence[str]) -> pa.Array:
    words = [value.encode() for value in values]
    return pa.Array.from_buffers(
        pa.string(), len(words), [None, _ends([len(w) for w in words]), pa.py_buffer(b"".join(words))]
    )


def lists(lengths: npt.NDArray[np.int64], items: npt.NDArray[np.int64]) -> pa.Array:
    """Lists of whole numbers, of these lengths."""
    inside = whole(items)
    return pa.Array.from_buffers(pa.list_(pa.int64()), len(lengths), [None, _ends(lengths)], children=[inside])


def mask(values: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    """Booleans, none of them null."""
    bits = np.frombuffer(values.buffers()[1], dtype=np.uint8)
    first = values.offset
    return np.unpackbits(bits, bitorder="little")[first : first + len(values)].astype(bool)


def _ends(lengths: Sequence[int] | npt.NDArray[np.int64]) -> pa.Buffer:
    """Where each item ends among the bytes or items of all."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    assert ends[-1] < 1 << 31, "too much for one Arrow array"
    return pa.py_buffer(ends.astype(np.int32))
