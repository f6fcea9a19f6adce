"""What tests of `score` share: the folder they run in, a pack of their own, and the numbers told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
