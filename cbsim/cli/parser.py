"""The commands of `python -m cbsim` and their arguments. Nothing heavy is imported before a command is known.

Exit codes: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cbsim.cli import many_runs, measured, sessions
from cbsim.cli.arguments import Parser, Verb, a_path, common_options, option, parser_of, run_arguments, run_verb
from cbsim.cli.many_runs import a_shard, capacity_arguments, store_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    return run_verb("cbsim", _parser(), VERBS, argv)


def _parser() -> Parser:
    about = "Simulate continuous batching of LLM requests: scheduling, KV blocks, CPU and GPU in overlap."
    status = "Exit status: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed."
    return parser_of("cbsim", about, status, VERBS)


def _sweep_arguments(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument("file", type=a_path, metavar="FILE", help="a sweep file: a scenario and the axes of its fields")
    store_arguments(sweep)
    part = "only every N-th point, from the I-th on"
    sweep.add_argument("--shard", type=a_shard, default=(1, 1), metavar="I/N", help=part)
    option(sweep, "--json", help="print one object: the points with all their metrics")
    option(sweep, "--quiet", help="print nothing but the path of the table")


def _conformance_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=a_path, metavar="PATH", help="a trace, or a folder of traces")


def _occupancy_arguments(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "runs")
    option(parser, "--json", help="print one object: run -> steps -> shares")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases to run (all but million)")
    option(parser, "--json", help="print one JSON object, a case a key")


VERBS = (
    Verb(
        "run",
        "simulate a scenario and write a run directory a loop",
        "8k_b32 --loop async --set workload.requests=16 --check 'gpu_active>=99%'",
        run_arguments,
    ),
    Verb("sweep", "run a scenario many times over axes of its fields", "sweep.yaml --jobs 4", _sweep_arguments),
    Verb(
        "capacity",
        "how much load a server holds within conditions: an interval, and what binds",
        "rates --loop async --slo 'ttft.p99<=2s' --slo 'tpot.p99<=50ms'",
        capacity_arguments,
        "cbsim.cli.many_runs:capacity",
    ),
    Verb(
        "contrast",
        "what a field of a sweep changes, by paired replicates",
        "sweeps/sweep.parquet --by loop --metric goodput",
        many_runs.contrast_arguments,
        "cbsim.cli.many_runs:contrast",
    ),
    Verb(
        "pareto",
        "the points of a sweep that no other point dominates in two metrics",
        "sweeps/sweep.parquet --where 'ttft.p99<=2s'",
        many_runs.pareto_arguments,
        "cbsim.cli.many_runs:pareto",
    ),
    Verb(
        "tune",
        "find the best settings of a scenario, and how sure that is",
        "rates --knob scheduler.max_num_seqs=16..128 --maximise goodput --slo 'ttft.p99<=2s'",
        many_runs.tune_arguments,
        "cbsim.cli.many_runs:tune",
    ),
    Verb(
        "conformance",
        "compare the policies with traces of the real schedulers",
        "tests/golden/transformers",
        _conformance_arguments,
    ),
    Verb(
        "replan",
        "derive the plans of recorded runs again: identical, or the difference",
        "runs/20261122T120000Z-8k_b32-async-92a9494b",
        lambda parser: common_options(parser, "runs"),
    ),
    Verb(
        "occupancy",
        "what the KV cache of recorded runs held: used, reserved for later, never used, scattered, free",
        "runs/20261122T120000Z-fragmentation-sync-92a9494b --json",
        _occupancy_arguments,
    ),
    Verb(
        "schema",
        "write the JSON schemas of scenario files, for editors",
        "--out schemas",
        lambda parser: option(parser, "--out", default=Path("schemas"), help="folder (schemas)"),
    ),
    Verb(
        "list",
        "schedulers, cost models, hardware, models, scenarios",
        "",
        common_options,
        "cbsim.cli.commands:catalogue",
    ),
    Verb(
        "score",
        "replay a recorded vLLM run and print how far the simulator is off",
        "cases/RTX4090__Llama-3.1-8B --data . --json",
        measured.score_arguments,
        "cbsim.cli.measured:score",
    ),
    Verb(
        "score-points",
        "predict published measurements of whole servers, and print how far off that is",
        "--where system=h200_sxm,backend=vllm --json",
        measured.points_arguments,
        "cbsim.cli.measured:score_points",
    ),
    Verb(
        "calibrate-terms",
        "calibrate the terms that kernel tables leave out on published measurements",
        "vllm-dense",
        measured.terms_arguments,
        "cbsim.cli.measured:calibrate_terms",
    ),
    Verb(
        "serve",
        "a simulated server for real clients: an OpenAI-compatible endpoint",
        "8k_b32 --clock scale=10 --port 8000",
        sessions.serve_arguments,
    ),
    Verb(
        "drive",
        "run an asyncio client against a simulated server in virtual time",
        "8k_b32 -- my_client:main",
        sessions.drive_arguments,
    ),
    Verb(
        "bench",
        "measure the simulator: seconds, steps, requests, peak memory a case",
        "decode_64 --json",
        _bench_arguments,
        "cbsim.bench:bench",
    ),
)
