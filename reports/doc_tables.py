"""The generated tables of the documentation, from the report.json of each report. `python -m reports.doc_tables` writes
them below their marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean, median
from typing import Any

from cbsim.draw.report import Table
from cbsim.scenario import catalog, shapes, terms
from cbsim.scenario.fields import bare
from reports import page
from reports.fidelity.curves.make import TENSOR, WEIGHTS_SHARE

REPORTS = catalog.ROOT / "reports" / "fidelity"
MEASURED = catalog.ROOT / "reports" / "hardware" / "h200" / "report" / "report.md"
POINTS, LOGS = "points", "request_logs"
CARDS = {"RTX4090": "RTX 4090", "RTXPRO6000": "RTX PRO 6000"}
FIRST = "Llama-3.1-8B"  # of recorded runs
STATISTICS = ("mean", "median", "p90", "p95", "p99")
MEANS = (("ttft", "mean"), ("tpot", "mean"), ("e2e", "mean"))
SHOWN_REASONS = 10


@cache
def report(name: str) -> dict[str, Any]:
    """What report.json of a report holds."""
    content: dict[str, Any] = json.loads((REPORTS / name / "report.json").read_text(encoding="utf-8"))
    return content


def facts(name: str) -> dict[str, Any]:
    data: dict[str, Any] = report(name)["data"]
    return data


def errors(entries: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    return {(each["metric"], each["statistic"]): each["error"] for each in entries}


def percent(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-0.00", "+0.00") + " %"


def size(value: float) -> str:
    """Of an error, without its sign."""
    return f"{100 * value:.1f} %"


# -- recorded runs ----------------------------------------------------------------------------------------------------


def cases() -> list[str]:
    """Recorded runs that have a report: their folders are called CARD__MODEL."""
    names = sorted(each.parent.name for each in REPORTS.glob("*__*/report.json"))
    return sorted(names, key=lambda name: FIRST not in name)


def title(name: str) -> str:
    """As a row calls it, such as Llama-3.1-8B on an RTX 4090."""
    card, _, model = name.partition("__")
    gpus = re.findall(r" on (\d+) x ", report(name)["question"])
    how_many = {"1": "an", "2": "two"}[gpus[0]]
    return f"{model.partition('-Instruct')[0]} on {how_many} {CARDS[card]}"


def largest(numbers: dict[tuple[str, str], float], metric: str = "") -> float:
    """Of the means and percentiles, of one metric if it is named."""
    return max(abs(error) for (of, statistic), error in numbers.items() if statistic and metric in ("", of))


def score_table() -> Table:
    rows = []
    for name in cases():
        results = errors(facts(name)["errors"])
        rows += [
            (f"{title(name)}: {metric.upper()}", *(percent(results[metric, s]) for s in STATISTICS))
            for metric in ("ttft", "tpot", "e2e")
        ]
        rows.append((f"{title(name)}: makespan", percent(results["makespan", ""]), *[""] * 4))
    return Table("", ("simulated against recorded", *STATISTICS), rows)


# -- published servers ------------------------------------------------------------------------------------------------


def point_table() -> Table:
    """A class of servers a row: all its points, and both tools on those that the other one predicts."""
    data = facts(POINTS)
    both: dict[str | None, list[dict[str, Any]]] = {}
    for each in data["predicted"]:
        if each["peer_errors"]:
            both.setdefault(each["class"], []).append(each)
    rows = []
    for name, of in data["classes"].items():
        beside = both.get(name, [])
        cells = [f"{size(of[metric]['mape'])} ({size(of[metric]['p90'])})" for metric in ("ttft", "tpot", "throughput")]
        rows.append((name, str(of["points"]), *cells, _beyond(of["missed"]), str(len(beside) or ""), *_pairs(beside)))
    header = ("mean error (90th percentile)", "points", "TTFT", "TPOT", "tokens/s", "strata beyond the bar")
    return Table("", (*header, "in both", "TTFT, ours and theirs", "TPOT, ours and theirs"), rows)


def _beyond(missed: list[str] | None) -> str:
    """The number of strata beyond the bound; nothing if there is none."""
    return "" if missed is None else str(len(missed))


def _pairs(beside: Sequence[dict[str, Any]]) -> Iterator[str]:
    for metric in ("ttft", "tpot"):
        means = (fmean(abs(each[of][metric]) for each in beside) for of in ("errors", "peer_errors") if beside)
        yield ", ".join(size(mean) for mean in means)


def coverage_table() -> Table:
    """Terms a row: how many left-out points lie in their intervals, and how wide these are."""
    data = facts(POINTS)
    rows = []
    for name, held in data["coverage"].items():
        of = [each for each in data["predicted"] if each["terms"]["file"] == name]
        left_out = sum(each["terms"]["curve"] is not None for each in of)
        outside = sum(bool(each["outside_calibration"]) for each in of)
        ttft, tpot = ((f"{held[m][0]} of {held[m][1]}", _span(of, m)) for m in ("ttft", "tpot"))
        rows.append((f"`{name}`", *ttft, *tpot, str(left_out), str(outside)))
    header = ("terms", "TTFT: held", "typical interval", "TPOT: held", "typical interval")
    return Table("", (*header, "points predicted without their curve", "outside what was calibrated"), rows)


def _span(of: Sequence[dict[str, Any]], metric: str) -> str:
    known = [each["interval_80"][metric] for each in of if each["interval_80"][metric]]
    if not known:
        return ""
    return " to ".join(f"{100 * (median(each[end] for each in known) - 1):+.0f} %" for end in ("low", "high"))


def built_table() -> Table:
    """Reasons a row, the most frequent first; a point counts with each of its reasons."""
    data = facts(POINTS)
    refused = data["not_built"]
    alone = {of["reasons"][0]: of["points"] for of in refused["by_set"] if len(of["reasons"]) == 1}
    reasons = sorted(refused["by_reason"].items(), key=lambda item: (-item[1], item[0]))
    rows = [
        ("predicted", f"{len(data['predicted']):,}", ""),
        *((reason, f"{count:,}", f"{alone.get(reason, 0):,}") for reason, count in reasons[:SHOWN_REASONS]),
    ]
    if others := [reason for reason, _ in reasons[SHOWN_REASONS:]]:
        rows.append((f"{len(others)} other reasons", *_others(refused, set(others))))
    return Table("", (f"of {data['points']:,} points", "points", "for no other reason"), rows)


def _others(refused: dict[str, Any], reasons: set[str]) -> tuple[str, str]:
    """Points that have any of these reasons, and those that have no others."""
    counts = [(set(of["reasons"]), of["points"]) for of in refused["by_set"]]
    some = sum(count for known, count in counts if known & reasons)
    return f"{some:,}", f"{sum(count for known, count in counts if known <= reasons):,}"


# -- request logs -----------------------------------------------------------------------------------------------------


def unseen() -> list[dict[str, Any]]:
    """Runs by which nothing was chosen."""
    return [run for run in facts(LOGS)["runs"] if not run["chosen_by_it"]]


def log_table() -> Table:
    """A kind of run a row, over its rates."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in unseen():
        groups.setdefault((run["run"], run["scenario"]), []).append(run)
    shown = (("ttft", "mean"), ("ttft", "p95"), ("tpot", "mean"), ("tpot", "p95"), ("e2e", "mean"))
    rows = []
    for (name, scenario), runs in groups.items():
        results = [errors(run["errors"]) for run in runs]
        cells = [size(fmean(abs(each[what]) for each in results)) for what in shown]
        worst = size(max(abs(each["ttft", "mean"]) for each in results))
        of = (f"{sum(run['requests'] for run in runs):,}", str(max(run["servers"] for run in runs)))
        label = "/".join(part for part in name.split("/") if part != "openshift")
        rows.append((f"{label}, {scenario}", str(len(runs)), *of, *cells, worst, _drawn(runs)))
    header = ("run, prompts", "rates", "requests", "servers", *(f"{metric.upper()} {s}" for metric, s in shown))
    return Table("", (*header, "worst TTFT mean", "means within the draws"), rows)


