"""A chart of CPU and GPU over a few steps: phases, copies, kernels, idle time; sync above async."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw import chart
from cbsim.draw.chart import LANE_STYLES, Chart, Columns, Floats, Mark, Panel, Points, Spans, Style, Unit
from cbsim.metrics.terminal import shown
from cbsim.policy.transfers import Direction
from cbsim.record.columns import NS
from cbsim.record.record import LANES, PHASES
from cbsim.record.tables import Ints, Mask, Steps

STEPS_SHOWN, MOST_SERVERS = 7, 4
ROWS = ("CPU", "H2D", "compute", "D2H")
HOST_LANES = ("KV out", "KV in")  # transfers to and from the host, or another server
COMPUTE = ROWS.index("compute")
TRANSFER_ROWS = {
    int(Direction.COPY): ("KV copy", COMPUTE),
    int(Direction.OUT): ("KV out", len(ROWS)),
    int(Direction.IN): ("KV in", len(ROWS) + 1),
}
COLUMNS = ("step", "rows", "tokens", *(f"{name}_{edge}_ns" for name in (*PHASES, *LANES) for edge in ("start", "end")))
Ends = tuple[Ints, Ints]
Text = Callable[[int, str], str]


class View(NamedTuple):
    """The part of a run that is shown: `length_ns` from `origin_ns` on."""

    origin_ns: int
    length_ns: int
    unit: Unit

    def x(self, times_ns: Any) -> Floats:
        inside = np.clip(times_ns - self.origin_ns, 0, self.length_ns)
        moved: Floats = inside / NS / self.unit.size
        return moved


def lanes(
    steps: Mapping[str, Columns],
    window: tuple[int, int] | None = None,
    *,
    as_given: bool = False,
    active: Mapping[str, float] | None = None,
    transfers: Mapping[str, Mapping[str, Any]] | None = None,
    at_one_time: bool = False,
) -> Chart:
    """Draw one panel a run, from its step table; all show as long a time as the first, each from the same step of its
    own: the `window` (first step, number of steps), or steps in the middle of the run, without start-up and tail. Sync
    runs are above async ones unless the order is `as_given`. `active` is the share of the whole run in which the GPU is
    active; without it titles have that of the part shown. `transfers` are those of KV, by run. With `at_one_time` all
    are of one clock, and show the time that the first one shows.
    """
    runs = dict(steps if as_given else sorted(steps.items(), key=lambda item: chart.pipelined(item[1])))
    windows = {label: _window(frame, window) for label, frame in runs.items()}
    if at_one_time:
        windows = dict.fromkeys(runs, next(filter(None, windows.values()), None))
    length = next((end - start for start, end in filter(None, windows.values())), 0)
    scale = chart.unit(length / NS)
    rows = (*ROWS, *HOST_LANES) if any(len(table["way"]) for table in (transfers or {}).values()) else ROWS
    whole = (0.0, length / NS / scale.size) if length else None
    panels = []
    for label, frame in runs.items():
        title, marks = f"{label}: no such step", list[Mark]()
        if shown_ns := windows[label]:
            view = View(shown_ns[0], length, scale)
            marks, seen = _marks(frame, view)
            marks += _transfers(transfers[label], view) if transfers and rows is not ROWS else []
            share = f"{seen:.1%} of what is shown" if active is None else f"{active[label]:.2%} of the run"
            title = f"{label}: GPU active {share}"
        panels.append(Panel(marks, scale.name, title=title, rows=rows, x_range=whole))
    caption = f"CPU phases, copies and kernels of {_which(window)}, on one time axis; numbers are steps."
    caption += " Hatched: the GPU computes nothing between two steps. Markers: a copy is done." + chart.without(steps)
    return Chart("lanes", "CPU and GPU side by side", caption, panels, share_x=True)


def of_servers(parts: Sequence[Steps]) -> dict[str, Steps]:
    """Return the steps of the first of several servers, by what they are called."""
    return {f"server {part.server[0]}": part for part in parts[:MOST_SERVERS] if part.server is not None}


def _which(window: tuple[int, int] | None) -> str:
    if window is None:
        return "a few steps in the middle of each run"
    first, last = window[0], window[0] + window[1] - 1
    return f"step {first}" if first == last else f"the steps from {first} to {last}"


def _window(steps: Columns, window: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (start, end) in ns of the compute lane in these steps, and at the ends of the run also of the CPU."""
    first, count = window or (max(0, len(steps) // 2 - STEPS_SHOWN // 2), STEPS_SHOWN)
    last = min(len(steps), first + count) - 1
    if last < first:
        return None
    opening = "compute_start_ns" if first else "schedule_start_ns"
    closing = "compute_end_ns" if last < len(steps) - 1 else "update_end_ns"
    start, end = _at(steps, opening, first), _at(steps, closing, last)
    if end <= start:  # nothing was computed
        start, end = _at(steps, "schedule_start_ns", first), _at(steps, "update_end_ns", last)
    return start, max(end, start + 1)


def _at(steps: Columns, name: str, row: int) -> int:
    return int(np.asarray(steps[name])[row])


def _marks(steps: Columns, view: View) -> tuple[list[Mark], float]:
    """Return the bars of one run, and the share of the view in which the compute lane is busy."""
    low = int(np.searchsorted(np.asarray(steps["update_end_ns"]), view.origin_ns))
    high = int(np.searchsorted(np.asarray(steps["schedule_start_ns"]), view.origin_ns + view.length_ns, side="right"))
    near = {name: np.asarray(steps[name])[max(low - 1, 0) : high + 1].copy() for name in COLUMNS}  # no more is kept

    def text(name: str, i: int, length: str) -> str:
        return f"step {near['step'][i]}, {name}: {length}; {near['rows'][i]:,} rows, {near['tokens'][i]:,} tokens"

    idle = near["compute_end_ns"][:-1], near["compute_start_ns"][1:]  # between two steps, also those beside the view
    marks: list[Mark] = [_spans("GPU idle", COMPUTE, idle, view, lambda _, length: f"GPU idle: {length}")]
    for name in (*PHASES, *LANES):
        ends_ns, row = (near[f"{name}_start_ns"], near[f"{name}_end_ns"]), 1 + LANES.index(name) if name in LANES else 0
        marks.append(_spans(name, row, ends_ns, view, partial(text, name), near["step"] if name == "compute" else None))
    marks += [_done(near, name, view) for name in ("h2d", "d2h")]
    busy = view.x(near["compute_end_ns"]) - view.x(near["compute_start_ns"])
    return marks, float(busy.sum() / (view.length_ns / NS / view.unit.size))


def _spans(
    name: str, row: int, ends_ns: Ends, view: View, text: Text, numbers: Ints | None = None, among: Mask | bool = True
) -> Spans:
    """Return the bars of a row that are in view, with a `text` of index and length, and `numbers` written into them."""
    start, end = map(view.x, ends_ns)
    seen = np.flatnonzero((end > start) & among)
    lengths_s, idle = (ends_ns[1] - ends_ns[0]) / NS, name == "GPU idle"
    texts = [text(i, shown(lengths_s[i], "s")) for i in seen.tolist()]
    labels = () if numbers is None else [str(number) for number in numbers[seen]]
    style = LANE_STYLES["idle" if idle else name]
    return Spans(name, np.full(len(seen), row), start[seen], end[seen], style, idle, texts, labels)


def _done(steps: Mapping[str, Any], name: str, view: View) -> Points:
    """Mark the ends of copies, the events on which other lanes wait. A copy itself may be too short to be seen."""
    start, end = steps[f"{name}_start_ns"], steps[f"{name}_end_ns"]
    seen = (end > start) & (end >= view.origin_ns) & (end <= view.origin_ns + view.length_ns)
    texts = [f"step {step}: {name} done" for step in steps["step"][seen]]
    style = Style(chart.BLACK, marker="triangle" if name == "h2d" else "diamond")
    rows = np.full(int(seen.sum()), 1.0 + LANES.index(name))
    return Points(f"{name} done", view.x(end[seen]), rows, style, texts=texts)


def _transfers(transfers: Mapping[str, Any], view: View) -> list[Mark]:
    """Return KV transfers: to and from the host on lanes of their own, copies on the device before the kernels."""
    ends_ns, way = (transfers["start_ns"], transfers["end_ns"]), transfers["way"]

    def text(name: str, i: int, length: str) -> str:
        return f"step {transfers['step'][i]}, {name}: {transfers['blocks'][i]:,} blocks, {length}"

    rows = TRANSFER_ROWS.items()
    drawn = (_spans(name, row, ends_ns, view, partial(text, name), among=way == each) for each, (name, row) in rows)
    return [marks for marks in drawn if len(marks.row)]
