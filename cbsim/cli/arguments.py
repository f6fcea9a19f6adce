"""What the command lines of simulator and engine have in common: arguments of a run, errors, exit statuses."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cbsim.scenario.paths import PATH_BOUND, too_long
from cbsim.server.status import ERROR, USAGE

if TYPE_CHECKING:
    from cbsim.server.run_command import RunOptions

STUDIES = {  # modules of cbsim.proof.studies
    "hopper": "hopper",
    "chunks": "chunks",
    "schedulers": "which_scheduler",
    "swap_or_recompute": "swap_or_recompute",
    "fragmentation": "fragmentation",
    "landscape": "landscape",
    "schedulers_by_load": "schedulers_by_load",
    "async_map": "async_map",
    "capacity_theory": "capacity_theory",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong and how the command is used; exits 2. Its help ends with a complete `example`."""

    def __init__(self, *words: Any, example: str = "", **options: Any) -> None:
        super().__init__(*words, **options)
        self.example = example

    def format_help(self) -> str:
        example = f"\nexample: {self.example}\n" if self.example else ""
        return super().format_help() + example

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {brief(message)}\n{self.format_usage()}")


def brief(message: str) -> str:
    """A message without words so long that nobody wrote them, and no path can be."""
    return re.sub(r"\S{1001,}", lambda word: f"{word[0][:40]}...", message)


def renamed(module: str, names: Mapping[str, str], argv: Sequence[str] | None) -> bool:
    """Is this a command by its old name? Then its new one is said. `names` are new ones by old ones."""
    words = sys.argv[1:] if argv is None else argv
    new = names.get(words[0]) if words else None
    if new is not None:
        print(f"{module}: {words[0]} is now called {new}: python -m {module} {new}", file=sys.stderr)
    return new is not None


def guarded(program: str, command: str, act: Callable[[], int], status: Callable[[Exception], int | None]) -> int:
    """The exit status of `act`. What `status` knows to be a user's mistake or the system refuses is one message."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name that the terminal cannot show is no reason to fail

    def fail(message: str, code: int) -> int:
        print(f"{program}: {brief(message)}", file=sys.stderr)
        return code

    try:
        code = act()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return fail("interrupted", ERROR)
    except BrokenPipeError:
        _drop_stdout()
        return ERROR
    except OSError as error:
        _drop_stdout()
        what = f"{error.filename}" if error.filename else "output cannot be written"
        return fail(f"{what}: {error.strerror or error}", ERROR)
    except MemoryError as error:
        needed = f": {error}" if str(error) else ""
        return fail(f"{command}: out of memory in {_place(error)}{needed}", ERROR)
    except OverflowError as error:
        return fail(f"{command}: a number is too large for a run: {error}", USAGE)
    except Exception as error:
        known = status(error)
        if known is None:
            raise
        return fail(str(error), known)


def _drop_stdout() -> None:
    """What is left in its buffer can be written nowhere; Python would complain of it at exit."""
    with suppress(io.UnsupportedOperation):  # no file: a caller of ours that collects it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place(error: BaseException) -> str:
    """The innermost function of ours that was at work, such as cbsim.workload.generators._synthetic."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" for frame in frames]
    return next((name for name in reversed(names) if name.startswith(("cbsim.", "cbengine.", "analysis."))), names[-1])


def a_path(text: str) -> Path:
    """A path of the command line; the option is named if no system can look it up."""
    if too_long(text):
        raise argparse.ArgumentTypeError(f"got {text[:40]!r}..., {PATH_BOUND}")
    return Path(text)


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """What such arguments mean."""
    from cbsim.results import checks
    from cbsim.server.run_command import RunOptions

    overrides = list(arguments.set)
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    if arguments.loop is not None:
        overrides.append(f"loop.mode={arguments.loop}")
    return RunOptions(
        scenario=arguments.scenario,
        overrides=overrides,
        out=arguments.out,
        window=arguments.trace_steps,
        span_s=arguments.window,
        conditions=[checks.parse(text) for text in arguments.check],
        as_json=arguments.json,
        quiet=arguments.quiet,
    )


def run_arguments(run: argparse.ArgumentParser) -> None:
    """The arguments of a command that runs a scenario."""
    run.add_argument("scenario", help="a scenario file, or the name of one that comes with the project")
    run.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override any field (repeatable)"
    )
    run.add_argument("--out", type=a_path, default=Path("runs"), metavar="DIR", help="where run directories go (runs)")
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
    run.add_argument(
        "--quiet", action="store_true", help="nothing but the run directories, a line each, and verdicts of --check"
    )


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
