"""The request table as columns: what it is written from, read into and counted by. Whoever iterates gets rows.

A run may have a million requests. As columns they take as many bytes as they have numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cbsim.results import arrow
from cbsim.results.record import RequestRow

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
TEXTS = ("id", "status", "reason")
RUNS = "token_runs"
NUMBERS = tuple(name for name in RequestRow._fields if name not in (*TEXTS, RUNS))
ENDED = ("length", "stop")  # with their last token
AT_ONCE = 1 << 14  # rows made together


class RequestTable(Sequence[RequestRow]):
    """Requests in order of index. `lengths` says how many numbers of `runs` are a request's token runs."""

    def __init__(self, numbers: Mapping[str, Ints], texts: Mapping[str, pa.Array], lengths: Ints, runs: Ints) -> None:
        self._numbers, self._texts = numbers, texts
        self.lengths, self.runs = lengths, runs

    @classmethod
    def of(cls, rows: Sequence[RequestRow]) -> RequestTable:
        """These rows as columns."""
        if isinstance(rows, RequestTable):
            return rows
        values = dict(zip(RequestRow._fields, zip(*rows, strict=True) if rows else ((),) * 16, strict=True))
        runs = values[RUNS]
        return cls(
            {name: np.array(values[name], dtype=np.int64) for name in NUMBERS},
            {name: arrow.texts(values[name]) for name in TEXTS},
            np.array([len(numbers) for numbers in runs], dtype=np.int64),
            np.fromiter(chain.from_iterable(runs), dtype=np.int64),
        )

    def numbers(self, name: str) -> Ints:
        """A column of whole numbers."""
        return self._numbers[name]

    def texts(self, name: str) -> pa.Array:
        """A column of texts."""
        return self._texts[name]

    def is_in(self, statuses: Sequence[str]) -> Mask:
        """Which requests have one of these statuses?"""
        return arrow.mask(pc.is_in(self._texts["status"], arrow.texts(statuses)))

    def rows(self, chosen: npt.NDArray[np.integer] | Mask) -> RequestTable:
        """The requests at these positions, in their order, or those that a mask leaves."""
        at = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        places = arrow.whole(at)
        lengths = self.lengths[at]
        starts = (np.cumsum(self.lengths) - self.lengths)[at]
        inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return RequestTable(
            {name: values[at] for name, values in self._numbers.items()},
            {name: values.take(places) for name, values in self._texts.items()},
            lengths,
            self.runs[np.repeat(starts, lengths) + inside],
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> RequestRow: ...
    @overload
    def __getitem__(self, at: slice) -> RequestTable: ...
    def __getitem__(self, at: int | slice) -> RequestRow | RequestTable:
        chosen = range(len(self))[at]
        if isinstance(chosen, range):
            return self.rows(np.array(chosen, dtype=np.int64))
        return next(iter(self.rows(np.array([chosen]))))

    def __iter__(self) -> Iterator[RequestRow]:
        ends = np.cumsum(self.lengths)
        for low in range(0, len(self), AT_ONCE):
            part = slice(low, low + AT_ONCE)
            columns: dict[str, Any] = {name: self._numbers[name][part].tolist() for name in NUMBERS}
            columns |= {name: self._texts[name][part].to_pylist() for name in TEXTS}
            spans = zip(ends[part].tolist(), self.lengths[part].tolist(), strict=True)
            columns[RUNS] = [self.runs[end - length : end].tolist() for end, length in spans]
            yield from map(RequestRow._make, zip(*(columns[name] for name in RequestRow._fields), strict=True))

    def __eq__(self, other: object) -> bool:
        """The same rows as another table or sequence of rows?"""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
