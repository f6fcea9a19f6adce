"""What a validation draws: the run over time, the latencies as distributions, the ablation as bars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cbsim.draw.chart import BLUE, RED, Bars, Chart, Line, Panel, Style
from cbsim.draw.chart import series as style
from cbsim.proof.recorded.ablation import Ablated
from cbsim.proof.recorded.reenactment import Served
from cbsim.proof.recorded.score import Series

Floats = npt.NDArray[np.float64]
SIMULATED, MEASURED = Style(BLUE, "solid"), Style(RED, "dashed")
TITLES = {
    "running": ("requests running", 1.0),
    "waiting": ("requests waiting", 1.0),
    "kv_use": ("KV cache in use, %", 100.0),
}
MOST_SHOWN = 30.0  # percent of error


def series(case: str, logged: Series) -> Chart:
    """Running, waiting and KV use once a second."""
    panels = []
    for name in logged.measured:
        title, factor = TITLES[name]
        marks = [
            Line("measured", logged.at_s, logged.measured[name] * factor, MEASURED),
            Line("simulated", logged.at_s, logged.simulated[name] * factor, SIMULATED),
        ]
        panels.append(Panel(marks, x="seconds", y=title))
    says = "Once a second, as the engine logged it, beside the replay at the same times."
    if "kv_use" not in logged.measured:
        says += " The run did not record how much of its cache was in use."
    return Chart("series", f"{case}: the run over time", says, panels, share_x=True)


def latencies(case: str, simulated: Served, measured: Served) -> Chart:
    """Share of requests within a latency."""
    panels = []
    for metric, title in (("ttft_s", "TTFT, s"), ("tpot_s", "TPOT, ms"), ("e2e_s", "E2E, s")):
        factor = 1000.0 if metric == "tpot_s" else 1.0
        marks = [
            _cumulative("measured", getattr(measured, metric) * factor, MEASURED),
            _cumulative("simulated", getattr(simulated, metric) * factor, SIMULATED),
        ]
        panels.append(Panel(marks, x=title, y="share of requests"))
    return Chart(
        "latencies", f"{case}: latencies", "Share of the requests that took at most so long.", panels, columns=3
    )


def _cumulative(name: str, values: Floats, look: Style) -> Line:
    ordered = np.sort(values)
    return Line(name, ordered, np.arange(1, len(ordered) + 1) / len(ordered), look, step=True)


def ablation(case: str, ablated: Sequence[Ablated]) -> Chart:
    """Errors of the means, one part changed at a time."""
    errors = {
        metric: np.array([100 * _mean_error(entry, metric) for entry in ablated]) for metric in ("ttft", "tpot", "e2e")
    }
    reach = max(5.0, min(MOST_SHOWN, 1.2 * max(float(np.abs(values).max()) for values in errors.values())))
    bars = [
        Bars(
            metric.upper(),
            np.arange(len(ablated)),
            np.clip(values, -0.85 * reach, 0.85 * reach),
            style(index),
            [f"{value:+.1f}" for value in values],
        )
        for index, (metric, values) in enumerate(errors.items())
    ]
    says = "Error of the mean latency against the recorded run, with one part of the model changed at a time. "
    says += f"Bars are cut at {0.85 * reach:.0f} %; their labels are the errors."
    names = [entry.name for entry in ablated]
    panel = Panel(bars, x="", y="error of the mean, %", categories=names, y_range=(-reach, reach))
    return Chart("ablation", f"{case}: what carries the result", says, [panel])


def _mean_error(ablated: Ablated, metric: str) -> float:
    return next(part.error for part in ablated.scores if (part.metric, part.statistic) == (metric, "mean"))
