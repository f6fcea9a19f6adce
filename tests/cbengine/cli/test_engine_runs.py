"""The engine's command line, as a user meets it: what it writes, its exit status, how it fails, and how it is stopped.

`replay` means by its options what `cbsim run` means by them. Exit status: 0 ok, 1 error, 2 bad scenario, weights or
arguments, 3 a check failed. A user's mistake is one message and never a traceback.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")

import folders
import torch
from served import LOOPS, SCHEDULERS

import cbengine
from cbengine import build, settings, tokens
from cbengine.cli.arguments import DEVICES
from cbengine.cli.parser import main
from cbengine.device.clock import WallClock
from cbsim.cli import parser as simulator
from cbsim.results import directory
from cbsim.scenario import scenario
from cbsim.server.progress import Progress

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
SMALL = """\
question: Does the engine's command line work?
model: {name: small, layers: 2, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, intermediate: 48, vocab: 97,
        max_position: 256, dtype: bfloat16}
hardware: laptop-cpu
workload:
  kind: synthetic
  requests: 5
  prompt_tokens: {uniform: {low: 3, high: 20}}
  output_tokens: {uniform: {low: 2, high: 9}}
kv_cache: {block_size: 4, num_blocks: 60}
cost: {kind: constant, step_s: 0.001}
"""
FILES = ("env.json", "requests.parquet", "scenario.resolved.yaml", "steps.parquet", "summary.json", "timeline.json.gz")


class Said(NamedTuple):
    """What a command did: its exit status, stdout and stderr."""

    status: int
    out: str
    err: str


def call(*argv: object, of: Any = main) -> Said:
    """The command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = of([str(word) for word in argv])
        except SystemExit as end:
            status = int(end.code or 0)
    return Said(status, out.getvalue(), err.getvalue())


