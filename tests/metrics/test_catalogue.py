"""The catalogue of metrics: the command line and the page name the same winner, and every metric is shown somewhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from support.sweep_tables import row, written

from analysis.figures import sweeps as sweep_curves
from analysis.page import sweep_report
from analysis.statistics import sweep_table
from analysis.statistics.sweep_table import SweepTable
from cbsim.cli.parser import main
from cbsim.metrics import terminal
from cbsim.metrics.catalogue import METRICS, OF_SWEEPS, metric, table
from cbsim.metrics.checks import CheckError, objective
from cbsim.stats import pareto, replicated

EVERY = {**METRICS, **OF_SWEEPS}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two points: every metric is 1 at n = 1 and 2 at n = 2, in each of three replicates."""
    rows = [row({"n": n}, seed, **dict.fromkeys(EVERY, float(n))) for n in (1, 2) for seed in range(3)]
    return written(tmp_path_factory.mktemp("sweep") / "two.parquet", rows)


@pytest.fixture(scope="module")
def read(swept: Path) -> SweepTable:
    return sweep_table.read(swept)


@pytest.mark.parametrize("name", EVERY)
def test_command_line_and_page_name_the_same_winner(name: str, swept: Path, read: SweepTable) -> None:
    """`cbsim pareto`, the report's sentence, its figure and the data of the page's scripts, for one metric."""
    look = sweep_report.look(read)
    look = sweep_report.Look(look.places, look.view, [name], [], (name, name))
    sentences = [line for line in sweep_report.findings(read, look) if EVERY[name].label in line]
    data = sweep_report.explorer(read, look).settings
    of_page = next(each["sign"] for each in data["metrics"] if each["name"] == name)
    best = sweep_curves.trade_off(read, sweep_table.places(read), (name, name), []).best.tolist()
    if not EVERY[name].sign:
        with pytest.raises(CheckError, match=f"expected max:{METRICS[name].spelled} or min:{METRICS[name].spelled}"):
            objective(name, "--x")
        assert (of_page, best, sentences) == (0, [], [])
        return
    asked = objective(name, "--x")
    stood = pareto.frontier(replicated.read(swept), pareto.Question(asked, asked, [], 0.95))
    (winner,) = (n for n, each in enumerate(stood) if each.verdict == pareto.FRONTIER)
    assert winner == (EVERY[name].sign > 0)
    assert (of_page, best) == (asked.sign, [winner])
    assert len(sentences) == 1 and sentences[0].endswith(f" at n = {winner + 1}.")


def test_a_metric_without_a_direction_needs_one(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["--y", "throughput", "--x"]
    assert main(["pareto", str(swept), *axes, "tokens_per_step"]) == 2
    assert "--x tokens_per_step: neither more nor less of it is better, expected max:" in capsys.readouterr().err
    assert main(["pareto", str(swept), *axes, "min:tokens_per_step"]) == 0
    assert main(["contrast", str(swept), "--by", "n", "--metric", "tokens_per_step"]) == 0
    assert " more " in capsys.readouterr().out


def test_every_metric_is_shown_with_a_label_of_its_own() -> None:
    labels = [each.label for each in EVERY.values()]
    assert len(set(labels)) == len(labels) and not any("_" in label for label in labels)
    assert all(each.shown(0.5) and each.shown(math.nan) == each.shown(None) == "-" for each in EVERY.values())
    assert all((each.unit == "share") == each.form.endswith("share") for each in EVERY.values())


def test_the_table_of_a_run_has_a_row_for_each_listed_metric() -> None:
    summary = {"makespan_s": 2.5, "steps": 1234, "tpot_s": {"p50": 0.03, "p90": 0.04}, "slo": {"attainment": 0.5}}
    lines = table({"sync": summary, "async": {**summary, "makespan_s": 2.0}}).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "sync async change",
        "-" * len(lines[1]),
        "makespan 2.50 s 2.00 s -20.0%",
        "steps 1,234 1,234 =",
        "TPOT p50 30 ms 30 ms =",
        "SLO attainment 50.0% 50.0% =",
    ]


def test_a_column_of_another_version_is_shown_by_its_name() -> None:
    unknown = metric("tokens_of_tomorrow")
    assert (unknown.label, unknown.sign, unknown.shown(0.25)) == ("tokens_of_tomorrow", 0, "0.25")


def test_a_time_is_shown_in_the_largest_unit_that_it_fills() -> None:
    """Three digits of ms from exactly one on, of us below; seconds with two decimals, 0 too."""
    shown = [terminal.shown(time, "s") for time in (0.0, 9.9e-4, 1e-3, 0.5, 1.0, 1234.5)]
    assert shown == ["0.00 s", "990 us", "1 ms", "500 ms", "1.00 s", "1,234.50 s"]