def _drawn(runs: Sequence[dict[str, Any]]) -> str:
    """How many recorded means lie within the draws, where there are several."""
    numbers = [each for run in runs for each in run["errors"] if (each["metric"], each["statistic"]) in MEANS]
    drawn = [each for each in numbers if "low_s" in each]
    inside = sum(each["low_s"] <= each["measured_s"] <= each["high_s"] for each in drawn)
    return f"{inside} of {len(drawn)}" if drawn else ""


# -- your case --------------------------------------------------------------------------------------------------------


def case_table() -> Table:
    """A situation a row."""
    header = ("your case", "cost model", "error of TTFT", "of TPOT", "rests on", "not covered")
    rows = [_default(), _calibrated(), *_published(), _logged(), _profiled(), _data_sheet(), _fitted(), _decisions()]
    return Table("", header, rows)


def _default() -> tuple[str, ...]:
    """The row of a scenario that names no cost model."""
    made = facts("default")
    results = (size(made["servers"][metric]) for metric in ("ttft", "tpot"))
    worst = max(abs(error) for run in made["recorded"].values() for name, error in run.items() if name.endswith("mean"))
    rests = f"mean of {made['servers']['points']} points by InferenceX, Llama-3.1-70B on H100, H200, B200; means of "
    rests += f"{len(made['recorded'])} recorded runs of an RTX 4090 and an RTX PRO 6000: up to {size(worst)}"
    left = "servers other than these; steps against kernel tables: [curves](../reports/fidelity/curves/report.md)"
    return "no cost model named: the default", "`roofline`", *results, rests, left


