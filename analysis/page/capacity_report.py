"""The report of a capacity: the answer, what binds, every load that was probed."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.figures import capacity as figures
from analysis.statistics.capacity import Capacity, Probe
from analysis.statistics.content import Caveat, Report
from analysis.statistics.quantity import quantity
from cbsim.draw.markdown import Table
from cbsim.results.checks import Check


def build(found: Capacity, command: str) -> Report:
    """The report of one search."""
    return Report(
        title=f"Capacity of {found.name}",
        question=f"Up to which {found.field} does {' and '.join(check.text for check in found.conditions)} hold?",
        sources=(),
        caveats=_caveats(found),
        findings=_findings(found),
        tables=[_table(found)],
        charts=[figures.chart(found)],
        command=command,
        facts={"points": len(found.probes), "holds": found.holds, "fails": found.fails},
    )


def _findings(found: Capacity) -> list[str]:
    answer = {
        (True, True): f"{found.field} holds at {found.holds:g} and fails at {found.fails:g}"
        if found.holds is not None and found.fails is not None
        else "",
        (True, False): f"{found.field} holds at {found.holds or 0:g}; no load that was tried fails",
        (False, True): f"{found.field} fails at {found.fails or 0:g}; no load that was tried holds",
        (False, False): "No load that was tried is decided",
    }[found.holds is not None, found.fails is not None]
    said = [f"{answer} (confidence {found.confidence:.4g})."]
    if found.replicates:
        said.append(f"{len(found.probes)} loads, {found.replicates:,} runs, {found.requests:,} requests.")
    return [*said, *([f"What binds: {'; '.join(found.binds)}."] if found.binds else [])]


def _caveats(found: Capacity) -> list[Caveat]:
    made = [Caveat("search", "", text) for text in found.notices]
    if not found.monotone:
        said = "A larger load does better than a smaller one: there is no single capacity."
        made.insert(0, Caveat("not monotone", "", said))
    return made


def _table(found: Capacity) -> Table:
    header = (found.field, "verdict", "runs", "requests", *(check.text for check in found.conditions), "why")
    rows = [
        (
            f"{probe.value:g}",
            probe.verdict,
            f"{probe.replicates:,}",
            f"{probe.requests:,}",
            *_cells(probe, found.conditions),
            probe.reason,
        )
        for probe in found.probes
    ]
    return Table("Loads", header, rows, "Mean over the runs of a load, and the interval that decides.")


def _cells(probe: Probe, conditions: Sequence[Check]) -> list[str]:
    cells = []
    for check in conditions:
        text, interval = quantity(check.metric).text, probe.intervals.get(check.text)
        cells.append("-" if interval is None else f"{text(interval[0])} [{text(interval[1])}, {text(interval[2])}]")
    return cells
