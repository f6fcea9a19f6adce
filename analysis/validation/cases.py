"""A validation folder: workloads that were measured and simulated, each a case with its runs and their scores.

validation/<case>/case.json describes a case; the run directories beside it, in measured/ and simulated/, are one or
more runs of each loop and one of each. Missing ones are left out and reported; invalid ones are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from analysis.statistics import compare, loading, pairing
from analysis.statistics.loading import VERDICT, LoadedRun
from analysis.statistics.pairing import ReplayOutcome
from cbsim.draw.report import Caveat
from cbsim.errors import RunError
from cbsim.files import read_json
from cbsim.measured.own.clients import checked
from cbsim.metrics import bars
from cbsim.metrics.bars import Score
from cbsim.record.directory import MARKER
from cbsim.scenario.fields import Form, shown

LOOPS = ("sync", "async")
MEASURED, SIMULATED = KINDS = ("measured", "simulated")
LACKS = {MEASURED: "not measured yet", SIMULATED: "not simulated"}
EXPECTED = "expected validation/CASE/ with case.json, measured/ and simulated/"


@dataclass(frozen=True, slots=True)
class Pair:
    """A loop of a case: the simulated run, and the measured ones in the order in which they were made."""

    simulated: LoadedRun
    measured: Sequence[LoadedRun]

    @property
    def middle(self) -> LoadedRun:
        """The measured run of median makespan; of an even number the faster one in the middle."""
        ordered = sorted(self.measured, key=lambda run: float(run.summary["makespan_s"]))
        return ordered[(len(ordered) - 1) // 2]

    @property
    def whole(self) -> bool:
        """Whether both runs that are looked into still have their tables."""
        return self.middle.whole and self.simulated.whole


@dataclass(frozen=True, slots=True)
class ValidationCase:
    """A workload with its runs by loop. `load` is the rate of arrivals as a share of the capacity, None: all at once.

    `predicted`: simulated speed-ups for other CPU work, by its milliseconds. `replays`: of the measured runs, by loop.
    """

    name: str
    about: str
    model: str
    scheduler: str
    injected_ms: float
    load: float | None
    curve: str | None
    predicted: Mapping[str, float]
    loops: Mapping[str, Pair]
    scores: Sequence[Score]
    replays: Mapping[str, Sequence[ReplayOutcome]]

    @property
    def runs(self) -> list[LoadedRun]:
        return [run for pair in self.loops.values() for run in (*pair.measured, pair.simulated)]

    @property
    def whole(self) -> bool:
        """Whether the runs that are looked into still have their tables."""
        return all(pair.whole for pair in self.loops.values())

    @property
    def simulated_summaries(self) -> dict[str, Mapping[str, Any]]:
        """The summary of the simulated run, by loop."""
        return {loop: pair.simulated.summary for loop, pair in self.loops.items()}

    @property
    def measured_summaries(self) -> dict[str, list[Mapping[str, Any]]]:
        """The summaries of the measured runs, by loop."""
        return {loop: [run.summary for run in pair.measured] for loop, pair in self.loops.items()}


@dataclass(frozen=True, slots=True)
class DeviceCases:
    """The cases of a device that have runs to compare, and what was left out. `device` is from provenance.json."""

    folder: Path
    device: str | None
    cases: Sequence[ValidationCase]
    left_out: Sequence[Caveat]


def read(folder: Path) -> DeviceCases:
    """Read the cases of a validation folder. Raises RunError naming file, field and what is expected, and
    Incomparable naming runs that do not belong together.
    """
    cases_read = [_read_case(each) for each in _folders(folder / "validation")]
    cases = [case for case, _ in cases_read if case is not None]
    left_out = [caveat for _, caveats in cases_read for caveat in caveats]
    if not cases:
        reasons = "; ".join(f"{caveat.run}: {caveat.reason}" for caveat in left_out)
        raise RunError(f"{folder}: {reasons or 'holds no case'}; {EXPECTED}")
    file = folder / "provenance.json"
    device = checked(Provenance, read_json(file, RunError), file).device if file.exists() else None
    return DeviceCases(folder, device, cases, left_out)


def _folders(parent: Path) -> list[Path]:
    """Return the folders in a folder, those with numbers in their names by number; none if it does not exist."""
    try:
        folders = [path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
        words = re.compile("([0-9]+)")  # between numbers, so that 8k comes before 32k
        return sorted(folders, key=lambda p: [int(x) if at % 2 else x for at, x in enumerate(words.split(p.name))])
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{parent}: cannot be read: {error.strerror or error}; {EXPECTED}") from None


Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*\S[^\x00-\x1f\x7f]*$")]


class About(Form):
    """The content of case.json. Nullable fields are required, since a forgotten load would silently leave bars out."""

    name: Line
    about: Line
    model: Line
    scheduler: Line
    injected_ms: Annotated[float, Field(ge=0)]
    load: Annotated[float, Field(gt=0)] | None
    curve: Line | None
    predicted: dict[Annotated[str, Field(pattern=r"^\d{1,9}(\.\d{1,9})?$")], Annotated[float, Field(ge=-1)]]


class Provenance(Form):
    """The fields that are read from provenance.json."""

    device: Line | None = None


class Replayed(Form):
    """The outcome of deriving a run's plans again when it still had its tables."""

    matched: Annotated[int, Field(ge=0)] | None = None
    steps: Annotated[int, Field(ge=0)]
    says: str