def _calibrated() -> tuple[str, ...]:
    rests = "largest of 6 workloads, both loops, Llama-3.1-8B on an H200; TTFT of one below saturation"
    left = "other engines; steps beyond the probed ones, which is said"
    results = (f"up to {_measured(metric)}" for metric in ("TTFT", "TPOT"))
    return "your GPU, our engine, after `cbengine calibrate`", "`fitted`", *results, rests, left


SERVERS = (  # situation, class, terms, whose points, what they do not hold
    (
        "a dense model, vLLM, H100 or H200",
        "dense, vLLM, H100 and H200",
        "vllm-dense",
        "Llama-3.1-70B in FP8, vLLM 0.11",
        "other models",
    ),
    (
        "a dense model, TensorRT-LLM, H200",
        "dense, TensorRT-LLM, H200",
        "trtllm-dense",
        "Llama-3.1-70B in FP8",
        "other models; H100",
    ),
    (
        "a mixture of experts, H100 or H200",
        "experts, H100 and H200",
        "vllm-experts",
        "terms by MiniMax-M2.5 in FP8, vLLM 0.16 and 0.18",
        "data-parallel attention",
    ),
    (
        "linear attention with experts, SGLang on Blackwell or H200",
        "linear attention",
        "sglang-linear",
        "Qwen3.5-397B-A17B, SGLang 0.5.9 and 0.5.10",
        "other models",
    ),
    (
        "data-parallel attention with experts, vLLM on B200 or B300",
        "data-parallel attention",
        "vllm-ranks",
        "terms by MiniMax-M2.5 in NVFP4, vLLM 0.19; TensorRT-LLM's by its own",
        "TP within a rank",
    ),
)


def _published() -> Iterator[tuple[str, ...]]:
    classes = facts(POINTS)["classes"]
    for situation, kind, name, servers, left in SERVERS:
        engine = name.partition("-")[0]
        path = f"public_measured/aiconfigurator/{terms.load(name).systems[-1]}"
        shared = "data_parallel" if name.endswith("ranks") else "tensor_parallel"
        model_s = f"`{{kind: table, path: {path}, engine: {engine}, {shared}: 2, terms: {name}}}`"
        of = classes[kind]
        results = (size(of[metric]["mape"]) for metric in ("ttft", "tpot"))
        rests = f"mean of {of['points']} points by InferenceX: {servers}"
        yield situation, model_s, *results, rests, f"{left}; prefix hits; arrivals that are no closed loop"


