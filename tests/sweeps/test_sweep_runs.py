"""A sweep from file to table: what is run and what is not, what its runs are, and what a person is told."""

from __future__ import annotations

import json
import os
import re
import time
from errno import ENOSPC
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.calls import SMALL, call, refused
from support.sweeping import SWEEP, seats

import cbsim
from analysis.statistics import sweep_table
from cbsim.errors import RunError, ScenarioError
from cbsim.metrics import catalogue, checks, coverage
from cbsim.runs import running
from cbsim.scenario import documents
from cbsim.scenario.speculation import CURVES
from cbsim.stats import pareto, replicated
from cbsim.sweeps import identity, sweep_file
from cbsim.sweeps import sweep as points
from cbsim.sweeps.store import PART, STALE_S, Store
from cbsim.sweeps.sweep import Shard, Sweep
from cbsim.sweeps.work import Here, Made, Processes, Task, work

ROUTER = """\
from cbsim.routers.base import RouterBase, RouterKind
from cbsim.routers.simple import PlainSettings


class First(RouterBase):
    def choose(self, request, views, now_ns):
        return 0


KIND = RouterKind(name="keyed", about="", settings=PlainSettings, make=lambda *_: First())
"""


def a_sweep(path: Path, store: Path, shard: Shard = (1, 1)) -> Sweep:
    return Sweep(*sweep_file.read(path), store, shard)


def test_a_row_says_what_the_run_says(sweep: Path, tmp_path: Path) -> None:
    """Every point is the run that `cbsim run` makes of the same scenario: equal numbers, in a table that any reader of
    Parquet reads.
    """
    swept = a_sweep(sweep, tmp_path / "store").run(Here())
    rows = pq.read_table(swept.path).to_pylist()
    assert [(row["workload.requests"], row["scheduler.name"], row["loop"]) for row in rows] == [
        (requests, name, loop) for requests in (4, 8) for name in ("vllm", "static") for loop in ("sync", "async")
    ]
    for row in rows:
        changes = [f"{field}={row[field]}" for field in ("workload.requests", "scheduler.name")]
        alone = cbsim.run(cbsim.load(sweep.with_name("small.yaml"), *changes, f"loop.mode={row['loop']}"))
        assert isinstance(alone, cbsim.Result)
        found = catalogue.quantities(alone.summary)
        assert {name: row[name] for name in found} == found
        assert row["output_tokens_per_s_per_gpu"] == found["output_tokens_per_s"]
        assert row["output_tokens_per_s_per_user"] == 1 / found["tpot_s.mean"]
        assert (row["status"], row["reason"], row["seed"], row["replicate"]) == ("done", None, 0, 0)
        assert json.loads((tmp_path / "store" / "runs" / identity.code() / row["key"] / "summary.json").read_text())


