"""What is packed of a validation folder: of each case and loop the runs that the report looks into, whole, and of the
other repeats the documents and what their replay came to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from analysis.statistics.loading import LoadedRun
from analysis.statistics.pairing import ReplayOutcome
from analysis.validation.cases import MEASURED, SIMULATED, DeviceCases, Pair, ValidationCase
from analysis.validation.packed import DOCUMENTS, Key, Packed
from cbsim.results.directory import RunError


def kept(validation: DeviceCases, names: Collection[str]) -> list[Packed]:
    """Every run of the report, with the tables of the cases of these names; of all, if none is named. Raises RunError
    for a name that is no case.
    """
    known = [case.name for case in validation.cases]
    for name in names:
        if name not in known:
            raise RunError(f"--pack {name}: expected one of {', '.join(known)}")
    return [
        run
        for case in validation.cases
        for run in _of_case(case, validation.place, whole=not names or case.name in names)
    ]


def _of_case(case: ValidationCase, place: Path, *, whole: bool) -> Iterator[Packed]:
    about = _text(place / "validation" / case.name / "case.json")
    for loop, pair in case.loops.items():
        for run, key, replay in _of_pair(case, loop, pair):
            documents = {name: _text(run.path / file) for name, file in DOCUMENTS.items()}
            looked_into = run is pair.middle or run is pair.simulated
            tables = run if whole and run.whole and looked_into else None
            verdict = {name: value for name, value in asdict(replay).items() if name != "run"} if replay else None
            yield Packed(key, run.path.name, about, documents, tables, verdict)


def _of_pair(case: ValidationCase, loop: str, pair: Pair) -> Iterator[tuple[LoadedRun, Key, ReplayOutcome | None]]:
    replays: Sequence[ReplayOutcome] = case.replays[loop]
    for number, (run, replay) in enumerate(zip(pair.measured, replays, strict=True), start=1):
        yield run, Key(case.name, loop, number, MEASURED), replay
    yield pair.simulated, Key(case.name, loop, 1, SIMULATED), None


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error.strerror or error}") from None