def _logged() -> tuple[str, ...]:
    logs = [errors(run["errors"]) for run in unseen()]
    requests = sum(run["requests"] for run in unseen())
    results = (size(fmean(abs(each[metric, "mean"]) for each in logs)) for metric in ("ttft", "tpot"))
    rests = f"mean of {len(logs)} runs with {requests:,} requests, by llm-d"
    left = "LMCache, routers; TTFT where the queue begins"
    situation = "vLLM 0.8.5 with prefix cache, Llama-3.1-70B on pairs of A100 or H100"
    return situation, "`{kind: table, engine: vllm}`, terms of some runs", *results, rests, left


def _profiled() -> tuple[str, ...]:
    recorded = [errors(facts(name)["errors"]) for name in cases()]
    results = (f"up to {size(max(largest(each, metric) for each in recorded))}" for metric in ("ttft", "tpot"))
    rests = f"largest mean or percentile of {len(recorded)} runs of vLLM 0.19, by LLMServingSim's authors"
    left = "other models than the profile's; its readings and 3 us a request were chosen with the runs in sight"
    return "a card and model with layer profiles of LLMServingSim", "`{kind: table, path: ...}`", *results, rests, left


def _data_sheet() -> tuple[str, ...]:
    answers = facts("schedulers")["answers"]
    exact = [each for each in answers if each["cost"] == "roofline" and each["policy"].startswith("exact")]
    results = [{(score[0], score[1]): score[-1] for score in each["scores"]} for each in exact]
    rests = f"means of {len(results)} of these runs"
    left = "launches from Python (decode steps 56 to 79 % too fast), small chunks: [studies](studies.md#chunk-size)"
    return (
        "a card by its data sheet and constant shares",
        "`{kind: roofline, compute_efficiency: {}}`",
        *(_range(results, metric) for metric in ("ttft", "tpot")),
        rests,
        left,
    )


def _fitted() -> tuple[str, ...]:
    runs = [each["errors"] for each in facts("own-first-minute")["runs"].values()]
    results = (f"up to {size(max(each[metric] for each in runs))}" for metric in ("ttft", "tpot"))
    rests = f"largest mean of {len(runs)} predictions: 3 recorded runs of vLLM 0.19, terms by their first minute"
    left = "loads beyond the measured ones, which is said; prefix hits"
    situation = "your own server, after `cbsim measure` and `cbsim fit`"
    return situation, "`{kind: ..., terms: mine.yaml}`", *results, rests, left


def _decisions() -> tuple[str, ...]:
    rests = "787 traces of real schedulers: [policies](policies.md)"
    left = "options that are not modelled, which are refused by name"
    return "decisions only: rows, blocks, queues", "any", "none", "none", rests, left


def _measured(metric: str) -> str:
    """The largest error of a metric, over its percentiles."""
    results = re.findall(rf"^\| {metric} p\d+ \| within .*? \| [+-]([\d.]+)% \|", MEASURED.read_text(), re.MULTILINE)
    return f"{max(map(float, results)):.1f} %"


def _range(results: Sequence[dict[tuple[str, str], float]], metric: str) -> str:
    values = [100 * each[metric, "mean"] for each in results]
    return f"{min(values):+.1f} to {max(values):+.1f} %"


# -- models and cards --------------------------------------------------------------------------------------------------

PROFILED = "rtx-4090"  # a card with curves and without tables of engines


def model_table() -> Table:
    """A model a row and a card a column; all cards of which there is a data sheet alone share one."""
    made = facts("curves")
    others = [name for name in catalog.names("hardware") if name not in (*made, PROFILED, "laptop-cpu")]
    models = [name for name in catalog.names("models") if name != "tiny"]
    rows = [("all, no cost model named", *(_by_curves(name) for name in made), "`curves`", _by_sheet())]
    rows += [(f"`{name}`", *(_cell(name, card) for card in made), "`curves`", "data sheet only") for name in models]
    cards = (f"`{name}`" for name in (*made, PROFILED))
    return Table("", ("model", *cards, ", ".join(f"`{name}`" for name in others)), rows)


def _by_curves(card: str) -> str:
    """How far off the default cost model is on a card: its steps, and servers if any were predicted."""
    bounds = [bound for of in facts("curves")[card]["own"].values() for bound in of.values()]
    cell = f"`curves`: 90 % of steps within {100 * min(bounds):.0f} to {100 * max(bounds):.0f} %"
    servers = [of for system, of in facts("default")["cards"].items() if _named(system, card)]
    return cell + "".join(f"; {_errors(of['tpot'], of['ttft'])}" for of in servers)


