"""A validation folder: what is read of it, what is left out and told, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.validations import case, edited, prolonged, put

from analysis.cli import parser
from analysis.statistics.compare import Incomparable
from analysis.validation import cases
from cbsim.errors import RunError
from cbsim.metrics.bars import BARS

MAKESPAN = next(bar for bar in BARS if bar.label == "makespan")


def test_a_case_has_its_runs_by_loop_and_the_median_stands_for_the_repeats(
    tmp_path: Path, loops: dict[str, Path]
) -> None:
    """Lanes, requests and phases are of one run: the one whose makespan no outlier decides."""
    made = case(tmp_path, "a", loops["fast"], [loops["fast"]] * 3)
    for index, makespan in enumerate((9.0, 1.0, 3.0)):
        prolonged(made / "measured" / f"sync-{index}", makespan)
    (found,) = cases.read(tmp_path).cases
    assert [run.label for run in found.loops["sync"].measured] == [f"a sync measured #{i}" for i in (1, 2, 3)]
    assert found.loops["sync"].middle.path.name == "sync-2"
    assert found.loops["async"].simulated.label == "a async simulated"
    assert {one.spread for one in found.scores if one.bar == MAKESPAN} == {(9 - 1) / 3, 0}


def test_cases_stand_in_the_order_of_their_numbers(tmp_path: Path, loops: dict[str, Path]) -> None:
    for name in ("cpu-16", "cpu-2", "8k"):
        case(tmp_path, name, loops["fast"], [loops["fast"]])
    assert [one.name for one in cases.read(tmp_path).cases] == ["8k", "cpu-2", "cpu-16"]


def test_incomplete_runs_are_left_out_and_told(one: Path, loops: dict[str, Path]) -> None:
    """Half of a run is no measurement; one that died early has no tables at all. Neither stops the report."""
    measured = one / "validation" / "a" / "measured"
    put(loops["fast"] / "sync", measured / "cut", measured=True)
    (measured / "cut" / "INCOMPLETE").write_text("interrupted, after 5 steps\n")
    (measured / "died").mkdir()
    (measured / "died" / "INCOMPLETE").write_bytes(b"")
    found = cases.read(one)
    assert len(found.cases[0].loops["sync"].measured) == 1
    assert [(told.kind, told.run) for told in found.left_out] == [("incomplete", "a")] * 2
    assert "measured/cut is incomplete and left out: interrupted, after 5 steps" in found.left_out[0].reason
    assert "no reason was written" in found.left_out[1].reason


@pytest.mark.parametrize(("kind", "said"), [("measured", "not measured yet"), ("simulated", "not simulated")])
def test_what_has_not_been_run_is_told_and_left_out(one: Path, loops: dict[str, Path], kind: str, said: str) -> None:
    """A campaign can be looked at while it is under way: whole cases, and single loops of a case."""
    case(one, "b", loops["fast"], [loops["fast"]])
    shutil.rmtree(one / "validation" / "b" / kind)
    for path in (one / "validation" / "a" / kind).glob("async*"):
        shutil.rmtree(path)
    found = cases.read(one)
    assert [(told.run, told.reason) for told in found.left_out] == [
        ("a", f"the async loop is {said}, left out"),
        ("b", f"{said}, left out"),
    ]
    assert [(one.name, list(one.loops)) for one in found.cases] == [("a", ["sync"])]
    assert "speed-up" not in {one.bar.label for one in found.cases[0].scores}


def test_no_case_at_all_is_refused_with_what_was_expected(one: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path / "validation" / "a" / "measured"):
        with pytest.raises(RunError, match="holds no case; expected validation/CASE/ with") as caught:
            cases.read(place)
        assert str(place) in str(caught.value)
    shutil.rmtree(one / "validation" / "a" / "measured")
    with pytest.raises(RunError, match="a: not measured yet, left out; expected"):
        cases.read(one)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "b"}, "name: got 'b', expected that of its folder, 'a'"),
        ({"about": 3}, "about: got 3, expected text"),
        ({"scheduler": None}, "scheduler: got nothing, expected text"),
        ({"injected_ms": -1}, "injected_ms: got -1, must be >= 0"),
        ({"injected_ms": True}, "injected_ms: got true, expected a number"),
        ({"load": 0}, "load: got 0, must be > 0"),
        ({"curve": "two\nlines"}, "curve: got 'two\\nlines', must match"),
    ],
)
def test_a_broken_field_is_named_with_what_it_is_and_what_is_expected(
    one: Path, capsys: pytest.CaptureFixture[str], changes: Mapping[str, Any], said: str
) -> None:
    file = one / "validation" / "a" / "case.json"
    edited(file, **changes)
    assert parser.main(["report", str(one)]) == 2
    assert f"{file}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["name", "injected_ms", "load", "curve"])
def test_every_field_is_written_out(one: Path, name: str) -> None:
    """Also those that may be null: a forgotten load would leave the bar of TTFT out unseen."""
    file = one / "validation" / "a" / "case.json"
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != name}))
    with pytest.raises(RunError, match=f"case.json: {name}: is required"):
        cases.read(one)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("validation/a/case.json", b"\xff", "is not UTF-8 text"),
        ("validation/a/case.json", b"{", "not valid JSON"),
        ("validation/a/case.json", b"[]", "expected a JSON object"),
        ("provenance.json", b'{"device": 3}', "device: got 3, expected text"),
        ("validation/a/measured", b"", "cannot be read: Not a directory"),
        ("validation/a/measured/sync-0/env.json", None, "cannot be read: "),
        ("validation/a/measured/sync-0/INCOMPLETE", None, ""),
        ("validation", b"", "cannot be read: Not a directory"),
    ],
)
def test_what_cannot_be_read_is_one_message_that_names_it(
    one: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, said: str
) -> None:
    """Files of another kind, folders where files are expected and the reverse: never a traceback."""
    path = one / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert parser.main(["report", str(one)]) == (2 if said else 0)
    if said:
        assert f"{path}: " in (err := capsys.readouterr().err) and said in err


@pytest.mark.parametrize(("kind", "is_one"), [("measured", "simulated"), ("simulated", "measured")])
def test_a_run_of_the_other_kind_is_refused_by_name(one: Path, loops: dict[str, Path], kind: str, is_one: str) -> None:
    """A simulated run among the measured ones would make every error small."""
    path = put(loops["fast"] / "sync", one / "validation" / "a" / kind / "stray", measured=is_one == "measured")
    with pytest.raises(RunError, match=f"stray: is {is_one}, expected a {kind} run; .* go to {is_one}/") as caught:
        cases.read(one)
    assert str(path) in str(caught.value)


def test_runs_of_other_workloads_are_refused_by_name(one: Path, tmp_path: Path, loops: dict[str, Path]) -> None:
    """Also if each loop by itself is of one workload: a speed-up is of both."""
    put(loops["other"] / "async", one / "validation" / "a" / "measured" / "stray", measured=True)
    with pytest.raises(Incomparable, match=r"a async measured #\d: the workload differs: seed is"):
        cases.read(one)
    made = case(tmp_path / "b", "b", loops["fast"], [loops["fast"]])
    for kind in ("measured", "simulated"):
        for path in (made / kind).glob("async*"):
            shutil.rmtree(path)
        put(loops["other"] / "async", made / kind / "async", measured=kind == "measured")
    with pytest.raises(Incomparable, match="b sync simulated and b async simulated: the workload differs"):
        cases.read(tmp_path / "b")


def test_two_simulated_runs_of_a_loop_are_refused(one: Path, loops: dict[str, Path]) -> None:
    """Which of them is meant cannot be known."""
    put(loops["fast"] / "sync", one / "validation" / "a" / "simulated" / "again", measured=False)
    with pytest.raises(RunError, match="again, sync are of the sync loop, expected one run of it"):
        cases.read(one)


def test_a_summary_of_other_tables_is_named(one: Path) -> None:
    file = one / "validation" / "a" / "measured" / "sync-0" / "summary.json"
    edited(file, makespan_s=0)
    with pytest.raises(RunError, match="makespan_s is 0, that of the tables beside it is 0") as caught:
        cases.read(one)
    assert str(file) in str(caught.value)
