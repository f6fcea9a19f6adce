"""The command line of `python -m analysis`: arguments and exit codes only. Heavy modules are imported after parsing.

Exit codes: 0 ok, 1 error, 2 bad arguments or runs that cannot be compared, 3 a condition failed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from cbsim.cli.arguments import Parser, a_path, guarded
from cbsim.errors import USAGE

EXAMPLES = {
    "report": "runs/one runs/other --out reports/mine",
    "compare": "runs/one runs/other --fail-if 'tpot.p50>+5%'",
    "client": "runs/served profile_export.jsonl --out reports/served",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. A user's mistake is one message on stderr, never a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(args)
    arguments.line = shlex.join(["python", "-m", "analysis", *args])
    return guarded("analysis", arguments.command, lambda: _dispatch(arguments), run_error=USAGE)


def _dispatch(arguments: argparse.Namespace) -> int:
    from analysis.cli import commands

    run = {"report": commands.report, "compare": commands.compare, "client": commands.client}[arguments.command]
    return run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m analysis",
        description="Compare run directories, simulated or measured, and draw them.",
        epilog="Exit status: 0 ok, 1 error, 2 bad arguments or runs that cannot be compared, 3 a condition failed.",
        example=f"python -m analysis report {EXAMPLES['report']}",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> Parser:
        made = commands.add_parser(name, help=text, example=f"python -m analysis {name} {EXAMPLES[name]}")
        made.add_argument("--out", type=a_path, metavar="DIR", help="folder of the report: Markdown, a page, figures")
        return made

    _report_arguments(command("report", "figures (PNG, SVG), report.md and report.html of runs, a sweep, a capacity"))
    _compare_arguments(command("compare", "how run B differs from A; of a simulated and a measured run the errors"))
    client = command("client", "what clients of a served session measured, beside what its server did")
    client.add_argument("run", type=a_path, metavar="RUN", help="the run directory of the session")
    client.add_argument(
        "files", nargs="+", type=a_path, metavar="FILE", help="written by aiperf, vllm bench serve or GuideLLM"
    )
    client.add_argument("--json", action="store_true", help="print one JSON object, times in the client's seconds")
    return parser


def _report_arguments(report: argparse.ArgumentParser) -> None:
    report.description = (
        "PATH is one of: run directories, of one workload or of a sweep (without --out their tables are printed); "
        "NAME.parquet, which `cbsim sweep` writes; a file of what `cbsim capacity --json` prints; a folder that "
        "`cbengine predict` writes, with validation/CASE/{measured,simulated}. Of all but run directories the report "
        "goes to PATH without its ending, or to PATH/report."
    )
    report.add_argument("paths", nargs="+", type=a_path, metavar="PATH", help="what the report is of")
    report.add_argument("--title", default="", metavar="TEXT", help="of the report (the name of what it is of)")
    sweep = report.add_argument_group("of a sweep")
    sweep.add_argument("--metric", action="append", default=[], metavar="M", help="drawn, e.g. ttft.p99 (repeatable)")
    sweep.add_argument(
        "--slo", action="append", default=[], metavar="COND", help="a limit, e.g. 'ttft.p99<=2s' (repeatable)"
    )
    sweep.add_argument("--x", metavar="FIELD", help="the field on x at first (the one of most numbers)")
    predictions = report.add_argument_group("of predictions")
    predictions.add_argument("--check", action="store_true", help="exit 3 if a bar is missed or a run does not replay")


def _compare_arguments(compare: argparse.ArgumentParser) -> None:
    compare.add_argument("first", type=a_path, metavar="A", help="a run directory, simulated or measured")
    compare.add_argument("second", type=a_path, metavar="B", help="one of the same workload")
    compare.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="COND",
        help="exit 3 if this holds of the change from A to B, or of the error of the simulated run, e.g. "
        "'tpot.p50>+5%%', 'makespan>+-3%%' (repeatable)",
    )
    compare.add_argument(
        "--sure", action="store_true", help="a condition holds only if the whole interval lies beyond its bound"
    )
    compare.add_argument("--all", action="store_true", help="every metric, not only the main ones")
