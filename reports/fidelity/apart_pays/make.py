"""Prefill and decode apart against replicas with chunked prefill, on the same GPUs: the rate a GPU at which 90 % of the
requests meet an SLO.

An arm is a fleet: replicas with a budget of tokens a step (the chunk), or x servers that prefill and y that decode. Its
load climbs rung by rung until no seed meets the loosest SLO. The score of a request is the larger of TTFT and TPOT,
each over its bound, and a rung meets an SLO where the 90th percentile of the scores is at most 1. One run has the
scores of all bounds. The rate for a bound lies between the last rung that meets it and the next, where a line through
the logarithms of both percentiles is 0. Replicas count with the best of their chunks, servers apart with the best of
their splits, at each bound anew. Published comparisons are simulated with the splits, cards and lengths that they name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise, product
from math import exp, isnan, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.draw.chart import (
    GREEN,
    GREY,
    ORANGE,
    RED,
    Chart,
    Edge,
    Level,
    Line,
    Mark,
    Panel,
    Points,
    Style,
    Whiskers,
    series,
)
from cbsim.draw.report import Table
from reports import page
from reports.fidelity.replicas_or_tp.make import COUNTED, TABLES

GPUS = 4
CHUNKS = (128, 256, 512, 2048, 8192)
SPLITS = (1, 2, 3)  # servers that prefill
SEEDS = (0, 1)
SHARE, RUNG, MOST_RUNGS = 0.9, 1.4, 12
TTFT_S, TTFTS_S = 2.0, (1.0, 2.0, 4.0)
BOUNDS = tuple(float(bound) for bound in np.geomspace(0.012, 0.06, 29))  # on TPOT, seconds
SHOWN = (0.02, 0.03, 0.05)  # of them, in the table
SECONDS, LEAST = 25, 240  # length of a run, and its least requests
LINK = {"bandwidth_gb_s": 50, "latency_s": 0.0005, "descriptor_s": 1e-6}  # a NIC of 400 Gb/s a GPU
LINKS = (50.0, 5.0, 2.5, 1.25)  # GB/s
LINK_SPLIT = 2
LINKED = "4,096 / 256"  # the load of the links
LINK_TPOT_S = 0.03


class Load(NamedTuple):
    """Lengths, mean tokens (log-normal, sigma 0.4), and the rate of the first rung."""

    prompt: int
    output: int
    start: float


LOADS: Mapping[str, Load] = {
    "1,024 / 256": Load(1024, 256, 5.0),
    "4,096 / 256": Load(4096, 256, 1.5),
    "8,192 / 256": Load(8192, 256, 0.8),
}


class Arm(NamedTuple):
    """A fleet: replicas with a chunk, or servers apart, whose link has a bandwidth."""

    load: str
    chunk: int = 0
    prefills: int = 0
    gb_s: float = LINKS[0]

    @property
    def name(self) -> str:
        return f"{self.prefills}P{GPUS - self.prefills}D" if self.prefills else f"chunks of {self.chunk:,}"


class Rung(NamedTuple):
    """Runs at a rate: TTFT and TPOT of the requests that count, a pair of arrays a seed."""

    rate: float
    latencies: Sequence[tuple[Any, Any]]

    def score(self, ttft_s: float, tpot_s: float, seed: int | None = None, share: float = SHARE) -> float:
        """The percentile of the scores, of one seed or of all."""
        chosen = self.latencies if seed is None else self.latencies[seed : seed + 1]
        scores = np.concatenate([np.maximum(ttft / ttft_s, tpot / tpot_s) for ttft, tpot in chosen])
        return float(np.quantile(scores, share, method="inverted_cdf"))


def rate(rungs: Sequence[Rung], ttft_s: float, tpot_s: float, seed: int | None = None, share: float = SHARE) -> float:
    """The requests/s at which an SLO is just met, by one seed or by all; NaN if the first rung does not meet it."""
    scores = [log(rung.score(ttft_s, tpot_s, seed, share)) for rung in rungs]
    for (before, after), (low, high) in zip(pairwise(scores), pairwise(rungs), strict=True):
        if before <= 0 < after:
            return exp(log(low.rate) - before / (after - before) * log(high.rate / low.rate))
    return float("nan") if scores[0] > 0 else rungs[-1].rate


def climbed(fields: Any, start: float, ttft_s: float, tpot_s: float, share: float = SHARE) -> list[Rung]:
    """Rungs from `start` on, until no seed meets the SLO; `fields` are those of a scenario by rate."""
    rungs: list[Rung] = []
    while len(rungs) < MOST_RUNGS:
        at = start * RUNG ** len(rungs)
        rungs.append(Rung(at, [latencies(ran(fields(at), seed).requests) for seed in SEEDS]))
        if min(rungs[-1].score(ttft_s, tpot_s, seed, share) for seed in range(len(SEEDS))) > 1:
            break
    return rungs


def latencies(requests: Any) -> tuple[Any, Any]:
    """TTFT and TPOT of the requests that count; prefills whose KV was handed over are no requests."""
    names = ("arrival_ns", "ttft_s", "tpot_s")
    ends = requests.filter([each is not None for each in requests["ttft_s"].to_pylist()])
    arrival, ttft, tpot = (np.array(ends[name].to_pylist(), dtype=float) for name in names)
    low, high = (int(share * len(arrival)) for share in COUNTED)
    counted = np.argsort(arrival, kind="stable")[low:high]
    return ttft[counted], np.nan_to_num(tpot[counted])


def ran(fields: Mapping[str, Any], seed: int) -> Any:
    changes = {"model.weights_dtype": fields["weights"]} if fields.get("weights") else {}
    named = {name: value for name, value in fields.items() if name != "weights"}
    return cbsim.run(cbsim.load({**named, "seed": seed}, changes))


def workload(prompt: Any, output: Any, rate_s: float, requests: int | None = None) -> dict[str, Any]:
    count = requests or int(max(LEAST, rate_s * SECONDS))
    lengths = {"prompt_tokens": prompt, "output_tokens": output}
    return {"kind": "synthetic", "requests": count, **lengths, "arrivals": {"kind": "poisson", "rate_per_s": rate_s}}


def spread(mean: int, high: int | None = None) -> dict[str, Any]:
    return {"lognormal": {"mean": mean, "sigma": 0.4, "low": 2, "high": high}}


def apart(prefills: int, decodes: int, gb_s: float = LINKS[0], **of: Any) -> dict[str, Any]:
    """Servers that prefill and servers that decode; `of`: fields of each."""
    pools = [
        {"role": "prefill", "name": "prefill", "count": prefills, "server": of.get("prefill", {})},
        {"role": "decode", "name": "decode", "count": decodes, "server": of.get("decode", {})},
    ]
    link = LINK | {"bandwidth_gb_s": gb_s}
    return {"pools": pools, "router": {"name": "least_in_flight"}, "hand_off": {"link": link, "lease_s": None}}


def replicas(count: int) -> dict[str, Any]:
    return {"pools": [{"count": count}], "router": {"name": "least_in_flight"}}


def fields(arm: Arm, rate_s: float) -> dict[str, Any]:
    load = LOADS[arm.load]
    chunk = arm.chunk or CHUNKS[-1]
    return {
        "question": "When do prefill and decode apart pay?",
        "model": "qwen3-32b",
        "weights": "fp8",
        "hardware": "h100-sxm",
        "workload": workload(spread(load.prompt, 30_000), spread(load.output), rate_s),
        "scheduler": {"name": "vllm", "max_num_batched_tokens": chunk},
        "loop": {"mode": "async"},
        "cost": dict(TABLES),
        "fleet": apart(arm.prefills, GPUS - arm.prefills, arm.gb_s) if arm.prefills else replicas(GPUS),
    }


def arms() -> list[Arm]:
    made = [Arm(name, chunk=chunk) for name in LOADS for chunk in CHUNKS]
    made += [Arm(name, prefills=number) for name in LOADS for number in SPLITS]
    return made + [Arm(LINKED, prefills=LINK_SPLIT, gb_s=gb_s) for gb_s in LINKS[1:]]


def climb(arm: Arm) -> list[Rung]:
    return climbed(partial(fields, arm), LOADS[arm.load].start, TTFTS_S[-1], BOUNDS[-1])


Climbs = Mapping[Arm, Sequence[Rung]]


def best(climbs: Climbs, of: Sequence[Arm], ttft_s: float, tpot_s: float, seed: int | None = None) -> tuple[float, str]:
    """The largest rate of these arms, and its arm's name; 0 where none meets the SLO."""
    rates = [(rate(climbs[arm], ttft_s, tpot_s, seed), arm.name) for arm in of]
    return max(((value, name) for value, name in rates if not isnan(value)), default=(0.0, "none"))


