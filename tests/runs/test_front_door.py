"""`import cbsim`: what a caller from Python gets. What a command writes and prints is the same, byte for byte."""

from __future__ import annotations

import gc
import html
import json
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.calls import ROOT, SMALL, call, environment, read, runs

import cbengine
import cbsim
from cbsim.metrics import metrics
from cbsim.runs import replan
from cbsim.workload import csv_requests, generators

TABLES = ("steps.parquet", "requests.parquet")
COLUMNS: dict[str, list[Any]] = {
    "arrival_s": [0.0, 0.1, 0.1, 2.5],
    "prompt_tokens": [100, 900, 30, 70],
    "output_tokens": [20, 3, 40, 1],
}


@pytest.fixture
def scenario(small: Path) -> cbsim.Scenario:
    return cbsim.load(small, "seed=3")


def loaded(program: str) -> set[str]:
    """Modules that a program loads, in a process of its own."""
    words = [sys.executable, "-c", f"{program}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=environment())
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("package", ["cbsim", "cbengine"])
def test_importing_loads_nothing_heavy(package: str) -> None:
    """Nor does asking what there is."""
    heavy = {"pydantic", "matplotlib", "pandas", "torch", "numpy", "pyarrow", "simpy", "ruamel.yaml"}
    assert not heavy & loaded(f"import {package}; dir({package})")


def test_a_run_needs_no_pandas() -> None:
    """Nor does writing its tables or that of a sweep, as Arrow would by itself: it takes half a second. Asking for a
    picture may, and imports what draws it. Arrow's functions take a tenth of a second, and only kernel tables and files
    that are read need them.
    """
    program = """
import cbsim, pathlib, tempfile
from cbsim.record.directory import RunWriter
result = cbsim.run("8k_b32", {"loop.mode": "sync"})
cbsim.sweep({"scenario": "worked_example", "axes": {"seed": [1], "workload.requests": [3]}}, store=tempfile.mkdtemp())
with RunWriter.at(pathlib.Path(tempfile.mkdtemp())).writing(result.step_numbers, lambda: result._times):
    pass
"""
    assert not {"pandas", "pyarrow.compute", "matplotlib", "cbsim.draw.chart"} & loaded(program)


def test_a_file_is_read_by_its_own_reader_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("arrival_s,prefill_tokens,decode_tokens\n0,7,3\n")
    workload = {"kind": "csv", "path": str(tmp_path / "mine.csv")}
    readers = {f"cbsim.workload.{name}" for name in ("csv_requests", "traces", "scheduler_tests", "vllm_bench")}
    program = f"import cbsim; cbsim.run('8k_b32', {{'loop.mode': 'sync', 'workload': {workload}}})"
    assert readers & loaded(program) == {"cbsim.workload.csv_requests"}


def test_python_collects_no_garbage_while_a_run_makes_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and rows make no cycles, and the search for them took half the time of making them."""
    collects = list[bool]()
    for module, name in ((generators, "build"), (metrics, "summarise")):
        made = getattr(module, name)

        def noted(*arguments: Any, made: Any = made, **named: Any) -> Any:
            collects.append(gc.isenabled())
            return made(*arguments, **named)

        monkeypatch.setattr(module, name, noted)
    cbsim.run("8k_b32", {"loop.mode": "sync"})
    assert collects == [False, False]
    assert gc.isenabled()


def test_a_run_searches_for_no_cycles(scenario: cbsim.Scenario) -> None:
    """Nor does what it imports, and the collector is on again afterwards."""
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    cbsim.run(scenario)
    assert gc.get_stats()[0]["collections"] <= before + 1, "the one that was due when the run was over"
    assert gc.isenabled()


def test_every_name_of_the_front_door_is_there() -> None:
    assert set(cbsim.__all__) <= set(dir(cbsim))
    assert all(getattr(cbsim, name).__name__ == name for name in cbsim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = cbsim.rnu  # type: ignore[attr-defined]


def test_a_scenario_is_loaded_by_name_path_fields_or_itself(small: Path) -> None:
    by_path = cbsim.load(small)
    assert cbsim.load(str(small)) == by_path == cbsim.load(by_path)
    fields = by_path.model_dump(mode="json")
    assert cbsim.load(fields) == by_path
    assert cbsim.load(fields, "seed=4") == cbsim.load(by_path, "seed=4") == cbsim.load(small, "seed=4")
    assert fields["seed"] == 0
    assert cbsim.load("8k_b32", "loop.mode=async").loop.mode == "async"


def test_a_run_is_what_the_command_writes_and_prints(small: Path, out: Path, tmp_path: Path) -> None:
    """Tables, summary, timeline and picture of `save` are the command's, and so is what is printed."""
    said = call("run", small, "--loop", "both", "--out", out)
    results = cbsim.run(cbsim.load(small, "loop.mode=both"))
    assert isinstance(results, cbsim.Results)
    assert said.out.startswith(f"{results}\n\n")
    assert str(results.compare()) in str(results)
    paths = results.save(tmp_path / "mine")
    for ours, theirs in zip(paths, runs(out), strict=True):
        names = sorted(str(file.relative_to(theirs)) for file in theirs.rglob("*") if file.is_file())
        assert names == sorted(str(file.relative_to(ours)) for file in ours.rglob("*") if file.is_file())
        for name in names:
            assert name == "env.json" or (ours / name).read_bytes() == (theirs / name).read_bytes(), name
        facts = [set(read(path / "env.json")) for path in (ours, theirs)]
        assert facts[0] == facts[1]


def test_a_result_has_numbers_with_units_and_tables(scenario: cbsim.Scenario) -> None:
    result = cbsim.run(scenario)
    assert isinstance(result, cbsim.Result)
    assert (result.loop, result.measured, result.warnings, result.path) == ("sync", False, [], None)
    assert result.summary["requests"] == result.requests.num_rows == 12
    assert result.summary["steps"] == result.steps.num_rows == len(result.steps.to_pandas())
    assert result.steps.schema.field("compute_start_ns").metadata[b"unit"] == b"ns"
    assert (result.units["makespan_s"], result.units["ttft_s.p99"], result.units["gpu_active"]) == ("s", "s", "share")
    assert "seed" not in result.units
    assert result.check("steps>1") and not result.check("gpu_active>=100%")
    assert str(result.check("steps>1")).startswith("ok      steps>1: steps is ")
    with pytest.raises(cbsim.CheckError, match="did you mean gpu_active") as error:
        result.check("gpu_activ>1")
    assert error.value.field == "gpu_activ"


def test_both_loops_are_compared() -> None:
    results = cbsim.run(cbsim.load("worked_example", "loop.mode=both"))
    assert isinstance(results, cbsim.Results)
    assert list(results) == ["sync", "async"]
    change = results.compare()["makespan"]
    assert change.before == results["sync"].summary["makespan_s"] == pytest.approx(42.0)
    assert change.relative == pytest.approx(-0.237, abs=0.001)
    assert (change.unit, change.difference) == ("s", change.after - change.before)
    assert results.check("steps>1") and not results.check("gpu_active>99%")


@pytest.mark.usefixtures("drawn")
def test_a_picture_is_drawn_and_saved(scenario: cbsim.Scenario, tmp_path: Path) -> None:
    picture = cbsim.run(scenario).figure()
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert picture.save(tmp_path / "lanes.svg").read_text().lstrip().startswith("<?xml")
    with pytest.raises(cbsim.RunError, match="expected a name that ends in"):
        picture.save(tmp_path / "lanes.gif")
    nothing = cbsim.run(cbsim.load(scenario, "workload.prompt_tokens=140000"))
    with pytest.raises(cbsim.RunError, match="no step ran"):
        nothing.figure()


def test_a_saved_result_is_read_and_saved_again(scenario: cbsim.Scenario, tmp_path: Path) -> None:
    result = cbsim.run(scenario)
    first = result.save(tmp_path / "first")
    again = cbsim.read(first)
    assert (again.path, again.scenario, again.summary) == (first, result.scenario, result.summary)
    assert again.steps.equals(result.steps) and again.requests.equals(result.requests)
    second = again.save(str(tmp_path / "second"))
    for file in (file for file in first.rglob("*") if file.is_file()):
        assert (second / file.relative_to(first)).read_bytes() == file.read_bytes()
    with pytest.raises(cbsim.RunError, match=r"holds .*; name a new or an empty folder") as error:
        result.save(first)
    assert error.value.file == str(first)


# -- requests of the caller's own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pd.DataFrame, pa.table, dict])
def test_requests_come_from_a_table(make: Any, scenario: cbsim.Scenario, tmp_path: Path) -> None:
    """The same run whoever made the table; saved, its plans are derived again from the directory alone."""
    result = cbsim.run(scenario, requests=make(COLUMNS))
    assert isinstance(result, cbsim.Result)
    rows = result.requests.to_pandas()
    assert rows["arrival_ns"].tolist() == [0, 100_000_000, 100_000_000, 2_500_000_000]
    assert rows["prompt_tokens"].tolist() == COLUMNS["prompt_tokens"]
    assert rows["generated_tokens"].tolist() == COLUMNS["output_tokens"]
    path = result.save(tmp_path / "mine")
    verdict = replan.rederive(path)
    assert (verdict.matched, verdict.difference) == (result.summary["steps"], None)
    again = cbsim.load(path / "scenario.resolved.yaml")
    assert generators.build(again).fingerprint() == result.environment["workload_hash"]
    assert pq.read_table(cbsim.read(path).save(tmp_path / "copy") / "steps.parquet").equals(result.steps)
    assert replan.rederive(tmp_path / "copy").difference is None


def test_requests_may_have_limits_priorities_and_names(scenario: cbsim.Scenario) -> None:
    more = {"max_tokens": [20, 50, 40, 9], "priority": [0, -1, 2, 0], "id": ["a", "b,c", "ü", "d"]}
    result = cbsim.run(scenario, requests=pd.DataFrame(COLUMNS | more))
    assert isinstance(result, cbsim.Result)
    rows = result.requests.to_pandas()
    for name, values in more.items():
        assert rows[name].tolist() == values
    assert rows["status"].tolist() == ["length", "stop", "length", "stop"]


@pytest.mark.parametrize(
    ("changes", "row", "field", "words"),
    [
        ({"arrival_s": None}, None, "arrival_s", "no such column; expected arrival_s, prompt_tokens, output_tokens"),
        ({"max_token": [1, 2, 3, 4]}, None, "max_token", "did you mean max_tokens?"),
        ({"arrival_s": [0.0, float("inf"), 1.0, 2.0]}, 1, "arrival_s", "got inf, expected seconds >= 0"),
        ({"arrival_s": [0.0, 2.0, 1.0, 3.0]}, 2, "arrival_s", "got 1.0, expected seconds not before those"),
        (
            {"prompt_tokens": [1, 2, 0, 4]},
            2,
            "prompt_tokens",
            "got 0, expected a whole number from 1 to 999,999,999,999",
        ),
        (
            {"output_tokens": ["1", "2", "3", "x"]},
            0,
            "output_tokens",
            "got '1', expected a whole number from 1 to 999,999,999,999",
        ),
        ({"max_tokens": [20, 2, 40, 1]}, 1, "max_tokens", "got 2, expected at least output_tokens (3)"),
        ({"id": ["a", "b", "a", "c"]}, 2, "id", "got 'a', expected an id that no row above has"),
        ({"id": ["a", "", "b", "c"]}, 1, "id", "got '', expected an id"),
    ],
)
def test_a_bad_cell_is_named(
    changes: dict[str, Any], row: int | None, field: str, words: str, scenario: cbsim.Scenario
) -> None:
    """Column, row, value and bound, in the message and apart."""
    columns = {name: values for name, values in (COLUMNS | changes).items() if values is not None}
    with pytest.raises(cbsim.ScenarioError) as error:
        cbsim.run(scenario, requests=pd.DataFrame(columns))
    message = str(error.value)
    assert message.startswith(f"requests: row {row}: {field}: " if row is not None else f"requests: {field}: ")
    assert words in message and "\n" not in message
    assert (error.value.file, error.value.field, error.value.line) == ("requests", field, row)
    assert error.value.bound and error.value.bound in message


@pytest.mark.parametrize("requests", [7, "a", [1, 2], {"arrival_s": [1], "prompt_tokens": [1, 2]}, {}])
def test_what_is_no_table_is_refused(requests: Any, scenario: cbsim.Scenario) -> None:
    with pytest.raises(cbsim.ScenarioError, match=r"^requests: ") as error:
        cbsim.run(scenario, requests=requests)
    assert "\n" not in str(error.value)


def test_no_requests_are_refused(scenario: cbsim.Scenario) -> None:
    with pytest.raises(cbsim.ScenarioError, match="holds no requests"):
        cbsim.run(scenario, requests={name: pa.array([], pa.int64()) for name in COLUMNS})
    assert csv_requests.table_text(COLUMNS).count("\n") == 5


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_carries_what_it_says(small: Path) -> None:
    """File, line, field, value and bound of a scenario, apart; None where there is none."""
    small.write_text(SMALL.replace("requests: 12", "requests: 0"))
    with pytest.raises(cbsim.ScenarioError) as caught:
        cbsim.load(small)
    error = caught.value
    assert str(error) == f"{small}:6: workload.requests: got 0, must be >= 1"
    assert (error.file, error.line, error.field, error.value) == (str(small), 6, "workload.requests", 0)
    assert error.bound == "must be >= 1"
    small.write_text(SMALL)
    with pytest.raises(cbsim.ScenarioError) as caught:
        cbsim.load(small, "scheduler.max_num_seqs=100000")
    assert caught.value.field == "scheduler.max_num_batched_tokens"
    assert caught.value.bound == "must be >= max_num_seqs (100000)"
    with pytest.raises(cbsim.ScenarioError, match="did you mean 8k_b32") as caught:
        cbsim.load("8k_b23")
    assert (caught.value.field, caught.value.value) == ("scenario", "8k_b23")
    with pytest.raises(cbsim.ScenarioError, match="expected a name, a path or fields"):
        cbsim.run(3)  # type: ignore[arg-type]
    assert issubclass(cbsim.ScenarioError, cbsim.UserError) and issubclass(cbsim.UserError, ValueError)


def test_the_engine_gives_the_same_kind_of_result(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import cbengine

    scenario = cbsim.load("tiny_cpu", "loop.mode=sync")
    result = cbengine.run(scenario, "inline", requests=COLUMNS | {"arrival_s": [0.0] * 4, "prompt_tokens": [9] * 4})
    assert isinstance(result, cbsim.Result)
    assert result.measured and result.environment["engine"] == "cbengine"
    assert result.requests.to_pandas()["generated_tokens"].tolist() == COLUMNS["output_tokens"]
    assert replan.rederive(result.save(tmp_path / "measured")).difference is None
    with pytest.raises(cbsim.UserError, match="device: got 'gpu', expected one of inline, process, modelled, cuda"):
        cbengine.run(scenario, "gpu")  # type: ignore[arg-type]


def test_changes_have_one_form_everywhere(small: Path, tmp_path: Path) -> None:
    """Fields and their values, in load, run, sweep, capacity and tune; texts as of `--set` mean the same."""
    changes = {"workload.requests": 4, "seed": 3, "workload.arrivals.rate_per_s": 20.0}
    texts = [f"{name}={value}" for name, value in changes.items()]
    assert cbsim.load(small, changes) == cbsim.load(small, *texts) == cbsim.load(cbsim.load(small), changes)
    for given in (changes, texts):
        result = cbsim.run(small, given)
        assert isinstance(result, cbsim.Result)
        assert (result.scenario.seed, len(result.requests)) == (3, 4)
        swept = cbsim.sweep({"scenario": str(small)}, given, store=tmp_path / "store")
        assert (swept.table["requests"].to_pylist(), swept.failed) == ([4], {})
        tuned = cbsim.tune(
            small, {"scheduler.max_num_seqs": [4]}, "throughput", changes=given[:1] if given is texts else
            {"workload.requests": 4}, replicates=2, store=tmp_path / "store",
        )  # fmt: skip
        assert tuned.best is not None
        found = cbsim.capacity(
            small, ["ttft.mean<=9s"], changes=given, store=tmp_path / "store", replicates=2, width=0.5, warmup=0
        )
        assert found.numbers()["probes"]
    with pytest.raises(cbsim.ScenarioError, match="changes: got 'seed=3', expected fields"):
        cbsim.run(small, "seed=3")


def test_requests_have_their_latencies(scenario: cbsim.Scenario) -> None:
    """In seconds, where there are any: one token has no time between tokens."""
    result = cbsim.run(scenario, requests=COLUMNS)
    assert isinstance(result, cbsim.Result)
    rows = result.requests.to_pylist()
    for row in rows:
        first, last, tokens = row["first_token_ns"], row["last_token_ns"], row["generated_tokens"]
        assert row["ttft_s"] == pytest.approx((first - row["arrival_ns"]) / 1e9)
        assert row["e2e_s"] == pytest.approx((last - row["arrival_ns"]) / 1e9)
        assert row["tpot_s"] == (pytest.approx((last - first) / 1e9 / (tokens - 1)) if tokens > 1 else None)
    assert [row["tpot_s"] is None for row in rows] == [False, False, False, True]


def test_a_notebook_shows_what_is_printed(scenario: cbsim.Scenario) -> None:
    result = cbsim.run(scenario)
    assert result._repr_html_() == f"<pre>{html.escape(str(result))}</pre>"


def test_the_version_is_the_packages_and_types_are_its_own() -> None:
    assert cbsim.__version__ == "0.1.0"
    assert all((ROOT / package / "py.typed").exists() for package in ("cbsim", "cbengine", "analysis"))


def test_an_editor_can_complete_every_keyword() -> None:
    for package in (cbsim, cbengine):
        doors = [getattr(package, name) for name in package.__all__ if name.islower()]
        for door in doors:
            assert not [p.name for p in signature(door).parameters.values() if p.kind is p.VAR_KEYWORD], door
