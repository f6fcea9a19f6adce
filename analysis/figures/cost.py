"""What tokens cost, in money and in the speed that a user sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.statistics.thin import Ints
from cbsim.draw.chart import GREY, Bars, Chart, Floats, Line, Mark, Panel, Points, Style, series
from cbsim.results.terminal import lookup

Summaries = Mapping[str, Mapping[str, Any]]
COSTS = (("usd_per_million_output_tokens", "output tokens"), ("usd_per_million_tokens", "input and output tokens"))
MOST_LABELLED = 8  # runs; numbers over more bars would overlap


def cost(summaries: Summaries) -> Chart:
    """Price of a million tokens by run, of those whose GPU has a price and that produced any."""
    kept = {
        label: summary
        for label, summary in summaries.items()
        if all(lookup(summary, f"cost.{key}") is not None for key, _ in COSTS)
    }
    marks: list[Mark] = []
    for index, (key, name) in enumerate(COSTS if kept else ()):
        height = np.array([float(summary["cost"][key]) for summary in kept.values()])
        labels = [f"{value:,.3g}" for value in height] if len(kept) <= MOST_LABELLED else ()
        marks.append(Bars(name, np.arange(len(kept)), height, series(index + 2), labels))
    prices = sorted({float(summary["cost"]["price_usd_hour"]) for summary in kept.values()})
    says = "What the GPU costs over the whole run, divided by its tokens."
    says += (
        f" Price of an hour: {', '.join(f'{price:g}' for price in prices)} USD." if prices else " No run has a price."
    )
    panel = Panel(marks, "", "USD", title="a million tokens", categories=list(kept))
    return Chart("cost", "Cost of a million tokens", says, [panel])


def pareto(groups: Mapping[str, Summaries]) -> Chart:
    """Tokens/s of the GPU against tokens/s of a user (1 / TPOT p50), one marker a run, one style a group. Runs of a
    group have their labels beside them.

    A line joins the runs that no other one beats in both. A run without TPOT has no place here.
    """
    marks: list[Mark] = []
    users, gpus, left = [np.empty(0)], [np.empty(0)], []
    for index, (group, summaries) in enumerate(groups.items()):
        speed = {label: lookup(summary, "tpot_s.p50") for label, summary in summaries.items()}
        kept = [label for label, tpot in speed.items() if tpot]
        left += [label for label in summaries if label not in kept]
        x = np.array([1 / speed[label] for label in kept], dtype=np.float64)
        y = np.array([summaries[label]["output_tokens_per_s"] for label in kept], dtype=np.float64)
        texts = [
            f"{label}: {b:,.0f} tokens/s, {a:,.1f} tokens/s a user" for label, a, b in zip(kept, x, y, strict=True)
        ]
        marks.append(Points(group, x, y, series(index), texts=texts, labels=() if kept == [group] else kept))
        users.append(x)
        gpus.append(y)
    x, y = np.concatenate(users), np.concatenate(gpus)
    best = frontier(x, y)
    marks.insert(0, Line("not beaten in both", x[best], y[best], Style(GREY)))
    says = "Right is faster for a user (1 / TPOT p50), up is more from the GPU."
    says += " The line joins the runs that no other one beats in both."
    says += f" Without TPOT: {', '.join(left)}." if left else ""
    y_range = (0.9 * float(y.min()), 1.1 * float(y.max())) if len(y) else None
    panel = Panel(marks, "output tokens/s of a user", "output tokens/s of the GPU", y_range=y_range)
    return Chart("pareto", "Throughput against speed for a user", says, [panel])


def frontier(x: Floats, y: Floats) -> Ints:
    """Indices of the points that no other one beats: at least as great in both and greater in one. By ascending x."""
    order = np.lexsort((-y, -x))  # greatest x first, of equal ones the greatest y
    best = np.maximum.accumulate(np.append(-np.inf, y[order]))[:-1]
    kept: Ints = order[y[order] > best][::-1]
    return kept
