"""vLLM's server starts with other sizes on other GPUs (`EngineArgs.get_batch_defaults`, `_set_cudagraph_sizes`)."""

from __future__ import annotations

from typing import Any

import pytest

from cbsim.policy.kind import SettingsError, for_probe, pinned, sources
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VllmSettings, resolve

GIB = 1 << 30


def place(gpu: str, gib: float, position: int = 131072, depth: int = 2) -> Place:
    hardware = shapes.hardware("h100-sxm").model_copy(update={"name": gpu, "memory_bytes": int(gib * GIB)})
    model = shapes.model("tiny").model_copy(update={"max_position": position})
    return Place(model, hardware, depth=depth, block_size=16, memory_fraction=0.9, num_blocks=20_000)


def sizes(where: Place, **given: Any) -> tuple[int, int, int | None]:
    options = resolve(VllmSettings(**given), where)
    return options.max_num_seqs, options.max_num_batched_tokens, options.max_cudagraph_capture_size


@pytest.mark.parametrize(
    ("gpu", "gib", "new", "old"),
    [
        ("NVIDIA L4", 22.0, (256, 2048, 512), (256, 2048, 512)),
        ("NVIDIA L40S 48GB", 44.4, (256, 2048, 512), (256, 2048, 512)),
        ("NVIDIA A100 SXM 80GB", 79.1, (256, 2048, 512), (256, 2048, 512)),
        ("just below", 69.99, (256, 2048, 512), (256, 2048, 512)),
        ("just there", 70.0, (1024, 8192, 512), (1024, 8192, 512)),
        ("NVIDIA H100 SXM 80GB", 79.1, (1024, 8192, 512), (1024, 8192, 512)),
        ("NVIDIA H200 SXM 141GB", 139.8, (1024, 8192, 512), (1024, 8192, 512)),
        ("AMD MI300X", 191.5, (1024, 16384, 512), (1024, 8192, 512)),
        ("NVIDIA B200", 178.0, (1024, 16384, 1024), (1024, 8192, 512)),
        ("NVIDIA GB300", 276.0, (1024, 16384, 1024), (1024, 8192, 512)),
    ],
)
def test_defaults_follow_gpu_and_version(gpu: str, gib: float, new: tuple[int, ...], old: tuple[int, ...]) -> None:
    assert sizes(place(gpu, gib)) == new
    assert sizes(place(gpu, gib), version="0.19") == old


def test_a_default_gives_way_to_what_is_given() -> None:
    """Both ways round, as vLLM does; without chunked prefill a step must hold the longest prompt."""
    h100 = place("NVIDIA H100", 79.1)
    assert sizes(h100, max_num_batched_tokens=64) == (64, 64, 64)
    assert sizes(h100, max_num_seqs=7) == (7, 8192, 14)
    assert sizes(h100, max_num_seqs=7, max_model_len=100)[1] == 700
    assert sizes(h100, enable_chunked_prefill=False)[1] == 131072
    assert sizes(h100, max_cudagraph_capture_size=8)[2] == 8
    with pytest.raises(SettingsError, match=r"got 2048, must be >= max_num_seqs \(4096\)"):
        sizes(place("NVIDIA L4", 22.0), max_num_seqs=4096)


def test_pinned_sizes_are_those_of_the_scenario_s_gpu() -> None:
    """On a smaller GPU than the scenario's the same batches form: only the cache may shrink."""
    big, small = place("NVIDIA H100", 79.1), place("NVIDIA L4", 22.0)
    asked = VllmSettings()
    kept = pinned(asked, resolve(asked, big))
    assert resolve(kept, small).max_num_batched_tokens == 8192
    assert (kept.max_num_seqs, kept.max_model_len) == (1024, None)


def test_sources_name_the_rule() -> None:
    rules = sources(VllmSettings(version="0.19"), place("NVIDIA A100", 79.1))
    assert rules["max_num_seqs"] == "vLLM 0.19 on a GPU with less than 70 GiB, or an A100"


def test_memory_of_the_host_becomes_blocks() -> None:
    """Whole chunks for one connector, blocks for the other, which has 8 GiB if nobody says; none without either."""
    where = place("NVIDIA H100", 79.1)
    unit = where.block_bytes
    assert unit == 16 * where.model.kv_bytes_per_token
    assert resolve(VllmSettings(), where).host_blocks == 0
    native = VllmSettings(kv_connector="offloading", cpu_bytes_to_use=11 * unit + 1, blocks_per_chunk=3)
    assert resolve(native, where).host_blocks == 9
    assert resolve(VllmSettings(kv_connector="simple_cpu"), where).host_blocks == 8 * GIB // unit
    assert VllmScheduler(resolve(native, where)).pool.host_blocks == 9


def test_plans_ahead_follow_the_loop() -> None:
    for depth in (1, 2):
        assert resolve(VllmSettings(), place("any", 80.0, depth=depth)).async_scheduling == (depth == 2)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("kv_connector", {"kv_connector": "simple_cpu", "version": "0.19"}),
        ("kv_connector", {"kv_connector": "simple_cpu", "enable_prefix_caching": False}),
        ("kv_connector", {"kv_connector": "simple_cpu", "reserve_output": True}),
        ("cpu_bytes_to_use", {"kv_connector": "offloading"}),
        ("cpu_bytes_to_use", {"cpu_bytes_to_use": GIB}),
        ("lazy_offload", {"kv_connector": "offloading", "cpu_bytes_to_use": GIB, "lazy_offload": True}),
        ("eviction_policy", {"kv_connector": "simple_cpu", "eviction_policy": "arc"}),
        ("offload_prompt_only", {"kv_connector": "simple_cpu", "offload_prompt_only": False}),
        ("blocks_per_chunk", {"blocks_per_chunk": 2}),
    ],
)
def test_options_of_a_connector_that_do_not_fit_are_refused(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as raised:
        VllmSettings(**given)
    assert raised.value.field == field


@pytest.mark.parametrize(("kind", "least"), [("simple_cpu", 2), ("offloading", 4)])
def test_a_tier_has_room_for_a_block(kind: Any, least: int) -> None:
    """The bound is what is told: a block besides the unused one, or a chunk."""
    where = place("NVIDIA H100", 79.1)
    chunk = {"blocks_per_chunk": 4} if kind == "offloading" else {}
    bytes_ = least * where.block_bytes
    assert resolve(VllmSettings(kv_connector=kind, cpu_bytes_to_use=bytes_, **chunk), where).host_blocks == least
    with pytest.raises(SettingsError, match=f"must be >= {bytes_:,}"):
        resolve(VllmSettings(kv_connector=kind, cpu_bytes_to_use=bytes_ - 1, **chunk), where)


def test_a_probe_has_no_connector() -> None:
    given = VllmSettings(kv_connector="offloading", cpu_bytes_to_use=GIB, eviction_policy="arc", blocks_per_chunk=2)
    assert for_probe(given, 4, 64).kv_connector == "none"
