"""The command lines of many runs: `tune` and `capacity` make them, `contrast` and `pareto` read a sweep's table."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbsim.cli.arguments import a_path, answer, check_out, common_options, option, verb, whole, within
from cbsim.errors import CHECK_FAILED, ERROR, OK
from cbsim.files import real, share

if TYPE_CHECKING:
    from cbsim.sweeps.work import Executor


def store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that makes many runs: where they are stored and where they execute."""
    stored = "where runs are kept and found (sweeps)"
    parser.add_argument("--store", type=a_path, default=Path("sweeps"), metavar="DIR", help=stored)
    common_options(parser, "--check-policy")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--jobs", type=jobs, metavar="N", help="processes on this machine (as many as it has cores)")
    add("--ray", type=_cluster, metavar="ADDRESS", help="a Ray cluster: auto, HOST:PORT or ray://HOST:PORT")


def draws(arguments: argparse.Namespace) -> int:
    return arguments.draws or (8 if arguments.with_terms else 0)


def executor(arguments: argparse.Namespace) -> Executor:
    """Return the executor of runs: never this process, which a run may kill. Raises ScenarioError without a cluster."""
    from cbsim.sweeps import sweep

    return sweep.executor(arguments.jobs or os.cpu_count() or 1, arguments.ray, apart=True)


COMPARED = ("throughput", "ttft.p99", "tpot.p99")
jobs = whole(1, 1024)  # processes: MOST_JOBS of cbsim.sweeps.work, which is slow to import


def shares(least: float, most: float) -> Callable[[str], float]:
    """Return the type of an option that takes a share between two bounds: `95%` or 0.95."""

    def parse(value: str) -> float:
        bounds = f"a share from {least:.6g} to {most:.6g}, such as {0.95 if least >= 0.5 else 0.05:.0%}"
        return within(value, share(value), least <= share(value) <= most, bounds)

    return parse


def a_bandwidth(value: str) -> float:
    """Parse GB/s."""
    return within(value, real(value), 0 < real(value) < math.inf, "GB/s above 0, such as 50")


a_confidence = shares(0.5, 1 - 1e-6)  # EVEN and SURE of cbsim.search.tune, which is slow to import


def _cluster(value: str) -> str:
    holds = bool(re.fullmatch(r"auto|(ray://)?[^\s/]+:[0-9]{1,5}", value))
    return within(value, value, holds, "auto, HOST:PORT or ray://HOST:PORT")


def a_shard(value: str) -> tuple[int, int]:
    """Parse `i/n`, the i-th of n parts."""
    parts = re.fullmatch(r"([0-9]{1,8})/([0-9]{1,8})", value)
    number, of = map(int, parts.groups()) if parts else (0, 0)
    return within(value, (number, of), 1 <= number <= of, "I/N with 1 <= I <= N")


@verb(
    "contrast",
    "what a field of a sweep changes, by paired replicates",
    "sweeps/sweep.parquet --by loop --metric goodput",
)
def contrast_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    common_options(parser, "table")
    add("--by", required=True, metavar="FIELD", help="the field that is compared, all else equal")
    add("--against", metavar="VALUE", help="its value that others are compared with (the first)")
    compared = f"what is compared (repeatable; {', '.join(COMPARED)})"
    add("--metric", action="append", metavar="M", help=compared)
    option(parser, "--confidence", type=a_confidence, help="that all intervals hold at once (95%%)")
    about = "of the reference, for the pairs needed (1%%)"
    add("--precision", type=shares(1e-6, 1), default=0.01, metavar="P", help=about)
    common_options(parser, "--out", "--json")


@verb(
    "pareto",
    "the points of a sweep that no other point dominates in two metrics",
    "sweeps/sweep.parquet --check 'ttft.p99<=2s'",
)
def pareto_arguments(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "table")
    for axis, usual in (("x", "output_tokens_per_s_per_user"), ("y", "output_tokens_per_s_per_gpu")):
        about = f"a metric; min: or max: before it say what is best ({usual})"
        parser.add_argument(f"--{axis}", default=usual, metavar="M", help=about)
    option(parser, "--check", help="has to hold on the frontier, e.g. 'ttft.p99<=2s' (repeatable)")
    option(parser, "--confidence", type=a_confidence, help="of each interval (95%%)")
    parser.add_argument("--all", action="store_true", help="list dominated points, too")
    common_options(parser, "--out", "--json")


