"""Files found by name: scenarios, model and hardware shapes, and data that is too large to ship."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cbsim.errors import ScenarioError
from cbsim.files import PATH_BOUND, too_long, until_changed
from cbsim.scenario.fields import bare, cut, near, shown

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / "cbsim" / "scenarios"  # in an installed wheel the scenarios lie inside the package
SCENARIOS = INSTALLED if INSTALLED.is_dir() else ROOT / "scenarios"


def names(folder: str = "") -> list[str]:
    """Return the names that `scenario` or `shape` finds, in order. Calibrations (`*.fitted.yaml`) are named by path."""
    return _names(SCENARIOS / folder)


@until_changed
def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml") if not path.stem.endswith(".fitted"))


def scenario(name_or_path: str | Path) -> Path:
    """Return the scenario file at a path, or of a name that comes with the project. Raises ScenarioError."""
    path = Path(name_or_path)
    if too_long(str(path)):
        raise ScenarioError(f"{cut(str(path), 60)}: {PATH_BOUND}", file=path, bound=PATH_BOUND)
    if path.is_file():
        return path
    if path.is_dir() and (path.suffix or len(path.parts) > 1):
        raise ScenarioError(f"{path}: is a folder, expected a scenario file")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        wrong = "is not a regular file" if path.exists() else f"no such file{near(path.stem, names())}"
        raise ScenarioError(f"{path}: {wrong}", file=path)
    return _named("", str(name_or_path), "scenario")


def shape(folder: str, name: str, base: Path | None = None) -> Path:
    """Return the file of a model (`models`) or a GPU (`hardware`) by its name, or its path from the folder `base` or
    the current one. A model may also be a config.json, or a folder that holds one.
    """
    if too_long(name):
        raise ScenarioError(f"got {shown(name)}, {PATH_BOUND}", value=name, bound=PATH_BOUND)
    candidates = [(base or Path()) / name, Path(name)]
    if folder == "models" and ("/" in name or bare(name) not in map(bare, names(folder))):
        for candidate in filter(Path.is_dir, candidates):
            if (candidate / "config.json").exists():
                return candidate / "config.json"
            raise ScenarioError(f"{candidate}: holds no config.json", file=candidate)
    if name.endswith((".yaml", ".yml", ".json")):
        for candidate in filter(Path.is_file, candidates):
            return candidate
        raise ScenarioError(f"{candidates[0]}: no such file", file=candidates[0])
    return _named(folder, name, folder.removesuffix("s"))


def _named(folder: str, name: str, noun: str) -> Path:
    return SCENARIOS / folder / f"{known(names(folder), name, noun)}.yaml"


def known(among: Sequence[str], name: str, noun: str) -> str:
    """Return the one that has a name, whatever its case and separators. Raises ScenarioError."""
    for candidate in among:
        if bare(candidate) == bare(name):
            return candidate
    allowed = ", ".join(among) or "none"
    message = f"unknown {noun} {name!r}{near(name, among)} (known: {allowed})"
    raise ScenarioError(message, field=noun, value=name, bound=f"one of {allowed}")


def data_folders() -> list[Path]:
    """Return the folders searched for data files that do not lie beside the scenario."""
    folder = os.environ.get("CBSIM_DATA")
    return [*([Path(folder)] if folder else []), ROOT.parent / "shared" / "data"]


def tables(path: str) -> Path:
    """Return the folder of a scenario's kernel tables. Raises ScenarioError."""
    candidates = [Path(path), *(folder / path for folder in data_folders())]
    get = "`python -m cbsim fetch-tables CARD` brings those of engines, "
    return _found("cost.path", f"no folder of tables {path!r}", candidates, Path.is_dir, get)


def data(path: str, field: str = "workload.path") -> Path:
    """Return the data file that a scenario names. Raises ScenarioError with all paths that were tried."""
    candidates = [folder / path for folder in data_folders()]  # an absolute path is unchanged
    return _found(field, f"no file {path!r}", candidates, Path.is_file)


def _found(field: str, what: str, candidates: list[Path], there: Callable[[Path], bool], get: str = "") -> Path:
    for candidate in candidates:
        if there(candidate):
            return candidate
    if other := next(filter(Path.exists, candidates), None):
        kind = "a folder" if other.is_dir() else "not a folder" if other.is_file() else "not a regular file"
        raise ScenarioError(f"{field}: {what}: {other} is {kind}", field=field)
    looked = "; ".join(str(candidate) for candidate in dict.fromkeys(candidates))
    unset = "" if os.environ.get("CBSIM_DATA") else " ($CBSIM_DATA is not set)"
    hint = f"{get}docs/data.md says where to get it"
    raise ScenarioError(f"{field}: {what} beside the scenario, nor at {looked}{unset}; {hint}", field=field)
