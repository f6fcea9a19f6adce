"""Workloads of vLLM are drawn over all options that our rules have; the installed vLLM decides what ours decide."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from cbsim.cli.parser import main
from cbsim.conformance.offload_traces import CONNECTORS, unsupported
from cbsim.conformance.vllm_traces import OPTIONS, options
from cbsim.live.original import load
from cbsim.live.vllm_workloads import KINDS, LAYOUTS, draw
from cbsim.workload.scheduler_tests import vllm_requests

DRAWN = [draw(random.Random(number), number, old=False) for number in range(300)]


def installed() -> None:
    for package in ("vllm", "torch"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_workloads_are_within_what_is_compared() -> None:
    """Every option of the reader is drawn and no other, every kind of connector, of layers and of layouts."""
    for workload in DRAWN:
        assert unsupported(workload["config"]) is None
        options("0.33.0", "async", workload["config"])
        assert all(spec.prompt_tokens < workload["config"]["max_model_len"] for spec, _ in vllm_requests(workload))
    assert {name for workload in DRAWN for name in workload["config"]} == OPTIONS - {"spec"}  # golden traces have it
    connectors = [workload["config"]["connector"] for workload in DRAWN if "connector" in workload["config"]]
    assert {connector["kind"] for connector in connectors} == CONNECTORS.keys()
    assert {workload["config"].get("layout") for workload in DRAWN} == {None, *LAYOUTS}
    layers = [layer["kind"] for workload in DRAWN for layer in workload["config"].get("layers", ())]
    assert {*layers} == {"full", "sliding", "chunked", "linear"}
    assert any("outputs" in request for workload in DRAWN for request in workload["requests"])


def test_a_workload_depends_on_its_number_alone() -> None:
    """The same again, and JSON; for an old version there are neither connectors nor layers, nor younger options."""
    assert DRAWN[3] == draw(random.Random(3), 3, old=False) == json.loads(json.dumps(DRAWN[3]))
    assert [workload["name"].rstrip("0123456789") for workload in DRAWN[: len(KINDS)]] == list(KINDS)
    for number in range(20):
        config = draw(random.Random(number), number, old=True)["config"]
        options("0.19.0", "sync", config)
        assert not config.keys() & {"connector", "layers", "watermark", "prefill_schedule_interval"}


def test_the_real_scheduler_decides_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of random workloads of every kind, in both modes."""
    installed()
    status = main(["conformance", "--live", "vllm", "--count", "20", "--out", str(tmp_path / "kept")])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "40 traces compared" in said or "itself failed" in said, said


def test_a_workload_leaves_no_trace_in_the_next() -> None:
    """A recording depends on its workload alone, and its header takes another version."""
    installed()
    original, _ = load("vllm")
    first, other = (original.draw(random.Random(seed), seed) for seed in (1, 2))
    lines = original.record(first, "async")
    original.record(other, "sync")
    assert original.record(first, "async") == lines
    assert original.read_as(lines[0], "0.19.0") == lines[0] | {"vllm": "0.19.0"}


def test_outputs_that_are_not_declared_are_an_error() -> None:
    """A request whose outputs end before its limit, and without the stop token, would go on with tokens of no one."""
    installed()
    original, _ = load("vllm")
    workload = original.draw(random.Random(0), 0)
    workload["requests"] = workload["requests"][:1]
    workload["requests"][0] |= {"max_tokens": 5, "output_token_ids": [7]}
    with pytest.raises(ValueError, match="goes on behind its last declared output"):
        original.record(workload, "sync")
