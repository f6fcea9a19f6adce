"""What a GPU does instead of a step: it has no memory, reports an error, or hangs."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from cbengine.device.base import DeviceError

STUCK_S = 60.0  # a step that takes longer than this has hung
T = TypeVar("T")


class Watchdog:
    """Ends the process when a wait lasts too long: a hung kernel cannot be interrupted."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def close(self) -> None:
        self._closed.set()

    def overdue(self, now: float) -> bool:
        since = self._since  # read once: the other thread may end its wait at any moment
        return since is not None and now - since > self._limit_s

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            if self.overdue(time.monotonic()):
                print(f"cbengine: a step has not ended after {self._limit_s:.0f} s: the GPU hangs", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)


def guarded(doing: Callable[[], str], act: Callable[[], T]) -> T:
    """What `act` returns. Errors of the GPU's become a DeviceError that says what was being done; others are ours."""
    try:
        return act()
    except torch.OutOfMemoryError as error:
        failure = DeviceError(out_of_memory(doing(), str(error), *torch.cuda.mem_get_info()))
    except RuntimeError as error:
        if isinstance(error, DeviceError) or "CUDA" not in str(error):
            raise
        failure = DeviceError(f"the GPU failed in {doing()}: {_first_line(error)}")
    raise failure  # out here nothing holds what had been allocated until then


def out_of_memory(doing: str, complaint: str, free: int, total: int) -> str:
    """What was asked for, in torch's words, and what is there."""
    size = re.search(r"Tried to allocate ([\d.]+ \w+)", complaint)
    wanted, there = size[1] if size else "more", f"{free / 2**30:.2f} of the GPU's {total / 2**30:.2f} GiB are free"
    return f"no memory for {doing}: {wanted} asked for, {there}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
