"""What the papers of Orca, vLLM and Sarathi say of themselves, in the simulated machine, and the docs' table of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cbsim

POLICIES = Path(__file__).parents[1] / "docs" / "policies.md"
BATCHES = (
    "workload.requests=512",
    "workload.arrivals={kind: at_once}",
    "workload.prompt_tokens={lognormal: {mean: 160, sigma: 1.0, low: 4, high: 1024}}",
    "workload.output_tokens={lognormal: {mean: 340, sigma: 0.8, low: 1, high: 2048}}",
    "scheduler.max_num_seqs=256",
)


@cache
def ran(name: str, *overrides: str) -> cbsim.Result:
    result = cbsim.run(cbsim.load("stalls", f"scheduler.name={name}", *overrides))
    assert isinstance(result, cbsim.Result)
    assert {row["status"] for row in result.requests.select(["status"]).to_pylist()} == {"length"}
    return result


def documented(*cells: str) -> bool:
    """Is a row of the table with these last cells?"""
    return f"| {' | '.join(cells)} |\n" in POLICIES.read_text()


def test_orca_serves_more_tokens_than_batches_that_end_together() -> None:
    static, orca = (ran(name, *BATCHES).summary["output_tokens_per_s"] for name in ("faster_transformer", "orca"))
    assert orca > 2 * static
    assert documented(f"`faster_transformer` {static:,.0f}", f"`orca` {orca:,.0f}")


def test_paged_blocks_hold_larger_batches_than_whole_sequences() -> None:
    orca, paged = (ran(name, *BATCHES).summary["rows_per_step"] for name in ("orca", "vllm_v0"))
    assert paged > 1.5 * orca
    assert documented(f"`orca` {orca:.1f}", f"`vllm_v0` {paged:.1f}")


def test_chunks_remove_the_stalls_of_those_who_decode() -> None:
    first, chunked = (ran(name).summary for name in ("vllm_v0", "sarathi"))
    for measure, times in (("max", 50), ("p99", 5)):
        stalled, smooth = (1000 * summary["itl_s"][measure] for summary in (first, chunked))
        assert stalled > times * smooth
        assert documented(f"`vllm_v0` {stalled:,.0f}", f"`sarathi` {smooth:,.0f}")
    paid, spared = (1000 * summary["ttft_s"]["p50"] for summary in (chunked, first))
    assert paid > spared
    assert f"{paid:.0f} ms in place of {spared:.0f} ms" in " ".join(POLICIES.read_text().split())
