"""A model's shape from the config.json of Hugging Face's transformers. Anything not modelled is an error by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf, prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from cbsim.files import read_json
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import LARGEST_WHOLE, By, Form, Many, complaint, shown
from cbsim.scenario.layers import MOST_LAYERS

MOST_BYTES = 1_000_000
WHOLE, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
DTYPES = ("bfloat16", "float16", "float32")

INNER, MOE, LOCAL, EXPERTS = "intermediate_size", "moe_intermediate_size", "num_local_experts", "num_experts"
WINDOW, CHUNK, EVERY, BIAS = "sliding_window", "attention_chunk_size", "sliding_window_pattern", "attention_bias"


class Family(NamedTuple):
    """What differs between model types: names of fields, and transformers' defaults of absent ones."""

    absent: dict[str, Any]
    reads: tuple[str, ...] = ()  #: Fields that are modelled for this type, and refused for others.
    width: str = INNER  #: Width of an expert.
    experts: str = ""  #: Experts of a layer; "": there are none.
    chosen: str = "num_experts_per_tok"
    beside: tuple[str, ...] = ()  #: Fields whose product is the width of what every token goes through.
    dense: str = INNER  #: Width of layers without experts.
    window: str = ""  #: Tokens that a layer sees, if not all do.
    every: str = ""  #: One layer in so many sees everything.
    qk_norm: bool | str = False
    qkv_bias: bool | str = False
    sinks: bool = False
    linear: str = ""  #: Rule of linear attention, in the layers that have it.
    names: dict[str, str] = {}  #: Names that this type has for fields.  # noqa: RUF012


