"""The search for a capacity, over servers whose answers are known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.holding import base

from cbsim.runs import result
from cbsim.scenario.scenario import Scenario
from cbsim.search import capacity
from cbsim.search import probe as terms
from cbsim.search.capacity import CAUSES, Capacity
from cbsim.search.probe import RATE, Over, Terms
from cbsim.sweeps.store import Run, Runs

LIMIT = ["ttft.mean<=1s"]
Answers = Callable[[float, int], float]


class Named(Over):
    """Loads that are only named: a value and a seed in place of a scenario."""

    still = False

    def alone(self, replicate: int) -> Any:
        return None

    def scenario(self, value: float, replicate: int) -> Any:
        return value, replicate


class Known(Runs):
    """Runs of a server whose mean TTFT follows from its load and the run's seed. Nothing is simulated."""

    def __init__(self, answer: Answers, lost: float = math.inf) -> None:
        self.answer, self.lost = answer, lost
        self.asked: list[tuple[float, int]] = []

    def of(self, scenarios: Sequence[Any], warmup: float) -> list[Run]:
        return [self.run(value, seed) for value, seed in scenarios]

    def run(self, value: float, seed: int) -> Run:
        self.asked.append((value, seed))
        answer = self.answer(value, seed)
        ttft = {"n": 18, "mean": answer, "p99": answer, "too_few_for": ["p95", "p99"]}
        failed = 3 if value > self.lost else 0
        by_status = {"refused": 0, "failed": failed, "unfinished": 0, "waiting": 0, "length": 20 - failed}
        summary = {"requests": 20, "requests_by_status": by_status, "ttft_s": ttft, "tpot_s": ttft, "e2e_s": {"n": 18}}
        summary |= {"slo": {"attainment": 1.0}}
        return Run(summary, ["seats: all are taken", "GPU bandwidth: few tokens"])


def noise(seed: int) -> float:
    """Standard normal, the same at all loads."""
    return float(np.random.default_rng(seed).normal())


def sought(runs: Runs, scenario: Scenario | None = None, field: str = RATE, slo: Sequence[str] = LIMIT) -> Capacity:
    scenario = base() if scenario is None else scenario
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(runs, Known):
            patch.setattr(capacity, "Over", Named)
        return capacity.search(scenario, field, terms.terms(scenario, slo, None), runs)


# -- the search -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(capacity=st.floats(0.1, 200), start=st.floats(0.5, 100))
def test_the_answer_stands_round_the_capacity(capacity: float, start: float) -> None:
    """Where a metric knows no chance, both ends are decided, the capacity lies between, and they are near enough."""
    found = sought(Known(lambda value, _: value / capacity), base(arrivals={"kind": "poisson", "rate_per_s": start}))
    assert found.holds is not None and found.fails is not None
    assert found.holds <= capacity * (1 + 1e-5)
    assert found.fails >= capacity * (1 - 1e-5)
    assert found.width == pytest.approx(found.fails / found.holds - 1)
    assert found.width <= 0.05
    assert not found.disorder
    assert len(found.probes) <= 30


@settings(max_examples=40)
@given(first=st.integers(0, 10**6), spread=st.floats(0.001, 0.3))
def test_no_load_outside_the_answer_is_decided_otherwise(first: int, spread: float) -> None:
    """With noise the answer lies between loads that are decided, holds no decided one, and says so if it is wide."""
    found = sought(Known(lambda value, at: value / 20 * math.exp(spread * noise(first + at))))
    for each in found.probes:
        assert each.holds is not False or found.fails is None or each.value >= found.fails
        assert not each.holds or found.holds is None or each.value <= found.holds
    if found.width is None or found.width > found.terms.width:
        assert any("--replicates 128" in notice for notice in found.notices)


def test_replicates_have_the_same_seeds_at_all_loads_and_grow_by_looks() -> None:
    """Common random numbers; and a load that is far from the capacity has the runs of a pilot alone."""
    runs = Known(lambda value, seed: value / 20 * (1 + 0.05 * noise(seed)))
    found = sought(runs)
    for each in found.probes:
        assert [seed for value, seed in runs.asked if value == each.value] == list(range(each.replicates))
        assert each.replicates in (terms.PILOTS, *found.terms.looks)
        assert (each.likely is None) == (each.replicates > terms.PILOTS)
    assert min(each.replicates for each in found.probes) == terms.PILOTS
    assert max(each.replicates for each in found.probes) >= terms.FIRST


