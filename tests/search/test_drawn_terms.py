"""Answers that count how uncertain the terms of their cost are: draws of the terms, each answered."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import call, refused
from support.holding import SLOW

import cbsim
from cbsim.errors import ScenarioError
from cbsim.metrics.checks import objective
from cbsim.scenario import scenario as scenarios
from cbsim.scenario import terms
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.terms import Term, TermsFile
from cbsim.search import capacity, probe, racing, tune
from cbsim.search.probe import RATE, Over
from cbsim.search.racing import Goal
from cbsim.stats import intervals
from cbsim.sweeps.store import Run, Runs, Store
from cbsim.sweeps.work import Here

Z80, SPREAD = NormalDist().inv_cdf(0.9), math.log(1.25)
OVERHEAD = {"step_overhead_s": Term(value=0.05, low=0.04, high=0.0625)}


def server(folder: Path, of: dict[str, Term] = OVERHEAD, **cost: Any) -> dict[str, Any]:
    """A server of one seat with terms of intervals."""
    about: dict[str, Any] = {"name": "own", "about": "a server", "kind": "roofline", "calibrated": "2026-11-26"}
    about |= {"backend": "vllm", "systems": ("H200-SXM",), "models": ("Llama-3.1-8B",), "tensor_parallel": (1,)}
    about |= {"users": (1, 8), "tables": {}, "weights": ("bfloat16",), "routing": "balanced", "fastest": True}
    file = TermsFile(**about, terms=of, curves={})
    (folder / "own.yaml").write_text(terms.dump(file))
    return {**SLOW, "cost": {"kind": "roofline", "terms": str(folder / "own.yaml"), **cost}}


def written(folder: Path, of: dict[str, Any]) -> Path:
    path = folder / "server.yaml"
    path.write_text(json.dumps(of))
    return path


# -- draws ------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 40), st.integers(0, 99), st.floats(1e-6, 2), st.floats(0, 1), st.floats(1, 30))
def test_draws_have_the_median_and_the_tails_of_the_interval(
    count: int, seed: int, value: float, low: float, high: float
) -> None:
    """Each tenth of the distribution has its share of draws; all are positive, and the seed gives their order."""
    ends = value * low, value * high
    made = terms.draws("step_s", value, ends, count, seed)
    assert made == terms.draws("step_s", value, ends, count, seed) and min(made) > 0
    assert sum(each < ends[0] for each in made) <= count * 0.1 + 0.5
    assert sum(each > ends[1] * (1 + 1e-9) for each in made) <= count * 0.1 + 0.5
    assert min(made) <= median(made) * (1 + 1e-9)
    assert count % 2 == 0 or median(made) == pytest.approx(value)
    assert max(terms.draws(terms.EFFICIENCIES[0], min(value, 1), (0.0, 1.0), count, seed)) <= 1


def test_a_term_has_the_same_draws_in_every_server_and_the_scenario_overrides_it(tmp_path: Path) -> None:
    """Candidates are compared with the same draws. A term that the scenario gives is not drawn; a factor is."""
    of = OVERHEAD | {
        "launch_s_per_layer": Term(value=1e-4, low=5e-5, high=2e-4),
        "cpu.factor": Term(value=2, low=1, high=4),
    }
    plain, other = (cbsim.load(server(tmp_path, of, **more)) for more in ({}, {"launch_s_per_layer": 7e-5}))
    made, again = scenarios.drawn(plain, 4), scenarios.drawn(other, 4)
    overheads = [each.cost.step_overhead_s for each in made]  # type: ignore[union-attr]
    assert overheads == [each.cost.step_overhead_s for each in again]  # type: ignore[union-attr]
    assert len(set(overheads)) == 4 and min(overheads) < 0.05 < max(overheads)
    assert {each.cost.launch_s_per_layer for each in again} == {7e-5}  # type: ignore[union-attr]
    factors = [each.cost.cpu.factor / plain.cost.cpu.factor for each in made]
    assert math.prod(factors) == pytest.approx(1) and max(factors) > 1.5
    assert scenarios.drawn(cbsim.load(plain, {"seed": 2}), 4) != made


def test_a_pool_of_a_fleet_has_its_own_terms(tmp_path: Path) -> None:
    pools = [{"count": 2}, {"server": {"cost": {"kind": "constant", "step_s": 0.05}}}]
    fleet = cbsim.load({**server(tmp_path), "fleet": {"pools": pools, "router": {"name": "round_robin"}}})
    first, second = scenarios.drawn(fleet, 2)
    assert first.servers[0] == first.servers[1] != second.servers[0]
    assert first.servers[2] == second.servers[2] == fleet.servers[2]


# -- the interval -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["a", "abcd"])
def test_the_joint_interval_holds_the_answer_with_the_true_terms(names: str) -> None:
    """A capacity that is inversely proportional to terms: the confidence is reached over draws and hidden terms."""
    random, within = np.random.default_rng(0), 0
    for seed in range(500):
        drawn = [terms.draws(name, 1.0, (1 / 1.25, 1.25), 8, seed) for name in names]
        answers = [-math.log(math.prod(of)) for of in zip(*drawn, strict=True)]
        own = random.normal(0, 0.02)  # of replicates, the same in all draws
        at, _ = intervals.joint([(each + own - 0.04, each + own + 0.04) for each in answers], 0.95)
        within += at.low <= random.normal(0, SPREAD / Z80 * len(names) ** 0.5) <= at.high
    assert within / 500 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 500)


def test_the_share_is_that_of_the_squared_width() -> None:
    both = [(1.0, 3.0), (3.0, 5.0)]
    half = intervals.t_quantile(0.975, 1) * math.sqrt(2) * math.sqrt(1.5)
    at, share = intervals.joint(both, 0.95)
    assert at == pytest.approx((3, 3 - math.hypot(half, 1), 3 + math.hypot(half, 1)))
    assert share == pytest.approx(half**2 / (half**2 + 1))
    assert intervals.joint([(1.0, 3.0)] * 2, 0.95) == ((2, 1, 3), 0)
    assert intervals.joint([(2.0, 2.0)] * 2, 0.95) == ((2, 2, 2), 0)


class Inverse(Runs):
    """Runs of a server whose mean TTFT is its load times a term, with noise by seed: a second at the inverse."""

    def __init__(self, noise: float, field: str = "rate_per_s") -> None:
        self._noise, self._field = noise, field

    def of(self, scenarios: Sequence[Scenario], warmup: float) -> list[Run]:
        return [self._run(each) for each in scenarios]

    def _run(self, of: Scenario) -> Run:
        noise = math.exp(self._noise * np.random.default_rng(of.seed).normal())
        arrivals, cost = of.workload.arrivals, of.cost  # type: ignore[union-attr]
        load = 1 / arrivals.think_s if self._field == "think_s" else getattr(arrivals, self._field)  # type: ignore
        ttft = {"n": 20, "mean": load * cost.step_overhead_s * noise}  # type: ignore[union-attr]
        by_status = dict.fromkeys(("refused", "failed", "unfinished", "waiting"), 0)
        return Run({"requests": 20, "requests_by_status": by_status, "ttft_s": ttft, "e2e_s": ttft}, [])


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_capacity_that_is_inverse_to_a_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    """The interval is the closed form's about 1 / 50 ms: of the draws' known spread, and of the runs."""
    monkeypatch.setattr(Over, "still", noise == 0)
    monkeypatch.setattr(Over, "alone", lambda *_: None)
    of = cbsim.load(server(tmp_path))
    limits = [probe.terms(of, ["ttft.mean<=1s"], None, width=0.02, draws=draws) for draws in (0, 8)]
    alone, found = (capacity.search(of, RATE, each, Inverse(noise)) for each in limits)
    places = [NormalDist().inv_cdf((each + 0.5) / 8) * SPREAD / Z80 for each in range(8)]
    half = intervals.half_width(np.std(places, ddof=1), 8, 0.95) * 3
    assert found.holds and found.fails and found.drawn and alone.holds and alone.fails
    assert found.holds == pytest.approx(20 * math.exp(-half), rel=0.02)
    assert found.fails == pytest.approx(20 * math.exp(half), rel=0.02)
    assert found.drawn.fitted == (alone.holds, alone.fails)
    assert found.drawn.share == pytest.approx(1 - (math.log(found.fails / found.holds) / 0.02) ** -2, abs=0.01)
    assert "8 draws by seed 0" in str(found) and "of the terms" in " ".join(found.notices)
    assert found.numbers()["confidence"] == 0.95 and found.numbers()["terms"]["share"] == found.drawn.share


@pytest.mark.parametrize(("field", "start"), [("users", 8), ("think_s", 0.1)])
def test_ends_are_rounded_outwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, start: float) -> None:
    """Users are whole numbers; of a time between requests more is less load."""
    monkeypatch.setattr(Over, "still", True)
    monkeypatch.setattr(Over, "alone", lambda *_: None)
    arrivals = {"kind": "closed_loop", "users": 8, "think_s": 0.1} | {field: start}
    of = cbsim.load(server(tmp_path), {"workload.arrivals": arrivals})
    limits = probe.terms(of, ["ttft.mean<=1s"], None, width=0.02, draws=4)
    found = capacity.search(of, f"workload.arrivals.{field}", limits, Inverse(0.0, field))
    assert found.holds and found.fails and found.width and found.drawn
    every = [end for pair in found.drawn.draws for end in pair if end]
    if field == "users":
        assert isinstance(found.holds, int) and isinstance(found.fails, int)
        assert found.holds < min(every) and max(every) < found.fails
    else:
        assert found.fails < min(every) and max(every) < found.holds


def test_an_end_that_a_draw_lacks_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a draw of the terms leaves no load that holds, the answer has none, and is the range of the draws."""
    monkeypatch.setattr(Over, "still", True)
    monkeypatch.setattr(Over, "alone", lambda *_: None)
    of = cbsim.load(server(tmp_path))
    limits = probe.terms(of, ["ttft.mean<=1s"], None, draws=2)
    worse = cbsim.load(of, {"cost.terms": None, "cost.calibrated": None, "cost.step_overhead_s": 1e6})
    monkeypatch.setattr(capacity, "drawn", lambda *_: [of, worse])
    found = capacity.search(of, RATE, limits, Inverse(0.0))
    assert found.holds is None and found.width is None and found.drawn and found.drawn.share is None
    assert "their range" in str(found)


