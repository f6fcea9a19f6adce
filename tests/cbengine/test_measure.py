"""What measuring stands on: the fit, the comparison of simulated with measured, and the command line around them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine import cli, tokens, validate
from cbengine.fit import fit, non_negative
from cbengine.validate import Line
from cbsim import trace


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=60)
def test_least_squares_without_negative_coefficients(seed: int, terms: int) -> None:
    """No active set gives a smaller residual than the one found: all 2^terms are tried."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, terms)), rng.normal(size=12)
    found = non_negative(matrix, target)
    assert (found >= 0).all()
    best = float(np.linalg.norm(target))
    for used in product((False, True), repeat=terms):
        if any(used):
            x = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(matrix[:, used] @ x - target)))
    assert np.linalg.norm(matrix @ found - target) <= best * (1 + 1e-9)


def test_a_fit_finds_what_steps_cost_and_ignores_what_disturbed_them() -> None:
    """Known coefficients, 5 % of noise, every 20th step ten times as long: each term that matters within 10 %, the sum
    over undisturbed steps within 2 %, and no disturbed step is used.
    """
    rng = np.random.default_rng(7)
    features = np.column_stack((np.ones(400), rng.integers(1, 65, 400), rng.integers(0, 20_000, 400)))
    truth = np.array([5e6, 1e5, 300.0])
    clean = features @ truth * rng.normal(1, 0.05, 400)
    disturbed = clean.copy()
    disturbed[::20] *= 10
    found = fit(features, disturbed)
    assert np.allclose(found.coefficients, truth, rtol=0.1)
    assert found.used <= 380
    kept = np.arange(400) % 20 != 0
    assert abs((features @ found.coefficients)[kept].sum() / clean[kept].sum() - 1) < 0.02


def summary(makespan_s: float, active: float) -> dict[str, object]:
    parts = {name: {"p50": makespan_s / 4, "p99": makespan_s / 2} for name in ("ttft_s", "tpot_s", "e2e_s")}
    return {"makespan_s": makespan_s, "output_tokens_per_s": 100 / makespan_s, "gpu_active": active, **parts}


def test_errors_are_relative_and_of_shares_in_points() -> None:
    """Simulated 11 s against 10 s is +10 %; 80 % active against 75 % is +5 points; a gain of 10/8 against 10/5 is 25 %
    against 100 %.
    """
    predicted = {"sync": summary(11.0, 0.80), "async": summary(8.8, 0.9)}
    measured = {"sync": summary(10.0, 0.75), "async": summary(5.0, 0.9)}
    lines = {(line.loop, line.metric): line.error for line in validate.compared("case", predicted, measured)}
    assert lines["sync", "makespan"] == pytest.approx(0.1)
    assert lines["sync", "GPU active"] == pytest.approx(0.05)
    assert lines["both", validate.SPEED_UP] == pytest.approx(0.25 - 1.0)
    assert len(lines) == 2 * len(validate.METRICS) + 1


def test_only_what_must_not_be_fails() -> None:
    """Modelled kernels: any metric beyond 3 %. Real ones: a makespan beyond 25 %."""
    lines = [Line("c", "sync", "makespan", 1, 1, 0.2), Line("c", "sync", "TTFT p50", 1, 1, -0.5)]
    assert validate.failures("modelled", lines) == lines
    assert validate.failures("process", lines) == []
    assert validate.failures("process", [Line("c", "sync", "makespan", 1, 1, -0.3)])


def test_a_run_keeps_its_tokens_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many as the requests declare, beside the prompts; the same in both loops."""
    words = ["replay", "tiny_cpu", "--device", "inline", "--save-tokens", "--quiet", "--out", str(tmp_path)]
    assert cli.main([*words, "--set", "workload.requests=3", "--set", "workload.output_tokens=4"]) == 0
    runs = sorted(tmp_path.iterdir())
    assert len(runs) == 2
    first, second = (pq.read_table(run / tokens.FILE).to_pydict() for run in runs)
    assert first == second
    rows = trace.load(runs[0]).requests
    assert [len(prompt) for prompt in first["prompt"]] == [row.prompt_tokens for row in rows]
    assert [len(output) for output in first["output"]] == [4, 4, 4]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "tiny_cpu", "--temperature", "-1"], "temperature"),
        (["replay", "tiny_cpu", "--device", "inline", "--profile", "5"], "--profile"),
        (["replay", "tiny_cpu", "--device", "inline", "--weights", "nowhere"], "config.json"),
        (["replay", "nowhere.yaml"], "nowhere.yaml"),
        (["replay", "8k_b32", "--device", "inline", "--set", "kv_cache.num_blocks=9999999"], "GB"),
        (["replay", "tiny_cpu", "--engine", "transformers", "--device", "modelled"], "--engine transformers"),
    ],
)
def test_a_users_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert error.count("\n") == 1