def _by_sheet() -> str:
    cards = facts("default")["sheets"]["alone"].values()
    spans = ([100 * of[metric] for of in cards] for metric in ("tpot", "ttft"))
    tpot, ttft = (f"{min(span):.0f} to {max(span):.0f} %" for span in spans)
    return f"data sheet only: TPOT {tpot}, TTFT {ttft} on cards that were measured"


def _cell(name: str, card: str) -> str:
    """What simulates a model on a card best, on how many GPUs at least, and how far off it is."""
    gpu, model = shapes.hardware(card), shapes.model(name)
    fewest = facts("curves")[card]["tables"].get(name)
    if fewest is None:
        fits = (gpus for gpus in TENSOR if model.shard_bytes(gpus) < WEIGHTS_SHARE * gpu.memory_bytes)
        on = next((f", {gpus}" for gpus in fits if model.heads % gpus == 0), None)
        return "too large" if on is None else f"`curves`{on}"
    engines = []
    for engine, points in sorted(_points(name, card).items()):
        tpot, ttft = (fmean(abs(each["errors"][metric]) for each in points) for metric in ("tpot", "ttft"))
        calibrated = all(not each["outside_calibration"] for each in points)
        engines.append(f"{engine}{' calibrated' if calibrated else ''} {_errors(tpot, ttft)} ({len(points)})")
    return "; ".join((f"`table`, {fewest}", *engines))


def _points(name: str, card: str) -> dict[str, list[dict[str, Any]]]:
    """The predicted points of servers of a model on a card whose flags are known, by engine."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in facts(POINTS)["predicted"]:
        system, engine, model, *_ = each["stratum"].split()
        if each["source"].startswith("inferencex") and _named(system, card) and _meant(model) == name:
            found.setdefault(engine, []).append(each)
    return found


@cache
def _meant(model: str) -> str:
    """The built-in model whose name a published one begins with, the longest such."""
    return max((name for name in catalog.names("models") if bare(model).startswith(bare(name))), key=len, default="")


def _named(system: str, card: str) -> bool:
    return bare(card) in (bare(system), bare(system.partition("_")[0]))


def _errors(tpot: float, ttft: float) -> str:
    return f"TPOT {size(tpot)}, TTFT {size(ttft)}"


# -- studies --------------------------------------------------------------------------------------------------------


def ablation_table() -> Table:
    """A part of the model a row; of recorded runs that were replayed without it."""
    header = ["replayed with"]
    columns: list[dict[str, list[str]]] = []
    for name in cases():
        ablation = facts(name).get("ablation")
        if ablation:
            header += [f"{title(name)}: TTFT", "TPOT", "E2E", "largest"]
            columns.append({each["name"]: _cells(errors(each["errors"])) for each in ablation})
    return Table("", header, _joined(columns))


def _cells(results: dict[tuple[str, str], float]) -> list[str]:
    means = [f"{100 * results[metric, 'mean']:+.1f}" for metric in ("ttft", "tpot", "e2e")]
    return [*means, f"{100 * largest(results):.1f}"]


def scheduler_table() -> Table:
    header = ["policy, cost model"]
    columns: list[dict[str, list[str]]] = []
    answers = facts("schedulers")["answers"]
    for name in cases():
        cells = {}
        for each in answers:
            if each["run"] == name:
                results = {(score[0], score[1]): score[-1] for score in each["scores"]}
                means = [f"{100 * results[metric, 'mean']:+.1f} %" for metric in ("ttft", "tpot", "e2e")]
                cells[f"{each['policy']}, {each['cost']}"] = [*means, str(each["preemptions"])]
        if cells:
            header += [f"{title(name)}: TTFT", "TPOT", "E2E", "preemptions"]
            columns.append(cells)
    return Table("", header, _joined(columns))


def _joined(columns: list[dict[str, list[str]]]) -> list[tuple[str, ...]]:
    """Rows of all columns by what stands first in them; empty where a column has no such row."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(cell for column in columns for cell in column.get(name, [""] * 4))) for name in names]


