"""How much of the KV memory holds tokens: figure 2 of the vLLM paper (SOSP 2023), and what its numbers rest on.

The scenario `fragmentation` is its setting: OPT-13B on an A100 40GB, 15,728 tokens of KV, sequences of 2,048 at most.
Three servers reserve one piece a request, placed by the buddy system as the paper assumes; the fourth is paged.
Shares are means over the time in which requests wait: what is free then is of use to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import BLUE, GREY, ORANGE, PALE, PINK, RED, SKY, Chart, Panel, Spans, Style
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.machine.simulation import Simulation
from cbsim.scenario import scenario as scenarios
from cbsim.server import running
from cbsim.server.occupancy import Shares
from cbsim.server.running import Terms

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
SUSTAINED: Mapping[str, tuple[float, float]] = {"Orca (Max)": (2.7, 8), "Orca (Oracle)": (1.7, 2.7)}
"""How many times the request rate of these vLLM sustains on ShareGPT at equal latency, over the paper's models."""


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


def study() -> Study:
    """Eighteen runs. They need no data."""
    talks = f"workload={{kind: synthetic, requests: {REQUESTS}, lengths: sharegpt}}"
    runs = {system: _run(PAPER, system) for system in SYSTEMS}
    others = [
        *(_run(FIRST, system, "scheduler.placement=first_fit") for system in ORCA),
        *(_run(BEST, system, "scheduler.placement=best_fit") for system in ORCA),
        *(_run(TALKS, system, talks) for system in SYSTEMS),
        *(_run(RATE, system, POISSON, arriving=True) for system in SYSTEMS),
    ]
    found = {(served.assumption, served.system): served for served in (*runs.values(), *others)}
    return Study(
        title="Fragmentation: how much of the KV memory holds tokens",
        question="Where does the KV memory go when all that a request may need is reserved in one piece, against the "
        "figures that the vLLM paper published?",
        findings=_findings(found),
        tables=[_against(runs), _assumptions(found)],
        charts=[_chart(runs)],
        data={"runs": [_entry(served) for served in found.values()], "published": _published()},
    )


def _run(assumption: str, system: str, *changes: str, arriving: bool = False) -> Served:
    """A server under an assumption; over the time in which requests wait, or else until the last one has arrived."""
    asked = scenarios.load("fragmentation", [f"workload.requests={REQUESTS}", *SYSTEMS[system], *changes])
    done = running.one_loop(asked, "sync", Simulation, Terms(""))
    held, steps = done.occupancy, done.step_numbers
    last = int(done.request_rows.numbers("arrival_ns").max())
    chosen = steps["schedule_start_ns"] <= last if arriving else held.waited
    batched = float(np.average(steps["running"], weights=held.lasted_ns * chosen))
    refused = done.summary["requests_by_status"]["refused"]
    return Served(assumption, system, held.shares(chosen), batched, done.summary["requests_per_s"], refused)


# -- findings ---------------------------------------------------------------------------------------------------------


def _findings(found: Mapping[tuple[str, str], Served]) -> list[str]:
    return [_agreement(found), _fitted(found), _placement(found), _lengths(found), _load(found), _worth(found), LIMITS]


def _held(found: Mapping[tuple[str, str], Served], assumption: str) -> str:
    return ", ".join(f"{system} {found[assumption, system].shares.held:.1%}" for system in SYSTEMS)


def _agreement(found: Mapping[tuple[str, str], Served]) -> str:
    said = [f"{system} {found[PAPER, system].shares.held:.1%} ({PUBLISHED[system].held} %)" for system in SYSTEMS]
    off = [100 * found[PAPER, system].shares.held - PUBLISHED[system].held for system in SYSTEMS]
    return (
        f"Tokens fill, of the KV memory and in brackets as published: {', '.join(said)}: {min(off):+.1f} to "
        f"{max(off):+.1f} points."
    )


def _fitted(found: Mapping[tuple[str, str], Served]) -> str:
    most = found[PAPER, "Orca (Max)"]
    return (
        "Means of prompts and outputs (161.31 and 337.99 tokens) are the paper's; the spread of the outputs is fitted "
        "to what it shows of Orca (Max), the log-normal shapes are ours, and nothing else is fitted. What is left "
        f"there beside seven pieces of 2,048 follows from sizes alone: {1392 / 15728:.2%} of 15,728 tokens "
        f"({most.other:.2%} in the run, {PUBLISHED[most.system].other} % published)."
    )


def _placement(found: Mapping[tuple[str, str], Served]) -> str:
    oracle = {kind: found[kind, "Orca (Oracle)"] for kind in (PAPER, FIRST, BEST)}
    first = oracle[FIRST].shares
    return (
        f"Of Orca (Oracle), {oracle[PAPER].shares.rounded:.1%} of the memory are the buddy system's rounding and "
        f"{oracle[PAPER].shares.scattered:.1%} scattered. Placed by first fit it holds {first.held:.1%}, by best fit "
        f"{oracle[BEST].shares.held:.1%}: by first fit {first.later:.1%} wait for outputs to come and "
        f"{oracle[FIRST].other:.1%} lie between the pieces."
    )


