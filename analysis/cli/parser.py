"""The command line of `python -m analysis`: arguments and exit codes only. Heavy modules are imported after parsing.

Exit codes: 0 ok, 1 error, 2 bad arguments or runs that cannot be compared, 3 a condition failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cbsim.cli.arguments import Parser, a_path, option, parser_of, run_verb, verb
from cbsim.errors import USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. A user's mistake is one message on stderr, never a traceback."""
    return run_verb("analysis", _parser(), VERBS, argv, run_error=USAGE)


def _parser() -> Parser:
    about = "Compare run directories, simulated or measured, and draw them."
    status = "Exit status: 0 ok, 1 error, 2 bad arguments or runs that cannot be compared, 3 a condition failed, "
    status += "130 interrupted."
    return parser_of("analysis", about, status, VERBS)


def _out_argument(parser: argparse.ArgumentParser) -> None:
    option(
        parser, "--out", help="folder of the report: Markdown, figures; with plotly (the extra `report`) a page, too"
    )


@verb(
    "report",
    "report.md and figures (PNG, SVG) of runs, a sweep, a capacity; report.html with the extra `report`",
    "runs/one runs/other --out reports/mine",
)
def _report_arguments(report: argparse.ArgumentParser) -> None:
    _out_argument(report)
    report.description = (
        "PATH is one of: run directories, of one workload or of a sweep (without --out their tables are printed); "
        "NAME.parquet, which `cbsim sweep` writes; a file of what `cbsim capacity --json` prints; a folder that "
        "`cbengine predict` writes, with validation/CASE/{measured,simulated}. Of all but run directories the report "
        "goes to PATH without its ending, or to PATH/report."
    )
    report.add_argument("paths", nargs="+", type=a_path, metavar="PATH", help="what the report is of")
    report.add_argument("--title", default="", metavar="TEXT", help="heads the report, not its figures")
    sweep = report.add_argument_group("of a sweep")
    sweep.add_argument("--metric", action="append", default=[], metavar="M", help="drawn, e.g. ttft.p99 (repeatable)")
    option(sweep, "--check", help="a limit, e.g. 'ttft.p99<=2s' (repeatable)")
    sweep.add_argument("--x", metavar="FIELD", help="the field on x at first (the one of most numbers)")
    predictions = report.add_argument_group("of predictions")
    predictions.add_argument("--strict", action="store_true", help="exit 3 if a bar is missed or a run does not replay")


@verb(
    "compare",
    "how run B differs from A; of a simulated and a measured run the errors",
    "runs/one runs/other --fail-if 'tpot.p50>+5%'",
)
def _compare_arguments(compare: argparse.ArgumentParser) -> None:
    _out_argument(compare)
    compare.add_argument("first", type=a_path, metavar="A", help="a run directory, simulated or measured")
    compare.add_argument("second", type=a_path, metavar="B", help="one of the same workload")
    failing = "exit 3 if this holds of the change from A to B, or of the error of the simulated run"
    failing += ", e.g. 'tpot.p50>+5%%', 'makespan>+-3%%' (repeatable)"
    option(compare, "--check", "--fail-if", help=failing)
    sure = "a condition holds only if the whole interval lies beyond its bound"
    compare.add_argument("--sure", action="store_true", help=sure)
    compare.add_argument("--all", action="store_true", help="every metric, not only the main ones")


@verb(
    "client",
    "what clients of a served session measured, beside what its server did",
    "runs/served profile_export.jsonl --out reports/served",
)
def _client_arguments(client: argparse.ArgumentParser) -> None:
    _out_argument(client)
    client.add_argument("run", type=a_path, metavar="RUN", help="the run directory of the session")
    written = "written by aiperf, vllm bench serve or GuideLLM"
    client.add_argument("files", nargs="+", type=a_path, metavar="FILE", help=written)
    client.add_argument("--json", action="store_true", help="print one JSON object, times in the client's seconds")


VERBS = (_report_arguments, _compare_arguments, _client_arguments)