def runs(out: Path) -> list[Path]:
    """Run directories, oldest first: the loops of a run are written one after the other."""
    return sorted(out.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def refused(said: Said, status: int, *words: str) -> None:
    """A mistake: nothing on stdout, no traceback, one message that says all of `words`."""
    assert said.status == status, said
    assert not said.out
    message, _, usage = said.err.partition("\nusage: ")
    assert message.startswith(("cbengine: ", "python -m cbengine")), said.err
    assert "\n" not in message.strip()
    for word in words:
        assert word in message
    assert bool(usage) == said.err.startswith("python")


def derived(*paths: Path) -> None:
    """The recorded plans follow from the recorded polls."""
    said = call("replan", *paths, of=simulator.main)
    assert said.status == 0, said
    assert said.out.count("identical") == len(paths)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("folders") / "tiny")


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["inline", "modelled"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_plans_of_a_run_are_derived_again(small: Path, out: Path, scheduler: str, device: str) -> None:
    """Every device and policy: both loops, one complete directory each, and `cbsim replan` says identical."""
    name, _, version = scheduler.partition(" ")
    versions = ("--set", f"scheduler.version='{version}'") if version else ()
    budget = ("--set", "scheduler.max_batch_tokens=64") if name.startswith("transformers") else ()
    words = ("--set", f"scheduler.name={name}", *versions, *budget, "--loop", "both", "--device", device)
    said = call("replay", small, *words, "--out", out, "--quiet")
    assert said == Said(0, "", "")
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
        (line,) = (line for line in said.out.splitlines()[3:] if line.split()[:1] == [label])
        assert Path(line.split()[1]).exists()
    assert (
        said.out.splitlines()[-1] == f"again     python -m cbengine replay {small} --set loop.mode=sync --device inline"
    )
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
    assert line in again.out.splitlines()
    (one,), (other,) = runs(Path("first")), runs(Path("second"))
    for file in ("scenario.resolved.yaml", tokens.FILE, settings.FILE):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    facts, others = (read(path / "env.json") for path in (one, other))
    assert facts["command"] == others["command"] == shlex.join(words)
    assert facts["injected_ms"] == others["injected_ms"] == {"prepare": 0.123457, "launch": 0.001}
    run = {"temperature": 0.7, "top_k": 5, "top_p": 0.95, "seed": 12345678901234567890}
    assert facts["sampling"] == others["sampling"] == {**run, "file": own.name, "requests": 2}
    said_apart = [json.loads(line) for line in (one / settings.FILE).read_text().splitlines()]
    assert said_apart == [
        {"id": "3", **run, "temperature": 0},
        {"id": "1", **run, "temperature": 1.5, "top_k": 2, "seed": 4},
    ]


def test_a_folder_of_weights_gives_its_shape(folder: Path, small: Path, out: Path) -> None:
    """The resolved scenario says what ran: the folder's shape, float32 on a CPU; env.json says where from."""
    assert call("replay", small, "--device", "inline", "--loop", "sync", "--weights", folder, "--out", out).status == 0
    (path,) = runs(out)
    model = scenario.load(path / "scenario.resolved.yaml").model
    config = read(folder / "config.json")
    assert (model.name, model.dtype, model.vocab, model.layers) == ("tiny", "float32", config["vocab_size"], 2)
    assert (model.hidden, model.intermediate, model.max_position) == (64, 96, 128)
    assert read(path / "env.json")["weights"] == str(folder)
    derived(path)


RECORDED: dict[str, dict[str, Any]] = {  # some give up while they wait, prefill or decode; one has not come yet
    "vllm": {
        "config": {"block_size": 4},
        "requests": [
            {
                "id": "a",
                "arrival_us": 0,
                "prompt_token_ids": [*range(30)],
                "output_token_ids": [1] * 9,
                "abort_us": 900,
            },
            {
                "id": "b",
                "arrival_us": 0,
                "prompt_token_ids": [*range(20)],
                "output_token_ids": [1] * 400,
                "abort_us": 9000,
            },
            {"id": "c", "arrival_us": 1, "prompt_token_ids": [*range(9)], "output_token_ids": [1, 5], "stop": True},
            {"id": "d", "arrival_us": 500, "prompt_token_ids": [7] * 40, "output_token_ids": [1] * 4},
            {"id": "e", "arrival_us": 5000, "prompt_token_ids": [7], "output_token_ids": [1] * 4, "abort_us": 1},
        ],
    },
    "transformers_fifo": {
        "cb": {"block_size": 4},
        "cancels": [{"step": 1, "id": "a"}, {"step": 3, "id": "b"}, {"step": 0, "id": "d"}],
        "requests": [
            {"id": "a", "prompt": [*range(30)], "max_new_tokens": 100, "arrival_step": 0},
            {"id": "b", "prompt": [*range(20)], "max_new_tokens": 100, "arrival_step": 0},
            {"id": "c", "prompt": [*range(9)], "max_new_tokens": 5, "arrival_step": 1},
            {"id": "d", "prompt": [7] * 40, "max_new_tokens": 3, "arrival_step": 2},
        ],
    },
}


@pytest.mark.parametrize("device", ["inline", "modelled"])
@pytest.mark.parametrize("scheduler", RECORDED)
def test_clients_that_give_up(out: Path, small: Path, scheduler: str, device: str) -> None:
    """A recorded workload with cancellations runs to its end on both loops. Everybody is accounted for, who did not
    give up in time has all tokens, and the plans are derived again.
    """
    load = small.parent / "recorded.json"
    load.write_text(json.dumps(RECORDED[scheduler]))
    budget = ("--set", "scheduler.max_batch_tokens=64") if scheduler != "vllm" else ()
    words = (
        "--set",
        f"workload={{kind: golden, path: '{load}', step_s: 0.004}}",
        "--set",
        f"scheduler.name={scheduler}",
    )
    said = call("replay", small, *words, *budget, "--loop", "both", "--device", device, "--out", out, "--quiet")
    assert said == Said(0, "", "")
    for run in runs(out):
        rows = {row["id"]: row for row in pq.read_table(run / "requests.parquet").to_pylist()}
        assert rows.keys() == {request["id"] for request in RECORDED[scheduler]["requests"]}
        assert rows["b"]["status"] == "aborted"
        assert {rows[one]["status"] for one in "cd"} <= {"length", "stop"}, "d's client had nothing to give up yet"
        assert {row["status"] for row in rows.values()} <= {"length", "stop", "aborted"}
    derived(*runs(out))


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--temperature=-1",), ("--temperature: got -1.0", ">= 0")),
        (("--temperature=nan",), ("--temperature: got nan", "finite")),
        (("--temperature=inf",), ("--temperature: got inf", "finite")),
        (("--temperature=warm",), ("argument --temperature", "'warm'")),
        (("--top-k=-1",), ("--top-k: got -1", ">= 0")),
        (("--top-k=1.5",), ("argument --top-k", "'1.5'")),
        (("--top-p=0",), ("--top-p: got 0.0", "> 0 and <= 1")),
        (("--top-p=1.01",), ("--top-p: got 1.01", "> 0 and <= 1")),
        (("--top-p=nan",), ("--top-p: got nan", "> 0 and <= 1")),
        (("--sampling-seed=-1",), ("--sampling-seed: got -1", ">= 0")),
        (("--sampling-seed=",), ("argument --sampling-seed", "''")),
        (("--seed=-1",), ("seed: got -1", "must be >= 0")),
        *(
            (("--inject", text), ("argument --inject", repr(text), "schedule, prepare, launch, update", "0 to 10000"))
            for text in ("", "prepare", "prepare=", "prepare=x", "prepare=nan", "prepare=-1", "await=1", "launch=10001")
        ),
        (("--profile=0",), ("argument --profile", "'0'", ">= 1")),
        (("--profile=5",), ("--profile: needs --device cuda",)),
        (("--device=tpu",), ("argument --device", "'tpu'", *DEVICES)),
        (("--engine=vllm",), ("argument --engine", "'vllm'", "transformers")),
        (("--weights=nowhere",), ("nowhere/config.json: cannot be read",)),
        (("--set", "model.head_dim=7"), ("model.head_dim: got 7, must be even",)),
        (("--set", "model.kv_heads=3"), ("model.kv_heads: got 3, must divide model.heads (4)",)),
        (
            ("--set", "model.max_position=5", "--set", "scheduler.name=static"),
            ("model.max_position: got 5, must be > ", "the longest prompt"),
        ),
        (("--set", "model.layers=1e9"), ("model: the weights of small take up to", "GB free")),
        (("--set", "kv_cache.num_blocks=1e7", "--set", "model.layers=200"), ("kv_cache.num_blocks: ", "GB free")),
        (("--set", "scheduler.max_num_seqs=0"), ("scheduler.max_num_seqs: got 0, must be >= 1",)),
        (("--check", "speed>1"), ("--check 'speed>1': unknown metric",)),
        (("--window", "1:nan"), ("argument --window", "0 <= A < B")),
        (("--trace-steps", "5:2"), ("argument --trace-steps", "0 <= A < B")),
    ],
    ids=" ".join,
)
def test_a_bad_option_is_named(small: Path, out: Path, words: tuple[str, ...], says: tuple[str, ...]) -> None:
    """Option or field, value and bound; nothing is written."""
    refused(call("replay", small, "--device", "inline", "--loop", "sync", "--out", out, *words), 2, *says)
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--device", "modelled"), "takes no --device modelled: "),
        (("--temperature", "1", "--inject", "launch=1"), "takes no --temperature, --inject: "),
        (("--stop-at-end-tokens",), "takes no --stop-at-end-tokens: "),
        (("--sampling", "own.jsonl"), "takes no --sampling: "),
        (("--set", "model.hidden=34"), "model.hidden: got 34, must be a multiple of model.heads (4)"),
    ],
)
def test_what_the_peer_cannot_do(
    small: Path, out: Path, words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that Hugging Face's batching would silently ignore, or die of, are refused."""
    monkeypatch.chdir(small.parent)
    Path("own.jsonl").write_text('{"id": "0", "temperature": 1}')
    said = call("replay", small, "--device", "inline", "--engine", "transformers", "--out", out, *words)
    refused(said, 2, f"--engine transformers: {says}")
    assert not out.exists()


def test_the_peer_does_what_it_can(small: Path, out: Path) -> None:
    """Work that takes no time is none; graphs are the GPU's matter. The printed command has the engine in it."""
    words = ("--engine", "transformers", "--device", "inline", "--inject", "launch=0", "--no-cuda-graphs")
    few = ("--set", "scheduler={name: transformers_fifo, max_batch_tokens: 64}", "--loop", "sync")
    said = call("replay", small, *words, *few, "--out", out)
    assert said.status == 0, said
    assert "--engine transformers --device inline --inject launch=0 --no-cuda-graphs" in said.out
    assert read(runs(out)[0] / "env.json")["engine"].startswith("transformers 5.")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), ("COMMAND",)),
        (("serve",), ("'serve'", "replay")),
        (("replay",), ("scenario",)),
        (("replay", ""), ("unknown scenario ''", "tiny_cpu")),
        (("replay", "nowhere.yaml"), ("nowhere.yaml",)),
        (("replay", str(ROOT)), (f"{ROOT}: is a folder",)),
        (("calibrate",), ("--out",)),
        (("calibrate", "--out", "x", "--device", "inline"), ("--device", "'inline'", "process", "cuda")),
        (("calibrate", "--out", "x", "--rows", "0"), ("--rows", "'0'", ">= 1")),
        (("calibrate", "--out", "x", "--device", "process", "--longest", "9999"), ("--longest: got 9999", "8192")),
        (("calibrate", "--out", "x", "--device", "process", "nowhere"), ("'nowhere'",)),
        (("predict", "--device", "inline"), ("--device", "'inline'", "process", "modelled")),
        (("predict", "--repeat", "0"), ("--repeat", "'0'", ">= 1")),
        (("predict", "cpu-1", "--device", "process"), ("case 'cpu-1'", "reference, load", "cpu-0, cpu-2")),
        (("predict", "--out", __file__), ("provenance.json: cannot be written",)),
        (("predict", "cpu", "--device", "process", "--set", "loop.mode=never"), ("loop.mode", "'never'")),
        (("speed", "--device", "process"), ("--device", "'process'", "cuda", "modelled")),
        (("generate", "--weights", "x"), ("--prompt",)),
        (("generate", "--prompt", "x"), ("--weights",)),
        (("generate", "--prompt", "x", "--weights", "nowhere", "--tokens", "0"), ("--tokens", "'0'", ">= 1")),
        (("generate", "--prompt", "x", "--weights", "nowhere"), ("nowhere/config.json: cannot be read",)),
        (("generate", "--prompt", "x", "--weights", "x", "--device", "modelled"), ("--device", "'modelled'")),
    ],
    ids=" ".join,
)
def test_a_command_that_cannot_be(
    words: tuple[str, ...], says: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call(*words), 2, *says)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "words",
    [("replay", "tiny_cpu"), ("calibrate", "--out", "x"), ("predict",), ("speed",), ("generate", "--prompt", "a")],
    ids=lambda words: words[0],
)
def test_a_gpu_that_is_not_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any) -> None:
    monkeypatch.chdir(tmp_path)
    weights = ("--weights", folder) if words[0] == "generate" else ()
    refused(call(*words, *weights, "--device", "cuda"), 2, "--device cuda: torch finds no CUDA device here")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_package_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """... is named, with the command that installs it."""
    if package == "torch":  # asked for when the commands are
        monkeypatch.delitem(sys.modules, "cbengine.cli.commands")
        monkeypatch.delattr(cbengine, "commands")
    monkeypatch.setitem(sys.modules, package, None)
    said = call("generate", "--prompt", "a", "--weights", folder, "--device", "inline")
    refused(said, 2, f"{package} is not installed: pip install -e '.[engine]'")


