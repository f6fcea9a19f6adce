"""The report of the output of `cbsim capacity --json`: the answer, what limits it, every load that was probed, and each
condition's metric over the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from analysis.figures.axis import spread
from cbsim.draw import chart
from cbsim.draw.chart import Area, Chart, Level, Line, Mark, Panel, Points, Style, Whiskers, scale_of
from cbsim.draw.report import Caveat, Report, Table
from cbsim.errors import RunError
from cbsim.files import read_json
from cbsim.measured.own.clients import checked
from cbsim.metrics import catalogue, checks
from cbsim.metrics.checks import Check
from cbsim.metrics.terminal import shown
from cbsim.record.tables import Floats
from cbsim.scenario.fields import Form

VERDICTS = {True: "holds", False: "fails", None: "undecided"}
STYLES = {
    "holds": Style(chart.GREEN, "solid", "circle"),
    "fails": Style(chart.RED, "solid", "cross"),
    "undecided": Style(chart.ORANGE, "solid", "diamond"),
    "likely holds": Style(chart.SKY, "solid", "circle"),
    "likely fails": Style(chart.GREY, "solid", "cross"),
}
FAR = 8  # the least ratio of the greatest load to the least for a logarithmic axis
AROUND = 1.1  # the second panel extends the capacity's ends by this factor, or by the cube of their ratio if larger
ROOM = 1.08  # top of the axis above the highest mark, as a factor
MOST_BYTES = 100_000_000


class Interval(Form):
    """The mean of a condition's metric over the runs of a load, and its interval."""

    condition: str
    mean: float
    low: float
    high: float


class Probe(Form):
    """A probed load; one that lost requests may have no interval."""

    value: float
    holds: bool | None = None
    likely: bool | None = None
    replicates: int = 0
    requests: int = 0
    reason: str | None = None
    values: list[Interval] = Field(default_factory=list)

    @property
    def verdict(self) -> str:
        return VERDICTS[self.holds] if self.likely is None else f"likely {VERDICTS[self.likely]}"

    def interval(self, check: Check) -> tuple[float, float, float] | None:
        """Return (mean, low, high) of a condition's metric."""
        known = next((each for each in self.values if each.condition == check.rule), None)
        return None if known is None else (known.mean, max(known.low, 0.0), known.high)


class Limit(Form):
    """The limit of the first load that fails, in a word and in sentences."""

    word: str
    sentences: list[str]


class Capacity(Form):
    """A capacity search. `holds` is the last load that holds, `fails` the first that does not, or None."""

    name: str = ""
    loop: str = ""
    field: str
    unit: str = ""
    holds: float | None
    fails: float | None
    reason: str = ""
    confidence: float | None
    replicates: int = 0
    requests: int = 0
    conditions: Annotated[list[str], Field(min_length=1)]
    binds: Limit | None = None
    monotone: bool = True
    notices: list[str] = Field(default_factory=list)
    probes: Annotated[list[Probe], Field(min_length=1)]

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.name, self.loop)))

    @property
    def load(self) -> str:
        """What the loads are, such as requests/s."""
        return self.unit or self.field

    @property
    def checks(self) -> list[Check]:
        """Return its conditions. Raises CheckError."""
        return [checks.parse(text, "conditions:") for text in self.conditions]

    @property
    def ends(self) -> tuple[float, float] | None:
        """The two loads that the capacity lies between, if both are known."""
        return None if self.holds is None or self.fails is None else (self.holds, self.fails)


def read(path: Path) -> Capacity:
    """Read a search from a file, its probes by rising load. Raises RunError, CheckError if it is no such object."""
    made = checked(Capacity, read_json(path, RunError, MOST_BYTES), path, "not what `cbsim capacity --json` prints: ")
    for text in made.conditions:
        checks.parse(text, f"{path}: conditions:")
    probes = sorted(made.probes, key=lambda probe: probe.value)
    return made.model_copy(update={"name": made.name or ("" if made.loop else path.stem), "probes": probes})


def build(capacity: Capacity, command: str) -> Report:
    """Return the report of one search."""
    disorder = "A larger load does better than a smaller one: there is no single capacity."
    caveats = [] if capacity.monotone else [Caveat("not monotone", "", disorder)]
    header = (capacity.load, "verdict", "runs", "requests", *capacity.conditions, "why")
    rows = []
    for probe in capacity.probes:
        load = f"{probe.value:g}" if probe.value else "one request alone"
        numbers = (load, probe.verdict, f"{probe.replicates:,}", f"{probe.requests:,}")
        rows.append((*numbers, *(_cell(probe, check) for check in capacity.checks), probe.reason or ""))
    note = "Mean over the runs of a load, with its interval where a load has several. Likely: by the mean of two runs."
    return Report(
        title=f"Capacity of {capacity.title}",
        question=f"Up to how many {capacity.load} do the conditions hold: {' and '.join(capacity.conditions)}?",
        sources=(),
        caveats=[*caveats, *(Caveat("search", "", notice) for notice in capacity.notices)],
        findings=_findings(capacity),
        tables=[Table("Loads", header, rows, note)],
        charts=[figure(capacity)],
        command=command,
        data={"points": len(capacity.probes), "holds": capacity.holds, "fails": capacity.fails},
    )


