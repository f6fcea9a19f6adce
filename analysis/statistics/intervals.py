"""Bootstrap intervals of the difference of two runs, over their requests or over their steps.

Requests are drawn with replacement, the same for both runs (Efron and Tibshirani 1993, ch. 8: the pair is the unit), so
that what both runs share cancels. A request brings all its token gaps along: for ITL, requests are the clusters. Steps
depend on one another and are drawn in blocks, for each run on its own (Kunsch 1989; circular: Politis and Romano 1992).
Nothing is copied: a draw is the count of each unit, and statistics are those of `cbsim.metrics.metrics.distribution`
under such counts. Intervals are percentile intervals: too narrow for means of few, skewed values, too wide for
percentiles of runs that are much alike. They reflect how much the units of these runs vary, not other seeds or
machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isqrt
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from analysis.statistics.loading import LATENCIES, LoadedRun
from cbsim.metrics.metrics import PERCENTILE_METHOD, QUANTILES
from cbsim.record.columns import NS
from cbsim.record.record import PHASES

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float64]
SEED = 20_110_527  # of all draws: the same runs always have the same intervals
CONFIDENCE = 0.95
MOST, LEAST = 2000, 200  # replicates
WORK = 20_000_000  # units drawn in all; replicates become fewer to stay below
CHUNK = 1_000_000  # counts in memory at a time
FEWEST = 5  # units; with fewer, draws are meaningless
STATISTICS = ("mean", *(f"p{q}" for q in QUANTILES))
SHARES = ("gpu_active", "cpu_busy", "padding_share")  # ratios of sums over steps
assert PERCENTILE_METHOD == "linear"


class Interval(NamedTuple):
    """An interval of B against A: `delta` is of B - A, `relative` of B / A - 1, None if A may be 0."""

    delta: tuple[float, float]
    relative: tuple[float, float] | None

    @property
    def seen(self) -> bool:
        """Whether 0, no difference, is outside the interval."""
        return not self.delta[0] <= 0 <= self.delta[1]


class Intervals(NamedTuple):
    """A set of intervals by dotted metric, and their basis. It is empty with fewer than FEWEST units."""

    by_metric: Mapping[str, Interval]
    units: int  # requests or steps drawn from; of the smaller run, if runs have their own
    replicates: int


class Values(NamedTuple):
    """A sample of one value a unit, in order of size; `unit` is the unit of each. NaN has been left out.

    As of every sample, its `statistics` are a row for each row of `units`, the counts of each unit, and a column for
    each of its `names`.
    """

    values: Floats
    unit: Ints
    names: tuple[str, ...] = STATISTICS

    @classmethod
    def of(cls, values: Floats) -> Self:
        order = np.argsort(values, kind="stable")[: int(np.count_nonzero(~np.isnan(values)))]  # NaN is sorted last
        return cls(values[order], order)

    def statistics(self, units: Ints) -> Floats:
        return weighted(self.values, units.take(self.unit, axis=1))


class Gaps(NamedTuple):
    """A sample of requests' token gaps, in order of size. A request emits in `runs` of steps, each with an owner.

    A gap inside runs is shared by all requests that decode in its step; a gap between two runs is its owner's alone.
    """

    values: Floats
    order: Ints
    inside: Ints  # steps with shared gaps
    first: Ints
    last: Ints
    owner: Ints  # the request of each run
    between: Ints  # owners of gaps between runs
    steps: int
    names: tuple[str, ...] = STATISTICS

    @classmethod
    def of(cls, run: LoadedRun, rows: Ints) -> Self:
        """Return the gaps of the requests at these positions of the table."""
        chosen = run.times.rows.rows(rows)
        flat = chosen.runs.reshape(-1, 2)
        owner = np.repeat(np.arange(len(chosen)), chosen.lengths // 2)
        first, last, ended = flat[:, 0], flat.sum(axis=1) - 1, run.table["update_end_ns"]
        inside = np.flatnonzero(_covered(first, last, np.ones(len(first)), len(ended)))
        same = np.flatnonzero(owner[1:] == owner[:-1])
        gaps = np.concatenate([ended[inside] - ended[inside - 1], ended[first[same + 1]] - ended[last[same]]]) / NS
        order = np.argsort(gaps, kind="stable")
        return cls(gaps[order], order, inside, first, last, owner, owner[same], len(ended))

    def statistics(self, units: Ints) -> Floats:
        counts = np.empty((len(units), len(self.values)), dtype=np.int64)
        for row, drawn in enumerate(units):
            shared = _covered(self.first, self.last, drawn[self.owner], self.steps)[self.inside]
            counts[row] = np.concatenate([shared, drawn[self.between]])[self.order]
        return weighted(self.values, counts)


def _covered(first: Ints, last: Ints, weight: npt.NDArray[np.generic], steps: int) -> Ints:
    """Return by step the weight of the runs with a token in it and in the step before."""
    change = np.bincount(first + 1, weight, steps + 1) - np.bincount(last + 1, weight, steps + 1)
    return np.cumsum(change)[:steps].astype(np.int64)  # whole numbers are exact in floats up to 2**53


class Ratios(NamedTuple):
    """A sample of ratios of sums over units, `parts` being numerator and denominator, for every name."""

    parts: Sequence[tuple[Floats, Floats]]
    names: tuple[str, ...]

    def statistics(self, units: Ints) -> Floats:
        sums = {id(part): np.einsum("ij,j->i", units, part) for both in self.parts for part in both}
        above, below = (np.stack([sums[id(both[side])] for both in self.parts], axis=1) for side in (0, 1))
        shares: Floats = np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
        return shares


UnitSample = Values | Gaps | Ratios


def weighted(values: Floats, counts: Ints) -> Floats:
    """Return STATISTICS of sorted `values` occurring `counts` times each, for every row of counts; NaN if all are 0."""
    result = np.full((len(counts), len(STATISTICS)), np.nan)
    if not len(values):
        return result
    part = isqrt(len(values))  # the search sums parts first, then one part only
    upto = np.cumsum(np.add.reduceat(counts, np.arange(0, len(values), part), axis=1, dtype=np.int64), axis=1)
    rows = np.flatnonzero(upto[:, -1])
    total = upto[rows, -1]
    result[rows, 0] = np.einsum("ij,j->i", counts, values)[rows] / total
    for column, q in enumerate(QUANTILES, start=1):
        rank = q / 100 * (total - 1)
        below = rank.astype(np.int64)
        ranks = (below, np.minimum(below + 1, total - 1))
        low, high = (values[_at(counts, upto, rows, rank, part)] for rank in ranks)
        result[rows, column] = low + (high - low) * (rank - below)
    return result


def _at(counts: Ints, upto: Ints, rows: Ints, rank: Ints, part: int) -> Ints:
    """Return by row the position of the value that has `rank` values before it."""
    whole = (upto[rows] <= rank[:, None]).sum(axis=1)
    before = np.where(whole > 0, upto[rows, whole - 1], 0)
    inside = np.minimum(whole[:, None] * part + np.arange(part), counts.shape[1] - 1)
    within = np.cumsum(counts[rows[:, None], inside], axis=1, dtype=np.int64)
    counted: Ints = whole * part + (within <= (rank - before)[:, None]).sum(axis=1)
    return counted


def replicates(size: int) -> int:
    """Return the number of draws: MOST, or fewer so that at most WORK units are drawn, but at least LEAST."""
    return int(np.clip(WORK // max(size, 1), LEAST, MOST))


def pairs(a: LoadedRun, b: LoadedRun) -> tuple[Ints, Ints]:
    """Return positions in both tables of the requests that ended with their last token, and count, in both runs."""
    ours, theirs = (run.counted[run.counted["done"]] for run in (a, b))
    _, left, right = np.intersect1d(ours["index"], theirs["index"], assume_unique=True, return_indices=True)
    return np.asarray(ours.index)[left], np.asarray(theirs.index)[right]


def of_requests(a: LoadedRun, b: LoadedRun) -> Intervals:
    """Return the intervals of every latency and of ITL; a request's part in both runs is drawn together."""
    left, right = pairs(a, b)
    size = max(len(left), *(len(gaps) for run in (a, b) for gaps in (run.table, run.times.gaps_s[0])))
    ours, theirs = (_of_requests(run, rows) for run, rows in ((a, left), (b, right)))
    return paired(ours, theirs, len(left), size)


