"""Intervals by Student's t: the quantiles of printed tables, and intervals that cover what they say they do; paired
differences, and `cbsim contrast`: what a field changes, all else equal, and how many replicates it takes.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import sweep_tables
from support.calls import call, refused

from cbsim.stats import intervals
from cbsim.stats.intervals import MOST_SUMMED, enough, half_width, of_all, paired, t_interval, t_quantile

TABLE = {  # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    (1, 0.90): 3.078,
    (1, 0.975): 12.706,
    (1, 0.999): 318.309,
    (2, 0.95): 2.920,
    (3, 0.99): 4.541,
    (4, 0.975): 2.776,
    (5, 0.995): 4.032,
    (10, 0.975): 2.228,
    (19, 0.999): 3.579,
    (30, 0.95): 1.697,
    (61, 0.975): 2.000,
    (100, 0.999): 3.174,
}


@pytest.mark.parametrize(("degrees", "probability"), TABLE)
def test_quantiles_are_the_tables(degrees: int, probability: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(TABLE[degrees, probability], abs=5.1e-4)


@pytest.mark.parametrize("probability", [0.55, 0.9, 0.975, 0.999, 1 - 1e-6])
def test_closed_forms_and_the_other_side(probability: float) -> None:
    """One degree is Cauchy's distribution, two have a closed form, too; below one half the quantile is negative."""
    assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-9)
    share = 2 * probability - 1
    assert t_quantile(probability, 2) == pytest.approx(share * math.sqrt(2 / (1 - share**2)), rel=1e-9)
    assert t_quantile(1 - probability, 7) == pytest.approx(-t_quantile(probability, 7), rel=1e-9)


@given(st.floats(0.501, 1 - 1e-7))
def test_sum_and_expansion_meet(probability: float) -> None:
    """Where the one takes over from the other the quantile goes on falling, by about what it falls from there on."""
    before, at, after = (t_quantile(probability, MOST_SUMMED + step) for step in (-1, 0, 1))
    assert before >= at >= after
    assert at - after == pytest.approx(before - at, rel=0.05, abs=1e-8)


def test_one_value_says_nothing_and_equal_ones_all() -> None:
    assert t_interval([4.0], 0.95) == (4.0, -math.inf, math.inf)
    assert t_interval([4.0, 4.0, 4.0], 0.95) == (4.0, 4.0, 4.0)


def test_intervals_miss_as_often_as_they_say() -> None:
    """Of normal values, a tail of 5 % on each side: of 4,000 intervals 400 miss, give or take 4 standard errors."""
    rng, count = np.random.default_rng(5), 4000
    made = [t_interval(rng.normal(3.0, 2.0, 6).tolist(), 0.9) for _ in range(count)]
    for missed in (sum(at.low > 3 for at in made), sum(at.high < 3 for at in made)):
        assert abs(missed - 0.05 * count) < 4 * math.sqrt(0.05 * 0.95 * count)


def test_all_of_some_is_not_all_of_all() -> None:
    """Where each of n trials met it, the share is at least tail^(1/n): what n trials would all meet so often."""
    at = of_all(300, 0.01)
    assert at.low**300 == pytest.approx(0.01)
    assert (at.mean, at.high) == (1, 1)
    assert of_all(0, 0.01).low == 0


# -- paired ------------------------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_the_differences() -> None:
    """By hand: differences 1, 2, 3 have mean 2, deviation 1 and half a width of t / sqrt(3). Seeds without a partner
    count for nothing.
    """
    compared = paired({0: 11.0, 1: 22.0, 2: 33.0, 9: 0.0}, {2: 30.0, 1: 20.0, 0: 10.0, 7: 99.0}, 0.95)
    assert compared is not None
    half = t_quantile(0.975, 2) / math.sqrt(3)
    assert (compared.pairs, compared.first, compared.second, compared.mean) == (3, 22.0, 20.0, 2.0)
    assert (compared.low, compared.high) == pytest.approx((2 - half, 2 + half))


def test_no_pair_no_difference_and_one_no_interval() -> None:
    assert paired({0: 1.0}, {1: 1.0}, 0.95) is None
    single = paired({0: 3.0}, {0: 1.0}, 0.95)
    assert single is not None
    assert (single.mean, single.sign, single.known, single.needed(0.01, 0.95)) == (2.0, 0, False, None)


def test_less_than_a_millionth_is_no_difference() -> None:
    """Runs of equal decisions end nanoseconds apart where a step costs another one; that is nobody's advantage."""
    same = paired({0: 1000.0, 1: 2000.0}, {0: 1000.0005, 1: 1999.9999}, 0.95)
    assert same is not None and same.none and same.sign == 0
    differs = paired({0: 1000.0, 1: 2000.0}, {0: 1000.01, 1: 2000.02}, 0.5)
    assert differs is not None and not differs.none and differs.sign == -1


def test_pairs_gain_what_common_numbers_take_out() -> None:
    """Runs a = c + e and b = c + f with a variance of 100 in common and 1 each: unpaired differences vary 101 times as
    much as the pairs; the estimate is an F ratio, so it is within a factor of 1.3 with 2,000 pairs.
    """
    rng = random.Random(5)
    common = [rng.gauss(0, 10) for _ in range(2000)]
    first, second = ({seed: c + rng.gauss(0, 1) for seed, c in enumerate(common)} for _ in range(2))
    compared, same = paired(first, second, 0.95), paired(first, first, 0.95)
    assert compared is not None and compared.gain is not None and 101 / 1.3 < compared.gain < 101 * 1.3
    assert same is not None and same.gain is None


