"""`cbsim pareto`: no point dominates one of the frontier; every other is dominated, for sure or perhaps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import sweep_tables
from support.calls import call, refused

from cbsim.metrics.checks import objective, parse
from cbsim.stats import pareto
from cbsim.stats.pareto import DOMINATED, FRONTIER, MISSING, OUT, PERHAPS, Question
from cbsim.stats.replicated import Configuration, Replicated

X, Y = objective("output_tokens_per_s_per_user", "--x"), objective("output_tokens_per_s_per_gpu", "--y")
TTFT, COST = "ttft_s.p99", "cost.usd_per_million_output_tokens"


def sweep(points: list[dict[int, dict[str, float]]]) -> Replicated:
    """Configurations with these runs, by seed."""
    configurations = [Configuration({"loop": "sync", "n": i}, runs) for i, runs in enumerate(points)]
    metrics = dict.fromkeys(name for runs in points for numbers in runs.values() for name in numbers)
    return Replicated(Path("t.parquet"), ["loop", "n"], list(metrics), configurations, 0)


def verdicts(points: list[dict[int, dict[str, float]]], question: Question) -> list[str]:
    return [each.verdict for each in pareto.frontier(sweep(points), question)]


COUNTS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=25)


@given(COUNTS, st.sampled_from([1, -1]), st.sampled_from([1, -1]))
def test_the_frontier_is_who_nobody_beats(values: list[tuple[int, int]], x_sign: int, y_sign: int) -> None:
    """With one run each, against the definition; equal points are all on it."""
    question = Question(replace(X, sign=x_sign), replace(Y, sign=y_sign), [], 0.95)
    goods = [(x_sign * x, y_sign * y) for x, y in values]
    dominated = [any(a >= x and b >= y and (a, b) != (x, y) for a, b in goods) for x, y in goods]
    found = verdicts([{0: {X.name: float(x), Y.name: float(y)}} for x, y in values], question)
    assert found == [DOMINATED if each else FRONTIER for each in dominated]


def noisy(means: list[tuple[float, float]], own: float, replicates: int = 6) -> list[dict[int, dict[str, float]]]:
    """Replicates with a large part in common and a part of their own."""
    rng = random.Random(7)
    common = [rng.gauss(0, 5) for _ in range(replicates)]
    return [
        {s: {X.name: x + common[s] + rng.gauss(0, own), Y.name: y + rng.gauss(0, own)} for s in range(replicates)}
        for x, y in means
    ]


def test_who_is_nearly_on_the_frontier_is_perhaps_on_it() -> None:
    """What all share is no doubt: a point behind by ten deviations is dominated, though its own interval overlaps; one
    behind by a tenth is perhaps on the frontier.
    """
    question = Question(X, Y, [], 0.95)
    points = noisy([(100, 100), (97, 97), (99.97, 99.97)], own=0.3)
    assert verdicts(points, question) == [FRONTIER, DOMINATED, PERHAPS]
    first, second, _ = pareto.frontier(sweep(points), question)
    assert second.x[2] > first.x[1]  # the intervals overlap


def test_conditions_put_points_out_or_in_doubt() -> None:
    """The best point breaks the limit; one whose interval holds the limit is perhaps in, and beats nobody."""
    points = noisy([(100, 100), (90, 90), (95, 95), (80, 80)], own=0.1)
    waits = {0: [3.0] * 6, 1: [1.0] * 6, 2: [1.0, 3.0] * 3, 3: [1.0] * 6}
    for i, runs in enumerate(points):
        for seed, numbers in runs.items():
            numbers[TTFT] = waits[i][seed]
    question = Question(X, Y, [parse("ttft.p99<=2s")], 0.95)
    assert verdicts(points, question) == [OUT, FRONTIER, PERHAPS, DOMINATED]


def test_a_point_without_runs_or_without_the_metric_stands_nowhere() -> None:
    points: list[dict[int, dict[str, float]]] = [{0: {X.name: 1.0, Y.name: 1.0}}, {}, {0: {X.name: 2.0}}]
    assert verdicts(points, Question(X, Y, [], 0.95)) == [FRONTIER, MISSING, MISSING]


@pytest.mark.parametrize(
    ("text", "name", "sign"),
    [
        ("throughput", "output_tokens_per_s", 1),
        ("goodput", "slo.goodput_requests_per_s", 1),
        ("ttft.p99", TTFT, -1),
        ("max:ttft.p99", TTFT, 1),
        ("min:gpu_active", "gpu_active", -1),
        (COST, COST, -1),
        ("output_tokens_per_s_per_user", X.name, 1),
    ],
)
def test_metrics_know_which_way_is_better(text: str, name: str, sign: int) -> None:
    found = objective(text, "--x")
    assert (found.name, found.sign) == (name, sign)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A trade: more seats give the GPU more and a user less. `slow` is worse in both; 8 seats wait too long."""
    rng = random.Random(2)
    rows: list[Any] = []
    for name, factor in (("fast", 1.0), ("slow", 0.5)):
        for seats in (1, 2, 4, 8):
            for seed in range(4):
                per_gpu = factor * (100 * seats**0.5 + rng.gauss(0, 1))
                numbers = {Y.name: per_gpu, X.name: per_gpu / seats, TTFT: 0.3 * seats, COST: 1000 / per_gpu}
                rows.append(({"scheduler.name": name, "scheduler.max_num_seqs": seats}, seed, numbers))
    return sweep_tables.table(tmp_path, rows)


