"""The command line, as a user meets it: what it prints, what it writes, its exit status, and how it fails.

Promises are those of the issue: exit 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed; `--json` prints one
object; the same scenario and seed give byte-identical tables; no traceback ever reaches a user for their own mistake.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import platform
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from calls import ROOT, SMALL, Said, call, environment, process, read, refused, runs

from cbsim.results import directory
from cbsim.results import environment as sources
from cbsim.scenario import catalog, scenario
from cbsim.workload import generators

GOLDEN = ROOT / "tests" / "golden"
LINE = "prompt_tokens: {uniform: {low: 20, high: 90}}"
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "n")
PROMISED = ("makespan_s", "steps", "gpu_active", "cpu_busy", "output_tokens_per_s")
COMPLETE = {
    *("env.json", "figures", "requests.parquet", "scenario.resolved.yaml", "steps.parquet", "summary.json"),
    "timeline.json.gz",
}


class Both(NamedTuple):
    """A run of both loops whose parts many tests look at."""

    file: Path
    out: Path
    said: Said


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("both")
    (folder / "small.yaml").write_text(SMALL)
    words = ("--loop", "both", "--seed", 7, "--trace-steps", "2:5", "--out", folder / "out", "--json")
    said = call("run", folder / "small.yaml", *words, "--check", "ttft.p99<500ms", "--check", "preemptions==0")
    return Both(folder / "small.yaml", folder / "out", said)


# -- what a run prints and writes -------------------------------------------------------------------------------------


def test_json_is_one_object_that_equals_the_summaries(both: Both) -> None:
    """--json prints one object, loop name -> that run's summary.json, with the keys that the issue names."""
    printed = json.loads(both.said.out)  # raises on anything before or after the one object
    assert both.said.status == 0
    assert list(printed) == ["sync", "async"]
    for loop, summary in printed.items():
        (path,) = both.out.glob(f"*-{loop}-*")
        assert summary == read(path / "summary.json")
        assert set(PROMISED) <= summary.keys()
        assert all(isinstance(summary[key], int | float) for key in PROMISED)
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            assert set(STATISTICS) <= summary[name].keys()
        assert summary["complete"] is True
        assert (summary["loop"], summary["seed"], summary["name"]) == (loop, 7, "small")


def test_json_leaves_stdout_to_the_object(both: Both) -> None:
    """With --json the verdicts go to stderr, one a loop and condition, and no progress line disturbs them."""
    assert [line.split()[:2] for line in both.said.err.splitlines()] == [["sync", "ok"]] * 2 + [["async", "ok"]] * 2


def test_a_run_directory_holds_what_the_design_says(both: Both) -> None:
    """Both loops have a directory of their own, complete and without a marker; the second has the common figure."""
    assert len(runs(both.out)) == 2
    for path in runs(both.out):
        assert {file.name for file in path.iterdir()} == COMPLETE
        assert (path / "figures" / "timeline.png").read_bytes().startswith(b"\x89PNG")
        assert directory.load(path).incomplete is None
    (second,) = both.out.glob("*-async-*")
    assert (second / "figures" / "sync_above_async.png").read_bytes().startswith(b"\x89PNG")


def test_env_json_says_where_a_run_comes_from(both: Both) -> None:
    """Command, git state, versions, workload hash and seed: enough to make the run again, or to see why it differs."""
    facts = [read(path / "env.json") for path in runs(both.out)]
    for fact in facts:
        command = shlex.split(fact["command"])
        assert command[:5] == ["python", "-m", "cbsim", "run", str(both.file)]
        assert fact["seed"] == 7
        assert fact["python"] == platform.python_version()
        assert {"commit", "dirty"} <= fact["git"].keys()
        assert {"simpy", "pydantic", "numpy", "pyarrow"} <= fact["packages"].keys()
        assert all(version for version in fact["packages"].values())
    asked = scenario.load(both.file, ["seed=7"])
    assert [fact["workload_hash"] for fact in facts] == [generators.build(asked).fingerprint()] * 2
    assert generators.build(scenario.load(both.file, ["seed=8"])).fingerprint() != facts[0]["workload_hash"]


