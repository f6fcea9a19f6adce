"""Pools of worker processes, each a fresh interpreter, of which Ctrl-C is their parent's affair."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any


def pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of so many processes, which start with the first task and exit when the parent does."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin)


def submit(to: ProcessPoolExecutor, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Submit a task. Processes that start with it ignore SIGINT from the first moment, while they import, too."""
    if threading.current_thread() is not threading.main_thread():
        return to.submit(act, *arguments)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return to.submit(act, *arguments)
    finally:
        signal.signal(signal.SIGINT, before)


def end(of: ProcessPoolExecutor) -> None:
    """Terminate the processes without waiting for their tasks."""
    working = list((of._processes or {}).values())
    of.shutdown(wait=False, cancel_futures=True)
    for process in working:
        process.terminate()


def _begin() -> None:
    """Initialise a worker process: it ignores SIGINT, and exits when the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
