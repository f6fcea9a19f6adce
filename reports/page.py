"""Reports with hand-written text: a script beside report.md makes its tables, its figures and report.json.

A table stands below a mark, `<!-- name -->` on a line of its own; only its rows are made again. Run a script from the
root of the repository, as `python -m reports.fidelity.hopper.make`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cbsim.draw import render
from cbsim.draw.chart import Chart
from cbsim.draw.report import Table, table

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^<!-- ([\w-]+) -->\n(?:\n((?:\|.*\n)+))?", re.MULTILINE)


def rows(content: Table, *, of_text: bool = False) -> str:
    """A table without what is said of it, which stands in the page. Columns of text stand to the left."""
    lines = table(Table("", content.header, content.rows))[:-1]
    if of_text:
        lines[1] = "|---" * len(content.header) + "|"
    return "\n".join(lines) + "\n"


def rewritten(page: str, made: Callable[[str], str]) -> str:
    """The page with the rows below each mark made again by its name; none if they are empty."""

    def below(mark: re.Match[str]) -> str:
        lines = made(mark[1])
        return f"<!-- {mark[1]} -->\n" + (f"\n{lines}" if lines else "")

    return MARK.sub(below, page)


def write(script: str, tables: Mapping[str, Table], charts: Sequence[Chart], data: Mapping[str, Any]) -> None:
    """Make tables, figures and report.json of the report beside a script, by the script's `__file__`. The title and
    the question are the first lines of its report.md.
    """
    folder = Path(script).resolve().parent
    page = (folder / "report.md").read_text(encoding="utf-8")
    marks = [mark[1] for mark in MARK.finditer(page)]
    if marks != list(tables):
        raise ValueError(f"{folder / 'report.md'}: marks {marks}, but the script makes {list(tables)}")
    (folder / "report.md").write_text(rewritten(page, lambda name: rows(tables[name])), encoding="utf-8")
    title, question = (line.removeprefix("# ") for line in [line for line in page.splitlines() if line][:2])
    command = f"python -m {'.'.join((*folder.relative_to(ROOT).parts, Path(script).stem))}"
    facts = {
        "title": title,
        "question": question,
        "command": command,
        "runs": [{"label": title, "kind": "simulated"}],
        "figures": [chart.key for chart in charts],
        "data": data,
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    for chart in charts:
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / f"{chart.key}.png").write_bytes(render.images(chart, "png")[0])
