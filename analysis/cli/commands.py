"""The commands of the analysis: each takes parsed arguments and returns an exit status."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from analysis.page import capacity_report, client_report, sweep_report, webpage
from analysis.page import report as reports
from analysis.page.webpage import Explorer
from analysis.statistics import compare as comparing
from analysis.statistics import loading, sweep_table
from analysis.statistics.loading import LoadedRun
from analysis.statistics.trust import caveats
from analysis.validation import cases
from analysis.validation import report as predictions
from cbsim.cli.arguments import check_out
from cbsim.draw.report import Caveat, Report, Table
from cbsim.errors import CHECK_FAILED, OK, UserError
from cbsim.measured.own import clients as files
from cbsim.metrics.terminal import aligned


def report(arguments: argparse.Namespace) -> int:
    """Write the report of the paths: runs, a sweep, a capacity search or predictions. Tables of runs may be printed."""
    path, kind = arguments.paths[0], _kind(arguments.paths)
    _check_options(arguments, kind)
    out = arguments.out
    if out is None and kind != "runs":
        out = path / "report" if kind == "predictions" else path.with_suffix("")
    check_out(out)
    status, steered = OK, None
    if kind == "sweep":
        table = sweep_table.read(path)
        shown = sweep_report.look(table, arguments.metric, arguments.check, arguments.x)
        made, steered = sweep_report.build(table, shown, arguments.line), sweep_report.explorer(table, shown)
    elif kind == "capacity":
        made = capacity_report.build(capacity_report.read(path), arguments.line)
    elif kind == "predictions":
        validation = cases.read(path)
        made = predictions.build(validation, arguments.line)
        status = CHECK_FAILED if arguments.strict and not predictions.holds(validation.cases) else OK
    else:
        runs = loading.read(arguments.paths)
        made = reports.build(runs, arguments.line, draw=out is not None)
        if len(runs) > 1:
            _directories({run.label: run for run in runs})
    made = replace(made, title=arguments.title or made.title)
    if out is not None:
        _write(made, out, steered)
        made = replace(made, tables=(), caveats=())
    _print(made.tables, made.findings, made.caveats or ())
    return status


def _kind(paths: Sequence[Path]) -> str:
    path = paths[0]
    for file in filter(Path.is_file, paths if len(paths) > 1 else ()):
        raise UserError(f"{file}: is a file, expected a run directory: tables are reported one by one", file=file)
    if len(paths) > 1:
        return "runs"
    if path.suffix == ".parquet":
        return "sweep"
    if path.is_file() or path.suffix == ".json":
        return "capacity"
    return "predictions" if (path / "validation").exists() else "runs"


def _check_options(arguments: argparse.Namespace, kind: str) -> None:
    """Raise UserError for an option of another kind of report."""
    for name, owner in {"metric": "sweep", "check": "sweep", "x": "sweep", "strict": "predictions"}.items():
        if getattr(arguments, name) and owner != kind:
            what = "a folder of predictions" if name == "strict" else "the table of a sweep, NAME.parquet"
            raise UserError(f"--{name}: {arguments.paths[0]} is not {what}", field=f"--{name}")


def compare(arguments: argparse.Namespace) -> int:
    """Print the errors of a simulated run against a measured one; of any other two, how the second differs."""
    conditions = [comparing.parse(rule) for rule in arguments.fail_if]
    check_out(arguments.out)
    runs = loading.read([arguments.first, arguments.second])
    compared = reports.compared(runs, everything=arguments.all)
    if arguments.out is not None:
        _write(reports.build(runs, arguments.line), arguments.out)
    _directories(compared.named)
    _print(compared.tables, compared.findings, caveats(runs))
    verdicts = [comparing.judged(each, compared.differences, sure=arguments.sure) for each in conditions]
    for _, line in verdicts:
        print(line)
    return CHECK_FAILED if any(failed for failed, _ in verdicts) else OK


def client(arguments: argparse.Namespace) -> int:
    """Print what clients measured beside what their server did."""
    check_out(arguments.out)
    (run,) = loading.read([arguments.run])
    made = client_report.build(run, [files.client(file) for file in arguments.files], arguments.line)
    if arguments.out is not None:
        _write(made, arguments.out, quiet=arguments.json)
    if arguments.json:
        print(json.dumps(made.data["clients"], indent=2, allow_nan=False))
    else:
        _print(made.tables, made.findings, made.caveats or ())
    return OK


def _write(made: Report, out: Path, steered: Explorer | None = None, *, quiet: bool = False) -> None:
    has_page = webpage.write(made, out, steered)
    if not quiet:
        print(f"report    {out / 'report.md'}, {len(made.charts)} figures")
        page = out / "report.html" if has_page else "none: report.html needs plotly, `pip install -e '.[report]'`"
        print(f"page      {page}")


def _directories(named: Mapping[str, LoadedRun]) -> None:
    """Print the directories of runs, each behind its name in the tables."""
    width = max(map(len, named))
    print("".join(f"{name:<{width}}  {run.path}\n" for name, run in named.items()))


def _print(tables: Sequence[Table], findings: Sequence[str], shown: Sequence[Caveat]) -> None:
    for table in tables:
        note = f"{_wrapped(table.note)}\n\n" if table.note else ""
        print(f"{table.title}\n{note}{aligned([table.header, *table.rows])}\n")
    for sentence in findings:
        print(_wrapped(sentence))
    if shown:
        print("\nwhen not to trust this:")
    for caveat in shown:
        print(_wrapped(f"{caveat.run}: {caveat.reason}" if caveat.run else caveat.reason, "  - ", "    "))


def _wrapped(sentence: str, first: str = "", following: str = "") -> str:
    return textwrap.fill(sentence, 118, initial_indent=first, subsequent_indent=following)