def _of_requests(run: LoadedRun, rows: Ints) -> dict[str, UnitSample]:
    columns = {name: run.requests[name].to_numpy(dtype=np.float64)[rows] for name in LATENCIES}
    return {**{name: Values.of(column) for name, column in columns.items()}, "itl_s": Gaps.of(run, rows)}


def paired(a: Mapping[str, UnitSample], b: Mapping[str, UnitSample], units: int, size: int = 0) -> Intervals:
    """Compare samples of the same `units`, drawn together. `size`: numbers that a draw makes, if more than units."""
    draws = replicates(max(units, size))
    seed = np.random.SeedSequence(SEED)  # one for both: the same draws
    return _compared([Drawn(samples, at_random, units, max(units, size), seed) for samples in (a, b)], draws)


def of_steps(a: LoadedRun, b: LoadedRun) -> Intervals:
    """Return the intervals of step time and of the SHARES. Each run's steps are drawn on their own: none are paired."""
    draws, seeds = replicates(max(len(a.table), len(b.table))), np.random.SeedSequence(SEED).spawn(2)
    both = [
        Drawn(_of_steps(run), in_blocks, len(run.table), len(run.table), seed)
        for run, seed in zip((a, b), seeds, strict=True)
    ]
    return _compared(both, draws)


def _of_steps(run: LoadedRun) -> dict[str, UnitSample]:
    steps, ended = run.table, run.table["update_end_ns"]
    fleet = run.summary.get("per_server") or [{}] * run.summary.get("servers", 1)
    ends = [0, *steps.ends(len(fleet))]
    lasted = np.diff(ended, prepend=run.start_ns).astype(np.float64)  # their sum is the span
    firsts = [low for low, high in pairwise(ends) if high > low]
    lasted[firsts] = ended[firsts] - run.start_ns
    gpus = np.repeat([float(each.get("gpus", 1)) for each in fleet], np.diff(ends))
    busy = steps.lane("compute").astype(np.float64)
    working: Floats = np.sum([steps.lane(name) for name in PHASES if name != "await"], axis=0).astype(np.float64)
    computed = steps["padded_tokens"].astype(np.float64)
    sums = (busy * gpus, lasted * gpus), (working, lasted), (computed - steps["tokens"], computed)
    parts = [(above, _as_a_share(above, of, run.summary[name])) for name, (above, of) in zip(SHARES, sums, strict=True)]
    time = np.where(steps["rows"] > 0, busy / NS, np.nan)
    return {"step_time_s": Values.of(time), "": Ratios(parts, SHARES)}


