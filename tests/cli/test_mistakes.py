"""Mistakes in conditions, overrides, files and arguments: exit 2, one message that names them, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.calls import SMALL, call, refused

from cbsim.scenario import documents, rows
from cbsim.scenario.speculation import CURVES
from cbsim.workload import generators


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--check", "tttf.p99<3s", ("--check 'tttf.p99<3s'", "'tttf.p99'", "did you mean ttft.p99?")),
        ("--check", "nope<3", ("unknown metric 'nope'; docs/metrics.md has all names",)),
        *(("--set", nothing, ("expected field=value",)) for nothing in ("", "seed", "=5", "a..b=3")),
        ("--loop", "fast", ("loop.mode: got 'fast', expected one of sync, async, both",)),
        ("--set", "0=1", ("--set 0=1: 0: unknown field",)),
        ("--set", "scheduler.name=vlm", ("--set scheduler.name=vlm: scheduler.name: got 'vlm'", "did you mean vllm?")),
        ("--set", "workload.prompt_tokens={uniform: {low: 9, high: 3}}", ("high: got 3", "must be >= low (9)")),
        ("--set", "kv_cache.memory_fraction=0.05", ("kv_cache.memory_fraction: got 0.05", "too little for a cache")),
        ("--set", "seed=[1", ("--set seed=[1", "not valid YAML")),
        ("--set", "name=../x", ("--set name=../x", "name: got '../x'")),
        ("--set", "workload={kind: csv, path: folder}", ("workload.path: no file ", "/folder is a folder")),
        ("--set", "kv_cache.block_size=1e15", ("small.yaml:2 with --set kv_cache.block_size=1e15: model: got",)),
        ("--set", "scheduler.kv_connector=hand_off", ("kv_connector: got hand_off, which comes with fleet.pools",)),
        ("--set", "scheduler.max_num_seqs=100000", ("max_num_batched_tokens: got 8192", "max_num_seqs (100000)")),
        ("--set", "model=llama-3.1-70b", ("kv_cache.memory_fraction: got 0.9, too", "141.11 GB of weights")),
        ("--set", "model=llama-3.1-405b", ("model: got Llama-3.1-405B", "too little for a cache", "more GPUs (cost.")),
    ],
)
def test_a_bad_option_is_named(small: Path, out: Path, option: str, value: str, words: tuple[str, ...]) -> None:
    """A wrong name, number or unit, or a field that contradicts another one, given or default, is exit 2 and one line
    with the field, the value and the bound, before anything is simulated."""
    (small.parent / "folder").mkdir()
    refused(call("run", small, option, value, "--out", out), 2, *words)
    assert not out.exists()


DRAFTS = "speculation: {method: ngram, k: 3, acceptance: {path: accepted.csv}}\n"


@pytest.mark.parametrize(
    ("acceptance", "words"),
    [
        ("{curve: nope}", "curve: unknown curve 'nope'"),
        ("{curve: []}", "curve: got [], expected the name of a curve or a list of mean lengths"),
        ("{curve: {a: 1}}", "curve: got {'a': 1}, expected the name of a curve or a list of mean lengths"),
        ("{curve: 3}", "curve: got 3, expected the name of a curve or a list of mean lengths"),
        ("{curve: [0.5]}", "curve.0: got 0.5, must be >= 1"),
        ("{curve: [1.5, 4]}", "curve.1: got 4, must be <= 3: 2 drafts"),
        ('{path: ""}', "path: got '', expected a path"),
        ("{path: nowhere.csv}", "path: no file 'nowhere.csv' beside the scenario"),
    ],
)
def test_acceptance_that_is_none_is_named_with_what_states_it(
    small: Path, out: Path, acceptance: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of the file, or the override; also where only a run would have looked for the data."""
    curves = small.parent / CURVES
    curves.parent.mkdir(parents=True)
    curves.write_text("file,thinking,drafts,acceptance_length\nmtp,on,1,1.5\n")
    monkeypatch.setenv("CBSIM_DATA", str(small.parent))
    small.write_text(SMALL + DRAFTS.replace("{path: accepted.csv}", acceptance))
    refused(call("run", small, "--out", out), 2, f"{small}:12: speculation.acceptance.{words}")
    small.write_text(SMALL)
    override = DRAFTS.replace(": ", "=", 1).replace("{path: accepted.csv}", acceptance).strip()
    refused(call("run", small, "--set", override, "--out", out), 2, f"--set {override}: speculation.acceptance.{words}")
    assert not out.exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("0,1\n0,4\n", ":3: accepted: got 4, expected at most 3 drafts (speculation.k)"),
        ("0,1\n12,1\n", ":3: request: got 12, expected a request's number, from 0 to 11"),
        ("0,1\n0,-1\n", ":3: accepted: got '-1', expected a whole number"),
        ("1,0\n2,0\n", ": request: has no row of request 0 and 9 others, expected one of each of 2 tokens or more"),
    ],
)
def test_accepted_drafts_of_another_run_are_refused(small: Path, out: Path, rows: str, words: str) -> None:
    """More of them than drafts, requests that the workload lacks, or lacking its own; nothing is cut or filled in."""
    small.write_text(SMALL + DRAFTS)
    small.with_name("accepted.csv").write_text(f"request,accepted\n{rows}")
    refused(call("run", small, "--out", out), 2, f"accepted.csv{words}")
    assert not out.exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("workload={kind: csv, path: late.csv, time_scale: 1e20}", "workload.time_scale: got 1e+20"),
        ("workload={kind: csv, path: late.csv, time_scale: 1e9}", "workload.time_scale: got 1e+09"),
        ("workload={kind: agentic, path: late.jsonl, time_scale: 1e19}", "workload.time_scale: got 1e+19"),
        ("workload={kind: golden, path: late.json, step_s: 1e10}", "workload.step_s: got 1e+10"),
        ("workload.arrivals={kind: constant, rate_per_s: 1e-9}", "workload.arrivals.rate_per_s: got 1e-09"),
        ("workload.arrivals={kind: closed_loop, users: 1, think_s: 1e10}", "workload.arrivals.think_s: got 1e+10"),
    ],
)
def test_requests_later_than_a_run_can_last_are_an_error_of_what_says_when(
    small: Path, out: Path, override: str, words: str
) -> None:
    """By its arrival, or its delay after another one: no clock of a run, and no column of its tables, gets there."""
    small.with_name("late.csv").write_text("arrival_s,prefill_tokens,decode_tokens\n0,7,3\n4,7,3\n")
    golden = {"id": "a", "prompt": [1], "max_new_tokens": 5, "arrival_step": 3}
    small.with_name("late.json").write_text(json.dumps({"cb": {"block_size": 2}, "cancels": [], "requests": [golden]}))
    turn = {"session_id": "a", "input_length": 5, "output_length": 2, "hash_ids": [1]}
    turns = [turn | {"timestamp": 0}, turn | {"hash_ids": [2], "delay": 7}]
    small.with_name("late.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in turns))
    said = call("run", small, "--set", override, "--out", out)
    refused(said, 2, f"--set {override}: {words}, must let all come within 2.31e+09 s, 73 years")
    assert not out.exists()


def test_every_wrong_condition_is_told_at_once(small: Path, out: Path) -> None:
    checks = [part for text in ("nope<3", "ttft.p99<2s", "nix<4") for part in ("--check", text)]
    said = call("run", small, "--out", out, *checks)
    assert (said.status, out.exists()) == (2, False)
    assert ["'nope<3'" in said.err, "ttft.p99<2s" in said.err, "'nix<4'" in said.err] == [True, False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL + "colour: blue\n", (":12: colour: unknown field",)),
        (SMALL.replace("requests: 12", "requests: '12'"), (":6: workload.requests: got '12'", "a whole number")),
        (SMALL.replace("  mode", "\tmode"), (":11: not valid YAML",)),
        (SMALL + "slo: {}\nslo: {}\n", (':13: not valid YAML: found duplicate key "slo"\n',)),
        (SMALL.replace("model: llama-3.1-8b", "model: shapes/mine.yaml"), (":2: model:", "no such file")),
        ("", ("got nothing, expected fields",)),
    ],
)
def test_a_bad_file_is_named_with_its_line(small: Path, out: Path, text: str, words: tuple[str, ...]) -> None:
    """A broken scenario is exit 2 and one line: file and line, field, value, and what would be allowed."""
    small.write_text(text)
    refused(call("run", small, "--out", out), 2, str(small), *words)
    assert not out.exists()


