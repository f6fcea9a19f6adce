"""Folders as transformers saves them, one of each family: the engine says what `generate` says."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts said, by transformers")

import torch
import transformers
from support.engine.served import LOOPS, VOCAB, Run, asked, server, spec

from cbengine import build
from cbengine.build import Setup
from cbengine.measure import calibrate
from cbsim.workload.requests import Workload

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


def generated(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers says after a prompt, alone and greedily."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    said = model_of(folder).generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(said[0, len(prompt) :].tolist())


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
        assert text.outputs == generated(folder, text.prompt.tolist(), one.output_tokens), one.id


def test_calibrations_of_models_without_biases_stay_valid() -> None:
    """Their fingerprint is what it was when shapes had no such field; biases change it."""
    plain, biased = server("vllm", 4, 200, 64, 6, sharing=False), asked("vllm", "model.qkv_bias=true")
    shape = plain.model.model_dump(mode="json", exclude={"qkv_bias"})
    told = json.dumps([shape, plain.block_size, plain.graph_padding, None])
    assert calibrate.settings(plain, "CPU") == hashlib.sha256(told.encode()).hexdigest()[:12]
    assert calibrate.settings(biased, "CPU") != calibrate.settings(asked("vllm"), "CPU")
