"""`python -m analysis`: arguments and exit codes only. Nothing heavy is imported before a command is known.

Exit codes: 0 ok, 1 error, 2 bad arguments or runs that cannot be compared, 3 a condition failed or a number drifted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cbsim.cli.arguments import Parser, a_path, guarded, renamed
from cbsim.server.status import USAGE

RENAMED = {"validate": "compare", "hardware": "predictions", "bench": "drawing-bench"}
EXAMPLES = {
    "report": "runs/one runs/other --out reports/mine",
    "compare": "runs/one runs/other --fail-if 'tpot.p50>+5%'",
    "landscape": "runs/one runs/other runs/third",
    "sweep-report": "sweeps/mine.parquet --out reports/mine --slo 'ttft.p99<=2s'",
    "capacity-report": "capacity.json --out reports/capacity",
    "client": "runs/served profile_export.jsonl --out reports/served",
    "drift": "reports/published.yaml runs/one",
    "predictions": "reports/hardware/cpu-modelled --out runs/report --check",
    "index": "reports",
    "drawing-bench": "--steps 10000 --requests 100",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    if renamed("analysis", RENAMED, argv):
        return USAGE
    arguments = _parser().parse_args(argv)
    return guarded("analysis", arguments.command, lambda: _dispatch(arguments), _status)


def _status(error: Exception) -> int | None:
    """Exit status of an error that a user can cause; None for one that only we can."""
    from analysis.statistics.comparable import Incomparable
    from analysis.statistics.pairing import NotAPair
    from cbsim.results.checks import CheckError
    from cbsim.results.directory import RunError
    from cbsim.scenario.fields import ScenarioError

    if isinstance(error, Incomparable | CheckError | NotAPair | ScenarioError | RunError):
        return USAGE
    return None


def _dispatch(arguments: argparse.Namespace) -> int:
    from analysis.cli import commands

    if arguments.command == "report":
        return commands.report(arguments.runs, arguments.out)
    if arguments.command == "compare":
        options = commands.Judged(arguments.fail_if, sure=arguments.sure, everything=arguments.all, out=arguments.out)
        return commands.compare(arguments.first, arguments.second, options)
    if arguments.command == "landscape":
        return commands.landscape(arguments.runs, arguments.out)
    if arguments.command in ("sweep-report", "capacity-report"):
        return _of_many_points(arguments)
    if arguments.command == "drift":
        return commands.drift(arguments.published, arguments.runs)
    if arguments.command == "index":
        return commands.index_of(arguments.folder)
    return {"client": _client, "drawing-bench": _bench, "predictions": _predictions}[arguments.command](arguments)


def _client(arguments: argparse.Namespace) -> int:
    from analysis.cli import clients

    return clients.client(arguments.run, arguments.files, arguments.out, as_json=arguments.json)


def _bench(arguments: argparse.Namespace) -> int:
    from analysis.cli import drawing_bench

    return drawing_bench.bench(arguments.steps, arguments.requests)


def _of_many_points(arguments: argparse.Namespace) -> int:
    from analysis.cli import sweeps
    from analysis.page.sweep_report import Asked

    if arguments.command == "capacity-report":
        return sweeps.capacity(arguments.file, arguments.out or arguments.file.with_suffix(""))
    asked = Asked(arguments.metric, arguments.slo, arguments.x, arguments.title)
    return sweeps.sweep(arguments.table, arguments.out or arguments.table.with_suffix(""), asked)


def _predictions(arguments: argparse.Namespace) -> int:
    from analysis.cli import commands

    if arguments.pack is not None:
        return commands.pack(arguments.folder, arguments.pack)
    if arguments.unpack:
        return commands.unpack(arguments.folder)
    return commands.predictions(arguments.folder, arguments.out, strict=arguments.check)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m analysis",
        description="Compare run directories, simulated or measured, and draw them.",
        epilog="Exit status: 0 ok, 1 error, 2 bad arguments or runs that cannot be compared, 3 a condition failed.",
        example="python -m analysis report runs/one runs/other --out reports/mine",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> Parser:
        return commands.add_parser(name, help=text, example=f"python -m analysis {name} {EXAMPLES[name]}")

    report = command("report", "figures (PNG, SVG), report.md and report.html of one or more runs")
    report.add_argument("runs", nargs="+", type=a_path, metavar="RUN", help="a run directory")
    report.add_argument("--out", required=True, type=a_path, metavar="DIR", help="folder of the report")
    _compare_arguments(
        command("compare", "errors of a simulated run against a measured one; else how run B differs from run A")
    )
    landscape = command("landscape", "runs of one workload, or of a sweep, side by side")
    landscape.add_argument("runs", nargs="+", type=a_path, metavar="RUN", help="a run directory")
    landscape.add_argument("--out", type=a_path, metavar="DIR", help="write table and figures there, too")
    _sweep_arguments(command("sweep-report", "report of a sweep, from the table that `cbsim sweep` writes"))
    capacity = command("capacity-report", "figure of a capacity, from what `cbsim capacity --json` prints")
    capacity.add_argument("file", type=a_path, metavar="FILE", help="the JSON object in a file")
    capacity.add_argument("--out", type=a_path, metavar="DIR", help="folder of the report (FILE without its ending)")
    _client_arguments(command("client", "what clients of a served session measured, beside what its server did"))
    drift = command("drift", "compare runs with published numbers")
    drift.add_argument("published", type=a_path, metavar="FILE", help="YAML file of published numbers")
    drift.add_argument("runs", nargs="+", type=a_path, metavar="RUN", help="a run directory")
    predictions = command("predictions", "report of many workloads, simulated against measured")
    predictions.add_argument(
        "folder", type=a_path, metavar="DIR", help="a folder with validation/CASE/{measured,simulated}, or packed runs"
    )
    predictions.add_argument("--out", type=a_path, metavar="OUT", help="folder of the report (DIR/report)")
    predictions.add_argument("--check", action="store_true", help="exit 3 if a bar is missed or a run does not replay")
    packing = predictions.add_mutually_exclusive_group()
    packing.add_argument(
        "--pack",
        nargs="*",
        metavar="CASE",
        help="no report: pack the runs into three Parquet files in DIR; steps and requests of these cases only (all)",
    )
    packing.add_argument("--unpack", action="store_true", help="no report: write validation/ from the packed runs")
    index = command("index", "write FOLDER/README.md, the list of the reports in it")
    index.add_argument("folder", type=a_path, nargs="?", default=Path("reports"), metavar="FOLDER", help="(reports)")
    bench = command("drawing-bench", "measure loading and drawing of a long run: seconds, peak memory")
    bench.add_argument("--steps", type=_several, default=1_000_000, metavar="N", help="(1000000)")
    bench.add_argument("--requests", type=_several, default=100_000, metavar="N", help="(100000)")
    return parser


def _client_arguments(client: argparse.ArgumentParser) -> None:
    client.add_argument("run", type=a_path, metavar="RUN", help="the run directory of the session")
    client.add_argument(
        "files", nargs="+", type=a_path, metavar="FILE", help="written by aiperf, vllm bench serve or GuideLLM"
    )
    client.add_argument("--json", action="store_true", help="print one JSON object, times in the client's seconds")
    client.add_argument("--out", type=a_path, metavar="DIR", help="write a report there, too")


def _sweep_arguments(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument("table", type=a_path, metavar="TABLE", help="NAME.parquet in the sweep's store")
    sweep.add_argument("--out", type=a_path, metavar="DIR", help="folder of the report (TABLE without its ending)")
    sweep.add_argument(
        "--metric", action="append", default=[], metavar="M", help="what is drawn, e.g. ttft.p99 (repeatable)"
    )
    sweep.add_argument(
        "--slo", action="append", default=[], metavar="COND", help="a limit, e.g. 'ttft.p99<=2s' (repeatable)"
    )
    sweep.add_argument("--x", metavar="FIELD", help="the field on x at first (the one of most numbers)")
    sweep.add_argument("--title", default="", metavar="TEXT", help="of the report (the table's name)")


def _compare_arguments(compare: argparse.ArgumentParser) -> None:
    compare.add_argument("first", type=a_path, metavar="A", help="a run directory; of a pair the simulated one, SIM")
    compare.add_argument(
        "second", type=a_path, metavar="B", help="one of the same workload; of a pair the MEASURED one"
    )
    compare.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="COND",
        help="exit 3 if this holds of the change from A to B, or of the error of SIM against MEASURED, e.g. "
        "'tpot.p50>+5%%', 'makespan>+-3%%' (repeatable)",
    )
    compare.add_argument(
        "--sure", action="store_true", help="a condition holds only if the whole interval lies beyond its bound"
    )
    compare.add_argument("--all", action="store_true", help="every metric, not only the main ones")
    compare.add_argument("--out", type=a_path, metavar="DIR", help="write a report of both runs there, too")


def _several(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number") from None
    if not 1 <= number <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{number}: must be from 1 to 10,000,000")
    return number
