"""The share of the KV memory that holds tokens: figure 2 of the vLLM paper (SOSP 2023), and the assumptions behind it.

The scenario `fragmentation` is its setting: OPT-13B on an A100 40GB, 15,728 tokens of KV, sequences of 2,048 at most.
Three servers reserve one extent a request, placed by the buddy system as the paper assumes; the fourth is paged. Shares
are means over the time in which requests wait: memory that is free then is wasted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.draw.chart import BLUE, GREY, ORANGE, PALE, PINK, RED, SKY, Chart, Panel, Spans, Style
from cbsim.draw.report import Table
from cbsim.runs.occupancy import Shares
from reports import page

REQUESTS = 1000
VLLM = "{name: vllm, max_num_seqs: 256, max_num_batched_tokens: 2048}"
SYSTEMS: Mapping[str, Sequence[str]] = {
    "Orca (Max)": ("scheduler.reserve=max_model_len",),
    "Orca (Pow2)": ("scheduler.reserve=power_of_two",),
    "Orca (Oracle)": ("scheduler.reserve=exact",),
    "vLLM": (f"scheduler={VLLM}", "kv_cache={block_size: 16, num_blocks: 984}"),  # one of them is the null block
}
ORCA = tuple(SYSTEMS)[:3]
RATE_PER_S = 2.0  # of figure 13
BATCHED: Mapping[str, float] = {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "vLLM": 30.42}
"""Requests that are batched on average at that rate, as figure 13 has them for OPT-13B and ShareGPT."""


class Published(NamedTuple):
    """Percent of the memory as the figure has them: token states, reservation, internal fragmentation, and external
    fragmentation with all others. None where it has no number.
    """

    held: float
    later: float | None
    never: float | None
    other: float | None


PUBLISHED: Mapping[str, Published] = {
    "Orca (Max)": Published(20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": Published(26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": Published(38.2, 25.2, 0.0, 36.6),
    "vLLM": Published(96.3, None, None, None),
}


class Served(NamedTuple):
    """A run: its assumption, what its memory held, and what it served."""

    assumption: str
    system: str
    shares: Shares
    running: float  # requests, on average
    requests_per_s: float
    refused: int

    @property
    def other(self) -> float:
        """What the figure calls external fragmentation and others."""
        return self.shares.rounded + self.shares.scattered + self.shares.free


PAPER, FIRST, BEST = "as the paper", "first fit", "best fit"
TALKS, RATE = "conversations", f"{RATE_PER_S:g} requests/s"
POISSON = f"workload.arrivals={{kind: poisson, rate_per_s: {RATE_PER_S}}}"
LENGTHS = f"workload={{kind: synthetic, requests: {REQUESTS}, lengths: sharegpt}}"


def run(assumption: str, system: str, *changes: str) -> Served:
    """A server under an assumption; while requests wait, or at a rate until the last one has arrived."""
    overrides = (f"workload.requests={REQUESTS}", *SYSTEMS[system], "loop.mode=sync", *changes)
    result: Any = cbsim.run(cbsim.load("fragmentation", *overrides))
    held, steps = result.occupancy, result.step_numbers
    last = int(result.request_rows.numbers("arrival_ns").max())
    chosen = steps["schedule_start_ns"] <= last if assumption == RATE else held.waited
    batched = float(np.average(steps["running"], weights=held.lasted_ns * chosen))
    refused = result.summary["requests_by_status"]["refused"]
    return Served(assumption, system, held.shares(chosen), batched, result.summary["requests_per_s"], refused)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def published_table(runs: Sequence[Served]) -> Table:
    rows = []
    for served in runs:
        shares = served.shares.held, served.shares.later, served.shares.never, served.other
        cells = zip(shares, PUBLISHED[served.system], strict=True)
        rows.append((served.system, *(f"{_percent(own)} ({'-' if of is None else of})" for own, of in cells)))
    return Table("", ("server", "token states", "reserved for later", "never used", "external and others"), rows)


def assumption_table(runs: Sequence[Served]) -> Table:
    header = ("assumption", "server", *Shares._fields, "of reserved", "running", "requests/s")
    rows = []
    for each in runs:
        shares = map(_percent, (*each.shares, each.shares.kv_used_share))
        rows.append((each.assumption, each.system, *shares, f"{each.running:.2f}", f"{each.requests_per_s:.2f}"))
    return Table("", header, rows)


PARTS = {
    "token states": Style(BLUE),
    "reserved for later": Style(SKY),
    "never used": Style(ORANGE),
    "rounded up": Style(RED),
    "scattered": Style(GREY),
    "free": Style(PALE),
    "external and others (published)": Style(PINK),
}


def chart(runs: Sequence[Served]) -> Chart:
    """For each server a bar as simulated over one as published."""
    rows: list[str] = []
    pieces: dict[str, list[tuple[int, float, float]]] = {name: [] for name in PARTS}
    for served in runs:
        system, published = served.system, PUBLISHED[served.system]
        rows += [system, f"{system}, published"]
        _stack(pieces, len(rows) - 2, dict(zip(PARTS, (100 * share for share in served.shares), strict=False)))
        names = (*tuple(PARTS)[:3], tuple(PARTS)[-1])
        _stack(pieces, len(rows) - 1, {name: share or 0.0 for name, share in zip(names, published, strict=True)})
    marks = [_spans(name, pieces[name]) for name in PARTS if pieces[name]]
    panel = Panel(marks, "percent of the KV memory", rows=rows, x_range=(0.0, 100.0))
    return Chart("fragmentation", "Where the KV memory goes", "", [panel])


def _stack(pieces: dict[str, list[tuple[int, float, float]]], row: int, shares: Mapping[str, float]) -> None:
    at = 0.0
    for name, share in shares.items():
        if share > 0:
            pieces[name].append((row, at, at + share))
        at += share


def _spans(name: str, pieces: Sequence[tuple[int, float, float]]) -> Spans:
    row, start, end = zip(*pieces, strict=True)
    labels = [f"{high - low:.1f}" for _, low, high in pieces]
    return Spans(name, np.array(row), np.array(start), np.array(end), PARTS[name], texts=labels, labels=labels)


def main() -> None:
    runs = [run(PAPER, system) for system in SYSTEMS]
    others = [
        *(run(FIRST, system, "scheduler.placement=first_fit") for system in ORCA),
        *(run(BEST, system, "scheduler.placement=best_fit") for system in ORCA),
        *(run(TALKS, system, LENGTHS) for system in SYSTEMS),
        *(run(RATE, system, POISSON) for system in SYSTEMS),
    ]
    tables = {"published": published_table(runs), "assumptions": assumption_table([*runs, *others])}
    entries = [
        {**s._asdict(), "shares": s.shares._asdict(), "kv_used_share": s.shares.kv_used_share}
        | ({"batched_published": BATCHED[s.system]} if s.assumption == RATE else {})
        for s in (*runs, *others)
    ]
    published = {system: numbers._asdict() for system, numbers in PUBLISHED.items()}
    page.write(__file__, tables, [chart(runs)], {"runs": entries, "published": published})


if __name__ == "__main__":
    main()
