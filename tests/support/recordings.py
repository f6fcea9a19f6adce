"""Runs that the command recorded, of made-up and of golden workloads, to be replayed as they are or altered."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cbsim.cli.parser import main
from cbsim.draw import render
from support.calls import Said, call

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = """\
question: Do the plans follow from the record?
model: llama-3.2-1b
hardware: rtx-4090
scheduler: {name: vllm, max_num_seqs: 8, max_num_batched_tokens: 64}
kv_cache: {block_size: 16, num_blocks: 40}
workload:
"""
LENGTHS = "prompt_tokens: {uniform: {low: 5, high: 100}}, output_tokens: {uniform: {low: 1, high: 40}}"
WORKLOADS = {
    # 39 usable blocks of 16 for 8 seats of up to 200 tokens: requests are preempted
    "tight": f"  {{kind: synthetic, requests: 30, {LENGTHS.replace('40', '100')}}}\n",
    "poisson": """\
  kind: synthetic
  requests: 40
  prompt_tokens: {lognormal: {mean: 40, sigma: 1, low: 1, high: 150}}
  output_tokens: {lognormal: {mean: 20, sigma: 1, low: 1, high: 100}}
  arrivals: {kind: gamma, rate_per_s: 60, burstiness: 0.3}
  shared_prefix_tokens: 40
  stop_early: true
""",
    "closed_loop": f"""\
  {{kind: synthetic, requests: 40, {LENGTHS}, arrivals: {{kind: closed_loop, users: 6, think_s: 0.02}}}}
""",
    "samples": """\
  kind: synthetic
  requests: 16
  samples: 3
  prompt_tokens: {uniform: {low: 1, high: 100}}
  output_tokens: {uniform: {low: 1, high: 60}}
  arrivals: {kind: closed_loop, users: 4, think_s: 0.02}
""",
    "sessions": "  kind: agentic\n  path: sessions.jsonl\n",
}
SESSIONS = [
    {"session_id": "a", "timestamp": 0, "input_length": 40, "output_length": 9, "hash_ids": [0]},
    {"session_id": "b", "timestamp": 3, "input_length": 50, "output_length": 20, "hash_ids": [0]},
    {"session_id": "a", "delay": 12.5, "input_length": 30, "output_length": 30, "hash_ids": [7]},
    {"session_id": "c", "timestamp": 30, "input_length": 90, "output_length": 5, "hash_ids": [3]},
    {"session_id": "b", "delay": 0, "input_length": 17, "output_length": 1, "hash_ids": [8]},
    {"session_id": "a", "delay": 1, "input_length": 16, "output_length": 16, "hash_ids": [9]},
    {"session_id": "b", "delay": 40, "input_length": 700, "output_length": 8, "hash_ids": [1, 2]},  # refused: no room
    {"session_id": "b", "delay": 4, "input_length": 5, "output_length": 8, "hash_ids": [11]},
]


def by_turns(kinds: Iterable[str], schedulers: Sequence[str], loops: Sequence[str]) -> pytest.MarkDecorator:
    """Every workload with every scheduler under one of the loops, which take turns: each meets both."""
    cases = [(kind, name, loops[(i + j) % 2]) for i, kind in enumerate(kinds) for j, name in enumerate(schedulers)]
    return pytest.mark.parametrize(("kind", "scheduler", "loop"), cases)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is most of a small run's time, and replay looks at no picture."""
    monkeypatch.setattr(render, "images", lambda chart, *kinds: [b""] * len(kinds))


def recorded(folder: Path, kind: str, *overrides: str) -> Path:
    """The directory of a run of both loops or one, made by the command."""
    (folder / "sessions.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in SESSIONS))
    file = folder / "asked.yaml"
    file.write_text(BASE + WORKLOADS[kind])
    return made(file, *overrides)


def made(file: Path, *overrides: str) -> Path:
    out = file.parent / "out"
    words = [part for override in overrides for part in ("--set", override)]
    assert main(["run", str(file), *words, "--out", str(out), "--quiet"]) == 0
    (path,) = out.iterdir()
    return path


def column(path: Path, name: str) -> list[Any]:
    values: list[Any] = pq.read_table(path)[name].to_pylist()
    return values


GOLDEN_RUN = """\
question: Do cancels replay?
model: llama-3.2-1b
hardware: rtx-4090
workload: {kind: golden, path: given.json}
cost: {kind: constant, step_s: 0.01}
"""


def golden_run(folder: Path, packed: Path, settings: str) -> Path:
    """The directory of a run of a golden workload."""
    folder.mkdir(exist_ok=True)
    (folder / "given.json").write_bytes(gzip.decompress(packed.read_bytes()))
    (folder / "asked.yaml").write_text(GOLDEN_RUN + settings)
    return made(folder / "asked.yaml")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "images", lambda chart, *kinds: [b""] * len(kinds))
        return recorded(tmp_path_factory.mktemp("original"), "tight", "loop.mode=async")


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of a run that may be spoiled."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def replayed(path: Path) -> Said:
    """What the command did; never a traceback."""
    said = call("replan", path)
    assert "Traceback" not in said.err
    return said
