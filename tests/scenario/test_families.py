"""config.json of model types whose layers differ: what a field says, published models, and what is refused."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.errors import ScenarioError
from cbsim.scenario import catalog, shapes
from cbsim.scenario.documents import Document

BASE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100}
BASE |= {"intermediate_size": 128, "max_position_embeddings": 32_768, "num_hidden_layers": 6, "head_dim": 16}
MIXTURE = BASE | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DEEPSEEK = MIXTURE | {"model_type": "deepseek_v3", "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16}
DEEPSEEK |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4}
DEEPSEEK |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "moe_layer_freq": 1}
DSA = DEEPSEEK | {
    "model_type": "glm_moe_dsa",
    "q_lora_rank": 8,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 16,
}
LATENT = {"query_rank": 8, "kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}
INDEXER = {"heads": 4, "head_dim": 8, "top_k": 16, "key_bytes": None}
LLAMA4 = MIXTURE | {"model_type": "llama4_text", "intermediate_size_mlp": 256, "num_local_experts": 8}
GEMMA4 = MIXTURE | {"model_type": "gemma4_text", "num_global_key_value_heads": 2, "global_head_dim": 32}
GEMMA4 |= {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
GLM4 = MIXTURE | {"model_type": "glm4_moe", "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 2}
GPT_OSS = BASE | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
NEXT = MIXTURE | {"model_type": "qwen3_next", "num_experts": 8, "linear_num_key_heads": 4}
QWEN3 = MIXTURE | {"model_type": "qwen3_moe", "num_experts": 8}
WIDE = {"kv_heads": 2, "head_dim": 32, "keys_are_values": True}
OF_KDA = {"full_attn_layers": [4, 6], "kda_layers": [1, 2, 3, 5], "num_heads": 8, "head_dim": 16}
OF_KDA |= {"short_conv_kernel_size": 3}
KIMI_LINEAR = DEEPSEEK | {"model_type": "kimi_linear", "num_experts": 8, "num_experts_per_token": 2}
KIMI_LINEAR |= {"num_shared_experts": 1, "model_max_length": 2**20, "linear_attn_config": OF_KDA}
KIMI_LINEAR = {k: v for k, v in KIMI_LINEAR.items() if k not in ("n_routed_experts", "n_shared_experts")}
KDA = {"rule": "kda", "key_heads": 8, "value_heads": 8, "key_dim": 16, "value_dim": 16, "conv": 3, "state_dtype": None}
NEMOTRON = MIXTURE | {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-ME", "n_routed_experts": 8}
NEMOTRON |= {"mamba_num_heads": 16, "mamba_head_dim": 32, "moe_shared_expert_intermediate_size": 64}
NEMOTRON |= {"n_shared_experts": 1, "mlp_hidden_act": "relu2"}
MAMBA = {"rule": "mamba2", "key_heads": 8, "value_heads": 16, "key_dim": 128, "value_dim": 32, "conv": 4}
MAMBA |= {"state_dtype": "float32"}
HALF = ("linear", "full")
GATED = {"rule": "gated_delta", "key_heads": 4, "value_heads": 32, "key_dim": 128, "value_dim": 128, "conv": 4}
GATED |= {"state_dtype": None}
FIVE = ("sliding 512",) * 5 + ("full",)
CHUNKS = ("chunked 8192",) * 3 + ("full",)


def read(folder: Path, config: dict[str, Any], **fields: Any) -> shapes.ModelShape:
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | fields).items() if v is not ...}))
    return shapes.model(str(folder))


@pytest.mark.parametrize(
    ("config", "fields", "expected"),
    [
        (DEEPSEEK, {}, {"kv_heads": 1, "head_dim": 40, "first_dense": 1, "dense_intermediate": 128, "experts": 8}),
        (DEEPSEEK, {}, {"shared_intermediate": 64, "intermediate": 32, "max_position": 32_768, "qk_norm": False}),
        (DEEPSEEK, {"n_shared_experts": None}, {"shared_intermediate": 0}),
        (DEEPSEEK, {"n_shared_experts": ...}, {"shared_intermediate": 32}),
        (DEEPSEEK, {"first_k_dense_replace": ...}, {"first_dense": 3}),
        (DEEPSEEK, {"first_k_dense_replace": ..., "model_type": "deepseek_v2"}, {"first_dense": 0}),
        (DSA, {}, {"latent": LATENT | {"indexer": INDEXER, "token_bytes": None}, "head_dim": 40, "first_dense": 1}),
        (DSA, {"index_topk": ...}, {"latent": LATENT | {"indexer": INDEXER | {"top_k": 2048}, "token_bytes": None}}),
        (
            DSA,
            {"layer_types": ["deepseek_sparse_attention"] * 6, "indexer_types": ["full"] * 6},
            {"attention": ("full",)},
        ),
        (GLM4, {}, {"first_dense": 2, "kv_heads": 4, "qk_norm": False, "qkv_bias": False, "latent": None}),
        (GLM4, {"use_qk_norm": True, "attention_bias": True}, {"qk_norm": True, "qkv_bias": True}),
        (GPT_OSS, {}, {"sinks": True, "qkv_bias": True, "attention": ("sliding 128", "full"), "intermediate": 128}),
        (GPT_OSS, {"sliding_window": None, "attention_bias": False}, {"attention": ("full",), "qkv_bias": False}),
        (LLAMA4, {}, {"attention": CHUNKS, "shared_intermediate": 128, "dense_intermediate": 0, "feed_forward": ()}),
        (LLAMA4, {"attention_chunk_size": None}, {"attention": ("full",)}),
        (LLAMA4, {"no_rope_layers": [1, 0] * 4}, {"attention": ("chunked 8192", "full")}),
        (LLAMA4, {"interleave_moe_layer_step": 2}, {"feed_forward": ("dense", "experts"), "dense_intermediate": 256}),
        (LLAMA4, {"moe_layers": [4, 5]}, {"feed_forward": (), "first_dense": 4, "dense_intermediate": 256}),
        (LLAMA4, {"moe_layers": [1, 2, 4, 5]}, {"feed_forward": ("dense", "experts", "experts"), "first_dense": 0}),
        (
            GEMMA4,
            {},
            {"full_heads": WIDE, "attention": FIVE, "experts": 0, "intermediate": 128, "tied_embeddings": True},
        ),
        (GEMMA4, {"attention_k_eq_v": False}, {"full_heads": WIDE | {"kv_heads": 4, "keys_are_values": False}}),
        (
            GEMMA4,
            {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2},
            {"shared_intermediate": 128, "intermediate": 32, "experts": 8, "dense_intermediate": 0},
        ),
        (NEXT, {}, {"attention": ("linear",) * 3 + ("full",), "output_gate": True, "qk_norm": True, "linear": GATED}),
        (NEXT, {"head_dim": ...}, {"head_dim": 256, "shared_intermediate": 512, "experts": 8, "intermediate": 32}),
        (NEXT, {"attn_output_gate": False, "full_attention_interval": 2}, {"attention": HALF, "output_gate": False}),
        (NEXT, {"layer_types": ["full_attention"] * 6}, {"attention": ("full",), "linear": None}),
        (NEXT, {"mamba_ssm_dtype": "float32"}, {"linear": GATED | {"state_dtype": "float32"}}),
        (
            NEXT,
            {"model_type": "qwen3_5_text", "num_experts": ...},
            {"experts": 0, "intermediate": 128, "linear": GATED},
        ),
        (
            KIMI_LINEAR,
            {},
            {"attention": ("linear",) * 3 + ("full", *HALF), "first_dense": 1, "linear": KDA},
        ),
        (KIMI_LINEAR, {}, {"max_position": 2**20, "shared_intermediate": 32, "kv_heads": 1, "experts_per_token": 2}),
        (NEMOTRON, {}, {"attention": HALF, "layers": 3, "gated": False, "linear": MAMBA}),
        (NEMOTRON, {}, {"feed_forward": ("none", "dense", "experts"), "dense_intermediate": 128, "experts": 8}),
        (NEMOTRON, {"layers_block_type": ["mamba", "moe", "attention", "moe"]}, {"layers": 2, "feed_forward": ()}),
        (QWEN3, {"mlp_only_layers": [0]}, {"first_dense": 1, "dense_intermediate": 128, "intermediate": 32}),
        (QWEN3, {"decoder_sparse_step": 3}, {"feed_forward": ("dense", "dense", "experts"), "first_dense": 0}),
    ],
)
def test_what_a_field_says(config: dict[str, Any], fields: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    """What transformers 5.17 makes of it; settings of the router, of rotation and of speculation change no cost."""
    shape = read(tmp_path, config, **fields).model_dump()
    assert {name: shape[name] for name in expected} == expected


V2 = DEEPSEEK | {"model_type": "deepseek_v2", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
V2 |= {"qk_rope_head_dim": 64, "vocab_size": 102_400, "num_experts_per_tok": 6}
V2_LITE = V2 | {"hidden_size": 2048, "intermediate_size": 10_944, "num_hidden_layers": 27, "num_attention_heads": 16}
V2_LITE |= {"moe_intermediate_size": 1408, "n_routed_experts": 64}
V2_WHOLE = V2 | {"hidden_size": 5120, "intermediate_size": 12_288, "num_hidden_layers": 60, "num_attention_heads": 128}
V2_WHOLE |= {"moe_intermediate_size": 1536, "n_routed_experts": 160, "q_lora_rank": 1536}
AIR = GLM4 | {"hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46, "num_attention_heads": 96}
AIR |= {"num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1408, "n_routed_experts": 128}
AIR |= {"num_experts_per_tok": 8, "first_k_dense_replace": 1, "vocab_size": 151_552, "attention_bias": True}


@pytest.mark.parametrize(
    ("config", "parameters_1e9", "kv_bytes"),
    [
        (V2_LITE, 15.7, 27 * 576 * 2),  # arXiv 2405.04434, appendix B
        (V2_WHOLE, 236.0, 60 * 576 * 2),  # there, table 1: without a latent of queries it would be 240.6
        (AIR, 106.0, 46 * 2 * 8 * 128 * 2),  # GLM-4.5-Air: arXiv 2508.06471, table 1
    ],
)
def test_other_models_have_their_published_counts(
    config: dict[str, Any], parameters_1e9: float, kv_bytes: int, tmp_path: Path
) -> None:
    """Models without a file here, by the widths in their papers, within 1 %."""
    shape = read(tmp_path, config)
    assert shape.parameters / 1e9 == pytest.approx(parameters_1e9, rel=0.01)
    assert shape.kv_token_bytes() == kv_bytes


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq: got 2, expected 1"),
        (DEEPSEEK, {"first_k_dense_replace": 6}, "num_hidden_layers: got 6, expected more layers than dense ones"),
        (DEEPSEEK, {"num_experts_per_tok": 9}, "num_experts_per_tok: got 9, expected a number <= n_routed_experts, 8"),
        (DEEPSEEK, {"q_lora_rank": -1}, "q_lora_rank: got -1, expected a whole number >= 0"),
        (DEEPSEEK, {"index_topk": 2048}, "index_topk: 2048 is not supported: sparse attention is not modelled"),
        (GEMMA4, {"hidden_size_per_layer_input": ...}, "hidden_size_per_layer_input: 256 is not supported: Gemma's"),
        (GEMMA4, {"num_kv_shared_layers": 2}, "num_kv_shared_layers: 2 is not supported: Gemma's small models are"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all' is not supported: only"),
        (GEMMA4, {"per_layer_config": {"0": {}}}, "per_layer_config: {'0': {}} is not supported: only global_head_dim"),
        (GPT_OSS, {"global_head_dim": 9}, "global_head_dim: 9 is not supported: this model type has one kind of"),
        (GPT_OSS, {"moe_layers": [1]}, "moe_layers: [1] is not supported: a mixture of this type has experts in every"),
        (LLAMA4, {"no_rope_layers": [1]}, "no_rope_layers: got [1], expected a number for each of 6 layers"),
        (LLAMA4, {"layer_types": ["sliding_attention"] * 6}, "layer_types: got ['sliding_attention'"),
        (KIMI_LINEAR, {"linear_attn_config": None}, "linear_attn_config: got nothing, expected an object"),
        (KIMI_LINEAR, {"routed_expert_hidden_size": 9}, "routed_expert_hidden_size: 9 is not supported: a latent of"),
        (
            KIMI_LINEAR,
            {"mla_use_output_gate": True},
            "mla_use_output_gate: true is not supported: gates of attention's",
        ),
        (NEMOTRON, {"hybrid_override_pattern": "MEE"}, "hybrid_override_pattern: got 'MEE', expected M, * and behind"),
        (NEMOTRON, {"hybrid_override_pattern": None}, "hybrid_override_pattern: got nothing, expected M, * and"),
        (NEMOTRON, {"mamba_n_groups": 8}, "mamba_n_groups: 8 is not supported: these Mamba layers are not modelled"),
        (NEXT, {"linear_num_heads": 8}, "linear_num_heads: 8 is not supported: this linear attention is not modelled"),
        (NEXT, {"mamba_ssm_dtype": "fp8"}, "mamba_ssm_dtype: got 'fp8', expected one of bfloat16, float16, float32"),
        (NEXT, {"linear_num_key_heads": 5}, "linear.key_heads: got 5, must divide value_heads (32)"),
        (NEXT, {"layer_types": ["sliding_attention"] * 6}, "layer_types: got ['sliding_attention'"),
        (QWEN3, {"attn_output_gate": True}, "attn_output_gate: true is not supported: gates of attention's output"),
    ],
)
def test_what_changes_arithmetic_is_refused_by_name(
    config: dict[str, Any], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError) as raised:
        read(tmp_path, config, **fields)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: {message}") and "\n" not in str(raised.value)


INT4 = {"type": "int", "num_bits": 4, "group_size": 32}
KIMI = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}}}
ATTENTION, SHARED, DENSE = "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"type": "float", "num_bits": 8}}
EACH = [f"model.layers.{layer}.self_attn*" for layer in range(6)]
STATES, NARROW = "re:.*linear_attn.*", {"weights_dtype": "nvfp4", "attention_dtype": "bfloat16"}
FP8_NEXT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LEFT = ["lm_head", "model.layers.0.linear_attn.in_proj_ba", "re:.*linear_attn.conv1d", "mtp.fc", "mtp.norm"]
FP8_NEXT |= {"modules_to_not_convert": [*LEFT, "model.layers.3.mlp.shared_expert_gate"]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


@pytest.mark.parametrize(
    ("config", "quantization", "types"),
    [
        (DEEPSEEK, KIMI | {"ignore": ["lm_head", ATTENTION, SHARED, DENSE]}, {"experts_dtype": "int4_g32"}),
        (
            DEEPSEEK,
            KIMI | {"ignore": [SHARED, DENSE]},
            {"experts_dtype": "int4_g32", "attention_dtype": "int4_g32"},
        ),
        (DEEPSEEK, KIMI, {"weights_dtype": "int4_g32"}),
        (
            DEEPSEEK,
            NVFP4 | {"ignore": [*EACH, "model.layers.6*"]},
            {"weights_dtype": "nvfp4", "attention_dtype": "bfloat16"},
        ),
        (GPT_OSS, MXFP4, {"experts_dtype": "mxfp4"}),
        (QWEN3, NVFP4 | {"exclude_modules": EACH}, {"experts_dtype": "nvfp4"}),
        (NEXT, FP8_NEXT, {"weights_dtype": "fp8_block"}),
        (NEXT, NVFP4 | {"ignore": [ATTENTION, STATES]}, NARROW),
        (
            NEXT,
            NVFP4 | {"ignore": [*EACH[3:4], *(EACH[at].replace("self", "linear") for at in (0, 1, 2, 4, 5))]},
            NARROW,
        ),
        (GEMMA4, NVFP4 | {"ignore": EACH}, {"weights_dtype": "nvfp4", "attention_dtype": "bfloat16"}),
    ],
)
def test_parts_of_layers_may_keep_the_models_type(
    config: dict[str, Any], quantization: dict[str, Any], types: dict[str, str], tmp_path: Path
) -> None:
    """Attention, or shared experts and dense layers together; layers beyond the last are not loaded."""
    shape = read(tmp_path, config, quantization_config=quantization).model_dump()
    assert {name: shape[name] for name in ("weights_dtype", "attention_dtype", "experts_dtype") if shape[name]} == types


@pytest.mark.parametrize(
    ("config", "left"),
    [
        *((DEEPSEEK, left) for left in (EACH[:5], [SHARED], [DENSE], ["model.layers.2*"])),
        (NEXT, [ATTENTION]),
        (NEXT, EACH[3:4]),
    ],
)
def test_parts_of_some_layers_may_not(config: dict[str, Any], left: list[str], tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="expected attention in all layers or none, and shared experts and dense"):
        read(tmp_path, config, quantization_config=KIMI | {"ignore": left})


# -- shapes that contradict themselves ---------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"name": "m", "layers": 6, "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 16, "vocab": 9}
PLAIN |= {"intermediate": 128, "max_position": 4096}
MIXED = PLAIN | {"experts": 8, "experts_per_token": 2}
LATENTS = PLAIN | {"latent": LATENT, "kv_heads": 1, "head_dim": 40}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (PLAIN | {"kv_heads": 3}, "kv_heads: got 3, must divide heads (8)"),
        (PLAIN | {"heads": 0}, "heads: got 0, must be >= 1"),
        (PLAIN | {"hidden": -64}, "hidden: got -64, must be >= 1"),
        (PLAIN | {"layers": 10**9}, "layers: got 1000000000, must be <= 10000"),
        (PLAIN | {"vocab": 10**30}, f"vocab: got {10**30}, must be <= 1,000,000,000,000,000"),
        (PLAIN | {"experts": 8}, "experts_per_token: got 0, must be between 1 and experts (8)"),
        (PLAIN | {"experts_per_token": 2}, "experts_per_token: got 2, must be between 0 and experts (0)"),
        (PLAIN | {"shared_intermediate": 4}, "shared_intermediate: got 4, must be absent without experts"),
        (PLAIN | {"first_dense": 7}, "first_dense: got 7, must be absent without experts"),
        (PLAIN | {"experts_dtype": "mxfp4"}, "experts_dtype: got 'mxfp4', must be absent without experts"),
        (
            PLAIN | {"full_heads": {"kv_heads": 2, "head_dim": 32}},
            "full_heads: got 32 wide heads, must be absent unless",
        ),
        (MIXED | {"first_dense": 6}, "first_dense: got 6, must be < layers (6)"),
        (MIXED | {"first_dense": 2}, "dense_intermediate: got 0, must be > 0: 2 layers are dense"),
        (MIXED | {"dense_intermediate": 9}, "dense_intermediate: got 9, must be 0: no layer is dense"),
        (MIXED | {"feed_forward": ["dense"]}, "feed_forward: got ['dense'], must name experts for some layer"),
        (MIXED | {"feed_forward": ["experts"] * 7}, "feed_forward: got 7 entries, must be <= layers (6)"),
        (LATENTS | {"kv_heads": 3}, "kv_heads: got 3, must be 1 with latent"),
        (LATENTS | {"head_dim": 16}, "head_dim: got 16, must be 40 with latent"),
        (LATENTS | {"attention": ["sliding 128"]}, "attention: got ['sliding 128'], must be full with latent"),
        (LATENTS | {"qkv_bias": True}, "qkv_bias: got true, must be false with latent"),
        (LATENTS | {"latent": LATENT | {"rope_dim": 0}}, "latent.rope_dim: got 0, must be >= 1"),
        (
            LATENTS | {"latent": LATENT | {"indexer": INDEXER | {"top_k": 0}}},
            "latent.indexer.top_k: got 0, must be >= 1",
        ),
        (LATENTS | {"latent": LATENT | {"query_rank": -1}}, "latent.query_rank: got -1, must be >= 0"),
    ],
)
def test_contradictions_of_a_shape_are_refused_in_one_line(shape: dict[str, Any], message: str) -> None:
    """Field, value and bound."""
    with pytest.raises(ScenarioError) as raised:
        Document("m.yaml", None, shape).checked(shapes.ModelShape)
    assert str(raised.value).startswith(f"m.yaml: {message}") and "\n" not in str(raised.value)


@given(
    heads=st.integers(1, 64),
    widths=st.lists(st.integers(1, 600), min_size=4, max_size=4),
    query_rank=st.integers(0, 300),
    by=st.tuples(st.integers(1, 64), st.integers(2, 300), st.integers(1, 4096)),
    given_bytes=st.tuples(st.none() | st.integers(1, 999), st.none() | st.integers(1, 999)),
    tensor=st.sampled_from([1, 2, 8]),
)
def test_sizes_of_sparse_latents_equal_a_recount(
    heads: int, widths: list[int], query_rank: int, by: tuple[int, int, int], given_bytes: Any, tensor: int
) -> None:
    """Every matrix of a layer and every byte that a token has in it, by name: only what heads share is divided."""
    kv_rank, nope, rope, value = widths
    indexer = dict(zip(("heads", "head_dim", "top_k"), by, strict=True)) | {"key_bytes": given_bytes[0]}
    latent = {"query_rank": query_rank, "kv_rank": kv_rank, "nope_dim": nope, "rope_dim": rope, "value_dim": value}
    latent |= {"indexer": indexer, "token_bytes": given_bytes[1]}
    fields = PLAIN | {"heads": heads * 8, "kv_heads": 1, "head_dim": kv_rank + rope, "latent": latent}
    shape = Document("m.yaml", None, fields).checked(shapes.ModelShape)
    whole = query_rank * 64 + (kv_rank + rope) * 64 + by[0] * by[1] * (query_rank or 64) + by[1] * 64 + by[0] * 64
    shared = (nope + rope) * (query_rank or 64) + nope * kv_rank + value * kv_rank + value * 64
    feed_forward = 3 * 64 * 128
    others = 2 * 9 * 64 + (2 * 6 + 1) * 64
    assert shape.parameters == 6 * (whole + heads * 8 * shared + feed_forward) + others
    on_a_gpu = 6 * (whole + (heads * 8 * shared + feed_forward) / tensor) + others / tensor
    assert shape.shard_bytes(tensor) == pytest.approx(2 * on_a_gpu, abs=2)
    key = given_bytes[0] or by[1] + 4 * ceil(by[1] / 128)
    assert shape.kv_token_bytes(tensor) == 6 * ((given_bytes[1] or 2 * (kv_rank + rope)) + key)


# -- published configurations ------------------------------------------------------------------------------------------

REFUSED = {
    "MiniMax-M3": "model_type minimax_m3: sparse attention",
    "DeepSeek-V4-Flash": "model_type deepseek_v4: compressed attention",
    "DeepSeek-V4-Pro": "model_type deepseek_v4: compressed attention",
    "Kimi-K3": "latent_moe_use_norm: true is not supported: a latent of experts",
    "NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "moe_latent_size: 1024 is not supported: a latent of experts",
    "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "moe_latent_size: 2048 is not supported: a latent of experts",
    "GLM-5.2": "index_skip_topk_offset: 3 is not supported: indexers that layers share",
}
OF_CONFIGS = {"gemma-4-31b": "Gemma-4-31B-IT-NVFP4", "kimi-k2": "Kimi-K2-Instruct", "mixtral-8x7b": "Mixtral-8x7B-v0.1"}
OF_CONFIGS |= {"mixtral-8x22b": "Mixtral-8x22B-v0.1", "qwen3-coder-480b": "Qwen3-Coder-480B-A35B-Instruct"}
OF_CONFIGS |= {"nemotron-3-nano-30b-a3b": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"}
OF_CONFIGS |= {"llama-4-scout": "Llama-4-Scout-17B-16E-Instruct"}
OF_CONFIGS |= {"llama-4-maverick": "Llama-4-Maverick-17B-128E-Instruct"}


def published() -> dict[str, Path]:
    """The configurations at hand by the model's name; skips where there are none."""
    try:
        folder = catalog.data("model_configs/README.md").parent
    except ScenarioError as error:
        pytest.skip(f"published configurations not present: {error}")
    return {path.stem.partition("--")[2]: path for path in sorted(folder.glob("*.json"))}


