"""Eight servers behind each router: prefix hits and tail latency by the share of a prompt that others have too, and by
the age of what the router knows.

The fleet is that of the scenario `fleet`. Over shares, 60 prefixes are as likely as each other for ever. Over ages, two
workloads have the same share: those prefixes, and short-lived ones that come up, are used ten times within 20 s, and
never again. The first requests of a run, which fill the caches, do not count.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.draw.chart import BLACK, BLUE, RED, Cells, Chart, Line, Mark, Panel, Points, Style, Whiskers
from cbsim.draw.report import Table
from reports import page

PROMPT = 4096
SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
BELOW, NEAR = 12.0, 22.0  # requests/s: half of what the fleet carries without a hit, and all of it
SEEDS = (0, 1)
REQUESTS, WARM = 1000, 0.4  # of a run over shares, and the part of them that does not count
OLD_WEIGHTS = {"name": "llmd", "prefix": 2, "queue": 1, "kv_use": 1, "token_load": 0, "affinity_threshold": 0}
ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "round_robin": {"name": "round_robin"},
    "least_in_flight": {"name": "least_in_flight"},
    "preble": {"name": "preble"},
    "dynamo": {"name": "dynamo"},
    "session_hash": {"name": "session_hash"},
    "production_stack_prefixaware": {"name": "production_stack_prefixaware"},
    "sglang_cache_aware": {"name": "sglang_cache_aware"},
    "llmd, older weights": OLD_WEIGHTS,
    "mooncake_conductor": {"name": "mooncake_conductor"},
    "llmd": {"name": "llmd"},
    "llmd, precise": {"name": "llmd", "index": "precise"},
}
EVENTS_S = (0.0, 0.1, 1.0, 10.0, 60.0)
METRICS_S = (0.05, 1.0, 5.0, 30.0)
AGED = (("llmd, precise", "events_s", EVENTS_S), ("llmd, older weights", "metrics_s", METRICS_S))
AGED_SHARE = 0.875  # of the prompt: seven of eight blocks of the trace's form
LIGHT, HEAVY = 22.0, 44.0  # requests/s over ages
SECONDS, FIRST_S = 100, 60  # of a run over ages, and those that do not count
USES, LIFE_S = 10, 20.0  # of a short-lived prefix
LIVES = ("60 prefixes", "short-lived prefixes")


class Point(NamedTuple):
    """A fleet to simulate. `share` is of the prompt; `life` one of LIVES."""

    router: str
    rate: float
    share: float
    seed: int
    life: str = LIVES[0]
    events_s: float = 0.0
    metrics_s: float = 0.05


class Served(NamedTuple):
    """What came of it, for the requests that count: the share of prompts found in caches, TTFT, and the requests of the
    busiest server over the mean.
    """

    hits: float
    p50_s: float
    p99_s: float
    imbalance: float


def served(point: Point) -> Served:
    aged = point.share == AGED_SHARE
    changes: dict[str, Any] = {
        "fleet.router": ROUTERS[point.router],
        "fleet.signals": {"events_s": point.events_s, "metrics_s": point.metrics_s},
        "workload.shared_prefix_tokens": round(point.share * PROMPT),
        "workload.requests": round(point.rate * SECONDS) if aged else REQUESTS,
        "workload.arrivals.rate_per_s": point.rate,
        "seed": point.seed,
    }
    if point.life == LIVES[0]:
        return _served(cbsim.run(cbsim.load("fleet", changes)), aged)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        path.write_text(short_lived(point.rate, point.seed), encoding="utf-8")
        changes = {name: value for name, value in changes.items() if not name.startswith("workload")}
        changes["workload"] = {"kind": "mooncake", "path": str(path), "spread": False}
        return _served(cbsim.run(cbsim.load("fleet", changes)), aged)


def short_lived(rate: float, seed: int) -> str:
    """Requests in Mooncake's form: prompts of eight blocks of 512 tokens, of which `USES` requests share the first
    seven, at random times within `LIFE_S`. Lengths of outputs are as in the scenario.
    """
    rng, block = Random(seed), 512
    sent, blocks, start_s = [], 0, 0.0
    while start_s < SECONDS:
        shared = list(range(blocks, blocks + round(AGED_SHARE * PROMPT) // block))
        blocks += len(shared)
        for _ in range(USES):
            sent.append((start_s + rng.uniform(0, LIFE_S), [*shared, blocks]))
            blocks += 1
        start_s += rng.expovariate(rate / USES)
    lines = []
    for at_s, ids in sorted(sent):
        outputs = round(min(512, max(8, rng.lognormvariate(np.log(128) - 0.18, 0.6))))
        fields = {"timestamp": round(1e3 * at_s), "input_length": PROMPT, "output_length": outputs, "hash_ids": ids}
        lines.append(json.dumps(fields))
    return "\n".join(lines) + "\n"


def _served(result: Any, aged: bool) -> Served:
    names = ("arrival_ns", "prompt_tokens", "cached_tokens", "ttft_s", "server")
    arrival, prompts, cached, ttft, server = (np.array(result.requests[name].to_pylist()) for name in names)
    if aged:
        counted = (arrival >= FIRST_S * 1e9) & (arrival < SECONDS * 1e9)
    else:
        counted = np.argsort(np.argsort(arrival, kind="stable")) >= WARM * len(arrival)
    p50, p99 = np.quantile(ttft[counted], (0.5, 0.99))
    busiest = np.bincount(server[counted], minlength=8).max() * 8 / counted.sum()
    numbers = cached[counted].sum() / prompts[counted].sum(), p50, p99, busiest
    return Served(*(round(float(number), 4) for number in numbers))


def points() -> list[Point]:
    """All that is simulated."""
    shares = [Point(*each) for each in product(ROUTERS, (BELOW, NEAR), SHARES, SEEDS)]
    ages = [
        Point(router, rate, AGED_SHARE, seed, life, **{signal: age})
        for router, signal, all_ages in AGED
        for life, rate, age, seed in product(LIVES, (LIGHT, HEAVY), all_ages, SEEDS)
    ]
    return [*shares, *ages]


Results = Mapping[Point, Served]


def over(results: Results, what: str, **fixed: Any) -> list[float]:
    """A number of the runs that differ in nothing but their seeds."""
    return [
        getattr(numbers, what)
        for point, numbers in results.items()
        if all(getattr(point, name) == value for name, value in fixed.items())
    ]


def span(values: Sequence[float], digits: int, of: float = 1.0) -> str:
    """A mean, and least and most in brackets if they differ."""
    mean, low, high = (f"{of * value:.{digits}f}" for value in (fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def share_table(results: Results, rate: float) -> Table:
    """A row a router and share at one rate."""
    rows = []
    for router, share in product(ROUTERS, SHARES):
        of = {"router": router, "rate": rate, "share": share}
        hits, p50, p99, busy = (over(results, what, **of) for what in Served._fields)
        numbers = span(hits, 1, 100), span(p50, 3), span(p99, 3), span(busy, 2)
        rows.append((f"`{router}`", f"{100 * share:.0f} %", *numbers))
    header = ("router", "share of the prompt", "hits, % of prompts", "TTFT p50, s", "TTFT p99, s", "busiest over mean")
    return Table("", header, rows)


def age_table(results: Results) -> Table:
    rows = []
    for (router, signal, ages), life, rate in product(AGED, LIVES, (LIGHT, HEAVY)):
        for age in ages:
            of = {"router": router, "rate": rate, "share": AGED_SHARE, "life": life, signal: age}
            hits, p50, p99, busy = (over(results, what, **of) for what in Served._fields)
            news = f"{signal} {age:g}"
            rows.append((news, life, f"{rate:.0f}", span(hits, 1, 100), span(p50, 3), span(p99, 3), span(busy, 2)))
    header = ("age", "prefixes", "requests/s", "hits, % of prompts", "TTFT p50, s", "TTFT p99, s", "busiest over mean")
    return Table("", header, rows)


def share_chart(results: Results) -> Chart:
    """A row a router, a column a share: hits, which are much the same at both rates, and tails at both."""
    panels = []
    rows = [name.removesuffix("_prefixaware") for name in ROUTERS]
    for what, rate, title, of, ends in (
        ("hits", NEAR, "Prompt tokens found in caches, %", 100.0, (0.0, 95.0)),
        ("p99_s", BELOW, "TTFT p99, s, at 12/s: half load", 1.0, (0.06, 6.0)),
        ("p99_s", NEAR, "TTFT p99, s, at 22/s: full load", 1.0, (0.06, 6.0)),
    ):
        numbers = [
            [of * fmean(over(results, what, router=name, rate=rate, share=share)) for share in SHARES]
            for name in ROUTERS
        ]
        texts = [[f"{value:.0f}" if what == "hits" else f"{value:.2f}" for value in row] for row in numbers]
        looks: Any = {"labels": texts, "unit": "", "log": what == "p99_s"}
        cells = Cells(title, np.array(numbers), *ends, Style(BLACK), texts, **looks)
        shares = [f"{100 * share:.0f}" for share in SHARES]
        panels.append(Panel([cells], "prompt shared with others, %", "", title, rows=rows, categories=shares))
        rows = [""] * len(ROUTERS)  # named once
    return Chart("routers-by-share", TITLES[0], "", panels, columns=3)


def age_chart(results: Results) -> Chart:
    """Hits and tails over the age of KV events and of metrics."""
    panels = []
    for router, signal, ages in AGED:
        news = {"events_s": "age of KV events", "metrics_s": "interval of the metrics"}[signal]
        for what, y in (("hits", "prompt tokens found in caches, %"), ("p99_s", "TTFT p99, s")):
            marks: list[Mark] = []
            for life, rate in product(LIVES, (LIGHT, HEAVY)):
                of = {"router": router, "rate": rate, "share": AGED_SHARE, "life": life}
                spans = [over(results, what, **of, **{signal: age}) for age in ages]
                scale = 100.0 if what == "hits" else 1.0
                x, means = np.arange(float(len(ages))), scale * np.array([fmean(values) for values in spans])
                low, high = (scale * np.array([end(values) for values in spans]) for end in (min, max))
                look = Style(
                    {LIVES[0]: BLUE, LIVES[1]: RED}[life],
                    {LIGHT: "solid", HEAVY: "dashed"}[rate],
                    {LIVES[0]: "circle", LIVES[1]: "square"}[life],
                )
                name = f"{life}, {rate:.0f} requests/s"
                marks += [Line(name, x, means, look), Whiskers("", x, low, high, look), Points("", x, means, look)]
            shown: Any = {"y_log": True} if what == "p99_s" else {"y_range": (0.0, 100.0)}
            panels.append(Panel(marks, news, y, f"{router}: {y}", categories=[f"{age:g} s" for age in ages], **shown))
    return Chart("routers-by-age", TITLES[1], "", panels, columns=2)


TITLES = (
    "Eight servers: where 3/4 of a prompt is shared, any router that keeps prefixes will do; below, load has to count",
    "Eight servers: KV events that come in after a prefix's next use cost its hits, old metrics cost the tail",
)


def main() -> None:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = dict(zip(points(), pool.map(served, points()), strict=True))
    write(results)


def write(results: Results) -> None:
    tables = {"below": share_table(results, BELOW), "near": share_table(results, NEAR), "ages": age_table(results)}
    data = {"runs": [point._asdict() | numbers._asdict() for point, numbers in results.items()]}
    page.write(__file__, tables, [share_chart(results), age_chart(results)], data)


if __name__ == "__main__":
    main()
