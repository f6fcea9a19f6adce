"""A report as a value, and as a folder: report.md with its figures, and report.json with its numbers and the command
that makes it again. Comparisons of runs, predictions of measurements and searches of settings return one. `page` is
plain HTML without scripts; the analysis has one whose charts can be zoomed.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.draw import folder, render
from cbsim.draw.chart import Chart
from cbsim.metrics.terminal import aligned

MOST_COLUMNS = 4  # runs in the table of tiles; a table of the report has the numbers of more


class Table(NamedTuple):
    """A table of text under a header; all columns but the first are numbers, right-aligned. `note` is above it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Tile(NamedTuple):
    """A headline number of a run. `metric` is its dotted key in summary.json."""

    metric: str
    label: str
    value: str
    note: str = ""


class Caveat(NamedTuple):
    """A reason not to trust a number. `kind` is a short stable name, `run` the label of the run or "" for all."""

    kind: str
    run: str
    reason: str


class Source(NamedTuple):
    """A run that the report was made from, with everything needed to make it again."""

    label: str
    folder: str
    kind: str  # simulated or measured, and the device
    tiles: Sequence[Tile]
    scenario: str  # the resolved scenario, YAML, or how it differs from the first; "" if another source has it
    environment: str  # env.json, or how it differs from the first; "" if another source has it
    command: str  # the command that makes the run again

    def tile(self, metric: str) -> Tile | None:
        return next((tile for tile in self.tiles if tile.metric == metric), None)


@dataclass(frozen=True, slots=True)
class Report:
    """A report. `findings` are sentences in the order of weight; `data` has the tables' numbers, for report.json.
    `sources` are the runs behind it; without any, `kind` names in the index what it is based on. `caveats` is None if
    none were searched for. `coloured`: each source has its own colour in the charts. `command` makes the report again.
    """

    title: str
    question: str
    findings: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Source] = ()
    caveats: Sequence[Caveat] | None = None
    command: str = ""
    kind: str = ""
    coloured: bool = True


def terminal(report: Report) -> str:
    tables = [f"{part.title}\n{aligned([part.header, *part.rows])}\n" for part in report.tables]
    return "\n".join([*tables, *report.findings])


def write(report: Report, out: Path) -> None:
    """Write report.json, report.md and figures to a folder of their own. Raises RunError if it holds anything else."""
    folder.check(out)
    folder.clear(out)
    folder.write(out, {folder.FACTS: facts(report), "report.md": markdown(report).encode(errors="replace")})
    for chart in report.charts:
        names = (f"figures/{chart.key}.{kind}" for kind in folder.KINDS)
        folder.write(out, dict(zip(names, render.images(chart, *folder.KINDS), strict=True)))


