"""Pipelines: closed forms of rate, latency and bubble, steps in flight, memory, parts of a model, what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.helpers import step_plan
from support.machines import load, run, spec, table

import cbsim
from cbsim.cost.base import CpuCost, StagedCost
from cbsim.errors import ScenarioError
from cbsim.machine.device import Pipeline, Timing
from cbsim.machine.driver import Machine
from cbsim.machine.graphs import Graphs, unpadded
from cbsim.policy.plan import StepPlan
from cbsim.record import invariants, optional_tables
from cbsim.record.record import Record
from cbsim.record.tables import requests_of
from cbsim.runs import replan
from cbsim.runs.assemble import cost_model
from cbsim.runs.inbox import Inbox
from cbsim.scenario import scenario, shapes
from cbsim.schedulers.registry import OURS
from cbsim.schedulers.sarathi.settings import ServeOptions
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VllmOptions

PROMPT = 16
FIELDS = {
    "question": "What does a pipeline do?",
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm",
    "workload": {
        "kind": "synthetic",
        "requests": 30,
        "prompt_tokens": {"uniform": {"low": 50, "high": 400}},
        "output_tokens": {"uniform": {"low": 1, "high": 30}},
        "arrivals": {"kind": "closed_loop", "users": 12},
    },
    "loop": {"mode": "async"},
}


def of(*changes: str, **fields: Any) -> scenario.Scenario:
    return scenario.parse({**FIELDS, **fields}, "pipeline", changes)


class Constant:
    """A stage that takes the same time for every step with rows."""

    def __init__(self, ns: int) -> None:
        self.cpu_ns, self.launch_ns, self._ns = CpuCost({}), 0, ns

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        return 0, self._ns if plan.work.rows else 0, 0


def vllm(stages: int, *, ahead: bool) -> tuple[Any, int]:
    sizes = {"block_size": 16, "num_blocks": 400, "max_model_len": 4000, "max_num_seqs": 8}
    made = VllmOptions(**sizes, max_num_batched_tokens=PROMPT, async_scheduling=ahead, stages=stages)
    return VllmScheduler(made), stages + ahead


def sarathi(stages: int) -> tuple[Any, int]:
    own = OURS["sarathi"].settings(max_num_seqs=8, chunk_size=PROMPT)
    options = ServeOptions(own, block_size=16, num_blocks=400, max_model_len=4000, stages=stages)
    return OURS["sarathi"].make(options), stages


def served(of: tuple[Any, int], stages: list[int], requests: int, outputs: int, send: int = 0) -> Record:
    """The record of requests that arrive together, and whose prompts fill a step each; nothing takes CPU time."""
    policy, depth = of
    specs = [spec(i, PROMPT, outputs) for i in range(requests)]
    record, workload = Record(policy.pool.num_blocks), load(*specs)
    cost = StagedCost([Constant(ns) for ns in stages], send, 0)
    device = Pipeline(cost, record.stages, Timing(depth, overlap=True))
    inbox = Inbox(workload, record, workload.arriving())
    machine = Machine(policy, cost, Graphs(unpadded, 0), device, inbox, record, depth)
    steps = run(machine)
    invariants.check(steps, depth=depth, overlap=True, total_blocks=policy.pool.num_blocks)
    return record


def per_step(record: Record) -> float:
    """Nanoseconds from the end of a step with rows to that of the next, in the middle of the run."""
    steps = table(record)
    ends = steps["compute_end_ns"][steps["rows"] > 0]
    low, high = len(ends) // 4, 3 * len(ends) // 4
    return float(ends[high] - ends[low]) / (high - low)


POLICIES = {"async": lambda p: vllm(p, ahead=True), "sync": lambda p: vllm(p, ahead=False), "sarathi": sarathi}
OVER = pytest.mark.parametrize("policy", POLICIES)


@OVER
@examples(20)
@given(stages=st.lists(st.integers(1, 1000), min_size=2, max_size=4), send=st.integers(0, 300))
def test_rate_is_that_of_the_slowest_stage_or_of_the_way_through_all(policy: str, stages: list[int], send: int) -> None:
    """As many batches as stages go round: each needs its stages, the sends between them, and its tokens back at the
    first stage (async: over the link; else they come from the CPU). None passes another on the slowest stage."""
    count = len(stages)
    way = sum(stages) + (count - 1 + (policy == "async")) * send
    record = served(POLICIES[policy](count), stages, requests=count, outputs=400, send=send)
    assert per_step(record) == pytest.approx(max(*stages, way / count), rel=0.02)


@OVER
def test_equal_stages_are_as_many_times_as_fast(policy: str) -> None:
    """Four stages of a quarter each give four times the tokens of one GPU; a token takes as long as there."""
    record, alone = (served(POLICIES[policy](4), [250] * 4, requests=n, outputs=300) for n in (4, 1))
    assert per_step(record) == pytest.approx(250, rel=0.01)
    assert per_step(alone) == pytest.approx(1000, rel=0.01)
    assert optional_tables.summarise_stages(record.stages)["bubble"] == pytest.approx(0, abs=0.02)


@OVER
@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_batch_leaves_all_stages_but_one_idle(policy: str, count: int) -> None:
    record = served(POLICIES[policy](count), [100] * count, requests=1, outputs=100)
    found = optional_tables.summarise_stages(record.stages)
    assert found["bubble"] == pytest.approx((count - 1) / count, abs=0.01)
    assert found["by_stage"] == pytest.approx([1 / count] * count, abs=0.01)


@OVER
@given(stages=st.lists(st.integers(0, 50), min_size=2, max_size=4), requests=st.integers(1, 9), send=st.integers(0, 50))
def test_a_step_passes_the_stages_in_order_and_each_runs_one_at_a_time(
    policy: str, stages: list[int], requests: int, send: int
) -> None:
    record = served(POLICIES[policy](len(stages)), stages, requests, outputs=5, send=send)
    rows = optional_tables.values_of(optional_tables.STAGES, record.stages)
    times = [[rows[name][rows["stage"] == at] for name in ("start_ns", "end_ns")] for at in range(len(stages))]
    for took, (start, end) in zip(stages, times, strict=True):
        assert (end - start == took).all()
        assert (start[1:] >= end[:-1]).all()
    assert all((after[0] >= before[1] + send).all() for before, after in pairwise(times))


def test_bubbles_come_of_unequal_steps() -> None:
    """Long chunks between short decodes: every stage waits, though all stages are alike."""
    result = cbsim.run(of("cost.pipeline_parallel=4", scheduler={"name": "sarathi"}))
    assert 0.1 < result.summary["pipeline"]["bubble"] < 0.9


@pytest.mark.parametrize("name", ["vllm", "sarathi", "orca", "faster_transformer", "simple_chunking", "vllm_v0"])
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_a_pipelined_run_is_a_run_like_any_other(tmp_path: Any, name: str, loop: str) -> None:
    """Its steps keep all rules, its plans are derived again, its stages are in a table, also with a tiny cache."""
    made = of(
        f"loop.mode={loop}",
        "cost.pipeline_parallel=3",
        "kv_cache.num_blocks=60",
        scheduler={"name": name, "max_model_len": 448},
    )
    result = cbsim.run(made)
    invariants.check(result.step_numbers, depth=scenario.depth(loop, 3), overlap=True, total_blocks=60)
    folder = result.save(tmp_path)
    verdict = replan.rederive(folder)
    assert verdict.difference is None
    assert verdict.matched == len(result.steps)
    assert len(optional_tables.read(folder, optional_tables.STAGES)["step"]) == 3 * int(
        (result.step_numbers["rows"] > 0).sum()
    )
    assert result.summary["requests"] == 30
    assert sum(result.summary["requests_by_status"].values()) == 30


def test_layers_are_split_as_vllm_does() -> None:
    """get_pp_indices: what is left goes to the last stage but one, the one before it, and so on."""
    model = shapes.model("llama-3.1-8b")
    sizes = {count: [part.layers for part in model.stages(count)] for count in (1, 2, 3, 5, 7, 32)}
    assert sizes[3] == [11, 11, 10]
    assert sizes[5] == [6, 6, 7, 7, 6]
    assert sizes[7] == [4, 4, 5, 5, 5, 5, 4]
    assert sizes[1] == [32]
    assert sizes[2] == [16, 16]
    assert sizes[32] == [1] * 32


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_parts_of_a_model_are_the_whole(name: str, count: int) -> None:
    """Weights and KV of the stages add up; only norms between stages are counted twice, and tied embeddings."""
    model = shapes.model(name)
    parts = model.stages(count)
    assert sum(part.kv_token_bytes() for part in parts) == model.kv_token_bytes()
    norms = (count - 1) * model.hidden * model.dtype_bytes
    tied = model.tied_embeddings * model.vocab * model.hidden * model.dtype_bytes
    assert sum(part.weight_bytes for part in parts) == pytest.approx(model.weight_bytes + norms + tied, abs=count)
    assert sum(part.expert_parameters for part in parts) == model.expert_parameters


def test_blocks_are_those_of_the_tightest_stage() -> None:
    """27 layers on two stages, 14 and 13, and the vocabulary's weights on both: the first has less room, by a layer."""
    model = shapes.model("llama-3.1-8b").model_copy(update={"layers": 27})
    gpu = shapes.hardware("h100-sxm")
    whole = shapes.Place(model, gpu, 2, 16, 0.9, None)
    staged = shapes.Place(model, gpu, 3, 16, 0.9, None, stages=2)
    parts = model.stages(2)
    assert [part.layers for part in parts] == [14, 13]
    each = [shapes.Place(part, gpu, 3, 16, 0.9, None).blocks(8192, 256) for part in parts]
    assert staged.blocks(8192, 256) == min(each) == each[0] > 2 * whole.blocks(8192, 256)


