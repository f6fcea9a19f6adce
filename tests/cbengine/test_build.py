"""From a scenario to an engine: what is recorded can be loaded again, sizes suffice for every plan, and what cannot be
is refused before any memory is taken.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")

import torch
from support.engine.served import INLINE, SCHEDULERS, SHAPE, asked, named, spec
from support.engine.tiny_runs import peak_bytes

from cbengine import build
from cbengine.batch import Capacity, Load
from cbengine.build import Setup
from cbengine.device.cuda import scratch_step
from cbengine.device.layout import arrays
from cbengine.errors import UsageError
from cbengine.model import weights
from cbengine.model.kvcache import DeviceMemoryError
from cbengine.model.ops import TorchOps
from cbsim.errors import ScenarioError
from cbsim.record.tables import requests_of
from cbsim.scenario import scenario
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators
from cbsim.workload.requests import Workload

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
GB = 10**9


def folder(path: Path, **changes: object) -> Path:
    """A folder with a config.json and no weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_room_is_made_for_what_there_is() -> None:
    """A budget of a million tokens or a thousand seats costs nothing where a few requests come."""
    specs = [spec(0, 10, 5), spec(1, 20, 5)]
    huge = asked("vllm", "scheduler.max_num_batched_tokens=1e6", "scheduler.max_num_seqs=1000")
    sizes = Load.of(specs).capacity(huge.options("sync"))
    assert (sizes.slots, sizes.rows) == (2, 2)
    assert sizes.tokens == max(2 * 25, sizes.sampling)
    lonely = Load.of(specs).capacity(asked("static", "scheduler.batch_size=64").options("sync"))
    assert (lonely.slots, lonely.rows, lonely.tokens) == (2, 2, max(2 * 20, lonely.sampling))


# -- what is recorded -------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(
    ["tiny", "1e5", "null", "true", "- a", "a: b", "{x}", "'", '"', "é😀", "#", "x" * 200, " y ", "~"]
)


BASES = {one: asked(one, "model.dtype=bfloat16") for one in SCHEDULERS}


@settings(max_examples=25)
@given(
    name=NAMES,
    scheduler=st.sampled_from(SCHEDULERS),
    device=st.sampled_from(["inline", "process", "modelled"]),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "num_hidden_layers": st.integers(1, 100),
            "head_dim": st.sampled_from([2, 64, 128]),
            "num_key_value_heads": st.sampled_from([1, 2, 4]),
            "tie_word_embeddings": st.booleans(),
            "model_type": st.sampled_from(["llama", "qwen2", "qwen3"]),
            "vocab_size": st.integers(1, 200_000),
        },
    ),
)
def test_what_is_recorded_loads_again(
    tmp_path_factory: pytest.TempPathFactory, name: str, scheduler: str, device: Any, changes: dict[str, object]
) -> None:
    """The adapted scenario survives being written out, adapting it again changes nothing, and it has the shape of the
    weights: the engine that it leads to has the very architecture of the folder.
    """
    path = folder(tmp_path_factory.getbasetemp() / "names" / name, **changes)
    setup = Setup(device=device, weights=path)
    ready = build.adapted(BASES[scheduler], setup)
    file = path / "dumped.yaml"
    file.write_text(scenario.dump(ready), encoding="utf-8")
    assert scenario.load(file) == ready == build.adapted(ready, setup)
    described = weights.architecture(path)
    assert (ready.model.experts, ready.model.experts_per_token) == (0, 0)  # weights are of dense models only
    assert (ready.model.weights_dtype, ready.model.kv_dtype) == (None, None)  # the engine has one type for all
    assert ready.model.pattern == described.pattern
    elsewhere = {"dtype", "weights_dtype", "kv_dtype", "experts", "experts_per_token", "attention"}
    for field, value in ready.model.model_dump(exclude=elsewhere).items():
        assert getattr(described, field) == value, field
    assert ready.model.name == path.name
    assert ready.model.dtype == ("bfloat16" if device == "modelled" else "float32")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("hidden_size", 10**30, "hidden_size: got 1"), ("max_position_embeddings", 10**16, "max_position_embeddings: ")],
)
def test_numbers_that_no_scenario_takes(tmp_path: Path, field: str, value: int, words: str) -> None:
    path = folder(tmp_path, **{field: value, "head_dim": 16})
    with pytest.raises(UsageError) as error:
        build.adapted(asked("vllm"), Setup(device="inline", weights=path))
    assert str(error.value).startswith(f"{path / 'config.json'}: {words}")


