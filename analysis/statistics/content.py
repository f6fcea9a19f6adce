"""What a report says, in plain values: made once, written as Markdown and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cbsim.draw.chart import Chart
from cbsim.draw.markdown import Table


@dataclass(frozen=True, slots=True)
class Tile:
    """A number of a run that a reader looks at first. `metric` is its dotted key in summary.json, `value` is shown."""

    metric: str
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Caveat:
    """A reason not to trust a number. `kind` is a short stable name, `run` the label of the run or "" for all."""

    kind: str
    run: str
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """A run that the report was made of: everything needed to make it again."""

    label: str
    folder: str
    kind: str  # simulated or measured, and on what
    tiles: Sequence[Tile]
    scenario: str  # the resolved scenario, YAML, or how it differs from the first; "" if another source has it
    environment: str  # env.json, likewise
    command: str  # makes the run again


@dataclass(frozen=True, slots=True)
class Report:
    """Everything in the order in which it is read: tiles of each source, caveats, findings, tables, charts, sources.

    `coloured`: has each source a colour of its own in the charts? `facts` stand in report.json beside what every report
    says there.
    """

    title: str
    question: str
    sources: Sequence[Source]
    caveats: Sequence[Caveat]
    findings: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[Chart]
    command: str  # makes the report again
    coloured: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)
