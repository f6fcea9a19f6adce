"""The report of a validation folder: when a bar is missed, where a miss comes from, what is drawn and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.scripts import script
from support.validations import GPU, case

from analysis.cli import parser
from analysis.statistics.pairing import ReplayOutcome
from analysis.validation import cases, report
from analysis.validation.cases import DeviceCases, ValidationCase
from analysis.validation.report import SpeedUpPoint
from cbsim.draw import folder, render
from cbsim.draw.chart import Chart, Level, Line, Points
from cbsim.metrics.bars import BARS, BOTH, Bar, Score

BAR = {bar.label: bar for bar in BARS}
MAKESPAN, SPEED_UP, TTFT = BAR["makespan"], BAR["async speed-up"], BAR["TTFT p50"]


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory, loops: dict[str, Path]) -> DeviceCases:
    """Two cases on a curve: one is simulated right, in the other everything takes twice as long."""
    place = tmp_path_factory.mktemp("slow")
    case(place, "right", loops["fast"], [loops["fast"]], injected_ms=0.0, curve="tiny")
    case(place, "wrong", loops["slow"], [loops["fast"]] * 2, injected_ms=8.0, curve="tiny")
    (place / "provenance.json").write_text(json.dumps({"device": "NVIDIA H100"}))
    return cases.read(place)


def score(bar: Bar, error: float, loop: str = "sync", *, spread: float | None = None, counts: bool = True) -> Score:
    return Score(loop, bar, 1 + error, 1.0, error, spread, counts)


def scored(like: ValidationCase, name: str, *scores: Score) -> ValidationCase:
    return replace(like, name=name, scores=scores)


# -- what it comes to -------------------------------------------------------------------------------------------------


def test_bars_are_counted_over_what_is_asked(slow: DeviceCases) -> None:
    """What is not asked counts nowhere; an error that is no number is the largest of all, and missed."""
    like = slow.cases[0]
    found = [
        scored(like, "a", score(MAKESPAN, 0.01), score(MAKESPAN, -0.05, "async"), score(TTFT, 0.9, counts=False)),
        scored(like, "b", score(MAKESPAN, 0.04, spread=0.06), score(SPEED_UP, 0.004, BOTH)),
    ]
    rows = {row[0]: row for row in report.bar_table(found).rows}
    assert rows["makespan"] == ("makespan", "within 3 %", "1 of 3", "1", "1", "4.0%", "-5.0%", "a, async")
    assert rows["async speed-up"] == (
        "async speed-up",
        "within 2 points",
        "1 of 1",
        "0",
        "0",
        "0.40 pt",
        "+0.40 pt",
        "b",
    )
    assert rows["TTFT p50"][2:] == ("not asked", "-", "-", "-", "-", "-")
    found.append(scored(like, "c", score(MAKESPAN, float("nan"))))
    row = next(row for row in report.bar_table(found).rows if row[0] == "makespan")
    assert row[2:5] == ("1 of 4", "2", "1") and row[6:] == ("no number", "c, sync")


def test_cells_say_whether_a_bar_is_missed_undecided_or_not_asked(slow: DeviceCases) -> None:
    like = slow.cases[0]
    found = scored(
        like,
        "a",
        score(MAKESPAN, -0.05),
        score(MAKESPAN, 0.04, "async", spread=0.06),
        score(TTFT, 0.5, counts=False),
        score(SPEED_UP, -0.01, BOTH),
    )
    header = report.error_table([found]).header
    sync, overlapped = (dict(zip(header, row, strict=True)) for row in report.error_table([found]).rows)
    assert (sync["makespan"], overlapped["makespan"], sync["TTFT p50"]) == ("-5.0% *", "+4.0% ~", "(+50.0%)")
    assert (sync["speed-up"], overlapped["speed-up"]) == ("-", "-1.00 pt")


def test_findings_name_the_verdict_the_worst_and_what_does_not_replay(slow: DeviceCases) -> None:
    like = slow.cases[1]
    found = scored(like, "a", score(MAKESPAN, 0.01), score(SPEED_UP, -0.05, BOTH), score(MAKESPAN, 0.04, spread=0.06))
    verdict, replayed = report.findings([found])
    assert verdict.startswith("1 of 3 asked scores are met, 1 missed, 1 undecided (") and "4 measured runs" in verdict
    assert replayed == "4 of 4 measured runs replay to identical plans."
    parted = replace(found, replays={"sync": [ReplayOutcome("a sync measured", 3, 9, "step 3: rows is 2, recorded 1")]})
    assert (
        "0 of 1 measured runs replay to identical plans; not a sync measured: step 3" in report.findings([parted])[-1]
    )
    assert report.error_table([replace(parted, loops={"sync": like.loops["sync"]})]).rows[0][-1] == "3 of 9 *"


def test_only_what_is_missed_or_does_not_replay_fails(slow: DeviceCases) -> None:
    """Undecided is not missed: another measurement might meet it. A plan that differs fails by itself."""
    like = slow.cases[0]
    held = scored(like, "a", score(MAKESPAN, 0.01), score(MAKESPAN, 0.04, spread=0.06), score(TTFT, 0.9, counts=False))
    assert report.holds([held])
    assert not report.holds([held, scored(like, "b", score(MAKESPAN, 0.04))])
    for parted in (
        ReplayOutcome("a", 3, 9, "step 3: rows"),
        ReplayOutcome("a", None, 9, "cannot be replayed: served by another"),
    ):
        assert not report.holds([replace(held, replays={"sync": [parted]})])


def test_repeats_say_how_far_measured_runs_lie_apart(slow: DeviceCases) -> None:
    """Only of what was measured more than once; more than the bar allows is marked."""
    assert report.repeat_table(slow.cases[:1]) == []
    (table,) = report.repeat_table(slow.cases)
    assert [row[:4] for row in table.rows] == [("wrong", "sync", "2", "0.0%"), ("wrong", "async", "2", "0.0%")]
    some = scored(slow.cases[1], "a", score(MAKESPAN, 0.0, spread=0.06), score(SPEED_UP, 0.0, BOTH, spread=0.011))
    sync, overlapped = report.repeat_table([some])[0].rows
    assert sync[3] == "6.0% ~" and (sync[-1], overlapped[-1]) == ("-", "1.10 pt")


def test_a_miss_is_traced_to_the_lane_that_differs_most(slow: DeviceCases) -> None:
    """Everything takes twice as long: most of it is the compute lane, in both kinds of steps."""
    (table,) = report.cause_table(slow.cases)
    assert [row[:2] for row in table.rows] == [("wrong", "sync"), ("wrong", "async")]
    found = report.cause(slow.cases[1].loops["sync"])
    assert found.largest is not None and found.largest.name == "compute"
    assert found.largest.difference_us == pytest.approx(10_000) and found.share == pytest.approx(10 / 14, rel=0.05)
    assert [error for error, _ in found.kinds.values()] == pytest.approx([1.0, 1.0])
    assert found.summary.startswith("compute of ") and found.summary.endswith("steps +100.0%")


def test_what_runs_beside_something_longer_is_no_cause(tmp_path: Path, loops: dict[str, Path]) -> None:
    """The lane differs by 500 us and the CPU by 6, but async hides the lane: only the CPU can make steps longer."""
    case(tmp_path, "a", loops["busier"], [loops["busy"]])
    (found,) = cases.read(tmp_path).cases
    named = {loop: report.cause(pair).largest for loop, pair in found.loops.items()}
    assert named["sync"] is not None and named["sync"].name == "compute"
    assert named["async"] is not None and named["async"].name in ("schedule", "update")


def test_other_batches_are_a_cause_of_their_own(slow: DeviceCases) -> None:
    """A run of twice as many steps cannot be explained by the length of one."""
    found = report.cause(slow.cases[0].loops["sync"])
    assert found._replace(steps=(2 * found.steps[1], found.steps[1])).summary == "+100.0% steps: other batches"


def test_runs_without_steps_have_no_cause(slow: DeviceCases) -> None:
    pair = slow.cases[0].loops["sync"]
    empty = replace(pair.simulated, table=type(pair.simulated.table)(pair.simulated.table.table[:0]))
    assert report.cause(replace(pair, simulated=empty)).summary == "no step with rows to tell by"


# -- figures ----------------------------------------------------------------------------------------------------------


def _of(chart: Chart, kind: type, name: str, panel: int = 0) -> Any:
    return next(mark for mark in chart.panels[panel].marks if isinstance(mark, kind) and mark.name == name)


def test_speed_up_is_drawn_over_the_injected_time_with_every_repeat() -> None:
    """In percent over milliseconds; the line, simulated, goes from left to right in any order of the cases, and it
    alone has the points between two measured cases that were only simulated.
    """
    points = [SpeedUpPoint("b", 8.0, 0.2, [0.21, 0.25]), SpeedUpPoint("a", 0.0, 0.05, [0.04])]
    points.append(SpeedUpPoint("a", 3.0, 0.1, ()))
    chart = report.speed_up({"tiny": points, "large": [SpeedUpPoint("c", 1.0, 0.1, [0.1])]})
    line, measured = _of(chart, Line, "tiny: simulated"), _of(chart, Points, "tiny: measured")
    assert (list(line.x), list(line.y)) == ([0, 3, 8], pytest.approx([5, 10, 20]))
    assert (list(measured.x), list(measured.y)) == ([0, 8, 8], pytest.approx([4, 21, 25]))
    colours = {mark.name.partition(":")[0]: mark.style.colour for mark in chart.panels[0].marks}
    assert len(set(colours.values())) == 2


def test_requests_are_matched_by_their_index() -> None:
    """Whatever the order of the rows; a request of one run alone, or without a TPOT, is no point."""
    measured = pd.DataFrame({"index": [0, 1, 2, 4], "ttft_s": [1.0, 2, 3, 9], "tpot_s": [0.1, np.nan, 0.3, 9]})
    simulated = pd.DataFrame({"index": [2, 1, 0, 5], "ttft_s": [3.3, 2.2, 1.1, 9], "tpot_s": [0.33, 0.2, 0.11, 9]})
    chart = report.scatter({"sync": [report.matched(measured, simulated)], "async": []})
    ttft, tpot = _of(chart, Points, "sync"), _of(chart, Points, "sync", panel=1)
    assert (list(ttft.x), list(ttft.y)) == ([1, 2, 3], [1.1, 2.2, 3.3])
    assert (list(tpot.x), list(tpot.y)) == (pytest.approx([100, 300]), pytest.approx([110, 330]))
    diagonal = _of(chart, Line, "simulated as measured")
    assert list(diagonal.x) == list(diagonal.y)


@pytest.mark.usefixtures("drawn")
def test_many_requests_are_thinned_and_the_caption_says_so() -> None:
    frame = pd.DataFrame({"index": range(5000), "ttft_s": 1.0, "tpot_s": 0.1})
    chart = report.scatter({"sync": [report.matched(frame, frame)], "async": [report.matched(frame, frame)]})
    assert sum(len(_of(chart, Points, loop).x) for loop in ("sync", "async")) <= report.MOST_POINTS
    assert "One in 4 of 10,000 requests" in chart.caption
    assert "One in" not in report.scatter({"sync": [report.matched(frame[:9], frame[:9])]}).caption
    nothing = report.scatter({"sync": [report.matched(frame[:0], frame[:0])], "async": []})
    assert all(not panel.marks for panel in nothing.panels)
    assert render.images(nothing, "png")[0]


def test_errors_are_drawn_as_multiples_of_what_is_asked() -> None:
    """Only so do bars of different width have one line. What is far off is at the edge, what is not asked nowhere."""
    scores = [score(MAKESPAN, 0.015), score(MAKESPAN, -0.06, "async"), score(TTFT, 9.0, counts=False)]
    chart = report.errors({"a": scores, "b": [score(SPEED_UP, -0.9, BOTH), score(MAKESPAN, float("nan"))]})
    met, missed = _of(chart, Points, "met"), _of(chart, Points, "missed")
    assert list(met.y) == pytest.approx([0.5])
    assert list(missed.y) == pytest.approx([-2, -report.EDGE])
    assert chart.panels[0].categories[round(met.x[0])] == "makespan ±3%"
    assert "a, async: makespan -6.0%" in missed.texts[0]
    assert sorted(mark.y for mark in chart.panels[0].marks if isinstance(mark, Level)) == [-1, 1]
    assert "beyond 5: 1." in chart.caption
    assert not [mark for mark in report.errors({}).panels[0].marks if isinstance(mark, Points)]


def test_lanes_are_measured_above_simulated_loop_by_loop(slow: DeviceCases) -> None:
    """Whichever of the runs is pipelined, so that what belongs together stands together; all from the same step on."""
    chart = report.case_lanes(slow.cases[1])
    titles = [panel.title.partition(":")[0] for panel in chart.panels]
    assert titles == ["sync measured", "sync simulated", "async measured", "async simulated"]
    firsts = {next(mark.labels[0] for mark in panel.marks if getattr(mark, "labels", ())) for panel in chart.panels}
    assert len(firsts) == 1 and chart.share_x


# -- the report -------------------------------------------------------------------------------------------------------


def test_a_report_has_its_tables_and_figures_and_no_text_twice(slow: DeviceCases) -> None:
    """Dozens of runs: the scenario once a case, every run with folder and command."""
    made = report.build(slow, "c")
    assert made.title == "Simulated against measured: NVIDIA H100"
    names = ["Bars", "Errors by workload", "Repeats", "Where missed bars come from", "Workloads"]
    assert [table.title for table in made.tables] == names
    assert all(len(row) == len(table.header) for table in made.tables for row in table.rows)
    assert [chart.key for chart in made.charts] == ["errors", "speedup", "scatter", "lanes"]
    assert [one.folder for one in made.sources][:2] == [
        f"validation/right/{kind}" for kind in ("measured/sync-0", "simulated/sync")
    ]
    assert all(one.command for one in made.sources)
    assert sum(bool(one.scenario) for one in made.sources) == sum(bool(one.environment) for one in made.sources) == 2


def test_without_curves_and_repeats_their_figure_and_table_are_left_out(one: Path) -> None:
    made = report.build(cases.read(one), "c")
    assert made.title == "Simulated against measured"
    assert [table.title for table in made.tables] == ["Bars", "Errors by workload", "Workloads"]
    assert [chart.key for chart in made.charts] == ["errors", "scatter", "lanes"]


def test_a_caveat_of_many_runs_names_a_few(slow: DeviceCases) -> None:
    """The labels of a hundred runs are no sentence."""
    many = [replace(slow.cases[0], name=f"case {i}", loops=_relabelled(slow.cases[0], i)) for i in range(9)]
    for caveat in report.caveats(many):
        assert caveat.run.count(",") < report.MOST_NAMED
    assert any("and" in caveat.run and "more" in caveat.run for caveat in report.caveats(many))


def _relabelled(like: ValidationCase, index: int) -> dict[str, Any]:
    facts = {"device": GPU, "injected_ms": {"prepare": 4.0}}
    return {
        loop: replace(
            pair,
            simulated=replace(pair.simulated, label=f"{index} {loop} simulated"),
            measured=[replace(run, label=f"{index} {loop} measured", environment=facts) for run in pair.measured],
        )
        for loop, pair in like.loops.items()
    }


@pytest.mark.usefixtures("drawn")
def test_the_command_writes_a_whole_report_that_the_index_lists(slow: DeviceCases, tmp_path: Path) -> None:
    out = tmp_path / "reports" / "gpu"
    assert parser.main(["report", str(slow.folder), "--out", str(out)]) == 0
    facts = json.loads((out / folder.FACTS).read_text())
    assert facts["figures"] == ["errors", "speedup", "scatter", "lanes"]
    assert all((out / "figures" / f"{key}.{kind}").stat().st_size for key in facts["figures"] for kind in folder.KINDS)
    found = {(one["case"], one["loop"], one["metric"]): one for one in facts["data"]["scores"]}
    wrong = found["wrong", "sync", "makespan"]
    assert wrong["verdict"] == "missed" and wrong["bound"] == MAKESPAN.bound
    assert wrong["error"] == pytest.approx(wrong["simulated"] / wrong["measured"] - 1)
    assert found["right", "both", "async speed-up"]["verdict"] == "met"
    assert found["right", "both", "async speed-up"]["spread"] is None
    assert len(facts["data"]["replays"]) == 6 and {one["says"] for one in facts["data"]["replays"]} == {"identical"}
    text = (out / "report.md").read_text()
    assert "<summary>Scenario</summary>" in text and "| async speed-up | within 2 points |" in text
    script("index").main(out.parent)
    assert "[Simulated against measured: NVIDIA H100](gpu/report.md)" in (out.parent / "README.md").read_text()


def test_a_number_that_is_none_is_null_in_the_facts(slow: DeviceCases) -> None:
    """report.json stays JSON."""
    found = scored(slow.cases[0], "a", score(MAKESPAN, float("nan"), spread=float("inf")))
    (one,) = report.scores([found])
    assert (one["error"], one["spread"], one["simulated"], one["measured"]) == (None, None, None, 1.0)


def test_missed_bars_fail_only_a_check(slow: DeviceCases, one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is written either way, by default into the folder itself, again and again."""
    for words, status in (((), 0), (("--strict",), 3)):
        assert parser.main(["report", str(slow.folder), *words]) == status
        assert (slow.folder / "report" / "report.md").is_file()
    assert parser.main(["report", str(one), "--strict"]) == 0
    assert "asked scores are met, 0 missed" in " ".join(capsys.readouterr().out.split())
