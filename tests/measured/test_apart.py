"""Published servers apart: results of vllm bench, their servers, who wins. All results are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.reference import data

from cbsim.errors import UserError
from reports.fidelity.apart import make

RESULT = {
    "num_prompts": 4,
    "request_rate": 2.5,
    "burstiness": 50.0,
    "total_input_tokens": 40_000,
    "total_output_tokens": 400,
} | {
    f"{name}_{metric}_ms": 1.0 for metric in ("ttft", "tpot", "itl") for name in ("mean", "std", "median", "p95", "p99")
}


def seen(name: str, published_ms: float, simulated_ms: float) -> make.Seen:
    names = ("ttft_s mean", "tpot_s mean")
    return make.Seen(name, dict.fromkeys(names, published_ms), [dict.fromkeys(names, simulated_ms)])


def test_results_are_of_the_servers_that_their_files_name(tmp_path: Path) -> None:
    """Replicas come first; the load is the result's own, so that other ones of the format can be dropped in."""
    for name in ("llm-d-2p1d__benchmark_x", "vllm-3replicas__benchmark_y", "notes"):
        (tmp_path / f"{name}.json").write_text(json.dumps(RESULT))
    found = make.benches(tmp_path)
    assert [each.label for each in found] == ["3 replicas", "2P1D"]
    assert found[0].load == (10_000, 100, 2.5, 50.0)
    with pytest.raises(UserError, match="holds no result named as"):
        make.benches(tmp_path / "none")


def test_a_result_becomes_its_servers(tmp_path: Path) -> None:
    """Apart without graphs, as they ran; prompts have the tokens of their text, not those asked for."""
    data("public_measured/aiconfigurator/a100_sxm/gemm__vllm_0.14.0.csv.gz")
    path = tmp_path / "llm-d-2p1d__x.json"
    path.write_text(json.dumps(RESULT))
    (bench,) = make.benches(tmp_path)
    apart, both = (bench.scenario(0, chosen=False, both=both) for both in (False, True))
    assert [(pool.role, pool.count) for pool in apart.fleet.pools] == [("prefill", 2), ("decode", 1)]
    assert (both.fleet.count, both.fleet.hand_off, both.loop.cuda_graphs.enabled) == (3, None, False)
    assert apart.workload.prompt_tokens == 10_466


def test_who_wins_and_by_how_much() -> None:
    """Published: replicas by 10 %. Simulated as well is right; by far more is right, and wrong by how much."""
    near = make.winners([seen("2 replicas", 100, 200), seen("1P1D, run 1", 110, 225)])
    far = make.winners([seen("2 replicas", 100, 200), seen("1P1D, run 1", 110, 900)])
    other = make.winners([seen("2 replicas", 100, 200), seen("1P1D, run 1", 110, 150)])
    assert [rows[-2:] for rows in (near.rows[0], far.rows[0], other.rows[0])] == [
        (make.RIGHT, make.RIGHT),
        (make.RIGHT, make.WRONG),
        (make.WRONG, make.WRONG),
    ]
