"""Published points: read as they are, built with the flags of their servers, or a reason given why not."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.reference import data

from cbsim.errors import ScenarioError
from cbsim.measured.points import build, flags, published, score
from cbsim.measured.points.build import CannotBuildError
from cbsim.measured.points.published import Means, Point
from cbsim.measured.points.score import Predicted
from cbsim.scenario import catalog, terms
from cbsim.sweeps.work import Here

HEADER = (
    "id,curve,first_of_duplicates,source,measured,system,backend,backend_version,model_path,precision,mode,isl,osl,"
    "concurrency,batch_size,tp_size,attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"
)
PEERS = b"id,aic_ttft_ms,aic_tpot_ms\n"
LLAMA = "a,c1,True,inferencex-x,2025-10-29,h200_sxm,vllm,,meta-llama/Llama-3.1-70B,fp8,agg,1024,1024,8,,2,1,2,1,150,14"
NAMES = {"id": "a", "curve": "c1", "source": "inferencex-x", "measured": "2025-10-29", "version": "", "mode": "agg"}
SERVER = {"system": "h200_sxm", "backend": "vllm", "model": "meta-llama/Llama-3.1-70B", "precision": "fp8"}
SIZES = {"tensor": 2, "attention_ranks": 1, "experts_tensor": 2, "experts_ranks": 1, "stages": 0}
LOAD = {"prompt": 1024, "output": 1024, "concurrency": 8, "ttft_ms": 150.0, "tpot_ms": 14.0}
POINT = Point.model_validate({**NAMES, **SERVER, **SIZES, **LOAD})


def changed(point: Point = POINT, **fields: object) -> Point:
    return point.model_copy(update=fields)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder with made-up tables of an H200 and an H100, and the folder for points."""
    from support import engine_folder

    monkeypatch.setenv("CBSIM_DATA", str(tmp_path))
    for system, engine in (("h200_sxm", "vllm_0.18.0"), ("h100_sxm", "vllm_0.19.0")):
        engine_folder.make(tmp_path / build.TABLES / system, engine)
    build.tables_of.cache_clear()
    yield tmp_path
    build.tables_of.cache_clear()


