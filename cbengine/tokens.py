"""What was asked and said, as a file of the run directory: the token ids of every request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.policy.request import RequestSpec

FILE = "tokens.parquet"


def table(said: Iterable[tuple[RequestSpec, Sequence[int], Sequence[int]]]) -> bytes:
    """(request, prompt, output) -> a parquet table with columns index, id, prompt and output, in order of index."""
    rows = sorted(said, key=lambda one: one[0].index)
    ids = pa.list_(pa.int32())
    columns = {
        "index": pa.array([spec.index for spec, _, _ in rows], pa.int64()),
        "id": pa.array([spec.id for spec, _, _ in rows], pa.string()),
        "prompt": pa.array([list(prompt) for _, prompt, _ in rows], ids),
        "output": pa.array([list(output) for _, _, output in rows], ids),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content
