"""The command lines that choose among many runs: `contrast` and `pareto` read a sweep's table, `tune` makes runs."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from cbsim.cli.arguments import a_path
from cbsim.cli.many_runs import executor, store_arguments
from cbsim.server.status import CHECK_FAILED, ERROR, OK

if TYPE_CHECKING:
    from cbsim.draw.study import Study
    from cbsim.sweeps.command import Progress

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
    _answer_arguments(parser)


def pareto_arguments(parser: argparse.ArgumentParser) -> None:
    _table_argument(parser)
    for axis, usual in (("x", "output_tokens_per_s_per_user"), ("y", "output_tokens_per_s_per_gpu")):
        parser.add_argument(
            f"--{axis}", default=usual, metavar="M", help=f"a metric; min: or max: before it say what is best ({usual})"
        )
    parser.add_argument("--where", action="append", default=[], metavar="COND", help="e.g. 'ttft.p99<=2s' (repeatable)")
    _confidence_argument(parser, "of each interval (95%%)")
    parser.add_argument("--all", action="store_true", help="list the points that are beaten, too")
    _answer_arguments(parser)


def tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", help="a scenario file, or the name of one that comes with the project")
    parser.add_argument(
        "--knob", action="append", default=[], required=True, metavar="FIELD=VALUES", help="A..B, A..B:STEP, or V,V"
    )
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--maximise", metavar="M", help="goodput, throughput, or any metric by its dotted name")
    goal.add_argument("--minimise", metavar="M", help="likewise")
    parser.add_argument("--slo", action="append", default=[], metavar="COND", help="e.g. 'ttft.p99<=2s' (repeatable)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override any field (repeatable)"
    )
    parser.add_argument("--replicates", type=_replicates, default=20, metavar="N", help="of a candidate, at most (20)")
    _confidence_argument(parser, "of what is said of the best (95%%)")
    store_arguments(parser)
    _answer_arguments(parser)


def contrast(arguments: argparse.Namespace) -> int:
    """What a field of a sweep changes."""
    from cbsim.sweeps import contrast as contrasting
    from cbsim.sweeps import replicated
    from cbsim.sweeps.metric import metric

    _check_out(arguments)
    given = arguments.metric or ["throughput", "ttft.p99", "tpot.p99"]
    metrics = list(dict.fromkeys(metric(text, f"--metric {text}") for text in given))
    table = replicated.read(arguments.table)
    if not arguments.metric:
        metrics = [each for each in metrics if each.name in table.metrics]
    terms = contrasting.Terms(arguments.confidence, arguments.precision)
    study = contrasting.study(table, arguments.by, arguments.against, metrics, terms)
    _answer(study, arguments, "table", "by", "against", "metric", "confidence", "precision")
    return OK


def pareto(arguments: argparse.Namespace) -> int:
    """The frontier of a sweep in two metrics."""
    from cbsim.sweeps import pareto as frontiers
    from cbsim.sweeps import replicated
    from cbsim.sweeps.metric import condition, metric

    _check_out(arguments)
    x, y = metric(arguments.x, f"--x {arguments.x}"), metric(arguments.y, f"--y {arguments.y}")
    where = [condition(text, "--where") for text in arguments.where]
    question = frontiers.Question(x, y, where, arguments.confidence)
    study = frontiers.study(replicated.read(arguments.table), question, all_places=arguments.all)
    _answer(study, arguments, "table", "x", "y", "where", "confidence", "all")
    return OK


def tune(arguments: argparse.Namespace) -> int:
    """The best settings; 3 if nobody keeps the conditions, 1 if no candidate could be run."""
    from cbsim.sweeps import knobs
    from cbsim.sweeps import tune as tuning
    from cbsim.sweeps.command import Progress
    from cbsim.sweeps.metric import condition, metric
    from cbsim.sweeps.racing import FAILED, Goal

    _check_out(arguments)
    text, option, sign = arguments.maximise, "--maximise", 1
    if text is None:
        text, option, sign = arguments.minimise, "--minimise", -1
    slo = [condition(each, "--slo") for each in arguments.slo]
    goal = Goal(metric(text, f"{option} {text}", sign), slo, arguments.confidence, arguments.replicates)
    candidates = tuning.candidates(arguments.scenario, arguments.set, knobs.parse(arguments.knob), goal)
    hands = executor(arguments)
    if not arguments.json:
        said = f"{len(candidates)} candidates, in {len(goal.rounds)} rounds of at most {goal.most} replicates each"
        print(f"{said}; {hands.about}", file=sys.stderr)
    progress: list[Progress] = []

    def begin(runs: int) -> Progress:
        _end(progress)
        progress.append(Progress(runs, silent=arguments.json))
        return progress[-1]

    try:
        tuned = tuning.tune(candidates, goal, arguments.store, hands, begin)
    except KeyboardInterrupt:
        _end(progress)
        print("cbsim: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return ERROR
    _end(progress)
    options = ("set", "knob", "maximise", "minimise", "slo", "replicates", "confidence")
    _answer(tuning.study(tuned), arguments, "scenario", *options)
    if tuned.outcome.best is not None:
        return OK
    return ERROR if all(trial.verdict == FAILED for trial in tuned.outcome.trials) else CHECK_FAILED


def _end(progress: list[Progress]) -> None:
    for each in progress:
        each.end()
    progress.clear()


def _check_out(arguments: argparse.Namespace) -> None:
    """Before the work, not after it. Raises RunError."""
    from cbsim.draw import folder

    if arguments.out is not None:
        folder.check(arguments.out)


def _answer(study: Study, arguments: argparse.Namespace, place: str, *options: str) -> None:
    from cbsim.cli.commands import answer

    words = [arguments.command, str(getattr(arguments, place))]
    for name in options:
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            words += [] if value in (None, False) else [f"--{name}", *([] if value is True else [str(value)])]
    answer(study, arguments.out, words, "simulated", as_json=arguments.json)


def _table_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", type=a_path, metavar="TABLE", help="the .parquet file that a sweep wrote")


def _answer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=a_path, metavar="DIR", help="also write report.md and figures to this folder")
    parser.add_argument("--json", action="store_true", help="print the numbers as one object instead of tables")


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
    from cbsim.sweeps.tune import EVEN, SURE

    share = a_share(text)
    if not EVEN <= share <= SURE:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from {EVEN:g} to {SURE:g}")
    return share


def _replicates(text: str) -> int:
    replicates = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 2 <= replicates <= MOST_REPLICATES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 2 to {MOST_REPLICATES:,}")
    return replicates