@verb(
    "tune",
    "find the best settings of a scenario, and how sure that is",
    "rates --knob scheduler.max_num_seqs=16..128 --maximise goodput --check 'ttft.p99<=2s'",
)
def tune_arguments(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "scenario", "--set")
    option(parser, "--loop", help="sync, async, or both, each for itself")
    option(parser, "--set", "--knob", required=True, dest="knob", metavar="FIELD=VALUES", help="A..B, A..B:STEP or V,V")
    goal = parser.add_mutually_exclusive_group(required=True)
    best: dict[str, Any] = {"dest": "goal", "metavar": "M"}
    about = "goodput, throughput, or any metric by its dotted name"
    goal.add_argument("--maximise", **best, type=lambda name: (name, f"--maximise {name}", 1), help=about)
    goal.add_argument("--minimise", **best, type=lambda name: (name, f"--minimise {name}", -1), help="likewise")
    option(parser, "--check", help="has to hold, e.g. 'ttft.p99<=2s' (repeatable)")
    number = whole(2, 10_000)
    parser.add_argument("--replicates", type=number, default=20, metavar="N", help="of a candidate, at most (20)")
    option(parser, "--confidence", type=a_confidence, help="of what is said of the best (95%%)")
    common_options(parser, "--with-terms", "--draws")
    store_arguments(parser)
    common_options(parser, "--out", "--json")


@verb(
    "capacity",
    "how much load a server holds within conditions: an interval, and what binds",
    "rates --loop async --check 'ttft.p99<=2s' --check 'tpot.p99<=50ms'",
)
def capacity_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    common_options(parser, "scenario", "--set")
    option(parser, "--check", help="has to hold, e.g. 'ttft.p99<=2s' (repeatable)")
    add("--goodput", metavar="SHARE", help="of requests within the scenario's slo, e.g. 99%%")
    add("--over", default="rate_per_s", metavar="FIELD", help="a number of the workload (rate_per_s, of a trace too)")
    option(parser, "--loop", help="sync or async")
    option(parser, "--confidence", type=shares(0.5, 0.9999), help="that the capacity lies in the interval (95%%)")
    wide = "how far apart the load that holds and the one that fails may be (5%%)"
    add("--width", type=shares(0.001, 1), default=0.05, metavar="P", help=wide)
    add("--replicates", type=whole(2, 10_000), default=32, metavar="N", help="runs of a load at most (32)")
    warmup = "of the requests, the first ones, do not count (10%%)"
    add("--warmup", type=shares(0, 0.9), default=0.1, metavar="P", help=warmup)
    common_options(parser, "--with-terms", "--draws")
    store_arguments(parser)
    option(parser, "--json", help="print one object: the interval, and every probe")


@verb(
    "recommend",
    "which cards, how many and with which settings serve a load within conditions, by price",
    "llama-3.1-8b --load rates --slo 'ttft.p99<=2s' --slo 'tpot.p99<=50ms' --cards h100,l40s",
)
def recommend_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a model by name, or the path of a file or config.json")
    add("--load", required=True, metavar="FILE", help="a scenario, by name or file, or a file of a workload's fields")
    option(parser, "--check", "--slo", dest="slo", required=True, help="has to hold, e.g. 'ttft.p99<=2s' (repeatable)")
    cards = "GPUs by name, and the price of an hour of one where it is not that of their file: h100,l4=0.8"
    add("--cards", required=True, type=lambda value: value.split(","), metavar="A,B=USD", help=cards)
    tensor: dict[str, Any] = {"type": lambda value: tuple(map(whole(1, 1024), value.split(","))), "metavar": "N,N"}
    add("--tensor", **tensor, default=(1, 2, 4, 8), help="GPUs that share a model (1,2,4,8)")
    option(parser, "--set", "--knob", dest="knob", metavar="FIELD=VALUES", help="A..B, A..B:STEP or V,V")
    apart = "try prefill and decode on servers of their own, too, each with a NIC of so many GB/s"
    add("--apart", type=a_bandwidth, metavar="GB/S", help=apart)
    add("--most", type=whole(1, 10_000), default=64, metavar="N", help="GPUs in all (64)")
    common_options(parser, "--set")
    option(parser, "--confidence", type=shares(0.5, 0.9999), help="that all answers hold at once (95%%)")
    add("--replicates", type=whole(2, 10_000), default=20, metavar="N", help="runs of a number of servers at most (20)")
    store_arguments(parser)
    reported = "where the report and the scenario of each answer go (recommended)"
    option(parser, "--out", default=Path("recommended"), help=reported)
    option(parser, "--json")


