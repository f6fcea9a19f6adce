"""A report as one HTML file that opens from disk: nothing is fetched, and no foreign script can run.

The drawing library is embedded once, packed. Charts are drawn one after the other in order of reading. Equal reports
give equal bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from html import escape
from importlib import resources, util
from pathlib import Path
from typing import Any, NamedTuple

from analysis.page import interactive
from cbsim.draw import folder
from cbsim.draw import report as reports
from cbsim.draw.chart import Chart, series
from cbsim.draw.report import Caveat, Report, Source, Table, Tile

SCRIPTS = ("points.js", "charts.js", "explorer.js")  # of a page with an explorer
MOST_LISTED = 24  # runs; more are folded
CSS_DASHES = {"solid": "solid", "dashed": "dashed", "dotted": "dotted", "dashdot": "double"}
KEYS = (  # key of a button, its sign, its name
    *(("+", "+", "Zoom in"), ("-", "&minus;", "Zoom out")),
    *(("ArrowLeft", "&larr;", "Move left"), ("ArrowRight", "&rarr;", "Move right")),
    ("0", "Reset", "Reset"),
)


class Explorer(NamedTuple):
    """An explorer: its figures in `html`, with the `settings` and, packed, the columns that its script reads."""

    html: str
    settings: dict[str, Any]


def file(name: str) -> str:
    """Return the text of a file of templates/."""
    return (resources.files("analysis.page") / "templates" / name).read_text(encoding="utf-8")


def template(name: str, parts: Mapping[str, str]) -> str:
    """Return a file of templates/ with these parts, which are HTML, in their places."""
    return string.Template(file(name)).substitute(parts)


def embedded(value: Any) -> str:
    """Return JSON that neither ends the script element that it stands in nor starts a comment."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False).replace("<", "\\u003c")


def write(report: Report, out: Path, explorer: Explorer | None = None) -> bool:
    """Write every file of a report, or none. An explorer replaces the page's charts. Returns whether there is a page,
    which needs plotly.
    """
    folder.clear(out)
    try:
        reports.write(report, out)
        script = plotly_script()
        if script is not None:
            page = html(report if explorer is None else replace(report, charts=()), script, explorer)
            folder.write(out, {"report.html": page.encode(errors="replace")})
    except BaseException:  # interrupted, too: no half of a report passes for a whole one
        folder.clear(out)
        raise
    return script is not None


def plotly_script() -> str | None:
    """Return the plotly.min.js of the installed plotly, which is not imported; None if there is none."""
    spec = util.find_spec("plotly")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def html(report: Report, script: str, explorer: Explorer | None = None) -> str:
    """Return the page, with an explorer if there is one. `script` is the text of plotly.min.js."""
    own = "".join(map(file, ("page.js", *(SCRIPTS if explorer else ()))))
    parts = [(title, name, content) for title, name, content in _parts(report, explorer) if content]
    texts = {"title": escape(report.title), "style": file("page.css"), "policy": _policy(own, script), "script": own}
    texts["question"] = f'<p class="question">{_code_marked(report.question)}</p>' if report.question else ""
    texts["sections"] = "\n".join(f'<a href="#{name}">{title}</a>' for title, name, _ in parts)
    texts["main"] = "\n".join(content for _, _, content in parts)
    return template("page.html", texts | {"runs": _runs(report), "library": _packed(script)})


@lru_cache(maxsize=1)  # nearly a second, and the same in every report of a process
def _packed(script: str) -> str:
    return base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()


def _policy(*scripts: str) -> str:
    """Return a policy: only these scripts run, nothing is loaded. Styles are free, since plotly.js sets them."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{value}'" for value in hashes)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {sources}; {rest}"


def _parts(report: Report, explorer: Explorer | None) -> Iterable[tuple[str, str, str]]:
    """Yield (title, id, HTML) of each section in the order of reading; one without content is left out."""
    yield _section("Numbers", _numbers(report.sources))
    lines = "".join(f"<li>{_code_marked(sentence)}</li>" for sentence in report.findings)
    yield _section("Findings", f'<ul class="findings">{lines}</ul>' if lines else "")
    tables = _section("Tables", "".join(_table(table, index) for index, table in enumerate(report.tables)))
    caveats = "Caveats", "caveats", _caveats(report.caveats or ())
    explored = _section("Explore", explorer.html if explorer else "")
    many = len(report.sources) > reports.MOST_COLUMNS
    yield from (tables, caveats, explored) if many else (caveats, explored, tables)
    yield _section("Charts", _charts(report.charts))
    for what in ("Scenario", "Environment"):
        folded = (
            f'<details><summary>{escape(source.label)}</summary><pre tabindex="0" role="region" '
            f'aria-label="{what} of {escape(source.label)}">{escape(content)}</pre></details>'
            for source in report.sources
            if (content := getattr(source, what.lower()))
        )
        yield _section(f"{what}s", "".join(folded))
    yield _section("Commands", _commands(report))


def _section(title: str, content: str) -> tuple[str, str, str]:
    name = title.lower()
    head = f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>'
    return title, name, f"{head}\n{content}</section>" if content else ""


def _code_marked(sentence: str) -> str:
    """Return a sentence of the report as HTML, with Markdown's backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(sentence))


