"""The measurement measures: every token of both servers is counted, and costs something."""

from __future__ import annotations

from cbsim.endpoint.bench import Comparison, Cost, Work, compare


def test_both_servers_are_measured() -> None:
    comparison = compare(Work(streams=4, tokens=50, itl_s=0.001), repeats=1)
    assert all(cost.us_per_token > 0 for cost in comparison.bare + comparison.endpoint)


def test_the_ratio_is_that_of_medians() -> None:
    bare, endpoint = [tuple(Cost(us, 0.5, 2.0) for us in times) for times in ((9.0, 10.0, 30.0), (24.0, 25.0, 26.0))]
    comparison = Comparison(bare, endpoint)
    assert comparison.ratio == 2.5
    assert comparison.text.splitlines()[-1] == "ratio          2.50 (bar 3.2)"