def both(load: str) -> tuple[list[Arm], list[Arm]]:
    """The replicas and the servers apart of a load."""
    return [Arm(load, chunk=each) for each in CHUNKS], [Arm(load, prefills=each) for each in SPLITS]


def gain(climbs: Climbs, load: str, ttft_s: float, tpot_s: float, seed: int | None = None) -> float:
    """The rate of the best split over that of the best chunk; NaN where neither, infinite where only one is met."""
    whole, split = (best(climbs, of, ttft_s, tpot_s, seed)[0] for of in both(load))
    return split / whole if whole else float("inf") if split else float("nan")


# -- published comparisons --------------------------------------------------------------------------------------------


class Published(NamedTuple):
    """A published ratio of rates within an SLO, its least and most, and replicas and servers apart as fields by rate.
    Above 1 servers apart are better. `tuned` are replicas with chunked prefill, where the published ones had none.
    """

    name: str
    short: str
    low: float
    high: float
    whole: Any
    split: Any
    tuned: Any
    start: float
    ttft_s: float
    tpot_s: float
    share: float


def _a100(
    model: Any, fleet: Mapping[str, Any], scheduler: Mapping[str, Any], load: Mapping[str, Any], **of: Any
) -> Any:
    return {
        "question": "A published comparison",
        "model": model,
        "hardware": "a100-80gb",
        "workload": load,
        "scheduler": scheduler,
        "loop": {"mode": "async"},
        "fleet": fleet,
        **of,
    }


