"""What a long run has written so far, in pieces (pieces.py): the tables and the summary of one that was killed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cbsim.results import columns, metrics, on_disk
from cbsim.results.metrics import Steps
from cbsim.results.on_disk import RunError, StepsOnDisk, TableFiles
from cbsim.results.parquet import Ints
from cbsim.results.requests import RequestTable

STEP_PIECES, REQUEST_PIECES, TERMS = "steps", "requests", "pieces.json"


def name_of(number: int) -> str:
    """The file of a piece."""
    return f"{number:06}.parquet"


def any_piece(path: Path) -> bool:
    """Is there anything to read?"""
    return (path / REQUEST_PIECES / name_of(0)).exists()


def step_pieces(path: Path) -> TableFiles:
    """The pieces of a step table whose requests are there as well."""
    last = max(file.name for file in (path / REQUEST_PIECES).glob("*.parquet"))
    return TableFiles([file for file in _pieces(path / STEP_PIECES) if file.name <= last], columns.STEPS)


def request_pieces(path: Path) -> TableFiles:
    return TableFiles(_pieces(path / REQUEST_PIECES), columns.RECORDED)


def _pieces(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.parquet"))


def last_rows(files: TableFiles) -> Ints:
    """Positions of the rows that count, in order of index: of several rows of a request the last one."""
    index = files["index"].to_numpy()
    order = np.argsort(index, kind="stable")
    last: Ints = order[np.append(index[order][1:] != index[order][:-1], True)[: len(order)]]
    return last


def steps(path: Path) -> Steps:
    """The steps until now of a run that is under way."""
    return StepsOnDisk(step_pieces(path))


def requests(path: Path) -> RequestTable:
    """Its requests, as they were after these steps."""
    files = request_pieces(path)
    return on_disk.requests_of(files).rows(last_rows(files))


def summary(file: Path, terms: Mapping[str, Any], requests: RequestTable, steps: Steps) -> dict[str, Any]:
    """What summary.json would say of these tables, had the run been interrupted here. `terms` are what `file`, TERMS,
    holds. Raises RunError if they are not what a run writes.
    """
    try:
        counted: dict[str, Any] = {**terms["counted"]}
        if counted["window_s"] is not None:
            low, high = counted["window_s"]
            counted["window_s"] = (-np.inf if low is None else low, np.inf if high is None else high)
        return {**terms["about"], **metrics.summarise(requests, steps, **counted)}
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file}: not what a run writes: {type(error).__name__}: {error}", file=file) from error