def folder(place: Path, *rows: str, name: str = "measured.csv") -> Path:
    text = "\n".join([HEADER, *rows]) + "\n"
    place.mkdir(exist_ok=True)
    (place / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return place


@pytest.mark.parametrize("name", ["measured.csv", "measured.csv.gz"])
def test_a_point_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    assert published.read(folder(tmp_path, LLAMA, name=name)) == [POINT]


def test_duplicates_and_other_columns_are_left_out(tmp_path: Path) -> None:
    again = LLAMA.replace("a,", "b,", 1).replace("True", "False")
    place = folder(tmp_path, LLAMA, again, LLAMA.replace("a,", "c,", 1).replace(",8,,", ",16,,"))
    assert [point.id for point in published.read(place)] == ["a", "c"]
    assert [point.id for point in published.read(place, {"concurrency": "16"})] == ["c"]
    with pytest.raises(ScenarioError, match=r"--where: .* has no point with system=b200_sxm"):
        published.read(place, {"system": "b200_sxm"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("measured.csv", b"\xe9\xff,\n", r"measured\.csv: is not UTF-8 text"),
        ("measured.csv.gz", gzip.compress(b"id,curve\n" * 99, mtime=0)[:12], r"measured\.csv\.gz: cannot be read"),
        ("measured.csv", HEADER.encode() + b"\na,b\n", r"measured\.csv:2: got 2 cells, expected 21"),
        ("predictions.csv", b"\xe9\xff,\n", r"predictions\.csv: is not UTF-8 text"),
        ("predictions.csv", b"id,aic_ttft_ms\n", r"predictions\.csv:1: no column aic_tpot_ms"),
        ("predictions.csv", PEERS + b"a,1,soon\n", r"predictions\.csv:2: aic_tpot_ms: got 'soon'"),
        ("predictions.csv", PEERS + b"b,,\na,nan,1\n", r"predictions\.csv:3: aic_ttft_ms: got 'nan'"),
        ("predictions.csv", PEERS + b"a,0,0\n", r"predictions\.csv:2: aic_ttft_ms: got '0', expected a number > 0"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """By its name and line; an error relative to no number, or to 0, would be none."""
    if name == "predictions.csv":
        folder(tmp_path, LLAMA)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ScenarioError, match=message):
        published.read(tmp_path)


def test_the_other_tools_predictions_stand_beside(tmp_path: Path) -> None:
    place = folder(tmp_path, LLAMA)
    (place / "predictions.csv").write_text("id,aic_ttft_ms,aic_tpot_ms\na,300,12\nb,,\n")
    assert published.read(place)[0].peer == (300.0, 12.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (LLAMA.replace(",150,", ",soon,"), r"measured\.csv:2: silicon_ttft_ms: got 'soon', expected a number"),
        (LLAMA.replace(",150,", ",-1,"), r"silicon_ttft_ms: got '-1', must be > 0"),
        (LLAMA.replace(",14", ",0"), r"measured\.csv:2: silicon_tpot_ms: got '0', must be > 0"),
        (LLAMA.replace(",agg,1024,", ",agg,1024.5,"), r"isl: got 1024\.5, expected a whole number"),
        (LLAMA.replace(",agg,1024,1024", ",agg,1024,1"), r"osl: got 1, must be >= 2"),
        (LLAMA.replace(",8,,2,", ",8,,0,"), r"tp_size: got 0, must be >= 1"),
        (LLAMA.replace(",agg,", ",both,"), r"mode: got 'both', expected one of agg, disagg"),
        (LLAMA.replace("True", "False"), r"measured\.csv: holds no points"),
        (f"{LLAMA}\n{LLAMA}", r"id: got 'a' 2 times"),
    ],
)
def test_a_bad_row_is_told_with_file_and_line(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        published.read(folder(tmp_path, row))


def test_a_folder_without_measurements_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"holds neither measured\.csv nor measured\.csv\.gz"):
        published.read(tmp_path)
    with pytest.raises(ScenarioError, match=r"--where sistem: is no column .*did you mean system"):
        published.read(folder(tmp_path, LLAMA), {"sistem": "x"})


# -- scenarios --------------------------------------------------------------------------------------------------------


def test_a_point_becomes_the_closed_loop_that_was_run(tables: Path) -> None:
    """InferenceX: as many users as the concurrency, ten requests each, lengths from 0.8 of the nominal one to all."""
    made = build.build(POINT, {})
    workload = made.workload
    assert (workload.requests, workload.arrivals.users) == (80, 8)
    assert (workload.prompt_tokens.uniform.low, workload.prompt_tokens.uniform.high) == (819, 1024)
    assert (made.scheduler.max_num_seqs, made.scheduler.max_num_batched_tokens) == (8, 8192)
    assert (made.model.weights_dtype, made.model.kv_dtype, made.gpus) == ("fp8", "fp8", 2)
    assert made.loop.mode == "async"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "disagg"}, "prefill and decode are apart"),
        ({"system": "gb300"}, "no kernel tables of gb300"),
        ({"backend": "sglang"}, "no kernel tables of sglang on h200_sxm"),
        ({"model": "moonshotai/Kimi-K3"}, "no model file of Kimi-K3"),
        ({"model": "somebody/New-1B"}, "no model file of New-1B"),
        ({"attention_ranks": 4}, "has no experts to share"),
        ({"tensor": 64}, "more than 8 GPUs share a layer"),
        ({"model": "meta-llama/Llama-3.1-405B", "tensor": 1, "experts_tensor": 1}, "too little for a cache"),
    ],
)
def test_what_cannot_be_built_has_a_reason(tables: Path, change: dict[str, object], reason: str) -> None:
    with pytest.raises(CannotBuildError, match=reason):
        build.build(changed(**change), {})


TWO_AND_ONE = {
    "mode": "disagg",
    "prefill": published.Part(servers=2, tensor=1, batch=1),
    "decode": published.Part(servers=1, tensor=2, batch=8),
}


