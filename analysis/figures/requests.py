"""Figures of requests: each one's wait, prefill and decode over time; latencies as cumulative distributions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from analysis.figures import axis
from analysis.figures.axis import MOST_POINTS, Frames, chosen, longest, seconds, spread
from cbsim.draw import chart
from cbsim.draw.chart import Chart, Floats, Mark, Panel, Points, Spans, Style, Unit, column, series, unit
from cbsim.metrics import metrics
from cbsim.metrics.terminal import shown
from cbsim.record.tables import Ints, Requests

MOST_NAMED = 40  # rows; if there are more, only some are labelled, by their index in order of arrival
STYLES = {"queue": Style("#C8C8C8"), "prefill": Style(chart.BLUE), "decode": Style(chart.ORANGE)}


def timeline(requests: Frames, most: int = 200) -> Chart:
    """Draw one panel a run, one row a request in order of arrival: queue (arrival to planning of its first step),
    prefill, decode. Preempted time counts to its phase. At most `most` requests are drawn, evenly chosen.
    """
    time = unit(max((longest(requests, name) for name in ("last_token_ns", "arrival_ns", "scheduled_ns")), default=0.0))
    panels = [_panel(label, frame, time, most) for label, frame in requests.items()]
    caption = "Each row is a request, first come uppermost: in the queue, prefill, decode; preemptions stay inside."
    caption += " A cross: it did not end with its last token."
    cut = [f"{most:,} of {len(frame):,} of {label}" for label, frame in requests.items() if len(frame) > most]
    caption += f" Drawn are {', '.join(cut)}, evenly chosen." if cut else ""
    return Chart("timeline", "Requests over time", caption + chart.without(requests, "request"), panels, share_x=True)


def _panel(label: str, requests: pd.DataFrame, time: Unit, most: int) -> Panel:
    order = np.argsort(requests["arrival_ns"].to_numpy(), kind="stable")
    places = chosen(len(order), most)
    drawn = requests.iloc[order[places]]
    ends = _ends(drawn, longest({label: requests}, "last_token_ns"))
    texts = [
        f"{request.id}: prompt {request.prompt_tokens:,}, output {request.generated_tokens:,} tokens, {request.status}"
        for request in drawn[["id", "prompt_tokens", "generated_tokens", "status"]].itertuples()
    ]
    marks: list[Mark] = []
    for number, (name, style) in enumerate(STYLES.items()):
        start, end = ends[number], ends[number + 1]
        seen = np.flatnonzero(end > start)
        hover = [f"{texts[i]}; {name} {shown(float(end[i] - start[i]), 's')}" for i in seen]
        marks.append(Spans(name, seen, start[seen] / time.size, end[seen] / time.size, style, texts=hover))
    lost = np.flatnonzero(~drawn["done"].to_numpy(dtype=bool))
    if len(lost):
        style, hover = Style(chart.BLACK, marker="cross"), [texts[i] for i in lost]
        marks.append(Points("not done", ends[3][lost] / time.size, lost.astype(np.float64), style, texts=hover))
    return Panel(marks, time.name, title=label, rows=_rows(drawn, places))


def _ends(requests: pd.DataFrame, horizon: float) -> list[Floats]:
    """Return arrival, and the ends of queue, prefill and decode, in seconds. A phase still under way at the end of an
    interrupted run lasts until the `horizon`; one that never began has no length.
    """
    known = [seconds(requests, f"{name}_ns") for name in ("arrival", "scheduled", "first_token", "last_token")]
    open_ = requests["status"].isin(("waiting", "unfinished")).to_numpy()
    ends = [known[0]]
    for times in known[1:]:
        under_way = np.where(open_, np.maximum(horizon, ends[-1]), ends[-1])
        ends.append(np.where(times >= 0, np.maximum(times, ends[-1]), under_way))
    return ends


def _rows(requests: pd.DataFrame, places: Ints) -> list[str]:
    if len(requests) <= MOST_NAMED:
        return [str(name) for name in requests["id"]]
    every = max(len(places) // 10, 1)
    return [f"{at + 1:,}" if i % every == 0 else "" for i, at in enumerate(places)]


QUANTITIES = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("e2e_s", "E2E"))
MARKED = (50, 95, 99)


Sample = tuple[Floats, Ints | None]  # values in seconds, and how often each occurs (None: once)


def latency(
    requests: Frames, times: Mapping[str, Requests], measured: Mapping[str, bool], limits: Mapping[str, float]
) -> Chart:
    """Draw TTFT, TPOT, ITL and E2E as exact distribution functions, all runs overlaid, and the `limits` (s) of a
    service level. Percentiles are marked unless the sample is too small to quote them. If there are measured and
    simulated runs, the simulated ones are dashed.
    """
    mixed = len({measured[label] for label in requests}) > 1
    styles = {
        label: series(index)._replace(dash="solid" if measured[label] else "dashed") if mixed else series(index)
        for index, label in enumerate(requests)
    }
    samples: dict[str, dict[str, Sample]] = {}
    for key, _ in QUANTITIES:
        samples[key] = {label: _sample(frame, times[label], key) for label, frame in requests.items()}
    panels = [_distributions(name, samples[key], styles, limits.get(key)) for key, name in QUANTITIES]
    counts = {label: len(values) for label, (values, _) in samples["e2e_s"].items()}
    counted = "; ".join(f"{label} {count:,}" for label, count in counts.items())
    if len(counts) > 1 == len(set(counts.values())):
        counted = f"{next(iter(counts.values())):,} of each run"
    caption = "Share of values up to x. ITL: every gap between two tokens; the others: requests that are done "
    caption += f"({counted})."
    caption += " Marks: p50, p95, p99 of all values, where there are enough."
    caption += " Solid: measured; dashed: simulated." if mixed else ""
    caption += " Black, dashed: the service level (SLO)." if limits else ""
    if any(len(values) > MOST_POINTS for values, _ in chain.from_iterable(map(dict.values, samples.values()))):
        caption += f" Thinned for drawing to {MOST_POINTS:,} points, each of them exact."
    return Chart("latency", "Latency distributions", caption, panels, columns=2)


def _distributions(name: str, samples: Mapping[str, Sample], styles: Mapping[str, Style], limit: float | None) -> Panel:
    """Return the panel of a latency with every run that has values."""
    known = {label: sample for label, sample in samples.items() if len(sample[0])}
    most = max((float(values.max()) for values, _ in known.values()), default=0.0)
    scale = unit(most)
    marks = [mark for label, sample in known.items() for mark in _curve(label, name, sample, scale, styles[label])]
    log = spread(values for values, _ in known.values())
    panel = Panel(marks, scale.name, "share", title=name, x_log=log, y_range=(0.0, 1.03))
    return axis.with_slo(panel, limit, most, scale.size)


def _sample(requests: Any, times: Requests, key: str) -> Sample:
    if key == "itl_s":
        return times.gaps_s
    values = column(requests, key)
    return values[np.isfinite(values)], None


def _curve(label: str, name: str, sample: Sample, scale: Unit, style: Style) -> list[Mark]:
    """Return the distribution function, from 0 at the least value, and its percentiles."""
    percentiles = metrics.distribution(*sample)
    quoted = [q for q in MARKED if f"p{q}" not in percentiles["too_few_for"]]
    at = np.array([percentiles[f"p{q}"] for q in quoted]) / scale.size
    texts = [f"{label}: {name} p{q} {shown(percentiles[f'p{q}'], 's')} of {percentiles['n']:,}" for q in quoted]
    points = Points(label, at, np.array(quoted) / 100, style, texts=texts)
    return [axis.cdf_line(label, *sample, scale, style), points]
