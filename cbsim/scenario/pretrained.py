"""A model's shape from the config.json of Hugging Face's transformers. What is not modelled is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cbsim.scenario import quantization
from cbsim.scenario.config import Config, read_json

MOST_BYTES = 1_000_000
KV_HEADS = {"llama": None, "mistral": 8, "phi3": None, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
"""The model types that are read, and what transformers takes for absent `num_key_value_heads`. None: the heads."""
WHOLE, SLIDING = "full_attention", "sliding_attention"
DTYPES = ("bfloat16", "float16", "float32")
REFUSED = {
    "is_encoder_decoder": "encoders are not modelled, only decoders",
    "kv_lora_rank": "multi-head latent attention (MLA) is not modelled",
    "linear_.*|attn_type_list|full_attention_interval": "linear attention is not modelled",
    "mamba_.*|ssm_.*|state_size|hybrid_override_pattern": "Mamba layers are not modelled",
    "(vision|audio)_config": "of several media only the text model is modelled, and there is no text_config",
    "attention_bias|mlp_bias": "biases but those of queries, keys and values are not modelled",
    "mlp_only_layers": "all layers must have experts",
    "compression_config": "read the original's config.json, and set the model's types in the scenario",
}
"""Patterns of fields that must be absent, null, false or empty, and why."""


def shape(path: Path) -> dict[str, Any]:
    """The fields of ModelShape that config.json gives, with transformers' defaults where it says nothing. Of a model of
    several media it is the text model that counts. Raises ScenarioError.
    """
    config = Config(path, read_json(path, most_bytes=MOST_BYTES))
    text = config.part("text_config")
    if text is not None:
        others = ("text_config", "vision_config", "audio_config")
        config = Config(path, {k: v for k, v in config.fields.items() if k not in others} | text.fields)
    for field, value in config.fields.items():
        reason = next((why for pattern, why in REFUSED.items() if re.fullmatch(pattern, field)), None)
        if reason and value not in (None, False, [], {}):
            raise config.refuse(field, f"none: {reason}")
    kind = config.fields.get("model_type")
    if not isinstance(kind, str) or kind not in KV_HEADS:
        raise config.refuse("model_type", f"one of {', '.join(KV_HEADS)}: nothing else is modelled")
    layers, hidden, heads = map(config.whole, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    absent = KV_HEADS[kind] if "num_key_value_heads" not in config.fields else None
    kv_heads = config.whole("num_key_value_heads", absent or heads)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    return {
        "name": _name(path),
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": config.whole("head_dim", 128 if kind == "qwen3" else hidden // heads),
        **_experts(config, kind),
        "vocab": config.whole("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "qk_norm": kind.startswith("qwen3"),
        "qkv_bias": kind == "qwen2",
        "dtype": _dtype(config),
        **quantization.types(config),
        "max_position": config.whole("max_position_embeddings"),
        **attention(config, kind, layers),
    }


def attention(config: Config, kind: str, layers: int) -> dict[str, Any]:
    """What the layers see, if that is not the whole sequence in all of them: as many entries as repeat. Qwen's windows
    are off unless switched on.
    """
    given, most = config.fields.get("layer_types"), config.whole("max_position_embeddings")
    if kind.startswith("qwen"):
        window = config.whole("sliding_window", 4096) if config.flag("use_sliding_window") else most
        first = config.whole("max_window_layers", 28, 0)
        types = given or [SLIDING if layer >= first else WHOLE for layer in range(layers)]
    else:
        absent = 4096 if kind == "mistral" and "sliding_window" not in config.fields else None
        null = config.fields.get("sliding_window", absent) is None
        window = most if null else config.whole("sliding_window", absent)
        types = given or [SLIDING] * layers
    if not isinstance(types, list) or len(types) != layers or not {*types} <= {SLIDING, WHOLE}:
        raise config.refuse("layer_types", f"{layers} times '{WHOLE}' or '{SLIDING}': nothing else is modelled")
    if window >= most or SLIDING not in types:
        return {}
    if kind == "llama":
        raise config.refuse("sliding_window", "null: transformers' Llama has no windows")
    return {"attention": _repeated([f"sliding {window}" if one == SLIDING else "full" for one in types])}


def _repeated(pattern: list[str]) -> list[str]:
    """The shortest beginning that, repeated, gives the whole."""
    sizes = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in sizes if all(one == pattern[i % n] for i, one in enumerate(pattern)))


def _experts(config: Config, kind: str) -> dict[str, int]:
    """Width of the feed-forward layers, and the experts if these are some."""
    if kind != "qwen3_moe":
        return {"intermediate": config.whole("intermediate_size")}
    if config.whole("decoder_sparse_step", 1) != 1:
        raise config.refuse("decoder_sparse_step", "1: all layers must have experts")
    names = {"intermediate": "moe_intermediate_size", "experts": "num_experts"}
    fields = {ours: config.whole(theirs) for ours, theirs in names.items()}
    chosen = config.whole("num_experts_per_tok")
    if chosen > fields["experts"]:
        raise config.refuse("num_experts_per_tok", f"a number <= num_experts, {fields['experts']}")
    return fields | {"experts_per_token": chosen}


def _dtype(config: Config) -> str:
    """`dtype` of transformers 5, `torch_dtype` of older ones; bfloat16 if neither is there."""
    field = "dtype" if config.fields.get("dtype") is not None else "torch_dtype"
    value = config.fields.get(field)
    if value is not None and value not in DTYPES:
        raise config.refuse(field, f"one of {', '.join(DTYPES)}")
    return value or "bfloat16"


def _name(path: Path) -> str:
    """The folder's name; that of the repository in a Hugging Face cache, models--WHO--NAME/snapshots/COMMIT."""
    folder = path.absolute().parent  # not resolved: the cache's files are links
    if path.name != "config.json":
        return path.stem
    return folder.parent.parent.name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name or "model"
