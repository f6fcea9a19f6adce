"""The provenance of a measurement: device, driver, versions, commit."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cbengine.device import gpu
from cbengine.errors import UsageError
from cbsim.errors import UserError
from cbsim.files import access
from cbsim.record.directory import write_whole
from cbsim.record.environment import git_state, packages


def begin(path: Path, device: str) -> None:
    """Record a measurement's provenance, unless there is a record. Raises UsageError."""
    if not path.exists():
        write_json(path, {**facts(device), "commands": []})


def write_json(path: Path, content: Mapping[str, Any], error: type[UserError] = UsageError) -> None:
    """Write a record. Raises `error`."""
    write(path, (json.dumps(content, indent=2) + "\n").encode(), error)


def write(path: Path, content: bytes, error: type[UserError] = UsageError) -> None:
    """Write a file atomically, since later calls depend on it, and make its folder. Raises `error`."""
    with access(path, error, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def facts(device: str) -> Mapping[str, Any]:
    """Return device, driver, versions and commit."""
    return {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else f"CPU ({device}): no GPU was measured",
        "cuda": torch.version.cuda if device == "cuda" else None,
        "driver": gpu.driver() if device == "cuda" else None,
        "python": platform.python_version(),
        "packages": packages(),
        "git": git_state(),
    }


def slug(device: str) -> str:
    """Return the folder name of a device: `h100-80gb-hbm3`, or `cpu-process`."""
    if device != "cuda":
        return f"cpu-{device}"
    parts = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(0).lower())
    return "-".join(part for part in parts if part != "nvidia")