@pytest.mark.parametrize("device", ["inline", "modelled"])
def test_a_place_that_cannot_be_written_to(small: Path, device: str) -> None:
    """It is found when the run begins: an error, not a usage error, as with `cbsim run`."""
    refused(call("replay", small, "--device", device, "--out", small), 1, str(small), "cannot be created")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", None, "cannot be read"),
        ("model.safetensors", None, "holds neither model.safetensors nor"),
        ("model.safetensors", "x" * 64, "cannot be read as safetensors"),
    ],
)
@pytest.mark.parametrize("device", ["inline", "process"])
def test_broken_weights(
    folder: Path, small: Path, tmp_path: Path, file: str, content: str | None, says: str, device: str
) -> None:
    """The same message and status whether they would be loaded here or by a worker."""
    mine = Path(shutil.copytree(folder, tmp_path / "mine"))
    (mine / file).unlink()
    if content is not None:
        (mine / file).write_text(content)
    refused(call("replay", small, "--device", device, "--weights", mine), 2, str(mine), says)


def test_weights_that_do_not_match(folder: Path, small: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(folder, tmp_path / "mine"))
    folders.alter(mine / "config.json", num_hidden_layers=3)
    said = call("replay", small, "--device", "process", "--weights", mine)
    refused(said, 2, "tensor model.layers.2.input_layernorm.weight is missing", "(9 tensors are)")


