"""What tests of `score` share: the folder they run in, a pack of their own, the real ones, and the numbers told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbsim.scenario import catalog
from support import packs
from support.calls import Said
from support.packs import Pack


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is written without --out lands beside the pack."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return packs.pack(tmp_path / "pack")


def numbers(said: Said) -> Any:
    assert (said.status, said.err) == (0, ""), said
    return json.loads(said.out)


def real(name: str) -> Path:
    for folder in catalog.data_folders():
        if (folder / "measured_vllm" / name).is_dir():
            return folder / "measured_vllm" / name
    pytest.skip("recorded vLLM runs not present (measured_vllm in $CBSIM_DATA); docs/data.md says where to get them")
