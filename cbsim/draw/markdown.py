"""Tables, figures and code in Markdown, escaped so that every reader shows the text as it is."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cbsim.draw.chart import Chart


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text under a header; all columns but the first are numbers, right-aligned. `note` is above it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def table(content: Table) -> list[str]:
    """Return a Markdown table: the first column left-aligned, the others right-aligned."""
    lines = [plain(content.note), ""] if content.note else []
    lines.append(_row(content.header))
    lines.append("|---" + "|---:" * (len(content.header) - 1) + "|")
    return [*lines, *(_row(row) for row in content.rows), ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell).replace("|", "\\|") for cell in cells) + " |"


def figure(chart: Chart) -> list[str]:
    """Return a figure, whose file is figures/KEY.png, with its caption."""
    title = plain(chart.title)
    return [f"### {title}", "", f"![{title}](figures/{chart.key}.png)", "", plain(chart.caption), ""]


def plain(sentence: str) -> str:
    """Return text on one line, escaped so that no reader of Markdown takes it for HTML."""
    return html.escape(" ".join(sentence.split()), quote=False)


def fenced(kind: str, code: str) -> list[str]:
    """Return a block of code, which may contain any backticks."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", code)), default=0))
    return [f"{fence}{kind}", code, fence]
