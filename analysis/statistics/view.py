"""What a figure of a sweep shows at first: which axis is on x, which make the series, what the others are fixed at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.statistics.places import Places
from analysis.statistics.sweep_table import Axis, Ints, SweepTable

MOST_SERIES = 8  # lines of a figure


@dataclass(frozen=True, slots=True)
class View:
    """An axis on x, those whose values make a series each, and the one value of each other axis, by its name.

    Without an axis there is one place, and `x` is None.
    """

    x: Axis | None
    series: Sequence[Axis]
    fixed: Mapping[str, int]

    def rows(self, places: Places) -> list[Ints]:
        """The places of each series, in the order of x; series without a place are left out."""
        shown = np.ones(len(places), dtype=bool)
        for at, axis in enumerate(places.axes):
            shown &= places.codes[:, at] == self.fixed.get(axis.name, places.codes[:, at])
        own = [at for at, axis in enumerate(places.axes) if any(axis is other for other in self.series)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for place in np.flatnonzero(shown).tolist():
            groups.setdefault(tuple(places.codes[place, own].tolist()), []).append(place)
        return [np.array(groups[key], dtype=np.int64) for key in sorted(groups)]

    def says(self, axes: Sequence[Axis]) -> str:
        """A sentence on what is fixed, for a caption; "" if nothing is."""
        told = [f"{axis.name} = {axis.labels[self.fixed[axis.name]]}" for axis in axes if axis.name in self.fixed]
        return f" Of the others: {', '.join(told)}." if told else ""


def view(table: SweepTable, x: str | None) -> View:
    """`x` or the longest axis of numbers on x; as many others as make few series, those of few values first."""
    if not table.axes:
        return View(None, (), {})
    first = longest(table.axes) if x is None else table.axis(x)
    return View(first, *split([axis for axis in table.axes if axis is not first]))


def longest(axes: Sequence[Axis]) -> Axis:
    """The axis of most values, of numbers if there is one."""
    return max(axes, key=lambda axis: (axis.numbers is not None, len(axis)))


def split(axes: Sequence[Axis]) -> tuple[Sequence[Axis], Mapping[str, int]]:
    """Axes that together make few series, in their order, and one value for each of the rest: the middle number, or
    the first.
    """
    chosen: list[Axis] = []
    for axis in sorted(axes, key=len):
        if math.prod(map(len, [*chosen, axis])) <= MOST_SERIES:
            chosen.append(axis)
    series = [axis for axis in axes if any(axis is other for other in chosen)]
    rest = [axis for axis in axes if not any(axis is other for other in chosen)]
    return series, {axis.name: middle(axis) for axis in rest}


def middle(axis: Axis) -> int:
    """The code of what an axis is fixed at: its middle number, or its first value."""
    return 0 if axis.numbers is None else len(axis) // 2