def test_a_point_apart_becomes_a_fleet_of_its_columns(tables: Path) -> None:
    """Servers and GPUs of each part as published, under the closed loop that was run; vLLM's rules for all engines."""
    point = changed(**TWO_AND_ONE)
    sides = [build.build(point.of(side), {}) for side in ("prefill", "decode")]
    made = build.build_apart(point, *sides)
    assert [(pool.name, pool.count) for pool in made.fleet.pools] == [("prefill", 2), ("decode", 1)]
    assert [pool.server["cost"]["tensor_parallel"] for pool in made.fleet.pools] == [1, 2]
    assert (made.workload.requests, made.workload.arrivals.users) == (80, 8)
    assert str(point.stratum) == "h200_sxm vllm Llama-3.1-70B 2P TP1 + 1D TP2 1024/1024"
    assert build.check(point) is None
    with pytest.raises(CannotBuildError, match="no single server"):
        build.build(point, {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prefill": published.Part(tensor=1)}, build.APART),
        ({"concurrency": 0}, build.UNKNOWN_LOAD),
        ({"decode": published.Part(servers=1, tensor=1, attention_ranks=4, experts_ranks=4)}, build.RANKS),
        ({"decode": published.Part(servers=1, tensor=16)}, build.WIDE),
    ],
)
def test_points_apart_that_cannot_be_built(tables: Path, change: dict[str, object], reason: str) -> None:
    with pytest.raises(CannotBuildError) as error:
        build.check(changed(**TWO_AND_ONE | change))
    assert error.value.reasons == (reason,)


def test_all_reasons_are_told(tables: Path) -> None:
    """Not the first alone: what would have to be done to predict a point is all of them."""
    point = changed(mode="disagg", system="gb300", tensor=32, attention_ranks=8, stages=2, model="moonshotai/Kimi-K3")
    _, refused = score.sort([point])
    assert refused[0].reasons == (
        build.APART,
        build.WIDE,
        "no model file of Kimi-K3: scenarios/models describes none of that name",
        "no kernel tables of gb300",
    )


def test_a_point_in_a_pipeline_has_its_stages(tables: Path) -> None:
    """Two stages of two GPUs. Rules for a pipeline are known of vLLM 0.33, which later versions have, not of 0.19."""
    made = build.build(changed(stages=2, version="0.30.0"), {})
    assert (made.gpus, made.stages, made.all_gpus) == (2, 2, 4)
    with pytest.raises(CannotBuildError, match=r"scheduler\.version: got 0\.19, must be 0\.33 with cost\.pipeline"):
        build.build(changed(stages=2, version="0.14.0"), {})


def test_sizes_of_servers_apart_are_those_of_the_larger(tmp_path: Path) -> None:
    header = f"{HEADER},prefill_tp_size,decode_tp_size,decode_attention_dp_size"
    row = LLAMA.replace(",agg,", ",disagg,").replace(",8,,2,1,2,1,", ",8,,,,,,") + ",4,8,2"
    (tmp_path / "measured.csv").write_text(f"{header}\n{row}\n")
    (point,) = published.read(tmp_path)
    assert (point.tensor, point.attention_ranks) == (8, 2)


@pytest.mark.parametrize(
    ("source", "sizes", "gpus", "groups"),
    [
        ("inferencex-2026-03-25", (8, 1, 1, 8), 8, 8),
        ("inferencex-2026-04-06", (64, 1, 8, 8), 8, 8),
        ("inferencex-db-dump-2026-04-27", (4, 1, 2, 2), 2, 2),
        ("inferencex-2026-04-06", (4, 4, 1, 16), 4, 4),
        ("aic-gap", (4, 1, 2, 2), 4, 2),
    ],
)
def test_ways_to_write_expert_parallelism(
    source: str, sizes: tuple[int, int, int, int], gpus: int, groups: int
) -> None:
    """InferenceX's later dumps write groups of experts times GPUs as tp_size, or ranks of attention that do not exist;
    measurements that stand in both say so.
    """
    names = ("tensor", "attention_ranks", "experts_tensor", "experts_ranks")
    point = changed(model="deepseek-ai/DeepSeek-R1", source=source, **dict(zip(names, sizes, strict=True)))
    assert (point.gpus, point.ranks) == (gpus, 1)
    assert build._expert_groups(point, build.model_of(point)) == groups