VLLM = {"name": "vllm"}


OPT_13B = {
    "name": "OPT-13B",
    "layers": 40,
    "hidden": 5120,
    "heads": 40,
    "kv_heads": 40,
    "head_dim": 128,
    "intermediate": 20480,
    "gated": False,
    "vocab": 50272,
    "tied_embeddings": True,
    "dtype": "float16",
    "max_position": 2048,
}


def distserve(kind: str, rate_s: float) -> Any:
    """OPT-13B, prompts and outputs of ShareGPT, means of 755 and 200 tokens; three GPUs: a prefill server of two and a
    decode server of one, or three replicas.
    """
    load = workload(spread(755, 1500), spread(200, 500), rate_s)
    if kind == "split":
        two = {"cost": {"tensor_parallel": 2}}
        return _a100(OPT_13B, apart(1, 1, 300.0, prefill=two), VLLM | {"max_num_batched_tokens": 2048}, load)
    old = {"name": "vllm_v0"} if kind == "whole" else VLLM | {"max_num_batched_tokens": 512}
    return _a100(OPT_13B, replicas(3), old, load)


def mooncake(kind: str, rate_s: float) -> Any:
    """The shape of LLaMA2-70B, a node of eight A800 a server, prompts of ArXiv Summarization: 8,088 and 229 tokens."""
    load = workload(spread(8088, 16_000), spread(229), rate_s)
    eight = {"cost": {"kind": "roofline", "tensor_parallel": 8}}
    if kind in ("3P1D", "2P2D"):
        return _a100("llama-3.1-70b", apart(int(kind[0]), int(kind[2]), 100.0), VLLM, load, **eight)
    old = {"name": "vllm_v0"} if kind == "whole" else VLLM | {"max_num_batched_tokens": 512}
    return _a100("llama-3.1-70b", replicas(4), old, load, **eight)


def dynamo(kind: str, rate_s: float) -> dict[str, Any]:
    """Llama-70B in FP8 on eight H100: four prefill servers of one GPU and a decode server of four, or two of four."""
    four, one = ({**TABLES, "tensor_parallel": gpus} for gpus in (4, 1))
    made = {
        "question": "A published comparison",
        "model": "llama-3.1-70b",
        "weights": "fp8",
        "hardware": "h100-sxm",
        "workload": workload(3000, 150, rate_s),
        "scheduler": VLLM | {"max_num_batched_tokens": 3584 if kind == "split" else 512 if kind == "tuned" else 8192},
        "loop": {"mode": "async"},
        "cost": four,
    }
    small = {"cost": one, "kv_cache": {"num_blocks": 1000}}
    return made | {"fleet": apart(4, 1, prefill=small) if kind == "split" else replicas(2)}


