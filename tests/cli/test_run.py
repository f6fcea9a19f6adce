"""`run`, as a user meets it: what it prints, what it writes, its exit status, and what its checks say.

Promises are those of the issue: exit 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed; `--json` prints one
object; the same scenario and seed give byte-identical tables; no traceback ever reaches a user for their own mistake.
"""

from __future__ import annotations

import gzip
import json
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from support.calls import SMALL, Said, call, process, read, refused, runs
from support.pictures import really

from cbsim.record import directory
from cbsim.record import environment as sources
from cbsim.runs import reading
from cbsim.scenario import scenario
from cbsim.workload import generators

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
    with really():
        said = call("run", folder / "small.yaml", *words, "--check", "ttft.p99<500ms", "--check", "preemptions==0")
    return Both(folder / "small.yaml", folder / "out", said)


# -- what a run prints and writes -------------------------------------------------------------------------------------


def test_json_is_one_object_that_equals_the_summaries(both: Both) -> None:
    """--json prints one object, loop name -> that run's summary.json, with the keys that the issue names. Verdicts
    go to stderr, one a loop and condition, and no progress line disturbs them."""
    printed = json.loads(both.said.out)  # raises on anything before or after the one object
    assert [line.split()[:2] for line in both.said.err.splitlines()] == [["sync", "ok"]] * 2 + [["async", "ok"]] * 2
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


def test_a_run_directory_holds_what_the_design_says(both: Both) -> None:
    """Both loops have a directory of their own, complete and without a marker; the second has the common figure."""
    assert len(runs(both.out)) == 2
    for path in runs(both.out):
        assert {file.name for file in path.iterdir()} == COMPLETE
        assert (path / "figures" / "timeline.png").read_bytes().startswith(b"\x89PNG")
        assert reading.load(path).incomplete is None
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


def test_a_report_written_before_does_not_make_the_code_a_changed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracked files count, but for those of reports/, which are output."""
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    for name in ("cbsim/record/environment.py", "reports/report.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("before")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "m"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    (tmp_path / "reports" / "report.md").write_text("after")
    assert sources.git_state()["dirty"] is False
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert sources.code_version() == sources.git_state()["commit"] == head
    versions = set()
    for text in ("after", "later"):
        (tmp_path / "cbsim" / "record" / "environment.py").write_text(text)
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
    """The question, what the scenario left open and by which rule it was solved, a table with both loops side by side,
    both directories, the picture, the timeline, the command; every path that is printed exists. The progress line goes
    to stderr.
    """
    said = call("run", small, "--loop", "both", "--out", out)
    assert said.status == 0
    assert said.out.startswith("small: What does a small run cost?\n")
    head, table, _ = said.out.split("\n\n", 2)
    table_and_rest = said.out.split("-----\n", 1)[1]
    assert "solved  max_num_seqs 1,024, max_num_batched_tokens 8,192: vLLM 0.33 on a GPU with 70 GiB or more" in head
    assert "blocks of 16 tokens: 0.9 of the 139.8 GiB of NVIDIA H200 SXM 141GB" in head
    assert table.splitlines()[0].split() == ["sync", "async", "change"]
    rows = [line for line in said.out.splitlines() if line.startswith(("makespan", "GPU active", "TTFT p99"))]
    assert len(rows) == 3
    for label in ("sync", "async", "picture", "timeline"):
        (line,) = (line for line in table_and_rest.splitlines() if line.startswith(f"{label} "))
        assert Path(line.split()[1]).exists()
    assert "12 of 12 requests" in said.err
    assert said.err.splitlines()[-1].startswith("async: ")


def test_a_person_sees_what_came_of_drafts(small: Path, out: Path) -> None:
    """Tokens a verification, and drafts: how many, how many came true, in all and by position, and how many did not."""
    drafts = {"method": "ngram", "k": 3, "acceptance": {"rates": [1.0, 1.0, 0.0]}}
    check = "drafts.acceptance_by_position.2>=100%"
    said = call("run", small, "--set", f"speculation={json.dumps(drafts)}", "--out", out, "--check", check)
    assert said.status == 0, said
    (path,) = out.iterdir()
    numbers = json.loads((path / "summary.json").read_text())["drafts"]
    assert numbers["verified_tokens"] == numbers["accepted_tokens"] + numbers["rejected_tokens"]
    assert numbers["acceptance_by_position"] == {"1": 1, "2": 1, "3": 0}
    cells = {label.strip(): value for label, _, value in (line.rpartition("  ") for line in said.out.splitlines())}
    assert [cells[f"accepted at position {at}"] for at in (1, 2, 3)] == ["100.0%", "100.0%", "0.0%"]
    for label in ("verified", "accepted", "rejected"):
        assert cells[f"draft tokens {label}"] == f"{numbers[f'{label}_tokens']:,}"
    assert cells["tokens a verification"] == "3"


def test_quiet_says_where_and_nothing_but_verdicts(small: Path, out: Path) -> None:
    """--quiet: neither progress nor table, only the run directories, for scripts; a check is still answered."""
    said = call("run", small, "--quiet", "--out", out)
    assert said == Said(0, f"{runs(out)[0]}\n", "")
    said = call("run", small, "--quiet", "--out", out, "--check", "steps>1")
    assert (said.status, said.err) == (0, "")
    assert [line.split()[:3] for line in said.out.splitlines()[1:]] == [["sync", "ok", "steps>1:"]]


def test_window_counts_the_requests_that_arrive_inside(small: Path, out: Path) -> None:
    """--window 1:3 with a request every second counts those of seconds 1 and 2; the tables keep all five."""
    words = ("--set", "workload.arrivals={kind: constant, rate_per_s: 1}", "--set", "workload.requests=5")
    said = call("run", small, *words, "--window", "1:3", "--out", out, "--json")
    summary = json.loads(said.out)["sync"]
    assert summary["ttft_s"]["n"] == 2
    assert summary["window_s"] == [1.0, 3.0]
    assert "--window 1:3" in read(runs(out)[0] / "env.json")["command"]
    assert pq.read_table(runs(out)[0] / "requests.parquet").num_rows == 5


# -- checks -----------------------------------------------------------------------------------------------------------


def test_a_failed_check_is_exit_3_and_says_by_how_much(both: Both, small: Path, out: Path) -> None:
    """All conditions are judged, each in a line with the value; one that fails makes it 3, and the run is complete.

    The value is the summary's own; durations need no _s, and % is a hundredth.
    """
    checks = ["ttft.p99<500ms", "gpu_active>=99.5%", "e2e_s.mean < 1us", "requests==12"]
    said = call("run", small, *(part for text in checks for part in ("--check", text)), "--out", out, "--quiet")
    assert said.status == 3
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [
        ["sync", verdict] for verdict in ("ok", "FAILED", "FAILED", "ok")
    ]
    summary = read(runs(out)[0] / "summary.json")
    assert f"gpu_active is {summary['gpu_active']:.6g}" in said.out
    assert f"e2e.mean is {summary['e2e_s']['mean']:.6g}" in said.out
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
    assert "the run has no ttft.p99" in said.out
    assert "sync: 12 of 12 requests refused: " in said.err and "131072" in said.err.replace(",", "")
    quiet = call("run", small, *words, "--check", "refused==0", "--quiet")
    assert quiet.status == 3 and "12 of 12 requests refused: " in quiet.err
    assert "FAILED  refused==0: requests_by_status.refused is 12" in quiet.out
    statuses = read(runs(out)[0] / "summary.json")["requests_by_status"]
    assert {name: count for name, count in statuses.items() if count} == {"refused": 12}


def test_requests_that_preempt_each_other_for_ever_end_the_run(tmp_path: Path, out: Path) -> None:
    """As vLLM plans by priority, each of two prompts takes the blocks that the other one has just got. The message
    names them and the steps; what was simulated until then can be read, reported and planned again."""
    file = tmp_path / "stuck.yaml"
    file.write_text(
        """\