@pytest.mark.parametrize(
    ("source", "backend", "sizes", "ranks", "groups"),
    [
        ("inferencex-2026-03-25", "trtllm", (1, 8, 1, 8), 8, 8),
        ("inferencex-2026-04-06", "trtllm", (1, 64, 8, 8), 8, 8),
        ("inferencex-2026-04-06", "trtllm", (1, 4, 2, 2), 2, 2),
        ("inferencex-2026-04-06", "trtllm", (1, 4, 4, 1), 4, 1),
        ("inferencex-db-dump-2026-04-27", "vllm", (4, 4, 1, 16), 4, 4),
        ("Qwen_Qwen3-235B-A22B-FP8.csv", "vllm", (2, 0, 4, 1), 2, 1),
    ],
)
def test_ways_to_write_ranks(
    source: str, backend: str, sizes: tuple[int, int, int, int], ranks: int, groups: int
) -> None:
    """Later dumps write ranks times groups of experts; vLLM's as tp_size, too; others only GPUs that share experts."""
    names = ("tensor", "attention_ranks", "experts_tensor", "experts_ranks")
    model, sized = "MiniMaxAI/MiniMax-M2.5", dict(zip(names, sizes, strict=True))
    point = changed(model=model, precision="fp4", source=source, backend=backend, **sized)
    tensor = 2 if source.startswith("Qwen") else 1
    assert (point.gpus, point.ranks, point.all_gpus) == (tensor, ranks, tensor * ranks)
    assert build._expert_groups(point, build.model_of(point)) == groups
    assert flags.family(build.model_of(point), point.ranks) == "ranks"


def test_types_of_weights_follow_the_point() -> None:
    """gpt-oss keeps its own; Kimi-K2.5 has experts in NVFP4, DeepSeek-R1 all but attention."""
    r1, kimi, oss = "deepseek-ai/DeepSeek-R1", "moonshotai/Kimi-K2.5", "openai/gpt-oss-120b"
    for model, precision, weights, attention, experts in (
        (r1, "fp8", "fp8_block", None, None),
        (r1, "fp4", "nvfp4", "bfloat16", None),
        (f"{r1}-NVFP4", "", "nvfp4", "bfloat16", None),
        (kimi, "int4", None, None, "int4_g32"),
        (kimi, "fp4", None, None, "nvfp4"),
        (oss, "fp4", None, None, "mxfp4"),
    ):
        made = build.model_of(changed(model=model, precision=precision))
        assert (made.weights_dtype, made.attention_dtype, made.experts_dtype) == (weights, attention, experts)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"system": "b200_sxm"}, {"max_num_seqs": 512, "max_num_batched_tokens": 8192}),
        (
            {"model": "openai/gpt-oss-120b", "precision": "fp4"},
            {"max_num_seqs": 8, "max_cudagraph_capture_size": 2048},
        ),
        (
            {"backend": "trtllm", "model": "openai/gpt-oss-120b", "precision": "fp4"},
            {"max_batch_size": 8, "max_num_tokens": 20000},
        ),
        (
            {"backend": "trtllm", "model": "deepseek-ai/DeepSeek-R1", "tensor": 8, "prompt": 8192},
            {"max_num_tokens": 8320, "max_batch_size": 8},
        ),
        (
            {"backend": "sglang", "system": "b200_sxm", "model": "deepseek-ai/DeepSeek-R1", "tensor": 8},
            {"chunked_prefill_size": 32768, "max_running_requests": 128, "scheduler_recv_interval": 10},
        ),
        (
            {"backend": "trtllm", "source": "gap"},
            {"max_num_tokens": 8192, "max_seq_len": 2068},
        ),
    ],
)
def test_flags_are_those_of_the_scripts(change: dict[str, object], expected: dict[str, object]) -> None:
    point = changed(**change)
    made = flags.fields(point, build.model_of(point), build._hardware(point))
    assert made["scheduler"].items() >= expected.items()


def test_b200s_llama_captures_decodes_only_and_fuses_all_reduces() -> None:
    point = changed(system="b200_sxm", tensor=8)
    made = flags.fields(point, build.model_of(point), build._hardware(point))
    assert made["loop"] == {"cuda_graphs": {"vllm_cudagraph_mode": "FULL_DECODE_ONLY"}}
    assert made["cost"] == {"fused_all_reduce": True, "fused_all_reduce_bytes": 8 << 20}


def test_kimi_in_nvfp4_has_its_checkpoints_cache() -> None:
    """NVIDIA's checkpoint states a cache in FP8, which vLLM follows; Moonshot's own in int4 states none."""
    point = changed(system="b200_sxm", model="moonshotai/Kimi-K2.5", tensor=4, precision="fp4")
    for precision, kv in (("fp4", "fp8"), ("int4", None)):
        of = changed(point, precision=precision)
        assert flags.fields(of, build.model_of(of), build._hardware(of))["model"]["kv_dtype"] == kv


