"""The report of `score-points`: tables by class and stratum, residuals, coverage, comparison with the other tool."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from cbsim.draw.chart import BLACK, Chart, Level, Mark, Panel, Points, Style, equality, series
from cbsim.draw.report import Report, Table
from cbsim.measured.points import score
from cbsim.measured.points.published import Point, measured
from cbsim.measured.points.score import Class, Errors, Group, Predicted, Refused
from cbsim.scenario import terms
from cbsim.scenario.terms import Like, TermsFile, load, short
from cbsim.sweeps.store import Progress, Store
from cbsim.sweeps.work import Executor

STATISTICS = ("median", "MAPE", "p90")
SHOWN = {"mape": "MAPE", "p90": "p90"}
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "throughput": "tokens/s"}
STRATUM = "system, engine, model, GPUs, prompt/output"


def study(
    predicted: Sequence[Predicted], refused: Sequence[Refused], points: int, doubts: Sequence[str] = ()
) -> Report:
    """Return the report: predictions, all reasons why other points have none, and `doubts` about sizes of caches."""
    judged, groups = score.classes(predicted), score.strata(predicted)
    files = [load(name) for name in sorted({each.terms for each in predicted})]
    return Report(
        "Published measurements of servers, predicted",
        f"How far are TTFT, TPOT and throughput of {points:,} published points of whole servers from what is predicted "
        "with kernel tables, exact scheduling and a few calibrated terms?",
        _findings(predicted, judged, points),
        [
            *(_all_errors(judged, groups) if predicted else []),
            *([_by_interval(groups)] if any(each.left_out for each in predicted) else []),
            *_terms(files),
            *(_reasons(refused) if refused else []),
            *([Table("Caches in doubt", ["server, and why"], [[each] for each in doubts])] if doubts else []),
        ],
        _charts(judged) if predicted else (),
        {
            "points": points,
            "predicted": [_plain(each) for each in predicted],
            "not_built": _not_built(refused),
            "doubts": list(doubts),
            "strata": {group.name: _numbers(group) for group in groups},
            "classes": {group.name: _numbers(group, each) for each, group in judged},
            "coverage": {file.name: _covered(file) for file in files},
        },
    )


def _not_built(refused: Sequence[Refused]) -> dict[str, Any]:
    return {
        "by_reason": dict(_by_reason(refused)),
        "by_set": [{"reasons": reasons, "points": count} for reasons, count in _by_set(refused)],
        "points": {each.point.id: list(each.reasons) for each in refused},
    }


def _findings(predicted: Sequence[Predicted], judged: Sequence[tuple[Class, Group]], points: int) -> list[str]:
    left_out, outside = sum(each.left_out for each in predicted), sum(bool(each.outside) for each in predicted)
    findings = [
        (
            f"{len(predicted):,} of {points:,} points are predicted, {left_out:,} of them by terms calibrated "
            "without their curve, the others on curves that the calibration does not know."
        )
    ]
    if outside:
        findings.append(f"{outside:,} are outside what was calibrated: engine, card, model, GPUs or users are others.")
    for each, group in judged:
        ttft, tpot = (group.errors(metric).mape for metric in ("ttft", "tpot"))
        findings.append(
            f"{group.name}: {len(group.predicted)} points, mean absolute error of TPOT {tpot:.1%}, of TTFT {ttft:.1%}."
        )
        findings += [f"Beyond what is asked of a stratum, {missed}." for missed in score.misses(each, group)]
    return findings


def _cells(errors: Errors) -> list[str]:
    return [f"{errors.median:+.1%}", f"{errors.mape:.1%}", f"{errors.p90:.1%}"]


ERRORS = (
    "Errors are predicted over measured, less 1; median with its sign, mean (MAPE) and 90th percentile without. "
    "Throughput of both sides is by Little's law: users x tokens / (TTFT + TPOT x (tokens - 1))."
)


def _errors(title: str, first: str, groups: Sequence[Group], caption: str = "") -> Table:
    header = [first, "points", *(f"{NAMES[metric]} {name}" for metric in score.METRICS for name in STATISTICS)]
    rows = []
    for group in groups:
        cells = [cell for metric in score.METRICS for cell in _cells(group.errors(metric))]
        rows.append([group.name, f"{len(group.predicted)}", *cells])
    return Table(title, header, rows, caption)


def _all_errors(judged: Sequence[tuple[Class, Group]], groups: Sequence[Group]) -> list[Table]:
    by_class = _errors("Errors by kind of server", "servers", [group for _, group in judged], ERRORS)
    return [by_class, _bars(judged), *_beside(judged), _errors("Errors by stratum", STRATUM, groups)]


def _bars(judged: Sequence[tuple[Class, Group]]) -> Table:
    rows = []
    for each, group in judged:
        for bar in each.bars:
            value = getattr(group.errors(bar.metric), bar.statistic)
            name = f"{group.name}, {NAMES[bar.metric]} {SHOWN[bar.statistic]}"
            rows.append([name, f"{bar.most:.1%}", f"{value:.1%}", "met" if value <= bar.most else "missed"])
        if each.stratum is not None:
            name = f"{group.name}, strata with a TPOT median beyond {each.stratum:.0%}"
            missed = score.misses(each, group)
            rows.append([name, "0", f"{len(missed)}", "missed" if missed else "met"])
    caption = "Bars are for all points of such servers: of a few of them they say little."
    return Table("What is asked", ["", "at most", "measured", ""], rows, caption)


def _beside(judged: Sequence[tuple[Class, Group]]) -> list[Table]:
    """Compare our errors with those of aiconfigurator 0.12.0 on the points that it predicts."""
    rows = []
    for _, group in judged:
        for metric in score.METRICS:
            if both := group.beside_peer(metric):
                ours, theirs = both
                rows.append([f"{group.name}, {NAMES[metric]}", f"{ours.points}", *_cells(ours), *_cells(theirs)])
    header = ["", "points", *(f"{tool}, {name}" for tool in ("ours", "aiconfigurator") for name in STATISTICS)]
    return [Table("Beside aiconfigurator 0.12.0", header, rows)] if rows else []


def _intervals(file: TermsFile) -> Table:
    rows = []
    for metric in ("ttft", "tpot"):
        for name, lengths in (("as long", Like(1, 1)), ("outputs longer", Like(1, 4)), ("prompts longer", Like(4, 1))):
            interval = terms.interval(file, metric, lengths)
            if interval:
                ends = [f"{end - 1:+.1%}" for end in (interval.low, interval.high)]
                rows.append([f"{NAMES[metric]}, {name}", *ends, f"{interval.residuals}"])
    caption = ", ".join(f"{NAMES[metric]} {within} of {total}" for metric, (within, total) in _covered(file).items())
    return Table(
        f"How sure: 80 % intervals of {file.name}",
        ["measured over predicted, less 1", "from", "to", "residuals"],
        rows,
        f"By residuals of left-out curves. Intervals made by the other curves hold {caption} left-out points.",
    )


def _by_interval(groups: Sequence[Group]) -> Table:
    """Tabulate points whose terms were calibrated without them: the other curves' interval, and the points within."""
    rows = []
    for group in groups:
        points = [each for each in group.predicted if each.left_out]
        cells = [cell for metric in ("ttft", "tpot") for cell in _within(points, metric)]
        if points and any(cells):
            rows.append([group.name, f"{len(points)}", *cells])
    header = [f"{NAMES[metric]} {name}" for metric in ("ttft", "tpot") for name in ("80 %", "residuals", "within")]
    return Table("How sure, by stratum", [STRATUM, "points", *header], rows)