def _mark(index: int) -> str:
    """Return the line style of a run in the charts."""
    look = f"{CSS_DASHES[series(index).dash]} {series(index).colour}"
    return f'<span class="mark" style="border-top:3px {look}" aria-hidden="true"></span>'


def _runs(report: Report) -> str:
    """Return the list of the runs, folded if it would fill the screen."""
    sources, marked = report.sources, report.coloured and len(report.sources) > 1
    runs = (
        f"<li>{_mark(index) if marked else ''}<span>{escape(source.label)}"
        f' <span class="soft">{escape(source.kind)}, {escape(source.folder)}</span></span></li>'
        for index, source in enumerate(sources)
    )
    listed = f'<ul class="plain runs" aria-label="Runs">{"".join(runs)}</ul>'
    many = len(sources) > MOST_LISTED
    return f"<details><summary>{len(sources):,} runs</summary>{listed}</details>" if many else listed


def _numbers(sources: Sequence[Source]) -> str:
    metrics = {tile.metric: tile.label for source in sources for tile in source.tiles}
    if not metrics or len(sources) > reports.MOST_COLUMNS:
        return ""
    if len(sources) == 1:
        tiles = (f'<div class="tile"><dt>{escape(t.label)}</dt>{_value(t)}</div>' for t in sources[0].tiles)
        return f'<dl class="tiles">{"".join(tiles)}</dl>'
    return f'<div class="tiles several">{"".join(_shared(sources, *metric) for metric in metrics.items())}</div>'


def _value(tile: Tile) -> str:
    note = f' <span class="note">{escape(tile.note)}</span>' if tile.note else ""
    return f'<dd data-metric="{escape(tile.metric)}"><span class="value">{escape(tile.value)}</span>{note}</dd>'


def _shared(sources: Sequence[Source], metric: str, label: str) -> str:
    """Return one metric of a few runs."""
    rows = "".join(
        f"<div>{_mark(index)}<dt>{escape(source.label)}</dt>{_value(tile) if tile else '<dd>none</dd>'}</div>"
        for index, source in enumerate(sources)
        for tile in [source.tile(metric)]
    )
    return f'<div class="tile"><h3>{escape(label)}</h3><dl>{rows}</dl></div>'


def _caveats(caveats: Sequence[Caveat]) -> str:
    lines = "".join(
        f"<li>{f'<strong>{escape(caveat.run)}</strong>: ' if caveat.run else ''}{_code_marked(caveat.reason)}"
        f' <span class="kind">{escape(caveat.kind)}</span></li>'
        for caveat in caveats
    )
    looks, content = ("caveats", f"<ul>{lines}</ul>") if caveats else ("caveats none", "<p>No caveat found.</p>")
    title = '<h2 id="caveats-title">When not to trust this</h2>'
    return f'<section id="caveats" class="{looks}" aria-labelledby="caveats-title">{title}\n{content}</section>'


def _table(table: Table, index: int) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.header)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in table.rows
    )
    note = f"<p>{_code_marked(table.note)}</p>" if table.note else ""
    return (
        f'<h3 id="table-{index}">{escape(table.title)}</h3>{note}'
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="table-{index}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _charts(charts: Sequence[Chart]) -> str:
    if not charts:
        return ""
    hint = (
        '<p class="soft hint" id="keys">Drag to zoom, double click to reset. With a chart in focus: <kbd>+</kbd> and '
        "<kbd>-</kbd> zoom, <kbd>&larr;</kbd> and <kbd>&rarr;</kbd> move, <kbd>0</kbd> resets.</p>"
    )
    links = "".join(f'<li><a href="#{escape(f"chart-{each.key}")}">{escape(each.title)}</a></li>' for each in charts)
    listed = f'<nav aria-label="Charts"><ol class="charts">{links}</ol></nav>' if len(charts) > 1 else ""
    return hint + listed + "\n".join(_chart(chart, f"figure-{index}") for index, chart in enumerate(charts))


def _chart(chart: Chart, data: str) -> str:
    """Return a box that the page's script draws in, and its data."""
    name, file = escape(f"chart-{chart.key}"), escape(f"figures/{chart.key}.png")
    moves = any(not panel.categories for panel in chart.panels)
    buttons = " ".join(
        f'<button type="button" data-key="{key}" aria-label="{label}" title="{label}">{sign}</button>'
        for key, sign, label in KEYS
    )
    title, caption, json = escape(chart.title), _code_marked(chart.caption), embedded(interactive.figure(chart))
    tools = f'<div class="tools" role="group" aria-label="Zoom: {title}">{buttons}</div>' if moves else ""
    parts = {"name": name, "title": title, "tools": tools, "data": data, "file": file, "caption": caption, "json": json}
    return template("chart.html", parts).rstrip("\n")


def _commands(report: Report) -> str:
    named = [("This report", report.command)] + [(source.label, source.command) for source in report.sources]
    return "".join(
        f'<h3>{escape(name)}</h3><div class="command"><pre id="command-{index}"><code>{escape(command)}</code></pre>'
        f'<button type="button" data-copy="command-{index}" aria-live="polite">Copy</button></div>'
        for index, (name, command) in enumerate(named)
        if command
    )
