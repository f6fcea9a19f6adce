"""What measuring stands on: the fit, and the command line around it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cbsim.runs import reading

pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine import tokens
from cbengine.cli import parser
from cbengine.measure.fit import fit, non_negative


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


def test_a_run_keeps_its_tokens_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many as the requests declare, beside the prompts; the same in both loops."""
    words = ["replay", "tiny_cpu", "--device", "inline", "--save-tokens", "--quiet", "--out", str(tmp_path)]
    assert parser.main([*words, "--set", "workload.requests=3", "--set", "workload.output_tokens=4"]) == 0
    runs = sorted(tmp_path.iterdir())
    assert len(runs) == 2
    first, second = (pq.read_table(run / tokens.FILE).to_pydict() for run in runs)
    assert first == second
    rows = reading.load(runs[0]).requests
    assert [len(prompt) for prompt in first["prompt"]] == [row.prompt_tokens for row in rows]
    assert [len(output) for output in first["output"]] == [4, 4, 4]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "tiny_cpu", "--temperature", "-1"], "temperature"),
        (["replay", "tiny_cpu", "--device", "inline", "--profile", "5"], "--profile"),
        (["replay", "tiny_cpu", "--device", "inline", "--wait", "spin"], "--wait spin: needs --device cuda"),
        (["replay", "tiny_cpu", "--device", "inline", "--weights", "nowhere"], "config.json"),
        (["replay", "nowhere.yaml"], "nowhere.yaml"),
        (["replay", "8k_b32", "--device", "inline", "--set", "kv_cache.num_blocks=9999999"], "GB"),
    ],
)
def test_a_users_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parser.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert error.count("\n") == 1