def _read_case(folder: Path) -> tuple[ValidationCase | None, list[Caveat]]:
    """Return the case, None if there is nothing to compare, and caveats on what was left out of it."""
    file = folder / "case.json"
    about = checked(About, read_json(file, RunError), file)
    if about.name != folder.name:
        raise RunError(f"{file}: name: got {shown(about.name)}, expected that of its folder, {folder.name!r}")
    left_out = [*_cut_short(folder)]
    runs = {kind: _runs(folder, kind) for kind in KINDS}
    left_out += _lacking(folder.name, runs)
    loops = {}
    for loop in LOOPS:
        theirs, ours = ([run for run in runs[kind] if run.loop == loop] for kind in KINDS)
        if ours and theirs:
            loops[loop] = Pair(ours[0], theirs)
    if not loops:
        return None, left_out
    for pair in loops.values():
        for run in pair.measured:
            compare.check((pair.simulated, run))
    compare.check([pair.simulated for pair in loops.values()])
    replays = {loop: [_replay(run) for run in pair.measured] for loop, pair in loops.items()}
    case = ValidationCase(**about.model_dump(), loops=loops, scores=(), replays=replays)
    scores = bars.scores(case.simulated_summaries, case.measured_summaries, about.load)
    return replace(case, scores=scores), left_out


def _replay(run: LoadedRun) -> ReplayOutcome:
    """Return the outcome of deriving a run's plans again, now or when it still had its tables."""
    if run.whole:
        return pairing.replayed(run)
    verdict = checked(Replayed, read_json(run.path / VERDICT, RunError), run.path / VERDICT)
    return ReplayOutcome(run.label, verdict.matched, verdict.steps, verdict.says)


def _cut_short(folder: Path) -> Iterator[Caveat]:
    for path in (path for kind in KINDS for path in _folders(folder / kind) if (path / MARKER).exists()):
        try:
            reason = (path / MARKER).read_text(errors="replace").strip() or "no reason was written"
        except OSError:
            reason = "its reason cannot be read"
        where = path.relative_to(folder).as_posix()
        yield Caveat("incomplete", folder.name, f"{where} is incomplete and left out: {reason}")


def _runs(folder: Path, kind: str) -> list[LoadedRun]:
    """Return the complete runs of a kind, labelled with case, loop and kind, and a number if there are several."""
    runs = loading.read([path for path in _folders(folder / kind) if not (path / MARKER).exists()])
    for run in runs:
        _check_kind(run, kind)
    named = []
    for run in runs:
        alike = [other for other in runs if other.loop == run.loop]
        if len(alike) > 1 and kind == SIMULATED:
            names = ", ".join(other.path.name for other in alike)
            raise RunError(f"{run.path.parent}: {names} are of the {run.loop} loop, expected one run of it")
        number = f" #{alike.index(run) + 1}" if len(alike) > 1 else ""
        named.append(replace(run, label=f"{folder.name} {run.loop} {kind}{number}"))
    return named


def _check_kind(run: LoadedRun, kind: str) -> None:
    actual, other = (MEASURED, SIMULATED) if run.measured else (SIMULATED, MEASURED)
    if actual != kind:
        raise RunError(f"{run.path}: is {actual}, expected a {other} run; those that were {actual} go to {actual}/")
    makespan = run.summary.get("makespan_s")
    if not makespan or makespan < 0:
        raise RunError(f"{run.path / 'summary.json'}: makespan_s is {shown(makespan)}, expected seconds above 0")


def _lacking(case: str, runs: Mapping[str, Sequence[LoadedRun]]) -> Iterator[Caveat]:
    """Yield a caveat on a case without runs, or on each of its loops without."""
    for kind in KINDS:
        if not runs[kind]:
            yield Caveat(LACKS[kind], case, f"{LACKS[kind]}, left out")
            continue
        missing = [loop for loop in LOOPS if all(run.loop != loop for run in runs[kind])]
        yield from (Caveat(LACKS[kind], case, f"the {loop} loop is {LACKS[kind]}, left out") for loop in missing)
