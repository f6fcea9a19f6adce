"""The command lines about published measurements: `score-points` predicts them, `calibrate-terms` learns from them."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path

from cbsim.cli.arguments import a_path
from cbsim.cli.many_runs import executor, jobs, store_arguments
from cbsim.cli.where import where_argument, where_words
from cbsim.server.status import ERROR, OK

TERMS = ("vllm-dense", "trtllm-dense", "vllm-experts")


def points_arguments(parser: argparse.ArgumentParser) -> None:
    where_argument(parser, "only points whose columns have these values")
    _data_argument(parser)
    store_arguments(parser)
    parser.add_argument("--out", type=a_path, metavar="DIR", help="also write report.md and figures to this folder")
    parser.add_argument("--json", action="store_true", help="print the numbers as one object instead of tables")


def terms_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", choices=[*TERMS], metavar="NAME", help=f"of {', '.join(TERMS)} (all)")
    _data_argument(parser)
    parser.add_argument("--jobs", type=jobs, metavar="N", help="processes (as many as there are cores)")
    parser.add_argument(
        "--out", type=a_path, default=Path("scenarios/terms"), metavar="DIR", help="folder (scenarios/terms)"
    )


def _data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=a_path, metavar="DIR", help="folder of measured.csv[.gz] (aiconfigurator_silicon of the data)"
    )


def score_points(arguments: argparse.Namespace) -> int:
    """Predict the points of a folder, and say how far off that is; 1 if a run failed."""
    from cbsim.cli.commands import answer
    from cbsim.draw import folder
    from cbsim.proof.points import command, published

    place = published.folder(arguments.data)
    points = published.read(place, arguments.where)
    if arguments.out is not None:  # before the work, not after it
        folder.check(arguments.out)
        folder.write(arguments.out, {})
    try:
        study, complete = command.run(place, points, executor(arguments), arguments.store, silent=arguments.json)
    except KeyboardInterrupt:
        print("cbsim: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return ERROR
    words = ["score-points", *where_words(arguments.where)]
    words += ["--data", str(arguments.data)] if arguments.data else []
    answer(study, arguments.out, words, "simulated against published measurements", as_json=arguments.json)
    return OK if complete else ERROR


def calibrate_terms(arguments: argparse.Namespace) -> int:
    """Calibrate terms on the open points, and write them where scenarios find them."""
    from cbsim.draw import folder
    from cbsim.proof.points import calibration, published
    from cbsim.scenario import terms
    from cbsim.sweeps.processes import Processes

    points = published.read(published.folder(arguments.data))
    folder.write(arguments.out, {})  # before the work, not after it
    for name in arguments.names or TERMS:
        print(f"{name}:", file=sys.stderr)
        try:
            with closing(Processes(arguments.jobs or os.cpu_count() or 1)) as hands:
                made = calibration.calibrate(name, points, hands, lambda text: print(f"  {text}", file=sys.stderr))
        except KeyboardInterrupt:
            print(f"cbsim: interrupted; {name} is not written, and begins again", file=sys.stderr)
            return ERROR
        folder.write(arguments.out, {f"{name}.yaml": terms.dump(made).encode()})
        print(arguments.out / f"{name}.yaml")
    return OK
