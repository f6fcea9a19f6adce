"""Goodput under an SLO over the request rate, for every scheduler at its default settings, on one axis.

Each scheduler has its usual blocks, seats and budgets, solved for the same GPU as in its own system; a loop that its
original has. Requests, lengths and gaps are the same for all; a rate scales the gaps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cbsim.draw.chart import Chart, Line, Panel, series
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.machine.simulation import Simulation
from cbsim.scenario import scenario as scenarios
from cbsim.server import running
from cbsim.server.running import Terms

RATES = (4, 8, 16, 24, 32, 40, 48, 64)
REQUESTS = 600
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
    """A run of each scheduler at each rate. They need no data."""
    points = [point(name, loop, rate) for name, loop in SCHEDULERS for rate in RATES]
    slo = scenarios.load("rates").slo
    bounds = {name: bound for name in ("ttft_s", "tpot_s", "e2e_s") if (bound := getattr(slo, name)) is not None}
    said = ", ".join(f"{name.removesuffix('_s').upper()} of {bound:g} s" for name, bound in bounds.items())
    return Study(
        title="Goodput by scheduler and load",
        question=f"How many requests a second does each scheduler serve within {said}, with its default settings?",
        findings=_findings(points),
        tables=[_table(points)],
        charts=[_chart(points, said)],
        data={"points": [p._asdict() for p in points], "bounds": bounds},
    )


def point(name: str, loop: str, rate: int) -> Point:
    changes = [
        f"scheduler={json.dumps({'name': name})}",
        f"loop.mode={loop}",
        f"workload.requests={REQUESTS}",
        f"workload.arrivals.rate_per_s={rate}",
    ]
    made = running.one_loop(scenarios.load("rates", changes), loop, Simulation, Terms("")).summary["slo"]
    return Point(name, rate, made["goodput_requests_per_s"], made["attainment"])


def _of(points: Sequence[Point], name: str) -> list[Point]:
    return [p for p in points if p.scheduler == name]


def _table(points: Sequence[Point]) -> Table:
    rows = [(name, *(f"{p.goodput:.1f} ({p.attainment:.0%})" for p in _of(points, name))) for name, _ in SCHEDULERS]
    header = ("scheduler", *(f"{rate}/s" for rate in RATES))
    return Table("goodput, requests/s", header, rows, "In brackets the share of the requests that met all bounds.")


def _chart(points: Sequence[Point], said: str) -> Chart:
    lines = []
    for number, (name, _) in enumerate(SCHEDULERS):
        mine = _of(points, name)
        rates, goodput = (np.array([getattr(p, field) for p in mine], dtype=float) for field in ("rate", "goodput"))
        lines.append(Line(name, rates, goodput, series(number)))
    panel = Panel(lines, "requests/s that arrive", "requests/s within bounds", "goodput")
    return Chart("schedulers_by_load", "Goodput by scheduler", f"Requests a second within {said}.", [panel])


def _findings(points: Sequence[Point]) -> list[str]:
    said = []
    for name, _ in SCHEDULERS:
        held = [p.rate for p in _of(points, name) if p.attainment >= 0.9]
        most = max(_of(points, name), key=lambda p: p.goodput)
        upto = f"up to {max(held)}/s" if held else f"at no rate from {RATES[0]}/s on"
        best = f"its best goodput is {most.goodput:.1f} requests/s, at {most.rate}/s"
        said.append(f"{name} keeps 90 % of the requests within the bounds {upto}; {best}.")
    return said