def test_nvidia_leaves_the_attention_of_mixtures_wide() -> None:
    """MiniMax-M2.5-NVFP4 excludes `self_attn` as DeepSeek's checkpoints do; of a dense model everything is narrow."""
    for model, wide in (("MiniMaxAI/MiniMax-M2.5", "bfloat16"), ("meta-llama/Llama-3.1-70B", None)):
        shape = build.model_of(changed(system="b200_sxm", model=model, precision="fp4"))
        assert (shape.weights_dtype, shape.attention_dtype) == ("nvfp4", wide)


def test_blackwells_experts_are_flashinfers() -> None:
    """vLLM chooses them by itself on Blackwell, and nothing of the kind on Hopper."""
    for system, engine in (("b200_sxm", "vllm_0.24.0"), ("h200_sxm", None)):
        of = changed(system=system, model="MiniMaxAI/MiniMax-M2.5", precision="fp8", measured="2026-03-20")
        assert flags.fields(of, build.model_of(of), build._hardware(of))["cost"].get("experts_engine") == engine


QWEN = {"backend": "sglang", "system": "b200_sxm", "model": "Qwen/Qwen3.5-397B-A17B", "version": "0.5.9"}


@pytest.mark.parametrize(
    ("change", "seats", "state", "fused"),
    [
        ({"precision": "bf16", "tensor": 8, "measured": "2026-02-20"}, 128, "float32", True),
        ({"precision": "fp8", "tensor": 8, "measured": "2026-03-24"}, 128, "bfloat16", True),
        ({"precision": "fp8", "tensor": 4, "measured": "2026-03-24", "experts_ranks": 4}, 128, "bfloat16", None),
        ({"precision": "fp8", "tensor": 4, "system": "b300_sxm", "measured": "2026-04-17"}, 8, "bfloat16", None),
        ({"precision": "fp4", "tensor": 4, "measured": "2026-04-08"}, 128, "float32", None),
    ],
)
def test_flags_of_servers_with_states(change: dict[str, object], seats: int, state: str, fused: bool | None) -> None:
    """The type of the states is a flag of some scripts, within the model's description of its linear layers."""
    point = changed(**(QWEN | change))
    made = flags.fields(point, build.model_of(point), build._hardware(point))
    assert made["scheduler"]["max_running_requests"] == seats
    assert made["model"]["linear"]["state_dtype"] == state
    assert made["model"]["linear"]["value_heads"] == 64
    assert made["cost"].get("fused_all_reduce") == fused


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (QWEN | {"precision": "fp8"}, "sglang-linear"),
        (QWEN | {"model": "zai-org/GLM-5", "precision": "fp8"}, "sglang-sparse"),
        ({"system": "b200_sxm", "model": "MiniMaxAI/MiniMax-M2.5", "attention_ranks": 4}, "vllm-ranks"),
        ({"system": "b200_sxm", "model": "MiniMaxAI/MiniMax-M2.5"}, "vllm-experts-b200"),
        (QWEN | {"backend": "trtllm", "model": "deepseek-ai/DeepSeek-R1", "attention_ranks": 4}, "trtllm-latent"),
    ],
)
def test_the_nearest_terms_are_of_the_servers_kind(change: dict[str, object], name: str) -> None:
    """Of ranks only by the same engine's, else by those of their model."""
    assert score._nearest(changed(**change)).name == name


def test_drafts_of_qwens_servers_are_told_by_how_experts_are_spread() -> None:
    """Without drafts the script for 4 GPUs spreads experts over all, until April 2026; with them it does not."""
    point = changed(**QWEN, precision="fp8", tensor=4, measured="2026-03-20", experts_ranks=1)
    assert flags.drafts(point, "linear")
    assert flags.drafts(changed(point, source="gap", measured=""), "linear")
    for change in ({"experts_ranks": 4}, {"tensor": 8}, {"measured": "2026-04-17"}, {"precision": "fp4"}):
        assert not flags.drafts(changed(point, **change), "linear")


