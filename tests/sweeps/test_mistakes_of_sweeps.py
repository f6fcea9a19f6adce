"""What a user gets wrong about many runs: told before the work, in one message, and nothing is mixed up silently."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from errno import EACCES
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.calls import call, refused

import cbsim
from cbsim.errors import UserError
from cbsim.stats import replicated
from cbsim.sweeps import identity, sweep_file
from cbsim.sweeps.sweep import FILES, LARGEST_SEED, of
from cbsim.sweeps.sweep_file import Axis


@pytest.mark.parametrize(
    "fields",
    [
        {"axes": {"scheduler": [{"name": "vllm"}], "scheduler.max_num_seqs": [8]}},
        {"axes": {"scheduler.max_num_seqs": [8], "scheduler": [{"name": "vllm"}]}},
        {"set": {"scheduler.max_num_seqs": 8}, "axes": {"scheduler": [{"name": "vllm"}]}},
        {"axes": {"points": [{"scheduler.max_num_seqs": 8, "scheduler": {"name": "vllm"}}]}},
    ],
)
def test_a_whole_is_set_before_its_fields(fields: dict[str, Any]) -> None:
    """However they are written, neither undoes the other."""
    (point,) = of(*sweep_file.read({"scenario": "rates", "loop": ["sync"], **fields}))
    assert point.scenario == cbsim.load(
        "rates", {"scheduler": {"name": "vllm", "max_num_seqs": 8}, "loop.mode": "sync"}
    )


def test_points_may_set_a_whole_or_its_field() -> None:
    axes = {"points": [{"scheduler.max_num_seqs": 8}, {"scheduler": {"name": "static"}}]}
    points = of(*sweep_file.read({"scenario": "rates", "set": {"loop.mode": "sync"}, "axes": axes}))
    assert [dict(point.settings) for point in points] == axes["points"]


def test_values_that_begin_alike_are_two_places(small: Path, tmp_path: Path) -> None:
    """Values of an axis may be long; what tells them apart is kept."""
    length = {"lognormal": {"mean": 5, "sigma": 0.5, "low": 1, "high": 9}}
    load = {"kind": "synthetic", "requests": 2, "shared_prefix_tokens": 0}
    load |= {"prompt_tokens": length, "output_tokens": length}
    loads = [{**load, "arrivals": {"kind": "poisson", "rate_per_s": rate}} for rate in (1, 50)]
    fields = {"scenario": str(small), "axes": {"workload": loads}}
    swept = cbsim.sweep(fields, store=tmp_path)
    assert len(replicated.read(swept.path).configurations) == 2
    assert [json.loads(text) for text in swept.table["workload"].to_pylist()] == loads


def test_values_of_a_program_are_values(small: Path, tmp_path: Path) -> None:
    """Arrays and numbers of numpy, ranges."""
    for values in (np.array([2, 4]), [np.int64(2), np.int64(4)], range(2, 5, 2)):
        swept = cbsim.sweep({"scenario": str(small), "axes": {"workload.requests": values}}, store=tmp_path)
        assert swept.table["requests"].to_pylist() == [2, 4]
    assert Axis.model_validate({"seed": np.arange(3)}).fields == {"seed": (0, 1, 2)}


def test_a_seed_that_no_table_holds_is_told_before_anything_runs(small: Path, tmp_path: Path) -> None:
    fields = {"scenario": str(small), "set": {"seed": LARGEST_SEED}, "replicates": 2}
    with pytest.raises(UserError, match=r"seed: got 9,223,372,036,854,775,807, must be <="):
        cbsim.sweep(fields, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: cbsim.sweep(5),  # type: ignore[arg-type]
        lambda: cbsim.sweep({"scenario": "8k_b32"}, jobs="2"),  # type: ignore[arg-type]
        lambda: cbsim.sweep({"scenario": "8k_b32"}, jobs=0),
        lambda: cbsim.sweep({"scenario": "8k_b32", "set": 5}, {"seed": 1}),
        lambda: cbsim.sweep({"scenario": "8k_b32", "axes": {"seed": [object()]}}),
        lambda: cbsim.sweep({"scenario": "8k_b32", "axes": {"seed": [1]}}, {"seed": 2}),
        lambda: cbsim.tune("rates", {"scheduler.max_num_seqs": [8]}, "goodput", changes={"scheduler.max_num_seqs": 4}),
        lambda: cbsim.tune("rates", {"scheduler.max_num_seqs": [8]}, "goodput", slo="ttft.p99<=2s"),
        lambda: cbsim.tune("rates", {"scheduler.max_num_seqs": [8]}, "goodput", changes="seed=1"),
    ],
)
def test_calls_that_mean_nothing_are_a_user_s_mistake(wrong: Any) -> None:
    with pytest.raises(UserError):
        wrong()


def altered(**changes: Any) -> Callable[[Path, Path], object]:
    """A function that changes numbers in the summary of a stored run."""
    return lambda run, _: (run / "summary.json").write_text(
        json.dumps(json.loads((run / "summary.json").read_text()) | changes)
    )


@pytest.mark.parametrize(
    "harm",
    [
        *(lambda run, _, text=text: (run / "summary.json").write_text(text) for text in ("{", "[]", "null", "")),
        altered(output_tokens_per_s=-1),
        altered(requests=1e30),
        altered(preemptions=None),
        altered(makespan_s="3"),
        lambda run, _: (run / "steps.parquet").write_bytes(b"PAR1"),
        lambda run, _: (run / "seal.json").unlink(),
        lambda run, other: shutil.copy(other / "summary.json", run),
        lambda run, other: [shutil.copy(file, run) for file in other.iterdir()],
        *(lambda run, _, text=text: (run / "seal.json").write_text(text) for text in ("[]", "null")),
        lambda run, _: (run / "INCOMPLETE").write_text("interrupted"),
    ],
)
def test_a_stored_run_that_was_altered_is_made_again(
    small: Path, tmp_path: Path, harm: Callable[[Path, Path], object]
) -> None:
    """Numbers of a table are those that were stored for the point: not altered, not another run's, not half of one."""
    file = small.with_name("two.yaml")
    file.write_text("scenario: small.yaml\naxes: {workload.requests: [2, 3]}\nkeep: tables\n")
    table = cbsim.sweep(file, store=tmp_path / "store").table
    one, other = (tmp_path / "store" / "runs" / identity.code() / key for key in table["key"].to_pylist())
    files = {name: (one / name).read_bytes() for name in FILES["tables"]}
    harm(one, other)
    words = ("sweep", file, "--store", tmp_path / "store", "--jobs", 1, "--quiet")
    said = call(*words)
    assert (said.status, said.out) == (0, f"{tmp_path / 'store' / 'two.parquet'}\n")
    assert said.err.startswith(f"damaged   {one}") and said.err.endswith(": simulated again\n")
    assert pq.read_table(tmp_path / "store" / "two.parquet").equals(table)
    assert {name: (one / name).read_bytes() for name in files} == files
    assert not call(*words).err