def test_a_run_of_which_only_numbers_stay_digests_no_plan(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its summary is that of a run whose tables are kept, to the last byte."""
    ran, one_loop = list[cbsim.Result](), running.one_loop
    monkeypatch.setattr(running, "one_loop", lambda *terms: ran.append(one_loop(*terms)) or ran[-1])  # type: ignore[func-returns-value]
    scenario = cbsim.load(small, "loop.mode=async")
    made = [work(Task("key", scenario, keep)).files for keep in ("summary", "tables")]
    assert [result.step_numbers["plan_hash"].any() for result in ran] == [False, True]
    assert made[0]["summary.json"] == made[1]["summary.json"]


def test_why_a_run_failed_is_one_line(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("of two\nlines")

    monkeypatch.setattr(running, "one_loop", failing)
    reason = work(Task("key", cbsim.load(small), "summary")).reason
    assert reason is not None
    assert re.fullmatch(r"RuntimeError: of two lines \(test_sweep_runs\.py:\d+, failing\)", reason)


def test_a_fleet_has_the_gpus_and_the_price_of_all(small: Path, tmp_path: Path) -> None:
    """Over the size of a pool and the router; the second server has two GPUs of another price."""
    price = {"price_usd_hour": 7.0}
    pools = [{}, {"server": {"hardware": price, "cost": {"tensor_parallel": 2}}}]
    fleet = json.dumps({"pools": pools, "router": {"virtual_nodes": 9}})
    file = small.with_name("fleet.yaml")
    file.write_text(
        f"scenario: small.yaml\nset: {{fleet: {fleet}}}\naxes:\n  fleet.pools.0.count: [1, 2]\n"
        "  fleet.router.name: [round_robin, least_in_flight]\n"
    )
    rows = pq.read_table(a_sweep(file, tmp_path / "store").run(Here()).path).to_pylist()
    one = cbsim.load(small).hardware.price_usd_hour
    assert [row["fleet.router.name"] for row in rows] == ["round_robin", "least_in_flight"] * 2
    for row in rows:
        count = row["fleet.pools.0.count"]
        price_usd_hour = row["cost.usd_per_million_output_tokens"] / 1e6 * row["output_tokens_per_s"] * 3600
        assert price_usd_hour == pytest.approx(14 + count * one)
        assert row["output_tokens_per_s_per_gpu"] == pytest.approx(row["output_tokens_per_s"] / (2 + count))


def test_a_point_may_be_a_fleet(tmp_path: Path) -> None:
    """Its servers and its router are fields like others; a point is the run of that scenario, in whatever process."""
    fleet = {"pools": [{"count": 1}], "router": {"name": "round_robin"}}
    (tmp_path / "fleet.yaml").write_text(f"{SMALL}fleet: {json.dumps(fleet)}\n")
    axes = {"fleet.pools.0.count": [1, 2], "fleet.router.name": ["round_robin", "least_in_flight"]}
    (tmp_path / "sweep.yaml").write_text(json.dumps({"scenario": "fleet.yaml", "axes": axes}))
    rows, again = (
        pq.read_table(a_sweep(tmp_path / "sweep.yaml", tmp_path / str(number)).run(who).path).to_pylist()
        for number, who in enumerate((Here(), Processes(2)))
    )
    assert [(row["fleet.pools.0.count"], row["fleet.router.name"]) for row in rows] == [*product(*axes.values())]
    assert rows == again
    for row in rows:
        alone = cbsim.run(cbsim.load(tmp_path / "fleet.yaml", *(f"{field}={row[field]}" for field in axes)))
        assert isinstance(alone, cbsim.Result)
        found = catalogue.quantities(alone.summary)
        assert {name: row[name] for name in found} == found
        assert alone.summary.get("servers", 1) == row["fleet.pools.0.count"]
    assert len({row["imbalance.tokens"] for row in rows if row["fleet.pools.0.count"] == 1}) == 1


def test_a_table_says_what_its_step_times_rest_on(sweep: Path, tmp_path: Path) -> None:
    """Whoever reads the table learns it: the terminal, a frontier, the page of the sweep."""
    swept = a_sweep(sweep, tmp_path / "store").run(Here())
    rest = coverage.bases(row.point.scenario for row in swept.rows)
    assert len(rest) == 1
    assert rest[0].startswith("step times by ")
    assert rest[0] in str(swept)
    table = replicated.read(swept.path)
    assert table.step_times == rest == sweep_table.read(swept.path).step_times
    question = pareto.Question(*(checks.objective(name, "") for name in ("ttft.mean", "tpot.mean")), [], 0.95)
    assert pareto.study(table, question).findings[-1] == rest[0]


def test_only_what_is_missing_is_run(sweep: Path, tmp_path: Path) -> None:
    """A sweep that was ended goes on; one that shares points with another finds them; what is whole stays as it is."""
    store, heard = tmp_path / "store", list[Made]()

    def stop(made: Made) -> None:
        heard.append(made)
        if len(heard) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        a_sweep(sweep, store).run(Here(), stop)
    assert pq.read_table(store / "sizes.parquet")["status"].to_pylist() == ["done"] * 3 + ["missing"] * 5
    assert len(a_sweep(sweep, store).missing) == 5
    whole = a_sweep(sweep, store).run(Here(), heard.append)
    assert len(heard) == len({made.key for made in heard}) == 8
    before = {path: path.stat().st_mtime_ns for path in store.rglob("summary.json")}
    larger = sweep.with_name("larger.yaml")
    larger.write_text(SWEEP.replace("[4, 8]", "[4, 8, 12]"))
    more = a_sweep(larger, store).run(Here(), heard.append)
    assert len(heard) == 12
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert more.table.slice(0, 8).select(whole.table.column_names).equals(whole.table)


def test_a_run_without_the_tables_is_made_again_when_they_are_wanted(sweep: Path, tmp_path: Path) -> None:
    """The directory is then the one that `cbsim run` writes; its numbers are the same."""
    a_sweep(sweep, tmp_path / "store").run(Here())
    sweep.write_text(SWEEP + "keep: tables\n")
    wanted = a_sweep(sweep, tmp_path / "store")
    assert len(wanted.missing) == 8
    first = wanted.run(Here()).rows[0].point.key
    folder = wanted.store.run(first)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("env.json", "requests.parquet", "scenario.resolved.yaml", "seal.json", "steps.parquet", "summary.json")
    ]
    assert cbsim.read(folder).summary["requests"] == 4
    sweep.write_text(SWEEP)
    assert not a_sweep(sweep, tmp_path / "store").missing  # more than asked for is enough


def test_replicates_have_one_seed_at_all_points(sweep: Path, tmp_path: Path) -> None:
    """Common random numbers: the requests of a replicate are the same whoever serves them, and differ between two."""
    sweep.write_text(SWEEP + "replicates: 3\nset: {seed: 7}\n")
    rows = a_sweep(sweep, tmp_path / "store").run(Here()).table.to_pylist()
    assert len(rows) == 24
    assert all(row["seed"] == 7 + row["replicate"] for row in rows)
    tokens = {(row["workload.requests"], row["seed"]): set[float]() for row in rows}
    for row in rows:
        tokens[row["workload.requests"], row["seed"]].add(row["input_tokens"])
    assert all(len(counts) == 1 for counts in tokens.values())
    assert len({next(iter(counts)) for (requests, _), counts in tokens.items() if requests == 8}) == 3


def test_shards_are_a_partition(sweep: Path, tmp_path: Path) -> None:
    """Machines that know nothing of each other do every point once."""
    parts = [a_sweep(sweep, tmp_path / "store", (i, 3)).missing for i in (1, 2, 3)]
    keys = [point.key for part in parts for point in part]
    assert sorted(keys) == sorted(point.key for point in a_sweep(sweep, tmp_path / "store").points)
    assert {len(part) for part in parts} == {2, 3}
    a_sweep(sweep, tmp_path / "store", (1, 3)).run(Here())  # what others have done changes nobody's part
    assert [point.key for point in a_sweep(sweep, tmp_path / "store", (2, 3)).missing] == [p.key for p in parts[1]]
    assert not a_sweep(sweep, tmp_path / "store", (1, 3)).missing


def test_a_point_that_fails_says_why_and_stops_nobody(trapped: Path, tmp_path: Path) -> None:
    """It has no run, and is tried again when the sweep is."""
    said = call("sweep", seats(trapped, 5, 66, 7), "--store", tmp_path / "store", "--jobs", 1)
    assert said.status == 1
    assert "2 done, 1 failed" in said.out
    assert "trapped" in said.err
    assert "Traceback" not in said.err
    rows = pq.read_table(tmp_path / "store" / "trap.parquet").to_pylist()
    assert [row["status"] for row in rows] == ["done", "failed", "done"]
    assert "RuntimeError" in rows[1]["reason"]
    assert len(a_sweep(trapped, tmp_path / "store").missing) == 1


def test_a_changed_policy_is_another_point(trapped: Path, tmp_path: Path) -> None:
    """Code that is not ours is a part of what names a run."""
    (before,) = a_sweep(seats(trapped, 5), tmp_path / "store").points
    path = trapped.with_name("trapped.py")
    path.write_text(path.read_text() + "\n# another state\n")
    (after,) = a_sweep(trapped, tmp_path / "store").points
    assert before.key != after.key


def test_a_key_names_what_numbers_follow_from(small: Path) -> None:
    """Not the words of a scenario; every other field; the content of the files that it reads."""
    load = cbsim.load
    same = identity.key(load(small))
    assert identity.key(load(small, "name=other", "question=Why?")) == same
    changes = ("seed=1", "workload.requests=13", "kv_cache.num_blocks=999", "loop.mode=async", "slo.ttft_s=1")
    assert len({same, *(identity.key(load(small, change)) for change in changes)}) == 6
    trace = small.with_name("trace.csv")
    workload = f"workload={{kind: lengths, path: {trace}}}"
    keys = []
    for text in ("prompt_tokens,output_tokens\n5,5\n", "prompt_tokens,output_tokens\n5,6\n"):
        trace.write_text(text)
        keys.append(identity.key(load(small, workload)))
    assert len({same, *keys}) == 3


def test_a_key_names_how_many_drafts_come_true(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a named curve, and those of a file."""
    keys, data = set[str](), small.with_name("data")
    curves, recorded = data / CURVES, data / "recorded.csv"
    curves.parent.mkdir(parents=True)
    monkeypatch.setenv("CBSIM_DATA", str(data))
    for length, drafts in (("1.8", "1"), ("1.9", "1"), ("1.9", "0")):
        curves.write_text(f"file,thinking,drafts,acceptance_length\nmtp,on,1,{length}\n")
        recorded.write_text(f"request,accepted\n0,{drafts}\n")
        for acceptance in ({"curve": "mtp/on"}, {"path": "recorded.csv"}):
            speculation = {"method": "ngram", "k": 1, "acceptance": acceptance}
            keys.add(identity.key(cbsim.load(small, {"scheduler": {"name": "vllm"}, "speculation": speculation})))
    assert len(keys) == 4


def test_how_many_drafts_come_true_is_an_axis_and_how_many_did_a_metric(small: Path, tmp_path: Path) -> None:
    """Both are columns of the table, and `contrast` finds either by its name."""
    drafts = "speculation: {method: ngram, k: 2}"
    file = small.with_name("drafts.yaml")
    file.write_text(
        f"scenario: small.yaml\nset: {{{drafts}}}\naxes:\n  speculation.acceptance: [{{rate: 0}}, {{rate: 1}}]\n"
    )
    swept = a_sweep(file, tmp_path / "store").run(Here())
    assert swept.table["drafts.acceptance_rate"].to_pylist() == [0, 1]
    said = call("contrast", swept.path, "--by", "speculation.acceptance", "--metric", "drafts.acceptance_length")
    assert said.status == 0 and said.out.startswith("drafts.acceptance_length\n"), said


def test_a_key_names_a_fleets_routers_and_the_files_of_its_servers(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module of a router of the user's own, and the tables of a pool."""
    keys, tables = set[str](), small.with_name("tables")
    monkeypatch.setattr(identity, "_content", lambda field, path: (field, path, tables.read_text()))
    monkeypatch.syspath_prepend(str(small.parent))
    for code, table in (("1", "a"), ("2", "a"), ("2", "b")):
        small.with_name("keyed.py").write_text(f"{ROUTER}# {code}\n")
        tables.write_text(table)
        cost = {"kind": "table", "path": str(tables), "engine": "vllm"}
        fleet = {"pools": [{"server": {"cost": cost}}], "router": {"name": "keyed:KIND"}}
        keys.add(identity.key(cbsim.load(small, {"fleet": fleet})))
    assert len(keys) == 3


def test_runs_of_other_code_stay_apart(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told of and count for nothing."""
    a_sweep(sweep, tmp_path / "store").run(Here())
    was = identity.code()
    monkeypatch.setattr(identity, "code", lambda: "another")
    said = call("sweep", sweep, "--store", tmp_path / "store", "--jobs", 1, "--shard", "1/8")
    assert f"8 runs of another state of the code ({was}) stay apart" in said.out
    assert "1 done, 7 missing" in said.out


def test_all_points_are_built_before_one_runs(sweep: Path, tmp_path: Path) -> None:
    """Each mistake is told once, with a point that makes it and how many do; nothing is written."""
    sweep.write_text(SWEEP + "set: {workload.nonsense: 3}\nreplicates: 3\n")  # which are no further points
    said = call("sweep", sweep, "--store", tmp_path / "store")
    assert said.status == 2
    assert "Traceback" not in said.err
    assert "8 points cannot be built; nothing was run" in said.err
    assert "point 0 (workload.requests=4, scheduler.name=vllm, loop.mode=sync) and 7 more: " in said.err
    assert "nonsense: unknown field" in said.err
    assert not (tmp_path / "store").exists()
    wrong = SWEEP.replace("[4, 8]", "[4, -1, 0.5]")
    with pytest.raises(ScenarioError) as caught:
        points.of(sweep_file.read(documents.parse(wrong, "test") | {"name": "x"})[0], sweep.parent)
    assert "got -1" in str(caught.value)
    assert "got 0.5" in str(caught.value)


def test_data_that_is_not_there_is_told_before_anything_runs(sweep: Path, tmp_path: Path) -> None:
    sweep.write_text("scenario: small.yaml\nset: {workload: {kind: azure, path: nowhere.csv}}\n")
    refused(call("sweep", sweep, "--store", tmp_path / "store"), 2, "nowhere.csv")


def test_a_store_that_cannot_be_written_is_one_line(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    refused(call("sweep", sweep, "--store", tmp_path / "file", "--jobs", 1), 2, "--store", "file: cannot be written")


def test_a_run_that_cannot_be_stored_takes_its_folder_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, which what was written of it would fill."""
    store, write = Store(tmp_path, "code"), Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if "b.json" in path.name:
            raise OSError(ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=f"^{tmp_path}/runs/code/key: cannot be written: No space left"):
        store.put("key", {"a.json": b"{}", "b.json": b"{}"})
    assert not list((tmp_path / "runs" / "code").iterdir())
    with pytest.raises(RunError, match=f"^{tmp_path}/failed/code/b.json: cannot be written: No space left"):
        store.keep(Made("b", {}, "it failed"))


def test_a_run_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """What a sweep that was killed left behind is no run; it goes when nobody can be writing it any more."""
    store = Store(tmp_path, "code")
    store.keep(Made("a", {}, "stuck"))
    assert store.outcome("a") == (None, "stuck")
    store.keep(Made("a", {"summary.json": b'{"output_tokens_per_s": 1}'}))
    assert not list(tmp_path.glob("failed/code/*")), "the reason of a failure goes when a run is there"
    left = tmp_path / "runs" / "code" / f"{PART}x"
    left.mkdir()
    Store(tmp_path, "code")
    assert left.exists()
    long_ago = time.time() - STALE_S - 1
    os.utime(left, (long_ago, long_ago))
    Store(tmp_path, "code")
    assert not left.exists()
    store.keep(Made("a", {"summary.json": b"[]"}))  # the same key is the same run: the first one stays
    assert store.outcome("a") == ({"output_tokens_per_s": 1}, None)
    store.keep(Made("a", {}, "stuck"))
    tables = ("summary.json", "steps.parquet")
    assert store.outcome("a", tables) == (None, "stuck"), "a run without the tables is none with them"
    (tmp_path / "failed" / "code" / "a.json").write_text("[]")
    assert store.outcome("a", tables) == (None, None)
    store.keep(Made("a", {"summary.json": b"{}", "steps.parquet": b"x"}))
    assert store.holds("a", ("steps.parquet",))
    assert [path.name for path in left.parent.iterdir()] == ["a"]


def test_from_python(sweep: Path, tmp_path: Path) -> None:
    """A file or its fields; the table is one of Arrow."""
    swept = cbsim.sweep(sweep, store=tmp_path / "store")
    fields = {"scenario": str(sweep.with_name("small.yaml")), "axes": {"workload.requests": [4, 8]}, "name": "mine"}
    mine = cbsim.sweep(fields, store=tmp_path / "store")
    assert mine.path == tmp_path / "store" / "mine.parquet"
    assert mine.table["makespan_s"].to_pylist() == swept.table["makespan_s"].to_pylist()[::4]
    assert repr(mine) == "<Swept mine: 2 of 2 points done>"
