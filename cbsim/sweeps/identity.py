"""What makes two runs the same: the resolved scenario, the code that computes them, and the data that they read."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from cbsim.scenario import catalog
from cbsim.scenario.scenario import Scenario
from cbsim.schedulers import registry

ROOMS = ("policy", "kv", "schedulers", "scenario", "workload", "cost", "machine", "runs", "record", "metrics")
"""The rooms that a number of a run follows from; drawing, measurements and command lines leave it alone."""
LABELS = ("name", "question")
"""Fields of a scenario that no number follows from."""


@cache
def code() -> str:
    """The state of the code: a hash of the sources of those rooms. Equal wherever the same code is installed."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def key(scenario: Scenario, warmup: float = 0.0) -> str:
    """Names a run of one loop: equal where everything is that its numbers follow from. `warmup` as in Task."""
    fields = scenario.model_dump(mode="json", exclude=set(LABELS))
    files = {field: _content(field, path) for field, path in _paths(fields)}
    parts = [fields, files, _policy(scenario), *([warmup] if warmup else [])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:24]


def _paths(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """The files and folders that a scenario names, by dotted field: what stands in fields called `path`."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        if name == "path" and isinstance(part, str):
            yield f"{field}path", part
        else:
            yield from _paths(part, f"{field}{name}.")


def _content(field: str, path: str) -> str:
    """A hash of a data file, or of all tables whose names begin so. Raises ScenarioError if there is none."""
    if field.startswith("cost."):
        tables = catalog.tables(path)
        files = sorted(tables.rglob("*") if tables.is_dir() else tables.parent.glob(f"{tables.name}*"))
    else:
        files = [catalog.data(path, field)]
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):
        state = file.stat()
        digest.update(_hashed(file, state.st_mtime_ns, state.st_size))
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _hashed(file: Path, changed_ns: int, size: int) -> bytes:
    """Of a file in one state."""
    del changed_ns, size
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _policy(scenario: Scenario) -> str | None:
    """A hash of the modules that define a scheduler which is not ours."""
    if scenario.scheduler.name in registry.OURS:
        return None
    kind = scenario.kind
    modules = {getattr(part, "__module__", "") for part in (kind.settings, kind.resolve, kind.make)}
    files = {getattr(sys.modules.get(module), "__file__", None) for module in modules}
    digest = hashlib.sha256()
    for file in sorted(filter(None, files)):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()
