"""The service level (SLO) in figures of latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cbsim.draw.chart import BLACK, Edge, Level, Panel, Style
from cbsim.results.terminal import lookup, shown

KEYS = ("ttft_s", "tpot_s", "e2e_s")
NEAR = 2.0  # a limit that is farther than this from all values would make them unreadable, and is told in words
LOOKS = Style(BLACK, "dashed")


def limits(scenarios: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The limits (s) that all these scenarios have in common, by metric."""
    common = {key: {lookup(scenario, f"slo.{key}") for scenario in scenarios} for key in KEYS}
    return {key: float(next(iter(values))) for key, values in common.items() if len(values) == 1 and None not in values}


def across(panel: Panel, limit: float | None, most: float, seconds: float, *, level: bool = False) -> Panel:
    """A panel with its limit (s) as an edge, or as a `level`. `most` (s) is its greatest value, `seconds` its unit."""
    if limit is None or not most:
        return panel
    if limit > NEAR * most:
        return replace(panel, title=f"{panel.title} (SLO {shown(limit, 's')}, beyond the edge)")
    mark = (Level if level else Edge)("SLO", limit / seconds, LOOKS)
    return replace(panel, marks=[*panel.marks, mark])