def answer(*words: object) -> Any:
    said = call("pareto", *words, "--json")
    assert said.status == 0
    return json.loads(said.out)


def test_pareto_marks_and_keeps_all(table: Path) -> None:
    """Users first: those with the most tokens/s a user lead. Nobody is left out of the numbers."""
    said = answer(table, "--check", "ttft.p99<=2s")
    found = {(p["settings"]["scheduler.name"], p["settings"]["scheduler.max_num_seqs"]): p for p in said["places"]}
    assert [key for key, place in found.items() if place["verdict"] == FRONTIER] == [("fast", n) for n in (1, 2, 4)]
    assert [key for key, place in found.items() if place["verdict"] == OUT] == [("fast", 8), ("slow", 8)]
    assert found["slow", 1]["verdict"] == DOMINATED
    place = found["fast", 4]
    assert place["y"]["low"] < place["y"]["mean"] < place["y"]["high"] and place["runs"] == 4
    assert place["y"]["mean"] == pytest.approx(200, rel=0.02)
    assert place[COST] == pytest.approx(5, rel=0.02)


def test_pareto_prints_the_frontier_with_costs(table: Path) -> None:
    out = call("pareto", table).out
    assert "$ a million output tokens" in out and "slow" not in out
    assert "1: scheduler=fast, max_num_seqs=1" in out
    assert "scheduler=slow" in call("pareto", table, "--all").out


def test_pareto_draws(table: Path, tmp_path: Path) -> None:
    """The folder is a report: numbers, text, figure, and the command that makes them again."""
    out = tmp_path / "report"
    assert call("pareto", table, "--x", "ttft.p99", "--out", out).status == 0
    assert (out / "figures" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads((out / "report.json").read_text())
    assert facts["command"].startswith(f"python -m cbsim pareto {table} --x ttft.p99 --out ")
    assert facts["data"]["x"] == TTFT


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--x", "tpot.p99"), ("no run has tpot.p99",)),
        (("--y", "thruput"), ("--y thruput", "unknown metric", "throughput")),
        (("--check", "ttft.p99"), ("--check 'ttft.p99'", "METRIC<VALUE[UNIT]")),
        (("--check", "output_tokens_per_s_per_user>=3s"), ("unit 's'",)),
    ],
)
def test_mistakes_are_one_line(table: Path, words: tuple[str, ...], says: tuple[str, ...]) -> None:
    refused(call("pareto", table, *words), 2, *says)
