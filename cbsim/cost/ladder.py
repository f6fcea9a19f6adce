"""Linear interpolation in a measured table of any number of axes, whose grid need not be full.

The table is a tree, one level an axis: under each value of an axis lie the values of the next one that were measured
with it. A point is found level by level between the two neighbours there. Below the first value the first holds; above
the last the line through the last two goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence


class Ladder:
    """`rows` are (coordinates, value), at least one, each point once, with as many coordinates as there are axes."""

    __slots__ = ("_keys", "_rungs")

    def __init__(self, rows: Iterable[tuple[Sequence[float], float]]) -> None:
        grouped: dict[float, list[tuple[Sequence[float], float]]] = {}
        for at, value in rows:
            grouped.setdefault(at[0], []).append((at[1:], value))
        self._keys = sorted(grouped)
        self._rungs: list[Ladder | float] = [self._rung(grouped[key]) for key in self._keys]

    @staticmethod
    def _rung(rows: list[tuple[Sequence[float], float]]) -> Ladder | float:
        (rest, value), *more = rows
        if rest:
            return Ladder(rows)
        assert not more, rows
        return value

    def __call__(self, *at: float) -> float:
        """The value at a point: one coordinate an axis, in order."""
        keys, rungs, x = self._keys, self._rungs, at[0]
        place = bisect_right(keys, x)
        if place == 0 or len(keys) == 1:
            return self._value(rungs[0], at)
        if place == len(keys):
            if x == keys[-1]:
                return self._value(rungs[-1], at)
            place -= 1
        low, high = keys[place - 1], keys[place]
        below = self._value(rungs[place - 1], at)
        if x == low:
            return below
        return below + (x - low) / (high - low) * (self._value(rungs[place], at) - below)

    @staticmethod
    def _value(rung: Ladder | float, at: tuple[float, ...]) -> float:
        return rung(*at[1:]) if isinstance(rung, Ladder) else rung
