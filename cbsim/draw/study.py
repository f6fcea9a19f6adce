"""A question answered by many runs, or by a comparison with somebody's published numbers: tables, figures, data.

Said on the terminal, and written as a folder of the kind that a report is: report.md with its figures, and report.json
with the numbers and the command that makes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cbsim.draw import folder, render
from cbsim.draw.chart import Chart
from cbsim.draw.markdown import Table, fenced, figure, plain, table
from cbsim.results.terminal import aligned


@dataclass(frozen=True, slots=True)
class Study:
    """`findings` are sentences, in the order of weight; `data` is what the tables were made of, for report.json."""

    title: str
    question: str
    findings: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def text(study: Study) -> str:
    """Tables and findings, as the terminal shows them."""
    tables = [f"{part.title}\n{aligned([part.header, *part.rows])}\n" for part in study.tables]
    return "\n".join([*tables, *study.findings])


def say(study: Study) -> None:
    """Print tables and findings."""
    print(text(study))


def write(study: Study, place: Path, command: str, kind: str = "simulated") -> None:
    """Write the study to a folder of its own. `command` makes it again; `kind` says in the index what it rests on.

    Raises RunError if the folder holds anything else.
    """
    folder.check(place)
    folder.clear(place)
    facts = {
        "title": study.title,
        "question": study.question,
        "command": command,
        "runs": [{"label": study.title, "kind": kind}],
        "figures": [chart.key for chart in study.charts],
        "data": study.data,
    }
    folder.write(place, {folder.FACTS: _json(facts), "report.md": _text(study, command).encode()})
    for chart in study.charts:
        png, svg = render.both(chart)
        folder.write(place, {f"figures/{chart.key}.png": png, f"figures/{chart.key}.svg": svg})


def _json(facts: Mapping[str, Any]) -> bytes:
    return (json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _text(study: Study, command: str) -> str:
    lines = [f"# {plain(study.title)}", "", plain(study.question), "", "## Findings", ""]
    lines += [f"- {plain(finding)}" for finding in study.findings]
    lines.append("")
    for part in study.tables:
        lines += [f"## {plain(part.title)}", "", *table(part)]
    if study.charts:
        lines += ["## Figures", ""]
    for chart in study.charts:
        lines += figure(chart)
    return "\n".join([*lines, "## How this was made", "", *fenced("sh", command)]) + "\n"
