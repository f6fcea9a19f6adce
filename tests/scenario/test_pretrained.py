"""config.json of Hugging Face: what is read, transformers' defaults, what becomes fp8 or int4, and what is refused by
name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cbsim.errors import ScenarioError
from cbsim.scenario import pretrained, scenario, shapes

SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "vocab_size": 128256}
HEADS = {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8}
OTHER = {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}}
FLAGS = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
# meta-llama/Llama-3.1-8B, and what does not bear on a simulation
LLAMA: dict[str, Any] = {**SHAPE, **HEADS, **OTHER, **FLAGS, "model_type": "llama"}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
SMALLER = {"hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "vocab_size": 151936}
QWEN3 = {"model_type": "qwen3_moe", "head_dim": 128, "num_hidden_layers": 48, "num_key_value_heads": 4}
QWEN3_MOE = {**LLAMA, **SMALLER, **EXPERTS, **QWEN3, "mlp_only_layers": []}
QWEN3_MOE |= {"use_sliding_window": False, "sliding_window": None}


FIVE_OF_SIX = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 2


def written(folder: Path, config: dict[str, Any] | str, **fields: Any) -> Path:
    """A folder with this config.json, some fields of it changed; ... takes one away."""
    folder.mkdir(exist_ok=True)
    fields = {k: v for k, v in (config | fields).items() if v is not ...} if isinstance(config, dict) else {}
    (folder / "config.json").write_text(json.dumps(fields) if isinstance(config, dict) else config)
    return folder


def read(folder: Path) -> shapes.ModelShape:
    return shapes.model(str(folder))


def test_a_config_gives_the_shape_that_ships(tmp_path: Path) -> None:
    """By its folder or by its own path, from the scenario's folder or the current one."""
    folder = written(tmp_path / "Llama-3.1-8B", LLAMA)
    shipped = shapes.model("llama-3.1-8b")
    assert read(folder) == read(folder / "config.json") == shipped
    assert shapes.model("./Llama-3.1-8B", tmp_path) == shapes.model("Llama-3.1-8B/config.json", tmp_path) == shipped


def test_a_config_named_on_the_command_line_may_lie_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with coefficients; a name that ships goes before a folder of the same name, unless it is written as a path."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "mine", LLAMA, num_hidden_layers=2)
    written(tmp_path / "llama-3.1-8b", LLAMA, num_hidden_layers=2)
    for name, layers in (("mine", 2), ("mine/config.json", 2), ("llama-3.1-8b", 32), ("./llama-3.1-8b", 2)):
        assert scenario.load("worked_example", [f"model={name}"]).model.layers == layers


