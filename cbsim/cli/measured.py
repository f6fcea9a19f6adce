"""The commands about measurements: `measure`, `score`, `score-points`, `fetch-tables` and `fit`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cbsim.cli.arguments import a_path, answer, check_out, common_options, option, verb
from cbsim.cli.many_runs import executor, store_arguments
from cbsim.errors import CHECK_FAILED, ERROR, OK, ScenarioError
from cbsim.files import real

BUDGET = {"seconds": 600.0, "tokens": 1_000_000, "users": 64}
MOST = {"seconds": 86_400, "tokens": 1_000_000_000, "users": 4096}
LEAST = {"seconds": 10, "tokens": 10_000, "users": 1}  # what learns about the server fits into it


@verb(
    "measure",
    "measure a running OpenAI-compatible server by a short campaign",
    "http://127.0.0.1:8000 --out mine",
    act="cbsim.measured.own.campaign:measure",
)
def measure_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="its address; nothing is sent anywhere else")
    option(parser, "--out", default=Path("measured"), help="a new folder for what is measured (measured)")
    parser.add_argument("--model", default="", metavar="NAME", help="of several that it serves")
    most = ",".join(f"{name}={value:.0f}" for name, value in BUDGET.items())
    shown = f"never more than ({most})"
    parser.add_argument("--budget", type=_budget, default=BUDGET, metavar="NAME=N,...", help=shown)
    parser.add_argument("--log", type=a_path, metavar="FILE", help="the log of the server's start, for its flags")
    parser.add_argument("--api-key-file", type=a_path, metavar="FILE", help="a file with a key; also CBSIM_API_KEY")
    parser.add_argument("--yes", action="store_true", help="begin without asking")


def _budget(argument: str) -> dict[str, float]:
    budget = {name: real(value.replace("_", "")) for name, value in _values(argument).items()}
    for name, value in budget.items():
        if not LEAST.get(name, math.inf) <= value <= MOST.get(name, 0) or not (name == "seconds" or value.is_integer()):
            bounds = ", ".join(f"{each} from {LEAST[each]:,} to {MOST[each]:,}" for each in BUDGET)
            raise argparse.ArgumentTypeError(f"{argument!r}: got {name}={value:g}, expected {bounds}, whole numbers")
    return BUDGET | budget


@verb(
    "score",
    "replay a recorded vLLM run and print how far the simulator is off",
    "cases/RTX4090__Llama-3.1-8B --data . --json",
)
def score_arguments(score: argparse.ArgumentParser) -> None:
    score.add_argument("case", type=a_path, metavar="CASE", help="a folder with config.json, ...")
    score.add_argument("--data", type=a_path, metavar="DIR", help="pack of workloads and profiles (CASE/../..)")
    score.add_argument("--hardware", metavar="NAME", help="data sheet of the case's GPU: a name or a file")
    score.add_argument("--ablate", action="store_true", help="repeat it without one part of the model at a time")
    option(score, "--set", help="override any field of the case's scenario")
    option(score, "--out", help="report.md and figures (runs/score/<CASE>; none with --json)")
    common_options(score, "--json")


@verb(
    "score-points",
    "predict published measurements of whole servers, and print how far off that is",
    "--where system=h200_sxm,backend=vllm --json",
)
def points_arguments(parser: argparse.ArgumentParser) -> None:
    where_argument(parser, "only points whose columns have these values")
    data_argument(parser)
    store_arguments(parser)
    common_options(parser, "--out", "--json")


@verb("fetch-tables", "bring the public kernel tables of a card", "l40s --out data", act="cbsim.measured.tables:fetch")
def tables_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("card", metavar="CARD", help="a GPU of `list`, or a card's folder of tables, as h100_sxm")
    there = os.environ.get("CBSIM_DATA")
    option(parser, "--out", default=there, required=not there, help="folder of data ($CBSIM_DATA)")
    parser.add_argument("--source", default="", help="URL or folder of aiconfigurator's `systems` (github.com)")


@verb(
    "fit",
    "fit the terms of a scenario to what was measured of your own server, and predict what was left out",
    "measured --scenario server.yaml --out terms.yaml",
)
def fit_arguments(parser: argparse.ArgumentParser) -> None:
    about = "directory of `cbsim measure`, or a file of vllm bench, GuideLLM, aiperf, inference-perf, or CSV"
    parser.add_argument("paths", nargs="+", type=a_path, metavar="MEASURED", help=about)
    parser.add_argument("--scenario", required=True, help="the server: model, card, scheduler, cost; a file or a name")
    option(parser, "--set")
    where_argument(parser, "of a CSV file: only rows whose columns have these values")
    parser.add_argument("--hold-out", action="append", default=[], metavar="LOAD", help="predict it only (every 4th)")
    about = "another measurement: has the server changed? (exit status 3)"
    parser.add_argument("--against", action="append", default=[], type=a_path, metavar="MEASURED", help=about)
    option(parser, "--out", required=True, metavar="FILE", help="the terms, for cost.terms of a scenario")
    option(parser, "--out", "--report", metavar="DIR", dest="report", help="also write report.md and report.json")
    common_options(parser, "--json")


def data_argument(parser: argparse.ArgumentParser) -> None:
    about = "folder of measured.csv[.gz] (aiconfigurator_silicon of the data)"
    parser.add_argument("--data", type=a_path, metavar="DIR", help=about)


def where_argument(parser: argparse.ArgumentParser, about: str) -> None:
    """Add `--where`: values by field, none by default. All of several must hold."""
    parser.add_argument("--where", type=_values, action=_Joined, default={}, metavar="FIELD=VALUE,...", help=about)


class _Joined(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        before = getattr(namespace, self.dest)
        if twice := sorted(before.keys() & values.keys()):
            parser.error(f"argument --where: {twice[0]} is given twice")
        setattr(namespace, self.dest, before | values)


def _values(argument: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in argument.split(","):
        field, equal, value = (word.strip() for word in part.partition("="))
        if not (equal and field) or field in values:
            raise argparse.ArgumentTypeError(f"{argument!r}: expected FIELD=VALUE,FIELD=VALUE, each field once")
        values[field] = value
    return values


def fit(arguments: argparse.Namespace) -> int:
    """Fit terms to what was measured of a server, write them, and print how near they are."""
    from cbsim.draw import folder
    from cbsim.measured.own.study import study
    from cbsim.scenario import terms

    check_out(arguments.report)
    if arguments.out.is_dir():
        raise ScenarioError(f"--out: {arguments.out} is a folder, expected the name of a file")
    folder.write(arguments.out.parent, {})  # before the work, not after it
    chosen = {name: getattr(arguments, name) for name in ("where", "hold_out", "against")}
    report = partial(print, file=sys.stderr)
    made = study(arguments.paths, arguments.scenario, arguments.set, name=arguments.out.stem, **chosen, report=report)
    folder.write(arguments.out.parent, {arguments.out.name: terms.dump(made.terms).encode()})
    answer(made.report, argparse.Namespace(**{**vars(arguments), "out": arguments.report}), "fitted to a server")
    if not arguments.json:
        print(f"\nterms     {arguments.out}: for cost.terms, without the fields of cost that it stands for")
    return CHECK_FAILED if made.changed else OK


def score(arguments: argparse.Namespace) -> int:
    """Replay a recorded run, and print the simulator's errors."""
    from cbsim.measured.recorded import verdict

    out: Path | None = arguments.out
    if out is None and not arguments.json:
        out = Path("runs") / "score" / arguments.case.resolve().name
    check_out(out)
    changes = {"hardware": arguments.hardware, "overrides": arguments.set, "ablate": arguments.ablate}
    made = verdict.study(arguments.case, pack=arguments.data, **changes)
    return answer(made, arguments, "simulated against a recorded run", out)


def score_points(arguments: argparse.Namespace) -> int:
    """Predict the points of a folder and print the errors; returns 1 if a run failed."""
    from cbsim.draw import folder
    from cbsim.measured.points import published, report

    data = published.folder(arguments.data)
    points = published.read(data, arguments.where)
    check_out(arguments.out)
    if arguments.out is not None:
        folder.write(arguments.out, {})  # before the work, not after it
    study, complete = report.run(data, points, executor(arguments), arguments.store, silent=arguments.json)
    answer(study, arguments, "simulated against published measurements")
    return OK if complete else ERROR
