"""Which runs refuse to be compared, and whether the refusal says enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.statistics import compare
from analysis.statistics.compare import Incomparable
from analysis.statistics.loading import LoadedRun, read
from cbsim.cli.parser import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    """Both loops of one workload, and one of another."""
    out = tmp_path_factory.mktemp("runs")
    small = ["run", "tiny_cpu", "--quiet", "--set", "workload.requests=12"]
    assert main([*small, "--out", str(out / "a")]) == 0
    assert main([*small, "--seed", "3", "--set", "workload.shared_prefix_tokens=0", "--out", str(out / "b")]) == 0
    folders: list[Path] = [*sorted((out / "a").iterdir(), reverse=True), *sorted((out / "b").glob("*-sync-*"))]
    return read(folders)


def test_runs_of_one_workload_may_be_compared(runs: list[LoadedRun]) -> None:
    compare.check(runs[:2])
    compare.check(runs[:1])
    compare.check([])
    assert compare.same_workload(runs[:2])


def test_another_workload_is_refused_with_the_fields_that_differ(runs: list[LoadedRun]) -> None:
    assert not compare.same_workload(runs)
    with pytest.raises(Incomparable) as caught:
        compare.check(runs)
    text = str(caught.value)
    assert runs[0].label in text
    assert runs[2].label in text
    assert "seed is 0 and 3" in text
    assert "workload.shared_prefix_tokens is 16 and 0" in text
    assert "scheduler" not in text


def test_all_reasons_are_said_at_once(runs: list[LoadedRun]) -> None:
    cut = replace(
        runs[1], incomplete="interrupted, after 7 steps", summary={**runs[1].summary, "window_s": [2.0, None]}
    )
    with pytest.raises(Incomparable) as caught:
        compare.check([runs[0], cut, runs[2]])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert any("interrupted, after 7 steps" in line and str(cut.path) in line for line in lines)
    assert any("window_s is null and [2.0, None]" in line for line in lines)


@pytest.mark.parametrize("key", ["schema_version", "percentile_method", "window_s"])
def test_what_is_counted_otherwise_is_refused(runs: list[LoadedRun], key: str) -> None:
    other = replace(runs[1], summary={**runs[1].summary, key: "other"})
    with pytest.raises(Incomparable, match=f"{key} is .* and other"):
        compare.check([runs[0], other])


def test_a_run_that_does_not_say_its_workload_is_not_taken_for_the_same(runs: list[LoadedRun]) -> None:
    unknown = [replace(run, environment={**run.environment, "workload_hash": None}) for run in runs[:2]]
    with pytest.raises(Incomparable, match="no workload_hash"):
        compare.check(unknown)


def test_equal_fields_with_another_hash_point_to_data_or_code(runs: list[LoadedRun]) -> None:
    changed = replace(runs[1], environment={**runs[1].environment, "workload_hash": "0" * 64})
    with pytest.raises(Incomparable, match="the data that it was made from or the code"):
        compare.check([runs[0], changed])
