"""The picture of a run: what the CPU and the GPU do over a few steps, idle time shaded.

matplotlib is imported here and only when a figure is drawn. Colours are distinguishable without colour vision and in
print; every lane is labelled.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cbsim.draw.chart import COLOURS, IDLE
from cbsim.results.metrics import Steps
from cbsim.results.record import LANES, PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS_SHOWN = 7


def window(steps: Steps) -> tuple[int, int]:
    """(start, end) in ns of a few steps in the middle of the run, where neither start-up nor tail shows."""
    first = max(0, len(steps) // 2 - STEPS_SHOWN // 2)
    last = min(len(steps), first + STEPS_SHOWN) - 1
    return int(steps["compute_start_ns"][first]), int(steps["compute_end_ns"][last])


def lanes_png(runs: Sequence[tuple[str, Steps, float]]) -> bytes:
    """PNG of one panel a run, on one time axis: (title, its steps, its GPU-active share over the whole run)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 0.9 + 2.1 * len(runs)), sharex=True, squeeze=False)
    start_ns, end_ns = window(runs[0][1])
    span_ns = max(end_ns - start_ns, 1)
    for axis, (title, steps, active) in zip(axes[:, 0], runs, strict=True):
        _panel(axis, steps, window(steps)[0], span_ns)
        axis.set_title(f"{title}: GPU active {active:.2%} of the run", loc="left", fontsize=10)
        axis.set_xlim(0, span_ns / 1e6)
    axes[-1, 0].set_xlabel("ms")
    handles = [Patch(facecolor=colour, edgecolor="#444444", label=name) for name, colour in COLOURS.items()]
    handles.append(Patch(facecolor=IDLE, hatch="////", edgecolor="#D55E00", label="GPU idle"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06 if len(runs) > 1 else 0.1, 1, 1))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()


def _panel(axis: Axes, steps: Steps, origin_ns: int, span_ns: int) -> None:
    """The lanes of one run from `origin_ns` on."""
    names = ("CPU", "H2D", "compute", "D2H")
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)
    shown = Steps(steps.table[_overlaps(steps, "schedule_start_ns", "update_end_ns", origin_ns, span_ns)])
    for name in (*PHASES, *LANES):
        row = 0 if name in PHASES else 1 + LANES.index(name)
        starts = (shown[f"{name}_start_ns"] - origin_ns) / 1e6
        widths = shown.lane(name) / 1e6
        bars = [(start, width) for start, width in zip(starts, widths, strict=True) if width > 0]
        edge = COLOURS[name] if name in ("h2d", "d2h") else "#444444"  # copies are thinner than a line is wide
        axis.broken_barh(bars, (row - 0.4, 0.8), facecolor=COLOURS[name], edgecolor=edge, linewidth=0.4)
    _shade_idle(axis, shown, origin_ns)
    _number(axis, shown, origin_ns, span_ns)


def _overlaps(steps: Steps, start: str, end: str, origin_ns: int, span_ns: int) -> npt.NDArray[np.bool_]:
    inside: npt.NDArray[np.bool_] = (steps[end] >= origin_ns) & (steps[start] <= origin_ns + span_ns)
    return inside


def _shade_idle(axis: Axes, steps: Steps, origin_ns: int) -> None:
    """Hatch the compute lane where nothing runs between two steps."""
    ends = (steps["compute_end_ns"][:-1] - origin_ns) / 1e6
    starts = (steps["compute_start_ns"][1:] - origin_ns) / 1e6
    gaps = [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]
    axis.broken_barh(gaps, (1.6, 0.8), facecolor=IDLE, edgecolor="#D55E00", hatch="////", linewidth=0)


def _number(axis: Axes, steps: Steps, origin_ns: int, span_ns: int) -> None:
    """Write the step number into each compute bar that is wide enough and in view."""
    middles = (steps["compute_start_ns"] + steps["compute_end_ns"]) / 2 - origin_ns
    for step, middle, width in zip(steps["step"], middles, steps.lane("compute"), strict=True):
        if width > span_ns / 40 and 0 < middle < span_ns:
            axis.text(float(middle) / 1e6, 2, str(int(step)), ha="center", va="center", fontsize=7, color="white")