def test_a_candidate_is_left_that_is_the_best_with_some_draw() -> None:
    """Two settings, the second better only where the term is large: it stays, and the difference's interval has 0."""
    more = objective("output_tokens_per_s", "")
    goal = Goal(more, (), 0.95, 5)

    def outcome(of: float) -> racing.Outcome:
        tokens = (10.0, of)

        def measure(chosen: Sequence[int], seeds: range) -> dict[int, list[racing.Numbers | str]]:
            return {i: [{more.name: tokens[i] + 0.001 * seed * i} for seed in seeds] for i in chosen}

        return racing.search(2, measure, goal)

    fitted, draws = outcome(9.0), [outcome(of) for of in (8.0, 8.5, 9.0, 11.0)]
    made = racing.with_draws(fitted, draws)
    assert fitted.won and fitted.left == [0]
    assert made.best == 0 and made.left == [0, 1] and not made.won
    ahead, over = made.against(1), made.joint(1)
    assert ahead.low < 0 < ahead.high and over is not None and over[1] > 0.99
    assert racing.with_draws(fitted, draws[:3]).won


# -- commands ---------------------------------------------------------------------------------------------------------


def test_capacity_with_terms_says_what_they_add(tmp_path: Path) -> None:
    """One seat and four steps of a request: five requests a second with the term's own value."""
    path, store = written(tmp_path, server(tmp_path)), tmp_path / "store"
    words = (path, "--check", "ttft.mean<=1s", "--store", store, "--jobs", 1, "--width", "10%")
    plain = json.loads(call("capacity", *words, "--json").out)
    said = call("capacity", *words, "--with-terms", "--draws", 3, "--json")
    made = json.loads(said.out)
    assert said.status == 0 and "terms" not in plain
    assert made["terms"]["fitted"] == [plain["holds"], plain["fails"]] and len(made["terms"]["draws"]) == 3
    assert made["holds"] < plain["holds"] and made["fails"] > plain["fails"] and made["terms"]["share"] > 0.5
    shown = call("capacity", *words, "--draws", 3).out
    assert f"terms     3 draws by seed {made['terms']['seed']} make " in shown


