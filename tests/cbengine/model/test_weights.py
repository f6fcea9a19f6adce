"""Weights have the names, shapes and values that transformers gives them, and what is wrong with a folder is named."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
transformers = pytest.importorskip("transformers", reason="the engine is compared with transformers")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="weights are safetensors")

from support.engine.peer_model import ARCHITECTURES, LLAMA, changed, to_transformers
from support.engine.served import LOOPS, VOCAB, Run, asked, continuation, server, spec

from cbengine import build
from cbengine.build import Setup
from cbengine.measure import calibrate
from cbengine.model import weights
from cbengine.model.kvcache import DeviceMemoryError
from cbengine.model.weights import Architecture, WeightsError
from cbsim.workload.requests import Workload

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
CPU = torch.device("cpu")
NAMES = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
TOKENS = torch.arange(3, 40)[None]


def drawn(architecture: Architecture, seed: int = 1) -> dict[str, Any]:
    return weights.random(architecture, seed, torch.float32, CPU)


def saved(folder: Path, architecture: Architecture = LLAMA, shard: str = "1GB") -> Path:
    """A folder as transformers writes it."""
    model: Any = to_transformers(architecture, drawn(architecture))
    model.config.eos_token_id = list(architecture.end_tokens) or None
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def edited(folder: Path, **fields: Any) -> Path:
    """Its config.json with other fields; ... takes one away."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def load(folder: Path) -> tuple[Architecture, dict[str, Any]]:
    return weights.load(folder, torch.float32, CPU)


# -- drawn ------------------------------------------------------------------------------------------------------------


@NAMES
def test_names_and_shapes_are_those_of_transformers(architecture: Architecture) -> None:
    model = to_transformers(architecture, drawn(architecture))
    named = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}  # a tied head is not named twice
    assert named == weights.expected(architecture)


def test_a_tensor_follows_from_its_name_and_the_seed() -> None:
    """Not from the tensors before it: a model without an output layer has the same others."""
    one, tied = drawn(LLAMA), drawn(changed(tied_embeddings=True))
    assert all(torch.equal(one[name], tied[name]) for name in tied)
    other = drawn(LLAMA, seed=2)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    flat = [tuple(tensor.flatten()[:8].tolist()) for tensor in one.values()]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize("layers", [1, 80])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_activations_keep_their_size_however_deep(layers: int, kind: str) -> None:
    deep = changed(ARCHITECTURES[kind], layers=layers, hidden=64, head_dim=16)
    with torch.inference_mode():
        model: Any = to_transformers(deep, drawn(deep))
        states = model(TOKENS, output_hidden_states=True)
    assert all(0.02 < float(state.std()) < 2 for state in states.hidden_states)
    assert 0.5 < float(states.logits.std()) < 2


@NAMES
def test_greedy_text_goes_on(architecture: Architecture) -> None:
    """No token ends it, though all are end tokens; it does not stand still, and another prompt has another text."""
    free = changed(architecture, kv_heads=2, head_dim=16, vocab=256, end_tokens=tuple(range(256)))
    model: Any = to_transformers(free, drawn(free))
    prompts = torch.stack((TOKENS[0, :16], TOKENS[0, 16:32]))
    texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, do_sample=False)[:, 16:]
    assert texts.shape == (2, 64)
    assert all(len(set(text[32:].tolist())) > 8 for text in texts)
    assert not torch.equal(texts[0], texts[1])


def test_a_model_too_large_for_its_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "free_bytes", lambda device: 1000)
    size = 4 * sum(math.prod(shape) for shape in weights.expected(LLAMA).values())
    with pytest.raises(
        DeviceMemoryError, match=f"^model tiny: its weights take {size:,} bytes, 1,000 are free on cpu$"
    ):
        drawn(LLAMA)


# -- read -------------------------------------------------------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
def test_what_transformers_saves_is_read_back(architecture: Architecture, shard: str, tmp_path: Path) -> None:
    """One file or many: the same architecture, the same tensors, and so the same logits."""
    read, tensors = load(saved(tmp_path, architecture, shard))
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    assert read == weights.architecture(tmp_path)
    assert read.name == tmp_path.name
    assert changed(read, name="tiny") == architecture
    before = drawn(architecture)
    assert list(tensors) == list(before)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    with torch.inference_mode():
        ours: Any = to_transformers(read, tensors)
        theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert torch.equal(ours(TOKENS).logits, theirs(TOKENS).logits)


def test_tensors_are_converted_to_the_type_asked_for(tmp_path: Path) -> None:
    _, tensors = weights.load(saved(tmp_path), torch.bfloat16, CPU)
    assert all(torch.equal(tensors[name], tensor.bfloat16()) for name, tensor in drawn(LLAMA).items())