def test_words_of_a_model_are_printed(folder: Path) -> None:
    """The prompt and what follows, on stdout; sampled with a seed, twice the same."""
    words = ("generate", "--device", "inline", "--weights", folder, "--prompt", "a café", "--tokens", 5)
    said = call(*words, "--temperature", 1, "--sampling-seed", 7)
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("a café")
    assert said.out.endswith("\n")
    assert call(*words, "--temperature", 1, "--sampling-seed", 7) == said


# -- interrupts -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(*words: object) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, in a group of its own as a terminal makes one, until it has served a few
    requests and said so. Its stderr ends when the last process that holds it has ended, workers included.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "cbengine", "replay", "tiny_cpu", "--loop", "sync", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        start_new_session=True,
    )
    try:
        assert process.stderr
        line = process.stderr.readline()
        assert " requests, " in line, line + process.stderr.read()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


LONG = ("--set", "workload.requests=5000", "--set", "kv_cache.num_blocks=200")


def test_an_interrupt_leaves_a_readable_directory(out: Path) -> None:
    """Ctrl-C reaches the worker, too: it goes on until the step is done. One message, exit status 1, all processes
    gone, no complaint of a resource left behind; the directory says that it is incomplete, and its plans are right.
    """
    with started(*LONG, "--device", "process", "--out", out) as process:
        os.killpg(process.pid, signal.SIGINT)
        said, told = process.communicate(timeout=60)
    (path,) = runs(out)
    assert (process.returncode, said) == (1, "")
    lines = [line for line in told.splitlines() if not line.startswith("sync: ")]
    assert lines == [f"cbengine: interrupted: what was measured until then is in {path}"]
    run = directory.load(path)
    assert str(run.incomplete).startswith("interrupted, after ")
    assert len(run.steps) > 0
    derived(path)