def test_all_damaged_runs_are_one_line(sweep: Path, tmp_path: Path) -> None:
    """Those of another shard count as missing; a run that lacks a file that is wanted now is not damaged."""
    key, *_ = [row.point.key for row in cbsim.sweep(sweep, store=tmp_path).rows]
    runs = tmp_path / "runs" / identity.code()
    for seal in runs.glob("*/seal.json"):
        seal.write_text("[]")
    words, table = ("sweep", sweep, "--store", tmp_path, "--jobs", 1, "--quiet"), tmp_path / "sizes.parquet"
    call(*words, "--shard", "8/8")
    assert pq.read_table(table)["status"].to_pylist() == ["missing"] * 7 + ["done"]
    said, first = call(*words), f"{runs / key / 'seal.json'}: got [], expected a JSON object"
    assert (said.status, said.err) == (0, f"damaged   {first} and 6 more: simulated again\n")
    sweep.write_text(sweep.read_text() + "keep: tables\n")
    assert not call(*words).err


def test_what_is_no_run_gives_way_to_the_run(sweep: Path, tmp_path: Path) -> None:
    """A file named as its key; nothing of it stays."""
    keys = cbsim.sweep(sweep, store=tmp_path).table["key"].to_pylist()
    runs = tmp_path / "runs" / identity.code()
    shutil.rmtree(runs / keys[0])
    (runs / keys[0]).write_text("in the way")
    assert cbsim.sweep(sweep, store=tmp_path).table["status"].to_pylist() == ["done"] * 8
    assert {path.name for path in runs.iterdir()} == set(keys)


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ("{workload.requests: [2, 2.0]}", ("wrong.yaml:2: axes: has workload.requests=2.0 twice: at 0 and 1",)),
        ("{points: [{seed: 1}, {seed: 2}, {seed: 1}]}", ("axes: has seed=1 twice: at 0 and 2",)),
        ("{seed: [1, 2]}\nset: {seed: 3}", ("wrong.yaml:3: set: seed: is set by axes or loop, too",)),
        (
            "{scheduler: [{name: vllm, max_num_seqs: 2}]}\nset: {scheduler.max_num_seqs: 4}",
            ("wrong.yaml:3: set: scheduler.max_num_seqs: is set by axes or loop, too; expected one of them",),
        ),
        ("{seed: [1, 2]}\nloop: [sync, async, sync]", ("loop: has a loop twice: sync, async, sync",)),
        (
            "{workload.requests: [-3, x, .nan, -4]}",
            (
                "point 0 (workload.requests=-3) and 1 more: workload.requests: got -3",
                "point 1 (workload.requests=x) and 1 more: workload.requests: got 'x', expected a whole number",
            ),
        ),
        (
            "{workload.requsts: [2, 3], cost.x: [1]}",
            ("requsts=2, cost.x=1) and 1 more: cost.x: unknown field", " and 1 more: workload.requsts: un"),
        ),
        (
            "{points: [{workload.requests: 2}, {workload.requests: x}]}\nreplicates: 3",
            (": sweep wrong: point 1 (workload.requests=x): workload.requests: got 'x'",),
        ),
        (
            "{points: [{seed: 1}, {workload: {kind: lengths, path: small.yaml}}]}",
            ("point 1 (workload={'kind': 'lengths', 'path': 'small.yaml'}): ", "small.yaml:1: no column"),
        ),
    ],
)
def test_a_mistake_of_a_sweep_file_is_told_once_with_the_file(
    small: Path, tmp_path: Path, axes: str, says: tuple[str, ...]
) -> None:
    file = small.with_name("wrong.yaml")
    file.write_text(f"scenario: small.yaml\naxes: {axes}\n")
    said = call("sweep", file, "--store", tmp_path / "store", "--jobs", 1)
    assert said.status == 2 and said.err.startswith(f"cbsim: {file}"), said
    assert all(each in said.err for each in says), said.err
    assert len(said.err.splitlines()) <= 4
    with pytest.raises(UserError, match=f"^{file}") as caught:
        cbsim.sweep(file, store=tmp_path / "store")
    assert f"cbsim: {caught.value}\n" == said.err
    assert not (tmp_path / "store").exists()