def _arms(of: Any, apart: str = "split") -> tuple[Any, Any, Any]:
    """Replicas as published, servers apart, and replicas with chunks of 512 tokens."""
    return partial(of, "whole"), partial(of, apart), partial(of, "tuned")


PUBLISHED = (  # Mooncake's bounds are multiples of what a lightly loaded server takes
    Published(
        "DistServe: OPT-13B, A100, ShareGPT; TTFT 0.25 s, TPOT 0.1 s, 90 %",
        "DistServe",
        *(2.0, 4.6),
        *_arms(distserve),
        *(3.0, 0.25, 0.1, 0.9),
    ),
    Published(
        "Mooncake: LLaMA2-70B, 4 x 8 A800, 8,088 / 229, 3P1D; TTFT 10 times, TPOT 5 times an idle one's, 90 %",
        "Mooncake",
        *(1.2, 1.2),
        *_arms(mooncake, "3P1D"),
        *(1.0, 10.0, 5.0, 0.9),
    ),
    Published(
        "Dynamo: Llama-70B in FP8, 8 H100, 3,000 / 150, 4P (TP1) 1D (TP4); 38 tokens/s a user",
        "Dynamo 70B",
        *(1.6, 1.6),
        *_arms(dynamo),
        *(3.0, 2.0, 1 / 38, 0.5),
    ),
)


class Ratio(NamedTuple):
    """A published and a simulated ratio, each with its least and most; `tuned`: against chunks of 512 tokens."""

    name: str
    short: str
    of: str
    published: tuple[float, float]
    ratio: float
    ends: tuple[float, float]
    tuned: float | None

    @property
    def right(self) -> bool:
        """Whether the winner is as published."""
        return (self.ratio > 1) == (self.published[0] > 1)


def reported() -> list[Ratio]:
    """Comparisons at a given rate that the report `apart` simulates: mean times of a request."""
    tables = json.loads((Path(__file__).parents[1] / "apart" / "report.json").read_text(encoding="utf-8"))["data"]

    def cells(table: str) -> dict[str, list[float]]:
        rows = {row[0]: [re.match(r"[\d,.]+", cell) for cell in row[1:]] for row in tables[table][1:]}
        return {name: [float(at[0].replace(",", "")) if at else 0.0 for at in row] for name, row in rows.items()}

    means, guide = cells("means"), cells("gpt-oss")
    times = {name: [row[at] + 199 * row[at + 4] for at in (0, 1)] for name, row in means.items()}  # of 200 tokens
    both = [times["2 replicas"][0] / times[f"1P1D, run {run}"][0] for run in (1, 2)]
    made = times["2 replicas"][1] / times["1P1D, run 1"][1]
    whole, split = guide["d5 aggregated"], guide["d5"]
    told, made_too = (whole[at] / split[at] for at in (-3, -2))
    return [
        Ratio(
            "llm-d exp-7: Llama-3.1-8B, A100, 8,000 / 200 at 1.8/s, 1P1D against 2",
            "llm-d 1P1D",
            "time of a request",
            (min(both), max(both)),
            made,
            (made, made),
            None,
        ),
        Ratio(
            "llm-d guide: gpt-oss-120b, 16 H200, 5,000 / 250 at 45/s, 8P (TP1) 2D (TP4) against 16 (d5)",
            "llm-d gpt-oss",
            "time of a request",
            (told, told),
            made_too,
            (made_too, made_too),
            None,
        ),
    ]


def compared(one: Published) -> Ratio:
    """The ratio of a published comparison by seed and of all, and that against tuned replicas."""
    ttft_s, tpot_s = one.ttft_s, one.tpot_s
    if one.short == "Mooncake":
        light = [latencies(ran(one.whole(one.start / 6), seed).requests) for seed in SEEDS]
        ttft_s *= float(np.quantile(np.concatenate([each for each, _ in light]), one.share))
        tpot_s *= float(np.quantile(np.concatenate([each for _, each in light]), one.share))
    runs = [climbed(of, one.start, ttft_s, tpot_s, one.share) for of in (one.whole, one.split, one.tuned)]
    rates = [[rate(each, ttft_s, tpot_s, seed, one.share) for seed in (None, *range(len(SEEDS)))] for each in runs]
    whole, split, tuned = (np.array(each) for each in rates)
    ends = split[1:] / whole[1:]
    of = "rate within the SLO" if one.share > 0.5 else "rate at that TPOT"
    ratio, bounds = float(split[0] / whole[0]), (float(ends.min()), float(ends.max()))
    return Ratio(one.name, one.short, of, (one.low, one.high), ratio, bounds, float(split[0] / tuned[0]))


