"""Settings shared by all tests: how many workers there are; property tests draw the same examples in every run."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from functools import wraps
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

# A worker has a core; so has a process that a test starts. Before numpy and torch are imported, which read it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, Phase, settings
from support.calls import out, small  # noqa: F401 - fixtures
from support.examples import cases
from support.pictures import drawn, sketched  # noqa: F401 - fixtures
from support.sweeping import sweep, trapped  # noqa: F401 - fixtures

MOST_WORKERS = 4  # each imports and collects everything, ten seconds, and takes a gigabyte if torch is there

# A shell that starts pytest in the background, and a worker's own start, have it ignore Ctrl-C; tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Shrinking a failing property takes minutes and ends in the time limit; CBSIM_SHRINK=1 shrinks.
settings.register_profile(
    "fixed",
    phases=[*Phase] if os.environ.get("CBSIM_SHRINK") == "1" else [Phase.explicit, Phase.generate],
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=cases(45),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Folders are tested by one worker per core, if pytest-xdist is installed. Single files are done before workers
    have started, and a GPU is for one process at a time. `-n` says otherwise.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # workers come here, too, and have none of their own
    option = config.option
    if getattr(option, "numprocesses", 0) is not None or option.dist != "no" or option.usepdb or option.collectonly:
        return
    gpu = find_spec("torch") is not None and Path("/dev/nvidiactl").exists()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1 and not gpu and any((config.invocation_params.dir / word).is_dir() for word in config.args):
        option.numprocesses, option.dist = min(cores, MOST_WORKERS), "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function has an event loop of its own, for each example if hypothesis draws them."""
    test: Any = pyfuncitem.obj
    if (property_test := getattr(test, "hypothesis", None)) is not None:
        if asyncio.iscoroutinefunction(inner := property_test.inner_test):
            property_test.inner_test = wraps(inner)(lambda *args, **more: asyncio.run(inner(*args, **more)))
        return None
    if not asyncio.iscoroutinefunction(test):
        return None
    names = signature(test).parameters
    asyncio.run(test(**{name: value for name, value in pyfuncitem.funcargs.items() if name in names}))
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays to the end: nothing of it is looked through for garbage any more."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `slow` are run where somebody asks for them."""
    if os.environ.get("CBSIM_SLOW") == "1" or "slow" in config.option.markexpr:
        return
    skipped = pytest.mark.skip(reason="slow: run with `-m slow` or CBSIM_SLOW=1")
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(skipped)
