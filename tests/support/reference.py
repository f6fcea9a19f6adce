"""Scenarios that come with the project, as tests simulate them, and the public traces they read."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cbsim.errors import ScenarioError
from cbsim.machine import simulate
from cbsim.metrics import metrics
from cbsim.record.record import STEP_COLUMNS, RequestRow
from cbsim.record.tables import Steps, requests_of
from cbsim.scenario import catalog, scenario
from cbsim.scenario.demand import CsvColumns
from cbsim.scenario.rows import open_text
from cbsim.scenario.scenario import Scenario
from cbsim.workload import csv_requests, generators
from cbsim.workload.requests import Drawn


class Ran(NamedTuple):
    """A scenario that was simulated under one loop."""

    scenario: Scenario
    summary: dict[str, Any]
    steps: Steps
    rows: list[RequestRow]
    fingerprint: str

    def lane(self, name: str) -> np.ndarray[Any, Any]:
        return self.steps.lane(name)


@lru_cache(maxsize=32)
def ran(name: str, loop: str, *overrides: str) -> Ran:
    """Simulated in this process; nothing is written."""
    asked = scenario.load(name, overrides)
    load = generators.build(asked)
    server = simulate.machine(asked, loop, load)
    simulate.run(server)
    steps = Steps(np.frombuffer(server.record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))
    rows = requests_of(server.record)
    summary = metrics.summarise(
        rows, steps, total_blocks=server.record.total_blocks, price_usd_hour=asked.hardware.price_usd_hour
    )
    return Ran(asked, summary, steps, rows, load.fingerprint())


def data(path: str) -> Path:
    """A public trace, or a skip that says where to get it: they are too large to ship."""
    try:
        return catalog.data(path)
    except ScenarioError as missing:
        pytest.skip(str(missing))


def plain(path: Path, **columns: str) -> Drawn:
    """The requests of a CSV file."""
    with open_text(path) as file:
        return csv_requests.plain(path, file, None, CsvColumns(**columns))[0]
