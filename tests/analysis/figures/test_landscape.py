"""Runs side by side: order, factors and gains are those of the summaries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.calls import simulated

from analysis.figures import side_by_side
from analysis.statistics.loading import LoadedRun, read
from cbsim.metrics.terminal import shown

SCHEDULERS = ("{name: vllm, max_num_seqs: 16}", "{name: static, batch_size: 16}", "{name: transformers_fifo}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    """Three schedulers, both loops, one workload of mixed lengths."""
    words = ("landscape", "workload.requests=48")
    out = tmp_path_factory.mktemp("runs")
    return read([path for each in SCHEDULERS for path in simulated(out, *words, f"scheduler={each}")])


def _rate(run: LoadedRun) -> float:
    return float(run.summary["output_tokens_per_s"])


def test_a_sweep_of_what_arrives_is_no_ranking(runs: list[LoadedRun]) -> None:
    """More traffic is not a better server: the order stays, and there is no factor and no gain."""
    table = side_by_side.table(runs, by_rate=True)
    assert [row[0] for row in table.rows] == [run.label for run in runs]
    assert not {"factor", "async gain"} & set(table.header)
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_best_throughput_first_with_its_factor(runs: list[LoadedRun]) -> None:
    table = side_by_side.table(runs)
    ordered = sorted(runs, key=_rate, reverse=True)
    assert [row[0] for row in table.rows] == [run.label for run in ordered]
    assert {len(row) for row in table.rows} == {len(table.header)}
    factors = [row[table.header.index("factor")] for row in table.rows]
    assert factors == [f"{_rate(run) / _rate(ordered[-1]):.2f}x" for run in ordered]


def test_an_async_loop_gains_over_the_sync_loop_of_the_same_scheduler(runs: list[LoadedRun]) -> None:
    table = side_by_side.table(runs)
    gains = {row[0]: row[-1] for row in table.rows}
    sync = {run.scenario["scheduler"]["name"]: run for run in runs if run.loop == "sync"}
    for run in runs:
        base = sync[run.scenario["scheduler"]["name"]]
        assert gains[run.label] == ("" if run is base else f"{_rate(run) / _rate(base) - 1:+.1%}")


def test_nothing_is_gained_over_another_configuration(runs: list[LoadedRun]) -> None:
    """A measured loop is not compared with a simulated one, nor a scheduler with another, nor with one of several."""
    one = next(run for run in runs if run.loop == "async")
    other = next(run for run in runs if run.loop == "sync" and run.scenario["scheduler"] == one.scenario["scheduler"])
    real = replace(other, environment=dict(other.environment) | {"device": "a GPU"})
    assert all(not row[-1] for row in side_by_side.table([one, real]).rows)
    assert all(not row[-1] for row in side_by_side.table([one, other, replace(other, label="again")]).rows)
    stranger = next(
        run for run in runs if run.loop == "sync" and run.scenario["scheduler"] != one.scenario["scheduler"]
    )
    assert all(not row[-1] for row in side_by_side.table([one, stranger]).rows)


def test_a_percentile_of_too_few_is_marked(runs: list[LoadedRun]) -> None:
    table = side_by_side.table(runs)
    for row, run in zip(table.rows, sorted(runs, key=_rate, reverse=True), strict=True):
        cells = dict(zip(table.header, row, strict=True))
        assert cells["TTFT p99"] == shown(run.summary["ttft_s"]["p99"], "s") + "*"
        assert not cells["TTFT p50"].endswith("*")
    assert "368" in table.note


def test_what_is_the_same_for_all_is_said_once(runs: list[LoadedRun]) -> None:
    table = side_by_side.table(runs)
    same = {run.summary["preemptions"] for run in runs}
    assert len(same) == 1
    assert "preemptions" not in table.header
    assert f"preemptions {same.pop()}" in table.note


def test_findings_name_the_best_and_what_async_gains(runs: list[LoadedRun]) -> None:
    """Each sentence is about numbers of the summaries; TTFT of 48 requests may be quoted at p50 only."""
    said = side_by_side.findings(runs)
    best, worst = max(runs, key=_rate), min(runs, key=_rate)
    assert said[0].startswith(f"Most output tokens/s: {best.label}, {_rate(best):,.4g}")
    assert said[0].endswith(f"Fewest: {worst.label}, {_rate(worst):,.4g}.")
    quickest = min(runs, key=lambda run: float(run.summary["ttft_s"]["p50"]))
    assert said[1].startswith(f"TTFT p50 is least with {quickest.label}, ")
    gains = [float(row[-1].rstrip("%")) for row in side_by_side.table(runs).rows if row[-1]]
    assert f"{min(gains):+.1f} to {max(gains):+.1f} % output tokens/s, 3 times" in said[3]


def test_runs_without_an_output_token_have_a_row(tmp_path: Path, runs: list[LoadedRun]) -> None:
    empty = dict(runs[0].summary) | {"output_tokens_per_s": 0.0, "tpot_s": {"n": 0}, "ttft_s": {"n": 0}}
    table = side_by_side.table([replace(runs[0], summary=empty)])
    cells = dict(zip(table.header, table.rows[0], strict=True))
    assert cells["factor"] == "-"
    assert "TTFT p50" not in cells
    assert side_by_side.table([]).rows == []
