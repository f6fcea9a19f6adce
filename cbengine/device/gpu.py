"""The GPU of this machine as the system describes it: name, driver, memory, current clocks and power."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

STATE = {
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "throttle_reasons": "clocks_event_reasons.active",
}
"""Each recorded property of a GPU's state, and nvidia-smi's name for it."""


def pinned(count: int) -> Tensor:
    """Return int32 zeros in pinned memory, which a GPU copies from and to beside other work."""
    return torch.zeros(count, dtype=torch.int32, pin_memory=True)


def facts() -> dict[str, Any]:
    """Return the current CUDA device's entries in env.json."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def driver() -> str | None:
    """Return the version of the GPU's driver, if the system reports it."""
    versions = _query("driver_version")
    return versions[0] if versions else None


def state() -> dict[str, float | str] | None:
    """Return the present clocks, power, temperature and throttle reasons; None if the system does not report them."""
    values = _query(*STATE.values())
    return dict(zip(STATE, map(_number, values), strict=True)) if values else None


def watch(states: list[Any], over: Callable[[float], bool]) -> None:
    """Add the state to `states` after ten seconds and then once a minute, until `over`, which waits, returns true."""
    for pause_s in chain((10.0,), repeat(60.0)):
        if over(pause_s):
            return
        states.append(state())


def _query(*fields: str) -> list[str] | None:
    """Query nvidia-smi about the current CUDA device, by its id, since CUDA_VISIBLE_DEVICES may have renumbered it."""
    try:
        identity = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    except (RuntimeError, AssertionError, AttributeError):
        identity = "0"
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={identity}"]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = [word.strip() for word in answer.partition("\n")[0].split(",")]
    return values if len(values) == len(fields) else None


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