def test_servers_that_did_not_run_as_their_scripts_say_are_doubted() -> None:
    """SGLang without warm-up or on a B300, gpt-oss on H100 in 2025; the same a month later, or on a B200, is not."""
    r1 = changed(backend="sglang", system="b200_sxm", model="deepseek-ai/DeepSeek-R1", measured="2026-03-25")
    oss = changed(system="h100_sxm", model="openai/gpt-oss-120b", measured="2026-03-27")
    assert flags.doubts(r1, "latent") == flags.doubts(oss, "windows") == []
    odd = (changed(r1, measured="2025-11-10"), changed(r1, system="b300_sxm"))
    assert all(flags.doubts(point, "latent") for point in odd)
    assert flags.doubts(changed(oss, measured="2025-12-05"), "windows")


def test_a_server_with_drafts_is_no_server_without() -> None:
    """By the day on which InferenceX ran its scripts with MTP; the day before it did not."""
    point = changed(backend="trtllm", model="deepseek-ai/DeepSeek-R1", measured="2026-02-05", tensor=8)
    assert flags.drafts(point, "latent")
    assert not flags.drafts(changed(point, measured="2026-02-04"), "latent")
    assert not flags.drafts(changed(point, mode="disagg"), "latent")


def test_rows_without_known_flags_are_a_class_without_bars() -> None:
    """It counts no strata beyond a bound that nobody set."""
    point = changed(backend="trtllm", source="gap")
    doubts = flags.doubts(point, "dense")
    assert flags.UNPUBLISHED in doubts
    points = [predicted(99.0, concurrency=users, source="gap")._replace(doubts=doubts) for users in range(4, 10)]
    ((judged, group),) = score.classes(points)
    assert judged.name == "flags unknown, no bars"
    assert not judged.bars and score.misses(judged, group) == []


# -- caches -----------------------------------------------------------------------------------------------------------


def cache_of(users: int, blocks: int, ttft_ms: float, tpot_ms: float, given: int = 0) -> score.Buildable:
    """A server whose cache holds so many blocks of 16 tokens, derived unless `given`."""
    point = changed(concurrency=users, ttft_ms=ttft_ms, tpot_ms=tpot_ms, kv_blocks=given)
    made = build.build(changed(point, kv_blocks=blocks), {})
    return score.Buildable(point, made, terms.every()[0], {})


def test_a_given_cache_is_the_scenarios(tables: Path) -> None:
    assert build.build(changed(kv_blocks=1234), {}).kv_cache.num_blocks == 1234


def test_a_load_close_to_the_derived_cache_is_doubted(tables: Path) -> None:
    """8 users of 0.9 x 2,048 tokens fill 922 blocks of 16."""
    (doubt,) = score.doubts([cache_of(8, 1000, 150.0, 14.0)])
    assert "sequences of all users take 92% of the derived cache" in doubt
    assert score.doubts([cache_of(8, 1000, 150.0, 14.0, given=1000)]) == []
    assert score.doubts([cache_of(8, 2000, 150.0, 14.0)]) == []


def test_a_derived_cache_that_a_plateau_contradicts_is_told(tables: Path) -> None:
    """Twice the users bring no tokens, and wait: so the real cache was full; or they bring twice, so it was not."""
    flat = [cache_of(8, 9000, 150.0, 14.0), cache_of(16, 9000, 13000.0, 15.0)]
    assert any("requests wait, though sequences take 20% of the derived cache" in each for each in score.doubts(flat))
    grows = [cache_of(8, 1250, 150.0, 14.0), cache_of(16, 1250, 160.0, 14.5)]
    assert any("none waits, though sequences take 147% of the derived" in each for each in score.doubts(grows))


def test_experts_are_spread_where_a_block_cannot_be_split(tables: Path) -> None:
    """MiniMax-M2.5's experts are 1,536 wide: an eighth is 192, no multiple of a block of 128, so 8 GPUs spread them."""
    point = changed(model="MiniMaxAI/MiniMax-M2.5", version="0.18.0", tensor=8, experts_tensor=8)
    assert build.build(point, {}).cost.expert_parallel == 8
    assert build.build(changed(point, tensor=4, experts_tensor=4), {}).cost.expert_parallel == 1
    doubled = changed(point, system="h100_sxm", tensor=4, attention_ranks=4, experts_tensor=1, experts_ranks=16)
    assert build.build(doubled, {}).cost.expert_parallel == 4


# -- scores -----------------------------------------------------------------------------------------------------------