# -- tables and the figure --------------------------------------------------------------------------------------------


def gains(climbs: Climbs) -> Table:
    """A row a load and pair of bounds: the best chunk, the best split, and their ratio with those of the seeds."""
    rows = []
    for load in LOADS:
        for ttft_s in TTFTS_S:
            for tpot_s in SHOWN:
                whole, split = (best(climbs, of, ttft_s, tpot_s) for of in both(load))
                ends = [gain(climbs, load, ttft_s, tpot_s, seed) for seed in range(len(SEEDS))]
                shown = [f"{value / GPUS:.2f} ({name})" if value else "not met" for value, name in (whole, split)]
                ratio = f"{split[0] / whole[0]:.2f}" if whole[0] and split[0] else ""
                span = f" ({min(ends):.2f} to {max(ends):.2f})" if ratio and np.isfinite(ends).all() else ""
                rows.append((load, f"{ttft_s:g} s", f"{1e3 * tpot_s:.0f} ms", *shown, ratio + span))
    header = ("prompt / output", "TTFT", "TPOT", "replicas: requests/s a GPU", "apart: requests/s a GPU", "ratio")
    return Table("", header, rows)


def linked(climbs: Climbs, gb_s: float, tpot_s: float = LINK_TPOT_S) -> tuple[float, str]:
    """The rate of a split with a link."""
    return best(climbs, [Arm(LINKED, prefills=LINK_SPLIT, gb_s=gb_s)], TTFT_S, tpot_s)


def links(climbs: Climbs) -> Table:
    whole = best(climbs, both(LINKED)[0], TTFT_S, LINK_TPOT_S)
    rows = []
    for gb_s in LINKS:
        value, name = linked(climbs, gb_s)
        shown = f"{value / GPUS:.2f} ({name})" if value else "not met"
        rows.append((f"{gb_s:g}", shown, f"{value / whole[0]:.2f}"))
    return Table("", ("GB/s a GPU", "apart: requests/s a GPU", "over replicas"), rows)


def shown(ends: tuple[float, float]) -> str:
    low, high = (f"{end:.2f}" for end in ends)
    return low if low == high else f"{low} to {high}"


def verdicts(made: Sequence[Ratio]) -> Table:
    rows = []
    for one in made:
        ratio = f"{one.ratio:.2f}" + (f" ({shown(one.ends)})" if one.ends[0] < one.ends[1] else "")
        tuned = "" if one.tuned is None else f"{one.tuned:.2f}"
        rows.append((one.name, one.of, shown(one.published), ratio, "right" if one.right else "**wrong**", tuned))
    return Table("", ("published", "ratio of", "published", "simulated", "who wins", "against chunks of 512"), rows)


def chart(climbs: Climbs, made: Sequence[Ratio]) -> Chart:
    """The gain over the bound on TPOT by lengths and by the bound on TTFT, over the link, and the published ratios."""
    lengths = [(load, load, TTFT_S) for load in LOADS]
    waits = [(f"TTFT {ttft_s:g} s", LINKED, ttft_s) for ttft_s in TTFTS_S]
    panels = [
        _gains(climbs, lengths, f"By lengths (prompt / output), TTFT {TTFT_S:g} s", 0),
        _gains(climbs, waits, f"By the bound on TTFT, {LINKED}", len(LOADS)),
        _link(climbs),
        _told(made),
    ]
    return Chart("apart-pays", TITLE, "", panels, columns=2)


EVEN = Level("", 1.0, Style(GREY, "dotted"))


