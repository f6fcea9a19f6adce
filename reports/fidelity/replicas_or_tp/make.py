"""Eight GPUs as many small servers or few large ones: the rate at which 99 % of the requests meet an SLO, by its bound
on TPOT.

Each layout is a fleet of equal servers behind a router that sends a request where the fewest are in flight. Its load
climbs rung by rung until no seed meets the loosest SLO. The score of a request is the larger of TTFT and TPOT, each
over its bound, and a rung meets an SLO where the 99th percentile of the scores is at most 1. One run has the scores of
all bounds. The rate for a bound lies between the last rung that meets it and the next, where a line through the
logarithms of both percentiles is 0. Requests at both ends of a run, when servers fill and drain, do not count.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from math import exp, log
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.draw.chart import GREY, Area, Chart, Edge, Line, Mark, Panel, Points, Style, series
from cbsim.draw.report import Table
from reports import page

GPUS = 8
LAYOUTS: Mapping[str, Sequence[int]] = {  # model, in FP8: GPUs that share its layers
    "llama-3.1-8b": (1, 2, 4, 8),
    "qwen3-32b": (1, 2, 4, 8),
    "llama-3.1-70b": (2, 4, 8),  # on one GPU its weights leave no room for a cache
}
START = {"llama-3.1-8b": 24.0, "qwen3-32b": 4.0, "llama-3.1-70b": 3.0}  # requests/s of the first rung
STRICT, LOOSE = {"llama-3.1-8b": 0.012, "qwen3-32b": 0.02, "llama-3.1-70b": 0.03}, 0.08  # bounds on TPOT in the tables
RUNG = 1.4
SEEDS = (0, 1, 2)
TTFT_S, SHARE = 2.0, 0.99
BOUNDS = tuple(float(bound) for bound in np.geomspace(0.005, 0.08, 49))  # on TPOT, seconds
SECONDS, LEAST, MOST = 120, 600, 8000  # length of a run, and its least and most requests
TITLE = "Eight H100: the shorter TPOT has to be, the more GPUs a server should have, up to four"
CLOSE = 0.03  # two names at the end of lines
RANGE_MS = {"llama-3.1-8b": (5.0, 140.0), "qwen3-32b": (12.0, 120.0), "llama-3.1-70b": (20.0, 115.0)}  # of the figure
LOOKS = {1: 0, 2: 1, 4: 2, 8: 3}  # by GPUs
COUNTED = (0.35, 0.75)  # of the requests, in order of arrival
TABLES = {"kind": "table", "path": "public_measured/aiconfigurator/h100_sxm", "engine": "vllm", "terms": "vllm-dense"}


class Rung(NamedTuple):
    """Runs at a rate: TTFT and TPOT of the requests that count, a pair of arrays a seed, and tokens a request."""

    rate: float
    latencies: Sequence[tuple[Any, Any]]
    outputs: float

    def score(self, bound_s: float, seed: int | None = None) -> float:
        """The 99th percentile of the scores, of one seed or of all."""
        chosen = self.latencies if seed is None else self.latencies[seed : seed + 1]
        scores = np.concatenate([np.maximum(ttft / TTFT_S, tpot / bound_s) for ttft, tpot in chosen])
        return float(np.quantile(scores, SHARE, method="inverted_cdf"))


class Climb(NamedTuple):
    """The rungs of a layout in order of their rates."""

    model: str
    gpus: int
    price_usd_hour: float
    rungs: Sequence[Rung]

    @property
    def name(self) -> str:
        return f"TP{self.gpus} x {GPUS // self.gpus}"

    def rate(self, bound_s: float, seed: int | None = None) -> float:
        """The requests/s at which a bound on TPOT is just met, by one seed or by all; NaN if no rung meets it."""
        scores = [log(rung.score(bound_s, seed)) for rung in self.rungs]
        for (before, after), (low, high) in zip(pairwise(scores), pairwise(self.rungs), strict=True):
            if before <= 0 < after:
                return exp(log(low.rate) - before / (after - before) * log(high.rate / low.rate))
        assert scores[0] > 0  # else the last rung would have been another
        return float("nan")

    def usd(self, rate: float) -> float:
        """The price of a million output tokens at a rate."""
        return 1e6 * self.price_usd_hour / 3600 / (rate * fmean(rung.outputs for rung in self.rungs))


def scenario(model: str, gpus: int, rate: float, seed: int) -> cbsim.Scenario:
    """Servers of so many GPUs each, eight GPUs in all."""
    requests = int(min(MOST, max(LEAST, rate * SECONDS)))
    load = {"kind": "synthetic", "lengths": "sharegpt", "requests": requests}
    fields = {
        "question": "Replicas or tensor parallelism?",
        "model": model,
        "hardware": "h100-sxm",
        "workload": load | {"arrivals": {"kind": "poisson", "rate_per_s": rate}},
        "scheduler": {"name": "vllm"},
        "loop": {"mode": "async"},
        "cost": TABLES | {"tensor_parallel": gpus},
        "fleet": {"pools": [{"count": GPUS // gpus}], "router": {"name": "least_in_flight"}},
        "seed": seed,
    }
    return cbsim.load(fields, {"model.weights_dtype": "fp8"})


def met(rung: Rung) -> bool:
    """Whether any seed meets the loosest SLO."""
    return min(rung.score(BOUNDS[-1], seed) for seed in (None, *range(len(SEEDS)))) <= 1


def climbed(layout: tuple[str, int]) -> Climb:
    model, gpus = layout
    rungs: list[Rung] = []
    while not rungs or met(rungs[-1]):
        rate = START[model] * RUNG ** len(rungs)
        results: list[Any] = [cbsim.run(scenario(model, gpus, rate, seed)) for seed in SEEDS]
        outputs = fmean(one.summary["output_tokens"] / one.summary["requests"] for one in results)
        rungs.append(Rung(rate, [latencies(one.requests) for one in results], outputs))
    return Climb(model, gpus, scenario(model, gpus, rate, 0).price_usd_hour or 0.0, rungs)


def latencies(requests: Any) -> tuple[Any, Any]:
    """TTFT and TPOT of the requests that count; TPOT is 0 of those with one token."""
    names = ("arrival_ns", "ttft_s", "tpot_s")
    arrival, ttft, tpot = (np.array(requests[name].to_pylist(), dtype=float) for name in names)
    low, high = (int(share * len(arrival)) for share in COUNTED)
    counted = np.argsort(arrival, kind="stable")[low:high]
    return ttft[counted], np.nan_to_num(tpot[counted])


def bounds_of(model: str) -> tuple[float, float]:
    return STRICT[model], LOOSE


def table(climbs: Sequence[Climb]) -> Table:
    """A row a layout: requests/s a GPU and $ a million output tokens at the strict and the loose bound."""
    rows = []
    for climb in climbs:
        cells: list[str] = []
        for bound_s in bounds_of(climb.model):
            rate = climb.rate(bound_s)
            span = [climb.rate(bound_s, seed) / GPUS for seed in range(len(SEEDS))]
            met = not np.isnan([rate, *span]).any()
            cells.append(f"{rate / GPUS:.2f} ({min(span):.2f} to {max(span):.2f})" if met else "not met")
            cells.append(f"{climb.usd(rate):.2f}" if met else "")
        rows.append((climb.model, f"{1e3 * STRICT[climb.model]:.0f} ms", climb.name, *cells))
    of = ("requests/s a GPU", "$ a million output tokens")
    return Table(
        "", ("model", "strict", "layout", *(f"{which}: {what}" for which in ("strict", "loose") for what in of)), rows
    )


def chart(climbs: Sequence[Climb]) -> Chart:
    """Requests/s a GPU over the bound on TPOT, a panel a model, a line a layout."""
    panels = []
    for model in LAYOUTS:
        marks: list[Mark] = [Edge("", 1e3 * bound_s, Style(GREY, "dotted")) for bound_s in bounds_of(model)]
        ends: list[float] = []  # of the lines, where their names stand
        for climb in [climb for climb in climbs if climb.model == model][::-1]:
            look = series(LOOKS[climb.gpus])
            x, y = 1e3 * np.array(BOUNDS), np.array([climb.rate(bound_s) / GPUS for bound_s in BOUNDS])
            low, high = (np.array(ends) / GPUS for ends in _spans(climb))
            marks += [Area("", x, low, high, look), Line("", x, y, look)]
            at = np.flatnonzero(~np.isnan(y))
            at = np.unique([at[0], *at[::-8]])
            labels = [""] * len(at)
            labels[0 if any(abs(y[-1] - end) < CLOSE * end for end in ends) else -1] = climb.name
            marks.append(Points("", x[at], y[at], look, labels=labels))
            ends.append(y[-1])
        ticks = [5, 10, 20, 40, 80]
        axes = "bound on TPOT, ms", "requests/s a GPU"
        shown: Any = {"x_log": True, "x_ticks": ticks, "x_range": RANGE_MS[model], "tall": True}
        panels.append(Panel(marks, *axes, f"{model} in FP8", **shown))
    return Chart("replicas-or-tp", TITLE, "", panels, columns=3)


def _spans(climb: Climb) -> tuple[list[float], list[float]]:
    """The least and the most of the seeds, at each bound; NaN where one does not meet it."""
    rates = [[climb.rate(bound_s, seed) for seed in range(len(SEEDS))] for bound_s in BOUNDS]
    return [float(np.min(each)) for each in rates], [float(np.max(each)) for each in rates]


def facts(climb: Climb) -> dict[str, Any]:
    """What report.json has of a layout."""
    rates = {f"{1e3 * bound_s:.3g}": climb.rate(bound_s) for bound_s in (*BOUNDS, *bounds_of(climb.model))}
    met = {bound_ms: round(rate, 4) for bound_ms, rate in rates.items() if not np.isnan(rate)}
    rungs = [
        {
            "rate": rung.rate,
            "scores": [[rung.score(at, seed) for seed in range(len(SEEDS))] for at in bounds_of(climb.model)],
        }
        for rung in climb.rungs
    ]
    named = {"model": climb.model, "tensor_parallel": climb.gpus, "servers": GPUS // climb.gpus}
    return named | {"price_usd_hour": climb.price_usd_hour, "rungs": rungs, "requests_s_by_bound_ms": met}


def main() -> None:
    layouts = [(model, gpus) for model, sizes in LAYOUTS.items() for gpus in sizes]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        climbs = list(pool.map(climbed, layouts))
    write(climbs)


def write(climbs: Sequence[Climb]) -> None:
    shown = table(climbs)
    layouts = [facts(climb) | {"cells": cells} for climb, cells in zip(climbs, shown.rows, strict=True)]
    page.write(__file__, {"layouts": shown}, [chart(climbs)], {"header": shown.header, "layouts": layouts})


if __name__ == "__main__":
    main()