def _findings(capacity: Capacity) -> list[str]:
    sure = "" if capacity.confidence is None else f", with {100 * capacity.confidence:.6g}% confidence"
    holds = "No load that was tried holds" if capacity.holds is None else f"Holds {capacity.holds:g} {capacity.load}"
    fails = "none of the loads that were tried fails"
    if capacity.fails is not None:
        where = f"at {capacity.fails:g}," if capacity.fails else "of one request alone"
        fails = f"{where} {capacity.reason or 'a condition fails'}"
    sentences = [f"{holds}; {fails}{sure}."]
    if capacity.replicates:
        sentences.append(f"{len(capacity.probes)} loads, {capacity.replicates:,} runs, {capacity.requests:,} requests.")
    if capacity.binds:
        sentences.append(f"What binds: {'; '.join((capacity.binds.word, *capacity.binds.sentences))}.")
    return sentences


def _cell(probe: Probe, check: Check) -> str:
    if (interval := probe.interval(check)) is None:
        return "-"
    mean, low, high = map(catalogue.metric(check.metric).shown, interval)
    return f"{mean} [{low}, {high}]" if interval[1] < interval[2] else mean


def figure(capacity: Capacity) -> Chart:
    """Draw a line of panels a condition: all loads, and if the capacity is known those near it."""
    ends = capacity.ends
    loads = capacity.probes
    near = [probe for probe in loads if ends and _within(probe.value, ends)]
    close = ends is not None and len(near) < len(loads)
    panels = []
    for check in capacity.checks:
        panels.append(_panel(capacity, check, loads, near=False))
        panels += [_panel(capacity, check, near, near=True)] * close
    several = "with intervals where there are several" if capacity.confidence else "one each: there are no intervals"
    caption = f"Means of the runs of a load, {several}. Dashed: the limit."
    caption += " Shaded: from the last load that holds to the first that fails." if ends else ""
    title = f"{capacity.title}: capacity in {capacity.load}"
    return Chart("capacity", title, caption, panels, columns=2 if close else 1)


def _within(value: float, ends: tuple[float, float]) -> bool:
    low, high = sorted(ends)
    around = max((high / low) ** 3, AROUND) if low > 0 else AROUND
    return low / around <= value <= high * around


def _panel(capacity: Capacity, check: Check, loads: Sequence[Probe], *, near: bool) -> Panel:
    known = [(probe, interval) for probe in loads if (interval := probe.interval(check))]
    metric = catalogue.metric(check.metric)
    intervals: Floats = np.array([interval for _, interval in known]).reshape(-1, 3)
    means, lows, highs = intervals.T
    scale = scale_of(metric.unit, float(max(highs.max(initial=0.0), check.bound)))
    y_log = spread([np.append(means, check.bound)])
    means, lows, highs = (values / scale.size for values in (means, lows, highs))
    bound = check.bound / scale.size
    x, reach = np.array([probe.value for probe, _ in known]), _reach(means, lows, highs, bound, log=y_log, near=near)
    marks: list[Mark] = []
    if capacity.ends:
        low, high = (np.full(2, end) for end in reach)
        marks.append(Area("capacity", np.sort(capacity.ends), low, high, Style(chart.GREY)))
    marks += [Level("limit", bound, Style(chart.BLACK, "dashed")), Line("", x, means, Style(chart.GREY))]
    texts = [
        f"{probe.value:g} {capacity.load}: {metric.shown(interval[0])}, {probe.verdict}" for probe, interval in known
    ]
    verdicts = np.array([probe.verdict for probe, _ in known], dtype=object)
    for verdict in (each for each in STYLES if each in verdicts):
        own, style = np.flatnonzero(verdicts == verdict), STYLES[verdict]
        marks.append(Whiskers("", x[own], lows[own], highs[own], style))
        marks.append(Points(verdict, x[own], means[own], style, [texts[at] for at in own]))
    title = f"{metric.label}, {'near the capacity' if near else 'all loads'} (limit {shown(check.bound, metric.form)})"
    ticks = _doubled(x)
    return Panel(marks, capacity.load, scale.name, title, x_log=bool(ticks), y_log=y_log, y_range=reach, x_ticks=ticks)


def _reach(means: Floats, lows: Floats, highs: Floats, bound: float, *, log: bool, near: bool) -> tuple[float, float]:
    """Return the range of the y axis: all intervals and the limit, from 0 unless `near`; on a logarithmic axis at most
    a factor of 2 below the least mean or limit.
    """
    top = max(float(highs.max(initial=0.0)), bound) * ROOM or 1.0
    if near and not log:
        bottom, top = min(float(lows.min(initial=bound)), bound), top / ROOM
        room = (ROOM - 1) * ((top - bottom) or top or 1.0)
        return max(bottom - room, 0.0), top + room
    if not log:
        return 0.0, top
    least = min(float(means.min()), bound)
    return float(np.maximum(lows, least / 2).min(initial=least)) / ROOM, top * ROOM


def _doubled(x: Floats) -> list[float]:
    """Return the least load, twice it, and so on to the greatest, as most searches probe; none if they lie near."""
    if len(x) < 2 or not 0 < FAR * x.min() <= x.max():
        return []
    return [float(x.min()) * 2**k for k in range(int(np.log2(x.max() / x.min()) + 1e-9) + 1)]
