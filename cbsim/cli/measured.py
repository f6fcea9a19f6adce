"""The commands about published and recorded measurements: `score`, `score-points` and `calibrate-terms`."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from cbsim.cli.arguments import a_path, answer, common_options, option
from cbsim.cli.many_runs import executor, jobs, store_arguments
from cbsim.errors import ERROR, OK, ScenarioError

TERMS = ("vllm-dense", "trtllm-dense", "vllm-experts")


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


def points_arguments(parser: argparse.ArgumentParser) -> None:
    where_argument(parser, "only points whose columns have these values")
    _data_argument(parser)
    store_arguments(parser)
    common_options(parser, "--out", "--json")


def terms_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", choices=[*TERMS], metavar="NAME", help=f"of {', '.join(TERMS)} (all)")
    _data_argument(parser)
    parser.add_argument("--jobs", type=jobs, metavar="N", help="processes (as many as there are cores)")
    option(parser, "--out", default=Path("scenarios/terms"), help="folder (scenarios/terms)")


def _data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=a_path, metavar="DIR", help="folder of measured.csv[.gz] (aiconfigurator_silicon of the data)"
    )


def where_argument(parser: argparse.ArgumentParser, about: str) -> None:
    """Values by field; none by default."""
    parser.add_argument("--where", type=_values, action=_Joined, default={}, metavar="FIELD=VALUE,...", help=about)


class _Joined(argparse.Action):
    """Given several times, all hold."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        before = getattr(namespace, self.dest)
        twice = sorted(before.keys() & values.keys())
        if twice:
            parser.error(f"argument --where: {twice[0]} is given twice")
        setattr(namespace, self.dest, before | values)


def _values(text: str) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for part in text.split(","):
        field, equal, value = (word.strip() for word in part.partition("="))
        if not (equal and field) or field in chosen:
            raise argparse.ArgumentTypeError(f"{text!r}: expected FIELD=VALUE,FIELD=VALUE, each field once")
        chosen[field] = value
    return chosen


def score(arguments: argparse.Namespace) -> int:
    """Replay a recorded run, or all of a folder of request logs, and print how far off the simulator is."""
    from cbsim.draw import folder
    from cbsim.measured.recorded import verdict as validation
    from cbsim.measured.request_logs import log

    out: Path | None = arguments.out
    if out is None and not arguments.json:
        out = Path("runs") / "score" / arguments.case.resolve().name
    if out is not None:
        folder.check(out)  # before the work, not after it
    if log.is_one(arguments.case):
        return _score_logs(arguments, out)
    if arguments.where:
        raise ScenarioError(f"--where: chooses runs of request logs; {arguments.case} holds no {log.REQUESTS}")
    validated = validation.validate(
        arguments.case,
        pack=arguments.data,
        hardware=arguments.hardware,
        overrides=arguments.set,
        ablate=arguments.ablate,
    )
    return answer(validation.study(validated), arguments, "simulated against a recorded run", out)


def _score_logs(arguments: argparse.Namespace, out: Path | None) -> int:
    from cbsim.measured.request_logs import log, verdict

    for name in ("data", "hardware", "ablate"):
        if getattr(arguments, name):
            raise ScenarioError(f"--{name}: is for a case with config.json; {arguments.case} holds {log.REQUESTS}")
    made = verdict.study(arguments.case, arguments.where, arguments.set)
    return answer(made, arguments, "simulated against recorded runs", out)


def score_points(arguments: argparse.Namespace) -> int:
    """Predict the points of a folder, and print how far off that is; 1 if a run failed."""
    from cbsim.draw import folder
    from cbsim.measured.points import published, report

    place = published.folder(arguments.data)
    points = published.read(place, arguments.where)
    if arguments.out is not None:  # before the work, not after it
        folder.check(arguments.out)
        folder.write(arguments.out, {})
    study, complete = report.run(place, points, executor(arguments), arguments.store, silent=arguments.json)
    answer(study, arguments, "simulated against published measurements")
    return OK if complete else ERROR


def calibrate_terms(arguments: argparse.Namespace) -> int:
    """Calibrate terms on the open points, and write them where scenarios find them."""
    from cbsim.draw import folder
    from cbsim.measured.points import calibration, published
    from cbsim.scenario import terms
    from cbsim.sweeps.executor import Processes

    points = published.read(published.folder(arguments.data))
    folder.write(arguments.out, {})  # before the work, not after it
    for name in arguments.names or TERMS:
        print(f"{name}:", file=sys.stderr)
        try:
            with closing(Processes(arguments.jobs or os.cpu_count() or 1)) as workers:
                made = calibration.calibrate(name, points, workers, lambda text: print(f"  {text}", file=sys.stderr))
        except KeyboardInterrupt:
            print(f"cbsim: interrupted; {name} is not written, and begins again", file=sys.stderr)
            return ERROR
        folder.write(arguments.out, {f"{name}.yaml": terms.dump(made).encode()})
        print(arguments.out / f"{name}.yaml")
    return OK
