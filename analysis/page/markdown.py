"""A report as Markdown: complete on its own, with its figures as files beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.statistics.content import Report, Source
from cbsim.draw.markdown import Table, fenced, figure, plain, table

MOST_COLUMNS = 4  # runs; a table of the report has the numbers of more


def text(report: Report) -> str:
    """report.md. Figures are expected as figures/KEY.png."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {plain(report.title)}"
    yield ""
    if report.question:
        yield from (plain(report.question), "")
    if len(report.sources) <= MOST_COLUMNS and any(source.tiles for source in report.sources):
        yield from table(_tiles(report.sources))
    yield "## When not to trust this"
    yield ""
    yield from (
        f"- {f'**{plain(caveat.run)}**: ' if caveat.run else ''}{plain(caveat.text)}" for caveat in report.caveats
    )
    yield from ([] if report.caveats else ["No caveat found."])
    yield ""
    if report.findings:
        yield from ("## Findings", "", *(f"- {plain(finding)}" for finding in report.findings), "")
    for section in report.tables:
        yield from (f"## {section.title}", "", *table(section))
    yield from ("## Figures", "")
    for chart in report.charts:
        yield from figure(chart)
    yield from ("## How this was made", "", *fenced("sh", report.command), "")
    for source in report.sources:
        yield from _source(source)


def _tiles(sources: Sequence[Source]) -> Table:
    """Tiles of all runs, a metric a row."""
    labels = {tile.metric: tile.label for source in sources for tile in source.tiles}
    rows = [(label, *(_cell(source, metric) for source in sources)) for metric, label in labels.items()]
    return Table("", ("", *(source.label for source in sources)), rows)


def _cell(source: Source, metric: str) -> str:
    tile = next((tile for tile in source.tiles if tile.metric == metric), None)
    return "-" if tile is None else f"{tile.value} ({tile.note})" if tile.note else tile.value


def _source(source: Source) -> Iterator[str]:
    yield from (f"### {plain(source.label)}: {plain(source.kind)}", "", f"`{source.folder}`", "")
    yield from (*fenced("sh", source.command), "")
    for title, kind, content in (("Scenario", "yaml", source.scenario), ("Environment", "json", source.environment)):
        if content:
            yield from ("<details>", f"<summary>{title}</summary>", "", *fenced(kind, content.rstrip()), "")
            yield from ("</details>", "")