def _lengths(found: Mapping[tuple[str, str], Served]) -> str:
    refused = found[TALKS, "Orca (Max)"].refused
    return (
        f"Whole conversations of ShareGPT (`lengths: sharegpt`; {refused:,} of {REQUESTS:,} have prompts of 2,048 "
        f"tokens or more and are refused) have longer prompts, which are used at once: {_held(found, TALKS)}."
    )


def _load(found: Mapping[tuple[str, str], Served]) -> str:
    said = [f"{system} {found[RATE, system].running:.2f} ({BATCHED[system]:.2f})" for system in SYSTEMS]
    paged = found[RATE, "vLLM"].shares
    return (
        f"At {RATE}, requests that run at a time, and in brackets as figure 13 has them: {', '.join(said)}. The "
        "memory of the first three is full, and decides. vLLM's is not: how many run there follows from the times of "
        f"steps, which are the roofline's; {paged.free:.1%} of the memory are free, and tokens fill "
        f"{paged.kv_used_share:.1%} of the blocks in use."
    )


def _worth(found: Mapping[tuple[str, str], Served]) -> str:
    paged = found[PAPER, "vLLM"].requests_per_s
    said = [
        f"{paged / found[PAPER, system].requests_per_s:.1f} times {system} ({low:g} to {high:g})"
        for system, (low, high) in SUSTAINED.items()
    ]
    return (
        f"By the roofline, vLLM serves of requests that are all there {', '.join(said)}; in brackets what the paper "
        "says of the rates at equal latency, over its models."
    )


LIMITS = (
    "Simulated; nothing was measured on a GPU. The paper does not say at which rate its shares were taken; here they "
    "are those of the time in which requests wait. What its figure calls external fragmentation and others is here all "
    "that is rounded up, scattered or free."
)


# -- tables, figure, data ---------------------------------------------------------------------------------------------


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _against(runs: Mapping[str, Served]) -> Table:
    rows = []
    for system, served in runs.items():
        ours = served.shares.held, served.shares.later, served.shares.never, served.other
        cells = zip(ours, PUBLISHED[system], strict=True)
        rows.append((system, *(f"{_percent(own)} ({'-' if said is None else said})" for own, said in cells)))
    header = ("server", "token states", "reserved for later", "never used", "external and others")
    return Table("Against figure 2", header, rows, "Percent of the KV memory, in brackets as published.")


def _assumptions(found: Mapping[tuple[str, str], Served]) -> Table:
    header = ("assumption", "server", *Shares._fields, "of reserved", "running", "requests/s")
    rows = [
        (s.assumption, s.system, *map(_percent, (*s.shares, s.shares.kv_used_share)), *_rates(s))
        for s in found.values()
    ]
    return Table("By assumption", header, rows, "Percent of the KV memory; then what holds tokens of what is reserved.")


def _rates(served: Served) -> tuple[str, str]:
    return f"{served.running:.2f}", f"{served.requests_per_s:.2f}"


PARTS = {
    "token states": Style(BLUE),
    "reserved for later": Style(SKY),
    "never used": Style(ORANGE),
    "rounded up": Style(RED),
    "scattered": Style(GREY),
    "free": Style(PALE),
    "external and others (published)": Style(PINK),
}


def _chart(runs: Mapping[str, Served]) -> Chart:
    """For each server a bar as simulated over one as published."""
    rows: list[str] = []
    pieces: dict[str, list[tuple[int, float, float]]] = {name: [] for name in PARTS}
    for system, served in runs.items():
        published = PUBLISHED[system]
        rows += [system, f"{system}, published"]
        _stack(pieces, len(rows) - 2, dict(zip(PARTS, (100 * share for share in served.shares), strict=False)))
        names = (*tuple(PARTS)[:3], tuple(PARTS)[-1])
        _stack(pieces, len(rows) - 1, {name: share or 0.0 for name, share in zip(names, published, strict=True)})
    marks = [_spans(name, pieces[name]) for name in PARTS if pieces[name]]
    says = (
        "Where the KV memory goes while requests wait, simulated and as figure 2 of the vLLM paper has it; of vLLM it "
        "has the token states only."
    )
    panel = Panel(marks, "percent of the KV memory", rows=rows, x_range=(0.0, 100.0))
    return Chart("fragmentation", "Where the KV memory goes", says, [panel])


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


def _entry(served: Served) -> dict[str, Any]:
    return {
        **served._asdict(),
        "shares": served.shares._asdict(),
        "kv_used_share": served.shares.kv_used_share,
    }


def _published() -> dict[str, dict[str, float | None]]:
    return {system: numbers._asdict() for system, numbers in PUBLISHED.items()}