def _as_a_share(above: Floats, of: Floats, share: float) -> Floats:
    """Scale what `above` is a part of so that the sums give the run's `share`: servers are there without steps, too."""
    return of * (above.sum() / of.sum() / share) if share else of


class Drawn(NamedTuple):
    """A set of samples of `units` units, and the method of drawing from them."""

    samples: Mapping[str, UnitSample]
    draw: Callable[[np.random.Generator, int, int], Ints]
    units: int
    size: int
    seed: np.random.SeedSequence

    def statistics(self, draws: int) -> dict[str, Floats]:
        """Return every sample's statistics over all draws, which are made some at a time."""
        columns: dict[str, list[Floats]] = {name: [] for name in self.samples}
        rng, rows = np.random.default_rng(self.seed), max(CHUNK // self.size, 1)
        for start in range(0, draws, rows):
            units = self.draw(rng, min(rows, draws - start), self.units)
            for name, sample in self.samples.items():
                columns[name].append(sample.statistics(units))
        return {
            f"{name}.{statistic}" if name else statistic: column
            for name, sample in self.samples.items()
            for statistic, column in zip(sample.names, np.concatenate(columns[name]).T, strict=True)
        }


def _compared(both: Sequence[Drawn], draws: int) -> Intervals:
    units = min(drawn.units for drawn in both)
    if units < FEWEST:
        return Intervals({}, units, 0)
    ours, theirs = (drawn.statistics(draws) for drawn in both)
    intervals = {name: interval(ours[name], theirs[name]) for name in ours}
    return Intervals({name: known for name, known in intervals.items() if known is not None}, units, draws)


def at_random(rng: np.random.Generator, rows: int, units: int) -> Ints:
    """Return how often each unit is drawn, for `rows` draws of as many units as there are."""
    return _counted(rng.integers(units, size=(rows, units)), units).astype(np.int32)


def in_blocks(rng: np.random.Generator, rows: int, units: int) -> Ints:
    """Return how often each unit is drawn, in enough blocks of about the cube root of `units` successive ones.

    The first unit follows the last (circular blocks), so that all are drawn equally often.
    """
    length = max(round(units ** (1 / 3)), 1)
    starts = rng.integers(units, size=(rows, -(-units // length)))
    change = _counted(starts, units + length + 1) - _counted(starts + length, units + length + 1)
    counts = np.cumsum(change, axis=1, dtype=np.int32)[:, : units + length]
    counts[:, :length] += counts[:, units:]
    return counts[:, :units]


def _counted(chosen: Ints, units: int) -> Ints:
    rows = len(chosen)
    own = chosen + np.arange(rows)[:, None] * units
    return np.bincount(own.ravel(), minlength=rows * units).reshape(rows, units)


def interval(a: Floats, b: Floats) -> Interval | None:
    """Return the middle CONFIDENCE of the replicates' differences; None if none has a value. Exact for equal runs."""
    known = ~(np.isnan(a) | np.isnan(b))
    a, b = a[known], b[known]
    if not len(a):
        return None
    return Interval(_middle(b - a), _middle(b / a - 1) if a.min() > 0 else None)


def _middle(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
