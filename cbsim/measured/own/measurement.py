"""What was measured of a running server, as values, and the directory in which `cbsim measure` keeps it.

measurement.json has what is known of the server, requests.csv a row a request, metrics.jsonl a reading of the server's
/metrics a second, for people. Rows are appended while the campaign goes on: of one that was killed the rows so far can
be read. All times are in seconds of one monotonic clock of the client, from the start of the campaign.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from cbsim.errors import ScenarioError
from cbsim.files import read_json
from cbsim.measured.own.clients import Measured, clients
from cbsim.record.tables import Floats, Ints, Mask
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Count, Form

SCHEMA = 1
MEASUREMENT, REQUESTS, METRICS = "measurement.json", "requests.csv", "metrics.jsonl"
TIMES, TOKENS = ("start_s", "ttft_s", "e2e_s"), ("prompt_tokens", "cached_tokens", "output_tokens")
LOST, CACHED = 0.05, 0.05  # shares of failed requests, and of cached prompt tokens, from which on a load is not used
SAME = ("engine", "version", "model", "num_blocks", "block_size")
COLUMNS = ("load", "users", "repeat", *TIMES, *TOKENS, "failed")


class Facts(Form):
    """What is known of a server; None where it is not. `flags` are the server's own, their names with underscores.
    `sources` says of each field, and of each flag as `flags.NAME`, where it was read.
    """

    model_config = ConfigDict(frozen=True)

    engine: str | None = None  # vllm, sglang, trtllm, cbsim
    version: str | None = None
    model: str | None = None
    max_model_len: Count | None = None
    num_blocks: Count | None = None
    block_size: Count | None = None
    flags: dict[str, Any] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return what is known, and where it was read, a line each."""
        values = dict(self) | {f"flags.{name}": value for name, value in self.flags.items()}
        return [f"{name:31} {values[name]} ({source})" for name, source in self.sources.items()]


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The requests of one load in order of their start.

    `users` is the concurrency of a closed loop, None if requests arrived as `start_s` says. Each `repeat`, from 0, is
    the same workload again, with other prompts, on a server that was idle. A failed request has NaN for the times that
    it lacks. Tokens are -1 where they are not known. `left_out` is why the load must not be used, "" if it may be.
    """

    name: str
    users: int | None
    repeat: Ints
    start_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints
    failed: Mask
    reasons: tuple[str, ...] = ()  # of failed requests, in order
    left_out: str = ""

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def tpot_s(self) -> Floats:
        """Time from the first token to the last over the tokens after the first; NaN of a single token."""
        after = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return np.asarray((self.e2e_s - self.ttft_s) / after, dtype=np.float64)

    @property
    def notes(self) -> list[str]:
        """What touched the load: reasons of failed requests, each once."""
        return [] if self.left_out else sorted({*self.reasons})

    def estimate(self, values: Floats) -> tuple[float, float]:
        """Return the mean of a value over the requests that succeeded, and its standard error from the means of the
        repeats; NaN for what is not known, as the error of a load that was not repeated.
        """
        known = ~self.failed & np.isfinite(values)
        means = [values[known & (self.repeat == each)].mean() for each in np.unique(self.repeat[known])]
        error = float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        return float(values[known].mean()) if means else math.nan, error


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The loads of one server. `incomplete` is why loads are missing, "" if none is."""

    path: Path
    tool: str
    facts: Facts
    loads: tuple[Load, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    incomplete: str = ""

    @property
    def usable(self) -> tuple[Load, ...]:
        return tuple(load for load in self.loads if not load.left_out and not load.failed.all())


class _File(Form):
    schema_version: int
    tool: str
    facts: Facts
    provenance: dict[str, Any] = Field(default_factory=dict)
    incomplete: str = ""


def read(path: Path, where: Mapping[str, str] = MappingProxyType({})) -> Measurement:
    """Read a directory of `cbsim measure`, or files of another client. Raises ScenarioError or RunError."""
    name = path / MEASUREMENT
    if not name.is_file():
        return _written(path, where)
    document = Document(str(name), None, read_json(name))
    file = document.checked(_File)
    if file.schema_version != SCHEMA:
        raise document.bad("schema_version", f"{SCHEMA}: it was written by another version of cbsim")
    known: dict[str, Any] = dict(file)
    del known["schema_version"]
    return replace(_written(path / REQUESTS, where), path=path, **known)


def _written(path: Path, where: Mapping[str, str]) -> Measurement:
    loads = list[Load]()
    read = clients(path, where)
    for client in read:
        stem = client.path.relative_to(path).with_suffix("").as_posix() if path.is_dir() else path.stem
        for name, of in by_load([*(client.requests or ()), *client.lost]).items():
            shown = f"{stem} {name}" if name and len(read) > 1 else name or stem
            loads.append(load_of(shown, client.users.get(name), of))
    return Measurement(path, read[0].tool, Facts(model=read[0].model or None), tuple(loads))


def by_load(requests: Iterable[Measured]) -> dict[str, list[Measured]]:
    parts = defaultdict[str, list[Measured]](list)
    for each in requests:
        parts[each.load].append(each)
    return parts


def load_of(name: str, users: int | None, requests: Sequence[Measured]) -> Load:
    """Return a load of these requests, in order of their start; it is left out if all of them failed."""
    ordered = sorted(requests, key=lambda each: (each.repeat, math.isnan(each.start_s), each.start_s))
    columns: dict[str, Any] = {name: np.array([getattr(each, name) for each in ordered]) for name in TIMES}
    for each in (*TOKENS, "repeat"):
        columns[each] = np.nan_to_num([getattr(request, each) for request in ordered], nan=-1).astype(int)
    reasons = tuple(each.failed for each in ordered if each.failed)
    failed = np.array([bool(each.failed) for each in ordered])
    return Load(name, users, failed=failed, reasons=reasons, left_out=reasons[0] if failed.all() else "", **columns)


def measurement(paths: Sequence[Path], where: Mapping[str, str]) -> Measurement:
    """Read what was measured of one server: directories of `cbsim measure`, files of other clients, in any number;
    `where` chooses rows of CSV files. Raises ScenarioError or RunError, also if they are of several servers.
    """
    first, *more = parts = [read(path, where) for path in paths]
    for part, name in product(more, SAME):
        both = [getattr(each.facts, name) for each in (first, part)]
        if None not in both and both[0] != both[1]:
            message = f"{part.path}: {name}: got {both[1]}, that of {first.path} is {both[0]}: of another server"
            raise ScenarioError(message, file=part.path, field=name, value=both[1])
    loads = dict[str, Load]()
    for part in parts:
        for load in part.loads:
            name = load.name if load.name not in loads else f"{part.path.stem} {load.name}"
            loads[name] = replace(load, name=name, left_out=load.left_out or _unusable(load))
    incomplete = "; ".join(part.incomplete for part in parts if part.incomplete)
    made = replace(first, loads=tuple(loads.values()), incomplete=incomplete)
    if not made.usable:
        raise ScenarioError(f"{first.path}: no load of it can be used: all requests failed, or were left out")
    return made


def _unusable(load: Load) -> str:
    """Return why a load cannot be simulated as it was, "" if it can."""
    lost, cached = load.failed.mean(), load.cached_tokens.clip(0).sum() / max(1, load.prompt_tokens.sum())
    if lost > LOST:
        return f"{lost:.0%} of its requests failed"
    return f"{cached:.0%} of its prompt tokens were cached, which is not replayed" if cached > CACHED else ""
