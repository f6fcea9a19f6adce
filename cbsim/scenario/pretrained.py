"""A model's shape from the config.json of Hugging Face's transformers. Anything not modelled is an error by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from cbsim.files import read_json
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import LARGEST_WHOLE, By, Form, complaint, shown

MOST_BYTES = 1_000_000
MOST_LAYERS = 10_000  # of a model each of whose layers is looked at by itself
GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
GEMMA3 |= {"max_position_embeddings": 131_072, "tie_word_embeddings": True, "sliding_window": 4096}
GEMMA3 |= {"sliding_window_pattern": 6}
HEADS = {"minimax_m2": 8, "mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
DEFAULTS: dict[str, dict[str, Any]] = {kind: {"num_key_value_heads": heads} for kind, heads in HEADS.items()}
DEFAULTS |= {"gemma3": GEMMA3, "gemma3_text": GEMMA3, "granitemoe": {}, "llama": {}, "olmoe": {}, "phi3": {}}
DEFAULTS["mistral"]["sliding_window"], DEFAULTS["qwen3"]["head_dim"] = 4096, 128
"""The supported model types, and transformers' defaults of absent fields that differ between them."""
MIXTURES = dict.fromkeys(("granitemoe", "minimax_m2", "mixtral"), ("intermediate_size", "num_local_experts"))
MIXTURES |= {"olmoe": ("intermediate_size", "num_experts"), "qwen3_moe": ("moe_intermediate_size", "num_experts")}
"""The model types with experts, and the fields of an expert's width and of the experts of a layer."""
WINDOWED = ("gemma3", "gemma3_text", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")
QK_NORMED = ("gemma3", "gemma3_text", "minimax_m2", "olmoe", "qwen3", "qwen3_moe")
WHOLE, SLIDING = "full_attention", "sliding_attention"
DTYPES = ("bfloat16", "float16", "float32")
UNSUPPORTED = {
    "is_encoder_decoder": "encoders are not modelled, only decoders",
    "kv_lora_rank": "multi-head latent attention (MLA) is not modelled",
    "linear_.*|attn_type_list|full_attention_interval": "linear attention is not modelled",
    "mamba_.*|ssm_.*|state_size|hybrid_override_pattern": "Mamba layers are not modelled",
    "(vision|audio)_config": "of several media only the text model is modelled, and there is no text_config",
    "(attention|mlp|lm_head)_bias": "only biases of queries, keys and values are modelled",
    "(n|num)_shared_experts|(shared_expert|shared)_intermediate_size": "shared experts are not modelled",
    "use_bidirectional_attention": "only causal attention is modelled",
    "index_.*|sparse_attention_config|compress_ratios": "sparse attention is not modelled",
    "mlp_only_layers|first_k_dense_replace": "a mixture must have experts in every layer",
    "compression_config": "read the original's config.json, and set the model's types in the scenario",
}
"""Patterns of fields that must be absent, null, false, 0 or empty, with the reason."""


class Config(Document):
    """The fields of a JSON object in a file, read by the type that each must have. Null counts as absent."""

    def whole(self, field: str, default: int | None = None, least: int = 1) -> int:
        bound = f"a whole number >= {least} and <= {LARGEST_WHOLE:,}"
        number: int = self._given(field, default, bound, lambda v: type(v) is int and least <= v <= LARGEST_WHOLE)
        return number

    def real(self, field: str, default: float | None = None) -> float:
        return float(self._given(field, default, "a number > 0", lambda v: type(v) in (int, float) and 0 < v < inf))

    def flag(self, field: str) -> bool:
        return self._given(field, False, "true or false", lambda v: isinstance(v, bool)) is True

    def part(self, field: str) -> Config | None:
        value = self._given(field, {}, "an object", lambda v: isinstance(v, dict))
        return Config(f"{self.file}: {field}", None, value, error_type=self.error_type) if value else None

    def _given(self, field: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        value = default if self.data.get(field) is None else self.data[field]
        if not fits(value):
            raise self.bad(field, expected)
        return value


def shape(path: Path) -> dict[str, Any]:
    """Return the fields of ModelShape that config.json gives, with transformers' defaults for absent ones. The shape of
    a model of several media is that of its text model. Raises ScenarioError.
    """
    config = Config(str(path), None, read_json(path, most_bytes=MOST_BYTES))
    language = config.part("text_config")
    if language is not None:
        media = ("text_config", "vision_config", "audio_config")
        config = Config(str(path), None, {k: v for k, v in config.data.items() if k not in media} | language.data)
    return fields_of(config) | {"name": _name(path)}


def fields_of(config: Config) -> dict[str, Any]:
    """Return the fields of ModelShape except its name. Raises the error of `config`."""
    kind = _kind(config)
    config = Config(config.file, None, DEFAULTS[kind] | config.data, error_type=config.error_type)
    for field in ("quantization_config", "rope_scaling", "rope_parameters"):
        config.part(field)
    layers, hidden, heads = map(config.whole, ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if layers > MOST_LAYERS:
        raise config.bad("num_hidden_layers", f"a whole number <= {MOST_LAYERS:,}")
    kv_heads = config.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": config.whole("head_dim", hidden // heads),
        **_experts(config, kind),
        "vocab": config.whole("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "qk_norm": kind in QK_NORMED,
        "qkv_bias": kind == "qwen2",
        "dtype": _dtype(config),
        **(config.checked(Quantized).quantization_config.types if config.data.get("quantization_config") else {}),
        "max_position": config.whole("max_position_embeddings"),
        **_attention(config, kind, layers),
    }


def _kind(config: Config) -> str:
    """Return the model type. Raises the error of `config` if it, or a field, says that the model is not supported."""
    kind = config.data.get("model_type")
    known = isinstance(kind, str) and kind in DEFAULTS
    for pattern, reason in UNSUPPORTED.items():
        for field, value in config.data.items():
            if re.fullmatch(pattern, field) and value not in (None, False, [], {}):
                wrong = f"{field}: {shown(value)} is not supported" if known else f"model_type {kind}"
                raise config.error(f"{config.file}: {wrong}: {reason}", (field if known else "model_type",), reason)
    if not isinstance(kind, str) or not known:
        raise config.bad("model_type", f"a supported model: {', '.join(sorted(DEFAULTS))}")
    return kind


def _attention(config: Config, kind: str, layers: int) -> dict[str, Any]:
    """Return `attention`, one period of its pattern, unless all layers see the whole sequence; else nothing."""
    most = config.whole("max_position_embeddings")
    window, usual = _windows(config, kind, layers, most)
    types = config.data.get("layer_types") or usual
    if not isinstance(types, list) or len(types) != layers or any(one not in (SLIDING, WHOLE) for one in types):
        raise config.bad("layer_types", f"{layers} times '{WHOLE}' or '{SLIDING}', the supported kinds")
    if window >= most or SLIDING not in types:
        return {}
    if kind not in WINDOWED:
        raise config.bad("sliding_window", f"null: layers of model_type {kind} have no windows")
    return {"attention": _repeated([f"sliding {window}" if one == SLIDING else "full" for one in types])}


def _windows(config: Config, kind: str, layers: int, most: int) -> tuple[int, list[str]]:
    """Return a window's tokens, and the default of `layer_types`. Qwen's are off unless switched on; null is none."""
    if kind.startswith("qwen"):
        first = config.whole("max_window_layers", 28, 0)
        window = config.whole("sliding_window", 4096) if config.flag("use_sliding_window") else most
        return window, [SLIDING if layer >= first else WHOLE for layer in range(layers)]
    if kind.startswith("gemma3"):
        pattern = config.whole("sliding_window_pattern")
        types = [SLIDING if (layer + 1) % pattern else WHOLE for layer in range(layers)]
        return config.whole("sliding_window"), types
    return config.whole("sliding_window", most), [SLIDING] * layers


def _repeated(pattern: list[str]) -> list[str]:
    """Return the shortest beginning that, repeated, gives the whole."""
    sizes = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in sizes if all(one == pattern[i % n] for i, one in enumerate(pattern)))


def _experts(config: Config, kind: str) -> dict[str, int]:
    """Return the width of the feed-forward layers, and the numbers of experts if the model has experts."""
    if kind not in MIXTURES:
        return {"intermediate": config.whole("intermediate_size")}
    if config.whole("decoder_sparse_step", 1) != 1:
        raise config.bad("decoder_sparse_step", "1: a mixture must have experts in every layer")
    width, experts, chosen = map(config.whole, (*MIXTURES[kind], "num_experts_per_tok"))
    if chosen > experts:
        raise config.bad("num_experts_per_tok", f"a number <= {MIXTURES[kind][1]}, {experts}")
    return {"intermediate": width, "experts": experts, "experts_per_token": chosen}


def _dtype(config: Config) -> str:
    """Return `dtype` of transformers 5 or `torch_dtype` of older versions; bfloat16 if neither is present."""
    field = "dtype" if config.data.get("dtype") is not None else "torch_dtype"
    value = config.data.get(field)
    if value is not None and value not in DTYPES:
        raise config.bad(field, f"one of {', '.join(DTYPES)}")
    return value or "bfloat16"


def _name(path: Path) -> str:
    """Return the folder's name; in a Hugging Face cache, models--WHO--NAME/snapshots/COMMIT, the repository's."""
    folder = path.absolute().parent  # not resolved: the cache's files are links
    if path.name != "config.json":
        return path.stem
    return folder.parent.parent.name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name or "model"


LEFT = re.compile(
    r"""(re:)?(.*[.*])?(lm_head|embed_tokens|e_score_correction_bias|\w*norm)\$?
    | (?!re:)(.*\.)?gate | re:.*gate\$  # without the $ it is gate_proj, too
    | .*(vision|visual|multi_modal).*          # not counted at all""",
    re.VERBOSE,
)
"""Names of modules that a shape leaves in the model's dtype: those that are no matrix of a layer, and the router."""


def _outside_layers(name: str) -> str:
    if not LEFT.fullmatch(name):
        allowed = "the output layer, embeddings, norms and what chooses experts: the layers' matrices have one type"
        raise complaint(f"got {shown(name)}, expected only {allowed}")
    return name


Left = list[Annotated[str, AfterValidator(_outside_layers)]] | None
Empty = Annotated[dict[str, Any], Field(max_length=0)] | None


class Fp8(Form):
    """An fp8 scheme: weights and activations of 8 bits, a scale a tensor or a block; the scales are not counted."""

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3", "float8_e4m3fn"] | None = None
    activation_scheme: Literal["dynamic", "static"]
    modules_to_not_convert: Left = None
    weight_block_size: Any = None

    @property
    def types(self) -> dict[str, str]:
        return {"weights_dtype": "fp8_block" if self.weight_block_size else "fp8"}


class Int4(Form):
    """A GPTQ or AWQ scheme: weights of 4 bits."""

    quant_method: Literal["gptq", "awq"]
    bits: Literal[4]
    group_size: Literal[128]
    lm_head: Literal[False] | None = None
    dynamic: Empty = None
    modules_to_not_convert: Left = None

    @property
    def types(self) -> dict[str, str]:
        return {"weights_dtype": "int4"}


class Float8(Form):
    """A floating-point type of 8 bits."""

    type: Literal["float"]
    num_bits: Literal[8]


class Whole4(Form):
    """A whole-number type of 4 bits, for weights in groups of 128."""

    type: Literal["int"]
    num_bits: Literal[4]
    group_size: Literal[128]


class Scheme(Form):
    """A scheme of all linear layers: fp8 weights and activations, or int4 weights alone."""

    targets: Annotated[list[Literal["Linear"]], Field(min_length=1, max_length=1)]
    weights: Annotated[Float8 | Whole4, By("type")]
    input_activations: Float8 | None = None

    @model_validator(mode="after")
    def _both_or_weights_alone(self) -> Scheme:
        if isinstance(self.weights, Float8) != (self.input_activations is not None):
            needed = "8 bits of type float, as the weights" if isinstance(self.weights, Float8) else "none beside int4"
            inputs = self.input_activations.model_dump() if self.input_activations else None
            raise complaint(f"got {shown(inputs)}, expected {needed}", "input_activations")
        return self


class Compressed(Form):
    """The compressed-tensors of vLLM's own compressor: one scheme for all linear layers."""

    quant_method: Literal["compressed-tensors"]
    ignore: Left = None
    sparsity_config: Empty = None
    config_groups: Annotated[dict[str, Scheme], Field(min_length=1, max_length=1)]
    kv_cache_scheme: Float8 | None = None

    @property
    def types(self) -> dict[str, str]:
        (scheme,) = self.config_groups.values()
        weights = {"weights_dtype": "fp8" if isinstance(scheme.weights, Float8) else "int4"}
        return weights | ({"kv_dtype": "fp8"} if self.kv_cache_scheme else {})


class Quantized(Form):
    """The quantization of a config.json. Anything not modelled is an error."""

    quantization_config: Annotated[Fp8 | Compressed | Int4, By("quant_method")]