question: Which of two prompts is computed?
model: {name: two groups, layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, intermediate: 128, vocab: 512,
  max_position: 4096, dtype: float32, attention: [sliding 40, full]}
hardware: laptop-cpu
workload: {kind: csv, path: two.csv}
scheduler: {name: vllm, policy: priority, max_num_seqs: 6, max_num_batched_tokens: 16, max_model_len: 12,
  enable_prefix_caching: false, long_prefill_token_threshold: 3, scheduler_reserve_full_isl: false, watermark: 0}
kv_cache: {block_size: 4, num_blocks: 9}
loop: {mode: sync}
cost: {kind: constant, step_s: 1e-6}
"""
    )
    rows = ("arrival_s,prompt_tokens,output_tokens,max_tokens,priority", "0,10,6,13,1", "0,2,10,10,1")
    (tmp_path / "two.csv").write_text("\n".join(rows))
    said = call("run", file, "--out", out, "--quiet")
    (path,) = runs(out)
    assert said.status == 1
    assert "stuck: no request has got further in 1,021 steps, from 14 on: 511 preemptions, running: 0 (6 of" in said.err
    assert f"4 of 8 blocks are free: what was simulated until then is in {path}" in said.err
    run = reading.load(path)
    reading.check_run(run, "sync")
    assert [row.status for row in run.requests] == ["unfinished"] * 2
    assert call("replan", path).status == 0


def test_main_answers_as_a_process(tmp_path: Path) -> None:
    """Exit statuses 0, 2 and 3 reach the shell; 1 does in the tests of a full disk and of an interrupt."""
    (tmp_path / "mine.yaml").write_text(SMALL.replace("requests: 12", "requests: 2"))
    said = process("run", "mine.yaml", "--check", "steps>1000000", "--out", "o", "--quiet", cwd=tmp_path)
    assert (said.status, said.err) == (3, "")
    assert len(runs(tmp_path / "o")) == 1
    refused(process("run", "mine.yaml", "--set", "seed=-1", cwd=tmp_path), 2, "seed: got -1")
