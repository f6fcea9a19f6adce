"""Bootstrap intervals: exact statistics of weighted samples, and the coverage that they promise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics import intervals
from analysis.statistics.intervals import FEWEST, LEAST, MOST, Drawn, Gaps, Ratios, Values
from cbsim.metrics.metrics import QUANTILES, distribution
from cbsim.record.record import RequestRow
from cbsim.record.tables import RequestTable

COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_weighted_statistics_are_those_of_the_repeated_values(drawn: list[tuple[float, int, int]]) -> None:
    """Property: counting a value k times is having it k times, percentiles linear, every row of counts on its own."""
    values, first, second = (np.array(column) for column in zip(*drawn, strict=True))
    found = Values.of(values.astype(float)).statistics(np.stack([first, second]))
    for row, counts in zip(found, (first, second), strict=True):
        repeated = np.repeat(values, counts)
        if not len(repeated):
            assert np.isnan(row).all()
            continue
        wanted = [repeated.mean(), *np.percentile(repeated, QUANTILES)]
        assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        told = distribution(values.astype(float), counts)
        assert row[1:].tolist() == [told[f"p{q}"] for q in QUANTILES]  # not only about: the very same


@st.composite
def token_tables(draw: st.DrawFn) -> tuple[list[list[int]], np.ndarray]:
    """Runs of steps of some requests, apart by at least a step, and the ends of all steps."""
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        step, runs = 0, []
        for gap, count in draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=3)):
            runs += [step + gap, count]
            step += gap + count
        requests.append(runs)
    last = max((sum(runs[-2:]) for runs in requests if runs), default=0)
    lasted = draw(st.lists(st.integers(1, 50), min_size=last + 1, max_size=last + 1))
    return requests, np.cumsum(lasted)


@given(token_tables(), st.data())
def test_gaps_of_a_draw_are_those_of_the_drawn_requests(table: tuple[list[list[int]], np.ndarray], data: Any) -> None:
    """Property: a request drawn k times brings each of its token gaps k times, shared steps or not."""
    requests, ended = table
    counts = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(requests), max_size=len(requests))))
    rows = RequestTable.of(
        [RequestRow(i, "", *[0] * 8, "length", "", -1, 0, 0, runs) for i, runs in enumerate(requests)]
    )
    run: Any = SimpleNamespace(times=SimpleNamespace(rows=rows), table={"update_end_ns": ended})
    found = Gaps.of(run, np.arange(len(rows))).statistics(counts[None])[0]
    gaps = []
    for runs, count in zip(requests, counts, strict=True):
        steps = [step for first, n in zip(runs[::2], runs[1::2], strict=True) for step in range(first, first + n)]
        gaps += list(np.diff(ended[steps]) / 1e9) * count
    if gaps:
        assert found == pytest.approx([np.mean(gaps), *np.percentile(gaps, QUANTILES)], rel=1e-9)
    else:
        assert np.isnan(found).all()


def _paired(a: np.ndarray, b: np.ndarray) -> intervals.Intervals:
    return intervals.paired({"x": Values.of(a)}, {"x": Values.of(b)}, len(a))


def _share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


@pytest.mark.parametrize(("spread", "statistic", "most"), [(0.2, "mean", 0.98), (1.0, "p50", 0.98), (0.2, "p50", 1.0)])
def test_paired_intervals_cover_the_truth(
    spread: float, statistic: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theory: B is A times a log-normal factor of median 1.1, so that is how medians differ; means differ by its mean.
    About 95 % of intervals hold the truth. For percentiles of runs that are much alike, more do: draws move the two
    neighbours of a rank in both runs, but not always together.
    """
    monkeypatch.setattr(intervals, "MOST", 500)
    rng, truth = np.random.default_rng(1), 1.1 * np.exp(spread**2 / 2 * (statistic == "mean")) - 1
    held = []
    for _ in range(400):
        a = rng.lognormal(0.0, 0.7, 80)
        paired = _paired(a, a * rng.lognormal(np.log(1.1), spread, 80)).by_metric
        low, high = paired[f"x.{statistic}"].relative or (1, 0)
        held.append(bool(low <= truth <= high))
    assert 0.91 <= _share(held) <= most


def _autoregressive(rng: np.random.Generator, n: int, memory: float) -> np.ndarray:
    noise, values = rng.normal(size=n), np.empty(n)
    values[0] = noise[0] / (1 - memory**2) ** 0.5
    for step in range(1, n):
        values[step] = memory * values[step - 1] + noise[step]
    return values + 20.0


