"""Reports of one, two and more runs: whole, honest, the same when made again."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.browser import report as sample
from support.calls import simulated
from support.scripts import script

from analysis.cli import parser
from analysis.page import report, webpage
from analysis.statistics import loading
from analysis.statistics.compare import Incomparable
from cbsim.draw import folder, render
from cbsim.draw import report as reports
from cbsim.draw.chart import Chart
from cbsim.draw.report import Report, Table
from cbsim.metrics.catalogue import METRICS
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import lookup

FIELDS = ("workload.output_tokens=8", "workload.requests=12")
Simulate = Callable[..., list[Path]]


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    def run(*overrides: str) -> list[Path]:
        return simulated(tmp_path_factory.mktemp("runs"), "worked_example", *FIELDS, *overrides)

    return run


@pytest.fixture(scope="module")
def paths(simulate: Simulate) -> list[Path]:
    return simulate()


@pytest.fixture(scope="module")
def written(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reports") / "both"
    assert parser.main(["report", *map(str, paths), "--out", str(out)]) == 0
    return out


def _tables(made: Report) -> list[str]:
    return [table.title for table in made.tables]


def test_what_a_report_holds_follows_from_how_many_runs_there_are(paths: list[Path], simulate: Simulate) -> None:
    """One: its numbers. Two: how they differ. More: side by side. A sweep: curves over the field that was swept."""
    runs = loading.read(paths)
    one, two = report.build(runs[:1], "c"), report.build(runs, "c")
    more = report.build(loading.read([*paths, paths[0]]), "c")
    assert (_tables(one), _tables(two)) == (["All numbers"], ["Differences"])
    assert _tables(more)[0] == "Side by side" and more.charts[0].key == "landscape"
    assert not one.findings and two.findings
    rates = [f"workload.arrivals={{kind: constant, rate_per_s: {rate}}}" for rate in (5, 10, 20)]
    swept = report.build(loading.read([simulate(rate, "loop.mode=sync")[0] for rate in rates]), "c")
    assert (
        swept.title
        == "worked_example, Llama-3.1-8B on NVIDIA H200 SXM 141GB: workload.arrivals.rate_per_s from 5 to 20"
    )
    assert {"pareto", "sweep"} <= {chart.key for chart in swept.charts}


def test_a_gpu_that_never_waits_has_a_sentence_and_no_figure(paths: list[Path]) -> None:
    """The figure would be a straight line at 100 %."""
    run = loading.read(paths[:1])[0]
    busy = replace(run, summary={**run.summary, "gpu_active": 0.9999})
    for one, there in ((run, True), (busy, False)):
        made = report.build([one], "c")
        assert ("gpu_active" in [chart.key for chart in made.charts]) == there
        assert (report.ALWAYS_ACTIVE in made.findings) == (not there)


def test_the_numbers_of_many_runs_come_before_what_is_doubtful() -> None:
    text = reports.markdown(sample(6))
    assert text.index("## Findings") < text.index("|---") < text.index("## When not to trust this")
    few = reports.markdown(sample(2))
    assert few.index("|---") < few.index("## When not to trust this")


def test_tiles_are_the_numbers_of_the_summary(paths: list[Path]) -> None:
    """Nothing is computed again or rounded otherwise than on the terminal; a percentile of too few says so."""
    for run in loading.read(paths):
        for tile in report.source(run, run).tiles:
            assert tile.value == METRICS[tile.metric].shown(lookup(run.summary, tile.metric))
            statistic = tile.metric.rpartition(".")[2]
            assert tile.note == ("of 12, needs 368" if statistic in SAMPLES_NEEDED else "")
        bare = replace(run, summary=run.summary | {"ttft_s": run.summary["ttft_s"] | {"too_few_for": None}})
        assert {tile.metric: tile.note for tile in report.source(bare, bare).tiles}["ttft_s.p99"] == ""


@pytest.mark.usefixtures("drawn")
def test_every_figure_is_there_as_png_and_svg_and_linked(paths: list[Path], tmp_path: Path) -> None:
    written = tmp_path / "drawn"
    assert parser.main(["report", *map(str, paths), "--out", str(written)]) == 0
    names = re.findall(r"\]\(figures/(.+)\.png\)", (written / "report.md").read_text())
    assert names and sorted(path.stem for path in (written / "figures").glob("*.png")) == sorted(names)
    for name in names:
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (written / "figures" / f"{name}.svg").read_text()


def test_report_json_names_the_runs_and_the_index_lists_the_report(written: Path, paths: list[Path]) -> None:
    facts = json.loads((written / folder.FACTS).read_text())
    assert [run["folder"] for run in facts["runs"]] == [path.name for path in paths]
    script("index").main(written.parent)
    assert (
        "| [worked_example, Llama-3.1-8B on NVIDIA H200 SXM 141GB](both/report.md) |"
        in (written.parent / "README.md").read_text()
    )


def test_a_report_made_twice_is_the_same_bytes_and_keeps_nothing_of_the_one_before(
    written: Path, paths: list[Path]
) -> None:
    """So a diff of two reports shows what changed in the runs, and nothing else."""
    files = {path: path.read_bytes() for path in written.rglob("*") if path.is_file()}
    facts = json.loads((written / folder.FACTS).read_text())
    (written / "figures" / "old.png").write_bytes(b"")
    (written / folder.FACTS).write_text(json.dumps({**facts, "figures": [*facts["figures"], "old"]}))
    assert parser.main(["report", *map(str, paths), "--out", str(written)]) == 0
    assert {path: path.read_bytes() for path in written.rglob("*") if path.is_file()} == files


def test_without_plotly_the_report_is_whole_but_for_the_page(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webpage, "plotly_script", lambda: None)
    assert parser.main(["report", str(paths[0]), "--out", str(tmp_path / "r")]) == 0
    assert "pip install -e '.[report]'" in capsys.readouterr().out
    text = (tmp_path / "r" / "report.md").read_text()
    assert not (tmp_path / "r" / "report.html").exists()
    assert all((tmp_path / "r" / file).is_file() for file in re.findall(r"\]\(([^)]+\.png)\)", text))


def test_an_interrupted_run_is_reported_alone_and_compared_with_none(paths: list[Path], tmp_path: Path) -> None:
    """Its numbers are those of what there is, which the report says; beside a whole run they would mislead."""
    cut = Path(shutil.copytree(paths[0], tmp_path / "cut"))
    (cut / "INCOMPLETE").write_text("interrupted, after 5 steps\n")
    made = report.build(loading.read([cut]), "c")
    assert made.caveats[0].kind == "incomplete" and "interrupted, after 5 steps" in made.caveats[0].reason
    with pytest.raises(Incomparable, match="incomplete: interrupted, after 5 steps"):
        report.build(loading.read([cut, paths[1]]), "c")


def test_an_interrupted_report_leaves_nothing(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of a report would pass for a whole one; its folder can be used again."""
    drawn = render.images
    calls = iter((drawn, drawn))

    def images(chart: Chart, *kinds: str) -> list[bytes]:
        act = next(calls, None)
        if act is None:
            raise KeyboardInterrupt
        return act(chart, *kinds)

    monkeypatch.setattr(render, "images", images)
    assert parser.main(["report", str(paths[0]), "--out", str(tmp_path / "r")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list((tmp_path / "r").iterdir()) == []


# -- report.md: everything that a report says, in Markdown that no text of a run can break ----------------------------


@pytest.mark.parametrize("runs", [1, 2, 6])
def test_everything_of_a_report_is_in_it(runs: int) -> None:
    """Tiles, caveats, findings, tables, captions, scenarios and commands: nobody needs the page."""
    made = sample(runs)
    text = html.unescape(reports.markdown(made).replace("\\|", "|"))
    told = [made.title, made.question, made.command, *made.findings]
    told += [caveat.reason for caveat in made.caveats] + [chart.caption for chart in made.charts]
    told += [cell for table in made.tables for row in table.rows for cell in row]
    told += [one for source in made.sources for one in (source.label, source.folder, source.command)]
    tiled = made.sources if runs <= reports.MOST_COLUMNS else ()  # a table has the numbers of more
    told += [tile.value for source in tiled for tile in source.tiles]
    assert [one for one in told if one not in text] == []
    linked = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert linked == [f"figures/{chart.key}.png" for chart in made.charts]


def test_a_bar_in_a_cell_splits_no_cell() -> None:
    """Markdown's cells end at a bar, so each is escaped; every row has as many cells as the header."""
    lines = reports.table(Table("t", ("a|b", "c"), [("x|y", "1"), ("z", "2")]))
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines if line} == {3}


@pytest.mark.parametrize("question", ["why <b>?", "two\nlines", "</script><script>alert(1)</script>"])
def test_no_text_is_taken_for_html(question: str) -> None:
    """A scenario's question is text on one line, whatever is in it."""
    made = replace(sample(1), question=question)
    (line,) = [one for one in reports.markdown(made).splitlines() if html.unescape(one) == " ".join(question.split())]
    assert "<" not in line


def test_a_scenario_is_markup_nowhere() -> None:
    """What a user wrote in scenario, environment or command stands in fences, which no reader takes for HTML."""
    script = "<script>alert(1)</script>\n\n```\n<script>"
    source = sample(1).sources[0]._replace(scenario=script, environment=script, command=script)
    fence, outside = "", list[str]()
    for line in reports.markdown(replace(sample(1), sources=[source], command=script)).splitlines():
        if fence or line.startswith("```"):
            fence = "" if line == fence else fence or line.rstrip("abcdefghijklmnopqrstuvwxyz")
        else:
            outside.append(line)
    assert not fence and "<script" not in "".join(outside)


def test_a_fence_is_longer_than_what_it_holds() -> None:
    assert reports.fenced("yaml", "a: '````'") == ["`````yaml", "a: '````'", "`````"]
    assert reports.fenced("sh", "ls") == ["```sh", "ls", "```"]


def test_what_no_run_has_of_its_own_is_left_out() -> None:
    """No table without numbers, and nothing to unfold that is empty."""
    first, second = sample(2).sources
    sources = [first._replace(tiles=(), environment=""), second._replace(tiles=(), scenario="")]
    text = reports.markdown(replace(sample(2), sources=sources))
    assert first.tiles[0].value not in text
    assert text.count("<summary>Scenario</summary>") == text.count("<summary>Environment</summary>") == 1
