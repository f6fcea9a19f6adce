"""Pictures in tests: drawing them is most of a report's time, and few tests look at one.

Everywhere else a chart is written as the hash of all that it holds, so that equal files are equal charts, and equal
charts are equal pictures (tests/draw).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from cbsim.draw import render
from cbsim.draw.chart import Chart

REAL = render.images


def _held(value: Any) -> str:
    """All that a chart holds, written out."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if is_dataclass(value):
        return f"{type(value).__name__}({[_held(getattr(value, field.name)) for field in fields(value)]})"
    if isinstance(value, list | tuple):
        return f"{[_held(part) for part in value]}"
    return repr(value)


def _sketch(chart: Chart, *kinds: str) -> list[bytes]:
    digest = sha256(_held(chart).encode())
    files = {"png": b"\x89PNG" + digest.digest(), "svg": f"<svg>{digest.hexdigest()}</svg>".encode()}
    return [files[kind] for kind in kinds]


@contextmanager
def _with(images: Callable[..., list[bytes]]) -> Iterator[None]:
    before = render.images
    try:
        render.images = images
        yield
    finally:
        render.images = before


def really() -> AbstractContextManager[None]:
    """Inside, pictures are drawn."""
    return _with(REAL)


@pytest.fixture(scope="session", autouse=True)
def sketched() -> Iterator[None]:
    with _with(_sketch):
        yield


@pytest.fixture
def drawn() -> Iterator[None]:
    """For a test that looks at pictures."""
    with really():
        yield
