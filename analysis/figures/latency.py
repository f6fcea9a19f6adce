"""Latencies of all runs as cumulative distributions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from analysis.figures import slo
from analysis.figures.axis import Frames, spread
from analysis.statistics.thin import Ints, cdf
from cbsim.draw.chart import Chart, Floats, Line, Mark, Panel, Points, Style, series
from cbsim.draw.units import Unit, column, unit
from cbsim.results import metrics
from cbsim.results.columns import NS
from cbsim.results.terminal import shown

QUANTITIES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("e2e_s", "E2E"))
MARKED = (50, 95, 99)
MOST_POINTS = 1000


class LatencySample(NamedTuple):
    """Values in seconds, each occurring `counts` times (None: once)."""

    values: Floats
    counts: Ints | None = None


def latency(
    requests: Frames,
    times: Mapping[str, metrics.Requests],
    measured: Mapping[str, bool],
    limits: Mapping[str, float] = MappingProxyType({}),
) -> Chart:
    """TTFT, TPOT, ITL and E2E as exact distribution functions, all runs overlaid, and the `limits` (s) of a service
    level. Percentiles are marked unless the sample is too small to quote them. If there are measured and simulated
    runs, the simulated ones are dashed.
    """
    mixed = len({measured[label] for label in requests}) > 1
    panels: list[Panel] = []
    counts: dict[str, int] = {}
    cut = False
    for key, name in QUANTITIES:
        samples = {label: _sample(frame, times[label], key) for label, frame in requests.items()}
        samples = {label: sample for label, sample in samples.items() if len(sample.values)}
        most = max((float(sample.values.max()) for sample in samples.values()), default=0.0)
        scale = unit(most)
        marks: list[Mark] = []
        for index, label in enumerate(requests):
            if label in samples:
                style = _style(index, measured[label]) if mixed else series(index)
                marks += _curve(label, name, samples[label], scale, style)
                cut |= len(samples[label].values) > MOST_POINTS
        counts |= {label: len(samples[label].values) for label in samples if key == "e2e_s"}
        log = spread(sample.values for sample in samples.values())
        panel = Panel(marks, scale.name, "share", title=name, x_log=log, y_range=(0.0, 1.03))
        panels.append(slo.across(panel, limits.get(key), most, scale.seconds))
    each = {counts.get(label, 0) for label in requests}
    said = "; ".join(f"{label} {counts.get(label, 0):,}" for label in requests)
    said = f"{each.pop():,} of each run" if len(each) == 1 < len(requests) else said
    says = f"Share of values up to x. ITL: every gap between two tokens; the others: requests that are done ({said})."
    says += " Marks: p50, p95, p99 of all values, where there are enough."
    says += " Solid: measured; dashed: simulated." if mixed else ""
    says += " Black, dashed: the service level (SLO)." if limits else ""
    says += f" Thinned for drawing to {MOST_POINTS:,} points, each of them exact." if cut else ""
    return Chart("latency", "Latency distributions", says, panels, columns=2)


def _style(index: int, is_measured: bool) -> Style:
    return series(index)._replace(dash="solid" if is_measured else "dashed")


def _sample(requests: Any, times: metrics.Requests, key: str) -> LatencySample:
    if key == "itl_s":
        occurring = times.gap_counts > 0
        return LatencySample(times.gaps_ns[occurring] / NS, times.gap_counts[occurring])
    values = column(requests, key)
    return LatencySample(values[np.isfinite(values)])


def _curve(label: str, name: str, sample: LatencySample, scale: Unit, style: Style) -> list[Mark]:
    """The distribution function, from 0 at the least value, and its percentiles."""
    x, share = cdf(*sample, most=MOST_POINTS)
    x, share = np.append(x[:1], x), np.append(0.0, share)
    percentiles = metrics.distribution(*sample)
    quoted = [q for q in MARKED if f"p{q}" not in percentiles["too_few_for"]]
    at = np.array([percentiles[f"p{q}"] for q in quoted]) / scale.seconds
    texts = [f"{label}: {name} p{q} {shown(percentiles[f'p{q}'], 's')} of {percentiles['n']:,}" for q in quoted]
    points = Points(label, at, np.array(quoted) / 100, style, texts=texts)
    return [Line(label, x / scale.seconds, share, style, step=True), points]