def test_a_point_that_no_file_can_hold_is_named() -> None:
    with pytest.raises(UserError, match=r"point 1 \(seed=<object.*\): seed: got <object"):
        cbsim.sweep({"scenario": "8k_b32", "axes": {"seed": [1, object()]}})


def test_a_table_that_cannot_be_written_is_told_before_anything_runs(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is at its place; its folder takes no files."""
    store, mkdir = tmp_path / "store", os.mkdir
    words, table = ("sweep", sweep, "--store", store, "--jobs", 1), store / "sizes.parquet"
    table.mkdir(parents=True)
    refused(call(*words), 2, f"{table}: cannot be written: it is a folder")
    table.rmdir()

    def full(path: str | Path, *mode: int) -> None:
        if Path(path).parent == store:
            raise PermissionError(EACCES, "Permission denied")
        mkdir(path, *mode)

    monkeypatch.setattr(os, "mkdir", full)
    refused(call(*words), 2, f"{table}: cannot be written: Permission denied")
    assert not list(store.glob("runs/*/*"))


def test_tables_that_are_none_are_told(small: Path, tmp_path: Path) -> None:
    """A folder is not one sweep; columns of other kinds, rows without a seed; what is no number is left out."""
    fields = {"scenario": str(small), "axes": {"workload.requests": [2, 3]}, "name": "s", "replicates": 2}
    table = cbsim.sweep(fields, store=tmp_path).table
    path = tmp_path / "wrong.parquet"

    def written(name: str, column: Any) -> Path:
        pq.write_table(table.set_column(table.column_names.index(name), name, column), path)
        return path

    refused(call("pareto", tmp_path), 2, "is no file")
    texts = pa.array(["x"] * 4)
    refused(call("contrast", written("makespan_s", texts), "--by", "requests"), 2, "makespan_s: got a column of string")
    refused(call("pareto", written("seed", pa.array([0, 1, None, 1]))), 2, "seed: got a row without one")
    refused(call("pareto", written("workload.requests", pa.array([[1]] * 4))), 2, "workload.requests: got a column of")
    partly = written("ttft_s.mean", pa.array([1.0, float("nan"), None, 2.0]))
    assert [len(each.values("ttft_s.mean")) for each in replicated.read(partly).configurations] == [1, 1]


def test_confidences_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for share, expected in (("99.9999999999999%", "from 0.5 to 0.999999"), ("0.3", "from 0.5"), ("101%", "from 0.5")):
        wrong = call("pareto", tmp_path / "none.parquet", "--confidence", share)
        assert wrong.status == 2 and f"expected a share {expected}" in wrong.err


def test_where_an_answer_goes_is_looked_at_first(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    words = ("tune", small, "--knob", "seats=1,2", "--maximise", "throughput", "--store", tmp_path / "store")
    refused(call(*words, "--out", tmp_path / "file"), 2, "file", "cannot be written")
    assert not (tmp_path / "store").exists()