def fragmentation_table() -> Table:
    header = ("percent of the KV memory (published)", "token states", "reserved for later", "never used", "all others")
    rows = []
    for each in facts("fragmentation")["runs"]:
        if each["assumption"] == "as the paper":
            tokens, later, never, *rest = each["shares"].values()
            published = facts("fragmentation")["published"][each["system"]].values()
            cells = zip((tokens, later, never, sum(rest)), published, strict=True)
            shown = (f"{100 * share:.1f}" + ("" if paper is None else f" ({paper})") for share, paper in cells)
            rows.append((each["system"], *shown))
    return Table("", header, rows)


def assumption_table() -> Table:
    shares: dict[str, dict[str, str]] = {}
    batched: dict[str, str] = {}
    for each in facts("fragmentation")["runs"]:
        shares.setdefault(each["assumption"], {})[each["system"]] = f"{100 * each['shares']['held']:.1f}"
        if "batched_published" in each:
            batched[each["system"]] = f"{each['running']:.2f} ({each['batched_published']:.2f})"
    shares["requests that run, at 2 requests/s"] = batched
    systems = tuple(shares["as the paper"])
    rows = [(name, *(cells.get(system, "") for system in systems)) for name, cells in shares.items()]
    return Table("", ("assumption", *systems), rows)


def curve_table() -> Table:
    rows = []
    for each in facts("cache_curve")["points"]:
        if each["capacity_tokens"]:
            rates = (f"{each[name]:.4f}" for name in ("whole_blocks", "published", "next_block_shared"))
            rows.append((f"{each['capacity_tokens']:,}", *rates))
    return Table("", ("capacity, tokens", "whole blocks", "paper", "next block shared"), rows)


def layout_table() -> Table:
    """A row a layout of eight GPUs: requests/s a GPU and $ a million output tokens, at a strict and a loose bound."""
    rows = [tuple(each["cells"]) for each in facts("replicas_or_tp")["layouts"]]
    return Table("", facts("replicas_or_tp")["header"], rows)


def apart_table() -> Table:
    """Published ratios of servers apart over replicas, and simulated ones."""
    made = facts("apart_pays")["tables"]["published"]
    return Table("", made["header"], [tuple(row) for row in made["rows"]])


def tuned_table() -> Table:
    rows = []
    for each in facts("schedulers_by_load")["best"]:
        settings = ", ".join(f"{name} {value}" for name, value in each["settings"].items())
        gain = f"{each['low']:+.2f} to {each['high']:+.2f}"
        rows.append((f"`{each['scheduler']}`", f"{each['default']:.1f}", f"{each['tuned']:.1f}", gain, settings))
    return Table("", ("scheduler", "default", "tuned", "gain", "settings"), rows)


def fleet_table() -> Table:
    """How many of the numbers of llm-d's fleets are within the bars, as their report has it."""
    header, *rows = facts("fleets")["summary"]
    return Table("", header, rows)


# -- the pages --------------------------------------------------------------------------------------------------------

PAGES: Mapping[str, Mapping[str, Callable[[], Table]]] = {
    "docs/fidelity.md": {
        "cases": case_table,
        "points": point_table,
        "built": built_table,
        "coverage": coverage_table,
        "logs": log_table,
        "fleets": fleet_table,
        "scores": score_table,
    },
    "docs/studies.md": {
        "ablation": ablation_table,
        "schedulers": scheduler_table,
        "curve": curve_table,
        "fragmentation": fragmentation_table,
        "assumptions": assumption_table,
        "layouts": layout_table,
        "apart-pays": apart_table,
    },
    "docs/landscape.md": {"tuned": tuned_table},
    "docs/models.md": {"models": model_table},
}


def page_of(name: str) -> str:
    """A page with its tables made again."""
    text = (page.ROOT / name).read_text(encoding="utf-8")
    return page.rewritten(text, lambda mark: page.rows(PAGES[name][mark](), of_text=mark in ("cases", "models")))


if __name__ == "__main__":
    for name in PAGES:
        (page.ROOT / name).write_text(page_of(name), encoding="utf-8")