def test_the_name_of_a_cached_model_is_that_of_its_repository(tmp_path: Path) -> None:
    """Hugging Face's cache has links in folders called by the commit."""
    folder = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "d04e592bb4f6"
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to(written(tmp_path / "blobs", LLAMA) / "config.json")
    assert read(folder).name == "Llama-3.1-8B"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_key_value_heads": ...}, {"kv_heads": 32}),
        ({"num_key_value_heads": ..., "model_type": "mistral", "sliding_window": None}, {"kv_heads": 8}),
        ({"num_key_value_heads": None, "model_type": "mistral", "sliding_window": None}, {"kv_heads": 32}),
        ({"num_key_value_heads": ..., "model_type": "phi3"}, {"kv_heads": 32}),
        ({"hidden_size": 2048, "model_type": "qwen3"}, {"head_dim": 128, "qk_norm": True, "qkv_bias": False}),
        ({"hidden_size": 2048, "model_type": "qwen2"}, {"head_dim": 64, "qk_norm": False, "qkv_bias": True}),
        ({"head_dim": 96}, {"head_dim": 96}),
        ({"tie_word_embeddings": ...}, {"tied_embeddings": False}),
        ({"torch_dtype": ..., "dtype": "float16"}, {"dtype": "float16"}),
        ({"torch_dtype": ...}, {"dtype": "bfloat16"}),
        ({"model_type": "phi3", "sliding_window": 262_144}, {"max_position": 131_072}),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, {"attention": ("full",)}),
        ({"model_type": "qwen2", "use_sliding_window": True}, {"attention": ("full",) * 28 + ("sliding 4096",) * 4}),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}, {"attention": ("sliding 4096",)}),
        ({"model_type": "mistral"}, {"attention": ("sliding 4096",)}),
        ({"model_type": "mistral", "sliding_window": 131_072}, {"attention": ("full",)}),
        ({"model_type": "phi3", "sliding_window": 2047}, {"attention": ("sliding 2047",)}),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 1024, "layer_types": FIVE_OF_SIX},
            {"attention": ("sliding 1024",) * 5 + ("full",)},
        ),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_takes(
    fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """The defaults of transformers 5.17's configuration classes. A window beyond the longest sequence is none."""
    shape = read(written(tmp_path, LLAMA, **fields)).model_dump()
    assert {name: shape[name] for name in expected} == expected


def test_gemma_3_has_five_windows_to_a_layer_that_sees_all(tmp_path: Path) -> None:
    """google/gemma-3-12b-it as its file gives it, or with the kinds of its layers written out, is the model that ships;
    two fields given differently change it."""
    text = {"hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16}
    text |= {"num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024, "rope_scaling": {"factor": 8.0}}
    whole = {"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}}
    shipped = shapes.model("gemma-3-12b").model_copy(update={"name": "g"})
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 8
    for fields in (text, text | {"layer_types": kinds}):
        assert read(written(tmp_path / "g", whole, text_config=fields)) == shipped
    mine = read(written(tmp_path / "g", text, sliding_window_pattern=2, head_dim=128))
    assert (mine.attention, mine.head_dim) == (("sliding 1024", "full"), 128)


def test_experts_are_read(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts of width 768, of which a token goes through 8."""
    shape = read(written(tmp_path, QWEN3_MOE))
    assert (shape.experts, shape.experts_per_token, shape.intermediate) == (128, 8, 768)
    assert shape.parameters / 1e9 == pytest.approx(30.5, rel=0.005)


ATTENTION = {"num_key_value_heads": 8, "head_dim": 128, "num_attention_heads": 48}
CHOSEN = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000}
MIXTRAL = {"model_type": "mixtral", "sliding_window": None, **CHOSEN}
OLMOE = {"model_type": "olmoe", "num_key_value_heads": ..., "num_experts": 64, "num_experts_per_tok": 8}
OLMOE |= {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
MINIMAX = {"model_type": "minimax_m2", **ATTENTION, "num_local_experts": 256, "num_experts_per_tok": 8}
MIXTRAL_22B = MIXTRAL | ATTENTION | {"hidden_size": 6144, "intermediate_size": 16_384, "num_hidden_layers": 56}
MINIMAX |= {"hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "vocab_size": 200_064}
GRANITE = {"model_type": "granitemoe", "num_local_experts": 40, "num_experts_per_tok": 8, "tie_word_embeddings": True}
GRANITE |= {"hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 24, "vocab_size": 49_155}


@pytest.mark.parametrize(
    ("fields", "parameters_1e9", "kv_bytes"),
    [
        (MIXTRAL, 46.7, 131_072),  # mistralai/Mixtral-8x7B-v0.1
        (MIXTRAL_22B, 140.6, 229_376),  # mistralai/Mixtral-8x22B-v0.1
        (OLMOE | {"vocab_size": 50_304}, 6.92, 131_072),  # allenai/OLMoE-1B-7B
        (MINIMAX | {"shared_intermediate_size": 0}, 228.7, 253_952),  # MiniMaxAI/MiniMax-M2.5
        (GRANITE, 3.30, 65_536),  # ibm-granite/granite-3.1-3b-a800m
    ],
)
def test_mixtures_of_experts_have_their_published_counts(
    fields: dict[str, Any], parameters_1e9: float, kv_bytes: int, tmp_path: Path
) -> None:
    """Theory: all parameters, and 2 x layers x KV heads x head width x 2 bytes a token, of what these models publish.
    Without a quantization every weight takes 2 bytes.
    """
    shape = read(written(tmp_path, LLAMA, **fields))
    assert shape.parameters / 1e9 == pytest.approx(parameters_1e9, rel=0.005)
    assert (shape.kv_bytes_per_token, shape.weight_bytes) == (kv_bytes, 2 * shape.parameters)
    assert shape.experts_per_token == fields["num_experts_per_tok"]


def test_of_several_media_the_text_model_is_read(tmp_path: Path) -> None:
    outer = {"model_type": "mistral3", "vision_config": {"hidden_size": 1}, "torch_dtype": "bfloat16"}
    content = LLAMA | {"model_type": "mistral", "sliding_window": None, "torch_dtype": ...}
    content = {k: v for k, v in content.items() if v is not ...}
    assert read(written(tmp_path, outer, text_config=content)).layers == 32
    with pytest.raises(ScenarioError, match=r"quantization_config.quant_method: is required: one of"):
        read(written(tmp_path, outer, text_config=content, quantization_config={"bits": 4}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sliding_window": 4096},
            "sliding_window: got 4096, expected null: layers of model_type llama",
        ),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 32}, "layer_types: got ['linear_attention'"),
        (
            {"model_type": "minimax_m3", "sparse_attention_config": {"block": 64}},
            "model_type minimax_m3: sparse att",
        ),
        (
            {"model_type": "deepseek_v4", "compress_ratios": [0, 4]},
            "model_type deepseek_v4: compressed attention is not",
        ),
        (
            {"model_type": "glm_moe_dsa", "index_topk_freq": 4},
            "index_topk_freq: 4 is not supported: indexers that layers",
        ),
        (
            {"model_type": "deepseek_v3", "index_topk": 2048},
            "index_topk: 2048 is not supported: sparse attention",
        ),
        ({"kv_lora_rank": 512}, "kv_lora_rank: 512 is not supported: this model type has no latent attention"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8}, "kv_lora_rank: got nothing, expected a whole number"),
        (
            {"num_local_experts": 8},
            "num_local_experts: 8 is not supported: this model type has no experts of that name",
        ),
        (
            {"model_type": "olmo_hybrid", "linear_num_heads": 3},
            "model_type olmo_hybrid: this linear attention is not",
        ),
        ({"model_type": "jamba", "mamba_d_state": 16}, "model_type jamba: these Mamba layers are not modelled"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type t5: encoders are not modelled"),
        ({"model_type": "llava", "vision_config": {"a": 1}}, "model_type llava: of several media only"),
        ({"attention_bias": True}, "attention_bias: true is not supported: only biases of queries, keys and values"),
        (QWEN3_MOE | {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size: 8 is not supported: th"),
        ({"compression_config": {"bits": 4}}, "compression_config: {'bits': 4} is not supported: read"),
        (
            {"model_type": "opt"},
            "model_type: got 'opt', expected a supported model: deepseek_v2, deepseek_v3, deepseek_v32, ge",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: true is not supported: only causal"),
        ({"model_type": ...}, "model_type: got nothing, expected a supported model"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0, expected a whole number >= 1"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers: got 2147483648, expected a whole number <= 10,000"),
        ({"vocab_size": 10**300}, "vocab_size: got 1000"),
        ({"rope_scaling": "x"}, "rope_scaling: got 'x', expected an object"),
        ({"quantization_config": []}, "quantization_config: got [], expected an object"),
        ({"layer_types": [{}] * 32}, "layer_types: got [{}, {}"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers: got '32', expected a whole number >= 1"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: got 5, expected a divisor of num_attention_heads, 32"),
        ({"vocab_size": ...}, "vocab_size: got nothing, expected a whole number"),
        ({"torch_dtype": "float8"}, "torch_dtype: got 'float8', expected one of bfloat16, float16, float32"),
        (QWEN3_MOE | {"mlp_only_layers": "all"}, "mlp_only_layers: got 'all', expected a list of whole numbers"),
        (QWEN3_MOE | {"decoder_sparse_step": 49}, "num_hidden_layers: got 48, expected more layers than dense ones"),
        (QWEN3_MOE | {"num_experts_per_tok": 129}, "num_experts_per_tok: got 129, expected a number <= num_experts"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    """File, field, value and what would do, in one line."""
    folder = written(tmp_path, LLAMA, **fields)
    with pytest.raises(ScenarioError) as raised:
        read(folder)
    assert str(raised.value).startswith(f"{folder / 'config.json'}: {message}")
    assert "\n" not in str(raised.value) and raised.value.field == message.partition(":")[0].partition(" ")[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[1]", "got [1], expected a JSON object"), ("[" * 100_000, "not valid JSON")],
)
def test_a_file_that_is_no_config(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"config\.json: ") as raised:
        read(written(tmp_path, content))
    assert message in str(raised.value)


def test_only_small_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe would wait for ever; a file of weights is not a description."""
    (tmp_path / "config.json").write_text(" " * (pretrained.MOST_BYTES + 1))
    with pytest.raises(ScenarioError, match=r"config\.json: is too large, must be <= 1,000,000"):
        read(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ScenarioError, match="is not a regular file"):
        read(tmp_path)
    with pytest.raises(ScenarioError, match=r"holds no config\.json"):
        read(tmp_path.parent)


# -- quantization ------------------------------------------------------------------------------------------------------

QWEN3_8B = LLAMA | {"model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936}
QWEN3_8B |= {"max_position_embeddings": 40960, "head_dim": 128}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
FP8["modules_to_not_convert"] = ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]  # Qwen3-8B-FP8
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.1}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": None}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    """compressed-tensors as vLLM's compressor writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    about = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "kv_cache_scheme": None}
    return about | {"config_groups": {"group_0": group}} | fields


FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "group_size": None}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 128}
W8A8 = compressed(FLOAT, FLOAT | {"dynamic": True, "strategy": "token"})
W4A16 = compressed(W4, None)


@pytest.mark.parametrize(
    ("quantization", "weights", "cache"),
    [
        (FP8, "fp8_block", None),
        (FP8 | {"weight_block_size": None, "activation_scheme": "static"}, "fp8", None),
        (GPTQ, "int4", None),
        (AWQ, "int4", None),
        (W8A8, "fp8", None),
        (W4A16, "int4", None),
        (W8A8 | {"kv_cache_scheme": FLOAT}, "fp8", "fp8"),
        (W8A8 | {"ignore": ["re:.*lm_head", "re:.*mlp.gate$", "re:vision_tower.*"]}, "fp8", None),
        ({}, None, None),
        (None, None, None),
    ],
)
def test_what_the_shape_can_say(quantization: Any, weights: str | None, cache: str | None, tmp_path: Path) -> None:
    """The matrices of the layers have another type; all else stays in the model's."""
    shape = read(written(tmp_path, QWEN3_8B, quantization_config=quantization))
    assert (shape.dtype, shape.weights_dtype, shape.kv_dtype) == ("bfloat16", weights, cache)


def test_the_weights_take_what_the_files_do(tmp_path: Path) -> None:
    """Theory: Qwen3-8B has 6.95e9 weights in matrices and 1.24e9 in embedding and output layer. In fp8 that is
    6.95 + 2 x 1.24 = 9.4 GB, the sum of its published files; in int4, at 133/256 byte a weight, 3.6 + 2.5 = 6.1 GB.
    """
    fp8 = read(written(tmp_path, QWEN3_8B, quantization_config=FP8)).weight_bytes
    int4 = read(written(tmp_path, QWEN3_8B, quantization_config=AWQ)).weight_bytes
    assert fp8 == pytest.approx(9.44e9, rel=0.01)
    assert int4 == pytest.approx(6.10e9, rel=0.01)


def test_a_quantized_model_is_simulated(tmp_path: Path) -> None:
    """A folder is a model like any other, with the cache that fits beside fewer weights."""
    override = f"model={written(tmp_path, QWEN3_8B, quantization_config=FP8)}"
    assert scenario.load("worked_example", [override, "cost={kind: roofline}"]).model.weights_dtype == "fp8_block"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"bits": 4}, ".quant_method: is required: one of fp8, compressed-tensors, gptq, awq, mx"),
        ({"quant_method": "bitsandbytes"}, ".quant_method: got 'bitsandbytes', expected one of fp8, compressed-"),
        (GPTQ | {"bits": 8}, ".bits: got 8, expected 4"),
        (GPTQ | {"lm_head": True}, ".lm_head: got true, expected False"),
        (GPTQ | {"dynamic": {"-:x": {}}}, ".dynamic: got {'-:x': {}}, needs at most 0 entries"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, ".modules_to_not_convert: got 'lm_head', expected a list"),
        (AWQ | {"modules_to_not_convert": ["model.layers.0"]}, ".modules_to_not_convert.0: got 'model.layers.0"),
        (FP8 | {"fmt": "e5m2"}, ".fmt: got 'e5m2', expected one of e4m3, float8_e4m3fn"),
        (W8A8 | {"ignore": ["re:.*down_proj"]}, ".ignore.0: got 're:.*down_proj', expected only the output layer"),
        (W8A8 | {"ignore": ["re:.*mlp.gate"]}, ".ignore.0: got 're:.*mlp.gate', expected only the output layer"),
        (W8A8 | {"ignore": ["model.layers.3.self_attn*"]}, ": got {'quant_method': 'compressed-tensors', 'ignore': ["),
        (W8A8 | {"ignore": [3]}, ".ignore.0: got 3, expected"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, ".quant_algo: got 'W4A8', expected one of NVFP4, FP8"),
        (W8A8 | {"config_groups": {}}, ".config_groups: got {}, needs at least 1 entries"),
        (W8A8 | {"kv_cache_scheme": FLOAT | {"type": "int"}}, ".kv_cache_scheme.type: got 'int', expected float"),
        (compressed(FLOAT, None), ".config_groups.group_0.input_activations: got nothing, expected 8 bits"),
        (compressed(W4, FLOAT), ".config_groups.group_0.input_activations: got {'type': 'float', 'num_bits': 8}"),
        (compressed(W4 | {"num_bits": 8}, None), ".config_groups.group_0.weights.num_bits: got 8, expected 4"),
        (compressed(FLOAT | {"type": "nf4"}, None), ".config_groups.group_0.weights.type: got 'nf4', expected one of"),
        (3, ": got 3, expected an object"),
    ],
)
def test_quantization_that_is_not_modelled_is_refused_by_name(quantization: Any, message: str, tmp_path: Path) -> None:
    """File, the whole way to the field, value and what would do, in one line."""
    directory = written(tmp_path, QWEN3_8B, quantization_config=quantization)
    with pytest.raises(ScenarioError) as raised:
        read(directory)
    assert str(raised.value).startswith(f"{directory / 'config.json'}: quantization_config{message}")
    assert "\n" not in str(raised.value)