def test_git_state_is_that_of_the_sources(both: Both) -> None:
    """env.json names a commit of this repository, and whether it was altered; nulls outside a checkout, or where git
    refuses, as in a checkout of another user.
    """
    state = read(runs(both.out)[0] / "env.json")["git"]
    words = ["git", "cat-file", "-t", str(state["commit"])]
    if state["commit"] is None:
        assert state["dirty"] is None
        return
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout == "commit\n"
    assert isinstance(state["dirty"], bool)


def test_a_report_written_before_does_not_make_the_code_a_changed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracked files count, but for those of reports/, which are output."""
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    for name in ("cbsim/results/environment.py", "reports/report.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("before")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "m"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    (tmp_path / "reports" / "report.md").write_text("after")
    assert sources.git_state()["dirty"] is False
    assert sources.code_version() == sources.git_state()["commit"]
    versions = set()
    for text in ("after", "later"):
        (tmp_path / "cbsim" / "results" / "environment.py").write_text(text)
        assert sources.git_state()["dirty"] is True
        versions.add(sources.code_version())
    assert len(versions) == 2, "two sets of changes to one commit are two versions"
    assert all(str(version).startswith(f"{sources.git_state()['commit']}+") for version in versions)


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (None, {"commit": None, "dirty": None}),
        ("", {"commit": None, "dirty": None}),
        ("abc", {"commit": "abc", "dirty": False}),
        ("abc+1f", {"commit": "abc", "dirty": True}),
    ],
)
def test_without_git_a_variable_says_the_commit(
    said: str | None, state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.delenv("CBSIM_COMMIT", raising=False)
    if said is not None:
        monkeypatch.setenv("CBSIM_COMMIT", said)
    assert sources.git_state() == state
    assert sources.code_version() == (said or None)


def test_the_resolved_scenario_is_the_run(both: Both) -> None:
    """scenario.resolved.yaml has every field written out, the loop that ran and the seed, and loads to itself."""
    for path in runs(both.out):
        resolved = scenario.load(path / "scenario.resolved.yaml")
        assert f"-{resolved.loop.mode}-" in path.name
        assert resolved.seed == 7
        assert scenario.dump(resolved) == (path / "scenario.resolved.yaml").read_text()


def test_trace_steps_bounds_the_timeline_only(both: Both) -> None:
    """--trace-steps 2:5 puts steps 2, 3 and 4 into the timeline; the step table keeps all of them."""
    for path in runs(both.out):
        events = json.loads(gzip.decompress((path / "timeline.json.gz").read_bytes()))["traceEvents"]
        assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2, 3, 4}
        assert pq.read_table(path / "steps.parquet").num_rows == read(path / "summary.json")["steps"] > 5


def test_same_scenario_and_seed_give_identical_tables(both: Both, out: Path) -> None:
    """Same scenario and seed: byte-identical tables and summary, in another process and from another folder."""
    said = process("run", both.file.name, "--loop", "sync", "--seed", 7, "--out", out, "--json", cwd=both.file.parent)
    assert said.status == 0, said.err
    (first,) = both.out.glob("*-sync-*")
    (again,) = runs(out)
    for name in ("steps.parquet", "requests.parquet", "summary.json"):
        assert (again / name).read_bytes() == (first / name).read_bytes(), name


def test_the_printed_command_makes_the_run_again(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line `again` is a shell command; run, it gives the same summaries and the same tables."""
    monkeypatch.chdir(tmp_path)
    lengths = "workload.output_tokens={uniform: {low: 2, high: 9}}"  # spaces and braces: the line has to be quoted
    asked = ("--loop", "both", "--seed", "3", "--set", "workload.requests=5", "--set", lengths)
    said = call("run", small.name, *asked, "--check", "steps>1", "--out", "first")
    assert said.status == 0
    (command,) = (line.removeprefix("again").strip() for line in said.out.splitlines() if line.startswith("again"))
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "cbsim", "run"]
    again = call(*words[3:], "--out", "second")
    assert again.status == 0
    assert [path.name.split("-", 1)[1] for path in runs(Path("first"))] == [
        path.name.split("-", 1)[1] for path in runs(Path("second"))
    ]
    for one, other in zip(runs(Path("first")), runs(Path("second")), strict=True):
        assert command in (read(one / "env.json")["command"], read(other / "env.json")["command"])
        for name in ("summary.json", "steps.parquet", "requests.parquet", "scenario.resolved.yaml"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_what_a_person_sees(small: Path, out: Path) -> None:
    """The question, a table with both loops side by side, both directories, the picture, the timeline, the command;
    every path that is printed exists. The progress line goes to stderr.
    """
    said = call("run", small, "--loop", "both", "--out", out)
    assert said.status == 0
    assert said.out.startswith("small: What does a small run cost?\n")
    header = said.out.splitlines()[2].split()
    assert header == ["sync", "async", "change"]
    rows = [line for line in said.out.splitlines() if line.startswith(("makespan", "GPU active", "TTFT p99"))]
    assert len(rows) == 3
    for label in ("sync", "async", "picture", "timeline"):
        (line,) = (line for line in said.out.splitlines()[3:] if line.split()[:1] == [label])
        assert Path(line.split()[1]).exists()
    assert "12 of 12 requests" in said.err
    assert said.err.splitlines()[-1].startswith("async: ")


@pytest.mark.parametrize(("loop", "expected"), [("sync", ["sync"]), ("async", ["async"]), (None, ["sync"])])
def test_loop_picks_the_directories(small: Path, out: Path, loop: str | None, expected: list[str]) -> None:
    """--loop sync|async runs one loop into one directory; without it the scenario decides (here: sync)."""
    said = call("run", small, *(["--loop", loop] if loop else []), "--out", out, "--json")
    assert list(json.loads(said.out)) == expected
    assert [path.name.split("-")[2] for path in runs(out)] == expected


def test_quiet_says_nothing_but_verdicts(small: Path, out: Path) -> None:
    """--quiet: neither progress nor table; a check that was asked for is still answered."""
    assert call("run", small, "--quiet", "--out", out) == Said(0, "", "")
    said = call("run", small, "--quiet", "--out", out, "--check", "steps>1")
    assert (said.status, said.err) == (0, "")
    assert [line.split()[:3] for line in said.out.splitlines()] == [["sync", "ok", "steps>1:"]]


def test_runs_of_one_second_do_not_share_a_directory(small: Path, out: Path) -> None:
    """Two runs of the same scenario have two directories, whatever the clock says."""
    clocks = [directory.datetime(2026, 1, 1, tzinfo=directory.UTC)] * 3
    paths = [directory.RunWriter(out, "small-sync", "0123456789", clock).path.name for clock in clocks]
    assert paths == [f"20260101T000000Z-small-sync-01234567{end}" for end in ("", "-2", "-3")]


def test_set_reaches_any_field_several_times(small: Path, out: Path) -> None:
    """--set works several times, at any depth, on fields that the file leaves out, on names, and whole parts."""
    words = [
        *("workload.requests=3", "kv_cache.block_size=32", "loop.cuda_graphs.enabled=false", "hardware=a100-80gb"),
        *("model.layers=16", "cost.memory_efficiency.kv=0.5", "slo={ttft_s: 2}", "seed=4"),
        *("scheduler.max_num_seqs=2", "workload.prompt_tokens=17"),
    ]
    said = call("run", small, *(part for word in words for part in ("--set", word)), "--out", out, "--json")
    assert said.status == 0, said.err
    resolved = scenario.load(runs(out)[0] / "scenario.resolved.yaml")
    assert (resolved.kv_cache.block_size, resolved.seed, resolved.model.layers) == (32, 4, 16)
    assert (resolved.slo.ttft_s, resolved.loop.cuda_graphs.enabled) == (2.0, False)
    assert resolved.hardware.name == scenario.load(small, ["hardware=a100-80gb"]).hardware.name
    summary = json.loads(said.out)["sync"]
    assert (summary["requests"], summary["input_tokens"]) == (3, 51)
    assert summary["slo"]["bounds"] == {"ttft_s": 2.0}


def test_the_last_set_wins_and_seed_is_one_more(small: Path, out: Path) -> None:
    """Overrides apply in order; --seed comes after --set."""
    said = call("run", small, "--set", "seed=1", "--set", "seed=2", "--seed", 5, "--out", out, "--json")
    assert json.loads(said.out)["sync"]["seed"] == 5


def test_window_counts_the_requests_that_arrive_inside(small: Path, out: Path) -> None:
    """--window 1:3 with a request every second counts those of seconds 1 and 2; the tables keep all five."""
    words = ("--set", "workload.arrivals={kind: constant, rate_per_s: 1}", "--set", "workload.requests=5")
    said = call("run", small, *words, "--window", "1:3", "--out", out, "--json")
    summary = json.loads(said.out)["sync"]
    assert summary["ttft_s"]["n"] == 2
    assert summary["window_s"] == [1.0, 3.0]
    assert "--window 1.0:3.0" in read(runs(out)[0] / "env.json")["command"]
    assert pq.read_table(runs(out)[0] / "requests.parquet").num_rows == 5


# -- checks -----------------------------------------------------------------------------------------------------------


def test_a_failed_check_is_exit_3_and_says_by_how_much(both: Both, small: Path, out: Path) -> None:
    """All conditions are judged, each in a line with the value; one that fails makes it 3, and the run is complete.

    The value is the summary's own; durations need no _s, and % is a hundredth.
    """
    checks = ["ttft.p99<500ms", "gpu_active>=99.5%", "e2e_s.mean < 1us", "requests==12"]
    said = call("run", small, *(part for text in checks for part in ("--check", text)), "--out", out, "--quiet")
    assert said.status == 3
    assert [line.split()[:2] for line in said.out.splitlines()] == [
        ["sync", verdict] for verdict in ("ok", "FAILED", "FAILED", "ok")
    ]
    summary = read(runs(out)[0] / "summary.json")
    assert f"gpu_active is {summary['gpu_active']:.6g}" in said.out
    assert f"e2e_s.mean is {summary['e2e_s']['mean']:.6g}" in said.out
    assert not (runs(out)[0] / directory.MARKER).exists()


def test_a_check_of_either_loop_fails(small: Path, out: Path) -> None:
    """With both loops a condition has to hold for both: sync alone misses 95 % in this constant-cost example
    (32 ms of 42 ms are 76 %), and async, which keeps it but for the ends of the run, does not excuse it.
    """
    words = ("--set", "cost={kind: constant, step_s: 0.032, cpu: {schedule: {base_s: 0.01}}}", "--loop", "both")
    fixed = ("--set", "workload={kind: synthetic, requests: 4, prompt_tokens: 8, output_tokens: 200}")
    said = call("run", small, *words, *fixed, "--check", "gpu_active>95%", "--out", out, "--json")
    assert said.status == 3
    assert [line.split()[:2] for line in said.err.splitlines()] == [["sync", "FAILED"], ["async", "ok"]]
    assert list(json.loads(said.out)) == ["sync", "async"]


def test_a_metric_without_a_sample_fails_its_check(small: Path, out: Path) -> None:
    """Prompts longer than the model's 131,072 tokens are all refused: no TTFT is not a good TTFT."""
    words = ("--set", "workload.prompt_tokens=140000", "--out", out)
    said = call("run", small, *words, "--check", "ttft.p99<60min", "--check", "steps==0")
    assert said.status == 3
    assert "the run has no ttft_s.p99" in said.out
    assert "12 of 12 requests refused" in said.out
    statuses = read(runs(out)[0] / "summary.json")["requests_by_status"]
    assert {name: count for name, count in statuses.items() if count} == {"refused": 12}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("METRIC<VALUE[UNIT]",)),
        ("ttft.p99", ("METRIC<VALUE[UNIT]",)),
        ("ttft.p99=5", ("METRIC<VALUE[UNIT]",)),
        ("ttft.p99<", ("METRIC<VALUE[UNIT]",)),
        ("ttft.p99<nan", ("METRIC<VALUE[UNIT]",)),
        ("ttft.p99<1.2.3s", ("'1.2.3'", "not a number")),
        ("ttft.p99<3parsec", ("'parsec'", "ns, us, ms, s, min, %")),
        ("tttf.p99<3s", ("'tttf.p99'", "did you mean ttft.p99?")),
        ("gpu_activ>0.5", ("'gpu_activ'", "did you mean gpu_active?")),
        ("ttft<3s", ("ttft needs one of", "ttft.p99")),
        ("ttft.p98<3s", ("ttft needs one of", "ttft.p99")),
    ],
)
def test_a_condition_that_cannot_be_understood_runs_nothing(
    small: Path, out: Path, text: str, words: tuple[str, ...]
) -> None:
    """A bad metric, unit or number is exit 2 before anything is simulated, and says what is allowed."""
    refused(call("run", small, "--check", text, "--out", out), 2, f"--check {text!r}", *words)
    assert not out.exists()


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedular.name=vllm", ("schedular: unknown field", "did you mean scheduler?")),
        ("scheduler.max_num_seq=3", ("scheduler.max_num_seq: unknown field", "did you mean max_num_seqs?")),
        ("workload.requets=3", ("workload.requets: unknown field", "did you mean requests?")),
        ("kv_cache.blocksize=16", ("kv_cache.blocksize: unknown field", "did you mean block_size?")),
        ("scheduler.name=vlm", ("scheduler.name: got 'vlm'", "expected one of static,", "did you mean vllm?")),
        ("cost.kind=rooflin", ("cost.kind: got 'rooflin'", "did you mean roofline?")),
        ("model=lama-3.1-8b", ("unknown model 'lama-3.1-8b'", "did you mean llama-3.1-8b")),
        ("hardware=h201-sxm", ("unknown hardware 'h201-sxm'", "did you mean h200-sxm")),
        ("workload.requests=0", ("workload.requests: got 0", "must be >= 1")),
        ("workload.requests=-3", ("workload.requests: got -3", "must be >= 1")),
        ("workload.requests=2.5", ("workload.requests: got 2.5", "expected a whole number")),
        ("workload.requests=many", ("workload.requests: got 'many'", "expected a whole number")),
        ("workload.arrivals.rate_per_s=.nan", ("rate_per_s: got nan", "expected a finite number")),
        ("workload.arrivals.rate_per_s=.inf", ("rate_per_s: got inf", "expected a finite number")),
        ("workload.arrivals.rate_per_s=0", ("rate_per_s: got 0", "must be > 0")),
        ("workload.prompt_tokens={uniform: {low: 9, high: 3}}", ("high: got 3", "must be >= low (9)")),
        ("kv_cache.memory_fraction=1.5", ("kv_cache.memory_fraction: got 1.5", "must be <= 1")),
        ("kv_cache.memory_fraction=0.05", ("kv_cache.memory_fraction: got 0.05", "too little for a cache")),
        ("loop.mode=fast", ("loop.mode: got 'fast'", "expected one of sync, async, both")),
        ("loop.streams=yes", ("loop.streams: got 'yes'", "expected true or false")),
        ("seed=-1", ("seed: got -1", "must be >= 0")),
        ("seed.x=1", ("seed: got {'x': 1}", "expected a whole number")),
        ("seed=[1", ("not valid YAML",)),
        ("name=a/b", ("name: got 'a/b'",)),
        ("name=../x", ("name: got '../x'",)),
    ],
)
def test_a_bad_override_is_named(small: Path, out: Path, override: str, words: tuple[str, ...]) -> None:
    """A wrong name, type or number is exit 2 and one line with the override, the field, the value and the bound."""
    refused(call("run", small, "--set", override, "--out", out), 2, f"--set {override}", *words)
    assert not out.exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("scheduler.max_num_seqs=100000", ("max_num_batched_tokens: got 8192", "must be >= max_num_seqs (100000)")),
        ("model=llama-3.1-70b", ("Llama-3.1-70B", "141.11 GB of weights", "too little for a cache")),
    ],
)
def test_fields_that_do_not_go_together_are_both_named(
    small: Path, out: Path, override: str, words: tuple[str, ...]
) -> None:
    """An override that contradicts another field, given or default, is exit 2; 70.6 B weights of 2 bytes: 141 GB."""
    refused(call("run", small, "--set", override, "--out", out), 2, *words)
    assert not out.exists()


