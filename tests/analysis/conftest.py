"""Validation folders that several files test."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.validations import COST, case, served


@pytest.fixture(scope="session")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """fast; slow: each step twice as long on CPU and device; busy: the CPU takes longer than the device; other: of
    another workload.
    """
    made = {"fast": (COST.format(0.01, 0.002),), "slow": (COST.format(0.02, 0.004),)}
    made |= {"busy": (COST.format(0.001, 0.006),), "busier": (COST.format(0.0015, 0.006003),)}
    made |= {"other": (COST.format(0.01, 0.002), "seed=4")}
    out = tmp_path_factory.mktemp("runs")
    return {name: served(out / name, *fields) for name, fields in made.items()}


@pytest.fixture
def one(tmp_path: Path, loops: dict[str, Path]) -> Path:
    """A folder with a case whose simulated run is the measured one."""
    case(tmp_path, "a", loops["fast"], [loops["fast"]])
    return tmp_path
