"""Where and by what something was measured: device, driver, versions, commit, and the commands that were run."""

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
from cbsim.results.directory import write_whole
from cbsim.results.environment import code_version, git_state, packages

BAR_MISSED = 3  # exit status of a command of ours that has said what it had to; pytest means an error of its own


def ended_well(command: str, code: int) -> bool:
    """Has a command, written as `python -m ...`, done all that it was to do?"""
    return code == 0 or (code == BAR_MISSED and "pytest" not in command)


class Ledger:
    """provenance.json: where and by what, and each command's end."""

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._commands: list[dict[str, Any]] = _read(path).get("commands", [])
        self._facts, self._version = facts(device), code_version()

    def done(self, command: str) -> bool:
        """Has this commit run the command to its end? Of an unknown commit nothing is known to be done."""
        same = [c for c in self._commands if (c["command"], c["commit"]) == (command, self._version)]
        return self._version is not None and any(ended_well(command, c["exit"]) for c in same)

    def begin(self) -> None:
        """Say where and by what, whatever becomes of the commands."""
        _write(self._path, {**self._facts, "commands": self._commands})

    def add(self, command: str, code: int, seconds: float) -> None:
        entry = {"command": command, "exit": code, "seconds": round(seconds, 1), "commit": self._version}
        self._commands.append(entry)
        self.begin()


def begin(path: Path, device: str) -> None:
    """Say where something is measured, unless it is said already. Raises UsageError."""
    if not path.exists():
        _write(path, {**facts(device), "commands": []})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(content, indent=2) + "\n").encode())  # the next call rests on it
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        ledger: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        commands = [dict(command) for command in ledger["commands"]]
        if lacking := next(
            (command for command in commands if not command.keys() >= {"command", "exit", "commit"}), None
        ):
            raise ValueError(f"{lacking}: needs command, exit and commit")
        return {"commands": commands}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: not the record of an earlier call: {error}") from None


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
