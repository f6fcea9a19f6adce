"""Goodput over the rate: the committed report is what runs, and what is said of it is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbsim.policy.schedulers import registry
from cbsim.proof.studies import schedulers_tuned
from cbsim.proof.studies.schedulers_by_load import RATES, REQUESTS, SCHEDULERS, TUNED_AT, point

ROOT = Path(__file__).parents[2]
DATA: dict[str, Any] = json.loads((ROOT / "reports/fidelity/schedulers_by_load/report.json").read_text())["data"]
BEST = {entry["scheduler"]: entry for entry in DATA["best"]}


def test_every_scheduler_has_knobs() -> None:
    names = [name for name, _ in SCHEDULERS]
    assert list(schedulers_tuned.KNOBS) == names == list(BEST)
    assert {*names} <= {*registry.OURS}


@pytest.mark.parametrize(("name", "loop", "rate"), [("vllm", "async", 4), ("sarathi", "sync", 64)])
def test_the_points_are_what_is_run(name: str, loop: str, rate: int) -> None:
    """To the last digit, with the defaults and with the best settings."""
    for group, settings in (("points", {}), ("tuned", BEST[name]["settings"])):
        (recorded,) = (p for p in DATA[group] if (p["scheduler"], p["rate"]) == (name, rate))
        assert recorded == point(name, loop, rate, settings)._asdict()
    assert len(DATA["tuned"]) == len(DATA["points"]) == len(SCHEDULERS) * len(RATES)


def test_the_best_settings_are_what_tune_finds() -> None:
    """One search again: TensorRT-LLM's five budgets."""
    found = json.loads(json.dumps(schedulers_tuned.best("trtllm", "async", REQUESTS, TUNED_AT)._asdict()))
    assert found.pop("settings") == BEST["trtllm"]["settings"]
    assert found == {name: pytest.approx(BEST["trtllm"][name], rel=1e-9) for name in found if name != "scheduler"} | {
        "scheduler": "trtllm"
    }


def test_settings_make_most_of_the_distance() -> None:
    """What the page says: Sarathi-Serve's schedulers with more seats are near the others; Orca's reservation stays
    behind, even of the longest sequence that there is.
    """
    for name in ("sarathi", "vllm_v0"):
        assert BEST[name]["default"] < 0.5 * BEST["vllm"]["default"]
        assert BEST[name]["tuned"] > 0.8 * BEST["vllm"]["tuned"]
    assert BEST["orca"]["default"] < 1 < BEST["orca"]["tuned"] < 0.6 * BEST["vllm"]["tuned"]
    assert all(BEST[name]["low"] < 0 < BEST[name]["high"] for name in ("vllm", "trtllm", "transformers_fifo"))


def test_the_page_has_the_report_s_numbers() -> None:
    text = (ROOT / "docs" / "landscape.md").read_text()
    for name, entry in BEST.items():
        gain = f"{entry['low']:+.2f} to {entry['high']:+.2f}"
        assert f"| `{name}` | {entry['default']:.1f} | {entry['tuned']:.1f} | {gain} |" in text
