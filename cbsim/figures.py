"""The picture of a run: what the CPU and the GPU do over a few steps, idle time shaded.

matplotlib is imported here and only when a figure is drawn. Colours are distinguishable without colour vision and in
print; every lane is labelled.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cbsim.metrics import Steps
from cbsim.record import LANES, PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS_SHOWN = 8
COLOURS = {  # Okabe and Ito
    "schedule": "#0072B2",
    "prepare": "#56B4E9",
    "launch": "#CC79A7",
    "await": "#EEEEEE",
    "update": "#009E73",
    "h2d": "#E69F00",
    "compute": "#D55E00",
    "d2h": "#F0E442",
}
IDLE = "#FBE3D6"


def window(steps: Steps, shown: int = STEPS_SHOWN) -> tuple[int, int]:
    """Steps in the middle of the run, where neither start-up nor tail shows."""
    middle = max(0, len(steps) // 2 - shown // 2)
    return middle, min(len(steps), middle + shown)


def lanes_png(runs: Sequence[tuple[str, Steps, float]]) -> bytes:
    """PNG of one panel a run, on one time axis: (title, its steps, its GPU-active share over the whole run)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 0.9 + 2.1 * len(runs)), sharex=True, squeeze=False)
    reach = max(_span_ms(steps) for _, steps, _ in runs)
    for axis, (title, steps, active) in zip(axes[:, 0], runs, strict=True):
        _panel(axis, steps)
        axis.set_title(f"{title}: GPU active {active:.1%} of the run", loc="left", fontsize=10)
        axis.set_xlim(0, reach)
    axes[-1, 0].set_xlabel("ms")
    handles = [Patch(facecolor=colour, edgecolor="#444444", label=name) for name, colour in COLOURS.items()]
    handles.append(Patch(facecolor=IDLE, hatch="////", edgecolor="#D55E00", label="GPU idle"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06 if len(runs) > 1 else 0.1, 1, 1))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()


def _span_ms(steps: Steps) -> float:
    low, high = window(steps)
    if low == high:
        return 1.0
    return float(steps["update_end_ns"][high - 1] - steps["schedule_start_ns"][low]) / 1e6


def _panel(axis: Axes, steps: Steps) -> None:
    low, high = window(steps)
    names = ("CPU", "H2D", "compute", "D2H")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    if low == high:
        return
    origin = int(steps["schedule_start_ns"][low])
    for name in (*PHASES, *LANES):
        row = 0 if name in PHASES else 1 + LANES.index(name)
        starts = (steps[f"{name}_start_ns"][low:high] - origin) / 1e6
        widths = steps.lane(name)[low:high] / 1e6
        bars = [(start, width) for start, width in zip(starts, widths, strict=True) if width > 0]
        axis.broken_barh(bars, (row - 0.4, 0.8), facecolor=COLOURS[name], edgecolor="#444444", linewidth=0.4)
    _shade_idle(axis, steps, low, high, origin)
    _number(axis, steps, low, high, origin)


def _shade_idle(axis: Axes, steps: Steps, low: int, high: int, origin: int) -> None:
    """Hatch the compute lane where nothing runs between two steps."""
    ends = (steps["compute_end_ns"][low : high - 1] - origin) / 1e6
    starts = (steps["compute_start_ns"][low + 1 : high] - origin) / 1e6
    gaps = [(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]
    axis.broken_barh(gaps, (1.6, 0.8), facecolor=IDLE, edgecolor="#D55E00", hatch="////", linewidth=0)


def _number(axis: Axes, steps: Steps, low: int, high: int, origin: int) -> None:
    """Write the step number into each compute bar that is wide enough."""
    middles = (steps["compute_start_ns"][low:high] + steps["compute_end_ns"][low:high]) / 2 - origin
    for step, middle, width in zip(
        steps["step"][low:high], middles / 1e6, steps.lane("compute")[low:high] / 1e6, strict=True
    ):
        if width > _span_ms(steps) / 40:
            axis.text(float(middle), 2, str(int(step)), ha="center", va="center", fontsize=7, color="white")
    assert np.all(steps.lane("compute")[low:high] >= 0)