def interrupted(said: Said, out: Path, loop: str) -> None:
    """Exit status 1, one message, and a directory that can be read, said to be incomplete."""
    (path,) = out.glob(f"*-{loop}-*")
    refused(said, 1, f"cbengine: interrupted: what was measured until then is in {path}")
    run = directory.load(path)
    assert str(run.incomplete).startswith("interrupted, after ")
    assert read(path / "summary.json")["complete"] is False
    if read(path / "env.json")["engine"] == "cbengine":
        derived(path)
    else:
        said = call("replan", path, of=simulator.main)
        assert (said.status, said.out) == (1, "")
        assert "which records no plans to derive again" in said.err


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("words", [("inline",), ("modelled",), ("inline", "--engine", "transformers")], ids=" ".join)
def test_an_interrupt_ends_a_run_after_a_step(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], loop: str
) -> None:
    """Ctrl-C in the middle of the run, whoever serves; afterwards Ctrl-C means what it meant before."""
    before, told = signal.getsignal(signal.SIGINT), []
    step = Progress.__call__

    def pressed(self: Progress, now_ns: int) -> None:
        told.append(now_ns)
        if len(told) == 4:
            signal.raise_signal(signal.SIGINT)
        step(self, now_ns)

    monkeypatch.setattr(Progress, "__call__", pressed)
    budget = ("--set", "scheduler={name: transformers_fifo, max_batch_tokens: 64}") if len(words) > 1 else ()
    said = call("replay", small, "--loop", loop, "--quiet", *budget, "--out", out, "--device", *words)
    interrupted(said, out, loop)
    assert len(told) == 4
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interrupt_is_heard_while_nothing_arrives(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request is two minutes away; the wait for it is cut into naps."""
    monkeypatch.setattr(WallClock, "wait_until", lambda *_: signal.raise_signal(signal.SIGINT))
    arrivals = ("--set", "workload.arrivals={kind: constant, rate_per_s: 0.008}")
    interrupted(call("replay", small, "--device", "inline", "--loop", "sync", *arrivals, "--out", out), out, "sync")


@pytest.mark.parametrize("at", ["adapted", "executor_plan", "ops"])
def test_an_interrupt_before_the_run(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """While the scenario is read or the model loads: one message, nothing written."""

    def pressed(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(build, at, pressed)
    assert call("replay", small, "--device", "inline", "--out", out) == Said(1, "", "cbengine: interrupted\n")
    assert not out.exists()


def test_a_second_interrupt_ends_the_process(out: Path) -> None:
    """... in the middle of a step that has seconds to go."""
    slow = ("--inject", "schedule=2000", "--inject", "update=2500", "--inject", "prepare=2500")
    with started(*slow, "--device", "modelled", "--out", out) as process:
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        assert process.returncode == -signal.SIGINT


def test_a_driver_that_is_killed_leaves_no_worker(out: Path) -> None:
    """The worker notices, and says nothing."""
    with started(*LONG, "--device", "process", "--out", out) as process:
        process.kill()
        said, told = process.communicate(timeout=60)  # returns when the worker has closed its end, too
    assert process.returncode == -signal.SIGKILL
    assert said == ""
    assert "Error" not in told.replace("BrokenPipeError", "")