def test_older_config_files_are_understood(tmp_path: Path) -> None:
    """Before transformers 5 theta lay at the top and scaling in rope_scaling, whose type was once called `type`."""
    scaled = ARCHITECTURES["llama 3.1"]
    saved(tmp_path, scaled)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for field in ("rope_type", "type"):
        rope = {**scaling, field: "llama3"}
        edited(
            tmp_path,
            rope_parameters=...,
            rope_theta=scaled.rope_theta,
            rope_scaling=rope,
            head_dim=None,
            eos_token_id=3,
        )
        assert changed(load(tmp_path)[0], name="tiny") == scaled


def test_what_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    plain = changed(kv_heads=4, norm_eps=1e-6, rope_theta=10_000.0, end_tokens=())
    saved(tmp_path, plain)
    left_out = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    edited(tmp_path, eos_token_id=None, **dict.fromkeys(left_out, ...))
    assert changed(load(tmp_path)[0], name="tiny") == plain


def test_known_extra_tensors_are_passed_over(tmp_path: Path) -> None:
    """Old files have the rotary frequencies, some tied ones a copy of the embedding as their output layer."""
    saved(tmp_path, changed(tied_embeddings=True))
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(199, 64)}
    safetensors_torch.save_file(tensors | extra, tmp_path / "model.safetensors")
    assert set(load(tmp_path)[1]) == set(tensors)