def facts(report: Report) -> bytes:
    """Return report.json: the report's entry in the index, its tiles, the keys of its figures, its data."""
    runs: list[dict[str, Any]] = []
    for source in report.sources:
        tiles = {tile.metric: tile.value for tile in source.tiles}
        runs.append({"label": source.label, "kind": source.kind, "folder": source.folder, "tiles": tiles})
    everything = {
        **{name: getattr(report, name) for name in ("title", "question", "command")},
        "runs": runs or ([{"label": report.title, "kind": report.kind}] if report.kind else []),
        "figures": [chart.key for chart in report.charts],
        **({"data": report.data} if report.data else {}),
    }
    return (json.dumps(everything, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")


def markdown(report: Report) -> str:
    """Return report.md: complete on its own, with its figures as files beside it."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {plain(report.title)}"
    yield ""
    if report.question:
        yield from (plain(report.question), "")
    many = len(report.sources) > MOST_COLUMNS
    if not many and any(source.tiles for source in report.sources):
        yield from table(_tiles(report.sources))
    if report.findings:
        yield from ("## Findings", "", *(f"- {plain(finding)}" for finding in report.findings), "")
    tables = [line for part in report.tables for line in (f"## {plain(part.title)}", "", *table(part))]
    caveats = [] if report.caveats is None else _doubts(report.caveats)
    yield from (*tables, *caveats) if many else (*caveats, *tables)
    if report.charts:
        yield from ("## Figures", "")
    for chart in report.charts:
        title = plain(chart.title)
        yield from (f"### {title}", "", f"![{title}](figures/{chart.key}.png)", "", plain(chart.caption), "")
    yield from ("## How this was made", "", *fenced("sh", report.command))
    for source in report.sources:
        yield from ("", *_source(source))


def _doubts(caveats: Sequence[Caveat]) -> list[str]:
    reasons = [f"- **{plain(it.run)}**: {plain(it.reason)}" if it.run else f"- {plain(it.reason)}" for it in caveats]
    return ["## When not to trust this", "", *(reasons or ["No caveat found."]), ""]


def _tiles(sources: Sequence[Source]) -> Table:
    labels = {tile.metric: tile.label for source in sources for tile in source.tiles}
    rows = []
    for metric, label in labels.items():
        tiles = [source.tile(metric) for source in sources]
        cells = ("-" if each is None else f"{each.value} ({each.note})" if each.note else each.value for each in tiles)
        rows.append((label, *cells))
    return Table("", ("", *(source.label for source in sources)), rows)


def _source(source: Source) -> Iterator[str]:
    yield from (f"### {plain(source.label)}: {plain(source.kind)}", "", f"`{source.folder}`", "")
    yield from fenced("sh", source.command)
    for title, kind, content in (("Scenario", "yaml", source.scenario), ("Environment", "json", source.environment)):
        if content:
            yield from ("", "<details>", f"<summary>{title}</summary>", "", *fenced(kind, content.rstrip()))
            yield from ("", "</details>")


# -- Markdown, escaped so that every reader shows the text as it is ---------------------------------------------------


def table(content: Table) -> list[str]:
    """Return a Markdown table: the first column left-aligned, the others right-aligned."""
    lines = [plain(content.note), ""] if content.note else []
    lines.append(_row(content.header))
    lines.append("|---" + "|---:" * (len(content.header) - 1) + "|")
    return [*lines, *(_row(row) for row in content.rows), ""]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell).replace("|", "\\|") for cell in cells) + " |"


def plain(sentence: str) -> str:
    """Return text on one line, escaped so that no reader of Markdown takes it for HTML."""
    return html.escape(" ".join(sentence.split()), quote=False)


def fenced(kind: str, code: str) -> list[str]:
    """Return a block of code, which may contain any backticks."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", code)), default=0))
    return [f"{fence}{kind}", code, fence]


# -- a page without scripts -------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem }
div { overflow-x: auto } table { border-collapse: collapse } img { max-width: 100% } pre { white-space: pre-wrap }
td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, td:last-child { text-align: left }
"""


def page(report: Report) -> str:
    """Return the report as HTML, beside its figures. In tables the label of a source is a link to it."""
    title, of = plain(report.title), report.sources
    links = {each.label: f'<a href="{html.escape(each.folder)}">{plain(each.label)}</a>' for each in of}
    parts = [f"<p>{plain(report.question)}</p><ul>{''.join(f'<li>{plain(each)}' for each in report.findings)}</ul>"]
    for part in report.tables:
        rows = ("<td>".join(links.get(cell, plain(cell)) for cell in row) for row in (part.header, *part.rows))
        table = "\n".join(f"<tr><td>{row}" for row in rows)
        parts.append(f"<h2>{plain(part.title)}</h2><div><table>{table}</table></div>")
    figures = [(f"figures/{chart.key}.svg", plain(chart.title), plain(chart.caption)) for chart in report.charts]
    parts += [f'<p><img src="{name}" alt="{title}"><p>{caption}</p>' for name, title, caption in figures]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return "\n".join([head, f"<h1>{title}</h1>", *parts, f"<pre>{plain(report.command)}</pre></html>\n"])