def test_looks_grow_by_half_up_to_the_most() -> None:
    checks = terms.terms(base(), LIMIT, None).conditions
    assert Terms(checks, replicates=32).looks == (4, 6, 9, 14, 21, 32)
    assert Terms(checks, replicates=20).looks == (4, 6, 9, 14, 20)
    assert Terms(checks, replicates=3).looks == (3,)
    assert Terms(checks, still=True).looks == (1,)


def test_the_error_is_shared_by_sides_looks_and_conditions() -> None:
    two = terms.terms(base(), [*LIMIT, "e2e.mean<=9s"], None, replicates=9)
    assert two.looks == (4, 6, 9)
    assert sum(two.tail(look) for look in range(3)) * 2 * 2 == pytest.approx(0.05)
    assert two.tail(2) / two.tail(0) == pytest.approx(9 / 4)


def test_a_jump_is_found_and_nothing_is_interpolated_across_it() -> None:
    """Below 30 a tenth of the bound, above ten times: both ends are loads that were run, next to the jump."""
    found = sought(Known(lambda value, seed: (0.1 if value < 30 else 10.0) * (1 + 0.01 * noise(seed))))
    assert found.holds is not None and found.fails is not None and found.width is not None
    assert found.holds < 30 <= found.fails and found.width <= 0.05
    by_value = {each.value: each.holds for each in found.probes}
    assert (by_value[found.holds], by_value[found.fails]) == (True, False)


class Alone(Named):
    def alone(self, replicate: int) -> Any:
        return 0.0, replicate