@pytest.mark.parametrize("override", ["", "seed", "=5", "a..b=3"])
def test_an_override_without_a_field_or_value(small: Path, override: str) -> None:
    """--set wants field=value."""
    refused(call("run", small, "--set", override), 2, "expected field=value")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL + "colour: blue\n", (":12: colour: unknown field",)),
        (SMALL.replace("requests:", "request:"), ("workload.request: unknown field", "did you mean requests?")),
        (SMALL.replace("requests: 12", "requests: '12'"), (":6: workload.requests: got '12'", "a whole number")),
        (SMALL.replace("requests: 12", "requests: 0"), (":6: workload.requests: got 0, must be >= 1",)),
        (SMALL.replace("low: 20", "low: 0"), (":7: workload.prompt_tokens.uniform.low: got 0, must be >= 1",)),
        (
            SMALL.replace("high: 90", "high: 9"),
            (":7: workload.prompt_tokens.uniform.high: got 9", "must be >= low (20)"),
        ),
        (SMALL.replace("uniform", "unifrom", 1), (":7: workload.prompt_tokens", "did you mean uniform?")),
        (SMALL.replace("kind: poisson", "kind: possion"), (":9: workload.arrivals.kind", "did you mean poisson?")),
        (SMALL.replace("mode: sync", "mode: [sync]"), (":11: loop.mode: got ['sync']", "one of sync, async, both")),
        (SMALL.replace("  mode", "\tmode"), (":11: not valid YAML",)),
        (SMALL.replace("{low: 20", "{low: 20]"), (":7: not valid YAML",)),
        (SMALL + "question: Again?\n", (":12: not valid YAML: found duplicate key",)),
        (SMALL + "---\nquestion: Another?\n", (":12: not valid YAML",)),
        (SMALL.replace("question: What", "question: *what"), (":1: not valid YAML",)),
        (SMALL.replace("model: llama-3.1-8b", "model: shapes/mine.yaml"), (":2: model:", "no such file")),
        ("", ("got nothing, expected fields",)),
        ("- 1\n", ("got [1], expected fields",)),
        ("hello\n", ("got 'hello', expected fields",)),
        ("question: a\0b\n", ("not valid YAML",)),
    ],
)
def test_a_bad_file_is_named_with_its_line(small: Path, out: Path, text: str, words: tuple[str, ...]) -> None:
    """A broken scenario is exit 2 and one line: file and line, field, value, and what would be allowed."""
    small.write_text(text)
    refused(call("run", small, "--out", out), 2, str(small), *words)
    assert not out.exists()


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


