"""Published measurements of whole servers, in the form of aiconfigurator's silicon samples (docs/data.md). If one is
listed several times, only the one marked `first_of_duplicates` counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from cbsim.errors import ScenarioError
from cbsim.files import real
from cbsim.scenario import catalog
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Form, bare, complaint, near, shown
from cbsim.scenario.rows import CsvTable, open_text

FOLDER = "public_measured/aiconfigurator_silicon"
NAMES = ("measured.csv", "measured.csv.gz")
COLUMNS = (
    *("id", "curve", "system", "backend", "model_path", "mode", "isl", "osl"),
    *("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"),
)
SIZES = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
FIRST_DUMP = "inferencex-2026-03-25"
PEER = ("id", "aic_ttft_ms", "aic_tpot_ms")
HOPPER, BLACKWELL = ("h100_sxm", "h200_sxm"), ("b200_sxm", "b300_sxm", "gb200")
MOST = 10_000_000  # the largest valid size or number of milliseconds


def _number(cell: Any) -> Any:
    """Return the number in a cell, a whole one as an integer; any other content is returned unchanged."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return int(value) if value.is_integer() else value


Size = Annotated[int, BeforeValidator(_number), Field(ge=0, le=MOST)]
Milliseconds = Annotated[float, BeforeValidator(_number), Field(gt=0, le=MOST)]


