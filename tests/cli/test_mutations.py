"""Scenario and trace files broken at random: a clean exit status and a short message, always."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import mutations
from support.calls import SMALL, Said, call
from support.mutations import SEED, as_json, as_json_lines, edited, shuffled, with_a_cell

from cbsim.draw import render
from cbsim.errors import ScenarioError
from cbsim.scenario import documents

CASES, SCENARIOS_S, TRACES_S = 180, 9.0, 5.0
TEXT = (
    SMALL.replace("requests: 12", "requests: 3")
    + "scheduler: {name: vllm, max_num_seqs: 8, max_num_batched_tokens: 64}\n"
    + "kv_cache: {num_blocks: 200, block_size: 16}\ncost: {kind: constant, step_s: 0.01}\nseed: 7\n"
)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a small run's time."""
    monkeypatch.setattr(render, "images", lambda chart, *kinds: [b""] * len(kinds))


def restructured(text: str, rng: random.Random) -> str:
    """One value somewhere in the tree replaced, removed, or put under another key."""
    return documents.write(mutations.with_a_value(documents.parse(text, "base"), rng))


def ran(path: Path, out: Path) -> Said:
    """The run, whose summary is printed: no number in it is less than nothing."""
    said = call("run", path, "--json", "--loop", "sync", "--out", out)
    if said.status == 0:
        summary = json.loads(said.out)["sync"]
        assert all(value is None or value >= 0 for value in _numbers(summary)), summary
        assert summary["makespan_s"] > 0 or not summary["output_tokens"]
    return said


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [number for key, inner in value.items() if key != "seed" for number in _numbers(inner)]
    return [value] if isinstance(value, int | float) else []


def test_broken_scenarios_end_with_a_status_and_a_short_message(tmp_path: Path) -> None:
    """Exit 0, 1 or 2. One unlucky enough may run long: mutations stop when the time is up."""
    path, seen = tmp_path / "s.yaml", set()
    for case, rng in mutations.until(SCENARIOS_S, CASES):
        text = rng.choice((edited, restructured))(TEXT, rng)
        path.write_text(text, encoding="utf-8")
        about = f"seed {SEED}, case {case}:\n{text[:2000]}"
        seen.add(mutations.survived(about, (0, 1, 2), lambda: ran(path, tmp_path / "out"), path=path))
    assert {0, 2} <= seen


# -- traces -----------------------------------------------------------------------------------------------------------

TURNS = (
    {"session_id": "a", "group_id": "g", "timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
    {"session_id": "b", "group_id": "g", "timestamp": 5, "input_length": 512, "output_length": 2, "hash_ids": [1]},
    {"session_id": "a", "delay": 4, "input_length": 5, "output_length": 8, "hash_ids": [11]},
)
MOONCAKE = (
    {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
    {"timestamp": 27, "input_length": 40, "output_length": 2, "hash_ids": [3]},
)
BENCH = (
    {"id": 0, "arrival_ns": 0, "input_toks": 40, "output_toks": 3, "prompt_block_runs": [[0, 2]]},
    {"id": 1, "arrival_ns": 900, "input_toks": 16, "output_toks": 2, "prompt_block_runs": [[7, 1]]},
)
VLLM = {
    "config": {"block_size": 4},
    "requests": [
        {"id": "a", "arrival_us": 0, "prompt_token_ids": [5, 6, 7, 8, 9], "output_token_ids": [3, 2], "stop": True},
        {"id": "b", "arrival_us": 9, "prompt_token_ids": [5], "output_token_ids": [1], "abort_us": 400, "priority": 1},
    ],
}
TRANSFORMERS = {
    "cb": {"block_size": 4},
    "model": {"vocab_size": 64},
    "eos_token_id": 3,
    "requests": [{"id": "a", "prompt": [5, 6, 7], "max_new_tokens": 4, "eos_after": 2, "arrival_step": 1}],
    "cancels": [{"id": "a", "step": 2}],
}


def json_lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


TRACES: dict[str, tuple[str, str, Callable[[str, random.Random], str]]] = {
    "csv": ("a.csv", "id,arrival_s,prefill_tokens,decode_tokens,priority\na,0,30,4,0\nb,0.5,20,3,1\n", with_a_cell),
    "azure": (
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,30,4\n2023-11-16 18:17:04.5,20,3\n",
        with_a_cell,
    ),
    "lengths": ("a.csv", "num_prefill_tokens,num_decode_tokens\n30,4\n20,3\n", with_a_cell),
    "mooncake": ("a.jsonl", json_lines(MOONCAKE), as_json_lines),
    "agentic": ("a.jsonl", json_lines(TURNS), as_json_lines),
    "vllm_bench": ("a.jsonl", json_lines(BENCH), as_json_lines),
    "golden": ("a.json", json.dumps(VLLM, indent=1), as_json),
    "golden, transformers": ("a.json", json.dumps(TRANSFORMERS, indent=1), as_json),
}


@pytest.mark.parametrize("kind", TRACES)
def test_broken_traces_end_with_a_status_and_a_short_message(kind: str, tmp_path: Path) -> None:
    """As they are, and gzipped, where bytes of the packed file may be wrong, too."""
    name, text, change = TRACES[kind]
    path, packed, seen = tmp_path / "s.yaml", kind in ("csv", "mooncake"), set()
    trace = tmp_path / (f"{name}.gz" if packed else name)
    workload = f"workload: {{kind: {kind.partition(',')[0]}, path: {trace.name}}}\n"
    path.write_text(TEXT[: TEXT.index("workload:")] + workload + TEXT[TEXT.index("loop:") :])
    trace.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert ran(path, tmp_path / "out").status == 0
    for case, rng in mutations.until(TRACES_S / len(TRACES), 60):
        broken = rng.choice((edited, shuffled, change, change))(text, rng)
        content = broken.encode(errors="surrogatepass")
        trace.write_bytes(gzip.compress(content, mtime=0) if packed else content)
        if packed and rng.random() < 0.2:
            mutations.damaged(trace, rng)
        about = f"seed {SEED}, {kind}, case {case}:\n{broken[:2000]}"
        seen.add(mutations.survived(about, (0, 1, 2), lambda: ran(path, tmp_path / "out"), path=trace))
    assert 2 in seen


@pytest.mark.parametrize("way", [edited, restructured])
def test_mutations_are_the_same_in_every_run(way: Callable[[str, random.Random], str]) -> None:
    """A case that fails can be made again from the seed; the file itself is sound."""
    one, two = random.Random(SEED), random.Random(SEED)
    assert [way(TEXT, one) for _ in range(20)] == [way(TEXT, two) for _ in range(20)]
    with pytest.raises(ScenarioError):
        documents.parse(TEXT + "seed: 8\n", "twice")