@pytest.mark.parametrize("deviation", [0.0, 0.3, 1.0, 7.0])
def test_enough_is_the_fewest(deviation: float) -> None:
    """One fewer is too wide; nobody waits for more than ten millions."""
    count = enough(deviation, 0.5, 0.95)
    assert count is not None and half_width(deviation, count, 0.95) <= 0.5
    assert count == 2 or half_width(deviation, count - 1, 0.95) > 0.5
    assert enough(1.0, 1e-9, 0.95) is None


def test_all_intervals_hold_at_once() -> None:
    """Bonferroni over twenty comparisons of equal settings: with 90 % confidence, none of them is called a difference
    in at least 90 % of 200 experiments, less three standard errors; each by itself at 90 % would fail most of them.
    """
    rng, trials, each = random.Random(3), 200, intervals.each(0.9, 20)

    def clean(confidence: float) -> bool:
        draws = ({s: rng.gauss(0, 1) for s in range(6)} for _ in range(40))
        differences = [paired(next(draws), next(draws), confidence) for _ in range(20)]
        return all(difference is not None and difference.sign == 0 for difference in differences)

    assert sum(clean(each) for _ in range(trials)) / trials >= 0.9 - 3 * math.sqrt(0.09 / trials)
    assert sum(clean(0.9) for _ in range(50)) < 15


# -- the command ------------------------------------------------------------------------------------------------------


def rows(replicates: int) -> list[Any]:
    """Twice the throughput from `b`, half of it noise in common; at a high rate nothing but noise of its own."""
    rng = random.Random(1)
    made: list[Any] = []
    for seed in range(replicates):
        common = rng.gauss(0, 20)
        for rate in (1, 2):
            for name, mean in (("a", 100.0), ("b", 200.0 if rate == 1 else 100.0)):
                throughput = mean + common + rng.gauss(0, 1)
                numbers = {"output_tokens_per_s": throughput, "ttft_s.p99": 1 / throughput}
                made.append(({"scheduler.name": name, "rate": rate}, seed, numbers))
    return made


def test_contrast_says_what_differs(tmp_path: Path) -> None:
    """Twice as much is better; the metric of latency is better when it is less; noise is told from nothing."""
    table = sweep_tables.table(tmp_path, rows(8))
    words = ("--by", "scheduler.name", "--metric", "throughput", "--metric", "ttft.p99", "--json")
    said = json.loads(call("contrast", table, *words).out)
    first, second, *latency = said["differences"]
    assert (first["settings"]["rate"], first["metric"]) == (1, "output_tokens_per_s")
    assert 97 < first["low"] < first["mean"] < first["high"] < 103
    assert first["gain"] > 10
    assert second["low"] < 0 < second["high"]
    assert latency[0]["high"] < 0
    assert said["confidence_each"] == pytest.approx(1 - 0.05 / 4)
    shown = call("contrast", table, *words[:-1]).out
    assert shown.count("better") == 2
    assert shown.count("cannot be told") == 2
    short = ("--by", "scheduler", *words[2:])  # a field as labels name it
    against_b = json.loads(call("contrast", table, *short, "--against", "b").out)
    assert against_b["differences"][0]["high"] < 0 and against_b["by"] == "scheduler.name"


def test_one_replicate_has_no_interval(tmp_path: Path) -> None:
    table = sweep_tables.table(tmp_path, rows(1))
    assert "give the sweep more replicates" in call("contrast", table, "--by", "rate", "--metric", "throughput").out
    (first, *_) = json.loads(call("contrast", table, "--by", "rate", "--metric", "ttft.p99", "--json").out)[
        "differences"
    ]
    assert first["low"] is None and first["mean"] is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--by", "scheduler.nam"), ("'scheduler.nam'", "scheduler.name, rate", "did you mean scheduler.name?")),
        (("--by", "loop"), ("'loop' is no field that changes",)),
        (("--by", "nam"), ("'nam' is no field that changes",)),
        (("--by", "rate", "--against", "3"), ("--against 3", "expected one of 1, 2")),
        (("--by", "rate", "--metric", "ttft.p98"), ("--metric ttft.p98", "ttft.p99")),
        (("--by", "rate", "--metric", "gootput"), ("--metric gootput", "unknown metric")),
        (("--by", "rate", "--metric", "goodput"), ("no run has slo.goodput_requests_per_s",)),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, words: tuple[str, ...], says: tuple[str, ...]) -> None:
    refused(call("contrast", sweep_tables.table(tmp_path, rows(2)), *words), 2, *says)


def test_what_is_no_table_of_a_sweep_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.parquet"
    text.write_text("hello")
    refused(call("contrast", text, "--by", "rate"), 2, str(text), "expected the table of a sweep")
    refused(call("pareto", tmp_path / "none.parquet"), 2, "none.parquet", "no such file")
    negative = sweep_tables.table(
        tmp_path, [({"rate": 1}, 0, {"ttft_s.p99": -5.0}), ({"rate": 2}, 0, {"ttft_s.p99": 1.0})]
    )
    refused(call("contrast", negative, "--by", "rate"), 2, "row 0: ttft_s.p99: got -5, must be finite and >= 0")
    failed = sweep_tables.table(tmp_path, [({"rate": 1}, 0, None), ({"rate": 2}, 0, None)])
    refused(call("pareto", failed), 2, "not one of 2 points is done")
