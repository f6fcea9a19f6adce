"""A model's shape from the config.json of Hugging Face's transformers. What is not modelled is refused by name."""

from __future__ import annotations

import json
import math
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbsim.scenario.errors import UserError
from cbsim.scenario.fields import ScenarioError, shown

MOST_BYTES = 1_000_000
KV_HEADS = {"llama": None, "mistral": 8, "phi3": None, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
"""The model types that are read, and what transformers takes for absent `num_key_value_heads`. None: the heads."""
DTYPES = ("bfloat16", "float16", "float32")
REFUSED = {
    "is_encoder_decoder": "encoders are not modelled, only decoders",
    "kv_lora_rank": "multi-head latent attention (MLA) is not modelled",
    "linear_.*|attn_type_list|full_attention_interval": "linear attention is not modelled",
    "mamba_.*|ssm_.*|state_size|hybrid_override_pattern": "Mamba layers are not modelled",
    "(vision|audio)_config": "of several media only the text model is modelled, and there is no text_config",
    "attention_bias|mlp_bias": "biases but those of queries, keys and values are not modelled",
    "mlp_only_layers": "all layers must have experts",
    "quantization_config": "read the original's config.json, and set the model's types in the scenario",
}
"""Patterns of fields that must be absent, null, false or empty, and why."""


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of a JSON object in a file; each is asked for by what it must be. Null is absent."""

    where: Path | str
    fields: dict[str, Any]
    error: type[UserError] = ScenarioError

    def refuse(self, field: str, expected: str) -> UserError:
        given = shown(self.fields[field]) if field in self.fields else "nothing"
        text = f"{self.where}: {field}: got {given}, expected {expected}"
        return self.error(text, field=field, value=self.fields.get(field), bound=f"expected {expected}")

    def whole(self, field: str, default: int | None = None) -> int:
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(field, "a whole number >= 1")
        return value

    def real(self, field: str, default: float | None = None) -> float:
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refuse(field, "a number > 0")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.fields.get(field)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(field, "true or false")
        return value

    def part(self, field: str) -> Config | None:
        value = self.fields.get(field)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(field, "an object")
        return Config(f"{self.where}: {field}", value, self.error) if value else None


def read_json(path: Path, error: type[UserError] = ScenarioError, most_bytes: int | None = None) -> dict[str, Any]:
    """The JSON object in a regular file. Raises `error`."""
    try:
        file = path.stat()
        if not stat.S_ISREG(file.st_mode):
            raise error(f"{path}: cannot be read: is not a regular file", file=path)
        if most_bytes is not None and file.st_size > most_bytes:
            raise error(f"{path}: got {file.st_size:,} bytes, must be <= {most_bytes:,}", file=path)
        data = json.loads(path.read_bytes())
    except OSError as failed:
        raise error(f"{path}: cannot be read: {failed.strerror}", file=path) from None
    except (ValueError, RecursionError) as failed:
        if isinstance(failed, UserError):
            raise
        raise error(f"{path}: is not JSON: {failed}", file=path) from None
    if not isinstance(data, dict):
        raise error(f"{path}: got {shown(data)}, expected an object", file=path)
    return data


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
    _check_windows(config, kind, layers)
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
        "max_position": config.whole("max_position_embeddings"),
    }


def _check_windows(config: Config, kind: str, layers: int) -> None:
    """Refuse attention that sees less than the whole sequence. Qwen's windows are off unless switched on."""
    if config.fields.get("layer_types") not in (None, ["full_attention"] * layers):
        raise config.refuse("layer_types", f"'full_attention' {layers} times: nothing else is modelled")
    if kind.startswith("qwen"):
        if config.flag("use_sliding_window"):
            raise config.refuse("use_sliding_window", "false: sliding windows are not modelled")
        return
    absent = 4096 if kind == "mistral" and "sliding_window" not in config.fields else None
    window = config.fields.get("sliding_window", absent)
    if window is not None and config.whole("sliding_window", absent) < config.whole("max_position_embeddings"):
        usual = " (4096, says transformers, if it is absent)" if absent else ""
        raise config.refuse("sliding_window", f"null{usual}: sliding windows are not modelled")


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
