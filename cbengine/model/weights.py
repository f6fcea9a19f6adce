"""Decoders of the Llama family: their architecture, and weights as Hugging Face names them, drawn or read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbengine.errors import UsageError
from cbengine.model.kvcache import DeviceMemoryError, free_bytes
from cbengine.model.ranks import ALONE, Rank
from cbsim import files
from cbsim.files import too_long
from cbsim.scenario import pretrained
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import shown
from cbsim.scenario.pretrained import Config
from cbsim.scenario.shapes import ModelShape

KINDS = ("llama", "mistral", "qwen2", "qwen3")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARPNESS = 1.5  # gain of random queries and keys; at 1 greedy texts repeat themselves, at 2 rounding decides them
READABLE = ("F64", "F32", "F16", "BF16")
MODELLED: dict[str, object] = {  # fields of config.json that must be absent, null or this
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretched rotary frequencies (`rope_type: llama3` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class Architecture(ModelShape):
    """A dense decoder: grouped-query attention with rotary positions, RMS norms, gated SiLU feed-forward. Defaults of
    fields that a scenario's shape lacks are those of a run without weights: unscaled rotary positions.
    """

    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    end_tokens: tuple[int, ...] = ()  # the ids that end a text


class WeightsError(UsageError):
    """An unusable folder of weights: the message names file, field or tensor, its value and what is expected."""


def expected(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, by name. Matrices are [outputs, inputs]; tied embeddings have no `lm_head`."""
    a = architecture
    queries, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    biases = {"self_attn.q_proj": (queries,), "self_attn.k_proj": (kv,), "self_attn.v_proj": (kv,)}
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (a.hidden,),
        "self_attn.q_proj": (queries, a.hidden),
        "self_attn.k_proj": (kv, a.hidden),
        "self_attn.v_proj": (kv, a.hidden),
        "self_attn.o_proj": (a.hidden, queries),
        **({"self_attn.q_norm": (a.head_dim,), "self_attn.k_norm": (a.head_dim,)} if a.qk_norm else {}),
        "post_attention_layernorm": (a.hidden,),
        "mlp.gate_proj": (a.intermediate, a.hidden),
        "mlp.up_proj": (a.intermediate, a.hidden),
        "mlp.down_proj": (a.hidden, a.intermediate),
    }
    return {
        "model.embed_tokens.weight": (a.vocab, a.hidden),
        **{f"model.layers.{i}.{part}.weight": shape for i in range(a.layers) for part, shape in layer.items()},
        **{f"model.layers.{i}.{part}.bias": biases[part] for i in range(a.layers * a.qkv_bias) for part in biases},
        "model.norm.weight": (a.hidden,),
        **({} if a.tied_embeddings else {"lm_head.weight": (a.vocab, a.hidden)}),
    }


def random(
    architecture: Architecture, seed: int, dtype: torch.dtype, device: torch.device, rank: Rank = ALONE
) -> dict[str, Tensor]:
    """Draw a rank's part of the weights that `expected` lists; each follows from the seed, its name and shape, and the
    kind of device, whatever the number of ranks. Raises DeviceMemoryError. Norms lie around 1, biases around 0. A
    matrix keeps the size of what it multiplies; those that end a branch are divided by the root of the number of
    branches, so that the residual stream ends at about 1 however deep the model is. Embeddings are small beside it,
    attention is sharp and biases are small, so greedy text follows from its context more than from its last token and
    does not repeat itself.
    """
    part = rank.part(architecture)
    _fits(part, dtype, device)
    tensors, shapes = {}, expected(part)
    for name, shape in expected(architecture).items():
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little", signed=True))
        mean, std = _spread(name, shape, 2 * architecture.layers)
        drawn = torch.empty(shape, dtype=dtype, device=device).normal_(mean, std, generator=generator)
        tensors[name] = rank.cut(drawn, shapes[name])
    return tensors


def _spread(name: str, shape: tuple[int, ...], branches: int) -> tuple[float, float]:
    """Return the mean and standard deviation of a tensor's values."""
    part, kind = name.split(".")[-2:]
    if kind == "bias":
        return 0.0, 0.1  # no text repeats itself; at 0.3 many with tied embeddings do
    gain = SHARPNESS if part in ("q_proj", "k_proj", "q_norm", "k_norm") else 1.0
    if len(shape) == 1:
        return gain, 0.1
    if part == "embed_tokens":
        gain = 0.5  # as a tied output layer it makes the last token likely again; twice this is enough to repeat it
    fan_in = shape[1] * branches if part in ("o_proj", "down_proj") else shape[1]
    return 0.0, gain * fan_in**-0.5


