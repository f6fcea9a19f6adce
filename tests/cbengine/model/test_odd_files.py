"""Folders of weights in which something is no file: refused at once, nothing is waited for or read to no end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the folder is written by transformers")

from support.engine import folders

from cbengine.model import weights
from cbengine.model.weights import WeightsError


def refused(folder: Path) -> str:
    with pytest.raises(WeightsError) as raised:
        weights.load(folder, torch.float32, torch.device("cpu"))
    return str(raised.value).removeprefix(f"{folder}/")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    """A FIFO without a writer never begins, and /dev/zero never ends."""
    file = folders.write(tmp_path) / name
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        file.rename(tmp_path / "kept")
        make(file)
        assert refused(tmp_path) == f"{name}: cannot be read: it is not a regular file"
        file.rename(tmp_path / f"odd{len(list(tmp_path.iterdir()))}")
        (tmp_path / "kept").rename(file)
    weights.load(tmp_path, torch.float32, torch.device("cpu"))


def test_a_description_has_a_length_that_it_can_have(tmp_path: Path) -> None:
    folders.write(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (weights.MOST_JSON_BYTES + 1))
    assert refused(tmp_path) == "config.json: is too large, must be <= 67,108,864 bytes"
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(WeightsError, match=r"generation_config\.json: cannot be read: it is not a regular file"):
        weights.end_tokens(tmp_path)


@pytest.mark.parametrize("place", ["\ud800", "a\0b", "a\n"])
def test_a_file_name_is_one_that_a_file_can_have(place: str, tmp_path: Path) -> None:
    """Half a surrogate pair cannot be encoded, and a NUL ends a name."""
    folders.write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": place}}))
    assert refused(tmp_path).startswith(f"{weights.INDEX}: weight_map.lm_head.weight: got {place!r}, expected the name")
