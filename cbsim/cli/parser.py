"""The commands of `python -m cbsim` and their arguments. Nothing heavy is imported before a command is known.

Exit codes: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cbsim.cli import many_runs, measured, sessions
from cbsim.cli.arguments import Parser, a_path, common_options, option, parser_of, run_arguments, run_verb, verb, whole
from cbsim.cli.many_runs import a_shard, store_arguments
from cbsim.live import ORIGINALS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    return run_verb("cbsim", _parser(), VERBS, argv)


def _parser() -> Parser:
    about = "Simulate continuous batching of LLM requests: scheduling, KV blocks, CPU and GPU in overlap."
    status = "Exit status: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed, 130 interrupted."
    return parser_of("cbsim", about, status, VERBS)


@verb("sweep", "run a scenario many times over axes of its fields", "sweep.yaml --jobs 4")
def _sweep_arguments(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument("file", type=a_path, metavar="FILE", help="a sweep file: a scenario and the axes of its fields")
    store_arguments(sweep)
    sweep.add_argument("--shard", type=a_shard, default=(1, 1), metavar="I/N", help="every N-th point from the I-th on")
    option(sweep, "--json", help="print one object: the points with all their metrics")
    option(sweep, "--quiet", help="print nothing but the path of the table")


@verb("conformance", "compare the policies with traces of the real schedulers", "tests/golden/transformers")
def _conformance_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", type=a_path, metavar="PATH", help="a trace, or a folder of traces")
    live = parser.add_argument_group("with the package that is installed")
    live.add_argument("--live", choices=ORIGINALS, help="record random workloads with it, and compare them at once")
    live.add_argument("--count", type=whole(1, 1_000_000), default=20, metavar="N", help="how many (20)")
    live.add_argument("--seed", type=whole(0, 1 << 62), default=0, metavar="S", help="number of the first (0)")
    live.add_argument("--workload", type=a_path, metavar="FILE", help="this one instead")
    live.add_argument("--out", type=a_path, metavar="DIR", help="keep workloads and traces here")


@verb(
    "occupancy",
    "what the KV cache of recorded runs held: used, reserved for later, never used, scattered, free",
    "runs/20261122T120000Z-fragmentation-sync-92a9494b --json",
)
def _occupancy_arguments(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "runs")
    option(parser, "--json", help="print one object: run -> steps -> shares")


@verb(
    "bench",
    "measure the simulator: seconds, steps, requests, peak memory a case",
    "decode_64 --json",
    act="cbsim.bench:bench",
)
def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases to run (all but million)")
    option(parser, "--json", help="print one JSON object, a case a key")


@verb(
    "replan",
    "derive the plans of recorded runs again: identical, or the difference",
    "runs/20261122T120000Z-8k_b32-async-92a9494b",
)
def _replan_arguments(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "runs")


@verb("schema", "write the JSON schemas of scenario files, for editors", "--out schemas")
def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--out", default=Path("schemas"), help="folder (schemas)")


@verb(
    "run",
    "simulate a scenario and write a run directory a loop",
    "8k_b32 --loop async --set workload.requests=16 --check 'gpu_active>=99%'",
)
def _run_arguments(parser: argparse.ArgumentParser) -> None:
    run_arguments(parser)
    shown = "processes for servers of a fleet whose router looks at none (1)"
    parser.add_argument("--jobs", type=many_runs.jobs, default=1, metavar="N", help=shown)


LIST = verb("list", "schedulers, cost models, hardware, models, scenarios", "", act="cbsim.cli.commands:catalogue")
SEARCHED = (
    many_runs.capacity_arguments,
    many_runs.contrast_arguments,
    many_runs.pareto_arguments,
    many_runs.tune_arguments,
    many_runs.recommend_arguments,
)
RECORDED = (_conformance_arguments, _replan_arguments, _occupancy_arguments, _schema_arguments, LIST(common_options))
OWN = (measured.measure_arguments, measured.fit_arguments)
MEASURED = (measured.score_arguments, measured.points_arguments, measured.tables_arguments)
SERVED = (sessions.serve_arguments, sessions.route_arguments, sessions.drive_arguments, _bench_arguments)
VERBS = (_run_arguments, _sweep_arguments, *SEARCHED, *RECORDED, *OWN, *MEASURED, *SERVED)
