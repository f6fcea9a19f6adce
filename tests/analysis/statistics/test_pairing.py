"""Simulated against measured: errors with a known answer, where plans part, what cannot be replayed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.calls import simulated
from support.validations import COST, edited

from analysis.statistics import pairing
from analysis.statistics.compare import Incomparable
from analysis.statistics.loading import LoadedRun, read
from cbsim.metrics.catalogue import SINGLE

GPU = "a GPU"
SLOW, FAST = COST.format(0.02, 0.004), COST.format(0.01, 0.002)


def _served(out: Path, *overrides: str, device: str | None = None, **facts: Any) -> Path:
    """The directory of a run; with a device, one that says it was measured on it."""
    (folder,) = simulated(out, "tiny_cpu", "loop.mode=async", *overrides)
    if device:
        edited(folder / "env.json", device=device, **facts)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedRun, LoadedRun]:
    """Everything in the simulated run takes twice as long."""
    out = tmp_path_factory.mktemp("pair")
    sim, measured = read([_served(out / "sim", SLOW), _served(out / "measured", FAST, device=GPU)])
    return sim, measured


def test_twice_as_slow_is_an_error_of_100_percent(pair: tuple[LoadedRun, LoadedRun]) -> None:
    """Theory: with every time doubled, times are +100 %, rates -50 %; counts and shares are right. It is certain."""
    for one in pairing.errors(*pair):
        if one.a == 0:
            assert one.b == 0
        elif one.metric.startswith("cost."):
            continue
        elif one.unit == "s":
            assert one.change == pytest.approx(1.0)
            if one.interval and one.interval.relative and one.metric not in SINGLE and "step" not in one.metric:
                assert one.interval.relative == pytest.approx((1.0, 1.0))
        elif one.metric.endswith("_per_s"):
            assert one.change == pytest.approx(-0.5)
        else:
            assert one.change == pytest.approx(0.0, abs=1e-9)


def test_phases_and_lanes_are_compared_in_microseconds(pair: tuple[LoadedRun, LoadedRun]) -> None:
    phases = {one.name: one for one in pairing.phases(*pair)}
    assert list(phases) == ["schedule", "prepare", "launch", "await", "update", "h2d", "compute", "d2h"]
    compute = phases["compute"]
    assert (compute.simulated_mean_us, compute.measured_p50_us) == (20_000, 10_000)
    assert phases["schedule"].error == pytest.approx(1.0)
    assert phases["h2d"].error is None or phases["h2d"].measured_mean_us > 0


def test_the_summary_has_the_largest_and_the_median_error(pair: tuple[LoadedRun, LoadedRun]) -> None:
    sim, measured = pair
    text = pairing.summary_line(pairing.errors(sim, measured))
    assert "times and rates: median 100.0 %, largest +100.0 %" in text
    equal = replace(sim, environment={**sim.environment, "device": GPU})
    assert "median 0.0 %, largest =" in pairing.summary_line(pairing.errors(sim, equal))
    assert pairing.summary_line([]) == "no metric to tell by"


def test_zero_of_zero_does_not_make_the_median_small(pair: tuple[LoadedRun, LoadedRun]) -> None:
    """Counts that agree because nothing happened are no merit of the simulator."""
    errors = pairing.errors(*pair)
    some = [one for one in errors if one.metric in ("makespan_s", "preemptions", "wasted_rows", "padding_share")]
    assert "of 1 times and rates: median 100.0 %" in pairing.summary_line(some)
    assert "share" not in pairing.summary_line(some)


def test_another_workload_is_no_measure_of_error(pair: tuple[LoadedRun, LoadedRun], tmp_path: Path) -> None:
    (other,) = read([_served(tmp_path / "other", "seed=4", device=GPU)])
    with pytest.raises(Incomparable, match="seed is 4 and 0"):
        pairing.errors(pair[0], other)


def test_all_at_once_the_same_plans_are_made_at_any_speed(pair: tuple[LoadedRun, LoadedRun]) -> None:
    assert pairing.divergence(*pair) == (len(pair[0].steps), "every plan is the same")


def test_arrivals_that_meet_other_steps_part_the_plans(tmp_path: Path) -> None:
    """With time between arrivals, a slower server takes more requests in at a poll: normal, and said so."""
    arrivals = "workload.arrivals={kind: constant, rate_per_s: 30}"
    sim, measured = read(
        [_served(tmp_path / "sim", SLOW, arrivals), _served(tmp_path / "measured", FAST, arrivals, device=GPU)]
    )
    step, reason = pairing.divergence(sim, measured)
    hashes = [run.table["plan_hash"] for run in (sim, measured)]
    assert (hashes[0][:step] == hashes[1][:step]).all()
    assert hashes[0][step] != hashes[1][step]
    assert reason.startswith(f"step {step}: ")
    assert "had been taken in by then in the simulated run only" in reason
    assert "normal" in reason


def test_other_settings_are_named_before_anything_else(pair: tuple[LoadedRun, LoadedRun], tmp_path: Path) -> None:
    (other,) = read([_served(tmp_path / "other", FAST, "scheduler.max_num_seqs=8", device=GPU)])
    _, reason = pairing.divergence(pair[0], other)
    assert "scheduler.max_num_seqs" in reason
    assert "cost" not in reason


def test_a_run_with_more_steps_parts_where_the_other_ends(pair: tuple[LoadedRun, LoadedRun]) -> None:
    sim, measured = pair
    short = replace(measured, table=type(measured.table)(measured.table.table[:10]))
    assert pairing.divergence(sim, short) == (10, "step 10: one run has more steps")


def test_both_runs_are_replayed(pair: tuple[LoadedRun, LoadedRun]) -> None:
    for run, one in zip(pair, map(pairing.replayed, pair), strict=True):
        assert (one.run, one.matched, one.steps, one.says) == (run.label, len(run.steps), len(run.steps), "identical")


def test_what_cannot_be_replayed_says_why(pair: tuple[LoadedRun, LoadedRun], tmp_path: Path) -> None:
    """Another engine decides by itself; a broken directory is named. Neither stops the report."""
    sim, measured = pair
    peer = Path(shutil.copytree(measured.path, tmp_path / "peer"))
    (peer / "env.json").write_text(json.dumps({**measured.environment, "engine": "transformers 5.17.0"}))
    copy = Path(shutil.copytree(sim.path, tmp_path / "copy"))
    (copy / "steps.parquet").unlink()
    served, broken = map(pairing.replayed, (replace(measured, path=peer), replace(sim, path=copy)))
    assert served.matched is None
    assert "transformers 5.17.0" in served.says
    assert broken.matched is None
    assert "steps.parquet" in broken.says


def test_tables_are_whole(pair: tuple[LoadedRun, LoadedRun]) -> None:
    tables = pairing.tables(*pair, pairing.errors(*pair))
    assert [table.title for table in tables] == ["Errors", "Time in a step", "Decisions"]
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.header) for row in table.rows)
    makespan = next(row for row in tables[0].rows if row[0] == "makespan")
    assert makespan[3] == "+100.0 %"
    assert len(pairing.tables(*pair, pairing.errors(*pair), everything=True)[0].rows) == len(pairing.errors(*pair))


def test_runs_without_steps_have_no_phases(pair: tuple[LoadedRun, LoadedRun]) -> None:
    sim, measured = pair
    empty = replace(measured, table=type(measured.table)(measured.table.table[:0]))
    assert pairing.phases(sim, empty) == []
    assert pairing.divergence(empty, empty) == (0, "every plan is the same")
