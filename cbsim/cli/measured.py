"""The commands about measurements: `score`, `score-points`, `calibrate-terms` and `fetch-tables`."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from cbsim.cli.arguments import a_path, answer, check_out, common_options, option, verb
from cbsim.cli.many_runs import executor, jobs, store_arguments
from cbsim.errors import ERROR, OK, Interrupted, ScenarioError

TERMS = (
    *("vllm-dense", "vllm-dense-b200", "trtllm-dense", "trtllm-dense-b200", "vllm-experts", "vllm-experts-b200"),
    *("vllm-ranks", "sglang-latent", "sglang-linear", "sglang-sparse", "trtllm-latent", "vllm-latent"),
    *("vllm-windows", "trtllm-windows"),
)


@verb(
    "score",
    "replay a recorded vLLM run and print how far the simulator is off",
    "cases/RTX4090__Llama-3.1-8B --data . --json",
)
def score_arguments(score: argparse.ArgumentParser) -> None:
    score.add_argument("case", type=a_path, metavar="CASE", help="folder: config.json, ...; or requests.csv.gz")
    score.add_argument("--data", type=a_path, metavar="DIR", help="pack of workloads and profiles (CASE/../..)")
    score.add_argument("--hardware", metavar="NAME", help="data sheet of the case's GPU: a name or a file")
    about = "of a folder with requests.csv.gz: which runs, such as run=vllm-70b,scenario=sharegpt,qps=0.5 (all)"
    where_argument(score, about)
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
    _data_argument(parser)
    store_arguments(parser)
    common_options(parser, "--out", "--json")


@verb("calibrate-terms", "calibrate the terms that kernel tables leave out on published measurements", "vllm-dense")
def terms_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", choices=[*TERMS], metavar="NAME", help=f"of {', '.join(TERMS)} (all)")
    _data_argument(parser)
    parser.add_argument("--jobs", type=jobs, metavar="N", help="processes (as many as there are cores)")
    option(parser, "--out", default=Path("scenarios/terms"), help="folder (scenarios/terms)")


@verb("fetch-tables", "bring the public kernel tables of a card", "l40s --out data", act="cbsim.measured.tables:fetch")
def tables_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("card", metavar="CARD", help="a GPU of `list`, or a card's folder of tables, as h100_sxm")
    there = os.environ.get("CBSIM_DATA")
    option(parser, "--out", default=there, required=not there, help="folder of data ($CBSIM_DATA)")
    parser.add_argument("--source", default="", help="URL or folder of aiconfigurator's `systems` (github.com)")


def _data_argument(parser: argparse.ArgumentParser) -> None:
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


def score(arguments: argparse.Namespace) -> int:
    """Replay a recorded run, or all of a folder of request logs, and print the simulator's errors."""
    from cbsim.measured.recorded import verdict
    from cbsim.measured.request_logs import log

    out: Path | None = arguments.out
    if out is None and not arguments.json:
        out = Path("runs") / "score" / arguments.case.resolve().name
    check_out(out)
    if log.is_one(arguments.case):
        return _score_logs(arguments, out)
    if arguments.where:
        raise ScenarioError(f"--where: chooses runs of request logs; {arguments.case} holds no {log.REQUESTS}")
    changes = {"hardware": arguments.hardware, "overrides": arguments.set, "ablate": arguments.ablate}
    made = verdict.study(arguments.case, pack=arguments.data, **changes)
    return answer(made, arguments, "simulated against a recorded run", out)


def _score_logs(arguments: argparse.Namespace, out: Path | None) -> int:
    from cbsim.measured.request_logs import log, verdict

    for name in ("data", "hardware", "ablate"):
        if getattr(arguments, name):
            raise ScenarioError(f"--{name}: is for a case with config.json; {arguments.case} holds {log.REQUESTS}")
    made = verdict.study(arguments.case, arguments.where, arguments.set)
    return answer(made, arguments, "simulated against recorded runs", out)


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


def calibrate_terms(arguments: argparse.Namespace) -> int:
    """Calibrate terms on the open points, and write them to the folder in which scenarios look for them."""
    from cbsim.draw import folder
    from cbsim.measured.points import calibration, published
    from cbsim.scenario import terms
    from cbsim.sweeps.work import Processes

    points = published.read(published.folder(arguments.data))
    folder.write(arguments.out, {})  # before the work, not after it
    for name in arguments.names or TERMS:
        print(f"{name}:", file=sys.stderr)
        try:
            with closing(Processes(arguments.jobs or os.cpu_count() or 1)) as workers:
                made = calibration.calibrate(name, points, workers, lambda line: print(f"  {line}", file=sys.stderr))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {name} is not written, and begins again") from None
        folder.write(arguments.out, {f"{name}.yaml": terms.dump(made).encode()})
        print(arguments.out / f"{name}.yaml")
    return OK