def test_conditions_that_one_request_alone_breaks_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without load the mean is already beyond the bound: no load is tried. Else the search goes on as without."""
    monkeypatch.setattr("test_capacity.Named", Alone)
    runs = Known(lambda value, seed: (2.0 + value) * (1 + 0.01 * noise(seed)))
    found = sought(runs)
    assert {value for value, _ in runs.asked} == {0.0}
    assert (found.holds, found.fails) == (None, 0.0)
    assert "holds     none\nfails     one request alone: TTFT mean exceeds 1.00 s (2.01 s)" in str(found)
    held = Known(lambda value, seed: (0.5 + value / 40) * (1 + 0.01 * noise(seed)))
    assert (sought(held).holds or 0) > 15 and held.asked[0][0] == 0.0


def test_whole_numbers_end_side_by_side() -> None:
    """Users are counted: between 23 and 24 there is none, whatever the width."""
    users = {"kind": "closed_loop", "users": 5}
    runs = Known(lambda value, _: value / 23.5)
    found = sought(runs, base(arrivals=users), "workload.arrivals.users")
    assert (found.holds, found.fails) == (23, 24)
    assert all(isinstance(each.value, int) for each in found.probes)


def test_a_field_that_means_less_load_is_searched_downwards() -> None:
    """Thinking longer, users ask less: more than 8 s hold, less do not."""
    closed = base(arrivals={"kind": "closed_loop", "users": 5, "think_s": 1.0})
    runs = Known(lambda value, _: 8 / value)
    found = sought(runs, closed, "workload.arrivals.think_s")
    assert found.fails is not None and found.holds is not None
    assert found.fails < 8 <= found.holds * (1 + 1e-5)
    assert found.width == pytest.approx(found.holds / found.fails - 1)


def test_what_always_holds_has_no_end_and_says_so() -> None:
    found = sought(Known(lambda *_: 0.5))
    assert (found.holds, found.fails, found.width, found.binds) == (16380, None, None, None)
    assert found.notices[0] == "no load larger than 16380 requests/s was tried: 11 loads were tried"
    assert "fails     none of the loads from 16 to 16380 requests/s" in str(found)


def test_what_never_holds_has_no_beginning() -> None:
    found = sought(Known(lambda *_: 2.0))
    assert (found.holds, found.fails) == (None, 0.01562)
    assert found.binds is not None


def test_lost_requests_fail_a_load_and_say_so() -> None:
    """Whatever the metric is: who was not served has none."""
    found = sought(Known(lambda *_: 0.5, lost=40))
    assert found.holds is not None
    assert found.holds <= 40 <= (found.fails or 0)
    assert found.binds is not None
    assert (found.binds.word, found.binds.sentences[0]) == ("refused", "12 of 80 requests failed")


def test_disorder_is_a_warning() -> None:
    """16 fails and is better than less load: the answer stands below both, and the rest is said."""
    found = sought(Known(lambda value, _: 3.0 if 5 < value < 10 else value / 10))
    assert found.holds is not None
    assert found.holds < 5 < (found.fails or 0)
    assert not found.numbers()["monotone"]
    assert any(text.startswith("ttft.mean is 3 at ") and text.endswith("1.6 at 16") for text in found.disorder)
    assert "WARNING   not monotone: " in str(found)


def test_a_metric_in_the_wrong_order_is_a_warning() -> None:
    """All loads below 20 hold, but at less load the metric is worse, which no noise explains."""
    slow = base(arrivals={"kind": "poisson", "rate_per_s": 4})
    found = sought(Known(lambda value, _: 2.0 if value > 20 else 0.9 if value < 15 else 0.1), slow)
    assert "ttft.mean is 0.9 at 4 and 0.1 at 16" in found.disorder


def test_all_within_the_slo_needs_enough_requests() -> None:
    """18 requests count of each run: four runs of which all keep the limit do not show 99.5 %."""
    runs, scenario = Known(lambda *_: 0.5), base()
    for share, replicates, holds in (("99.5%", 32, None), ("85%", 4, True)):
        wanted = terms.terms(scenario, [], share, replicates=replicates)
        made = terms.Prober(Named(scenario, RATE).scenario, "requests/s", wanted, runs).look(
            16.0, len(wanted.looks) - 1
        )
        assert (made.holds, made.replicates) == (holds, replicates)
        assert made.intervals[0].low == pytest.approx(wanted.tail(len(wanted.looks) - 1) ** (1 / (replicates * 18)))


def test_what_the_interval_covers_and_short_runs_are_said() -> None:
    """18 requests are too few for a p99; a bound in milliseconds without a unit is doubted."""
    found = sought(Known(lambda value, seed: value / 20 * (1 + 0.01 * noise(seed))), slo=["ttft.p99<=1s"])
    assert "ttft.p99 needs 368 requests that count, runs have 18" in found.notices
    assert found.notices[0] == "the confidence covers the draw of the requests, not the error of the cost model"
    doubted = sought(Known(lambda value, _: value / 20), slo=["ttft.mean<=1000"])
    assert doubted.notices[-1] == "ttft.mean<=1000; a bound without a unit is in seconds: is 1000ms meant?"
    assert "1000ms" not in str(sought(Known(lambda value, _: value), slo=["ttft.mean<=1000"]).notices), "1,024 fails"


def test_words_for_what_binds_are_those_of_the_sentences() -> None:
    """Every cause that result.py can begin a sentence with is a key here, or one of the queue's."""
    source = Path(result.__file__).read_text()
    assert [cause for cause in CAUSES if f"{cause}: " not in source and f'"{cause}"' not in source] == []
    found = sought(Known(lambda value, _: value / 20))
    assert found.binds is not None
    assert (found.binds.word, found.binds.sentences[1]) == ("queue", "GPU bandwidth: few tokens")
    slow = sought(Known(lambda value, _: value / 20), slo=["tpot.mean<=1s"])
    assert slow.binds == ("GPU", ("GPU bandwidth: few tokens",)), "no wait for a slot makes a step longer"


def test_the_numbers_are_json() -> None:
    found = sought(Known(lambda value, seed: value / 20 * (1 + 0.02 * noise(seed))), slo=LIMIT)
    made = json.loads(json.dumps(found.numbers(), allow_nan=False))
    keys = {
        "field",
        "holds",
        "fails",
        "confidence",
        "replicates",
        "requests",
        "width",
        "conditions",
        "binds",
        "unit",
        "reason",
    }
    assert keys | {"monotone", "probes", "notices", "name", "loop"} == set(made)
    assert made["replicates"] == sum(each["replicates"] for each in made["probes"])
    assert made["probes"][0].keys() == {"value", "replicates", "requests", "holds", "likely", "reason", "values"}