@pytest.mark.parametrize("count", [2, 4])
def test_the_stages_of_a_step_take_what_it_takes_on_one_gpu(count: int) -> None:
    """By constant efficiencies, without sends: 8B has 32 layers; embedding and head come once."""
    steady = "cost.memory_efficiency={weights: 0.8, kv: 0.7}"
    whole = cost_model(of(steady))
    staged = cost_model(of(steady, f"cost.pipeline_parallel={count}", "cost.stage_link={latency_s: 0, bytes_s: 1e30}"))
    plan = step_plan(decodes=8, decode_context=4000)
    for tokens in (8, 16):
        assert staged.gpu_ns(plan, tokens)[1] == pytest.approx(whole.gpu_ns(plan, tokens)[1], rel=0.002)


def test_a_send_is_latency_and_twice_the_residual_stream_over_the_link() -> None:
    """8,192 bytes a token of two 4,096 wide rows in bfloat16, twice; over NVLink, or over the host's link if it joins
    fewer GPUs."""
    made: Any = cost_model(of("cost.pipeline_parallel=2"))
    gpu = shapes.hardware("h100-sxm")
    assert made.send_ns(0) == 10_000
    assert made.send_ns(1000) == pytest.approx(10_000 + 1000 * 2 * 4096 * 2 / gpu.link_bytes_s * 1e9, abs=1)
    wide: Any = cost_model(of("cost.pipeline_parallel=16"))
    assert wide.send_ns(1000) == pytest.approx(10_000 + 1000 * 2 * 4096 * 2 / gpu.pcie_bytes_s * 1e9, abs=1)
    given: Any = cost_model(of("cost.pipeline_parallel=2", "cost.stage_link={latency_s: 1e-3, bytes_s: 1e9}"))
    assert given.send_ns(1000) == 1_000_000 + 1000 * 2 * 4096 * 2


