"""What `sweep-report` and `capacity-report` do. Arguments come in parsed; a number goes out, the exit status."""

from __future__ import annotations

import shlex
from pathlib import Path

from analysis.cli import writing
from analysis.page import capacity_report, explorer, sweep_report
from analysis.page.sweep_report import Asked
from analysis.statistics import capacity as capacities
from analysis.statistics import sweep_table
from cbsim.draw import folder


def sweep(file: Path, out: Path, asked: Asked) -> int:
    """Write the report of a sweep's table."""
    folder.check(out)
    table = sweep_table.read(file)
    shown = sweep_report.look(table, asked)
    made = sweep_report.build(table, shown, asked.title, _sweep_command(file, out, asked))
    writing.write(made, out, explorer.explorer(table, shown))
    for sentence in made.findings:
        print(writing.wrapped(sentence))
    return 0


def _sweep_command(file: Path, out: Path, asked: Asked) -> str:
    words = ["python", "-m", "analysis", "sweep-report", str(file), "--out", str(out)]
    words += [word for metric in asked.metrics for word in ("--metric", metric)]
    words += [word for limit in asked.slo for word in ("--slo", limit)]
    words += [*(["--x", asked.x] if asked.x else []), *(["--title", asked.title] if asked.title else [])]
    return shlex.join(words)


def capacity(file: Path, out: Path) -> int:
    """Write the report of a capacity."""
    folder.check(out)
    command = shlex.join(["python", "-m", "analysis", "capacity-report", str(file), "--out", str(out)])
    made = capacity_report.build(capacities.read(file), command)
    writing.write(made, out)
    for sentence in made.findings:
        print(writing.wrapped(sentence))
    return 0