def test_published_configurations_are_read_or_refused_in_one_line() -> None:
    """The model's type comes first, then what is missing."""
    for name, path in published().items():
        if name not in REFUSED:
            assert shapes.model(str(path)).parameters > 1e9
            continue
        with pytest.raises(ScenarioError) as raised:
            shapes.model(str(path))
        assert (
            str(raised.value) == f"{path}: {REFUSED[name]} {'are' if 'layers' in REFUSED[name] else 'is'} not modelled"
        )


def test_models_that_ship_are_what_their_configurations_say() -> None:
    """But for the name, and NVIDIA's types of Gemma 4 31B, whose file is that of Google's bfloat16."""
    configs = published()
    names = {shapes.model(name).name.lower(): name for name in catalog.names("models")} | {
        config.lower(): name for name, config in OF_CONFIGS.items()
    }
    found = {name: names[config.lower()] for config, name in ((c, c) for c in configs) if config.lower() in names}
    assert len(found) >= 16
    for config, name in found.items():
        types = dict.fromkeys(("weights_dtype", "attention_dtype", "kv_dtype")) if "NVFP4" in config else {}
        same = {"name": shapes.model(name).name} | types
        assert shapes.model(str(configs[config])).model_copy(update=same) == shapes.model(name), name


def test_parameters_are_those_of_transformers_models() -> None:
    """Within 0.1 %: biases of outputs and experts and a few norms are not counted."""
    torch = pytest.importorskip("torch", reason="models are built without data")
    transformers = pytest.importorskip("transformers", reason="its models are counted")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for name, path in published().items():
        if name in REFUSED:
            continue
        config = json.loads(path.read_text())
        text = config.get("text_config") or config
        kind = {"kimi_k2": "deepseek_v3"}.get(text["model_type"], text["model_type"])
        left = ("model_type", "quantization_config", "auto_map", "rope_scaling")
        with torch.device("meta"):
            built = mapping[kind](**{k: v for k, v in text.items() if k not in left})
            model = transformers.AutoModelForCausalLM.from_config(built)
        count = sum(each.numel() for each in model.parameters())
        assert shapes.model(str(path)).parameters == pytest.approx(count, rel=1e-3), name
