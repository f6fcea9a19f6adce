"""Conformance with an installed package, here a stand-in: our own rules with a fault planted in what they record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from support.calls import call

from cbsim.cli.parser import main
from cbsim.conformance.vllm_traces import VllmReplay
from cbsim.errors import UserError
from cbsim.live import session
from cbsim.live.original import Line, load, rules_for
from cbsim.live.transformers_workloads import draw

CONFIG = {
    "block_size": 4,
    "num_blocks": 60,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "enable_prefix_caching": True,
    "policy": "fcfs",
    "scheduler_reserve_full_isl": True,
    "timing": {"base_us": 10, "per_token_us": 1, "per_kv_token_us": 0, "sched_us": 1, "update_us": 1},
}


def drawn(rng: Random, number: int) -> Line:
    requests = [
        {
            "id": f"r{i}",
            "arrival_us": 5 * i,
            "prompt_token_ids": [rng.randrange(9) for _ in range(rng.randint(1, 30))],
            "output_token_ids": [rng.randrange(9) for _ in range(rng.randint(1, 12))],
        }
        for i in range(6)
    ]
    return {"name": f"drawn{number}", "config": CONFIG | {"watermark": 0.1}, "requests": requests}


def recorded(workload: Line, mode: str) -> list[Line]:
    """Our own lines; with more than seven outputs, of any request, one more block is free in the last update."""
    if workload["requests"][0]["prompt_token_ids"][0] == 8:
        raise RuntimeError("the original dies of this")
    header = {"ev": "header", "format": 1, "vllm": "0.33.0", "mode": mode, "config": workload["config"]}
    lines = list(VllmReplay(header, workload).lines())
    if any(len(request["output_token_ids"]) > 7 for request in workload["requests"]):
        lines[-2]["free"] += 1
    return [header, *lines]


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    stand_in = SimpleNamespace(
        versions=("0.19.0", "0.33.0"),
        lengths=("prompt_token_ids", "output_token_ids"),
        options="config",
        plain=dict.fromkeys(CONFIG, ...) | {"max_num_seqs": 2},
        draw=drawn,
        modes=lambda workload: ("sync",),
        record=recorded,
        read_as=lambda header, version: header | {"vllm": version},
    )
    monkeypatch.setattr(session, "load", lambda package: (stand_in, "0.34.1"))
    return stand_in


def live(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = main(["conformance", "--live", "vllm", *options])
    return status, capsys.readouterr().out


def test_a_difference_is_cut_to_the_least_that_shows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Both sides are printed; the smallest workload has one request of eight outputs, and plain options."""
    status, said = live(capsys, "--count", "12", "--out", str(tmp_path / "kept"))
    assert status == 1
    assert "vllm 0.34.1 is installed; our rules were read from 0.19.0, 0.33.0" in said
    assert "those of 0.33.0 are compared" in said
    assert "ours" in said and "theirs" in said
    assert "no trace, vllm itself failed: RuntimeError: the original dies of this" in said
    (least,) = (tmp_path / "kept" / "workloads").glob("*_smallest.json")
    workload = json.loads(least.read_text())
    (request,) = workload["requests"]
    assert len(request["output_token_ids"]) == 8
    assert len(request["prompt_token_ids"]) == 1
    assert workload["config"]["max_num_seqs"] == 2
    assert "watermark" not in workload["config"]


def test_what_matches_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path, original: SimpleNamespace) -> None:
    """A workload of the user's, in every mode."""
    original.modes = lambda workload: ("sync", "async")
    path = tmp_path / "mine.json"
    workload = drawn(Random(1), 1)
    workload["requests"] = [r | {"output_token_ids": [1, 1]} for r in workload["requests"]]
    path.write_text(json.dumps(workload))
    status, said = live(capsys, "--workload", str(path))
    assert status == 0
    assert "2 traces compared" in said and "0 differ" in said


def test_nothing_recorded_is_no_success(capsys: pytest.CaptureFixture[str], original: SimpleNamespace) -> None:
    def fails(workload: Line, mode: str) -> list[Line]:
        raise KeyError("gone")

    original.record = fails
    status, said = live(capsys, "--count", "2")
    assert status == 2
    assert "2 not compared" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "not valid JSON: "), ("{}", "requests: expected a list with at least one request")],
)
def test_a_damaged_workload_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert main(["conformance", "--live", "vllm", "--workload", str(path)]) == 2
    said = capsys.readouterr().err
    assert expected in said and str(path) in said


@pytest.mark.parametrize("options", [[], ["--live", "vllm", "trace.jsonl"]])
def test_traces_or_a_package(options: list[str]) -> None:
    said = call("conformance", *options)
    assert said.status == 2
    assert "expected traces, or --live and a package" in said.err


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UserError, match="--live vllm: vllm is not installed"):
        load("vllm")


@pytest.mark.parametrize(
    ("found", "rules"), [("0.18.0", "0.19.0"), ("0.20.1", "0.19.0"), ("0.33.0", "0.33.0"), ("0.40.0rc1", "0.33.0")]
)
def test_the_rules_before_a_version_are_compared(found: str, rules: str) -> None:
    assert rules_for(found, ("0.19.0", "0.33.0")) == rules


def names(seeds: Iterator[int]) -> list[Line]:
    return [draw(Random(f"transformers {seed}"), seed) for seed in seeds]


def test_a_workload_depends_on_its_number_alone() -> None:
    assert names(iter([3, 4, 5]))[1:] == names(iter([4, 5]))
