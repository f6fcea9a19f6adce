"""What the commands do. Arguments come in parsed; a number goes out, the exit status."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.cli import published, writing
from analysis.cli.writing import wrapped
from analysis.page import index
from analysis.page import report as reports
from analysis.statistics import compare as comparison
from analysis.statistics import landscape as side_by_side
from analysis.statistics import loading, pairing
from analysis.statistics.condition import Condition, parse
from analysis.statistics.condition import verdict as judge
from analysis.statistics.content import Caveat
from analysis.statistics.loading import LoadedRun
from analysis.statistics.trust import caveats
from analysis.validation import cases, keep, packed, tally
from analysis.validation import many_workloads as hardware_report
from cbsim.draw import folder
from cbsim.draw.markdown import Table
from cbsim.results.directory import RunError
from cbsim.results.terminal import aligned

OK, DRIFTED = 0, 3


@dataclass(frozen=True, slots=True)
class Judged:
    """How `compare` judges."""

    conditions: Sequence[str]
    sure: bool
    everything: bool
    out: Path | None


def report(paths: Sequence[Path], out: Path) -> int:
    """Write the report of one or more runs."""
    folder.check(out)
    _write(loading.read(paths), _command("report", *paths, "--out", out), out)
    return OK


def predictions(place: Path, out: Path | None, *, strict: bool) -> int:
    """Write the report of a validation folder; if `strict`, 3 if a bar is missed or a run does not replay."""
    out = place / "report" if out is None else out
    folder.check(out)
    validation = cases.read(place)
    made = hardware_report.build(validation, _command("predictions", place, "--out", out))
    writing.write(made, out)
    for sentence in made.findings:
        print(wrapped(sentence))
    return DRIFTED if strict and not tally.holds(validation.cases) else OK


def pack(place: Path, cases_whole: Sequence[str]) -> int:
    """Pack the run directories of a validation folder beside it; tables only of the cases named, of all if none is."""
    if not (place / "validation").is_dir():
        raise RunError(f"{place / 'validation'}: no such folder: there is nothing to pack")
    runs = keep.kept(cases.read(place), cases_whole)
    files = packed.packed(runs)
    folder.write(place, files)
    whole = sum(run.tables is not None for run in runs)
    print(f"packed    {len(runs)} runs, {whole} with their tables: {sum(map(len, files.values())):,} bytes")
    return OK


def unpack(place: Path) -> int:
    """Write the run directories of packed runs to validation/."""
    if (place / "validation").exists():
        raise RunError(f"{place / 'validation'}: is there already; unpacking writes over nothing")
    packed.unpack(place, place / "validation")
    print(f"unpacked  {place / 'validation'}")
    return OK


def _write(runs: Sequence[LoadedRun], command: str, out: Path) -> None:
    writing.write(reports.build(runs, command), out)


def compare(first: Path, second: Path, options: Judged) -> int:
    """Say how wrong a simulated run is against a measured one; of any other two, how the second differs."""
    conditions = [parse(text) for text in options.conditions]
    if options.out is not None:
        folder.check(options.out)
    a, b = runs = loading.read([first, second])
    if options.out is not None:
        _write(runs, _command("compare", first, second, "--out", options.out), options.out)
    differences = _say_errors(a, b, options) if b.measured and not a.measured else _say_differences(a, b, options)
    _say_caveats(caveats(runs))
    return _judge(conditions, differences, options)


def _say_differences(a: LoadedRun, b: LoadedRun, options: Judged) -> Sequence[comparison.MetricDifference]:
    differences = comparison.differences(a, b)
    print(f"A  {a.path}\nB  {b.path}\n")
    print(_text(comparison.table(differences, a.label, b.label, everything=options.everything)))
    for sentence in comparison.verdict(differences, everything=options.everything):
        print(wrapped(sentence))
    return differences


def _say_errors(sim: LoadedRun, measured: LoadedRun, options: Judged) -> Sequence[comparison.MetricDifference]:
    errors = pairing.errors(sim, measured)
    print(f"simulated  {sim.path}\nmeasured   {measured.path}\n")
    for table in pairing.tables(sim, measured, everything=options.everything, metric_errors=errors):
        print(f"{table.title}\n{_text(table)}")
    print(wrapped(pairing.summary_line(errors)))
    return [error.difference for error in errors]


def landscape(paths: Sequence[Path], out: Path | None) -> int:
    """Runs side by side, best first."""
    if out is not None:
        folder.check(out)
    runs = loading.read(paths)
    sweep = reports.checked(runs)
    if out is not None:
        _write(runs, _command("landscape", *paths, "--out", out), out)
    print(_text(side_by_side.landscape(runs, by_rate=sweep is not None and sweep.by_rate)))
    _say_caveats(caveats(runs))
    return OK


def drift(file: Path, paths: Sequence[Path]) -> int:
    """Compare runs with published numbers; 3 if one has drifted."""
    numbers = published.read(file)
    findings = published.compared(numbers, loading.read(paths))
    for finding in findings:
        print(finding.line)
    drifted = sum(not finding.holds for finding in findings)
    print(f"{len(findings) - drifted} of {len(findings)} published numbers hold")
    return DRIFTED if drifted else OK


def index_of(place: Path) -> int:
    """Write the list of reports."""
    if not place.is_dir():
        raise RunError(f"{place}: no such folder")
    folder.write(place, {"README.md": index.readme(place).encode()})
    print(place / "README.md")
    return OK


def _judge(conditions: Sequence[Condition], differences: Sequence[comparison.MetricDifference], options: Judged) -> int:
    verdicts = [judge(condition, differences, sure=options.sure) for condition in conditions]
    for _, line in verdicts:
        print(line)
    return DRIFTED if any(failed for failed, _ in verdicts) else OK


def _say_caveats(shown: Sequence[Caveat]) -> None:
    if shown:
        print("\nwhen not to trust this:")
    for caveat in shown:
        print(wrapped(f"{caveat.run}: {caveat.text}" if caveat.run else caveat.text, "  - ", "    "))


def _text(table: Table) -> str:
    says = f"{wrapped(table.says)}\n\n" if table.says else ""
    return f"{says}{aligned([list(table.header), *map(list, table.rows)])}\n"


def _command(*words: object) -> str:
    return shlex.join(["python", "-m", "analysis", *map(str, words)])
