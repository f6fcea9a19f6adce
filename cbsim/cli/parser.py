"""`python -m cbsim`: arguments and exit codes only. Nothing heavy is imported before a command is known.

Exit codes: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from cbsim.cli.arguments import ERROR, USAGE, Parser, guarded, run_arguments, run_options

STUDIES = ("hopper", "chunks", "schedulers")  # modules of cbsim.proof.studies


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    arguments = _parser().parse_args(argv)
    return guarded("cbsim", arguments.command, lambda: _dispatch(arguments), _status)


def _status(error: Exception) -> int | None:
    """Exit status of an error that a user can cause; None for one that only we can."""
    from cbsim.results.checks import CheckError
    from cbsim.results.directory import RunError
    from cbsim.scenario.fields import ScenarioError

    if isinstance(error, ScenarioError | CheckError):
        return USAGE
    return ERROR if isinstance(error, RunError) else None


def _dispatch(arguments: argparse.Namespace) -> int:
    from cbsim.cli import commands

    acts: dict[str, Callable[[], int]] = {
        "run": lambda: commands.run(run_options(arguments)),
        "conformance": lambda: commands.conformance(arguments.paths),
        "replay": lambda: commands.replay(arguments.runs),
        "validate": lambda: commands.validate(arguments),
        "study": lambda: commands.study(arguments.name, arguments.out, as_json=arguments.json),
        "cache-curve": lambda: commands.cache_curve(
            arguments.trace, arguments.capacities, arguments.block_tokens, arguments.json
        ),
        "schema": lambda: commands.schema(arguments.out),
        "list": commands.catalogue,
        "bench": lambda: _bench(arguments),
    }
    return acts[arguments.command]()


def _bench(arguments: argparse.Namespace) -> int:
    from cbsim.proof import bench

    return bench.bench(arguments.cases, as_json=arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cbsim",
        description="Simulate continuous batching of LLM requests: scheduling, KV blocks, CPU and GPU in overlap.",
        epilog="Exit status: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run_arguments(commands.add_parser("run", help="simulate a scenario and write a run directory a loop"))
    conformance = commands.add_parser("conformance", help="compare the policies with traces of the real schedulers")
    conformance.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a trace, or a folder of traces")
    replay = commands.add_parser("replay", help="derive the plans of recorded runs again: identical, or the difference")
    replay.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    schema = commands.add_parser("schema", help="write the JSON schemas of scenario files, for editors")
    schema.add_argument("--out", type=Path, default=Path("schemas"), metavar="DIR", help="folder (schemas)")
    commands.add_parser("list", help="schedulers, cost models, hardware, models, scenarios")
    curve = commands.add_parser("cache-curve", help="prefix-cache hit rate of a Mooncake trace by cache capacity")
    curve.add_argument("trace", metavar="TRACE", help="a Mooncake trace: a path, or its name in the data folder")
    curve.add_argument("--capacities", metavar="N,N", help="rising, in tokens, such as 1e4,1e5 (those of the paper)")
    curve.add_argument("--block-tokens", type=int, default=512, metavar="N", help="of a cached block (512)")
    curve.add_argument("--json", action="store_true", help="print one object; capacity null is the infinite cache")
    validate = commands.add_parser("validate", help="replay a recorded vLLM run and print how far the simulator is off")
    validate.add_argument("case", type=Path, metavar="CASE", help="folder: config.json, meta.json, requests.jsonl, ...")
    validate.add_argument("--data", type=Path, metavar="DIR", help="pack of workloads and profiles (CASE/../..)")
    validate.add_argument("--hardware", metavar="NAME", help="data sheet of the case's GPU: a name or a file")
    validate.add_argument("--ablate", action="store_true", help="repeat it without one part of the model at a time")
    validate.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override any field of the case's scenario"
    )
    validate.add_argument(
        "--out", type=Path, metavar="DIR", help="report.md and figures (runs/validation/<CASE>; none with --json)"
    )
    validate.add_argument("--json", action="store_true", help="print the numbers as one object instead of tables")
    study = commands.add_parser("study", help="answer a question by many runs, or against published numbers")
    study.add_argument("name", choices=STUDIES, metavar="NAME", help=f"one of {', '.join(STUDIES)}")
    study.add_argument("--out", type=Path, metavar="DIR", help="also write report.md and figures to this folder")
    study.add_argument("--json", action="store_true", help="print the numbers as one object instead of tables")
    bench = commands.add_parser("bench", help="measure the simulator: seconds, steps, requests, peak memory a case")
    bench.add_argument("cases", nargs="*", metavar="CASE", help="cases to run (all)")
    bench.add_argument("--json", action="store_true", help="print one JSON object, a case a key")
    return parser
