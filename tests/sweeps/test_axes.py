"""The points of a sweep file: rules of values, products, fields that advance together, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.errors import ScenarioError
from cbsim.sweeps import sweep_file
from cbsim.sweeps.sweep import of
from cbsim.sweeps.sweep_file import LogRange, Range


def settings(**fields: Any) -> list[dict[str, Any]]:
    return [dict(place) for place, _ in sweep_file.read({"scenario": "8k_b32", **fields})[0].settings()]


@given(low=st.integers(-50, 50), step=st.integers(1, 9), more=st.integers(1, 200))
def test_a_range_has_its_ends_if_it_reaches_them(low: int, step: int, more: int) -> None:
    """Whole numbers come out as whole numbers, as `range` has them; the highest is included."""
    made = Range(low=low, high=low + more, step=step).values()
    assert list(made) == list(range(low, low + more + 1, step))
    assert all(isinstance(value, int) for value in made)


@given(low=st.floats(0.01, 100), ratio=st.floats(1.5, 1000), count=st.integers(2, 50))
def test_a_count_of_values_begins_and_ends_where_it_says(low: float, ratio: float, count: int) -> None:
    """At equal distances, or at equal ratios."""
    plain, log = Range(low=low, high=low * ratio, count=count), LogRange(low=low, high=low * ratio, count=count)
    for made in (plain.values(), log.values()):
        assert len(made) == count
        assert (made[0], made[-1]) == (pytest.approx(low), pytest.approx(low * ratio))
    assert [b - a for a, b in pairwise(plain.values())] == pytest.approx(
        [low * (ratio - 1) / (count - 1)] * (count - 1)
    )
    assert [b / a for a, b in pairwise(log.values())] == pytest.approx([ratio ** (1 / (count - 1))] * (count - 1))


@given(first=st.integers(1, 100), factor=st.integers(2, 10), powers=st.integers(0, 12))
def test_a_factor_reaches_its_last_power(first: int, factor: int, powers: int) -> None:
    """No power is lost to rounding, and whole numbers stay whole."""
    high = first * factor**powers + first / 2
    made = LogRange(low=first, high=high, factor=factor).values()
    expected = [first * factor**i for i in range(powers + 1)]
    assert list(made) == pytest.approx(expected)
    assert [value for value in made if value < 10**11] == [value for value in expected if value < 10**11]


def test_axes_multiply_and_the_last_changes_first() -> None:
    made = settings(axes={"workload.requests": [1, 2], "seed": {"range": {"low": 0, "high": 2, "step": 1}}})
    assert [tuple(place.values()) for place in made] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


def test_fields_of_an_axis_advance_together_and_points_are_as_written() -> None:
    axes = [
        {"model": ["a", "b"], "hardware": ["x", "y"]},
        {"points": [{"scheduler.name": "vllm"}, {"scheduler.name": "sglang", "seed": 3}]},
    ]
    made = settings(axes=axes, loop=["sync"])
    assert [(place["model"], place["hardware"]) for place in made] == [("a", "x")] * 2 + [("b", "y")] * 2
    assert [place.get("seed") for place in made] == [None, 3, None, 3]
    assert {place["loop.mode"] for place in made} == {"sync"}


def test_points_that_set_nothing_else_have_what_is_set() -> None:
    """A field of `set` that only some points set counts at the others."""
    fields = {"scenario": "8k_b32", "set": {"seed": 7}, "axes": {"points": [{"seed": 1}, {"workload.requests": 2}]}}
    assert [point.scenario.seed for point in of(*sweep_file.read({**fields, "loop": ["sync"]}))] == [1, 7]


def test_a_whole_part_may_leave_a_field_to_another_statement() -> None:
    """A field that the values of a whole part do not state is not stated twice, nor is one of a name."""
    axes = [{"scheduler": [{"name": "vllm"}, {"name": "fcfs"}]}, {"hardware": ["h100"], "hardware.hbm_gb_s": [2000]}]
    read = sweep_file.read({"scenario": "8k_b32", "set": {"scheduler.max_num_seqs": 4}, "axes": axes})[0]
    assert len(list(read.settings())) == 2
    assert len(settings(axes=[{"points": [{"scheduler": {"name": "vllm"}, "scheduler.max_num_seqs": 2}]}])) == 1


def test_points_are_counted_before_they_are_made() -> None:
    axes = {name: {"range": {"low": 1, "high": 1e4, "step": 1}} for name in ("seed", "workload.requests")}
    with pytest.raises(ScenarioError, match=r"axes: give 100,000,000 points, must be <= 1,000,000"):
        settings(axes=axes)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"axes": {"seed": {"range": {"low": 3, "high": 1, "step": 1}}}}, "axes.seed.range.high: got 1, must be > 3"),
        (
            {"axes": {"seed": {"range": {"low": 1, "high": 3}}}},
            "seed.range.step: got neither, expected one of step and",
        ),
        ({"axes": {"seed": {"log": {"low": 0, "high": 3, "count": 3}}}}, "axes.seed.log.low: got 0.*must be > 0"),
        ({"axes": {"seed": {"log": {"low": 1, "high": 3, "factor": 1}}}}, "axes.seed.log.factor: got 1, must be > 1"),
        ({"axes": {"seed": {"range": {"low": 0, "high": 1, "step": 1e-9}}}}, "gives more than 100,000 values"),
        ({"axes": {"seed": {"range": {"low": 0, "top": 1}}}}, r"axes.seed.range.top: unknown field"),
        ({"axes": {"seed": []}}, "axes.seed: got an empty list"),
        ({"axes": [{"seed": []}]}, "axes.0.seed: got an empty list"),
        ({"axes": {"points": {"seed": 1}}}, r"axes.points: got {'seed': 1}, expected a list"),
        (
            {"axes": {"seed": {"log": {"low": 1, "high": 3, "factor": 1.0000001}}}},
            "axes.seed.log.factor: got 1.0000001, gives more than 100,000 values",
        ),
        (
            {"axes": {"seed": {"range": {"low": 1.0000002, "high": 1.0000001, "count": 2}}}},
            "axes.seed.range.high: got 1.0000001, must be > 1.0000002",
        ),
        ({"set": {"seed": 7}, "axes": {"seed": [1, 2]}}, "sweep: set: seed: is set by axes or loop, too; expected one"),
        ({"set": {"seed": 7}, "axes": {"points": [{"seed": 1}, {"seed": 2}]}}, "set: seed: is set by axes or loop"),
        ({"set": {"loop.mode": "sync"}, "loop": ["async"]}, "set: loop.mode: is set by axes or loop"),
        ({"set": {"loop": {"mode": "sync"}}, "loop": ["async"]}, "set: loop.mode: is set by axes or loop"),
        ({"set": {"loop": {"mode": "sync"}}, "axes": {"loop.mode": ["async"]}}, "set: loop.mode: is set by axes or"),
        (
            {"set": {"kv.block_size": 4}, "axes": {"points": [{"seed": 1}, {"kv": {"block_size": 8}}]}},
            "set: kv.block_size: is set by axes or loop, too",
        ),
        (
            {"set": {"cost.cpu.prepare.base_s": 1}, "axes": {"cost.cpu": [{"prepare": {"base_s": 2}}]}},
            "set: cost.cpu.prepare.base_s: is set by axes or loop, too",
        ),
        ({"axes": [{"a.b": [1]}, {"a": [{}, {"b": 2}]}]}, "axes: a.b is set by axes 0 and 1"),
        ({"axes": [{"a": [{}, {"b": 2}]}, {"a.b": [1]}]}, "axes: a.b is set by axes 1 and 0"),
        ({"axes": {"points": [{"a.b": 1}, {"a": {"b": 2}, "a.b": 1}]}}, "a.b is set twice by point 1, expected once"),
        ({"axes": {"loop": [{"mode": "sync"}]}}, "loop is no axis, expected loop.mode"),
        ({"scenario": 5}, "scenario: got 5, expected a name, a file or fields"),
        ({"axes": [{"a": [1, 2], "b": [1]}]}, "as many values; got a 2, b 1"),
        ({"axes": [{"a": [1]}, {"a": [2]}]}, "axes: a is set by axes 0 and 1"),
        ({"axes": [{"points": [{"a": 1}], "b": [1]}]}, "axes.0.b: stands beside points"),
        ({"axes": {"seed": [1, 2]}, "replicates": 2}, "replicates: take seeds of their own"),
        ({"axes": {"loop.mode": ["sync"]}, "loop": ["async"]}, "loop: is set by an axis, too"),
        ({"loop": ["both"]}, "loop.0: got 'both', expected one of sync, async"),
        ({"replicates": 0}, "replicates: got 0, must be >= 1"),
        ({"keep": "most"}, "keep: got 'most', expected one of summary, tables, all"),
        ({"axis": {}}, "axis: unknown field; did you mean axes"),
    ],
)
def test_what_cannot_be_swept_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        settings(**fields)


def test_no_value_is_infinite() -> None:
    assert all(math.isfinite(value) for value in LogRange(low=1e-300, high=1e30, count=7).values())
