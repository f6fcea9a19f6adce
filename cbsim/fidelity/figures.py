"""What a validation draws: the run over time, the latencies as distributions, the ablation as bars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cbsim.chart import BLUE, RED, Bars, Chart, Line, Panel, Style
from cbsim.chart import series as style
from cbsim.fidelity.ablation import Ablated
from cbsim.fidelity.replay import Served
from cbsim.fidelity.score import Series

Floats = npt.NDArray[np.float64]
SIMULATED, MEASURED = Style(BLUE, "solid"), Style(RED, "dashed")
TITLES = {
    "running": ("requests running", 1.0),
    "waiting": ("requests waiting", 1.0),
    "kv_use": ("KV cache in use, %", 100.0),
}
MOST_SHOWN = 30.0  # percent of error


def series(found: Series) -> Chart:
    """Running, waiting and KV use once a second."""
    panels = []
    for name in found.measured:
        title, factor = TITLES[name]
        marks = [
            Line("measured", found.at_s, found.measured[name] * factor, MEASURED),
            Line("simulated", found.at_s, found.simulated[name] * factor, SIMULATED),
        ]
        panels.append(Panel(marks, x="seconds", y=title))
    says = "Once a second, as the engine logged it, beside the replay at the same times."
    return Chart("series", "The run over time", says, panels, share_x=True)


def latencies(simulated: Served, measured: Served) -> Chart:
    """Share of requests within a latency."""
    panels = []
    for metric, title in (("ttft_s", "TTFT, s"), ("tpot_s", "TPOT, ms"), ("e2e_s", "E2E, s")):
        factor = 1000.0 if metric == "tpot_s" else 1.0
        marks = [
            _cumulative("measured", getattr(measured, metric) * factor, MEASURED),
            _cumulative("simulated", getattr(simulated, metric) * factor, SIMULATED),
        ]
        panels.append(Panel(marks, x=title, y="share of requests"))
    return Chart("latencies", "Latencies", "Share of the requests that took at most so long.", panels, columns=3)


def _cumulative(name: str, values: Floats, look: Style) -> Line:
    ordered = np.sort(values)
    return Line(name, ordered, np.arange(1, len(ordered) + 1) / len(ordered), look, step=True)


def ablation(ablated: Sequence[Ablated]) -> Chart:
    """Errors of the means, one part changed at a time."""
    bars = []
    for index, metric in enumerate(("ttft", "tpot", "e2e")):
        errors = np.array([100 * _mean_error(one, metric) for one in ablated])
        labels = [f"{error:+.1f}" for error in errors]
        bars.append(Bars(metric.upper(), np.arange(len(ablated)), errors, style(index), labels))
    reach = max(5.0, min(MOST_SHOWN, max(float(np.abs(bar.height).max()) for bar in bars) * 1.1))
    says = "Error of the mean latency against the recorded run, with one part of the model changed at a time. "
    says += f"Bars longer than {reach:.0f} % are cut; their error is in the table."
    names = [one.name for one in ablated]
    panel = Panel(bars, x="", y="error of the mean, %", categories=names, y_range=(-reach, reach))
    return Chart("ablation", "What carries the result", says, [panel])


def _mean_error(one: Ablated, metric: str) -> float:
    return next(part.error for part in one.scores if (part.metric, part.statistic) == (metric, "mean"))
