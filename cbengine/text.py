"""Real text from a local folder: tokenizer, one request, and the words as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import numpy as np

from cbengine import build, weights
from cbengine.build import Setup
from cbengine.content import Ids, Prompts
from cbengine.errors import UsageError
from cbsim.policy.request import RequestSpec
from cbsim.scenario import Scenario
from cbsim.workload import Workload

BLOCK_TOKENS = 16


class Given(Prompts):
    """One prompt that somebody wrote."""

    def __init__(self, ids: list[int], vocab: int) -> None:
        super().__init__(0, vocab)
        self._ids = np.array(ids, dtype=np.int32)

    def of(self, spec: RequestSpec) -> Ids:
        del spec
        return self._ids


def tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Raises UsageError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(f"{folder}: no tokenizer could be read: {str(error).partition(chr(10))[0]}") from None


def generate(prompt: str, tokens: int, setup: Setup, out: TextIO) -> list[int]:
    """Write prompt and continuation to `out` as it comes; returns the new token ids, an end token included."""
    assert setup.weights is not None
    architecture = weights.architecture(setup.weights)
    reader = tokenizer(setup.weights)
    ids = reader(prompt)["input_ids"]
    if not ids:
        raise UsageError("--prompt: has no token")
    if len(ids) + tokens > architecture.max_position:
        text = f"got {tokens}, must be <= {architecture.max_position - len(ids)} after a prompt of {len(ids)}"
        raise UsageError(f"--tokens: {text}: the model is made for {architecture.max_position}")
    spec = RequestSpec(index=0, id="0", arrival_ns=0, prompt_tokens=len(ids), output_tokens=tokens, max_tokens=tokens)
    said: list[int] = []
    shown = reader.decode(ids, skip_special_tokens=True)

    def on_token(_: RequestSpec, token: int) -> None:
        nonlocal shown
        said.append(token)
        text = reader.decode([*ids, *said], skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half a character: wait for its other half
            out.write(text[len(shown) :])
            out.flush()
            shown = text

    scenario = build.adapted(_scenario(len(ids) + tokens, architecture), setup)
    workload = Workload([spec], 1)
    engine, _ = build.engine(
        scenario, "async", workload, setup, prompts=Given(ids, architecture.vocab), on_token=on_token
    )
    try:
        out.write(shown)
        engine.run()
    finally:
        engine.close()
        out.write("\n")
    return said


def _scenario(tokens: int, architecture: Any) -> Scenario:
    """One request on the vLLM policy, with a cache for it and no more."""
    blocks = -(-tokens // BLOCK_TOKENS) + 2
    shape = {name: getattr(architecture, name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")}
    shape |= {name: getattr(architecture, name) for name in ("name", "intermediate", "vocab", "max_position")}
    return Scenario.model_validate(
        {
            "question": "What does the model say?",
            "model": shape,
            "hardware": "h100-sxm",
            "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": tokens - 1, "output_tokens": 1},
            "scheduler": {"name": "vllm"},
            "kv_cache": {"block_size": BLOCK_TOKENS, "num_blocks": max(blocks, 3)},
        }
    )
