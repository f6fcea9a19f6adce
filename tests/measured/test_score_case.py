"""What a case of `score` says of the server: its scenario, rules and types, its blocks, and its link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import packs
from support.calls import call, refused
from support.packs import Pack
from support.reference import data

from cbsim.measured.recorded import case, score
from cbsim.scenario import shapes
from cbsim.scenario.schedulers import plain
from cbsim.workload.vllm_bench import TIMES

pytestmark = pytest.mark.usefixtures("elsewhere")
EXPERTS = {"ranks": 2, "moe": True}


def test_a_case_is_a_scenario(pack: Pack) -> None:
    """vLLM's options are those it resolved, else those it was asked for; the clock is the engine's."""
    pack.edit("meta.json", resolved_config__scheduler_config={"policy": "priority", "async_scheduling": False})
    found = pack.read()
    asked = found.scenario()
    options = plain(asked.scheduler)
    assert (options["max_num_seqs"], options["max_num_batched_tokens"], options["version"]) == (16, 256, "0.19")
    assert (options["policy"], asked.loop.mode, asked.kv_cache.num_blocks) == ("priority", "sync", 120)
    assert not found.scenario({"cost.skew": False, "scheduler.policy": "fcfs"}).cost.model_dump()["skew"]
    assert found.blocks_measured and found.ranks == 1
    assert found.taken[0] == (0, 0, 10**9, 2 * 10**9)


@pytest.mark.parametrize(("shape", "padding"), [({}, "none"), ({"ranks": 2}, "none"), (EXPERTS, "vllm")])
def test_servers_that_step_together_are_padded_to_graphs(shape: dict[str, Any], padding: str, tmp_path: Path) -> None:
    """Tables are read at a step's own size; where servers share experts, graphs decide how many tokens each brings."""
    made = packs.pack(tmp_path, **shape)
    assert case.read(made.folder).scenario().loop.cuda_graphs.padding == padding


def test_newer_versions_have_newer_rules(pack: Pack) -> None:
    """0.26 and later by the rules of 0.33; a version that is neither is said so."""
    for version, rules, told in (("0.19.1", "0.19", False), ("0.26.0", "0.33", True), ("0.33.0", "0.33", False)):
        pack.edit("meta.json", vllm_version=version)
        assert plain(pack.read().scenario().scheduler)["version"] == rules
        assert (f"of vLLM {version}; it was replayed by the rules of {rules}" in call("score", pack.folder).out) == told


def test_type_auto_is_the_models_own(pack: Pack) -> None:
    """vLLM's default; a type that was not profiled is named."""
    pack.edit("meta.json", engine_kwargs__dtype="auto")
    pack.read()
    pack.edit("meta.json", engine_kwargs__dtype="float16")
    refused(call("score", pack.folder), 2, "fp16", "no profile there of me/Tiny on RTX4090 in float16")


GOLDEN_BLOCKS = [
    ("RTXPRO6000", "meta-llama/Llama-3.1-8B", 1, 1, 36_578),
    ("RTXPRO6000", "Qwen/Qwen3-32B", 2, 1, 28_614),
    ("RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507", 1, 2, 38_590),
]


@pytest.mark.parametrize(("hardware", "model", "tensor", "ranks", "blocks"), GOLDEN_BLOCKS)
def test_derived_blocks_golden(hardware: str, model: str, tensor: int, ranks: int, blocks: int, tmp_path: Path) -> None:
    """LLMServingSim's own numbers for 96 GiB at 0.9, from the weights of one GPU: tensor-parallel ones share all of
    them, expert-parallel ones the experts. Both cases also run on the real profiles, whatever their requests."""
    root = data("measured_vllm/cases/RTX4090__Llama-3.1-8B/meta.json").parents[2]
    folder = tmp_path / "case"
    instance = {"model_name": model, "hardware": hardware, "tp_size": tensor, "npu_mem": {"mem_size": 96}}
    nodes = [{"instances": [instance] * ranks}]
    packs.write(folder / "config.json", {"link_bw": 16, "link_latency": 0, "nodes": nodes})
    engine = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "enable_expert_parallel": ranks > 1}
    dataset = "sharegpt-llama-3.1-8b-300-sps10" if "Llama" in model else "sharegpt-qwen3-32b-300-sps10"
    meta = {"vllm_version": "0.19.0", "dataset_path": f"{dataset}.jsonl", "engine_kwargs": engine, "num_requests": 12}
    packs.write(folder / "meta.json", meta)
    lengths = (root / "workloads" / f"{dataset}.lengths.jsonl").read_text()
    rows = [json.loads(line) for line in lengths.splitlines()[:12]]
    times = dict.fromkeys(TIMES, 1.0)
    packs.lines(folder / "requests.jsonl", [{"request_id": f"bench-{row['id']}", **row, **times} for row in rows])
    packs.table(folder / "timeseries.csv", ("t", "running", "waiting", "kv_cache_pct"), [(1, 1, 1, 1)])
    found = case.read(folder, root)
    assert (found.settings["kv_cache"]["num_blocks"], found.blocks_measured) == (blocks, False)
    done = score.replay(found, found.scenario())
    assert len(done.steps) == ranks
    assert done.served.output_tokens.tolist() == [row["output_toks"] for row in rows]


def test_shapes_with_experts_are_consistent() -> None:
    """As many experts a token as there are at most, one at least; none without experts."""
    tiny = shapes.model("tiny").model_dump(mode="json")
    for experts, chosen, fits in ((0, 0, True), (0, 1, False), (8, 0, False), (8, 9, False), (8, 8, True)):
        values = tiny | {"experts": experts, "experts_per_token": chosen}
        if fits:
            shapes.ModelShape.model_validate(values)
        else:
            with pytest.raises(ValueError, match="must be between"):
                shapes.ModelShape.model_validate(values)


def test_a_link_that_nobody_names_is_assumed_and_told(tmp_path: Path) -> None:
    """Several GPUs talk to each other over something; what was assumed of it stands in the answer, for one GPU not."""
    made = packs.pack(tmp_path / "two", tensor=2)
    packs.record(made)
    told = "config.json names no link between the GPUs: 16 GiB/s and 20 us a message are assumed."
    assert told not in call("score", made.folder, "--out", tmp_path / "a").out
    made.edit("config.json", link_bw=None)
    said = call("score", made.folder, "--out", tmp_path / "b")
    assert said.status == 0
    assert told in said.out
    alone = packs.pack(tmp_path / "one")
    packs.record(alone)
    assert told not in call("score", alone.folder, "--out", tmp_path / "c").out
