"""Packed runs: what comes out is what went in, and a report of them has the same numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.scripts import script
from support.validations import case, prolonged

from analysis.cli import parser
from analysis.statistics.loading import VERDICT
from cbsim.runs import replan

packed = script("hardware/packed")
MAKESPANS = (9.0, 1.0, 3.0)  # of the synchronous repeats: the last one is the median; others are alike
OWN = (packed.STEPS, packed.REQUESTS, "scenario.resolved.yaml", "env.json", "summary.json", "case.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, loops: dict[str, Path]) -> Path:
    """Two cases on a curve, each loop measured three times, packed, with the report of the folders beside them."""
    place = tmp_path_factory.mktemp("made")
    for name, simulated, injected_ms in (("right", "fast", 0.0), ("wrong", "slow", 8.0)):
        folder = case(place, name, loops[simulated], [loops["fast"]] * 3, injected_ms=injected_ms, curve="tiny")
        for number, makespan in enumerate(MAKESPANS):
            prolonged(folder / "measured" / f"sync-{number}", makespan)
    assert parser.main(["report", str(place)]) == 0
    packed.pack(place, ())
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """The packed runs alone, as git keeps them, unpacked."""
    for name in packed.FILES:
        shutil.copy(made / name, tmp_path)
    packed.unpack(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_unpacked_runs_are_the_run_directories_that_were_packed(made: Path, place: Path) -> None:
    """File by file; of the repeats that no report looks into the documents, and what their replay came to."""
    before, after = files(made / "validation"), files(place / "validation")
    verdicts = {name for name in after if name.endswith(VERDICT)}
    dropped = {str(Path(name).parent / table) for name in verdicts for table in (packed.STEPS, packed.REQUESTS)}
    own = {name: content for name, content in before.items() if name.rpartition("/")[2] in OWN}
    assert {**after, **{name: before[name] for name in dropped}} == {**own, **{name: after[name] for name in verdicts}}
    assert {Path(name).parent.name for name in verdicts} == {"sync-0", "sync-1", "async-0", "async-2"}
    assert json.loads(after["right/measured/sync-0/replay.json"])["says"] == "identical"


def test_they_report_replay_and_pack_again_to_the_same_bytes(made: Path, place: Path) -> None:
    assert parser.main(["report", str(place)]) == 0
    whole, again = files(made / "report"), files(place / "report")
    changed = {name for name in whole if whole[name] != again[name]}
    assert changed <= {"report.md", "report.json", "report.html"}  # which name the command
    assert json.loads(whole["report.json"])["data"] == json.loads(again["report.json"])["data"]
    verdict = replan.rederive(place / "validation" / "wrong" / "measured" / "sync-2")
    assert verdict.matched == verdict.steps > 0 and verdict.difference is None
    packed.pack(place, ())
    assert all((place / name).read_bytes() == (made / name).read_bytes() for name in packed.FILES)


def test_of_cases_without_tables_the_numbers_are_still_there(made: Path, place: Path) -> None:
    packed.pack(place, ["right"])
    assert {row["case"] for row in pq.read_table(place / packed.STEPS).to_pylist()} == {"right"}
    shutil.rmtree(place / "validation")
    packed.unpack(place)
    assert parser.main(["report", str(place)]) == 0
    whole, some = (json.loads((folder / "report" / "report.json").read_text()) for folder in (made, place))
    assert some["data"] == whole["data"] and some["figures"] == whole["figures"]
    text = (place / "report" / "report.md").read_text()
    assert "**wrong**: packed without steps and requests" in text
    assert "right: CPU and GPU, measured above simulated" in text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("pack {} x", "{}: no case x"),
        ("unpack {}", "{}/validation: is there already; unpacking writes over nothing"),
        ("pack {}/nosuch", "{}/nosuch: holds no case; "),
        ("unpack {}/nosuch", "{}/nosuch/runs.parquet: cannot be read: "),
        ("unpack {}/junk", "{}/junk/runs.parquet: is not a Parquet file"),
    ],
)
def test_mistakes_are_one_line(options: str, reason: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No case is unknown, and nothing is written over."""
    (place / "junk").mkdir()
    (place / "junk" / packed.RUNS).write_text("junk")
    before = files(place)
    with pytest.raises(SystemExit) as end:
        packed.main(options.format(place).split())
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and reason.format(place) in error
    assert files(place) == before
