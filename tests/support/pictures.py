"""Pictures in tests: drawing them is most of a report's time, and few tests look at one.

Everywhere else a chart is written as the hash of all that it holds, so that equal files are equal charts, and equal
charts are equal pictures (tests/draw).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from cbsim.draw import render
from cbsim.draw.chart import Chart

NAMES = ("png", "svg", "both")
REAL = {name: getattr(render, name) for name in NAMES}


def _held(value: Any) -> str:
    """All that a chart holds, written out."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if is_dataclass(value):
        return f"{type(value).__name__}({[_held(getattr(value, field.name)) for field in fields(value)]})"
    if isinstance(value, list | tuple):
        return f"{[_held(part) for part in value]}"
    return repr(value)


def png(chart: Chart) -> bytes:
    return b"\x89PNG" + sha256(_held(chart).encode()).digest()


def svg(chart: Chart) -> bytes:
    return f"<svg>{sha256(_held(chart).encode()).hexdigest()}</svg>".encode()


SKETCHED = {"png": png, "svg": svg, "both": lambda chart: (png(chart), svg(chart))}


@contextmanager
def _with(functions: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(render, name) for name in NAMES}
    try:
        for name, function in functions.items():
            setattr(render, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(render, name, function)


def really() -> Any:
    """Inside, pictures are drawn."""
    return _with(REAL)


@pytest.fixture(scope="session", autouse=True)
def sketched() -> Iterator[None]:
    with _with(SKETCHED):
        yield


@pytest.fixture
def drawn() -> Iterator[None]:
    """For a test that looks at pictures."""
    with really():
        yield
