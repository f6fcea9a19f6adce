"""The command lines of many runs: `tune` and `capacity` make them, `contrast` and `pareto` read a sweep's table."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cbsim.cli.arguments import a_path, answer, common_options, option
from cbsim.errors import CHECK_FAILED, ERROR, OK

if TYPE_CHECKING:
    from cbsim.sweeps.executor import Executor


def store_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that makes many runs: where they are kept, and who makes them."""
    parser.add_argument(
        "--store", type=a_path, default=Path("sweeps"), metavar="DIR", help="where runs are kept and found (sweeps)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=jobs, metavar="N", help="processes on this machine (as many as it has cores)")
    where.add_argument(
        "--ray", type=_cluster, metavar="ADDRESS", help="a Ray cluster: auto, HOST:PORT or ray://HOST:PORT"
    )


def executor(arguments: argparse.Namespace) -> Executor:
    """Who makes the runs: not this process, which a run may kill. Raises ScenarioError if there is no such cluster."""
    from cbsim.sweeps import executor as executors

    return executors.executor(arguments.jobs or os.cpu_count() or 1, arguments.ray, apart=True)


def jobs(text: str) -> int:
    """A number of processes."""
    from cbsim.sweeps.executor import MOST_JOBS

    number = int(text) if text.isdecimal() and len(text) < 5 else 0
    if not 1 <= number <= MOST_JOBS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {MOST_JOBS}")
    return number


def _cluster(text: str) -> str:
    if text != "auto" and not re.fullmatch(r"(ray://)?[^\s/]+:\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, HOST:PORT or ray://HOST:PORT")
    return text


def a_shard(text: str) -> tuple[int, int]:
    """`i/n`: the i-th of n parts."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and len(of) < 9 and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with 1 <= I <= N")
    return int(number), int(of)


MOST_REPLICATES = 10_000


def contrast_arguments(parser: argparse.ArgumentParser) -> None:
    _table_argument(parser)
    parser.add_argument("--by", required=True, metavar="FIELD", help="the field that is compared, all else equal")
    parser.add_argument("--against", metavar="VALUE", help="its value that others are compared with (the first)")
    parser.add_argument(
        "--metric", action="append", metavar="M", help="what is compared (repeatable; throughput, ttft.p99, tpot.p99)"
    )
    _confidence_argument(parser, "that all intervals hold at once (95%%)")
    parser.add_argument(
        "--precision", type=a_share, default=0.01, metavar="P", help="of the reference, for the pairs needed (1%%)"
    )
    common_options(parser, "--out", "--json")


def pareto_arguments(parser: argparse.ArgumentParser) -> None:
    _table_argument(parser)
    for axis, usual in (("x", "output_tokens_per_s_per_user"), ("y", "output_tokens_per_s_per_gpu")):
        parser.add_argument(
            f"--{axis}", default=usual, metavar="M", help=f"a metric; min: or max: before it say what is best ({usual})"
        )
    parser.add_argument("--where", action="append", default=[], metavar="COND", help="e.g. 'ttft.p99<=2s' (repeatable)")
    _confidence_argument(parser, "of each interval (95%%)")
    parser.add_argument("--all", action="store_true", help="list the points that are beaten, too")
    common_options(parser, "--out", "--json")


def tune_arguments(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "scenario", "--set")
    parser.add_argument(
        "--knob", action="append", default=[], required=True, metavar="FIELD=VALUES", help="A..B, A..B:STEP, or V,V"
    )
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--maximise", metavar="M", help="goodput, throughput, or any metric by its dotted name")
    goal.add_argument("--minimise", metavar="M", help="likewise")
    parser.add_argument("--slo", action="append", default=[], metavar="COND", help="e.g. 'ttft.p99<=2s' (repeatable)")
    parser.add_argument("--replicates", type=_replicates, default=20, metavar="N", help="of a candidate, at most (20)")
    _confidence_argument(parser, "of what is said of the best (95%%)")
    store_arguments(parser)
    common_options(parser, "--out", "--json")


def contrast(arguments: argparse.Namespace) -> int:
    """What a field of a sweep changes."""
    from cbsim.metrics.checks import objective
    from cbsim.stats import contrast as contrasting
    from cbsim.stats import replicated

    _check_out(arguments)
    given = arguments.metric or ["throughput", "ttft.p99", "tpot.p99"]
    metrics = list(dict.fromkeys(objective(text, f"--metric {text}", directed=False) for text in given))
    table = replicated.read(arguments.table)
    if not arguments.metric:
        metrics = [each for each in metrics if each.name in table.metrics]
    terms = contrasting.Terms(arguments.confidence, arguments.precision)
    study = contrasting.study(table, arguments.by, arguments.against, metrics, terms)
    return answer(study, arguments, "simulated")


def pareto(arguments: argparse.Namespace) -> int:
    """The frontier of a sweep in two metrics."""
    from cbsim.metrics import checks
    from cbsim.stats import pareto as frontiers
    from cbsim.stats import replicated

    _check_out(arguments)
    x, y = (checks.objective(getattr(arguments, axis), f"--{axis} {getattr(arguments, axis)}") for axis in "xy")
    where = [checks.parse(text, "--where", sweep=True) for text in arguments.where]
    question = frontiers.Question(x, y, where, arguments.confidence)
    study = frontiers.study(replicated.read(arguments.table), question, all_places=arguments.all)
    return answer(study, arguments, "simulated")


def tune(arguments: argparse.Namespace) -> int:
    """The best settings; 3 if nobody keeps the conditions, 1 if no candidate could be run."""
    from cbsim.metrics import checks
    from cbsim.search import tune as tuning
    from cbsim.search.racing import FAILED, Goal
    from cbsim.sweeps.store import SILENT
    from cbsim.sweeps.sweep import Progress

    _check_out(arguments)
    text, option, sign = arguments.maximise, "--maximise", 1
    if text is None:
        text, option, sign = arguments.minimise, "--minimise", -1
    slo = [checks.parse(each, "--slo", sweep=True) for each in arguments.slo]
    goal = Goal(checks.objective(text, f"{option} {text}", sign), slo, arguments.confidence, arguments.replicates)
    candidates = tuning.candidates(arguments.scenario, arguments.set, tuning.parse_knobs(arguments.knob), goal)
    workers = executor(arguments)
    if not arguments.json:
        said = f"{len(candidates)} candidates, in {len(goal.rounds)} rounds of at most {goal.most} replicates each"
        print(f"{said}; {workers.about}", file=sys.stderr)
    progress = SILENT if arguments.json else Progress()
    tuned = tuning.tune(candidates, goal, arguments.store, workers, progress)
    answer(tuning.study(tuned), arguments, "simulated")
    if tuned.outcome.best is not None:
        return OK
    return ERROR if all(trial.verdict == FAILED for trial in tuned.outcome.trials) else CHECK_FAILED


def _check_out(arguments: argparse.Namespace) -> None:
    """Before the work, not after it. Raises RunError."""
    from cbsim.draw import folder

    if arguments.out is not None:
        folder.check(arguments.out)


def _table_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", type=a_path, metavar="TABLE", help="the .parquet file that a sweep wrote")


def _confidence_argument(parser: argparse.ArgumentParser, of: str) -> None:
    parser.add_argument("--confidence", type=a_confidence, default=0.95, metavar="P", help=of)


def a_share(text: str) -> float:
    """`95%` or 0.95: above 0 and below 1."""
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share between 0 and 1, such as 95%")
    return share


def a_confidence(text: str) -> float:
    """A share that can be one of being right."""
    from cbsim.search.tune import EVEN, SURE

    share = a_share(text)
    if not EVEN <= share <= SURE:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from {EVEN:g} to {SURE:g}")
    return share


def _replicates(text: str) -> int:
    replicates = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 2 <= replicates <= MOST_REPLICATES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 2 to {MOST_REPLICATES:,}")
    return replicates


RATE = "workload.arrivals.rate_per_s"


def capacity_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    common_options(parser, "scenario", "--set")
    parser.add_argument(
        "--slo", action="append", default=[], metavar="COND", help="has to hold, e.g. 'ttft.p99<=2s' (repeatable)"
    )
    parser.add_argument("--goodput", metavar="SHARE", help="of requests within the scenario's slo, e.g. 99%%")
    parser.add_argument("--over", default=RATE, metavar="FIELD", help=f"a number of the workload ({RATE})")
    option(parser, "--loop", choices=("sync", "async"), help="serving loop")
    parser.add_argument("--confidence", type=_share, default=0.95, metavar="SHARE", help="of the answer (95%%)")
    parser.add_argument("--width", type=_share, default=0.05, metavar="SHARE", help="of the answer at most (5%%)")
    parser.add_argument("--replicates", type=int, default=32, metavar="N", help="runs of a load at most (32)")
    parser.add_argument(
        "--warmup", type=_share, default=0.1, metavar="SHARE", help="of requests that do not count, the first (10%%)"
    )
    store_arguments(parser)
    option(parser, "--json", help="print one object: the interval, and every probe")


def capacity(arguments: argparse.Namespace) -> int:
    """Search; the exit status."""
    from cbsim.scenario import scenario as scenarios
    from cbsim.search import capacity as searching
    from cbsim.search import probe

    loop = [] if arguments.loop is None else [f"loop.mode={arguments.loop}"]
    scenario = scenarios.load(arguments.scenario, [*arguments.set, *loop])
    names = ("confidence", "width", "replicates", "warmup")
    others = {name: getattr(arguments, name) for name in names}
    wanted = probe.terms(scenario, arguments.slo, arguments.goodput, **others)
    options = searching.CapacityOptions(scenario, arguments.over, wanted, arguments.store, arguments.json)
    return searching.run(options, executor(arguments))


def _share(text: str) -> float:
    """`5%` or 0.05."""
    number, scale = (text[:-1], 0.01) if text.endswith("%") else (text, 1.0)
    try:
        return float(number) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share, such as 5% or 0.05") from None