def _fits(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
    needed, free = architecture.parameters * dtype.itemsize, free_bytes(device)
    if free is not None and needed > free:
        weights = f"its weights take {needed:,} bytes, {free:,} are free on {device}"
        raise DeviceMemoryError(f"model {architecture.name}: {weights}")


def load(
    folder: Path, dtype: torch.dtype, device: torch.device, rank: Rank = ALONE
) -> tuple[Architecture, dict[str, Tensor]]:
    """Load a rank's part of a folder as transformers saves it, one file or many. Raises WeightsError,
    DeviceMemoryError.
    """
    described = architecture(folder)
    shapes, tensors = expected(described), {}
    files, part = _files(folder, described, shapes), rank.part(described)
    _fits(part, dtype, device)
    parts = expected(part)
    for path in sorted(set(files.values())):
        with _opened(path) as file:
            stored = set(file.keys())
            for name in [name for name in shapes if files[name] == path]:
                if name not in stored:
                    raise WeightsError(f"{path}: tensor {name} is missing, though {INDEX} says that it is here")
                _check(path, name, file.get_slice(name), shapes[name])
                tensors[name] = rank.cut(file.get_tensor(name), parts[name]).to(device=device, dtype=dtype)
    return described, {name: tensors[name] for name in shapes}


def _files(folder: Path, architecture: Architecture, shapes: dict[str, tuple[int, ...]]) -> dict[str, Path]:
    """Return the file of each tensor: all that are expected, and none that would be ignored."""
    source, files = _listed(folder)
    missing = [name for name in shapes if name not in files]
    if missing:
        more = f" ({len(missing)} tensors are)" if len(missing) > 1 else ""
        raise WeightsError(f"{source}: tensor {missing[0]} is missing, expected shape {shapes[missing[0]]}{more}")
    ignored = {"lm_head.weight"} if architecture.tied_embeddings else set()  # a copy of the embedding
    for name in sorted(files.keys() - shapes.keys() - ignored):
        if not name.endswith("rotary_emb.inv_freq"):
            raise WeightsError(f"{source}: tensor {name} is not part of a model that config.json describes")
    return files


def _listed(folder: Path) -> tuple[Path, dict[str, Path]]:
    """Return the file that lists a folder's tensors, and the file of each tensor."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        with _opened(single) as file:
            return single, dict.fromkeys(file.keys(), single)
    if not index.exists():
        raise WeightsError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise WeightsError(f"{index}: weight_map: got {shown(names)}, expected the file name of every tensor")
    return index, {tensor: _beside(index, tensor, name) for tensor, name in names.items()}


def _beside(index: Path, tensor: str, name: str) -> Path:
    if Path(name).name != name or too_long(name) or not name.isprintable():  # lone surrogates are not printable either
        expected = "expected the name of a file in this folder"
        raise WeightsError(f"{index}: weight_map.{tensor}: got {shown(name)}, {expected}")
    return index.parent / name


def _check(path: Path, name: str, stored: Any, shape: tuple[int, ...]) -> None:
    if tuple(stored.get_shape()) != shape:
        raise WeightsError(f"{path}: tensor {name} has shape {tuple(stored.get_shape())}, expected {shape}")
    if stored.get_dtype() not in READABLE:
        raise WeightsError(f"{path}: tensor {name} is {stored.get_dtype()}, expected one of {', '.join(READABLE)}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():  # a device or pipe may block, or never end
        raise WeightsError(f"{path}: cannot be read: it is not a regular file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: cannot be read as safetensors: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of such a folder. Raises WeightsError."""
    return files.read_json(path, WeightsError, 64 << 20)  # an index of a hundred thousand tensors has 10 MiB


def architecture(folder: Path) -> Architecture:
    """Return the architecture in a folder's config.json, with transformers' defaults. Raises WeightsError."""
    path = folder / "config.json"
    fields = {k: v for k, v in read_json(path).items() if k not in ("dtype", "torch_dtype")}  # the run has its own
    config = Config(str(path), None, fields, error_type=WeightsError)
    if fields.get("model_type") not in KINDS:
        raise config.bad("model_type", f"one of {', '.join(KINDS)}: the engine computes no other")
    for field, only in MODELLED.items():
        if fields.get(field) not in (None, only):
            raise config.bad(field, f"{shown(only)}: the engine computes no other")
    values = pretrained.fields_of(config)
    if values["head_dim"] % 2:
        raise config.bad("head_dim", "an even number: rotation pairs the values of a head")
    values |= _rope(config) | {"norm_eps": config.real("rms_norm_eps", 1e-6), "end_tokens": _end_tokens(config)}
    values["name"] = folder.resolve().name.encode(errors="replace").decode()
    return Document(str(path), None, values, error_type=WeightsError).checked(Architecture)


def _rope(config: Config) -> dict[str, Any]:
    """Return theta and scaling, from `rope_scaling` and beside it, or from transformers 5's `rope_parameters`."""
    theta = config.real("rope_theta", 10_000.0)
    rope = config.part("rope_scaling") or config.part("rope_parameters")
    if rope is None:
        return {"rope_theta": theta}
    theta = rope.real("rope_theta", theta)
    field = "rope_type" if "rope_type" in rope.data else "type"
    kind = rope.data.get(field, "default")
    if kind not in ("default", "llama3"):
        raise rope.bad(field, "'default' or 'llama3': the engine computes no other")
    if rope.data.get("partial_rotary_factor") not in (None, 1.0):
        raise rope.bad("partial_rotary_factor", "1.0: the engine rotates whole heads")
    if kind == "default":
        return {"rope_theta": theta}
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    if low >= high:
        raise rope.bad("low_freq_factor", f"a number < high_freq_factor, {high:g}")
    original = rope.whole("original_max_position_embeddings", config.whole("max_position_embeddings"))
    return {"rope_theta": theta, "rope_scaling": RopeScaling(rope.real("factor"), low, high, original)}


def end_tokens(folder: Path) -> frozenset[int]:
    """Return the end tokens in generation_config.json, which may list more than config.json. Raises WeightsError."""
    path = folder / "generation_config.json"
    if not path.exists():
        return frozenset()
    return frozenset(_end_tokens(Config(str(path), None, read_json(path), error_type=WeightsError)))


def _end_tokens(config: Config) -> tuple[int, ...]:
    value = config.data.get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise config.bad("eos_token_id", "a token id or a list of them")
    return tuple(tokens)
