"""Goodput under an SLO over the request rate, for every scheduler at its default settings and at its best, on one axis.

By default each scheduler has its usual blocks, slots and budgets, computed for the same GPU as in its own system, and a
loop that its original has. At its best it has the slots and budgets that `tune` finds for the same SLO at one rate,
kept at all others. Requests, lengths and gaps are the same for all; a rate scales the gaps.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.draw.chart import Chart, Line, Panel, series
from cbsim.draw.report import Table
from cbsim.stats import intervals
from reports import page
from reports.fidelity.landscape.make import CONSTANT

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
LONGEST = 4096 + 2048  # tokens of a sequence of the workload, which those that reserve a whole one are told
CONFIDENCE, MOST = 0.95, 10  # of the interval of a gain; replicates
KNOBS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "static": {"batch_size": (32, 128)},
    "faster_transformer": {"max_num_seqs": (128, 256), "max_model_len": (LONGEST,)},
    "orca": {"max_num_seqs": (128, 256), "max_model_len": (LONGEST,)},
    "vllm_v0": {"max_num_seqs": (256, 512), "max_batched_tokens": (LONGEST, 16384)},
    "sarathi": {"max_num_seqs": (128, 256, 512), "chunk_size": (256, 512, 1024, 2048)},
    "tgi": {"max_batch_size": (256, 512), "max_batch_prefill_tokens": (4096, 8192), "waiting_served_ratio": (0.3, 1.2)},
    "transformers_fifo": {"max_batch_tokens": (512, 1024, 2048, 4096, 8192), "max_requests_per_batch": (256, 1024)},
    "trtllm": {"max_num_tokens": (512, 1024, 2048, 4096, 8192), "enable_chunked_prefill": (True,)},
    "vllm": {"max_num_seqs": (128, 256, 512), "max_num_batched_tokens": (512, 1024, 2048, 4096, 8192)},
    "sglang": {"chunked_prefill_size": (512, 1024, 2048, 4096, 8192), "enable_mixed_chunk": (False, True)},
}


class Point(NamedTuple):
    """A run: requests a second that met all bounds, and the share of them."""

    scheduler: str
    rate: int
    goodput: float
    attainment: float


class Best(NamedTuple):
    """A scheduler's best settings beside its defaults: mean goodput of both, over the same replicates; the interval of
    their difference, which holds whichever candidate is the best (Bonferroni); how many candidates there were, and how
    many could not be told from the best.
    """

    scheduler: str
    settings: Mapping[str, Any]
    default: float
    tuned: float
    low: float
    high: float
    attainment: float
    replicates: int
    candidates: int
    left: int


def changes(scheduler: Mapping[str, Any], loop: str, rate: float, requests: int = REQUESTS) -> list[str]:
    """The overrides of the scenario that are a scheduler with its settings, at a rate."""
    return [
        f"scheduler={json.dumps(scheduler)}",
        f"loop.mode={loop}",
        f"workload.requests={requests}",
        f"workload.arrivals.rate_per_s={rate}",
        CONSTANT,
    ]


def slo(overrides: Sequence[str], replicate: int = 0) -> Mapping[str, float]:
    """Goodput and the share of requests within the bounds, of one seed."""
    seed = cbsim.load("rates").seed + replicate
    made: Any = cbsim.run(cbsim.load("rates", *overrides, f"seed={seed}"))
    return made.summary["slo"]  # type: ignore[no-any-return]


def point(name: str, loop: str, rate: int, settings: Mapping[str, Any] | None = None) -> Point:
    """A run, with these settings in place of the scheduler's defaults."""
    made = slo(changes({"name": name, **(settings or {})}, loop, rate))
    return Point(name, rate, made["goodput_requests_per_s"], made["attainment"])


def tuned(name: str, loop: str, rate: float, requests: int = REQUESTS, jobs: int = 1) -> Best:
    """A scheduler's best settings, and its defaults over as many replicates as these got."""
    usual = changes({"name": name}, loop, rate, requests)
    knobs = {f"scheduler.{field}": values for field, values in KNOBS[name].items()}
    limits: Any = {"replicates": MOST, "confidence": CONFIDENCE}
    with tempfile.TemporaryDirectory() as store:
        answer = cbsim.tune("rates", knobs, "goodput", changes=usual, store=store, jobs=jobs, **limits)
    settings = {field.rpartition(".")[2]: value for field, value in (answer.best or {}).items()}
    trials, number = answer.outcome.trials, answer.outcome.best
    replicates = range(len(trials[number or 0].runs))
    chosen = changes({"name": name, **settings}, loop, rate, requests)
    ours, theirs = ([slo(overrides, r) for r in replicates] for overrides in (chosen, usual))
    one, other = (dict(enumerate(run["goodput_requests_per_s"] for run in of)) for of in (ours, theirs))
    # Of all candidates against the defaults: the best one was chosen.
    compared = intervals.paired(one, other, intervals.each(CONFIDENCE, len(answer.candidates)))
    assert compared is not None
    return Best(
        name,
        settings,
        compared.second,
        compared.first,
        compared.low,
        compared.high,
        fmean(run["attainment"] for run in ours),
        compared.pairs,
        len(answer.candidates),
        len(answer.outcome.left),
    )


def load_table(points: Sequence[Point]) -> Table:
    rows = [
        (name, *(f"{p.goodput:.1f} ({p.attainment:.0%})" for p in points if p.scheduler == name))
        for name, _ in SCHEDULERS
    ]
    return Table("", ("scheduler", *(f"{rate}/s" for rate in RATES)), rows)


def best_table(best: Sequence[Best]) -> Table:
    rows = []
    for each in best:
        settings = ", ".join(f"{name} {value}" for name, value in each.settings.items())
        goodput = (f"{each.default:.1f}", f"{each.tuned:.1f}", f"{each.low:+.2f} to {each.high:+.2f}")
        counts = (f"{each.attainment:.0%}", str(each.replicates), f"{each.left} of {each.candidates}")
        rows.append((each.scheduler, *goodput, *counts, settings))
    header = ("scheduler", "default", "tuned", "gain", "within bounds", "replicates", "left", "settings")
    return Table("", header, rows)


def chart(groups: Mapping[str, Sequence[Point]]) -> Chart:
    panels = []
    for title, points in groups.items():
        lines = []
        for number, (name, _) in enumerate(SCHEDULERS):
            goodput = np.array([p.goodput for p in points if p.scheduler == name])
            lines.append(Line(name, np.array(RATES, dtype=float), goodput, series(number)))
        panels.append(Panel(lines, "requests/s that arrive", "requests/s within bounds", title))
    return Chart("schedulers_by_load", "Goodput by scheduler", "", panels)


def main() -> None:
    usual = [point(name, loop, rate) for name, loop in SCHEDULERS for rate in RATES]
    best = [tuned(name, loop, TUNED_AT, jobs=os.cpu_count() or 1) for name, loop in SCHEDULERS]
    after = [
        point(name, loop, rate, each.settings)
        for (name, loop), each in zip(SCHEDULERS, best, strict=True)
        for rate in RATES
    ]
    tables = {"defaults": load_table(usual), "best": best_table(best), "tuned": load_table(after)}
    charts = [chart({"default settings": usual, f"tuned at {TUNED_AT}/s": after})]
    data: dict[str, list[Any]] = {"points": usual, "best": best, "tuned": after}
    page.write(__file__, tables, charts, {key: [each._asdict() for each in of] for key, of in data.items()})


if __name__ == "__main__":
    main()