@pytest.mark.parametrize("command", ["run", "tune", "contrast"])
def test_an_unknown_argument_comes_with_the_usage_of_its_command(command: str, small: Path) -> None:
    needed = {"tune": ("--knob", "seed=1,2", "--maximise", "throughput"), "contrast": ("--by", "loop")}
    said = call(command, small, *needed.get(command, ()), "--lop", "async")
    assert said.status == 2
    assert said.err.startswith(
        f"python -m cbsim {command}: unrecognized arguments: --lop async\nusage: python -m cbsim"
    )
    assert f"usage: python -m cbsim {command} " in said.err


def test_every_mistake_of_a_file_is_told_at_once(small: Path) -> None:
    """Two mistakes, two lines, each with its own place."""
    small.write_text(SMALL.replace("requests: 12", "requests: 0").replace("mode: sync", "mode: quick"))
    said = call("run", small)
    assert said.status == 2
    assert [line.split(": ")[-2] for line in said.err.splitlines()] == ["workload.requests", "loop.mode"]
    assert f"{small}:6" in said.err
    assert f"{small}:11" in said.err


def test_bytes_that_are_no_text(small: Path) -> None:
    """A binary file is said to be one."""
    small.write_bytes(bytes(range(256)))
    refused(call("run", small), 2, str(small), "not UTF-8 text")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("8k_b23", ("unknown scenario '8k_b23'", "did you mean 8k_b32?", "worked_example")),
        ("8k_b23.yaml", ("8k_b23.yaml: no such file", "did you mean 8k_b32?")),
        ("/nowhere/8k_b32.yaml", ("/nowhere/8k_b32.yaml: no such file",)),
        ("", ("unknown scenario ''",)),
        (".", ("unknown scenario '.'",)),
    ],
)
def test_an_unknown_scenario_is_exit_2(name: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is none gets a near miss and the known names; a path that is none is said to be none."""
    monkeypatch.chdir("/")
    refused(call("run", name), 2, *words)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["rnu"],
        ["run"],
        ["run", "worked_example", "--trace-steps", "5:2"],
        ["run", "worked_example", "--trace-steps", "5"],
        ["run", "worked_example", "--trace-steps", "a:b"],
        ["run", "worked_example", "--trace-steps=-1:3"],
        ["run", "worked_example", "--window", "3:3"],
        ["run", "worked_example", "--window", "nan:3"],
        ["run", "worked_example", "--window", "1_0:30"],
        ["run", "worked_example", "--trace-steps", "1_0:30"],
        ["contrast", "sweep.parquet", "--by", "loop", "--confidence", "3"],
        ["contrast", "sweep.parquet", "--by", "loop", "--confidence", "9_5%"],
        *(["run", "worked_example", "--seed", seed] for seed in ("abc", "1_0", "-1", "\uff12", "9" * 20)),
        ["run", "worked_example", "--set"],
        ["run", "worked_example", "--no-such-option"],
        ["conformance"],
        ["replan"],
        ["bench", "--yaml"],
        *(["sweep", "sweep.yaml", "--shard", shard] for shard in ("3/2", "x", "1/2/3", "1/\uff12", "1/")),
        *(["sweep", "sweep.yaml", "--jobs", jobs] for jobs in ("0", "\uff12")),
        ["sweep", "sweep.yaml", "--ray", "host:\uff12"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_exit_2(argv: list[str]) -> None:
    """A short message, no traceback; the usage behind it unless one argument is wrong, which the message names."""
    said = call(*argv)
    assert said.status == 2
    assert not said.out
    first, *usage = said.err.splitlines()
    assert first.startswith("python -m cbsim")
    assert [line for line in usage if line.startswith("usage: ")] == ([] if ": argument " in first else usage[:1])
    assert bool(usage) == (": argument " not in first)


def test_requests_that_do_not_fit_the_memory(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.3 KB a request are asked for before they are taken: 2e7 of them, 26 GB, do not fit 8 GB."""
    monkeypatch.setattr(rows, "free_bytes", lambda: 8_000_000_000)
    words = ("workload.requests: got 20,000,000, about 26.0 GB, must be <= 6,153,846: 8.0 GB of memory are free",)
    refused(call("run", small, "--set", "workload.requests=2e7", "--out", out), 2, *words)
    said = call("run", small, "--set", "workload.requests=2e8", "--out", out)
    refused(said, 2, "workload.requests: got 200000000.0, must be <= 100000000")
    assert not out.exists()


def test_what_the_system_says_of_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the machine's and the container's; a machine that says nothing refuses nothing."""
    monkeypatch.setattr(rows, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(rows, "CGROUP", tmp_path)
    assert rows.free_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    assert rows.free_bytes() == 4096
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert rows.free_bytes() == 4096
    (tmp_path / "memory.max").write_text("1000\n")
    assert rows.free_bytes() == 100


@pytest.mark.parametrize(("text", "end"), [("", ""), ("Unable to allocate 9 GiB", ": Unable to allocate 9 GiB")])
def test_memory_that_runs_out_is_no_mistake_of_the_arguments(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch, text: str, end: str
) -> None:
    """Exit 1, and what was at work: Python's own MemoryError says nothing."""

    def full(*_: object, **__: object) -> None:
        raise MemoryError(*([text] if text else []))

    monkeypatch.setattr(generators.np, "full", full)
    said = call("run", small, "--set", "workload.prompt_tokens=5", "--out", out)
    refused(said, 1, f"run: out of memory in cbsim.workload.generators.draw{end}\n")


def test_the_last_of_several_values_of_a_field_counts(small: Path, out: Path) -> None:
    """`--loop` and `--seed` are short for `--set`: what stands last on the line wins, and the folder names it once."""
    words = ("--loop", "sync", "--seed", 1, "--set", "seed=2", "--set", "loop.mode=async")
    assert call("run", small, *words, "--out", out, "--quiet").status == 0
    (run,) = out.iterdir()
    assert "mode-async" in run.name and "mode-sync" not in run.name
    resolved = documents.read(run / "scenario.resolved.yaml").data
    assert (resolved["loop"]["mode"], resolved["seed"]) == ("async", 2)


def test_a_folder_that_is_called_a_point_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` tells a reader of the message nothing."""
    monkeypatch.chdir(tmp_path)
    for path in (".", "./"):
        refused(call("replan", path), 2, f"cbsim: {tmp_path}/summary.json: cannot be read")


def test_the_longest_name_makes_a_folder(small: Path, out: Path) -> None:
    """A scenario's name and the values of `--set`, both as long as they may be, give a folder that systems can make."""
    words = ("--set", f"name={'n' * 150}", "--set", f"question={'q' * 150}")
    assert call("run", small, *words, "--out", out, "--quiet").status == 0
    (run,) = out.iterdir()
    assert len(run.name) <= 250


@pytest.mark.parametrize("option", ["--out", "--store"])
def test_an_empty_path_is_none(option: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that a script left empty is no folder: nothing is written to the current one."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    said = call("run" if option == "--out" else "capacity", small, option, "", "--check", "ttft.p99<1s")
    assert said.status == 2 and f"argument {option}: got '', expected a path" in said.err
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("model=llama-3.1-405b", "kv_cache.num_blocks=500"), "which need 815.84 GB with the weights; NVIDIA H200"),
        (("scheduler.max_model_len=92",), "sync: requests end at 92 tokens, as the scheduler has it: "),
        (("workload.shared_prefix_tokens=500",), "shared_prefix_tokens: got 500, but no prompt has more than 78"),
    ],
)
def test_a_likely_mistake_is_noticed(small: Path, out: Path, fields: tuple[str, ...], words: str) -> None:
    """What no rule forbids and hardly anybody wants is done, and said: a cache beyond memory, a prefix beyond all."""
    said = call("run", small, *(word for field in fields for word in ("--set", field)), "--out", out, "--quiet")
    assert said.status == 0
    assert said.err.startswith("notice: ") and words in said.err