# -- refused ----------------------------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gemma3"}, "model_type: got 'gemma3', expected one of llama, mistral, qwen2, qwen3: the engine"),
    ({"hidden_size": "32"}, "hidden_size: got '32', expected a whole number >= 1"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps: got -1e-05, expected a number > 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, expected a divisor of num_attention_heads, 4"),
    ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
    ({"eos_token_id": [1, "x"]}, "eos_token_id: got [1, 'x'], expected a token id or a list of them"),
    ({"attention_bias": True}, "attention_bias: got true, expected false: the engine computes no other"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
    ({"sliding_window": 8}, "sliding_window: got 8, expected null: layers of model_type llama have no windows"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: got {'bits': 4}, expected nothing"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1.0"),
    ({"rope_parameters": [1]}, "rope_parameters: got [1], expected an object"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type: got 'yarn', expected 'default' or"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: type: got 'linear', expected 'default' or"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters: rope_theta: got 'big', expected a number > 0"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters: partial_rotary_factor: got 0.25"),
    (
        {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}},
        "rope_scaling: low_freq_factor: got 4, expected a number < high",
    ),
    ({"rope_scaling": LLAMA3 | {"factor": None}}, "rope_scaling: factor: got nothing, expected a number > 0"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=[message.partition(",")[0] for _, message in FIELDS])
def test_a_field_that_cannot_be_used_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    edited(saved(tmp_path), **fields)
    with pytest.raises(WeightsError) as raised:
        load(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: {message}")


def rewrite(**tensors: Any) -> Callable[[Path], None]:
    """The one file with some tensors changed, by the end of their names; None takes one away."""

    def write(folder: Path) -> None:
        held = safetensors_torch.load_file(folder / "model.safetensors")
        for end, tensor in tensors.items():
            name = next((name for name in held if name.endswith(f".{end}.weight")), f"{end}.weight")
            held = {k: v for k, v in held.items() if k != name} | ({} if tensor is None else {name: tensor})
        safetensors_torch.save_file(held, folder / "model.safetensors")

    return write


def put(name: str, data: bytes | str | None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data if isinstance(data, bytes) else data.encode())

    return write


def index(places: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        every = dict.fromkeys(weights.expected(LLAMA), "part.safetensors")
        content = {"weight_map": every | places if isinstance(places, dict) else places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return write


TENSOR, ATTENTION = "/model.safetensors: tensor", "model.layers.0.self_attn"
BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (put("config.json", None), "/config.json: cannot be read: No such file or directory"),
    (put("config.json", "{"), "/config.json: not valid JSON: "),
    (put("config.json", b"\xff\xfe\x00"), "/config.json: is not UTF-8 text"),
    (put("config.json", "[" * 100_000), "/config.json: not valid JSON: "),
    (put("config.json", "[1]"), "/config.json: got [1], expected a JSON object"),
    (put("model.safetensors", None), ": holds neither model.safetensors nor model.safetensors.index.json"),
    (put("model.safetensors", b""), "/model.safetensors: cannot be read as safetensors: "),
    (put("model.safetensors", "no tensors at all"), "/model.safetensors: cannot be read as safetensors: "),
    (rewrite(k_proj=None), f"{TENSOR} {ATTENTION}.k_proj.weight is missing, expected shape"),
    (rewrite(o_proj=torch.ones(64, 65)), f"{TENSOR} {ATTENTION}.o_proj.weight has shape (64, 65), expected (64, 64)"),
    (
        rewrite(norm=torch.ones(64, dtype=torch.int8)),
        f"{TENSOR} model.norm.weight is I8, expected one of F64, F32, F16",
    ),
    (rewrite(extra=torch.ones(2)), f"{TENSOR} extra.weight is not part of a model that config.json"),
    (index(None), "/model.safetensors.index.json: weight_map: got nothing, expected the file name of every tensor"),
    (index({"lm_head.weight": 3}), "/model.safetensors.index.json: weight_map: got {"),
    *(  # half a surrogate pair cannot be encoded, and a NUL ends a name
        (
            index({"lm_head.weight": name}),
            f"/{weights.INDEX}: weight_map.lm_head.weight: got {name!r}, expected the name",
        )
        for name in ("../part.safetensors", "\ud800", "a\0b", "a\n")
    ),
    (index({"lm_head.weight": "lost.safetensors"}), "/lost.safetensors: cannot be read as safetensors: No such file"),
    (index({"a.weight": "part.safetensors"}), "/model.safetensors.index.json: tensor a.weight is not part of a model"),
]


@pytest.mark.parametrize(("harm", "message"), BROKEN, ids=[ascii(message) for _, message in BROKEN])
def test_a_broken_folder_says_what_is_wrong(harm: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    harm(saved(tmp_path))
    with pytest.raises(WeightsError) as raised:
        load(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}{message}")


def test_biases_are_there_if_and_only_if_the_kind_has_them(tmp_path: Path) -> None:
    """config.json of a Qwen2 says nothing of them; a Llama's may, and then its output matrix has one, too."""
    edited(saved(tmp_path, ARCHITECTURES["qwen2"]), model_type="llama")
    with pytest.raises(WeightsError, match=r": tensor \S+\.[qkv]_proj\.bias is not part of a model that config"):
        load(tmp_path)
    edited(saved(tmp_path, LLAMA), model_type="qwen2")
    bias = r"model\.layers\.0\.self_attn\.q_proj\.bias"
    with pytest.raises(WeightsError, match=rf"tensor {bias} is missing, expected shape \(64,\) \(9 tensors are\)$"):
        load(tmp_path)


def test_a_tensor_that_its_shard_does_not_hold_is_named(tmp_path: Path) -> None:
    rewrite(o_proj=None)(saved(tmp_path))
    index({})(tmp_path)
    with pytest.raises(WeightsError, match=r"part\.safetensors: tensor \S+\.0\.self_attn\.o_proj\.weight is missing"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    """A FIFO without a writer never begins, and /dev/zero never ends."""
    file = saved(tmp_path) / name
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        file.rename(tmp_path / "whole")
        make(file)
        with pytest.raises(WeightsError, match=rf"{name}: cannot be read: it is not a regular file$"):
            load(tmp_path)
        file.rename(tmp_path / f"odd{len(list(tmp_path.iterdir()))}")
        (tmp_path / "whole").rename(file)
    load(tmp_path)


# -- folders of each family -------------------------------------------------------------------------------------------


FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 7}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen2, the last layer slides": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "qwen3, five of six slide": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {
            "num_hidden_layers": 6,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
}
SPECS = [spec(i, 5 + 4 * i, 20 - i) for i in range(6)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few layers, with values that transformers draws; it would make every bias 0. Windows are far shorter than the
    texts.
    """
    kind, model, more = FAMILIES[request.param]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    torch.manual_seed(3)
    drawn = {"initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    made = model(kind(**(sizes | heads | drawn | more)))
    for name, parameter in made.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, 0, 1)
    path: Path = tmp_path_factory.mktemp("families") / request.param
    made.save_pretrained(path)
    return path


@cache
def model_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_engine_says_what_generate_says(folder: Path, loop: str) -> None:
    """Chunks of at most 7 tokens beside rows that decode, in a cache that is too small for all but where blocks leave
    windows.
    """
    setup = Setup(device="inline", weights=folder)
    whole = build.shape_of(folder).sees_all
    ready = build.adapted(server("vllm 0.33", 4, 24 if whole else 60, 7, 6, sharing=False), setup)
    run = Run(ready, loop, Workload(list(SPECS), len(SPECS)), setup)
    assert run.total("preempted") > 0 or not whole
    for one, text in run.engine.sequences.items():
        assert text.outputs == continuation(model_of(folder), text.prompt.tolist(), one.output_tokens), one.id


def test_calibrations_of_models_without_biases_stay_valid() -> None:
    """Their fingerprint is what it was when shapes had no such field; biases change it."""
    plain, biased = server("vllm", 4, 200, 64, 6, sharing=False), asked("vllm", "model.qkv_bias=true")
    shape = plain.model.model_dump(mode="json", exclude={"qkv_bias"})
    told = json.dumps([shape, plain.block_size, plain.graph_padding, None])
    assert calibrate.settings(plain, "CPU") == hashlib.sha256(told.encode()).hexdigest()[:12]
    assert calibrate.settings(biased, "CPU") != calibrate.settings(asked("vllm"), "CPU")
