"""Packed runs: what comes out is what went in, a report of them is the same, and what is damaged is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from validations import case, edited

from analysis.cli import parser
from analysis.statistics.loading import VERDICT
from analysis.validation import cases, packed
from cbsim.server import replan

MAKESPANS = (9.0, 1.0, 3.0)  # of the synchronous repeats: the last one is the median; others are alike


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, loops: dict[str, Path]) -> Path:
    """Two cases on a curve, each loop measured three times, packed, with the report of the folders beside them."""
    place = tmp_path_factory.mktemp("made")
    for name, simulated, injected_ms in (("right", "fast", 0.0), ("wrong", "slow", 8.0)):
        folder = case(place, name, loops[simulated], [loops["fast"]] * 3, injected_ms=injected_ms, curve="tiny")
        for number, makespan in enumerate(MAKESPANS):
            edited(folder / "measured" / f"sync-{number}" / "summary.json", makespan_s=makespan)
    (place / "provenance.json").write_text(json.dumps({"device": "NVIDIA H100"}))
    assert parser.main(["predictions", str(place)]) == 0
    assert parser.main(["predictions", str(place), "--pack"]) == 0
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """The packed runs alone, as git keeps them."""
    for name in (*packed.FILES, "provenance.json"):
        shutil.copy(made / name, tmp_path)
    return tmp_path


def _flipped(content: bytes) -> bytes:
    """A bit of the first page."""
    return content[:64] + bytes([content[64] ^ 1]) + content[65:]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line on stderr of a command that a user got wrong."""
    assert parser.main(["predictions", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_report_of_packed_runs_is_that_of_the_folders(made: Path, tmp_path: Path) -> None:
    """Every number, sentence and figure, to the last byte."""
    place = tmp_path / "place"
    shutil.copytree(made, place)
    assert parser.main(["predictions", str(place)]) == 0
    whole = files(place / "report")
    shutil.rmtree(place / "validation")
    shutil.rmtree(place / "report")
    assert parser.main(["predictions", str(place)]) == 0
    assert files(place / "report") == whole
    assert len(json.loads(whole["report.json"])["replays"]) == 12


def test_unpacked_runs_are_the_run_directories_that_were_packed(made: Path, place: Path) -> None:
    """File by file; of the repeats that nobody looks into the documents, and what their replay came to."""
    assert parser.main(["predictions", str(place), "--unpack"]) == 0
    before, after = files(made / "validation"), files(place / "validation")
    verdicts = {name for name in after if name.endswith(VERDICT)}
    dropped = {str(Path(name).parent / table) for name in verdicts for table in (packed.STEPS, packed.REQUESTS)}
    own = {name: content for name, content in before.items() if name.rpartition("/")[2] in OWN}
    assert {**after, **{name: before[name] for name in dropped}} == {**own, **{name: after[name] for name in verdicts}}
    assert {Path(name).parent.name for name in verdicts} == {"sync-0", "sync-1", "async-0", "async-2"}
    assert json.loads(after["right/measured/sync-0/replay.json"])["says"] == "identical"


OWN = (packed.STEPS, packed.REQUESTS, "scenario.resolved.yaml", "env.json", "summary.json", "case.json")


def test_an_unpacked_run_replays_and_packs_again_to_the_same_bytes(made: Path, place: Path) -> None:
    assert parser.main(["predictions", str(place), "--unpack"]) == 0
    verdict = replan.rederive(place / "validation" / "wrong" / "measured" / "sync-2")
    assert verdict.matched == verdict.steps > 0 and verdict.difference is None
    assert parser.main(["predictions", str(place), "--pack"]) == 0
    assert all((place / name).read_bytes() == (made / name).read_bytes() for name in packed.FILES)


def test_the_tables_say_whose_rows_they_are(place: Path) -> None:
    """Readable without this project: keys, then the columns of a run, with units."""
    steps = pq.read_table(place / packed.STEPS)
    assert steps.column_names[:5] == ["case", "loop", "repeat", "world", "step"]
    assert set(zip(*(steps[name].to_pylist() for name in ("case", "loop", "world")), strict=True)) == {
        (name, loop, world) for name in ("right", "wrong") for loop in ("sync", "async") for world in cases.KINDS
    }
    assert set(steps.filter(pc.equal(steps["world"], "measured"))["repeat"].to_pylist()) == {2, 3}
    behind = steps.schema.field("compute_end_ns_behind")
    assert behind.metadata[b"definition"].endswith(b"less `compute_start_ns`") and behind.metadata[b"unit"] == b"ns"
    runs = pq.read_table(place / packed.RUNS).to_pylist()
    assert len(runs) == 16 and json.loads(runs[0]["summary"])["makespan_s"] == MAKESPANS[0]


def test_of_cases_without_tables_the_numbers_are_still_told(made: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    shutil.copytree(made, place)
    assert parser.main(["predictions", str(place)]) == 0
    whole = json.loads((place / "report" / "report.json").read_text())
    assert parser.main(["predictions", str(place), "--pack", "right"]) == 0
    shutil.rmtree(place / "validation")
    assert parser.main(["predictions", str(place)]) == 0
    some = json.loads((place / "report" / "report.json").read_text())
    assert all(some[name] == whole[name] for name in ("scores", "replays", "figures"))
    text = (place / "report" / "report.md").read_text()
    assert "**wrong**: packed without steps and requests" in text
    assert "right: CPU and GPU, measured above simulated" in text


def test_a_working_folder_goes_before_packed_runs(made: Path, place: Path) -> None:
    """What is measured anew is seen before it is packed."""
    shutil.copytree(made / "validation" / "right", place / "validation" / "right")
    assert [one.name for one in cases.read(place).cases] == ["right"]


def test_what_a_user_gets_wrong_is_one_line(made: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{place / 'validation'}: no such folder: there is nothing to pack" in refused(capsys, place, "--pack")
    assert "--pack x: expected one of right, wrong" in refused(capsys, made, "--pack", "x")
    assert f"{made / 'validation'}: is there already" in refused(capsys, made, "--unpack")
    (place / packed.RUNS).unlink()
    assert f"{place / packed.RUNS}: cannot be read: No such file" in refused(capsys, place, "--unpack")
    assert f"{place}: holds no case" in refused(capsys, place)


@pytest.mark.parametrize("name", packed.FILES)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[: len(content) // 2], "not a parquet table"),
        (lambda _: b"", "not a parquet table"),
        (_flipped, "not a parquet table"),
        (None, "cannot be read: "),
    ],
    ids=["cut", "empty", "flipped", "gone"],
)
def test_a_damaged_file_is_named_with_the_reason(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[bytes], bytes] | None, reason: str
) -> None:
    file = place / name
    content = file.read_bytes()
    file.unlink()
    if damage is None:
        file.mkdir()
    else:
        file.write_bytes(damage(content))
    assert f"{file}: {reason}" in refused(capsys, place)


@pytest.mark.parametrize(
    ("name", "column", "value", "said"),
    [
        (packed.RUNS, "folder", "../../x", "runs.parquet: folder is '../../x', expected the name of a folder"),
        (packed.RUNS, "case", "..", "runs.parquet: case is '..', expected the name of a folder"),
        (packed.RUNS, "world", "elsewhere", "runs.parquet: world is 'elsewhere', expected measured or simulated"),
        (packed.RUNS, "summary", "{", "runs.parquet/right/measured/sync-0/summary.json: not JSON"),
        (packed.RUNS, "about", "[]", "runs.parquet/right/case.json: is [], expected a JSON object"),
        (packed.RUNS, "replay", '{"steps": "3"}', "replay.json: steps is '3', expected a whole number"),
        (packed.STEPS, "repeat", 7, "runs.parquet/right/measured/async-1/requests.parquet: first_step of request 0"),
    ],
)
def test_a_row_that_does_not_fit_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, column: str, value: object, said: str
) -> None:
    table = pq.read_table(place / name)
    at = table.schema.get_field_index(column)
    values = [value] * len(table) if column in ("about", "repeat") else [value, *table[column].to_pylist()[1:]]
    field = table.schema.field(column)
    changed = table.set_column(at, field, pa.array(values, field.type))
    pq.write_table(changed, place / name)
    assert said in refused(capsys, place)
