"""Writing a report: every file of it or none, and a line that says where it is."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

from analysis.page import markdown, webpage
from analysis.page import report as reports
from analysis.page.explorer import Explorer
from analysis.statistics.content import Report
from cbsim.draw import folder, render


def write(made: Report, out: Path, explorer: Explorer | None = None, *, quiet: bool = False) -> None:
    """Every file of a report, or none; says where it is unless `quiet`. An explorer takes the place of charts."""
    folder.clear(out)
    try:
        has_page = _write_files(made, out, explorer)
    except BaseException:  # interrupted, too: no half of a report passes for a whole one
        folder.clear(out)
        raise
    if quiet:
        return
    print(f"report    {out / 'report.md'}, {len(made.charts)} figures")
    print(f"page      {out / 'report.html'}" if has_page else "page      none: needs `pip install plotly`")


def _write_files(made: Report, out: Path, explorer: Explorer | None) -> bool:
    """Write these files; is there a page among them?"""
    folder.write(out, {folder.FACTS: reports.facts(made)})
    folder.write(out, {"report.md": markdown.text(made).encode(errors="replace")})
    for chart in made.charts:
        png, svg = render.both(chart)
        folder.write(out, {f"figures/{chart.key}.png": png, f"figures/{chart.key}.svg": svg})
    script = webpage.plotly_script()
    if script is not None:
        page = webpage.html(made if explorer is None else replace(made, charts=()), script, explorer)
        folder.write(out, {"report.html": page.encode(errors="replace")})
    return script is not None


def wrapped(text: str, first: str = "", others: str = "") -> str:
    """A sentence in lines of a terminal."""
    return textwrap.fill(text, 118, initial_indent=first, subsequent_indent=others)
