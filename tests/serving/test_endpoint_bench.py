"""The measurement measures: every token of every server is counted, and costs something."""

from __future__ import annotations

from cbsim.serving.bench import BARE, SERVERS, Comparison, Cost, Work, compare


def test_all_servers_are_measured() -> None:
    comparison = compare(Work(streams=4, tokens=50, itl_s=0.001), repeats=1)
    assert list(comparison.costs) == list(SERVERS)
    assert all(cost.us_per_token > 0 for costs in comparison.costs.values() for cost in costs)


def test_the_ratio_is_that_of_medians() -> None:
    times = {BARE: (9.0, 10.0, 30.0), "scripted": (24.0, 25.0, 26.0)}
    comparison = Comparison({name: [Cost(us, 0.5, 1.0, 2.0) for us in each] for name, each in times.items()})
    assert comparison.ratios == {BARE: 1.0, "scripted": 2.5}
    assert str(comparison).splitlines()[2].split()[:3] == ["scripted", "25.0", "2.50"]
