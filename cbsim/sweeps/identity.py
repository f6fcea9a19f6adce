"""The identity of a run: a key over its resolved scenario, the code that computes it, and the data that it reads."""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from cbsim.files import until_changed
from cbsim.routers import registry as routers
from cbsim.scenario import catalog
from cbsim.scenario.scenario import Scenario
from cbsim.schedulers import registry
from cbsim.workload import generators

ROOMS = (
    "policy",
    "kv",
    "schedulers",
    "routers",
    "scenario",
    "workload",
    "cost",
    "machine",
    "runs",
    "record",
    "metrics",
)
"""The packages that determine a run's numbers; drawing, measurements and command lines do not affect them."""
LABELS = ("name", "question")
"""Fields of a scenario that do not affect any number."""


@cache
def code() -> str:
    """Return the state of the code: a hash of the sources in ROOMS, equal wherever the same code is installed."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def key(scenario: Scenario, warmup: float = 0.0) -> str:
    """Return the key of a run of one loop; it is equal if all inputs of its numbers are. `warmup` is that of Task."""
    fields = scenario.model_dump(mode="json", exclude=set(LABELS))
    several = [(within, server.model_dump(mode="json")) for within, server in scenario.pools if scenario.fleet]
    named = [(within, *each) for within, server in several or [("", fields)] for each in generators.files(server)]
    files = {f"{within}{field}": _content(field, path) for within, field, path in named}
    parts = [fields, files, _policy(scenario), *([warmup] if warmup else [])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:24]


def _content(field: str, path: str) -> str:
    """Return a hash of a data file, or of all cost tables in a folder. Raises ScenarioError if there is none."""
    if field.startswith("cost."):
        files = sorted(catalog.tables(path).rglob("*"))
    else:
        files = [catalog.data(path, field)]
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):
        digest.update(_hashed(file))
    return digest.hexdigest()


@until_changed
def _hashed(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _policy(scenario: Scenario) -> str | None:
    """Return a hash of the modules that define schedulers, a router or rules of the user; None without any."""
    kinds: list[Any] = [server.kind for _, server in scenario.pools if server.scheduler.name not in registry.OURS]
    if (fleet := scenario.fleet) is not None:
        kinds += [routers.ROUTERS.find(name) for name in (fleet.router.name,) if name not in routers.OURS]
        rules = [pool.autoscale.rule.name for pool in fleet.pools if pool.autoscale]
        kinds += [routers.RULES.find(name) for name in rules if name not in routers.RULES_OURS]
    if not kinds:
        return None
    parts = [getattr(kind, part, None) for kind in kinds for part in ("settings", "resolve", "make")]
    files = {getattr(sys.modules.get(getattr(part, "__module__", "")), "__file__", None) for part in parts}
    digest = hashlib.sha256()
    for file in sorted(filter(None, files)):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()
