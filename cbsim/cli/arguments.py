"""The common parts of the simulator's, engine's and analysis' command lines: commands, options, errors, statuses."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from cbsim.errors import ERROR, INTERRUPTED, OK, USAGE, Interrupted, RunError, UserError
from cbsim.files import PATH_BOUND, real, too_long

if TYPE_CHECKING:
    from cbsim.draw.report import Report
    from cbsim.runs.run_command import RunOptions

N = TypeVar("N", int, float)
T = TypeVar("T")
EXTRAS = {  # package -> the extra of this project that installs it
    **dict.fromkeys(("starlette", "uvicorn", "httptools", "prometheus_client", "tokenizers", "httpx"), "serve"),
    **dict.fromkeys(("zmq", "msgpack"), "kv-events"),
    **dict.fromkeys(("torch", "transformers", "safetensors", "triton"), "engine"),
    "ray": "ray",
    "openai": "measure",
}
READERS = ("replan", "occupancy", "fit")  # commands to which a run that cannot be read is a mistake of their arguments


class Verb(NamedTuple):
    """A command of a program: its line in the help, an example of its arguments, and its function. `act` is
    `module:function`, by default the function of that name in the module of `arguments`, or in the program's
    `cli.commands`, which is imported when the command is run. It takes the parsed arguments, with the command as a
    shell line in `line`, and returns the exit status.
    """

    name: str
    about: str
    example: str
    arguments: Callable[[Parser], None]
    act: str = ""


def verb(name: str, about: str, example: str, act: str = "") -> Callable[[Callable[[Parser], None]], Verb]:
    """Return a decorator that makes a command of the function that adds its arguments."""
    return lambda arguments: Verb(name, about, example, arguments, act)


def parser_of(program: str, description: str, epilog: str, verbs: Sequence[Verb]) -> Parser:
    example = f"python -m {program} {verbs[0].name} {verbs[0].example}"
    parser = Parser(prog=f"python -m {program}", description=description, epilog=epilog, example=example)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for verb in verbs:
        shown = f"python -m {program} {verb.name} {verb.example}".rstrip()
        command = commands.add_parser(verb.name, help=verb.about, example=shown)
        verb.arguments(command)
        command.set_defaults(refuse=command.error)
    return parser


def run_verb(
    program: str, parser: Parser, verbs: Sequence[Verb], argv: Sequence[str] | None, run_error: int = ERROR
) -> int:
    """Parse `argv` (that of the process if None) and run the command; returns the exit status. An error of user or
    system is one message on stderr, never a traceback. `run_error` is the status of a RunError.
    """
    parts = list(sys.argv[1:] if argv is None else argv)
    arguments, unknown = parser.parse_known_args(parts)
    if unknown:
        arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of its command
    arguments.line = shlex.join(["python", "-m", program, *parts])
    chosen = next(verb for verb in verbs if verb.name == arguments.command)
    module, _, function = (chosen.act or f":{chosen.name.replace('-', '_')}").partition(":")
    _prepare_process()
    if checks := getattr(arguments, "check_policy", False):
        from cbsim.policy.kind import CHECK_POLICY

        os.environ[CHECK_POLICY] = "1"  # which processes that make runs inherit
    try:
        found = getattr(import_module(module or chosen.arguments.__module__), function, None)
        code = int((found or getattr(import_module(f"{program}.cli.commands"), function))(arguments))
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, Exception) as error:
        known = _explained(error, chosen.name, USAGE if chosen.name in READERS else run_error)
        if known is None:
            raise
        message, status = known
        if message:
            print(f"{program}: {brief(message)}", file=sys.stderr)
        return status
    finally:
        if checks:
            os.environ.pop(CHECK_POLICY)


def _prepare_process() -> None:
    """Make the streams writable, and SIGTERM and SIGHUP what Ctrl-C is."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the process
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name that the terminal cannot show is no reason to fail
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        lossy = io.BufferedWriter(_Dropped(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(lossy, sys.__stderr__.encoding, "backslashreplace", line_buffering=True)
    with suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores the latter
                signal.signal(number, signal.default_int_handler)


class _Dropped(io.FileIO):
    """A file that drops what it cannot take: no work is lost for a message that cannot be written."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(data)


class Parser(argparse.ArgumentParser):
    """A parser whose errors exit with 2; those of one argument show no usage. Its help ends with an `example`."""

    def __init__(self, *names: Any, example: str = "", **options: Any) -> None:
        super().__init__(*names, **options)
        self.example = example

    def format_help(self) -> str:
        example = f"\nexample: {self.example}\n" if self.example else ""
        return super().format_help() + example

    def error(self, message: str) -> NoReturn:
        usage = "" if message.startswith("argument ") else self.format_usage()
        self.exit(USAGE, f"{self.prog}: {brief(message)}\n{usage}")


def brief(message: str) -> str:
    """Return a message with words shortened that are too long to be typed or to be a path."""
    return re.sub(r"\S{1001,}", lambda word: f"{word[0][:40]}...", message)


def _explained(error: BaseException, command: str, run_error: int) -> tuple[str, int] | None:
    """Return message and exit status of an error that a user or the system can cause; None for a defect of ours."""
    match error:
        case KeyboardInterrupt():
            return str(error) if isinstance(error, Interrupted) else "interrupted", INTERRUPTED
        case BrokenPipeError():
            _drop_stdout()
            return "", ERROR
        case OSError():
            _drop_stdout()
            return f"{error.filename or 'output cannot be written'}: {error.strerror or error}", ERROR
        case MemoryError():
            needed = f": {error}" if str(error) else ""
            return f"{command}: out of memory in {_innermost(error)}{needed}", ERROR
        case OverflowError():
            return f"{command}: a number is too large for a run: {error}", USAGE
        case ModuleNotFoundError() if (package := (error.name or "").partition(".")[0]) in EXTRAS:
            return f"{package} is not installed: pip install -e '.[{EXTRAS[package]}]'", USAGE
        case UserError():
            return str(error), run_error if isinstance(error, RunError) else error.exit_status
    return None


def _drop_stdout() -> None:
    """Discard stdout's buffer: it can be written nowhere, and Python would report that at exit."""
    with suppress(io.UnsupportedOperation):  # no file: a caller that captures stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _innermost(error: BaseException) -> str:
    """Return the innermost function of ours in the traceback, such as cbsim.workload.generators._synthetic."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" for frame in frames]
    return next((name for name in reversed(names) if name.startswith(("cbsim.", "cbengine.", "analysis."))), names[-1])


def within(value: str, parsed: T, holds: bool, bound: str) -> T:
    """Return what the value of an option was parsed to, if its bound holds. Raises ArgumentTypeError."""
    if not holds:
        raise argparse.ArgumentTypeError(f"{value!r}: expected {bound}")
    return parsed


def a_path(value: str) -> Path:
    """Parse a path of the command line; the error for none, or one too long to be looked up, names the option."""
    if not value:
        raise argparse.ArgumentTypeError("got '', expected a path")
    if too_long(value):
        raise argparse.ArgumentTypeError(f"got {value[:40]!r}..., {PATH_BOUND}")
    return Path(value) if Path(value).parts else Path.cwd()  # whose name messages have, and not `.`


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number between two bounds."""

    def parse(value: str) -> int:
        number = int(value) if re.fullmatch(r"[0-9]{1,19}", value) else -1
        return within(value, number, least <= number <= most, f"a whole number from {least} to {most:,}")

    return parse


SET: dict[str, Any] = {"action": "append", "dest": "set", "default": []}  # --seed and --loop are short for it
OPTIONS: dict[str, dict[str, Any]] = {  # declared once; a command may change parts of a declaration
    "scenario": {"help": "a scenario file, or the name of one that comes with the project"},
    "runs": {"nargs": "+", "type": a_path, "metavar": "RUN", "help": "a run directory"},
    "--set": SET | {"metavar": "FIELD=VALUE", "help": "override any field (repeatable; the last of a field counts)"},
    "table": {"type": a_path, "metavar": "TABLE", "help": "the .parquet file that a sweep wrote"},
    "--confidence": {"default": 0.95, "metavar": "P"},
    "--seed": SET | {"type": lambda n: f"seed={whole(0, 10**19 - 1)(n)}", "metavar": "N", "help": "of random numbers"},
    "--loop": SET | {"type": "loop.mode={}".format, "metavar": "MODE", "help": "sync, async, or both: two directories"},
    "--out": {"type": a_path, "metavar": "DIR", "help": "also write report.md, report.json and figures to this folder"},
    "--check": {"action": "append", "default": [], "metavar": "COND", "help": "e.g. 'ttft.p99<500ms' (repeatable)"},
    "--check-policy": {"action": "store_true", "help": "check everything of a scheduler of your own in every step"},
    "--with-terms": {"action": "store_true", "help": "the answer's interval counts those of the calibrated terms"},
    "--draws": {"type": whole(2, 1000), "metavar": "N", "help": "of terms, each of them answered (--with-terms: 8)"},
    "--json": {"action": "store_true", "help": "print the numbers as one object instead of tables"},
    "--quiet": {"action": "store_true", "help": "print nothing but where the results are"},
}


def option(parser: argparse._ActionsContainer, like: str, name: str = "", **changes: Any) -> None:
    """Add an argument of OPTIONS, or one like it called `name`, with `changes` to its declaration."""
    parser.add_argument(name or like, **OPTIONS[like] | changes)


def common_options(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        option(parser, name)


def run_options(arguments: argparse.Namespace, *more: str) -> RunOptions:
    """Return the options of a command that runs a scenario; `more` are parts to add to its line to run it again."""
    from cbsim.metrics import checks
    from cbsim.runs.run_command import RunOptions

    return RunOptions(
        scenario=arguments.scenario,
        overrides=arguments.set,
        out=arguments.out,
        window=arguments.trace_steps,
        span_s=arguments.window,
        conditions=checks.parse_all(arguments.check),
        as_json=arguments.json,
        quiet=arguments.quiet,
        line=" ".join([arguments.line, *([shlex.join(more)] if more else [])]),
    )


def run_arguments(parser: argparse.ArgumentParser) -> None:
    common_options(parser, "scenario", "--set")
    option(parser, "--out", default=Path("runs"), help="where run directories go (runs)")
    common_options(parser, "--seed", "--loop", "--check-policy")
    shown = "steps that the timeline shows (0:2000)"
    steps = _bounds(whole(0, sys.maxsize), str(sys.maxsize))
    parser.add_argument("--trace-steps", type=steps, default=(0, 2000), metavar="A:B", help=shown)
    counted = "latencies of requests arriving between these seconds only"
    seconds = _bounds(real, "inf")
    parser.add_argument("--window", type=seconds, metavar="A:B", help=counted)
    option(parser, "--check")
    option(parser, "--json", help="print one object: loop name -> that run's summary.json")
    option(parser, "--quiet", help="nothing but the run directories, a line each, and verdicts of --check")
    parser.set_defaults(line="")


def check_out(out: Path | None) -> None:
    """Raise RunError unless a report can be written to that folder. It is called before the work, not after it."""
    from cbsim.draw import folder

    if out is not None:
        folder.check(out)


def answer(report: Report, arguments: argparse.Namespace, kind: str, out: Path | None = None) -> int:
    """Print a report, or with `--json` its numbers, and write it to a folder: `out`, or that of `--out`."""
    from cbsim.draw import report as reports

    out = out or arguments.out
    print(json.dumps(report.data, indent=2, allow_nan=False) if arguments.json else reports.terminal(report))
    if out is not None:
        reports.write(replace(report, command=arguments.line, kind=kind), out)
        if not arguments.json:
            print(f"\nreport    {out / 'report.md'}")
    return OK


def _bounds(number: Callable[[str], N], most: str) -> Callable[[str], tuple[N, N]]:
    """Return the type of an option that takes `A:B`; either may be left out."""

    def parse(value: str) -> tuple[N, N]:
        low, colon, high = value.partition(":")
        first, last = number(low or "0"), number(high or most)
        return within(value, (first, last), bool(colon) and 0 <= first < last, "A:B with 0 <= A < B")

    return parse
