"""Scenario files broken at random, the same ones in every run: a clean exit status and a short message, always."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import SMALL, call

from cbsim.draw import render
from cbsim.scenario import documents
from cbsim.scenario.fields import ScenarioError

SEED, CASES, BUDGET_S = 20261122, 300, 20.0
TEXT = (
    SMALL.replace("requests: 12", "requests: 3")
    + "scheduler: {name: vllm, max_num_seqs: 8, max_num_batched_tokens: 64}\n"
    + "kv_cache: {num_blocks: 200, block_size: 16}\ncost: {kind: constant, step_s: 0.01}\nseed: 7\n"
)
PIECES = ("&a ", "*a", "!!int ", "[", "}", ": ", "- ", "\n", "\t", "#", "\0", "é", '"', "'", "|", "? ", "<<", "%", "-1")
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e-30, 1e30, 10**20, float("nan"), float("inf"), "", "x" * 3000, "a\nb", [], {}, [[1]], {"a": 1},
    "sync", "../x", "**", "2026-01-01",
)  # fmt: skip


def edited(text: str, rng: random.Random) -> str:
    """A few characters replaced, doubled or cut out."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(text)), rng.randint(0, 12)
        middle = rng.choice([rng.choice(PIECES), text[at : at + length] * 2, ""])
        text = text[:at] + middle + text[at + length :]
    return text


def restructured(text: str, rng: random.Random) -> str:
    """One value somewhere in the tree replaced, removed, or put under another key."""
    data = documents.parse(text, "base")
    place: Any = data
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], dict | list) and place[key]) or rng.random() < 0.3:
            break
        place = place[key]
    value = place.pop(key)
    if isinstance(place, dict) and rng.random() < 0.9:
        place[key if rng.random() < 0.8 else f"{key}s"] = rng.choice([*VALUES, copy.deepcopy(data), value])
    return documents.write(data)


def test_broken_files_end_with_a_status_and_a_short_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 0, 1 or 2, no exception, at most 21 lines of at most 600 characters. One unlucky enough may run long:
    mutations stop when the time is up, and none may take more than 5 s.
    """
    monkeypatch.setattr(render, "png", lambda chart: b"")  # most of a small run's time
    rng, path, begun = random.Random(SEED), tmp_path / "s.yaml", time.monotonic()
    ways: tuple[Callable[[str, random.Random], str], ...] = (edited, restructured)
    seen: set[int] = set()
    for case in range(CASES):
        text, at = rng.choice(ways)(TEXT, rng), time.monotonic()
        path.write_text(text, encoding="utf-8")
        about = f"seed {SEED}, case {case}:\n{text[:2000]}"
        try:
            said = call("run", path, "--quiet", "--loop", "sync", "--out", tmp_path / "out")
        except Exception as error:
            raise AssertionError(about) from error
        assert said.status in (0, 1, 2), about
        assert all(len(line) < 600 + len(str(path)) for line in said.err.splitlines()), about + said.err
        assert len(said.err.splitlines()) <= 21, about
        assert time.monotonic() - at < 5, about
        seen.add(said.status)
        if time.monotonic() - begun > BUDGET_S:
            break
    assert {0, 2} <= seen


@pytest.mark.parametrize("way", [edited, restructured])
def test_mutations_are_the_same_in_every_run(way: Callable[[str, random.Random], str]) -> None:
    """A case that fails can be made again from the seed; the file itself is sound."""
    one, two = random.Random(SEED), random.Random(SEED)
    assert [way(TEXT, one) for _ in range(20)] == [way(TEXT, two) for _ in range(20)]
    with pytest.raises(ScenarioError):
        documents.parse(TEXT + "seed: 8\n", "twice")