def _gains(climbs: Climbs, lines: Sequence[tuple[str, str, float]], title: str, first: int) -> Panel:
    """Lines of a load and a bound on TTFT each."""
    marks: list[Mark] = [EVEN]
    for at, (name, load, ttft_s) in enumerate(lines, start=first):
        y = np.array([gain(climbs, load, ttft_s, bound) for bound in BOUNDS])
        marks.append(Line(name, 1e3 * np.array(BOUNDS), np.where(np.isfinite(y) & (y > 0), y, np.nan), series(at)))
    shown: Any = {"x_log": True, "x_ticks": [15, 20, 30, 40, 60], "y_range": (0.0, 2.1), "tall": True}
    return Panel(marks, "bound on TPOT, ms", "apart over replicas", title, **shown)


def _link(climbs: Climbs) -> Panel:
    whole = best(climbs, both(LINKED)[0], TTFT_S, LINK_TPOT_S)[0]
    x, y, look = np.array(LINKS), np.array([linked(climbs, gb_s)[0] for gb_s in LINKS]) / whole, series(1)
    title = f"By link, {LINKED}, TTFT {TTFT_S:g} s, TPOT {1e3 * LINK_TPOT_S:.0f} ms"
    shown: Any = {"x_log": True, "x_ticks": LINKS, "tall": True}
    return Panel(
        [EVEN, Line("", x, y, look), Points("", x, y, look)], "GB/s a GPU", "apart over replicas", title, **shown
    )


def _told(made: Sequence[Ratio]) -> Panel:
    marks: list[Mark] = [EVEN, Edge("", 1.0, Style(GREY, "dotted"))]
    marks.append(Line("as published", np.array([0.5, 2.6]), np.array([0.5, 2.6]), Style(GREY)))
    for verdict, colour, marker in ((True, GREEN, "circle"), (False, RED, "cross")):
        of = [one for one in made if one.right is verdict]
        low, high = (np.array([one.published[end] for one in of]) for end in (0, 1))
        y, look = np.array([one.ratio for one in of]), Style(colour, "solid", marker)
        labels = ["" if one.short in BELOW else one.short for one in of]
        marks += [Whiskers("", y, low, high, look, level=True)]
        marks += [Points(f"who wins: {'right' if verdict else 'wrong'}", (low * high) ** 0.5, y, look, labels=labels)]
    of = [one for one in made if one.tuned is not None]
    x = np.array([(one.published[0] * one.published[1]) ** 0.5 for one in of])
    y = np.array([one.tuned or 0.0 for one in of])
    labels = [one.short if one.short in BELOW else "" for one in of]
    marks.append(Points("against chunks of 512", x, y, Style(ORANGE, "solid", "diamond"), labels=labels))
    return Panel(marks, "published: apart over replicas", "simulated", "Published wins and losses", tall=True)


BELOW = ("Mooncake",)  # named at its lower mark, where there is room
TITLE = "Four H100, Qwen3-32B: prefill and decode apart against chunked prefill, its chunk tuned"


def main() -> None:
    wanted = arms()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        published = pool.map(compared, PUBLISHED)
        climbs = dict(zip(wanted, pool.map(climb, wanted), strict=True))
        write(climbs, [*reported(), *published])


def write(climbs: Climbs, made: Sequence[Ratio]) -> None:
    tables = {"gains": gains(climbs), "links": links(climbs), "published": verdicts(made)}
    cells = {name: {"header": table.header, "rows": table.rows} for name, table in tables.items()}
    curves = []
    for load, ttft_s in product(LOADS, TTFTS_S):
        ratios = {f"{1e3 * at:.3g}": gain(climbs, load, ttft_s, at) for at in BOUNDS}
        known = {bound_ms: round(ratio, 4) for bound_ms, ratio in ratios.items() if np.isfinite(ratio)}
        curves.append({"load": load, "ttft_s": ttft_s, "gain_by_tpot_ms": known})
    told = [one._asdict() | {"right": one.right} for one in made]
    rungs = [arm._asdict() | {"rungs": [[rung.rate, *_scores(rung)] for rung in of]} for arm, of in climbs.items()]
    facts = {"tables": cells, "curves": curves, "published": told, "arms": rungs}
    page.write(__file__, tables, [chart(climbs, made)], facts)


def _scores(rung: Rung) -> list[float]:
    """The scores of a rung by seed, with the link's bounds."""
    return [rung.score(TTFT_S, LINK_TPOT_S, seed) for seed in range(len(SEEDS))]


if __name__ == "__main__":
    main()
