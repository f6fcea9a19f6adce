"""Published measurements of whole servers, in the form of aiconfigurator's silicon samples.

    measured.csv[.gz]   a line a measurement: who, on what, how parallel, lengths, concurrency, mean TTFT and TPOT
    predictions.csv     what another tool says of some of them, by id: aic_ttft_ms, aic_tpot_ms; may be missing

Of measurements that are there several times, those marked `first_of_duplicates` count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cbsim.errors import ScenarioError
from cbsim.scenario import catalog
from cbsim.scenario.fields import near, shown
from cbsim.scenario.rows import CsvTable, bad, open_text

FOLDER = "public_measured/aiconfigurator_silicon"
NAMES = ("measured.csv", "measured.csv.gz")
TEXTS = ("id", "curve", "source", "measured", "system", "backend", "backend_version", "model_path", "precision", "mode")
SIZES = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
NUMBERS = ("isl", "osl", "concurrency", "batch_size", *SIZES)
PEER = ("id", "aic_ttft_ms", "aic_tpot_ms")
MODES = ("agg", "disagg")
HOPPER = ("h100_sxm", "h200_sxm")
MOST = 10_000_000  # of any size, or of milliseconds
MEASURED = ("silicon_ttft_ms", "silicon_tpot_ms")
OPTIONAL = {
    "measured",
    "source",
    "first_of_duplicates",
    "concurrency",
    "batch_size",
    "precision",
    "backend_version",
    "pp_size",
}


@dataclass(frozen=True, slots=True)
class Point:
    """A server under a closed loop of `concurrency` requests, and what it took in the mean, milliseconds. Sizes that
    the source leaves open are 0.
    """

    id: str
    curve: str
    source: str
    measured: str  # when, ISO date; empty if unknown
    system: str
    backend: str
    version: str
    model: str
    precision: str
    disaggregated: bool
    prompt: int  # nominal tokens: lengths are drawn from 0.8 of it to all of it
    output: int
    concurrency: int
    tensor: int
    attention_ranks: int
    experts_tensor: int
    experts_ranks: int
    stages: int  # of a pipeline; 0 or 1: none
    ttft_ms: float
    tpot_ms: float
    peer: tuple[float, float] | None = None  # TTFT and TPOT that the other tool predicts

    @property
    def inferencex(self) -> bool:
        """Measured by InferenceX, whose client and flags are known."""
        return self.source.startswith("inferencex")

    @property
    def stratum(self) -> Stratum:
        return Stratum(self.system, self.backend, self.model_name, self.tensor, self.prompt, self.output)

    @property
    def model_name(self) -> str:
        return self.model.rsplit("/", maxsplit=1)[-1]

    @property
    def where(self) -> str:
        """How a message calls it."""
        return f"{self.stratum}, concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True, order=True)
class Stratum:
    """Points that differ in concurrency, version and date only."""

    system: str
    backend: str
    model: str
    tensor: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.system} {self.backend} {self.model} TP{self.tensor} {self.prompt}/{self.output}"


def read(folder: Path, where: Mapping[str, str] | None = None) -> list[Point]:
    """The points of a folder whose columns have the values of `where`. Raises ScenarioError."""
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        raise ScenarioError(f"{folder}: holds neither {NAMES[0]} nor {NAMES[1]}")
    points = _read(path, where or {}, _peers(folder / "predictions.csv"))
    if not points:
        said = ", ".join(f"{name}={value}" for name, value in (where or {}).items())
        raise ScenarioError(f"--where: {path} has no point with {said}" if said else f"{path}: holds no points")
    for id_, times in Counter(point.id for point in points).items():
        if times > 1 or not id_:
            raise ScenarioError(f"{path}: id: got {shown(id_)} {times} times, must be there and be each point's own")
    return points


def _read(path: Path, where: Mapping[str, str], peers: Mapping[str, tuple[float, float]]) -> list[Point]:
    with open_text(path) as file:
        table = CsvTable(path, file, [name for name in (*TEXTS, *NUMBERS, *MEASURED) if name not in OPTIONAL])
        for name in where:
            if name not in table.header:
                raise ScenarioError(f"--where {name}: is no column of {path}{near(name, table.header)}")
        table.pick(table.header)
        rows = (dict(zip(table.header, cells, strict=True)) for cells in table.rows(None))
        return [_point(path, table.line, row, peers) for row in rows if _chosen(row, where)]


def _peers(path: Path) -> dict[str, tuple[float, float]]:
    """What the other tool says: TTFT and TPOT in milliseconds, by id."""
    if not path.is_file():
        return {}
    with open_text(path) as file:
        table = CsvTable(path, file, PEER)
        rows = ((id_, ttft, tpot) for id_, ttft, tpot in table.rows(None) if ttft and tpot)
        return {id_: (_positive(table, 1, ttft), _positive(table, 2, tpot)) for id_, ttft, tpot in rows}


def _positive(table: CsvTable, column: int, cell: str) -> float:
    value = table.number(column, cell)
    if not value:
        raise table.bad(column, cell, "a number > 0")
    return value


def folder(given: Path | None) -> Path:
    """The folder that is meant: as given, or the one among the data. Raises ScenarioError."""
    if given is not None:
        if not given.is_dir():
            raise ScenarioError(f"--data: got {given}, expected a folder")
        return given
    places = [place / FOLDER for place in catalog.data_folders()]
    for place in places:
        if place.is_dir():
            return place
    looked = "; ".join(str(place) for place in places)
    raise ScenarioError(f"no published measurements at {looked}; docs/data.md says where to get them, or give --data")


def _chosen(row: Mapping[str, str], where: Mapping[str, str]) -> bool:
    first = (row.get("first_of_duplicates") or "True").lower() in ("true", "1")
    return first and all(_equal(row[name], value) for name, value in where.items())


def _equal(cell: str, value: str) -> bool:
    try:
        return float(cell) == float(value)
    except ValueError:
        return cell == value


def _point(path: Path, line: int, row: Mapping[str, str], peers: Mapping[str, tuple[float, float]]) -> Point:
    def number(name: str) -> float:
        cell = row.get(name) or "0"
        try:
            value = float(cell)
        except ValueError:
            value = -1.0
        if not 0 <= value <= MOST or (name in NUMBERS and value != round(value)):
            kind = "whole number" if name in NUMBERS else "number"
            raise bad(path, line, name, cell, f"a {kind} from 0 to {MOST:,}")
        return value

    if row["mode"] not in MODES:
        raise bad(path, line, "mode", row["mode"], f"one of {', '.join(MODES)}")
    sizes = {name: round(number(name)) for name in NUMBERS}
    ttft, tpot = (number(name) for name in MEASURED)
    disaggregated = row["mode"] == "disagg"
    concurrency = sizes["concurrency"] or sizes["batch_size"]
    least = {"isl": (sizes["isl"], 1), "osl": (sizes["osl"], 2)}  # a TPOT has two tokens
    least |= {} if disaggregated else {"tp_size": (sizes["tp_size"], 1), "concurrency": (concurrency, 1)}
    for name, (size, bound) in least.items():
        if size < bound:
            raise ScenarioError(f"{path}:{line}: {name}: got {size}, must be >= {bound}")
    for name, time in zip(MEASURED, (ttft, tpot), strict=True):
        if time <= 0:
            raise ScenarioError(f"{path}:{line}: {name}: got {time:g}, must be > 0")
    said = {name: row.get(name) or "" for name in TEXTS}
    return Point(
        id=said["id"],
        curve=said["curve"],
        source=said["source"],
        measured=said["measured"],
        system=said["system"],
        backend=said["backend"],
        version=said["backend_version"],
        model=said["model_path"],
        precision=said["precision"],
        disaggregated=disaggregated,
        prompt=sizes["isl"],
        output=sizes["osl"],
        concurrency=concurrency,
        tensor=sizes["tp_size"],
        attention_ranks=sizes["attention_dp_size"],
        experts_tensor=sizes["moe_tp_size"],
        experts_ranks=sizes["moe_ep_size"],
        stages=sizes["pp_size"],
        ttft_ms=ttft,
        tpot_ms=tpot,
        peer=peers.get(said["id"]),
    )


OUTPUT_SHARE = 0.9  # mean of lengths that are uniform from 0.8 of the nominal one on


class Means(NamedTuple):
    """Of a server's requests, milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def tokens_s(self, point: Point) -> float:
        """Output tokens a second by Little's law: the point's users each wait for one mean request after the other."""
        tokens = OUTPUT_SHARE * point.output
        return 1e3 * point.concurrency * tokens / (self.ttft_ms + self.tpot_ms * (tokens - 1))


def measured(point: Point) -> Means:
    return Means(point.ttft_ms, point.tpot_ms)
