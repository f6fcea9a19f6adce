"""What was asked and said, as a file of the run directory: the token ids of every request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbsim.policy.request import RequestSpec
from cbsim.record import parquet
from cbsim.record.columns import Column

FILE = "tokens.parquet"
COLUMNS = (
    Column("index", "id", "number in the workload"),
    Column("id", "text", "name in the workload", "string"),
    Column("prompt", "id", "token ids of its prompt", "list<int32>"),
    Column("output", "id", "token ids that it was told", "list<int32>"),
)


def table(said: Iterable[tuple[RequestSpec, Sequence[int], Sequence[int]]]) -> bytes:
    """(request, prompt, output) -> a parquet table of COLUMNS, in order of index."""
    rows = sorted(said, key=lambda row: row[0].index)
    return parquet.encoded(
        COLUMNS,
        {
            "index": [spec.index for spec, _, _ in rows],
            "id": [spec.id for spec, _, _ in rows],
            "prompt": [list(prompt) for _, prompt, _ in rows],
            "output": [list(output) for _, _, output in rows],
        },
    )
