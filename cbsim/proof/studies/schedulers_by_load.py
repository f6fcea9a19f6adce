"""Goodput under an SLO over the request rate, for every scheduler at its default settings and at its best, on one axis.

By default each scheduler has its usual blocks, seats and budgets, solved for the same GPU as in its own system; a loop
that its original has. At its best it has the seats and budgets that `tune` finds for the same SLO at one rate, kept at
all others. Requests, lengths and gaps are the same for all; a rate scales the gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import Chart, Line, Panel, series
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.machine.simulation import Simulation
from cbsim.proof.studies import schedulers_tuned
from cbsim.proof.studies.schedulers_tuned import Best
from cbsim.scenario import scenario as scenarios
from cbsim.server import running
from cbsim.server.running import Terms

RATES = (4, 8, 16, 24, 32, 40, 48, 64)
REQUESTS = 600
TUNED_AT = 64
SCHEDULERS: Sequence[tuple[str, str]] = (
    ("static", "sync"),
    ("faster_transformer", "sync"),
    ("orca", "sync"),
    ("vllm_v0", "sync"),
    ("sarathi", "sync"),
    ("tgi", "sync"),
    ("transformers_fifo", "async"),
    ("trtllm", "async"),
    ("vllm", "async"),
    ("sglang", "async"),
)


class Point(NamedTuple):
    """A run: requests a second that met all bounds, and the share of them."""

    scheduler: str
    rate: int
    goodput: float
    attainment: float


def study() -> Study:
    """A run of each scheduler at each rate, with its defaults and with its best settings. They need no data."""
    points = [point(name, loop, rate) for name, loop in SCHEDULERS for rate in RATES]
    best = [schedulers_tuned.best(name, loop, REQUESTS, TUNED_AT) for name, loop in SCHEDULERS]
    tuned = [
        point(name, loop, rate, each.settings)
        for (name, loop), each in zip(SCHEDULERS, best, strict=True)
        for rate in RATES
    ]
    return answer(points, best, tuned)


def answer(points: Sequence[Point], best: Sequence[Best], tuned: Sequence[Point]) -> Study:
    """What these runs say."""
    slo = scenarios.load("rates").slo
    bounds = {name: bound for name in ("ttft_s", "tpot_s", "e2e_s") if (bound := getattr(slo, name)) is not None}
    said = ", ".join(f"{name.removesuffix('_s').upper()} of {bound:g} s" for name, bound in bounds.items())
    return Study(
        title="Goodput by scheduler and load",
        question=f"How many requests a second does each scheduler serve within {said}, with its default settings "
        "and with its best?",
        findings=[*_findings(points), *_tuned_findings(best)],
        tables=[_table("goodput, requests/s", points), _best_table(best), _table("goodput when tuned", tuned)],
        charts=[_chart({"default settings": points, f"tuned at {TUNED_AT}/s": tuned}, said)],
        data={
            "points": [p._asdict() for p in points],
            "tuned": [p._asdict() for p in tuned],
            "best": [each._asdict() for each in best],
            "bounds": bounds,
        },
    )


def point(name: str, loop: str, rate: int, settings: Mapping[str, Any] | None = None) -> Point:
    """A run, with these settings in place of the scheduler's defaults."""
    changes = schedulers_tuned.changes({"name": name, **(settings or {})}, loop, REQUESTS, rate)
    made = running.one_loop(scenarios.load("rates", changes), loop, Simulation, Terms("")).summary["slo"]
    return Point(name, rate, made["goodput_requests_per_s"], made["attainment"])


def _of(points: Sequence[Point], name: str) -> list[Point]:
    return [p for p in points if p.scheduler == name]


def _table(title: str, points: Sequence[Point]) -> Table:
    rows = [(name, *(f"{p.goodput:.1f} ({p.attainment:.0%})" for p in _of(points, name))) for name, _ in SCHEDULERS]
    header = ("scheduler", *(f"{rate}/s" for rate in RATES))
    return Table(title, header, rows, "In brackets the share of the requests that met all bounds.")


def _best_table(best: Sequence[Best]) -> Table:
    rows = []
    for each in best:
        settings = ", ".join(f"{name} {value}" for name, value in each.settings.items())
        interval = f"{each.low:+.2f} to {each.high:+.2f}"
        told = f"{each.left} of {each.candidates}"
        goodput = (f"{each.default:.1f}", f"{each.tuned:.1f}", interval, f"{each.attainment:.0%}")
        rows.append((each.scheduler, *goodput, str(each.replicates), told, settings))
    header = ("scheduler", "default", "tuned", "gain", "within bounds", "replicates", "left", "settings")
    confidence = f"{schedulers_tuned.CONFIDENCE:.0%}"
    says = (
        f"Goodput, requests/s, mean of replicates with the same seeds; gain: a {confidence} interval of the paired "
        "difference, for all candidates at once; left: candidates that could not be told from the best with "
        f"{confidence} confidence."
    )
    return Table(f"tuned at {TUNED_AT}/s", header, rows, says)


def _chart(groups: Mapping[str, Sequence[Point]], said: str) -> Chart:
    panels = []
    for title, points in groups.items():
        lines = []
        for number, (name, _) in enumerate(SCHEDULERS):
            mine = _of(points, name)
            rates, goodput = (np.array([getattr(p, field) for p in mine], dtype=float) for field in ("rate", "goodput"))
            lines.append(Line(name, rates, goodput, series(number)))
        panels.append(Panel(lines, "requests/s that arrive", "requests/s within bounds", title))
    return Chart("schedulers_by_load", "Goodput by scheduler", f"Requests a second within {said}.", panels)


def _tuned_findings(best: Sequence[Best]) -> list[str]:
    """What tuning is worth, most first."""
    said = []
    for each in sorted(best, key=lambda each: each.default - each.tuned):
        gain = f"{each.tuned - each.default:+.1f} ({each.low:+.2f} to {each.high:+.2f})"
        known = "" if each.low > 0 else ", which may be none"
        said.append(f"{each.scheduler} at {TUNED_AT}/s: {each.tuned:.1f} requests/s when tuned, {gain}{known}.")
    return said


def _findings(points: Sequence[Point]) -> list[str]:
    said = []
    for name, _ in SCHEDULERS:
        held = [p.rate for p in _of(points, name) if p.attainment >= 0.9]
        most = max(_of(points, name), key=lambda p: p.goodput)
        upto = f"up to {max(held)}/s" if held else f"at no rate from {RATES[0]}/s on"
        best = f"its best goodput is {most.goodput:.1f} requests/s, at {most.rate}/s"
        said.append(f"By default {name} keeps 90 % of the requests within the bounds {upto}; {best}.")
    return said