def test_tune_with_terms_says_which_settings_draws_choose(tmp_path: Path) -> None:
    of, store = (
        cbsim.load(server(tmp_path), {"workload.requests": 8, "workload.arrivals.rate_per_s": 16}),
        tmp_path / "store",
    )
    goal = Goal(objective("min:ttft.mean", ""), (), 0.95, 2, 3)
    points = tune.candidates(of, [], {"scheduler.max_num_seqs": [1, 4]}, goal)
    made = tune.tune(points, goal, Runs(Store(store), Here()))
    assert len([*(store / "runs").glob("*/*")]) == 2 * (1 + 3)
    assert made.best == {"scheduler.max_num_seqs": 4}
    said = tune.study(made)
    assert any(line.startswith("Best with 3 draws of the terms by seed") for line in said.findings)
    assert "of the terms" in said.findings[-1] and said.data["confidence"] == 0.95
    assert made.outcome.against(0).low < made.outcome.against(0).high


@pytest.mark.parametrize(("command", "loose"), [*product(("capacity", "tune"), (SLOW["cost"], {"kind": "roofline"}))])
def test_draws_need_terms_with_intervals(tmp_path: Path, command: str, loose: dict[str, Any]) -> None:
    path = written(tmp_path, {**SLOW, "cost": loose})
    more = ["--knob", "scheduler.max_num_seqs=1,4", "--maximise", "throughput"] if command == "tune" else []
    words = (path, "--check", "ttft.mean<=1s", "--store", tmp_path / "store", "--jobs", 1, *more, "--with-terms")
    refused(
        call(command, *words), 2, "cost.terms: got nothing, draws need terms with intervals", "--set cost.terms=FILE"
    )


def test_one_draw_shows_no_spread(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="draws: got 1, must be >= 2"):
        cbsim.capacity(server(tmp_path), ["ttft.mean<=1s"], draws=1)
