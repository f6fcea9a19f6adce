"""What the command lines that make many runs have in common: where runs are kept, and who makes them."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cbsim.cli.arguments import a_path

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
    """Who makes the runs. Raises ScenarioError if there is no such cluster."""
    if arguments.ray is not None:
        from cbsim.sweeps.ray_cluster import RayCluster

        return RayCluster(arguments.ray)
    from cbsim.sweeps.processes import Processes

    return Processes(arguments.jobs or os.cpu_count() or 1)


def jobs(text: str) -> int:
    """A number of processes."""
    from cbsim.sweeps.hands import MOST_JOBS

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