def _within(points: Sequence[Predicted], metric: str) -> list[str]:
    known = [(each, interval) for each in points if (interval := each.intervals[metric])]
    if not known:
        return ["", "", ""]
    low, high, residuals_ = known[0][1]
    within = sum(interval.holds(1 / (1 + each.error(metric))) for each, interval in known)
    return [f"{low - 1:+.0%} to {high - 1:+.0%}", f"{residuals_}", f"{within} of {len(known)}"]


def _covered(file: TermsFile) -> dict[str, tuple[int, int]]:
    return {metric: terms.coverage(file, metric) for metric in ("ttft", "tpot")}


def _terms(files: Sequence[TermsFile]) -> list[Table]:
    """Return the intervals of the files that have curves, then the terms of each."""
    tables = [_intervals(file) for file in files if file.curves]
    for file in files:
        rows = [[name, f"{term.value:.4g}", f"{term.low:.4g}", f"{term.high:.4g}"] for name, term in file.terms.items()]
        caption = f"{file.about} Calibrated {file.calibrated} on {len(file.curves)} curves."
        tables.append(Table(f"Terms of {file.name}", ["term", "value", "80 % from", "to"], rows, caption))
    return tables


def _by_reason(refused: Sequence[Refused]) -> Counter[str]:
    return Counter(reason for each in refused for reason in each.reasons)


def _by_set(refused: Sequence[Refused]) -> list[tuple[tuple[str, ...], int]]:
    return Counter(each.reasons for each in refused).most_common()


