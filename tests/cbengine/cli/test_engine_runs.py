"""The engine's command line, as a user meets it: what a run writes and prints.

`replay` means by its options what `cbsim run` means by them. Exit status: 0 ok, 1 error, 2 bad scenario, weights or
arguments, 3 a check failed.
"""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")

from support.calls import ROOT, Said, read, runs
from support.engine.calls import call, derived
from support.engine.served import LOOPS, SCHEDULERS, named

from cbengine import build, sampling
from cbsim.cli import parser as simulator
from cbsim.record import directory
from cbsim.record.columns import TOKENS_FILE
from cbsim.runs import reading
from cbsim.scenario import scenario

GOLDEN = ROOT / "tests" / "golden"
FILES = ("env.json", "requests.parquet", "scenario.resolved.yaml", "steps.parquet", "summary.json", "timeline.json.gz")


@pytest.mark.parametrize("device", ["inline", "modelled"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_plans_of_a_run_are_derived_again(small: Path, out: Path, scheduler: str, device: str) -> None:
    """Every device and policy: both loops, one complete directory each, and `cbsim replan` says identical."""
    budget = ["scheduler.max_batch_tokens=64"] if scheduler.startswith("transformers") else []
    sets = [word for override in [*named(scheduler), *budget] for word in ("--set", override)]
    said = call("replay", small, *sets, "--loop", "both", "--device", device, "--out", out, "--quiet")
    assert said == Said(0, "".join(f"{path}\n" for path in runs(out)), "")
    assert [path.name.split("-")[2] for path in runs(out)] == list(LOOPS)
    for path in runs(out):
        assert all((path / file).exists() for file in FILES)
        assert not (path / directory.MARKER).exists()
        assert read(path / "summary.json")["requests_by_status"]["length"] == 5
        assert read(path / "env.json")["engine"] == "cbengine"
    derived(*runs(out))


def test_the_options_of_a_simulation_mean_the_same(small: Path, out: Path) -> None:
    """--set, --seed, --loop, --window, --trace-steps, --check, --json and --out, all at once: one object on stdout,
    verdicts on stderr, 3 for the check that fails; requests and lengths are those of `cbsim run`.
    """
    options = [
        *("--set", "workload.requests=4", "--seed", 3, "--loop", "both", "--window", "0:1", "--trace-steps", "2:5"),
        *("--set", "workload.arrivals={kind: constant, rate_per_s: 2}", "--check", "steps>2", "--check", "steps<2"),
        *("--json", "--out"),
    ]
    said = call("replay", small, "--device", "modelled", *options, out)
    theirs = call("run", small, *options, out.parent / "simulated", of=simulator.main)
    assert said.status == theirs.status == 3
    assert [line.split()[:3] for line in said.err.splitlines()] == [
        [loop, verdict, f"steps{sign}2:"] for loop in LOOPS for verdict, sign in (("ok", ">"), ("FAILED", "<"))
    ]
    summaries, simulated = json.loads(said.out), json.loads(theirs.out)
    assert list(summaries) == list(simulated) == list(LOOPS)
    for loop, path in zip(LOOPS, runs(out), strict=True):
        assert summaries[loop] == read(path / "summary.json")
        assert summaries[loop].keys() == simulated[loop].keys()
        for fact in ("name", "seed", "requests", "input_tokens", "output_tokens"):
            assert summaries[loop][fact] == simulated[loop][fact], fact
        assert summaries[loop]["ttft_s"]["n"] == 2, "of four requests, two a second, two arrive in the first second"
        events = json.loads(gzip.decompress((path / "timeline.json.gz").read_bytes()))["traceEvents"]
        assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2, 3, 4}
        resolved = scenario.load(path / "scenario.resolved.yaml")
        assert (resolved.seed, resolved.workload.requests) == (3, 4)  # type: ignore[union-attr]
    assert (runs(out)[1] / "figures" / "sync_above_async.png").exists()


def test_what_a_person_sees(small: Path, out: Path) -> None:
    """The table, every path and the command that makes the run again; progress goes to stderr."""
    said = call("replay", small, "--device", "inline", "--loop", "sync", "--out", out)
    assert said.status == 0
    assert said.out.startswith("small: Does the engine's command line work?\n")
    for label in ("sync", "picture", "timeline"):
        (line,) = (line for line in said.out.splitlines() if line.startswith(f"{label} ") and out.name in line)
        assert Path(line.split()[1]).exists()
    again = f"again     python -m cbengine replay {small} --device inline --loop sync --out {out}"
    assert said.out.splitlines()[-1] == again
    assert said.err.startswith("sync: 5 of 5 requests, ")


AWKWARD = (
    *("--set", 'question=It\'s "this" $HOME; `ls` # or what?', "--seed", "5", "--loop", "async"),
    *("--temperature", "0.7", "--top-k", "5", "--top-p", "0.95", "--sampling-seed", "12345678901234567890"),
    *("--inject", "prepare=0.1234567", "--inject", "launch=1e-3", "--save-tokens", "--no-cuda-graphs"),
    *("--stop-at-end-tokens", "--check", "steps < 1e3", "--window", "0:"),
)


def test_the_printed_command_makes_the_run_again(
    folder: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line `again` is a shell command with every option that changes what is computed, the device included, which
    otherwise depends on the machine. Run, it says the same tokens, resolves to the same scenario and prints itself.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "default_device", lambda: "inline")
    odd = shutil.copytree(folder, tmp_path / "it's a {folder} $1")
    own = tmp_path / "it's #1.jsonl"
    own.write_text('{"id": "3", "temperature": 0}\n\n{"id": "1", "seed": 4, "top_k": 2, "temperature": 1.5}\n')
    said = call("replay", small.name, *AWKWARD, "--sampling", own.name, "--weights", odd.name, "--out", "first")
    assert said.status == 0, said
    (line,) = (line for line in said.out.splitlines() if line.startswith("again"))
    words = shlex.split(line.removeprefix("again"))
    assert words[:4] == ["python", "-m", "cbengine", "replay"]
    monkeypatch.setattr(build, "default_device", lambda: "cuda")
    again = call(*words[3:], "--out", "second")
    assert again.status == 0, again
    assert f"{line} --out second" in again.out.splitlines()
    (one,), (other,) = runs(Path("first")), runs(Path("second"))
    for file in ("scenario.resolved.yaml", TOKENS_FILE, sampling.FILE):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    facts, others = (read(path / "env.json") for path in (one, other))
    assert facts["command"] == shlex.join(words)
    assert facts["injected_ms"] == others["injected_ms"] == {"prepare": 0.123457, "launch": 0.001}
    run = {"temperature": 0.7, "top_k": 5, "top_p": 0.95, "seed": 12345678901234567890}
    assert facts["sampling"] == others["sampling"] == {**run, "file": own.name, "requests": 2}
    said_apart = [json.loads(line) for line in (one / sampling.FILE).read_text().splitlines()]
    assert said_apart == [
        {"id": "3", **run, "temperature": 0},
        {"id": "1", **run, "temperature": 1.5, "top_k": 2, "seed": 4},
    ]


def test_a_run_keeps_its_tokens_when_asked(out: Path) -> None:
    """As many as the requests declare, beside the prompts; the same in both loops."""
    fields = ("--set", "workload.requests=3", "--set", "workload.output_tokens=4")
    words = ("replay", "tiny_cpu", "--device", "inline", "--save-tokens", "--quiet", "--out", out)
    assert call(*words, *fields).status == 0
    first, second = (pq.read_table(run / TOKENS_FILE).to_pydict() for run in runs(out))
    assert first == second
    rows = reading.load(runs(out)[0]).requests
    assert [len(prompt) for prompt in first["prompt"]] == [row.prompt_tokens for row in rows]
    assert [len(output) for output in first["output"]] == [4, 4, 4]
