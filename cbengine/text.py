"""Real text from a local folder: tokenizer, one request, and the words as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import numpy as np

from cbengine import build
from cbengine.build import Setup
from cbengine.content import Ids, Prompts
from cbengine.errors import UsageError
from cbengine.model.weights import read_json
from cbsim.policy.request import RequestSpec
from cbsim.scenario.fields import shown
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import ModelShape
from cbsim.workload.generators import Workload

BLOCK_TOKENS = 16
HALF = "\ufffd"  # what a tokenizer makes of a character whose bytes are not all there


class Given(Prompts):
    """One prompt that somebody wrote."""

    def __init__(self, ids: list[int], vocab: int) -> None:
        super().__init__(0, vocab)
        self._ids = np.array(ids, dtype=np.int32)

    def of(self, spec: RequestSpec) -> Ids:
        del spec
        return self._ids


class Words:
    """What follows a prompt, written as its tokens come, no character before all of it is there."""

    def __init__(self, reader: Any, prompt: list[int], out: TextIO) -> None:
        self.said: list[int] = []
        self._reader, self._prompt, self._out = reader, prompt, out
        self._written = len(self._text())

    def add(self, spec: RequestSpec, token: int) -> None:
        del spec
        self.said.append(token)
        text = self._text()
        if not text.endswith(HALF):
            self._write(text)

    def finish(self) -> None:
        """Whatever is still held back will not become whole."""
        self._write(self._text() + "\n")

    def _text(self) -> str:
        ids = [*self._prompt, *self.said]
        return str(self._reader.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _write(self, text: str) -> None:
        self._out.write(text[self._written :])
        self._out.flush()
        self._written = len(text)


def tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Raises UsageError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # broken files make it raise all sorts
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{folder}: no tokenizer could be read: {reason[:200]}") from None


def end_tokens(folder: Path) -> frozenset[int]:
    """Tokens that end a text by generation_config.json, which may name more than config.json. Raises UsageError."""
    path = folder / "generation_config.json"
    if not path.exists():
        return frozenset()
    given = read_json(path).get("eos_token_id")
    tokens = [] if given is None else given if isinstance(given, list) else [given]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise UsageError(f"{path}: eos_token_id: got {shown(given)}, expected a token id or a list of them")
    return frozenset(tokens)


def generate(prompt: str, tokens: int, setup: Setup, out: TextIO) -> list[int]:
    """Write prompt and continuation to `out` as it comes; returns the new token ids, an end token included."""
    assert setup.weights is not None
    shape, stops = build.shape_of(setup.weights), end_tokens(setup.weights)
    reader = tokenizer(setup.weights)
    ids = _encoded(prompt, tokens, reader, shape, setup.weights)
    spec = RequestSpec(index=0, id="0", arrival_ns=0, prompt_tokens=len(ids), output_tokens=tokens, max_tokens=tokens)
    words = Words(reader, ids, out)
    scenario = build.adapted(_scenario(len(ids) + tokens, shape), setup)
    given, workload = Given(ids, shape.vocab), Workload([spec], 1)
    engine, _ = build.engine(scenario, "async", workload, setup, prompts=given, stops=stops, on_token=words.add)
    try:
        out.write(prompt)
        out.flush()
        engine.run()
    finally:
        engine.close()
        words.finish()
    return words.said


def _encoded(prompt: str, tokens: int, reader: Any, shape: ModelShape, folder: Path) -> list[int]:
    """The prompt's tokens, at least one, and not too many for the model. Raises UsageError."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: holds bytes that are no text in this terminal's encoding") from None
    ids: list[int] = reader(prompt)["input_ids"]
    most = shape.max_position - len(ids)
    if not ids:
        raise UsageError("--prompt: has no token, expected at least one")
    if max(ids) >= shape.vocab:
        text = f"the tokenizer gives token {max(ids)}, the model has {shape.vocab}"
        raise UsageError(f"{folder}: {text}: they do not belong together")
    if most < 1:
        raise UsageError(f"--prompt: has {len(ids)} tokens, must be < {shape.max_position}, the model's longest text")
    if tokens > most:
        text = f"got {tokens}, must be <= {most} after a prompt of {len(ids)}"
        raise UsageError(f"--tokens: {text}: the model is made for {shape.max_position}")
    return ids


def _scenario(tokens: int, shape: ModelShape) -> Scenario:
    """One request on the vLLM policy, with a cache for it and no more."""
    return Scenario.model_validate(
        {
            "question": "What does the model say?",
            "model": shape,
            "hardware": "h100-sxm",
            "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": tokens - 1, "output_tokens": 1},
            "scheduler": {"name": "vllm"},
            "kv_cache": {"block_size": BLOCK_TOKENS, "num_blocks": max(-(-tokens // BLOCK_TOKENS) + 2, 3)},
        }
    )
