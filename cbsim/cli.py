"""`python -m cbsim`: arguments and exit codes only. Nothing heavy is imported before a command is known.

Exit codes: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from cbsim.runs import RunOptions

ERROR, USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    arguments = _parser().parse_args(argv)
    return guarded("cbsim", arguments.command, lambda: _dispatch(arguments), _status)


def guarded(program: str, command: str, act: Callable[[], int], status: Callable[[Exception], int | None]) -> int:
    """The exit status of `act`. What `status` knows to be a user's mistake or the system refuses is one message."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name that the terminal cannot show is no reason to fail

    def fail(message: str, code: int) -> int:
        print(f"{program}: {message}", file=sys.stderr)
        return code

    try:
        code = act()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return fail("interrupted", ERROR)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return fail(f"output cannot be written: {error.strerror or error}", ERROR)
    except (OverflowError, MemoryError) as error:
        return fail(f"{command}: a number is too large for a run: {error}", USAGE)
    except Exception as error:
        known = status(error)
        if known is None:
            raise
        return fail(str(error), known)


def _status(error: Exception) -> int | None:
    """Exit status of an error that a user can cause; None for one that only we can."""
    from cbsim.checks import CheckError
    from cbsim.fields import ScenarioError
    from cbsim.trace import RunError

    if isinstance(error, ScenarioError | CheckError):
        return USAGE
    return ERROR if isinstance(error, RunError) else None


def _dispatch(arguments: argparse.Namespace) -> int:
    from cbsim import commands

    if arguments.command == "run":
        return commands.run(run_options(arguments))
    if arguments.command == "conformance":
        return commands.conformance(arguments.paths)
    if arguments.command == "replay":
        return commands.replay(arguments.runs)
    if arguments.command == "schema":
        return commands.schema(arguments.out)
    if arguments.command == "list":
        return commands.catalogue()
    from cbsim import bench

    return bench.bench(arguments.cases, as_json=arguments.json)


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """What such arguments mean."""
    from cbsim import checks, runs

    overrides = list(arguments.set)
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    if arguments.loop is not None:
        overrides.append(f"loop.mode={arguments.loop}")
    return runs.RunOptions(
        scenario=arguments.scenario,
        overrides=overrides,
        out=arguments.out,
        window=arguments.trace_steps,
        span_s=arguments.window,
        conditions=[checks.parse(text) for text in arguments.check],
        as_json=arguments.json,
        quiet=arguments.quiet,
    )


class Parser(argparse.ArgumentParser):
    """Says what is wrong and how the command is used; exits 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n{self.format_usage()}")


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
    bench = commands.add_parser("bench", help="measure the simulator: seconds, steps, requests, peak memory a case")
    bench.add_argument("cases", nargs="*", metavar="CASE", help="cases to run (all)")
    bench.add_argument("--json", action="store_true", help="print one JSON object, a case a key")
    return parser


def run_arguments(run: argparse.ArgumentParser) -> None:
    """The arguments of a command that runs a scenario."""
    run.add_argument("scenario", help="a scenario file, or the name of one that comes with the project")
    run.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override any field (repeatable)"
    )
    run.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="where run directories go (runs)")
    run.add_argument("--seed", type=int, help="root of all random numbers")
    run.add_argument("--loop", choices=("sync", "async", "both"), help="serving loop; both writes two directories")
    run.add_argument(
        "--trace-steps",
        type=_steps,
        default=(0, 2000),
        metavar="A:B",
        help="steps that the timeline shows (0:2000)",
    )
    run.add_argument(
        "--window", type=_seconds, metavar="A:B", help="latencies of requests arriving between these seconds only"
    )
    run.add_argument("--check", action="append", default=[], metavar="COND", help="e.g. 'ttft.p99<500ms' (repeatable)")
    run.add_argument("--json", action="store_true", help="print one object: loop name -> that run's summary.json")
    run.add_argument("--quiet", action="store_true", help="no progress line and no table")


def _steps(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        first, last = int(low or 0), int(high) if high else sys.maxsize
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected A:B, two step numbers") from None
    if not colon or not 0 <= first < last:
        raise argparse.ArgumentTypeError(f"{text!r}: expected A:B with 0 <= A < B")
    return first, last


def _seconds(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        first, last = float(low or 0), float(high or "inf")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected A:B, two times in seconds") from None
    if not colon or not 0 <= first < last:
        raise argparse.ArgumentTypeError(f"{text!r}: expected A:B with 0 <= A < B")
    return first, last