def predicted(tpot_ms: float, **change: object) -> Predicted:
    point = changed(**change)
    doubts = flags.doubts(point, "dense")
    return Predicted(point, Means(150.0, tpot_ms), {}, "t", True, (), "dense", doubts)


def test_errors_are_relative_to_what_was_measured() -> None:
    group = score.Group("g", [predicted(14.0 * factor) for factor in (0.9, 1.0, 1.1, 1.2)])
    found = group.errors("tpot")
    assert (found.points, found.median, found.mape) == (4, pytest.approx(0.05), pytest.approx(0.1))
    assert found.p90 == pytest.approx(0.17)
    assert group.errors("ttft").mape == 0.0


def test_throughput_is_littles_law() -> None:
    """8 users, each 921.6 tokens in 150 ms + 920.6 x 14 ms."""
    assert Means(150.0, 14.0).tokens_s(POINT) == pytest.approx(8 * 921.6 / (0.150 + 920.6 * 0.014))


def test_strata_differ_in_all_but_concurrency() -> None:
    changes: list[dict[str, object]] = [{}, {"concurrency": 16}, {"tensor": 4}, {"source": "gap"}]
    assert [group.name for group in score.strata([predicted(14.0, **change) for change in changes])] == [
        "h200_sxm vllm Llama-3.1-70B TP2 1024/1024",
        "h200_sxm vllm Llama-3.1-70B TP4 1024/1024",
        "h200_sxm vllm Llama-3.1-70B TP2 1024/1024, flags unknown",
    ]


def test_a_stratum_beyond_its_bar_is_named() -> None:
    points = [predicted(14.0 * 1.09, concurrency=users) for users in (4, 8, 16, 32, 64)]
    ((judged, group),) = score.classes(points)
    assert judged.name == "dense, vLLM, H100 and H200"
    assert score.misses(judged, group) == ["h200_sxm vllm Llama-3.1-70B TP2 1024/1024: +9.0%"]
    assert score.misses(judged, score.Group("few", points[:4])) == []


# -- published servers by the project's own terms ----------------------------------------------------------------------


MEASURED = f"{published.FOLDER}/measured.csv.gz"


def test_a_stratum_is_predicted_without_its_own_curve() -> None:
    """Llama-3.1-70B on two H100: five servers, about 2 s. Well within what was found of all: this is no calibration."""
    where = {"system": "h100_sxm", "backend": "vllm", "model_path": "meta-llama/Llama-3.1-70B", "tp_size": "2"}
    buildable, reasons = score.sort(published.read(data(MEASURED).parent, where))
    assert len(buildable) == 5 and not reasons
    assert {each.file.name for each in buildable} == {"vllm-dense"}
    assert all(each.point.curve in each.file.curves for each in buildable)
    means = score.predict([each.scenario for each in buildable], Here())
    predicted = [score.predicted(each, m) for each, m in zip(buildable, means, strict=True)]
    report = json.loads((catalog.ROOT / "reports" / "fidelity" / "points" / "report.json").read_text())["data"]
    published_ms = {each["id"]: each["predicted_ms"] for each in report["predicted"]}
    assert {each.point.id: pytest.approx(published_ms[each.point.id], rel=1e-3) for each in predicted} == {
        each.point.id: list(each.means) for each in predicted
    }, "what is published is what the code computes: .ci/reports published makes it again"
    group = score.Group("two H100", predicted)
    assert group.errors("tpot").mape < 0.08
    assert abs(group.errors("ttft").median) < 0.2


def test_what_can_be_built_and_why_the_rest_cannot() -> None:
    """Every point is built or has a reason; that servers apart are not counted is the most frequent."""
    points = published.read(data(MEASURED).parent)
    reasons = Counter[str]()
    for point in points:
        try:
            build.check(point)
        except build.CannotBuildError as error:
            reasons.update(error.reasons)
    apart = [point for point in points if point.mode == "disagg"]
    assert reasons[build.APART] == sum(not (point.prefill.servers and point.decode.servers) for point in apart)
    ours = (build.APART, build.RANKS, build.UNKNOWN_LOAD, build.WIDE, build.DRAFTS)
    named = (*ours, "no kernel tables of ", "no model file of ")
    assert all(reason.startswith(named) for reason in reasons)
    systems = {system for file in terms.every() for system in file.systems}
    assert systems <= {point.system for point in points}