@pytest.mark.parametrize("device", ["inline", "process", "cuda"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.head_dim=7"], "model.head_dim: got 7, must be even"),
        (["model.qkv_bias=true", "model.qk_norm=true"], "model.qkv_bias: got true, must be false with model.qk_norm"),
        (["model.weights_dtype=int4"], "model.weights_dtype: got int4, must be null"),
        (["model.kv_dtype=fp8"], "model.kv_dtype: got fp8, must be null"),
        (["model.output_gate=true"], "model.output_gate: got true, must be false"),
        (["model.gated=false"], "model.gated: got false, must be true"),
        (["cost.tensor_parallel=4"], "cost.tensor_parallel: got 4, must divide model.kv_heads (2)"),
        (
            ["model.intermediate=97", "cost.tensor_parallel=2"],
            "cost.tensor_parallel: got 2, must divide model.",
        ),
        (
            ["model.experts=4", "model.experts_per_token=2", "cost={kind: constant, step_s: 0.001}"],
            "model.experts: got 4, must be 0",
        ),
    ],
)
def test_what_only_a_simulation_can_have(overrides: list[str], message: str, device: build.DeviceName) -> None:
    """It is refused by name before anything is built; the simulator, and a device that computes nothing, take any."""
    odd = asked("vllm", *overrides)
    with pytest.raises((ScenarioError, UsageError)) as error:
        build.adapted(odd, Setup(device=device))
    assert str(error.value).startswith(message)
    assert build.adapted(odd, Setup(device="modelled")) == odd


def test_prompts_longer_than_the_model(tmp_path: Path) -> None:
    """vLLM refuses them one by one, as it does simulated. Others know no such limit, so the run is refused."""
    short = "model.max_position=20"
    load = Workload([spec(0, 30, 4), spec(1, 19, 4)], 2)
    served, _ = build.engine(asked("vllm", short), "sync", load, INLINE)
    served.run()
    served.close()
    assert [row.status for row in requests_of(served.record)] == ["refused", "length"]
    assert [len(one.outputs) for one in served.sequences.values()] == [0, 1]  # the second one fills its 20 positions
    for scheduler in ("transformers_fifo", "static", "vllm"):
        more = ("scheduler.max_model_len=40",) if scheduler == "vllm" else ()
        with pytest.raises(ScenarioError, match=r"^model.max_position: got 20, must be > 30, the longest prompt's"):
            build.engine(asked(scheduler, short, *more), "sync", load, INLINE)


# -- memory -----------------------------------------------------------------------------------------------------------


def plan(*overrides: str, setup: Setup = INLINE, requests: int = 2) -> build.ExecutorPlan:
    specs = [spec(index, 10, 5) for index in range(requests)]
    return build.executor_plan(build.adapted(asked("vllm", *overrides), setup), "async", specs, setup)


@pytest.mark.parametrize(
    ("overrides", "requests", "field"),
    [
        (("kv_cache.num_blocks=1e6",), 2, "kv_cache.num_blocks: "),
        (("model.intermediate=1e9", "kv_cache.num_blocks=2"), 2, "model: "),
        (("model.vocab=1e15",), 2, "model: "),
        (("scheduler.max_num_seqs=1e5", "scheduler.max_num_batched_tokens=1e7"), 100_000, "workload: "),
    ],
)
def test_a_host_without_memory_says_what_is_too_large(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], requests: int, field: str
) -> None:
    """... before anything is allocated, and however absurd the number: a host would promise it all and then kill the
    process.
    """
    monkeypatch.setattr(build, "host_memory", lambda: 5_000_000)
    wanted = plan(*overrides, requests=requests)
    for attempt in (wanted.check, wanted):
        with pytest.raises(DeviceMemoryError) as error:
            attempt()
        assert str(error.value).startswith(field)
        assert str(error.value).endswith("the host has 0.01 GB free")


