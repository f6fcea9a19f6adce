"""`quantization_config` of a Hugging Face config.json: what becomes fp8 or int4, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbsim.errors import ScenarioError
from cbsim.scenario import scenario, shapes

QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
FP8 = {  # Qwen/Qwen3-8B-FP8
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
}
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


def folder(path: Path, quantization: Any) -> Path:
    (path / "config.json").write_text(json.dumps(QWEN3_8B | {"quantization_config": quantization}))
    return path


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
    shape = shapes.model(str(folder(tmp_path, quantization)))
    assert (shape.dtype, shape.weights_dtype, shape.kv_dtype) == ("bfloat16", weights, cache)


def test_the_weights_take_what_the_files_do(tmp_path: Path) -> None:
    """Theory: Qwen3-8B has 6.95e9 weights in matrices and 1.24e9 in embedding and output layer. In fp8 that is
    6.95 + 2 x 1.24 = 9.4 GB, the sum of its published files; in int4, at 133/256 byte a weight, 3.6 + 2.5 = 6.1 GB.
    """
    fp8 = shapes.model(str(folder(tmp_path, FP8))).weight_bytes
    int4 = shapes.model(str(folder(tmp_path, AWQ))).weight_bytes
    assert fp8 == pytest.approx(9.44e9, rel=0.01)
    assert int4 == pytest.approx(6.10e9, rel=0.01)


def test_a_quantized_model_is_simulated(tmp_path: Path) -> None:
    """A folder is a model like any other, with the cache that fits beside fewer weights."""
    override = f"model={folder(tmp_path, FP8)}"
    assert scenario.load("worked_example", [override, "cost={kind: roofline}"]).model.weights_dtype == "fp8_block"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"bits": 4}, ".quant_method: is required: one of fp8, compressed-tensors, gptq, awq"),
        ({"quant_method": "bitsandbytes"}, ".quant_method: got 'bitsandbytes', expected one of fp8, compressed-"),
        (GPTQ | {"bits": 8}, ".bits: got 8, expected 4"),
        (GPTQ | {"lm_head": True}, ".lm_head: got true, expected False"),
        (GPTQ | {"dynamic": {"-:x": {}}}, ".dynamic: got {'-:x': {}}, needs at most 0 entries"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, ".modules_to_not_convert: got 'lm_head', expected a list"),
        (AWQ | {"modules_to_not_convert": ["model.layers.0"]}, ".modules_to_not_convert.0: got 'model.layers.0"),
        (FP8 | {"fmt": "e5m2"}, ".fmt: got 'e5m2', expected e4m3"),
        (W8A8 | {"ignore": ["re:.*down_proj"]}, ".ignore.0: got 're:.*down_proj', expected only the output layer"),
        (W8A8 | {"ignore": ["re:.*mlp.gate"]}, ".ignore.0: got 're:.*mlp.gate', expected only the output layer"),
        (W8A8 | {"config_groups": {}}, ".config_groups: got {}, needs at least 1 entries"),
        (W8A8 | {"kv_cache_scheme": FLOAT | {"type": "int"}}, ".kv_cache_scheme.type: got 'int', expected float"),
        (compressed(FLOAT, None), ".config_groups.group_0.input_activations: got nothing, expected 8 bits"),
        (compressed(W4, FLOAT), ".config_groups.group_0.input_activations: got {'type': 'float', 'num_bits': 8}"),
        (compressed(W4 | {"num_bits": 8}, None), ".config_groups.group_0.weights.num_bits: got 8, expected 4"),
        (compressed(FLOAT | {"type": "nf4"}, None), ".config_groups.group_0.weights.type: got 'nf4', expected one of"),
        (3, ": got 3, expected fields"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(quantization: Any, message: str, tmp_path: Path) -> None:
    """File, the whole way to the field, value and what would do, in one line."""
    directory = folder(tmp_path, quantization)
    with pytest.raises(ScenarioError) as raised:
        shapes.model(str(directory))
    assert str(raised.value).startswith(f"{directory / 'config.json'}: quantization_config{message}")
    assert "\n" not in str(raised.value)
