"""Types of weights and cache that the `quantization_config` of a config.json says. What is not modelled is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cbsim.scenario.config import Config
from cbsim.scenario.errors import UserError
from cbsim.scenario.fields import either, shown

GROUP = 128
LEFT = re.compile(
    r"""(re:)?(.*[.*])?(lm_head|embed_tokens|\w*norm)\$?
    | (?!re:)(.*\.)?gate | re:.*gate\$  # without the $ it is gate_proj, too
    | .*(vision|visual|multi_modal).*          # not counted at all""",
    re.VERBOSE,
)
"""Names of modules that a shape leaves in the model's dtype: what is no matrix of a layer, and what chooses experts."""
KEPT = "the output layer, embeddings, norms and what chooses experts: the layers' matrices have one type"
ALONE = "no other quantization is modelled"


def types(config: Config) -> dict[str, Any]:
    """weights_dtype, and kv_dtype if it is quantized too; nothing for a model that is not. Raises config's error."""
    part = config.part("quantization_config")
    if part is None:
        return {}
    method = part.fields.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise part.refuse("quant_method", f"one of {', '.join(METHODS)}: {ALONE}")
    return METHODS[method](part)


def _fp8(part: Config) -> dict[str, Any]:
    """Weights and activations of 8 bits, with a scale a tensor or a block: the scales are not counted."""
    _only(part, "fmt", ("e4m3", None))
    _only(part, "activation_scheme", ("dynamic", "static"))
    _check_left(part, "modules_to_not_convert")
    return {"weights_dtype": "fp8_block" if part.fields.get("weight_block_size") else "fp8"}


def _int4(part: Config) -> dict[str, Any]:
    """GPTQ and AWQ."""
    _only(part, "bits", (4,))
    _only(part, "group_size", (GROUP,))
    _only(part, "lm_head", (False, None))
    _only(part, "dynamic", ({}, None))
    _check_left(part, "modules_to_not_convert")
    return {"weights_dtype": "int4"}


def _compressed(part: Config) -> dict[str, Any]:
    """The compressed-tensors of vLLM's own compressor: one scheme for all linear layers."""
    _check_left(part, "ignore")
    _only(part, "sparsity_config", ({}, None))
    groups = part.part("config_groups")
    if groups is None or len(groups.fields) != 1:
        raise part.refuse("config_groups", f"one group: {ALONE}")
    (name,) = groups.fields
    group = groups.part(name)
    if group is None:
        raise groups.refuse(name, "an object")
    _only(group, "targets", (["Linear"],))
    cache = part.part("kv_cache_scheme")
    if cache is not None:
        _only(cache, "type", ("float",))
        _only(cache, "num_bits", (8,))
    return {"weights_dtype": _scheme(group), **({"kv_dtype": "fp8"} if cache else {})}


def _scheme(group: Config) -> str:
    """fp8 weights and activations, or int4 weights alone."""
    weights, inputs = group.part("weights"), group.part("input_activations")
    if weights is None:
        raise group.refuse("weights", "an object")
    _only(weights, "type", ("float", "int"))
    if weights.fields["type"] == "int":
        _only(weights, "num_bits", (4,))
        _only(weights, "group_size", (GROUP,))
        _only(group, "input_activations", (None,))
        return "int4"
    _only(weights, "num_bits", (8,))
    if inputs is None:
        raise group.refuse("input_activations", f"8 bits of type float: {ALONE}")
    _only(inputs, "type", ("float",))
    _only(inputs, "num_bits", (8,))
    return "fp8"


METHODS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _int4,
    "awq": _int4,
}


def _only(part: Config, field: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a field that is none of `allowed`; None allows that it is absent."""
    if part.fields.get(field) not in allowed:
        raise part.refuse(field, f"{either([shown(value) for value in allowed])}: {ALONE}")


def _check_left(part: Config, field: str) -> None:
    """Refuse a list of modules that are not quantized if a matrix of a layer is among them."""
    names = part.fields.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise part.refuse(field, "a list of names")
    for name in names:
        if not LEFT.fullmatch(name):
            raise _within(part, field, name)


def _within(part: Config, field: str, name: str) -> UserError:
    bound = f"expected only {KEPT}"
    return part.error(f"{part.where}: {field}: got {shown(name)}, {bound}", field=field, value=name, bound=bound)
