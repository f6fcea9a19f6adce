"""The engine's command line as tests call it, in this process, on a small scenario."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cbengine.cli.parser import main
from cbsim.cli import parser as simulator
from support import calls
from support.calls import Said

SMALL = """\
question: Does the engine's command line work?
model: {name: small, layers: 2, hidden: 32, heads: 4, kv_heads: 2, head_dim: 8, intermediate: 48, vocab: 97,
        max_position: 256, dtype: bfloat16}
hardware: laptop-cpu
workload:
  kind: synthetic
  requests: 5
  prompt_tokens: {uniform: {low: 3, high: 20}}
  output_tokens: {uniform: {low: 2, high: 9}}
kv_cache: {block_size: 4, num_blocks: 60}
cost: {kind: constant, step_s: 0.001}
"""


call = partial(calls.call, of=main)
"""The engine's command in this process."""
started = partial(calls.started, "cbengine")
"""The engine's command in a process of its own."""


def refused(said: Said, status: int, *words: str) -> None:
    """A mistake: nothing on stdout, no traceback, one message that says all of `words`; the usage behind it, unless it
    is of one argument.
    """
    assert said.status == status, said
    assert not said.out
    message, _, usage = said.err.partition("\nusage: ")
    assert message.startswith(("cbengine: ", "python -m cbengine")), said.err
    assert "\n" not in message.strip()
    for word in words:
        assert word in message
    assert bool(usage) == (said.err.startswith("python") and ": argument " not in message)


def derived(*paths: Path) -> None:
    """The recorded plans follow from the recorded polls."""
    said = call("replan", *paths, of=simulator.main)
    assert said.status == 0, said
    assert said.out.count("identical") == len(paths)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.engine import folders  # needs torch and transformers, which the tests that use this ask for

    return folders.write(tmp_path_factory.mktemp("folders") / "tiny")