def contrast(arguments: argparse.Namespace) -> int:
    from cbsim.metrics.checks import objective
    from cbsim.stats import contrast as contrasting
    from cbsim.stats import replicated

    check_out(arguments.out)
    names = arguments.metric or COMPARED
    metrics = list(dict.fromkeys(objective(name, f"--metric {name}", directed=False) for name in names))
    table = replicated.read(arguments.table)
    if not arguments.metric:
        metrics = [each for each in metrics if each.name in table.metrics]
    terms = contrasting.Terms(arguments.confidence, arguments.precision)
    study = contrasting.study(table, arguments.by, arguments.against, metrics, terms)
    return answer(study, arguments, "simulated")


def pareto(arguments: argparse.Namespace) -> int:
    from cbsim.metrics import checks
    from cbsim.stats import pareto as frontiers
    from cbsim.stats import replicated

    check_out(arguments.out)
    x, y = (checks.objective(getattr(arguments, axis), f"--{axis} {getattr(arguments, axis)}") for axis in "xy")
    where = checks.parse_all(arguments.check, sweep=True)
    question = frontiers.Question(x, y, where, arguments.confidence)
    study = frontiers.study(replicated.read(arguments.table), question, all_places=arguments.all)
    return answer(study, arguments, "simulated")


def tune(arguments: argparse.Namespace) -> int:
    """Search the best settings; returns 3 if no candidate keeps the conditions, 1 if none could be run."""
    from cbsim.metrics import checks
    from cbsim.search import tune as tuning
    from cbsim.search.racing import FAILED, Goal
    from cbsim.sweeps.store import Progress, Runs, Store

    check_out(arguments.out)
    slo = checks.parse_all(arguments.check, sweep=True)
    goal = Goal(checks.objective(*arguments.goal), slo, arguments.confidence, arguments.replicates, draws(arguments))
    candidates = tuning.candidates(arguments.scenario, arguments.set, tuning.parse_knobs(arguments.knob), goal)
    workers = executor(arguments)
    about = f"{len(candidates)} candidates, in {len(goal.rounds)} rounds of at most {goal.most} replicates each"
    progress = Progress(silent=arguments.json, about=f"{about}; {workers.about}")
    tuned = tuning.tune(candidates, goal, Runs(Store(arguments.store), workers, progress))
    answer(tuning.study(tuned), arguments, "simulated")
    if tuned.outcome.best is not None:
        return OK
    return ERROR if all(trial.verdict == FAILED for trial in tuned.outcome.trials) else CHECK_FAILED


def recommend(arguments: argparse.Namespace) -> int:
    """Search the least number of servers of each card, and write a page and the scenario of each answer."""
    from cbsim.search import recommend as searching
    from cbsim.search import recommended, tune
    from cbsim.sweeps.store import Progress, Runs, Store

    check_out(arguments.out)
    sizing = searching.sizing(arguments.model, arguments.load, arguments.set, arguments.most, arguments.apart)
    of = searching.candidates(sizing, arguments.cards, arguments.tensor, tune.parse_knobs(arguments.knob))
    terms = searching.terms(of, arguments.slo, confidence=arguments.confidence, replicates=arguments.replicates)
    workers = executor(arguments)
    progress = Progress(silent=arguments.json, brief=True, about=f"{len(of)} candidates; {workers.about}")
    made = recommended.recommend(of, terms, Runs(Store(arguments.store), workers, progress))
    answer(recommended.study(made, arguments.out), arguments, "simulated")
    recommended.write(made, arguments.out, arguments.line)
    if not arguments.json:
        print(f"page      {arguments.out / 'report.html'}")
    return OK


def capacity(arguments: argparse.Namespace) -> int:
    """Search the load that a server sustains; returns the exit status."""
    from cbsim.scenario import scenario as scenarios
    from cbsim.search import capacity as searching
    from cbsim.search import probe

    scenario = scenarios.load(arguments.scenario, arguments.set)
    precision = {name: getattr(arguments, name) for name in ("confidence", "width", "replicates", "warmup")}
    terms = probe.terms(scenario, arguments.check, arguments.goodput, **precision, draws=draws(arguments))
    workers, as_json = executor(arguments), arguments.json
    return searching.run(scenario, arguments.over, terms, arguments.store, workers, as_json=as_json)
