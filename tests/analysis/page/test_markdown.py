"""report.md: everything that a report says, in Markdown that no text of a run can break."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from support.browser import report

from cbsim.draw import report as reports
from cbsim.draw.report import Table


@pytest.mark.parametrize("runs", [1, 2, 6])
def test_everything_of_a_report_is_in_it(runs: int) -> None:
    """Tiles, caveats, findings, tables, captions, scenarios and commands: nobody needs the page."""
    made = report(runs)
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
    made = replace(report(1), question=question)
    (line,) = [one for one in reports.markdown(made).splitlines() if html.unescape(one) == " ".join(question.split())]
    assert "<" not in line


def test_a_fence_is_longer_than_what_it_holds() -> None:
    assert reports.fenced("yaml", "a: '````'") == ["`````yaml", "a: '````'", "`````"]
    assert reports.fenced("sh", "ls") == ["```sh", "ls", "```"]


def test_what_no_run_has_of_its_own_is_left_out() -> None:
    """No table without numbers, and nothing to unfold that is empty."""
    first, second = report(2).sources
    sources = [replace(first, tiles=(), environment=""), replace(second, tiles=(), scenario="")]
    text = reports.markdown(replace(report(2), sources=sources))
    assert first.tiles[0].value not in text
    assert text.count("<summary>Scenario</summary>") == text.count("<summary>Environment</summary>") == 1