@pytest.mark.parametrize("ahead", [False, True])
def test_vllm_lets_a_request_decode_once_in_as_many_steps_as_stages(ahead: bool) -> None:
    """vLLM 0.33: with a step ahead, by the number of steps; else while its token is in flight."""
    policy, _ = vllm(3, ahead=ahead)
    record = served((policy, 3 + ahead), [10, 20, 30], requests=5, outputs=20)
    runs = [row.token_runs for row in requests_of(record)]
    steps = [[first + i for first, count in zip(r[::2], r[1::2], strict=True) for i in range(count)] for r in runs]
    assert all(len(each) == 20 for each in steps)
    assert all(b - a >= 3 for each in steps for a, b in pairwise(each)) or not ahead


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["cost.pipeline_parallel=33"], "cost.pipeline_parallel: got 33, must be <= layers (32)"),
        (
            ["cost.pipeline_parallel=1", "cost.stage_link={latency_s: 0, bytes_s: 1e9}"],
            "cost.stage_link: must be null with pipeline_parallel 1",
        ),
        (["cost.stage_link={latency_s: 0, bytes_s: 0.5}"], "cost.stage_link.bytes_s: got 0.5, must be >= 1"),
        (["cost.pipeline_parallel=0"], "cost.pipeline_parallel: got 0, must be >= 1"),
        (["scheduler={name: sglang}"], "got 2, must be 1 with scheduler sglang, whose rules for a pipeline"),
        (["scheduler={name: trtllm}"], "got 2, must be 1 with scheduler trtllm"),
        (["scheduler={name: transformers_fifo}", "kv_cache.block_size=256"], "got 2, must be 1 with scheduler transf"),
        (["speculation={method: ngram, k: 2, acceptance: {rate: 0.5}}"], "got 2, must be 1 with speculation"),
        (["model=qwen3-30b-a3b", "cost.data_parallel=2"], "got 2, must be 1 with cost.data_parallel 2"),
        (["model.attention=[sliding 512]"], "got 2, must be 1 with layers that have windows or states"),
        (["scheduler.version='0.19'"], "scheduler.version: got 0.19, must be 0.33 with cost.pipeline_parallel 2"),
        (["scheduler.kv_connector=simple_cpu"], "scheduler.kv_connector: got simple_cpu, must be none with cost."),
        (["scheduler.preemption_mode=swap"], "scheduler.preemption_mode: got swap, must be recompute with cost."),
        (["cost={kind: table, path: x, pipeline_parallel: 2}"], "must be 1 with cost.kind table without cost.engine"),
        (["cost={kind: constant, step_s: 1, pipeline_parallel: 2}"], "cost.pipeline_parallel: unknown field"),
    ],
)
def test_pipelines_that_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        of("cost.pipeline_parallel=2", *changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_more_stages_take_more_gpus_and_their_price() -> None:
    one, four = of(), of("cost.pipeline_parallel=4", "cost.tensor_parallel=2")
    assert (one.all_gpus, four.all_gpus) == (1, 8)
    assert one.price_usd_hour is not None
    assert four.price_usd_hour == pytest.approx(8 * one.price_usd_hour)


def test_four_gpus_without_nvlink_do_better_as_stages_and_those_with_it_as_ranks() -> None:
    """What users find: over PCIe the all-reduces of every layer cost more than the bubbles of a pipeline."""
    rate = {}
    for card in ("l40s", "h100-sxm"):
        for how in ("tensor", "pipeline"):
            made = of(f"cost.{how}_parallel=4", "model.weights_dtype=fp8", "workload.requests=40", hardware=card)
            rate[card, how] = cbsim.run(made).summary["output_tokens_per_s"]
    assert rate["l40s", "pipeline"] > rate["l40s", "tensor"]
    assert rate["h100-sxm", "tensor"] > rate["h100-sxm", "pipeline"]