class Sizes(Form):
    """The parallelism of a server; 0 where it is not known."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    tensor: Size = Field(0, alias="tp_size")
    attention_ranks: Size = Field(0, alias="attention_dp_size")
    experts_tensor: Size = Field(0, alias="moe_tp_size")
    experts_ranks: Size = Field(0, alias="moe_ep_size")
    stages: Size = Field(0, alias="pp_size")  # of a pipeline; 0 or 1 is no pipeline


class Part(Sizes):
    """The servers that prefill, or that decode, of a point where these are apart. Unknown numbers are 0."""

    servers: Size = Field(0, alias="num_workers")
    batch: Size = Field(0, alias="batch_size")


ONE_SERVER = Part.model_validate({})  # that does both


class Point(Sizes):
    """A server under a closed loop of `concurrency` requests, and its mean latencies. Unknown sizes are 0."""

    id: str
    curve: str = ""
    source: str = ""
    measured: str = ""  # ISO date of the measurement; empty if unknown
    system: str = ""
    backend: str = ""
    version: str = Field("", alias="backend_version")
    model: str = Field("", alias="model_path")
    precision: str = ""
    mode: Literal["agg", "disagg"]
    prompt: Size = Field(alias="isl", ge=1)  # nominal tokens: lengths are drawn from 0.8 of it up to it
    output: Size = Field(alias="osl", ge=2)  # at least 2, as a TPOT needs two tokens
    concurrency: Size = 0
    kv_blocks: Size = 0  # blocks of the cache if they are known
    prefill: Part = ONE_SERVER
    decode: Part = ONE_SERVER
    side: Literal["", "prefill", "decode"] = ""  # whether it is one server of a point where these are apart
    ttft_ms: Milliseconds = Field(alias="silicon_ttft_ms")
    tpot_ms: Milliseconds = Field(alias="silicon_tpot_ms")
    peer: tuple[float, float] | None = None  # TTFT and TPOT that the other tool predicts

    @model_validator(mode="after")
    def _sized(self) -> Self:
        for name, size in (("tp_size", self.tensor), ("concurrency", self.concurrency)):
            if size < 1 and self.mode != "disagg":
                raise complaint(f"got {size}, must be >= 1", name)
        return self

    def of(self, side: Literal["prefill", "decode"]) -> Point:
        """Return one of its servers that prefill, or that decode, as a point of its own."""
        sizes = getattr(self, side).model_dump(exclude={"servers", "batch"})
        return self.model_copy(update=sizes | {"side": side, "mode": "agg"})

    @property
    def inferencex(self) -> bool:
        """True if InferenceX measured the point, whose client and flags are known."""
        return self.source.startswith("inferencex")

    @property
    def _later(self) -> bool:
        """True if experts are spread and a later dump of InferenceX has it, which writes GPUs that share attention, or
        else ranks, times the groups of experts; the same measurements stand in the first one as they are.
        """
        return self.inferencex and self.source != FIRST_DUMP and self.experts_ranks > 1 and not self.side

    @property
    def _written_twice(self) -> bool:
        """True if vLLM's GPUs are written as tp_size and as ranks of attention."""
        spread = self.tensor == self.attention_ranks and self.experts_ranks == self.tensor * self.attention_ranks
        return self._later and self.backend == "vllm" and spread

    @property
    def gpus(self) -> int:
        """GPUs that share attention: those of a rank."""
        groups, share = self.experts_ranks, self.experts_tensor
        if self._later and share > 1 and share * groups == self.tensor:
            return share
        return max(1, self.tensor // (self.ranks if self._written_twice else 1))

    @property
    def ranks(self) -> int:
        """Groups of GPUs that share attention; all share the experts. Of ranks that are written twice the first dump
        has the same measurements as of tensor-parallel servers; but since April 2026 scripts of MiniMax on Blackwell
        start data-parallel servers, too.
        """
        if self._written_twice:
            recent = self.precision == "fp4" and bare(self.model_name).startswith("minimax")
            return self.attention_ranks if recent else 1
        if self.attention_ranks > 1:
            return max(1, self.attention_ranks // (self.experts_ranks if self._later else 1))
        gpus = max(1, self.tensor)
        return 1 if self._later else max(1, (self.experts_tensor or gpus) * max(1, self.experts_ranks) // gpus)

    @property
    def all_gpus(self) -> int:
        return self.gpus * self.ranks

    @property
    def stratum(self) -> Stratum:
        sizes = self.gpus, self.prompt, self.output, self.ranks
        parts = [(name, part) for name, part in (("P", self.prefill), ("D", self.decode)) if self.mode == "disagg"]
        apart = " + ".join(f"{part.servers}{name} TP{part.tensor}" for name, part in parts)
        return Stratum(self.system, self.backend, self.model_name, *sizes, apart)

    @property
    def model_name(self) -> str:
        return self.model.rsplit("/", maxsplit=1)[-1]

    @property
    def where(self) -> str:
        """The point's name in messages."""
        return f"{self.stratum}, concurrency {self.concurrency}"


class Stratum(NamedTuple):
    """The key of points that differ only in concurrency, version and date."""

    system: str
    backend: str
    model: str
    tensor: int
    prompt: int
    output: int
    ranks: int = 1
    apart: str = ""

    def __str__(self) -> str:
        shared = self.apart or (f"TP{self.tensor}" if self.ranks == 1 else f"TP{self.tensor} DP{self.ranks}")
        return f"{self.system} {self.backend} {self.model} {shared} {self.prompt}/{self.output}"


def read(folder: Path, where: Mapping[str, str] | None = None) -> list[Point]:
    """Read the points of a folder whose columns have the values of `where`. Raises ScenarioError."""
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        raise ScenarioError(f"{folder}: holds neither {NAMES[0]} nor {NAMES[1]}")
    points = _read(path, where or {}, _peers(folder / "predictions.csv"))
    if not points:
        chosen = ", ".join(f"{name}={value}" for name, value in (where or {}).items())
        raise ScenarioError(f"--where: {path} has no point with {chosen}" if chosen else f"{path}: holds no points")
    for id_, times in Counter(point.id for point in points).items():
        if times > 1:
            raise ScenarioError(f"{path}: id: got {shown(id_)} {times} times, must be each point's own")
    return points


def _read(path: Path, where: Mapping[str, str], peers: Mapping[str, tuple[float, float]]) -> list[Point]:
    with open_text(path) as file:
        table, points = CsvTable(path, file, COLUMNS), []
        for name in where:
            if name not in table.header:
                raise ScenarioError(f"--where {name}: is no column of {path}{near(name, table.header)}")
        table.pick(table.header)
        for cells in table.rows(None):
            row: dict[str, Any] = dict(zip(table.header, cells, strict=True))
            if not _chosen(row, where):
                continue
            row = {name: cell for name, cell in row.items() if cell}
            row.setdefault("concurrency", row.get("batch_size", 0))
            for size in SIZES:  # of servers apart: those of the larger one
                parts = [row[name] for name in (f"prefill_{size}", f"decode_{size}") if name in row]
                if parts and size not in row:
                    row[size] = max(parts, key=float)
            for side in ("prefill", "decode"):
                row[side] = {name.removeprefix(f"{side}_"): cell for name, cell in row.items() if name.startswith(side)}
            row["peer"] = peers.get(row.get("id", ""))
            points.append(Document(str(path), None, row, at=table.line).checked(Point))
    return points


def _peers(path: Path) -> dict[str, tuple[float, float]]:
    """Read the other tool's predictions: TTFT and TPOT in milliseconds, by id."""
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


def folder(named: Path | None) -> Path:
    """Return the named folder, or the one among the data. Raises ScenarioError."""
    if named is not None:
        if not named.is_dir():
            raise ScenarioError(f"--data: got {named}, expected a folder")
        return named
    folders = [data / FOLDER for data in catalog.data_folders()]
    known = next((folder for folder in folders if folder.is_dir()), None)
    if known is None:
        tried = "; ".join(map(str, folders))
        where = "docs/data.md says where to get them, or give --data"
        raise ScenarioError(f"no published measurements at {tried}; {where}")
    return known


def _chosen(row: Mapping[str, str], where: Mapping[str, str]) -> bool:
    first = (row.get("first_of_duplicates") or "True").lower() in ("true", "1")
    return first and all(row[name] == value or real(row[name]) == real(value) for name, value in where.items())


OUTPUT_SHARE = 0.9  # the mean of lengths that are uniform from 0.8 of the nominal one up to it


class Means(NamedTuple):
    """The mean TTFT and TPOT of a server's requests, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def tokens_s(self, point: Point) -> float:
        """Return output tokens a second by Little's law: each user of the point sends one request after the other."""
        tokens = OUTPUT_SHARE * point.output
        return 1e3 * point.concurrency * tokens / (self.ttft_ms + self.tpot_ms * (tokens - 1))


def measured(point: Point) -> Means:
    return Means(point.ttft_ms, point.tpot_ms)
