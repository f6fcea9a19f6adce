"""Folders of weights broken at random: the engine refuses them by name, or computes with them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import mutations

torch = pytest.importorskip("torch", reason="the engine needs torch")

from safetensors.torch import save_file
from support.engine.calls import call
from support.mutations import SEED, as_json, damaged, edited, rewritten

from cbengine.model import weights
from cbsim.draw import render

CASES, CPU_S = 90, 6.0
CONFIG = """\
{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 128, "rms_norm_eps": 1e-05,
"tie_word_embeddings": false, "rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, "eos_token_id": [1, 2],
"torch_dtype": "float32"}
"""
FILES = ("a.safetensors", "b.safetensors")


def headed(path: Path, rng: random.Random) -> None:
    """The header of a safetensors file, which is JSON behind its length, with another value or another length."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = as_json(content[8 : 8 + length].decode(), rng).encode()
    said = len(header) if rng.random() < 0.8 else rng.choice((0, 2**62, len(content), 100_000_001))
    path.write_bytes(said.to_bytes(8, "little") + header + content[8 + length :])


def unusual(path: Path, rng: random.Random) -> None:
    """Numbers that no training leaves: not finite, or far too large."""
    content = bytearray(path.read_bytes())
    at = 8 + int.from_bytes(content[:8], "little") + 4 * rng.randrange(40)
    content[at : at + 4] = rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f"))
    path.write_bytes(content)


CHANGES: dict[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    "config.json": (rewritten(as_json), rewritten(as_json), rewritten(edited), damaged),
    "model.safetensors.index.json": (rewritten(as_json), rewritten(edited), damaged),
    "a.safetensors": (headed, headed, damaged, unusual),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in two files and an index."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(CONFIG)
    tensors = weights.random(weights.architecture(folder), 1, torch.float32, torch.device("cpu"))
    places = {name: FILES[at % 2] for at, name in enumerate(tensors)}
    for file in FILES:
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_broken_weights_end_with_a_status_and_a_short_message(
    model: Path, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 0, 1 or 2. Logits that are no numbers fail their request: 1, and a reason."""
    monkeypatch.setattr(render, "images", lambda chart, *kinds: [b""] * len(kinds))
    folder, seen = tmp_path / "model", set[int]()
    words = ("--device", "inline", "--loop", "sync", "--out", tmp_path / "out", "--set", "workload.requests=2")
    for case, rng in mutations.until(CPU_S, CASES):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder)
        if case:  # the first one is sound
            name = rng.choice(list(CHANGES))
            change = rng.choice(CHANGES[name])
            change(folder / name, rng)
        about = f"seed {SEED}, case {case}: {name} {change.__qualname__}" if case else "as it is"
        act = lambda: call("replay", small, "--weights", folder, *words)  # noqa: E731
        seen.add(mutations.survived(about, (0, 1, 2) if case else (0,), act, path=folder))
    assert {0, 2} <= seen