def _reasons(refused: Sequence[Refused]) -> list[Table]:
    """Return the points by reason, of which some have several, and by all their reasons."""
    alone = Counter(each.reasons[0] for each in refused if len(each.reasons) == 1)
    rows = [[reason, f"{count:,}", f"{alone[reason]:,}"] for reason, count in _by_reason(refused).most_common()]
    sets = [["; ".join(reasons), f"{count:,}"] for reasons, count in _by_set(refused)]
    caption = f"{len(refused):,} points; many have several reasons."
    return [
        Table("What cannot be built", ["reason", "points", "of these for no other reason"], rows, caption),
        Table("What cannot be built, by all reasons of a point", ["reasons", "points"], sets),
    ]


def _charts(judged: Sequence[tuple[Class, Group]]) -> list[Chart]:
    """Draw predicted against measured, and errors by concurrency: a mark per point, classes with bars on top."""
    beside, errors = list[Panel](), list[Panel]()
    for metric in ("ttft", "tpot"):
        value, pairs, far = score.METRICS[metric], list[Points](), list[Points]()
        for at, (_, group) in reversed(list(enumerate(judged))):
            points, style = [each.point for each in group.predicted], series(at)
            x = np.array([value(measured(each), each) for each in points])
            y = np.array([value(each.means, each.point) for each in group.predicted])
            users = np.array([each.concurrency for each in points], dtype=float)
            error = np.array([100 * each.error(metric) for each in group.predicted])
            pairs.append(Points(group.name, x, y, style, [each.where for each in points]))
            far.append(Points(group.name, users, error, style, pairs[-1].texts))
        ours, theirs = (f"{side} {NAMES[metric]}, ms" for side in ("predicted", "measured"))
        beside.append(Panel([equality(pairs, "dashed"), *pairs], theirs, ours, x_log=True, y_log=True, tall=True))
        marks: list[Mark] = [Level("exact", 0.0, Style(BLACK, "dashed")), *far]
        y_title = f"error of {NAMES[metric]}, %"
        errors.append(Panel(marks, "concurrent requests", y_title, x_log=True, y_range=(-60.0, 60.0), tall=True))
    caption = "Each mark is a server at one concurrency."
    predicted = Chart("predicted", "Predicted against measured", caption, beside, columns=2)
    caption = "Predicted over measured, less 1, of every point; what is beyond 60 % is not shown."
    return [predicted, Chart("residuals", "Errors by concurrency", caption, errors)]


def _numbers(group: Group, judged: Class | None = None) -> dict[str, Any]:
    """Return the errors of a group; of a class also the strata beyond its bound, None without one."""
    missed = {"missed": score.misses(judged, group) if judged.stratum is not None else None} if judged else {}
    errors = {metric: group.errors(metric)._asdict() for metric in score.METRICS}
    return {"points": len(group.predicted)} | errors | missed


def _plain(each: Predicted) -> dict[str, Any]:
    """Return a prediction as plain values; `terms` are its file and, if they are a curve's own, the curve."""
    point = each.point
    return {
        "id": point.id,
        "stratum": str(point.stratum),
        "users": point.concurrency,
        "source": point.source,
        "measured_ms": [point.ttft_ms, point.tpot_ms],
        "predicted_ms": [short(value, 4) for value in each.means],
        "errors": {metric: short(each.error(metric), 4) for metric in score.METRICS},
        "interval_80": {
            metric: one and one._asdict() | {"low": short(one.low, 4), "high": short(one.high, 4)}
            for metric, one in each.intervals.items()
        },
        "peer_errors": point.peer and {metric: short(each.peer_error(metric), 4) for metric in score.METRICS},
        "terms": {"file": each.terms, "curve": point.curve if each.left_out else None},
        "class": next((known.name for known in score.CLASSES if known.holds(each)), None),
        "outside_calibration": list(each.outside),
        "flags_in_doubt": list(each.doubts),
    }


def run(folder: Path, points: Sequence[Point], executor: Executor, store: Path, *, silent: bool) -> tuple[Report, bool]:
    """Build and simulate the points; return the report, and whether no run failed."""
    buildable, refused = score.sort(points)
    if not silent:
        print(f"{folder}: {len(points):,} points, {len(buildable):,} can be built, {len(refused):,} cannot:")
        for reasons, count in _by_set(refused):
            print(f"  {count:>5,} {'; '.join(reasons)}")
        print(flush=True)
    with closing(executor):
        stored = Store(store)
        predicted, failed = score.score(buildable, executor, stored, Progress(silent=silent))
    broken = [each for each in failed if each.reasons != (score.UNSERVED,)]
    for each in broken:
        print(f"failed    {each.point.where}: {each.reasons[0]}", file=sys.stderr)
    return study(predicted, [*refused, *failed], len(points), score.doubts(buildable)), not broken