def test_blocks_keep_what_single_steps_lose() -> None:
    """Theory: where a step depends on the one before, single draws make intervals far too narrow, blocks hardly."""
    rng = np.random.default_rng(2)
    hits: dict[Any, list[bool]] = {intervals.in_blocks: [], intervals.at_random: []}
    for _ in range(150):
        series = [_autoregressive(rng, 400, 0.6) for _ in range(2)]
        for draw, held in hits.items():
            seeds = np.random.SeedSequence(5).spawn(2)
            both = [
                Drawn({"": Values.of(values)}, draw, 400, 400, seed).statistics(400)
                for values, seed in zip(series, seeds, strict=True)
            ]
            interval = intervals.interval(both[0]["mean"], both[1]["mean"])
            assert interval is not None
            held.append(not interval.seen)
    assert 0.83 <= _share(hits[intervals.in_blocks]) <= 0.98
    assert _share(hits[intervals.at_random]) <= _share(hits[intervals.in_blocks]) - 0.1


def test_what_both_runs_share_cancels() -> None:
    """Theory: a constant shift of every request is a difference without doubt, however much requests vary."""
    a = np.random.default_rng(3).lognormal(0.0, 1.0, 60)
    found = _paired(a, a + 0.25).by_metric
    for one in found.values():
        assert one.delta == pytest.approx((0.25, 0.25), abs=1e-12)
        assert one.seen


def test_chunks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.random.default_rng(6).lognormal(0.0, 1.0, (2, 40))
    whole = _paired(a, b)
    monkeypatch.setattr(intervals, "CHUNK", 400)
    assert _paired(a, b) == whole


def test_a_change_from_nothing_has_no_relative_interval() -> None:
    a = np.array([0.0] * 20 + [1.0] * 20)
    found = _paired(a, a + 1.0).by_metric
    assert found["x.p50"].relative is None
    assert found["x.p50"].delta == pytest.approx((1.0, 1.0))
    assert found["x.p50"].seen


def test_too_few_units_have_no_interval() -> None:
    few = np.arange(1.0, FEWEST)
    assert _paired(few, few + 1) == intervals.Intervals({}, FEWEST - 1, 0)
    enough = np.arange(1.0, FEWEST + 1)
    assert _paired(enough, enough + 1).by_metric


def test_values_that_are_missing_are_left_out() -> None:
    """Requests of one token have no TPOT: NaN, and no part in its statistics."""
    some = Values.of(np.array([3.0, np.nan, 1.0]))
    assert some.statistics(np.array([[1, 5, 1]]))[0][:2].tolist() == [2.0, 2.0]
    assert np.isnan(some.statistics(np.array([[0, 5, 0]]))).all()


def test_ratios_are_sums_by_sums() -> None:
    below = np.array([2.0, 4.0])
    parts = ((np.array([1.0, 3.0]), below), (np.array([5.0, 0.0]), below))
    found = Ratios(parts, ("x", "y")).statistics(np.array([[1, 1], [0, 2], [0, 0]]))
    assert found[:2].tolist() == [[4 / 6, 5 / 6], [6 / 8, 0.0]]
    assert np.isnan(found[2]).all()


@given(st.integers(1, 200), st.integers(1, 5))
def test_blocks_are_whole_and_enough(units: int, rows: int) -> None:
    """Property: every draw has blocks of about the cube root of the units, as many as make up at least the units."""
    length = max(round(units ** (1 / 3)), 1)
    counts = intervals.in_blocks(np.random.default_rng(units), rows, units)
    assert counts.shape == (rows, units)
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == -(-units // length) * length).all()
    edges = counts - np.roll(counts, 1, axis=1)  # the first unit follows the last
    assert (np.abs(edges).sum(axis=1) <= 2 * -(-units // length)).all()


def test_every_step_is_drawn_as_often() -> None:
    """Theory: a block starts anywhere, the first and the last steps included; standard error of a mean of Poissons."""
    counts = intervals.in_blocks(np.random.default_rng(1), 4000, 50).mean(axis=0)
    assert counts == pytest.approx(np.full(50, counts.mean()), abs=5 / 4000**0.5)


@given(st.integers(1, 200), st.integers(1, 5))
def test_single_draws_are_as_many_as_there_are_units(units: int, rows: int) -> None:
    assert intervals.at_random(np.random.default_rng(units), rows, units).sum(axis=1).tolist() == [units] * rows


def test_work_is_bounded_but_never_to_nothing() -> None:
    assert intervals.replicates(48) == MOST
    assert LEAST < intervals.replicates(50_000) < MOST
    assert intervals.replicates(10**7) == LEAST


def test_an_interval_is_the_middle_of_the_differences() -> None:
    """Of 0 to 1000, one fortieth lies below its lower end and as many above its upper one."""
    found = intervals.interval(np.full(1001, 1.0), 1.0 + np.arange(1001.0))
    assert found is not None
    assert found.delta == pytest.approx((25.0, 975.0)) and found.relative == pytest.approx((25.0, 975.0))
