"""The command lines about published measurements: `score-points` predicts them, `calibrate-terms` learns from them."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import closing
from pathlib import Path

from cbsim.cli.arguments import a_path
from cbsim.cli.many_runs import executor, store_arguments
from cbsim.server.status import OK

TERMS = ("vllm-dense", "trtllm-dense", "vllm-experts")


def points_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        type=_where,
        default={},
        metavar="COLUMN=VALUE,...",
        help="only points whose columns have these values",
    )
    _data_argument(parser)
    store_arguments(parser)
    parser.add_argument("--out", type=a_path, metavar="DIR", help="also write report.md and figures to this folder")
    parser.add_argument("--json", action="store_true", help="print the numbers as one object instead of tables")


def terms_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", choices=[*TERMS], metavar="NAME", help=f"of {', '.join(TERMS)} (all)")
    _data_argument(parser)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument(
        "--out", type=a_path, default=Path("scenarios/terms"), metavar="DIR", help="folder (scenarios/terms)"
    )


def _data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=a_path, metavar="DIR", help="folder of measured.csv[.gz] (aiconfigurator_silicon of the data)"
    )


def _where(text: str) -> dict[str, str]:
    chosen = {}
    for part in text.split(","):
        column, equal, value = part.partition("=")
        if not (equal and column.strip()) or column.strip() in chosen:
            raise argparse.ArgumentTypeError(f"{text!r}: expected COLUMN=VALUE,COLUMN=VALUE, each column once")
        chosen[column.strip()] = value.strip()
    return chosen


def score_points(arguments: argparse.Namespace) -> int:
    """Predict the points of a folder, and say how far off that is."""
    from cbsim.proof.points import command

    words = ["score-points"]
    if arguments.where:
        words += ["--where", ",".join(f"{column}={value}" for column, value in arguments.where.items())]
    words += ["--data", str(arguments.data)] if arguments.data else []
    words += ["--out", str(arguments.out)] if arguments.out else []
    said = shlex.join(["python", "-m", "cbsim", *words])
    options = command.PointsOptions(
        arguments.where, arguments.data, arguments.store, arguments.out, arguments.json, said
    )
    return command.run(options, executor(arguments))


def calibrate_terms(arguments: argparse.Namespace) -> int:
    """Calibrate terms on the open points, and write them where scenarios find them."""
    from cbsim.proof.points import calibration, published
    from cbsim.results.directory import write_whole
    from cbsim.scenario import terms
    from cbsim.sweeps.processes import Processes

    points = published.read(published.folder(arguments.data))
    for name in arguments.names or TERMS:
        with closing(Processes(arguments.jobs)) as hands:
            print(f"{name}:", file=sys.stderr)
            made = calibration.calibrate(name, points, hands, lambda text: print(f"  {text}", file=sys.stderr))
        path = arguments.out / f"{name}.yaml"
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_whole(path, terms.dump(made).encode())
        print(path)
    return OK