def test_what_fits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is what is needed: with as much memory the run is, with less it is not."""
    wanted = plan()
    size = build.KvCache.bytes_for(wanted.architecture, wanted.num_blocks, wanted.block_size, torch.float32)
    size += 8 * sum(tensor.numel() for tensor in wanted.tensors().values())
    size += 4 * (wanted.capacity.slots * wanted.capacity.width + 2 * wanted.capacity.staging)
    monkeypatch.setattr(build, "host_memory", lambda: size)
    wanted()
    monkeypatch.setattr(build, "host_memory", lambda: size - 1)
    with pytest.raises(DeviceMemoryError):
        wanted()
    monkeypatch.setattr(build, "host_memory", lambda: None)  # a system that does not say
    wanted()


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="this system does not say how much memory is free")  # noqa: PTH110
def test_the_host_says_how_much_is_free() -> None:
    free = build.host_memory()
    assert free is not None
    assert 1e7 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_worker_is_not_started_for_a_users_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken weights and too large caches are found in this process, where they are usage errors."""
    monkeypatch.setattr(build, "Process", mock.Mock(side_effect=AssertionError("a worker was started")))
    process, load = Setup(device="process"), Workload([spec(0, 10, 5)], 1)
    path = folder(tmp_path / "weights")
    given_weights = replace(process, weights=path)
    with pytest.raises(weights.WeightsError, match="holds neither"):
        build.engine(build.adapted(asked("vllm"), given_weights), "sync", load, given_weights)
    monkeypatch.setattr(build, "host_memory", lambda: 0)
    with pytest.raises(DeviceMemoryError):
        build.engine(asked("vllm"), "sync", load, process)


