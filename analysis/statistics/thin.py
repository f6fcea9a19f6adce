"""Thinning of what is drawn, never of statistics: a million steps become a few hundred representative points.

Everything is vectorised; nothing is copied more often than necessary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbsim.draw.chart import Floats

Ints = npt.NDArray[np.int64]


class Binned(NamedTuple):
    """A series of values over time to draw: entry i holds from x[i] to x[i + 1], the last one repeats the one before.

    `exact`: whether every value is included, so that mean, low and high are the same.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    exact: bool


def filled(start: Floats, end: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return values that hold from start to end, ascending and disjoint, as (edges, values): 0 where none holds.

    There is one edge more than there are values; values that hold for no time are left out.
    """
    lasting = end > start
    if not lasting.all():
        start, end, y = start[lasting], end[lasting], y[lasting]
    gaps = np.flatnonzero(end[:-1] < start[1:]) + 1
    edges = np.append(np.insert(start, gaps, end[gaps - 1]) if len(gaps) else start, end[-1:])
    return edges, np.insert(y, gaps, 0.0) if len(gaps) else y


def binned(edges: Floats, y: Floats, bins: int = 800) -> Binned:
    """Bin `y`: mean over time, least, greatest in bins of equal width; y[i] holds from edges[i] to edges[i + 1].

    Means times widths add up to the integral of `y`. With no more values than bins nothing is thinned.
    """
    if len(y) <= bins:
        drawn = np.append(y, y[-1:])
        return Binned(edges, drawn, drawn, drawn, exact=True)
    cuts = np.linspace(edges[0], edges[-1], bins + 1)
    upto = np.append(0.0, np.cumsum(y * np.diff(edges)))
    mean = np.diff(np.interp(cuts, edges, upto)) / np.diff(cuts)
    first = np.searchsorted(edges, cuts[:-1], side="right") - 1
    beyond = np.searchsorted(edges, cuts[1:], side="left")
    ranges = np.stack([first, beyond], axis=1).ravel()
    padded = np.append(y, y[-1])  # reduceat requires every index to exist
    low, high = np.minimum.reduceat(padded, ranges)[::2], np.maximum.reduceat(padded, ranges)[::2]
    mean = np.clip(mean, low, high)  # sums are rounded
    mean, low, high = (np.append(part, part[-1]) for part in (mean, low, high))
    return Binned(cuts, mean, low, high, exact=False)


def chosen(n: int, most: int) -> Ints:
    """Return at most `most` (>= 2) of the indices 0 ... n - 1, evenly spaced, both ends among them, none twice."""
    indices: Ints = np.linspace(0, n - 1, min(n, most)).round().astype(np.int64)
    return indices


def cdf(values: Floats, counts: Ints | None = None, most: int = 1000) -> tuple[Floats, Floats]:
    """Return (x, share of values <= x), each value occurring `counts` times: at most `most` points, all exact.

    They are evenly spaced in share; least and greatest value are among them.
    """
    counts = np.ones(len(values), dtype=np.int64) if counts is None else counts
    order = np.argsort(values)
    x, upto = values[order], np.cumsum(counts[order])
    last = np.append(x[1:] != x[:-1], True)[: len(x)]  # of equal values the last one counts them all
    x, upto = x[last], upto[last]
    if len(x) > most:
        shown = np.unique(np.searchsorted(upto, np.linspace(upto[0], upto[-1], most)))
        x, upto = x[shown], upto[shown]
    return x, upto / upto[-1:]