EIGHT = {"num_key_value_heads": 8}
QWEN = {"num_key_value_heads": 32, WINDOW: 4096, "max_window_layers": 28, "use_sliding_window": False}
MIXED = ROUTED, SHARED, FIRST = "n_routed_experts", "n_shared_experts", "first_k_dense_replace"
GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, EVERY: 6}
GEMMA3 |= {"max_position_embeddings": 131_072, "tie_word_embeddings": True, WINDOW: 4096}
GEMMA4 = GEMMA3 | {"vocab_size": 262_144, WINDOW: 512, "global_head_dim": 512, "hidden_size_per_layer_input": 256}
WIDE = ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "enable_moe_block", EXPERTS)
MIXTRAL = Family(EIGHT, (LOCAL,), experts=LOCAL, window=WINDOW)
DEEPSEEK = Family({SHARED: 1, FIRST: 3}, ("kv_lora_rank", "q_lora_rank", *MIXED), MOE, ROUTED, beside=(SHARED, MOE))
INDEX = {"heads": "index_n_heads", "head_dim": "index_head_dim", "top_k": "index_topk"}
SPARSE = DEEPSEEK._replace(
    absent={SHARED: 1, FIRST: 3, **dict(zip(INDEX.values(), (64, 128, 2048), strict=True))},
    reads=(*DEEPSEEK.reads, *INDEX.values()),
)
GLM4 = DEEPSEEK._replace(absent=EIGHT | {SHARED: 1, FIRST: 1}, reads=(*MIXED, BIAS))
GPT_OSS = MIXTRAL._replace(absent=EIGHT | {"head_dim": 64, BIAS: True, EVERY: 2}, reads=(LOCAL, BIAS), sinks=True)
GATE, SHARED_WIDTH = "attn_output_gate", "shared_expert_intermediate_size"
HYBRID = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, GATE: True}
HYBRID |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
HYBRIDS = Family(
    HYBRID | {"num_key_value_heads": 2, "head_dim": 256, SHARED_WIDTH: 512},
    (*HYBRID, "mamba_ssm_dtype", EXPERTS, "mlp_only_layers", SHARED_WIDTH),
    MOE, EXPERTS, beside=(SHARED_WIDTH,), every="full_attention_interval", qk_norm=True, linear="gated_delta",
)  # fmt: skip
BLOCKS = ("hybrid_override_pattern", "layers_block_type")
BLOCK = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}  # what letters of the pattern stand for
MAMBA2 = {"key_heads": "n_groups", "value_heads": "mamba_num_heads", "key_dim": "ssm_state_size"}
MAMBA2 |= {"value_dim": "mamba_head_dim", "conv": "conv_kernel"}
FAMILIES = {
    "deepseek_v2": DEEPSEEK._replace(absent={SHARED: 2, FIRST: 0}),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": SPARSE,
    "gemma3": Family(GEMMA3, window=WINDOW, every=EVERY, qk_norm=True),
    "gemma4": Family(GEMMA4, WIDE, MOE, EXPERTS, "top_k_experts", (INNER,), INNER, WINDOW, EVERY, True),
    "glm4_moe": GLM4._replace(qk_norm="use_qk_norm", qkv_bias=BIAS),
    "glm_moe_dsa": SPARSE._replace(absent=SPARSE.absent | {INDEX["heads"]: 32}),
    "gpt_oss": GPT_OSS._replace(every=EVERY, qkv_bias=BIAS),
    "granitemoe": MIXTRAL._replace(absent={}, window=""),
    "kimi_k2": DEEPSEEK,
    "kimi_k25": DEEPSEEK,
    "kimi_linear": DEEPSEEK._replace(
        absent={"num_shared_experts": 1, FIRST: 1}, experts=EXPERTS, chosen="num_experts_per_token", linear="kda",
        reads=("kv_lora_rank", "q_lora_rank", EXPERTS, "num_shared_experts", FIRST, "linear_attn_config"),
        beside=("num_shared_experts", MOE), names={"model_max_length": "max_position_embeddings"},
    ),
    "llama": Family({}),
    "llama4": MIXTRAL._replace(
        absent=EIGHT | {CHUNK: 8192, "no_rope_layer_interval": 4}, reads=(LOCAL, CHUNK, "moe_layers"), beside=(INNER,),
        dense="intermediate_size_mlp", window=CHUNK, every="no_rope_layer_interval",
    ),
    "minimax_m2": MIXTRAL._replace(window="", qk_norm=True),
    "mistral": Family(EIGHT | {WINDOW: 4096}, window=WINDOW),
    "mixtral": MIXTRAL,
    "nemotron_h": Family(
        {"head_dim": 128, "conv_kernel": 4, "n_groups": 8, "ssm_state_size": 128, "mamba_ssm_cache_dtype": "float32"},
        (*BLOCKS, *MAMBA2.values(), "mamba_ssm_cache_dtype", "mamba_hidden_act", ROUTED, SHARED),
        MOE, ROUTED, beside=(SHARED, "moe_shared_expert_intermediate_size"), linear="mamba2",
    ),
    "olmoe": Family({}, (EXPERTS,), experts=EXPERTS, qk_norm=True),
    "phi3": Family({}, window=WINDOW),
    "qwen2": Family(QWEN, window=WINDOW, qkv_bias=True),
    "qwen3": Family(QWEN | {"head_dim": 128}, window=WINDOW, qk_norm=True),
    "qwen3_moe": Family(
        QWEN | {"num_key_value_heads": 4}, (EXPERTS, "mlp_only_layers"), MOE, EXPERTS, window=WINDOW, qk_norm=True
    ),
    "qwen3_5": HYBRIDS._replace(
        absent=HYBRID | {"num_key_value_heads": 4, "head_dim": 256}, reads=(*HYBRID, "mamba_ssm_dtype"), experts="",
    ),
    "qwen3_5_moe": HYBRIDS,
    "qwen3_next": HYBRIDS,
}  # fmt: skip
"""The supported model types."""
FAMILIES |= {f"{kind}_text": FAMILIES[kind] for kind in ("gemma3", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe")}
UNSUPPORTED = {
    "is_encoder_decoder": "encoders are not modelled, only decoders",
    "compress_.*": "compressed attention is not modelled",
    "index_topk_.*|index_skip_.*": "indexers that layers share are not modelled",
    "index_.*|sparse_attention_config": "sparse attention is not modelled",
    "linear_.*|attn_type_list|full_attention_interval": "this linear attention is not modelled",
    "mamba_.*|ssm_.*|state_size|hybrid_override_pattern|layers_block_type": "these Mamba layers are not modelled",
    "(routed_expert|moe_latent)_.*|latent_moe_.*": "a latent of experts is not modelled",
    "(add_)?cross_attention(_layers)?": "cross-attention is not modelled",
    "(attn|attention|mla_use)_output_gate": "gates of attention's output are not modelled",
    "hidden_size_per_layer_input|num_kv_shared_layers|use_double_wide_mlp": "Gemma's small models are not modelled",
    "per_layer_config": "only global_head_dim and num_global_key_value_heads are read",
    "(vision|audio)_config": "of several media only the text model is modelled, and there is no text_config",
    "(attention|mlp|lm_head)_bias": "only biases of queries, keys and values are modelled",
    "use_bidirectional_attention": "only causal attention is modelled",
    "compression_config": "read the original's config.json, and set the model's types in the scenario",
    "(kv|q)_lora_rank": "this model type has no latent attention",
    "(n|num)_shared_experts|(shared_expert|shared)_intermediate_size": "this model type has no shared experts",
    "(num|num_local|n_routed)_experts|enable_moe_block": "this model type has no experts of that name",
    "mlp_only_layers|first_k_dense_replace|moe_layers": "a mixture of this type has experts in every layer",
    "attention_chunk_size|(num_)?global_.*|attention_k_eq_v": "this model type has one kind of attention",
}
"""Patterns of fields that must be absent, null, false, 0 or empty, unless the family reads them, with the reason."""
NOTHING: tuple[Any, ...] = (None, False, [], {}, "vision")  # bidirectional "vision": among the tokens of an image


class Config(Document):
    """The fields of a JSON object in a file, read by the type that each must have. Null counts as absent."""

    def whole(self, field: str, default: int | None = None, least: int = 1) -> int:
        bound = f"a whole number >= {least} and <= {LARGEST_WHOLE:,}"
        number: int = self._given(field, default, bound, lambda v: type(v) is int and least <= v <= LARGEST_WHOLE)
        return number

    def real(self, field: str, default: float | None = None) -> float:
        return float(self._given(field, default, "a number > 0", lambda v: type(v) in (int, float) and 0 < v < inf))

    def flag(self, field: str | bool) -> bool:
        if isinstance(field, bool):
            return field  # known without the file
        return self._given(field, False, "true or false", lambda v: isinstance(v, bool)) is True

    def wholes(self, field: str) -> list[int]:
        fits = lambda v: isinstance(v, list) and all(type(one) is int for one in v)  # noqa: E731
        return list(self._given(field, [], "a list of whole numbers", fits))

    def dtype(self, field: str) -> str | None:
        name: str | None = self._given(field, None, f"one of {', '.join(DTYPES)}", lambda v: v in (None, *DTYPES))
        return name

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
    family = _family(config)
    given = family.absent | {family.names.get(field, field): value for field, value in config.data.items()}
    given |= _blocks(config) if BLOCKS[0] in family.reads else {}
    config = Config(config.file, None, given, error_type=config.error_type)
    for field in ("quantization_config", "rope_scaling", "rope_parameters"):
        config.part(field)
    layers = config.whole("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise config.bad("num_hidden_layers", f"a whole number <= {MOST_LAYERS:,}")
    fields = {
        "layers": layers,
        "hidden": config.whole("hidden_size"),
        **_heads(config, family),
        **_feed_forward(config, family, layers),
        "vocab": config.whole("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "qk_norm": config.flag(family.qk_norm),
        "qkv_bias": config.flag(family.qkv_bias),
        **({"sinks": True} if family.sinks else {}),
        "dtype": config.dtype("dtype") or config.dtype("torch_dtype") or "bfloat16",  # that of older versions
        "max_position": config.whole("max_position_embeddings"),
        **_attention(config, family, layers),
    }
    return fields | (_types(config, fields) if config.data.get("quantization_config") else {})


def _family(config: Config) -> Family:
    """Return the family of the model type. Raises the error of `config` if it, or a field, is not supported."""
    kind = config.data.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    modelled = family.reads if family else {field for each in FAMILIES.values() for field in each.reads}
    given = (family.absent if family else {}) | config.data
    for pattern, reason in UNSUPPORTED.items():
        for field, value in given.items():
            if re.fullmatch(pattern, field) and value not in NOTHING and field not in modelled:
                wrong = f"{field}: {shown(value)} is not supported" if family else f"model_type {kind}"
                raise config.error(f"{config.file}: {wrong}: {reason}", (field if family else "model_type",), reason)
    if family is None:
        raise config.bad("model_type", f"a supported model: {', '.join(sorted(FAMILIES))}")
    return family


def _blocks(config: Config) -> dict[str, Any]:
    """Return attention and feed-forward part of each layer, if a config lists blocks of one part each."""
    blocks = config.data.get(BLOCKS[1]) or [BLOCK.get(one) for one in str(config.data.get(BLOCKS[0]))]
    types, kinds = list[str](), list[str]()
    for block in blocks if isinstance(blocks, list) else [None]:
        if block in ("mamba", "attention"):
            types.append(LINEAR if block == "mamba" else WHOLE)
            kinds.append("none")
        elif block in ("moe", "mlp") and kinds and kinds[-1] == "none":
            kinds[-1] = "experts" if block == "moe" else "dense"
        else:
            raise config.bad(BLOCKS[0], "M, * and behind each of them at most one of E and -")
    return {"layer_types": types, "num_hidden_layers": len(types), "feed_forward": kinds}


def _heads(config: Config, family: Family) -> dict[str, Any]:
    """Return the numbers and widths of heads; of latent attention those of what is cached."""
    heads = config.whole("num_attention_heads")
    if "kv_lora_rank" in family.reads:
        latent = dict[str, Any](query_rank=config.whole("q_lora_rank", 0, 0), kv_rank=config.whole("kv_lora_rank"))
        latent |= {f"{part}_dim": config.whole(f"qk_{part}_head_dim") for part in ("nope", "rope")}
        latent |= {"value_dim": config.whole("v_head_dim")}
        if INDEX["heads"] in family.reads:
            if {*map(str, config.data.get("indexer_types") or ())} - {"full"}:
                raise config.bad("indexer_types", "full only: indexers that layers share are not modelled")
            latent["indexer"] = {field: config.whole(name) for field, name in INDEX.items()}
        return {"heads": heads, "kv_heads": 1, "head_dim": latent["kv_rank"] + latent["rope_dim"], "latent": latent}
    kv_heads = config.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    width = config.whole("head_dim", config.whole("hidden_size") // heads)
    fields: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": width}
    if GATE in family.reads:
        fields["output_gate"] = config.flag(GATE)
    if "global_head_dim" in family.reads:
        one = config.flag("attention_k_eq_v")
        wide = config.whole("num_global_key_value_heads", kv_heads) if one else kv_heads
        fields["full_heads"] = {"kv_heads": wide, "head_dim": config.whole("global_head_dim"), "keys_are_values": one}
    return fields


def _attention(config: Config, family: Family, layers: int) -> dict[str, Any]:
    """Return `attention`, one period of its pattern, unless all layers see the whole sequence; else nothing; and what
    is linear.
    """
    part = LINEAR if family.linear else CHUNKED if family.window == CHUNK else SLIDING
    types = config.data.get("layer_types")
    types = _usual(config, family, layers, part) if types in (None, []) else types
    if INDEX["heads"] in family.reads and types == ["deepseek_sparse_attention"] * layers:
        return {}
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {part, WHOLE}:
        raise config.bad("layer_types", f"{layers} times '{WHOLE}' or '{part}', the supported kinds")
    seen = "linear" if part == LINEAR else _window(config, family, part, used=part in types)
    if part not in types or seen is None:
        return {}
    linear = {"linear": {"rule": family.linear} | _linear(config, family)} if part == LINEAR else {}
    return {"attention": _repeated([seen if one == part else "full" for one in types])} | linear


def _window(config: Config, family: Family, part: str, *, used: bool) -> str | None:
    """Return what layers with windows see; None if there are none, or the window holds every sequence."""
    most = config.whole("max_position_embeddings")
    on = "use_sliding_window" not in config.data or config.flag("use_sliding_window")
    window = config.whole(family.window or WINDOW, most) if on else most
    if not used or (window >= most and "global_head_dim" not in family.reads):
        return None
    if not family.window:
        raise config.bad(WINDOW, f"null: layers of model_type {config.data['model_type']} have no windows")
    return f"{part.partition('_')[0]} {window}"


def _linear(config: Config, family: Family) -> dict[str, Any]:
    """Return the widths of linear attention."""
    if family.linear == "kda":
        of = _of_kda(config)
        heads, width, conv = map(of.whole, ("num_heads", "head_dim", "short_conv_kernel_size"))
        return {"key_heads": heads, "value_heads": heads, "key_dim": width, "value_dim": width, "conv": conv}
    if family.linear == "mamba2":
        state = {"state_dtype": config.dtype("mamba_ssm_cache_dtype")}
        return {name: config.whole(field) for name, field in MAMBA2.items()} | state
    names = {"conv": "conv_kernel_dim", "key_dim": "key_head_dim", "value_dim": "value_head_dim"}
    names |= {f"{part}_heads": f"num_{part}_heads" for part in ("key", "value")}
    state = {"state_dtype": config.dtype("mamba_ssm_dtype")}
    return {name: config.whole(f"linear_{field}") for name, field in names.items()} | state


def _of_kda(config: Config) -> Config:
    if (part := config.part("linear_attn_config")) is None:
        raise config.bad("linear_attn_config", "an object")
    return part


def _usual(config: Config, family: Family, layers: int, part: str) -> list[str]:
    """Return the default of `layer_types`: Qwen's first, one in so many, and Llama 4's without rotation see all."""
    if family.linear == "kda":
        whole = _of_kda(config).wholes("full_attn_layers")  # counted from 1
        return [WHOLE if at + 1 in whole else part for at in range(layers)]
    first, every = config.whole("max_window_layers", 0, 0), config.whole(family.every) if family.every else layers + 1
    if part == CHUNKED and (rotated := config.wholes("no_rope_layers")):
        if len(rotated) < layers:
            raise config.bad("no_rope_layers", f"a number for each of {layers} layers")
        return [part if one else WHOLE for one in rotated[:layers]]
    return [part if at >= first and (at + 1) % every else WHOLE for at in range(layers)]


def _repeated(pattern: list[str]) -> list[str]:
    """Return the shortest beginning that, repeated, gives the whole."""
    sizes = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in sizes if all(one == pattern[i % n] for i, one in enumerate(pattern)))


def _feed_forward(config: Config, family: Family, layers: int) -> dict[str, Any]:
    """Return the width of the feed-forward layers; of a mixture its experts, what is beside them, and dense layers."""
    if not family.experts or ("enable_moe_block" in family.reads and not config.flag("enable_moe_block")):
        return {"intermediate": config.whole(family.dense)}
    width, experts, chosen = map(config.whole, (family.width, family.experts, family.chosen))
    if chosen > experts:
        raise config.bad(family.chosen, f"a number <= {family.experts}, {experts}")
    fields: dict[str, Any] = {"intermediate": width, "experts": experts, "experts_per_token": chosen}
    if family.beside:
        fields["shared_intermediate"] = prod(config.whole(field, 0, 0) for field in family.beside)
    kinds = _kinds(config, layers)
    if "experts" not in kinds:
        raise config.bad("num_hidden_layers", "more layers than dense ones: none has experts")
    if {*kinds} != {"experts"}:
        first = kinds.index("experts")
        plain = kinds == ["dense"] * first + ["experts"] * (layers - first)
        fields |= {"first_dense": first} if plain else {"feed_forward": _repeated(kinds)}
    if "dense" in kinds:
        fields["dense_intermediate"] = config.whole(family.dense)
    return fields | ({"gated": False} if BLOCKS[0] in family.reads else {})


def _kinds(config: Config, layers: int) -> list[str]:
    """Return which layers are dense: the first, those listed, all but one in so many, or all but those listed."""
    if (stated := config.data.get("feed_forward")) is not None:
        return list(stated)
    if config.data.get("moe_layer_freq") not in (None, 1):
        raise config.bad("moe_layer_freq", "1: after the first layers all must have experts")
    step = max(config.whole(field, 1) for field in ("decoder_sparse_step", "interleave_moe_layer_step"))
    mixed = set(config.wholes("moe_layers") or range(step - 1, layers, step)) - set(config.wholes("mlp_only_layers"))
    first = config.whole(FIRST, 0, 0)
    return ["experts" if at >= first and at in mixed else "dense" for at in range(layers)]


def _name(path: Path) -> str:
    """Return the folder's name; in a Hugging Face cache, models--WHO--NAME/snapshots/COMMIT, the repository's."""
    folder = path.absolute().parent  # not resolved: the cache's files are links
    if path.name != "config.json":
        return path.stem
    return folder.parent.parent.name.split("--")[-1] if folder.parent.name == "snapshots" else folder.name or "model"


LEFT = re.compile(
    r"""(re:)?(.*[.*])?(lm_head|embed_tokens|e_score_correction_bias|\w*norm|router)\$?
    | (re:)?(.*[.*])?(shared_expert_gate|linear_attn\\?\.(conv1d|in_proj_(ba?|a)))\$? | (re:)?mtp.*  # of a few columns
    | (?!re:)(.*\.)?gate | re:.*gate\$  # without the $ it is gate_proj, too
    | .*(vision|visual|multi_modal).*          # not counted at all""",
    re.VERBOSE,
)
"""Names of modules that a shape leaves in the model's dtype: those that are no matrix of a layer, and the router."""
PARTS = re.compile(
    r"""(re:)?(.*?[.*])?(layers\\?\.(?P<layer>\d+)\\?\.)?((?P<attention>self_attn)|(?P<linear>linear_attn)|(mlp\\?\.)?(?P<shared>shared_experts?)
    |mlp\\?\.(?P<dense>\(gate\|up\|gate_up\|down\))_proj)[.*$]*""",
    re.VERBOSE,
)
"""Names of the matrices that a shape can leave in the model's dtype: of attention, shared experts or dense layers."""


def _part(name: str) -> tuple[str, int | None] | None:
    """Return the part of a layer, and the layer unless it is all, that a name leaves as it is; None: no matrix."""
    if LEFT.fullmatch(name):
        return None
    if found := re.fullmatch(r".*layers\.(\d+)\*", name):
        return "layer", int(found[1])
    if (found := PARTS.fullmatch(name)) is None:
        allowed = "the output layer, embeddings, norms, what chooses experts, and all of attention, shared experts"
        raise complaint(f"got {shown(name)}, expected only {allowed} or dense layers")
    part = next(part for part in ("attention", "linear", "shared", "dense") if found[part])
    return part, int(found["layer"]) if found["layer"] else None


Left = list[Annotated[str, AfterValidator(_part)]] | None
Empty = Annotated[dict[str, Any], Field(max_length=0)] | None


class Quantization(Form):
    """Modules that keep the model's dtype, by the names that tools have for them."""

    modules_to_not_convert: Left = None
    ignore: Left = None
    ignored_layers: Left = None
    exclude_modules: Left = None

    def left(self, layers: int, *, hybrid: bool) -> dict[str, set[int | None]]:
        """Return the layers whose parts keep the model's dtype, by part; None stands for all. Layers beyond `layers`
        are not loaded. Of a `hybrid` both kinds of attention are one part: all of a kind is not all.
        """
        given: tuple[Any, ...] = (self.modules_to_not_convert, self.ignore, self.ignored_layers, self.exclude_modules)
        left = {one for names in given for one in names or () if one and (one[1] is None or one[1] < layers)}
        found = {part: {layer for name, layer in left if name == part} for part, _ in left}
        of, linear = found.get("attention", set()), found.pop("linear", set())
        if hybrid and (of or linear):
            found["attention"] = of | linear if (None in of) == (None in linear) else {0}
        return found


class Fp8(Quantization):
    """An fp8 scheme: weights and activations of 8 bits, a scale a tensor or a block; the scales are not counted."""

    quant_method: Literal["fp8"]
    fmt: Literal["e4m3", "float8_e4m3fn"] | None = None
    activation_scheme: Literal["dynamic", "static"]
    weight_block_size: Annotated[Many[Literal[128]], Field(min_length=2, max_length=2)] | None = None

    @property
    def types(self) -> dict[str, str]:
        return {"weights_dtype": "fp8_block" if self.weight_block_size else "fp8"}


class Int4(Quantization):
    """A GPTQ or AWQ scheme: weights of 4 bits."""

    quant_method: Literal["gptq", "awq"]
    bits: Literal[4]
    group_size: Literal[128]
    lm_head: Literal[False] | None = None
    dynamic: Empty = None
    types: ClassVar = {"weights_dtype": "int4"}


class Mxfp4(Quantization):
    """MXFP4 of the experts alone (gpt-oss)."""

    quant_method: Literal["mxfp4"]
    types: ClassVar = {"experts_dtype": "mxfp4"}


class Float8(Form):
    """A floating-point type of 8 bits."""

    type: Literal["float"]
    num_bits: Literal[8]


class Modelopt(Quantization):
    """A scheme of NVIDIA's Model Optimizer."""

    quant_method: Literal["modelopt"]
    quant_algo: Literal["NVFP4", "FP8"]
    kv_cache_scheme: Float8 | None = None

    @property
    def types(self) -> dict[str, str]:
        cache = {"kv_dtype": "fp8"} if self.kv_cache_scheme else {}
        return {"weights_dtype": self.quant_algo.lower()} | cache


class Whole4(Form):
    """A whole-number type of 4 bits, for weights in groups of 128 or 32."""

    type: Literal["int"]
    num_bits: Literal[4]
    group_size: Literal[128, 32]


class Scheme(Form):
    """A scheme of all linear layers: fp8 weights and activations, or int4 weights alone."""

    targets: Annotated[list[Literal["Linear"]], Field(min_length=1, max_length=1)]
    weights: Annotated[Float8 | Whole4, By("type")]
    input_activations: Float8 | None = None

    @model_validator(mode="after")
    def _both_or_weights_alone(self) -> Self:
        if isinstance(self.weights, Float8) != (self.input_activations is not None):
            needed = "8 bits of type float, as the weights" if isinstance(self.weights, Float8) else "none beside int4"
            inputs = self.input_activations.model_dump() if self.input_activations else None
            raise complaint(f"got {shown(inputs)}, expected {needed}", "input_activations")
        return self


class Compressed(Quantization):
    """The compressed-tensors of vLLM's own compressor: one scheme for all linear layers."""

    quant_method: Literal["compressed-tensors"]
    sparsity_config: Empty = None
    config_groups: Annotated[dict[str, Scheme], Field(min_length=1, max_length=1)]
    kv_cache_scheme: Float8 | None = None

    @property
    def types(self) -> dict[str, str]:
        (scheme,) = self.config_groups.values()
        whole = isinstance(scheme.weights, Whole4) and {128: "int4", 32: "int4_g32"}[scheme.weights.group_size]
        return {"weights_dtype": whole or "fp8"} | ({"kv_dtype": "fp8"} if self.kv_cache_scheme else {})


class Quantized(Form):
    """The quantization of a config.json. Anything not modelled is an error."""

    quantization_config: Annotated[Fp8 | Compressed | Int4 | Mxfp4 | Modelopt, By("quant_method")]


def _types(config: Config, fields: dict[str, Any]) -> dict[str, str]:
    """Return the types of matrices and cache of a shape with these fields. Raises the error of `config`."""
    scheme = config.checked(Quantized).quantization_config
    types, left, count = {**scheme.types}, scheme.left(fields["layers"], hybrid="linear" in fields), fields["layers"]
    if (narrow := types.pop("weights_dtype", None)) is None:
        return types
    first, dense = fields.get("first_dense", 0), fields.get("dense_intermediate", "experts" not in fields)
    numbers = {"attention": count, "shared": count - first, "dense": first or count, "layer": count}
    others = {part for part, size in (("shared", fields.get("shared_intermediate")), ("dense", dense)) if size}
    uneven = [part for part, layers in left.items() if None not in layers and len(layers) < numbers[part]]
    if uneven or others & left.keys() not in (set(), others):
        expected = "attention in all layers or none, and shared experts and dense layers with one type"
        raise config.bad("quantization_config", f"{expected}; left out: {', '.join(sorted(left))}")
    whole = {"attention_dtype": fields["dtype"]} if "attention" in left else {}
    if others - left.keys() or not (others or whole):
        return types | {"weights_dtype": narrow} | whole
    return types | {"experts_dtype": narrow} | ({} if whole else {"attention_dtype": narrow})