# -- a GPU's memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """A GPU with 80 GB, of which 70 are free, as far as sizes are concerned."""
    memory = mock.Mock(return_value=(70 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    return memory


LARGE = Setup(device="cuda")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_cache_fits_the_gpu_there_is(gpu: mock.Mock, scheduler: str) -> None:
    """The blocks that fit beside the weights and the steps of its requests, a twentieth of all memory left free; what
    else a scheduler makes of its memory stays as the data sheet has it. What results loads again, and stays as it is.
    """
    base = scenario.load("8k_b32", [*named(scheduler), "hardware=h200-sxm"])
    before = base.options("async")
    ready = build.adapted(base, LARGE)
    after = ready.options("async")
    block = before.block_size * base.model.kv_bytes_per_token
    plan = build.executor_plan(base, "async", generators.build(base).specs(), LARGE)
    beside = base.model.weight_bytes + build.step_bytes(base.model, plan, 2)
    assert after.num_blocks == (66 * GB - beside) // block < before.num_blocks
    assert replace(after, num_blocks=before.num_blocks, **_limits(before)) == before
    assert Scenario.model_validate(ready.model_dump(mode="json")) == ready == build.adapted(ready, LARGE)
    gpu.return_value = (300 * GB, 300 * GB)
    assert build.adapted(base, LARGE) == build._with_graphs(base, LARGE), "only which steps are graphs"


def _limits(options: Any) -> dict[str, int]:
    """vLLM's longest sequence follows from the cache, and so does what tgi may hold in all."""
    return {n: getattr(options, n) for n in ("max_model_len", "max_batch_total_tokens") if hasattr(options, n)}


def test_given_blocks_are_given(gpu: mock.Mock) -> None:
    """Somebody who says how many wants that many, or an error later on."""
    base = scenario.load("8k_b32", ["kv_cache.num_blocks=1000"])
    assert build.adapted(base, LARGE) == build._with_graphs(base, LARGE), "only which steps are graphs"
    assert not gpu.called


def test_weights_without_room_for_a_cache(gpu: mock.Mock) -> None:
    gpu.return_value = (20 * GB, 80 * GB)
    taken = r"16\.1 GB of weights and 1\.1 GB for steps of 8,192 query tokens in 32 rows leave no room for a cache"
    with pytest.raises(DeviceMemoryError, match=rf"{taken} in 20\.0 GB: lower limits of the scheduler, or model\.max"):
        build.adapted(scenario.load("8k_b32"), LARGE)


@pytest.mark.parametrize("scheduler", ["vllm", "sglang", "transformers_fifo", "transformers_fifo 5.23"])
def test_a_session_leaves_room_for_whoever_may_come(gpu: mock.Mock, scheduler: str) -> None:
    """Every seat taken, every row drawn, tables as long as sequences may be: less is left for the cache than beside the
    scenario's own 32 requests, and the session that it leads to needs no more than was taken off.
    """
    base = scenario.load("8k_b32", [*named(scheduler), "hardware=h100-sxm", "loop.mode=async"])
    ready = build.adapted(base, LARGE, open_ended=True)
    blocks, block = ready.options("async").num_blocks, ready.block_size * base.model.kv_bytes_per_token
    assert blocks < build.adapted(base, LARGE).options("async").num_blocks
    plan = build.executor_plan(ready, "async", [], LARGE, build.any_load(ready, "async"))
    beside = build.step_bytes(base.model, plan, 2)
    assert beside > plan.capacity.rows * base.model.vocab * 6 + min(plan.capacity.rows, 128) * base.model.vocab * 64
    assert base.model.weight_bytes + beside + blocks * block <= 66 * GB
    assert 4 * plan.capacity.staging < 10**8, "a buffer for the updates of all tables"


def test_a_session_whose_steps_fit_no_gpu(gpu: mock.Mock) -> None:
    """A static batch of prompts as long as the model takes is one step."""
    base = scenario.load("8k_b32", [*named("static"), "loop.mode=async"])
    with pytest.raises(DeviceMemoryError, match=r"for steps of 4,194,272 query tokens in 32 rows leave no room"):
        build.adapted(base, LARGE, open_ended=True)


class Fused(TorchOps):
    """Operations that hold no more memory than the kernels do: each allocates its output."""

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        return torch.zeros_like(x)

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return torch.zeros_like(x), residual

    def rotate_and_cache(self, qkv: Any, rotation: Any, norms: Any, eps: Any, keys: Any, *_: Any) -> Any:
        return qkv.new_zeros(len(qkv), qkv.shape[1] // keys.shape[3] - 2 * keys.shape[2], keys.shape[3])

    def attention(self, queries: Any, *_: Any) -> Any:
        return torch.zeros_like(queries)

    def silu_mul(self, gate_up: Any) -> Any:
        return gate_up.new_zeros(len(gate_up), gate_up.shape[1] // 2)


@pytest.mark.parametrize(
    ("vocab", "rows", "chunk", "random"),
    [(20_000, 5, 1, True), (20_000, 200, 1, True), (20_000, 5, 1, False), (64, 8, 800, False), (64, 8, 800, True)],
)
def test_a_step_takes_the_memory_that_it_is_said_to(
    monkeypatch: pytest.MonkeyPatch, vocab: int, rows: int, chunk: int, random: bool
) -> None:
    """The largest step's tensors, by what torch allocates: indices alone are not counted, and little is too much."""
    monkeypatch.setattr(build, "ops", lambda _: Fused())
    monkeypatch.setattr(build, "CAPTURED", (0,))
    base = asked("vllm", f"model.vocab={vocab}", "model.dtype=bfloat16", "model.intermediate=512")
    load = Load(requests=rows, prompt=chunk, answer=1, longest=chunk + 1)
    plan = replace(build.executor_plan(base, "sync", [], INLINE, load), random=random)
    sizes = Capacity(rows, plan.capacity.width, rows, rows * chunk)
    plan = replace(plan, num_blocks=8, capacity=sizes)
    executor = plan()
    chunks = [chunk] * rows if chunk > 1 else []
    header, values = scratch_step(chunks, rows, decodes=0 if chunks else rows, random=random)
    step = arrays(torch.from_numpy(values), header)
    counted = build.step_bytes(base.model, plan, 1) - build.step_bytes(base.model, plan, 0)
    taken = peak_bytes(lambda: executor.run(step, header))
    none = replace(plan, capacity=sizes._replace(rows=0, tokens=0))
    largest = build.step_bytes(base.model, plan, 0) - build.step_bytes(base.model, none, 0)
    assert counted == 4 * (sizes.staging + sizes.results)
    assert 0.8 <= taken / largest <= 1.02, (taken, largest)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--device cuda: torch finds no CUDA device here"):
        build.adapted(scenario.load("8k_b32"), LARGE)
    assert build.default_device() == "process"


def test_the_random_model_is_the_scenarios() -> None:
    """Without weights the architecture is the scenario's shape, drawn from the scenario's seed."""
    one, other = plan("seed=1"), plan("seed=2")
    assert {field: getattr(one.architecture, field) for field in SHAPE} == SHAPE
    first, second, again = (it.tensors() for it in (one, other, plan("seed=1")))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])
