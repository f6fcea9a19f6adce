"""A user's mistakes on the engine's command line: one message that names them, and never a traceback."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")

import safetensors.torch as safetensors_torch
import torch
from support.calls import ROOT
from support.engine.calls import call, refused

import cbengine.cli
from cbengine.cli.parser import DEVICES


def speculation(method: str, drafter: str = "") -> str:
    more = f", drafter: {{{drafter}}}" if drafter else ""
    return f"speculation={{method: {method}, k: 2, acceptance: {{rate: 0.5}}{more}}}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--temperature=-1",), ("--temperature: got -1.0", ">= 0")),
        (("--temperature=warm",), ("argument --temperature", "'warm'")),
        (("--top-k=-1",), ("--top-k: got -1", ">= 0")),
        (("--top-k=1.5",), ("argument --top-k", "'1.5'")),
        (("--top-p=0",), ("--top-p: got 0.0", "> 0 and <= 1")),
        (("--sampling-seed=-1",), ("--sampling-seed: got -1", ">= 0")),
        (("--sampling-seed=",), ("argument --sampling-seed", "''")),
        (("--seed=-1",), ("argument --seed", "'-1'", "from 0")),
        *(
            (("--inject", text), ("argument --inject", repr(text), "schedule, prepare, launch, update", "0 to 10000"))
            for text in ("", "prepare", "prepare=", "prepare=x", "prepare=nan", "prepare=-1", "await=1", "launch=10001")
        ),
        (("--profile=0",), ("argument --profile", "'0'", "from 1")),
        (("--profile=5",), ("--profile: needs --device cuda",)),
        (("--wait", "spin"), ("--wait spin: needs --device cuda",)),
        (("--device=tpu",), ("argument --device", "'tpu'", *DEVICES)),
        (("--weights=nowhere",), ("nowhere/config.json: cannot be read",)),
        (("--set", "scheduler.kv_connector=hand_off"), ("scheduler.kv_connector: got hand_off, which comes with",)),
        (
            ("--set", speculation("eagle")),
            ("--set speculation=", "eagle, k: 2", "}: speculation.method: got eagle, must be ngram or draft_model"),
        ),
        (
            ("--set", speculation("draft_model", "fraction: 0.1").replace("k: ", "adaptive: true, k: ")),
            ("speculation.adaptive: got true, must be false: the engine verifies all drafts",),
        ),
        (
            ("--set", speculation("ngram"), "--device", "modelled"),
            ("modelled: got a scenario with speculation",),
        ),
        (
            ("--set", speculation("draft_model", "fraction: 0.1")),
            ("speculation.drafter.model: got null",),
        ),
        (("--draft-weights", "nowhere"), ("--draft-weights: needs speculation.method draft_model",)),
        (("--set", "scheduler.max_num_seqs=0"), ("scheduler.max_num_seqs: got 0, must be >= 1",)),
        (("--tensor-parallel", "0"), ("--tensor-parallel", "'0'", "from 1")),
        (("--tensor-parallel", "2"), ("--set cost.tensor_parallel=2: cost.tensor_parallel: unknown field",)),
        (
            ("--tensor-parallel", "2", "--set", "cost.kind=roofline"),
            ("cost.tensor_parallel: got 2, must be 1 with --device inline",),
        ),
        (
            ("--tensor-parallel", "4", "--set", "cost.kind=roofline"),
            ("cost.tensor_parallel: got 4, must divide model.kv_heads (2)",),
        ),
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
        ((), ("COMMAND",)),
        (("play",), ("'play'", "replay")),
        (("replay",), ("scenario",)),
        (("replay", ""), ("unknown scenario ''", "tiny_cpu")),
        (("replay", "nowhere.yaml"), ("nowhere.yaml",)),
        (("replay", str(ROOT)), (f"{ROOT}: is a folder",)),
        (("calibrate",), ("--out",)),
        (("calibrate", "--out", "x", "--device", "inline"), ("--device", "'inline'", "process", "cuda")),
        (
            ("calibrate", "--out", "x", "--device", "process", "--set", speculation("ngram")),
            ("speculation: must be null",),
        ),
        (
            ("calibrate", "--out", "x", "--device", "process", "--set", "cost.tensor_parallel=2"),
            ("cost.tensor_parallel: got 2, must be 1: coefficients are of one device",),
        ),
        (("calibrate", "--out", "x", "--rows", "0"), ("--rows", "'0'", "from 1")),
        (("calibrate", "--out", "x", "--device", "process", "--longest", "9999"), ("--longest: got 9999", "8192")),
        (("calibrate", "--out", "x", "--device", "process", "nowhere"), ("'nowhere'",)),
        (("predict", "--device", "inline"), ("--device", "'inline'", "process", "modelled")),
        (("predict", "--repeat", "0"), ("--repeat", "'0'", "from 1")),
        (("predict", "cpu-1", "--device", "process"), ("case 'cpu-1'", "reference, load", "cpu-0, cpu-2")),
        (("predict", "--out", __file__), ("provenance.json: cannot be written",)),
        (("predict", "cpu", "--device", "process", "--set", "loop.mode=never"), ("loop.mode", "'never'")),
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
    "words", [("replay", "tiny_cpu"), ("calibrate", "--out", "x"), ("predict",)], ids=lambda words: words[0]
)
def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call(*words, "--device", "cuda"), 2, "--device cuda: torch finds no CUDA device here")
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the command that installs it."""
    monkeypatch.delitem(sys.modules, "cbengine.cli.commands", raising=False)
    monkeypatch.delattr(cbengine.cli, "commands", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(call("replay", "tiny_cpu"), 2, "torch is not installed: pip install -e '.[engine]'")


@pytest.mark.parametrize("device", ["inline", "modelled"])
def test_a_place_that_cannot_be_written_to(small: Path, device: str) -> None:
    """It is found before the run begins: a mistake of the arguments, as with `cbsim run`."""
    refused(call("replay", small, "--device", device, "--out", small), 2, f"--out {small}: cannot be written")


@pytest.mark.parametrize("words", [(), ("--quiet",), ("--json",)])
def test_weights_that_are_not_numbers(folder: Path, small: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """No request gets a token: that is no result, whatever is printed."""
    mine = Path(shutil.copytree(folder, tmp_path / "mine"))
    tensors = safetensors_torch.load_file(mine / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    safetensors_torch.save_file(tensors, mine / "model.safetensors")
    loop = ("--device", "inline", "--loop", "sync", "--out", tmp_path / "out")
    said = call("replay", small, "--weights", mine, *loop, *words)
    assert said.status == 1
    line = said.err.splitlines()[-1]
    assert "requests failed: the logits of a token were not numbers; see " in line and line.startswith("sync: ")
