"""Where and by what something was measured: device, driver, versions, commit."""

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
from cbsim.record.directory import write_whole
from cbsim.record.environment import git_state, packages


def begin(path: Path, device: str) -> None:
    """Record where something is measured, unless there is a record. Raises UsageError."""
    if not path.exists():
        write(path, {**facts(device), "commands": []})


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a record whole, since a later call rests on it. Raises UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def facts(device: str) -> Mapping[str, Any]:
    """Device, driver, versions and commit."""
    return {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else f"CPU ({device}): no GPU was measured",
        "cuda": torch.version.cuda if device == "cuda" else None,
        "driver": gpu.driver() if device == "cuda" else None,
        "python": platform.python_version(),
        "packages": packages(),
        "git": git_state(),
    }


def slug(device: str) -> str:
    """The folder of a device: `h100-80gb-hbm3`, or `cpu-process`."""
    if device != "cuda":
        return f"cpu-{device}"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(0).lower())
    return "-".join(word for word in words if word != "nvidia")