def test_a_bad_row_of_a_trace_is_named(small: Path, tmp_path: Path, out: Path) -> None:
    """File, line, field and value of a row that cannot be used; nothing is dropped."""
    (tmp_path / "mine.csv").write_text("id,arrival_s,prefill_tokens,decode_tokens\na,0,5,5\nb,1,-5,5\n")
    said = call("run", small, "--set", "workload={kind: csv, path: mine.csv}", "--out", out)
    refused(said, 2, f"{tmp_path / 'mine.csv'}:3: prefill_tokens: got '-5', expected a whole number >= 1")
    assert not out.exists()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["rnu"],
        ["run"],
        ["run", "worked_example", "--loop", "fast"],
        ["run", "worked_example", "--seed", "abc"],
        ["run", "worked_example", "--trace-steps", "5:2"],
        ["run", "worked_example", "--trace-steps", "5"],
        ["run", "worked_example", "--trace-steps", "a:b"],
        ["run", "worked_example", "--trace-steps=-1:3"],
        ["run", "worked_example", "--window", "3:3"],
        ["run", "worked_example", "--window", "nan:3"],
        ["run", "worked_example", "--set"],
        ["run", "worked_example", "--no-such-option"],
        ["conformance"],
        ["replan"],
        ["bench", "--yaml"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_exit_2(argv: list[str]) -> None:
    """A short message before the usage, no traceback."""
    said = call(*argv)
    assert said.status == 2
    assert not said.out
    first, *usage = said.err.splitlines()
    assert first.startswith("python -m cbsim")
    assert usage[0].startswith("usage: ")


# -- output that cannot be written ------------------------------------------------------------------------------------


def test_out_that_is_a_file(small: Path, tmp_path: Path) -> None:
    """--out that is, or lies below, a file: exit 1, one line with the path."""
    (tmp_path / "taken").write_text("")
    refused(call("run", small, "--out", tmp_path / "taken", "--quiet"), 1, str(tmp_path / "taken"), "cannot be created")
    below = tmp_path / "taken" / "below"
    refused(call("run", small, "--out", below, "--quiet"), 1, str(below), "cannot be created")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_out_that_may_not_be_written(small: Path, tmp_path: Path) -> None:
    """--out in a folder without write permission: exit 1, one line."""
    (tmp_path / "locked").mkdir(mode=0o500)
    said = call("run", small, "--out", tmp_path / "locked" / "out", "--quiet")
    refused(said, 1, "locked", "cannot be created", "Permission denied")


FILES = (
    *("scenario.resolved.yaml", "env.json", "steps.parquet", "requests.parquet", "summary.json"),
    *("timeline.json.gz", "timeline.png"),
)


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_fills_up(small: Path, out: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file the disk is full at: exit 1, one line that names it, and a directory marked as incomplete whose
    other files are whole.
    """
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    refused(call("run", small, "--out", out, "--quiet"), 1, name, "No space left on device")
    (path,) = runs(out)
    assert (path / directory.MARKER).read_text().strip()
    written = {file.name for file in path.rglob("*") if file.is_file()}
    assert written == {directory.MARKER, *FILES[: FILES.index(name)]}


def test_a_file_too_large_for_its_limit(out: Path) -> None:
    """The same from outside: a process that may not write more than 8 KiB to a file (RLIMIT_FSIZE) leaves a marker and
    a line, and is not killed by SIGXFSZ. The scenario's 1,000 steps make a table of more than that.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    said = process("run", "worked_example", "--loop", "sync", "--out", out, "--quiet", preexec_fn=limit)
    refused(said, 1, "steps.parquet", "cannot be written")
    (path,) = runs(out)
    assert (path / directory.MARKER).exists()
    assert scenario.load(path / "scenario.resolved.yaml").name == "worked_example"


@pytest.mark.parametrize("argv", [["list"], ["run", "worked_example", "--loop", "sync", "--json"]], ids=lambda v: v[0])
def test_a_reader_that_goes_away(argv: Sequence[str], tmp_path: Path) -> None:
    """`python -m cbsim ... | head -0`: no traceback, nor Python's complaint about stdout at exit."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [*argv, *(["--out", str(tmp_path)] if argv[0] == "run" else [])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cbsim", *words],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# -- interrupted ------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_a_readable_directory(small: Path, out: Path) -> None:
    """SIGINT while a run is under way, which its live progress line on a terminal shows: exit 1, one line with the
    directory, which has the tables of what was simulated, a marker that says how far it got, and can be replayed.
    """
    words = ("--set", "workload.requests=60000", "--set", "workload.output_tokens=400", "--out", str(out))
    terminal, theirs = os.openpty()
    command = [sys.executable, "-m", "cbsim", "run", str(small), *words]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    try:
        said = seen(terminal, until=" steps, ", seconds=60)
        assert " steps, " in said, said
        child.send_signal(signal.SIGINT)
        said += seen(terminal, until=None, seconds=60)
        printed, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
        os.close(terminal)
    assert (child.returncode, printed) == (1, "")
    assert "Traceback" not in said
    (path,) = runs(out)
    assert said.rstrip().endswith(f"cbsim: interrupted: what was simulated until then is in {path}")
    run = directory.load(path)
    assert run.incomplete is not None
    assert run.incomplete.startswith("interrupted")
    assert run.incomplete.endswith(f"after {len(run.steps)} steps")
    assert run.summary["complete"] is False
    assert run.summary["steps"] == len(run.steps) > 0
    assert 0 < len(run.requests) <= 60000
    replayed = call("replan", path)
    assert replayed == Said(0, f"{path}: {len(run.steps)} of {len(run.steps)} plans identical\n", "")


def seen(terminal: int, until: str | None, seconds: float) -> str:
    """What appears on a terminal, until a text does or its other side is closed."""
    text, deadline = "", time.monotonic() + seconds
    while time.monotonic() < deadline and (until is None or until not in text):
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if ready:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # EIO: nobody has the other side any more
                break
            if not part:
                break
            text += part.decode()
    return text


def test_an_interrupt_in_process_is_one_line(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt outside the simulation, here while tables are written: exit 1, one line, the marker stays."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory.RunWriter, "steps", interrupted)
    refused(call("run", small, "--out", out, "--quiet"), 1, "interrupted")
    assert (runs(out)[0] / directory.MARKER).exists()


# -- the other commands -----------------------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    """`python -m cbsim --help` answers in under 0.3 s because no library is imported for it; all commands are named."""
    program = (
        "import json, sys; from cbsim.cli.parser import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: print(json.dumps([end.code, sorted(sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    *text, last = done.stdout.splitlines()
    code, modules = json.loads(last)
    assert code == 0
    heavy = {"numpy", "pydantic", "simpy", "matplotlib", "pyarrow", "ruamel.yaml", "ruamel"}
    assert not heavy & set(modules)
    for command in ("run", "conformance", "replan", "schema", "list", "cache-curve", "score", "study", "bench"):
        assert any(line.split()[:1] == [command] for line in text), command


def test_list_names_everything_that_a_scenario_can() -> None:
    """Schedulers, cost models, hardware, models, and the scenarios with their questions."""
    said = call("list")
    assert (said.status, said.err) == (0, "")
    words = {line.split()[0] for line in said.out.splitlines() if line.strip()}
    assert {"static", "transformers_fifo", "transformers_prefill_first", "vllm"} <= words
    assert {"constant", "roofline", "fitted", "table"} <= words
    for folder in ("hardware", "models", ""):
        assert set(catalog.names(folder)) <= words
    for name in catalog.names():
        assert scenario.load(name).question in said.out


def test_schema_writes_what_the_repository_holds(tmp_path: Path) -> None:
    """`schema` writes the four schemas, the same bytes as in schemas/; the folder is made if need be."""
    said = call("schema", "--out", tmp_path / "new folder")
    assert (said.status, said.err) == (0, "")
    written = [Path(line) for line in said.out.splitlines()]
    assert sorted(path.name for path in written) == sorted(path.name for path in (ROOT / "schemas").iterdir())
    for path in written:
        assert path.read_bytes() == (ROOT / "schemas" / path.name).read_bytes()


def test_schema_into_a_file_is_exit_1(tmp_path: Path) -> None:
    """A folder that cannot be one is named."""
    (tmp_path / "taken").write_text("")
    refused(call("schema", "--out", tmp_path / "taken"), 1, str(tmp_path / "taken"), "cannot be written")


def test_conformance_of_a_part() -> None:
    """`conformance` takes files and folders, says a line a trace and one in all, and exits 0 when all match."""
    one = next(iter(sorted((GOLDEN / "transformers").rglob("w11_cancel_fifo_bs16.jsonl.gz"))))
    two = next(iter(sorted((GOLDEN / "vllm" / "0.33.0").glob("w01*.jsonl.gz"))))
    said = call("conformance", one, two)
    assert (said.status, said.err) == (0, "")
    assert len(said.out.splitlines()) == 3
    assert said.out.splitlines()[-1].startswith("2 traces compared: 2 ok (")


def test_conformance_of_a_difference_is_exit_1(tmp_path: Path) -> None:
    """One altered number in a trace: exit 1, and the first difference with its line and field."""
    source = next(iter(sorted((GOLDEN / "transformers").rglob("w11_cancel_fifo_bs16.jsonl.gz"))))
    lines = [json.loads(line) for line in gzip.decompress(source.read_bytes()).splitlines()]
    lines[4]["batch"][0]["past"] += 1
    (tmp_path / "w11_cancel_fifo_bs16.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(source.parent.parent / "workloads" / "w11_cancel_fifo_bs16.json.gz", tmp_path)
    said = call("conformance", tmp_path)
    assert said.status == 1, said
    assert "batch[0].past" in said.out


def test_commands_about_studies_and_recorded_runs_say_how_they_are_used() -> None:
    """A case that is not named, or a study that does not exist: exit 2, what is there and the usage."""
    for words, told in ((("score",), "CASE"), (("study", "nothing"), "'hopper'"), (("study",), "NAME")):
        said = call(*words)
        assert (said.status, said.out) == (2, "")
        assert told in said.err and f"usage: python -m cbsim {words[0]}" in said.err


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_conformance_of_nothing_is_no_success(path: str, tmp_path: Path) -> None:
    """A path without a trace is not a proof: exit 2, 0 traces compared."""
    (tmp_path / "empty").mkdir()
    said = call("conformance", tmp_path / path)
    assert said.status == 2
    assert "0 traces compared" in said.out
    assert "Traceback" not in said.err


def test_main_answers_as_a_process(tmp_path: Path) -> None:
    """Exit statuses 0, 2 and 3 reach the shell; 1 does in the tests of a full disk and of an interrupt."""
    (tmp_path / "mine.yaml").write_text(SMALL.replace("requests: 12", "requests: 2"))
    said = process("run", "mine.yaml", "--check", "steps>1000000", "--out", "o", "--quiet", cwd=tmp_path)
    assert (said.status, said.err) == (3, "")
    assert len(runs(tmp_path / "o")) == 1
    refused(process("run", "mine.yaml", "--set", "seed=-1", cwd=tmp_path), 2, "seed: got -1")
