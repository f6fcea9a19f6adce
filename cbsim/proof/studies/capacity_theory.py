"""`capacity` against a closed form: how often its interval covers the capacity of an M/D/1 queue, and how wide it is.

One seat, prompts of one token, outputs of one token, a step of s seconds and a CPU that takes no time: a server that
needs exactly s for each request. Of Poisson arrivals at rate l the mean wait is l s^2 / (2 (1 - l s)) (Pollaczek and
Khinchine), so it is W at l = 2 W / (s^2 + 2 W s). TTFT is the wait and s, so `ttft.mean<=W+s` is that limit.

All searches run on the workload's own arrivals and Lindley's recursion, which is what the simulator makes of them, to
the nanosecond, and takes seconds. A few are simulated as well; they find the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import BLACK, Area, Chart, Level, Mark, Panel, Style, series
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.results import metrics
from cbsim.results.columns import NS
from cbsim.results.record import STATUSES
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import identity, search, terms
from cbsim.sweeps.capacity import Capacity
from cbsim.sweeps.over import RATE
from cbsim.sweeps.processes import Processes
from cbsim.sweeps.runs import Run, Runs
from cbsim.sweeps.store import Store
from cbsim.workload import generators
from cbsim.workload.generators import Streams

SERVICE_S, WAIT_S = 1.0, 2.0
EXACT = 2 * WAIT_S / (SERVICE_S**2 + 2 * WAIT_S * SERVICE_S)
SEEDS, SIMULATED, REQUESTS, REPLICATES, WIDTH = 100, 25, 4000, 32, 0.05
GOLDEN = (5**0.5 - 1) / 2


class Answer(NamedTuple):
    """A search from its own seed and its own first rate."""

    number: int
    start: float
    holds: float
    fails: float
    runs: int

    @property
    def covers(self) -> bool:
        return self.holds <= EXACT <= self.fails

    @property
    def width(self) -> float:
        """As a share of the exact capacity."""
        return (self.fails - self.holds) / EXACT


def scenario(number: int, requests: int = REQUESTS) -> Scenario:
    """The queue of a search. Its replicates share no seed with those of another; first rates spread over an octave, so
    that probes do not stand at the same places.
    """
    data = {
        "name": "m_d_1",
        "question": "At how many requests a second is the mean wait two seconds?",
        "seed": 1000 * number,
        "model": "llama-3.1-8b",
        "hardware": "h200-sxm",
        "workload": {
            "kind": "synthetic",
            "requests": requests,
            "prompt_tokens": 1,
            "output_tokens": 1,
            "arrivals": {"kind": "poisson", "rate_per_s": start(number)},
        },
        "scheduler": {"name": "vllm_v0", "max_num_seqs": 1},
        "kv_cache": {"block_size": 16, "num_blocks": 64},
        "cost": {"kind": "constant", "step_s": SERVICE_S},
        "loop": {"mode": "sync", "cuda_graphs": {"enabled": False}},
    }
    return scenarios.parse(data, "m_d_1")


def start(number: int) -> float:
    """The first rate of a search."""
    return round(EXACT / 2**0.5 * 2 ** (number * GOLDEN % 1), 4)


class Recursion(Runs):
    """Runs of the queue without the simulator: a wait is what has piled up since the queue was last empty."""

    def __init__(self) -> None:
        """Neither a store nor anybody who makes runs."""

    def of(self, scenarios: Sequence[Scenario], warmup: float) -> list[Run]:
        return [self._run(each, warmup) for each in scenarios]

    def _run(self, scenario: Scenario, warmup: float) -> Run:
        workload: Any = scenario.workload
        arrivals = Streams.of(scenario.seed).arrivals
        at_ns = np.array(generators.arrival_times(workload.arrivals, workload.requests, arrivals))
        service_ns = round(SERVICE_S * NS)
        piled = np.arange(len(at_ns)) * service_ns - at_ns
        ttft_ns = piled - np.minimum.accumulate(piled) + service_ns
        ttft = metrics.distribution(ttft_ns[int(warmup * len(at_ns)) :] / NS)
        by_status = dict.fromkeys(STATUSES, 0)
        return Run({"requests": len(at_ns), "requests_by_status": by_status, "ttft_s": ttft, "e2e_s": ttft}, [])


def found(
    number: int, runs: Runs, requests: int = REQUESTS, replicates: int = REPLICATES, width: float = WIDTH
) -> Capacity:
    """What `capacity` answers."""
    asked = scenario(number, requests)
    wanted = terms.terms(asked, [f"ttft.mean<={WAIT_S + SERVICE_S}s"], None, replicates=replicates, width=width)
    return search.search(asked, RATE, wanted, runs)


def study() -> Study:
    """A hundred searches, a few of them simulated on all cores as well. They need no data."""
    with tempfile.TemporaryDirectory() as folder, closing(Processes(os.cpu_count() or 1)) as executor:
        runs = Runs(Store(Path(folder), identity.code()), executor)
        simulated = [_answer(number, found(number, runs)) for number in range(SIMULATED)]
    answers = [_answer(number, found(number, Recursion())) for number in range(SEEDS)]
    same = sum(a == b for a, b in zip(simulated, answers, strict=False))
    return Study(
        title="Capacity against theory: M/D/1",
        question=f"How often does the interval that capacity answers cover the exact one, {EXACT:.4f} requests/s?",
        findings=_findings(answers, same),
        tables=[_table(answers)],
        charts=[_chart(answers)],
        data={
            "exact_rate_per_s": EXACT,
            "requests": REQUESTS,
            "replicates": REPLICATES,
            "width": WIDTH,
            "simulated": SIMULATED,
            "simulated_alike": same,
            "answers": [answer._asdict() for answer in answers],
        },
    )


def _answer(number: int, made: Capacity) -> Answer:
    assert made.holds is not None
    assert made.fails is not None
    return Answer(number, start(number), made.holds, made.fails, made.replicates)


def _findings(answers: Sequence[Answer], same: int) -> list[str]:
    covered = sum(answer.covers for answer in answers)
    widths = np.array([answer.width for answer in answers])
    runs = np.array([answer.runs for answer in answers])
    return [
        f"{covered} of {len(answers)} intervals cover the exact capacity; each claims at least 95 %.",
        f"The median width is {np.median(widths):.1%} of it, the widest {widths.max():.1%}; {WIDTH:.0%} was asked for.",
        f"A search takes {np.median(runs):.0f} runs of {REQUESTS:,} requests in the median, {runs.max()} at most.",
        f"{same} of the {SIMULATED} searches that were simulated as well find the same, with as many runs.",
    ]


def _table(answers: Sequence[Answer]) -> Table:
    rows = [
        (str(a.number), *(f"{rate:.4f}" for rate in (a.start, a.holds, a.fails)), f"{a.width:.1%}", str(a.runs))
        for a in answers
    ]
    missed = ", ".join(str(a.number) for a in answers if not a.covers) or "none"
    header = ("search", "first rate", "holds", "fails", "width", "runs")
    return Table(
        "All searches", header, rows, f"Rates in requests a second. Searches that miss the exact one: {missed}."
    )


def _chart(answers: Sequence[Answer]) -> Chart:
    low, high = (np.array(values) for values in zip(*sorted((a.holds, a.fails) for a in answers), strict=True))
    x = np.arange(len(answers), dtype=float)
    marks: list[Mark] = [
        Area("from holds to fails", x, low, high, series(0), step=True),
        Level("exact", EXACT, Style(BLACK, "dashed")),
    ]
    shown = (low.min() * 0.98, high.max() * 1.02)
    panel = Panel(marks, "search, in order of the rate that holds", "requests/s", "capacity", y_range=shown)
    return Chart("capacity_theory", "Capacity of M/D/1", "What each search answers, and the closed form.", [panel])
