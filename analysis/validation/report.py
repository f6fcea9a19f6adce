"""The report of a validation folder: how accurate the simulator is on the hardware that was measured.

It compares simulated with measured runs over many workloads: speed-ups, requests, and the errors beside their bars. The
tally says how many bars are met, by how much the rest are missed, and what causes a miss: which phase or lane of a
step, in which kind of step, or the number of steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.figures.axis import spread
from analysis.statistics import pairing, trust
from analysis.statistics.loading import LoadedRun
from analysis.statistics.pairing import Phase, ReplayOutcome
from analysis.validation.cases import LOOPS, MEASURED, SIMULATED, DeviceCases, Pair, ValidationCase
from cbsim.draw import chart, lane_chart
from cbsim.draw.chart import Chart, Level, Line, Mark, Panel, Points, Style, column, series, unit
from cbsim.draw.lane_chart import STEPS_SHOWN
from cbsim.draw.report import Caveat, Report, Source, Table
from cbsim.metrics import bars
from cbsim.metrics.bars import BARS, BOTH, SPEED_UP, Bar, Score
from cbsim.record.record import LANES, PHASES
from cbsim.scenario import documents

DRAWN_IF_THERE = "8k_b32"  # the case whose lanes are drawn
MOST_NAMED = 3  # runs named in a caveat or a sentence


def build(validation: DeviceCases, command: str) -> Report:
    """Return the report of the cases, in the order in which it is read."""
    cases = validation.cases
    return Report(
        title="Simulated against measured" + (f": {validation.device}" if validation.device else ""),
        question="How near are simulated runs to measured ones of the same workloads, and what are they off by?",
        sources=[source for case in cases for source in sources(case, validation)],
        caveats=[*validation.left_out, *caveats(cases)],
        findings=findings(cases),
        tables=tables(cases),
        charts=charts(cases),
        command=command,
        coloured=False,
        data={"scores": scores(cases), "replays": [replay._asdict() for replay in replays(cases)]},
    )


def sources(case: ValidationCase, validation: DeviceCases) -> list[Source]:
    """Return every run's source entry; what a case's runs share is in its first simulated and first measured one."""
    first = [next(run for run in case.runs if run.measured is measured) for measured in (True, False)]
    made = []
    for run in case.runs:
        kind = f"measured on {run.environment.get('device')}" if run.measured else SIMULATED
        scenario = documents.write(dict(run.scenario)) if run in first and not run.measured else ""
        environment = json.dumps(run.environment, indent=2) if run in first and run.measured else ""
        folder, command = run.path.relative_to(validation.folder).as_posix(), str(run.environment.get("command", ""))
        made.append(Source(run.label, folder, kind, (), scenario, environment, command))
    return made


def caveats(cases: Sequence[ValidationCase]) -> list[Caveat]:
    """Return a caveat on the packed cases without tables, of which only their numbers are known, and the caveats of the
    runs in tables and figures; of many runs only the first few are named.
    """
    packed = ", ".join(case.name for case in cases if not case.whole)
    reason = "packed without steps and requests: in the tables of errors only, and in no other caveat."
    pairs = [pair for case in cases for pair in case.loops.values() if pair.whole]
    runs = [run for pair in pairs for run in (pair.middle, pair.simulated)]
    labels = {run.label for run in runs}
    made = [Caveat("not kept", packed, reason)] if packed else []
    for caveat in trust.caveats(runs):
        names = [name for name in caveat.run.split(", ") if name in labels]
        more = f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED:,} more"
        made.append(caveat if len(names) <= MOST_NAMED else caveat._replace(run=more))
    return made


def charts(cases: Sequence[ValidationCase]) -> list[Chart]:
    """Draw errors, the curves of speed-up if there are any, requests, and the lanes of one case."""
    curves = speed_ups(cases)
    whole = [case for case in cases if case.whole]
    # The lanes are of a well-known case, or of one on a curve.
    shown = min(whole, key=lambda case: (case.name != DRAWN_IF_THERE, case.curve is None), default=None)
    pairs = {loop: [case.loops[loop] for case in whole if loop in case.loops] for loop in LOOPS}
    requests = {loop: [matched(p.middle.counted, p.simulated.counted) for p in own] for loop, own in pairs.items()}
    return [
        errors({case.name: case.scores for case in cases}),
        *([speed_up(curves)] if curves else []),
        scatter(requests),
        *([case_lanes(shown)] if shown else []),
    ]


def speed_ups(cases: Sequence[ValidationCase]) -> dict[str, list[SpeedUpPoint]]:
    """Return the points of every curve, of cases with both loops."""
    curves: dict[str, list[SpeedUpPoint]] = {}
    for case in cases:
        if case.curve is not None and set(LOOPS) <= case.loops.keys():
            measured = bars.speed_ups(case.measured_summaries)
            simulated = bars.speed_up(case.simulated_summaries)
            points = curves.setdefault(case.curve, [])
            points.append(SpeedUpPoint(case.name, case.injected_ms, simulated, measured))
            points += [SpeedUpPoint(case.name, float(at), gain, ()) for at, gain in case.predicted.items()]
    return curves


def case_lanes(case: ValidationCase) -> Chart:
    """Draw the lanes of the measured run above those of the simulated one, loop by loop, all from the same step on."""
    frames = {
        f"{loop} {kind}": run.table
        for loop, pair in case.loops.items()
        for kind, run in ((MEASURED, pair.middle), (SIMULATED, pair.simulated))
    }
    middle = min(map(len, frames.values())) // 2
    lanes = lane_chart.lanes(frames, (max(0, middle - STEPS_SHOWN // 2), STEPS_SHOWN), as_given=True)
    return lanes._replace(title=f"{case.name}: CPU and GPU, measured above simulated")


def scores(cases: Sequence[ValidationCase]) -> list[dict[str, Any]]:
    """Return every score as plain values for other programs; what is no number is null."""
    made = []
    for case, score in ((each, score) for each in cases for score in each.scores):
        values = {name: getattr(score, name) for name in ("simulated", "measured", "error", "spread")}
        finite = {name: value if value is not None and isfinite(value) else None for name, value in values.items()}
        about = {"case": case.name, "loop": score.loop, "metric": score.bar.label}
        made.append({**about, **finite, "bound": score.bar.bound, "verdict": score.verdict})
    return made


MOST_POINTS = 3_000  # requests of the scatter
VERDICTS = {"met": Style(chart.GREEN, marker="circle"), "missed": Style(chart.RED, marker="cross")}  # of a score
VERDICTS |= {"undecided": Style(chart.ORANGE, marker="diamond")}
REACH = 0.4  # the farthest dot from the middle of a metric's space of width 1
LOOP_PLACES = {"sync": 0.25, BOTH: 0.5, "async": 0.75}  # position in the space of a case
EDGE = 5.0  # multiples of the bar; larger errors are drawn here
MARGIN = 1.08
CATEGORIES = [
    f"{bar.label.removeprefix('async ').removeprefix('output ')} ±{bar.bound * 100:g}{'pt' if bar.points else '%'}"
    for bar in BARS
]


class SpeedUpPoint(NamedTuple):
    """A case on a curve: the CPU work added to a step, the simulated speed-up, and that of each repeat, if any."""

    case: str
    injected_ms: float
    simulated: float
    measured: Sequence[float]


def speed_up(curves: Mapping[str, Sequence[SpeedUpPoint]]) -> Chart:
    """Draw the speed-up of async over sync by the CPU work added: simulated as lines, measured as points."""
    marks: list[Mark] = []
    for index, (name, points) in enumerate(curves.items()):
        marks += _curve(name, sorted(points, key=lambda point: point.injected_ms), series(index))
    caption = "How much faster the async loop is than the sync one, over the CPU work added to every step. Lines and "
    caption += "crosses are simulated, other markers measured, one for each pair of measured runs."
    caption += " Colours repeat." if len(curves) > len(chart.SERIES) else ""
    axes = Panel(marks, "CPU work added, ms a step", "async faster by, %")
    return Chart("speedup", "Speed-up of the async loop", caption, [axes])


def _curve(name: str, points: Sequence[SpeedUpPoint], style: Style) -> list[Mark]:
    x = np.array([point.injected_ms for point in points])
    y = np.array([point.simulated * 100 for point in points])
    pairs = [(point, value) for point in points for value in point.measured]
    texts = [f"{point.case}: {value:.1%} measured, {point.simulated:.1%} simulated" for point, value in pairs]
    at, values = np.array([point.injected_ms for point, _ in pairs]), np.array([value * 100 for _, value in pairs])
    marker = "circle" if style.marker == "cross" else style.marker
    return [
        Line(f"{name}: simulated", x, y, style),
        Points(f"{name}: simulated", x, y, Style(style.colour, marker="cross")),
        Points(f"{name}: measured", at, values, style._replace(marker=marker), texts=texts),
    ]


def matched(measured: pd.DataFrame, simulated: pd.DataFrame) -> pd.DataFrame:
    """Return TTFT and TPOT of the requests that both runs have, by their index."""
    columns = ["index", "ttft_s", "tpot_s"]
    return measured[columns].merge(simulated[columns], on="index", suffixes=("_measured", "_simulated"))


def scatter(loops: Mapping[str, Sequence[pd.DataFrame]]) -> Chart:
    """Draw TTFT and TPOT of every request, simulated over measured: by loop, the `matched` frames of all cases."""
    frames = {loop: pd.concat(parts, ignore_index=True) for loop, parts in loops.items() if parts}
    total = sum(map(len, frames.values()))
    every = -(-total // MOST_POINTS) or 1
    drawn = {loop: frame.iloc[::every] for loop, frame in frames.items()}
    panels = [_fit(title, name, drawn) for title, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))]
    caption = "One point a request of any workload; on the line the simulated run is right. "
    caption += "TTFT counts from the arrival."
    caption += f" One in {every} of {total:,} requests is drawn." if every > 1 else ""
    return Chart("scatter", "Requests, simulated over measured", caption, panels, columns=2)


def _fit(title: str, name: str, frames: Mapping[str, pd.DataFrame]) -> Panel:
    pairs = {}
    for loop, frame in frames.items():
        both = np.stack([column(frame, f"{name}_{kind}") for kind in (MEASURED, SIMULATED)])
        pairs[loop] = both[:, np.isfinite(both).all(axis=0)]
    values = np.concatenate([np.empty(0), *(part for pair in pairs.values() for part in pair)])
    if not len(values):
        return Panel([], "", title=f"{title}: no request has one in both runs")
    log, scale = spread([values]), unit(float(values.max()))
    ends = np.array([values.min() / MARGIN if log else 0.0, max(values.max(), 1e-9) * MARGIN]) / scale.size
    marks: list[Mark] = [Line("simulated as measured", ends, ends, Style(chart.BLACK, "dashed"))]
    for index, (loop, (x, y)) in enumerate(pairs.items()):
        marks.append(Points(loop, x / scale.size, y / scale.size, series(index)))
    x_axis, y_axis = f"measured, {scale.name}", f"simulated, {scale.name}"
    whole = (float(ends[0]), float(ends[1]))
    return Panel(marks, x_axis, y_axis, title=title, x_log=log, y_log=log, x_range=whole, y_range=whole)


def errors(cases: Mapping[str, Sequence[Score]]) -> Chart:
    """Draw the error of each metric in every case, as multiples of its bar: between the lines the bar is met."""
    bound = Style(chart.BLACK, "dashed")
    marks: list[Mark] = [Level("asked", 1.0, bound), Level("asked", -1.0, bound)]
    dots: list[tuple[str, float, float, str]] = []  # verdict, x, y, hover text
    for index, (case, scores) in enumerate(cases.items()):  # cases and loops are beside each other in a metric's space
        for score in (each for each in scores if each.counts and np.isfinite(each.error)):
            at = REACH * (2 * (index + LOOP_PLACES[score.loop]) / len(cases) - 1)
            simulated, measured, error = score.shown()
            text = f"{case}, {score.loop}: {score.bar.label} {error} ({simulated} simulated, {measured} measured)"
            dots.append((score.verdict, BARS.index(score.bar) + at, score.error / score.bar.bound, text))
    for verdict, style in VERDICTS.items():
        if own := [dot for dot in dots if dot[0] == verdict]:
            _, x, y, texts = zip(*own, strict=True)
            marks.append(Points(verdict, np.array(x), np.clip(y, -EDGE, EDGE), style, texts=texts))
    caption = "Error over what is asked of the metric, one point a workload and loop, in the order of the table. "
    caption += "1: as far above the measured run as the bar allows. "
    caption += "Where a bar is not asked nothing is drawn."
    beyond = sum(abs(y) > EDGE for _, _, y, _ in dots)
    caption += f" Drawn at the edge, as they lie beyond {EDGE:g}: {beyond:,}." if beyond else ""
    reach = max(1.5, *(min(EDGE, abs(y)) for _, _, y, _ in dots), 0.0) * MARGIN
    panel = Panel(marks, "", "error / asked", categories=CATEGORIES, y_range=(-reach, reach))
    return Chart("errors", "Errors, as multiples of what is asked", caption, [panel])


MARKS = {"met": "", "missed": " *", "undecided": " ~"}
SHORT = {SPEED_UP: "speed-up", "output tokens/s": "tokens/s"}
REPEATED = ("makespan", "TPOT p50", "TPOT p99", "GPU active", SPEED_UP)


class CaseScore(NamedTuple):
    """A score and its case."""

    case: ValidationCase
    score: Score

    @property
    def where(self) -> str:
        return self.case.name if self.score.loop == BOTH else f"{self.case.name}, {self.score.loop}"

    @property
    def size(self) -> float:
        """The size of the error; one that is no number counts as the largest."""
        return abs(self.score.error) if isfinite(self.score.error) else inf


def judged(cases: Sequence[ValidationCase], bar: Bar | None = None) -> list[CaseScore]:
    """Return the scores that have this bar, or any."""
    scores = [CaseScore(case, score) for case in cases for score in case.scores if score.counts]
    return [scored for scored in scores if bar is None or scored.score.bar == bar]


def of(case: ValidationCase, loop: str, label: str) -> Score | None:
    """Return the score in a row of the table: the speed-up stands in the async loop's."""
    row_of = BOTH if label == SPEED_UP and loop == "async" else loop
    return next((score for score in case.scores if (score.loop, score.bar.label) == (row_of, label)), None)


def replays(cases: Sequence[ValidationCase]) -> list[ReplayOutcome]:
    """Return the replay of every measured run."""
    return [verdict for case in cases for verdicts in case.replays.values() for verdict in verdicts]


def holds(cases: Sequence[ValidationCase]) -> bool:
    """Whether no bar is missed, and every measured run replays. An undecided bar is not missed."""
    return all(scored.score.verdict != "missed" for scored in judged(cases)) and all(
        replay.identical for replay in replays(cases)
    )


def findings(cases: Sequence[ValidationCase]) -> list[str]:
    """Return sentences on the verdict, and on what does not replay."""
    verdicts, replayed = [scored.score.verdict for scored in judged(cases)], replays(cases)
    met, missed, undecided = (verdicts.count(name) for name in MARKS)
    reason = " (missed by no more than the measured runs themselves lie apart)" if undecided else ""
    verdict = f"{met:,} of {len(verdicts):,} asked scores are met, {missed:,} missed, {undecided:,} undecided{reason}"
    parted = [f"{replay.run}: {replay.says}" for replay in replayed if not replay.identical]
    counted = f"{len(replayed) - len(parted):,} of {len(replayed):,} measured runs replay to identical plans"
    more = f"; {len(parted) - MOST_NAMED:,} more" if len(parted) > MOST_NAMED else ""
    return [
        f"{verdict}: {len(cases):,} workloads, {sum(_repeats(cases)):,} measured runs.",
        f"{counted}; not {'; '.join(parted[:MOST_NAMED])}{more}." if parted else f"{counted}.",
    ]


def _repeats(cases: Sequence[ValidationCase]) -> list[int]:
    """Return how often each loop of each case was measured."""
    return [len(pair.measured) for case in cases for pair in case.loops.values()]


def error_text(score: Score) -> str:
    return score.shown()[2] if isfinite(score.error) else "no number"


def size_text(bar: Bar, size: float) -> str:
    """Return the size of an error or a spread as text."""
    if not isfinite(size):
        return "no number"
    return f"{size * 100:.2f} pt" if bar.points else f"{size:.1%}"


def requirement(bar: Bar) -> str:
    """Return the requirement of a bar, in words."""
    bound = bar.bound * 100
    return f"within {bound:g} point{'' if bound == 1 else 's'}" if bar.points else f"within {bound:g} %"


def tables(cases: Sequence[ValidationCase]) -> list[Table]:
    """Return all tables, in the order in which they are read."""
    return [bar_table(cases), error_table(cases), *repeat_table(cases), *cause_table(cases), case_table(cases)]


def bar_table(cases: Sequence[ValidationCase]) -> Table:
    """Return a table with a row a bar, and one for the plans."""
    header = ("metric", "asked", "met", "missed", "undecided", "median |error|", "largest error", "where")
    verdicts = replays(cases)
    differing = [replay for replay in verdicts if not replay.identical]
    says, where = (differing[0].says, differing[0].run) if differing else ("-", "-")
    counts = (f"{len(verdicts) - len(differing):,} of {len(verdicts):,}", f"{len(differing):,}", "0")
    plans = ("measured runs, replayed", "identical plans", *counts, "-", says, where)
    note = "Simulated against the median of the measured runs; errors of shares in points. "
    note += "TTFT is asked below saturation."
    return Table("Bars", header, [*(_bar_row(bar, judged(cases, bar)) for bar in BARS), plans], note)


def _bar_row(bar: Bar, scores: Sequence[CaseScore]) -> tuple[str, ...]:
    if not scores:
        return (bar.label, requirement(bar), "not asked", "-", "-", "-", "-", "-")
    worst = max(scores, key=lambda scored: scored.size)
    verdicts = [scored.score.verdict for scored in scores]
    met, missed, undecided = (verdicts.count(name) for name in MARKS)
    counts = (f"{met:,} of {len(scores):,}", f"{missed:,}", f"{undecided:,}")
    middle = size_text(bar, median(scored.size for scored in scores))
    return (bar.label, requirement(bar), *counts, middle, error_text(worst.score), worst.where)


def error_table(cases: Sequence[ValidationCase]) -> Table:
    """Return a table with a row for each case and loop, a column for each metric."""
    header = ("case", "loop", *(SHORT.get(bar.label, bar.label) for bar in BARS), "plans replayed")
    rows = [
        (
            *(case.name, loop),
            *(_error_cell(of(case, loop, bar.label)) for bar in BARS),
            _replay_cell(case.replays[loop]),
        )
        for case in cases
        for loop in case.loops
    ]
    counts = sorted(_repeats(cases))
    measured = " to ".join(f"{count}" for count in dict.fromkeys((counts[0], counts[-1]))) + " times"
    note = (
        "*: the bar is missed. ~: undecided, missed by no more than the measured runs lie apart. In "
        f"parentheses: not asked. pt: points. Each loop was measured {'once' if counts[-1] == 1 else measured}. "
        "Plans replayed: steps of the measured runs whose plan was derived again."
    )
    return Table("Errors by workload", header, rows, note)


def _error_cell(score: Score | None) -> str:
    if score is None:
        return "-"
    return f"{error_text(score)}{MARKS[score.verdict]}" if score.counts else f"({error_text(score)})"


def _replay_cell(verdicts: Sequence[ReplayOutcome]) -> str:
    matched = f"{sum(replay.matched or 0 for replay in verdicts):,} of {sum(replay.steps for replay in verdicts):,}"
    return matched if all(replay.identical for replay in verdicts) else f"{matched} *"


def repeat_table(cases: Sequence[ValidationCase]) -> list[Table]:
    """Return a table of the spread of the measured runs of one workload and loop; none if there is one of each."""
    rows = [
        (case.name, loop, f"{len(pair.measured):,}", *(_spread_cell(of(case, loop, label)) for label in REPEATED))
        for case in cases
        for loop, pair in case.loops.items()
        if len(pair.measured) > 1
    ]
    header = ("case", "loop", "runs", *(SHORT.get(label, label) for label in REPEATED))
    note = "The largest less the smallest of the measured runs, as a share of their median or in points (pt). ~: more "
    note += "than the bar allows the simulated run to be off, so that it cannot be told whether a miss is one."
    return [Table("Repeats", header, rows, note)] if rows else []


def _spread_cell(score: Score | None) -> str:
    if score is None or score.spread is None:
        return "-"
    return size_text(score.bar, score.spread) + ("" if score.spread <= score.bar.bound else MARKS["undecided"])


def case_table(cases: Sequence[ValidationCase]) -> Table:
    """Return a table that describes the cases."""
    header = ("case", "model", "scheduler", "CPU work added", "arrivals", "requests", "runs of a loop", "about")
    note = "Runs of a loop: how often it was measured. "
    note += "Arrivals: their rate as a share of the synchronous loop's capacity."
    rows = []
    for case in cases:
        arrivals = "all at once" if case.load is None else f"{case.load:.0%} of capacity"
        pairs = [case.loops[loop] for loop in LOOPS if loop in case.loops]
        runs = ", ".join(dict.fromkeys(f"{len(pair.measured):,}" for pair in pairs))
        counts = (arrivals, f"{pairs[0].simulated.summary['requests']:,}", runs)
        rows.append((case.name, case.model, case.scheduler, f"{case.injected_ms:g} ms", *counts, case.about))
    return Table("Workloads", header, rows, note)


WAIT = "await"  # depends on the phases that are waited for
KINDS = {"decode steps": False, "prefill steps": True}  # whether they read prompts


class Cause(NamedTuple):
    """The difference of a loop's simulated run from the measured one of median makespan, in means over the steps.

    `steps`: of the simulated and of the measured run. `largest`: the phase or lane that differs most, None without
    steps; `share` is its difference as a share of the measured makespan a step. `kinds`: by kind of step, the relative
    error of its compute time, None if there is none, and its weight, microseconds over all such steps.
    """

    steps: tuple[int, int]
    largest: Phase | None
    share: float
    kinds: Mapping[str, tuple[float | None, float]]

    @property
    def summary(self) -> str:
        """The largest cause in a line."""
        more_steps = self.steps[0] / self.steps[1] - 1 if self.steps[1] else 0.0
        if self.largest is None:
            return "no step with rows to tell by"
        if abs(more_steps) > abs(self.share):
            return f"{more_steps:+.1%} steps: other batches"
        if self.largest.name == "compute":
            worst = max(self.kinds, key=lambda kind: self.kinds[kind][1])
            return f"compute of {worst} {_relative(self.kinds[worst][0])}"
        return f"{self.largest.name} {self.largest.difference_us:+,.0f} us a step"


def cause(pair: Pair) -> Cause:
    """Determine where the simulated run deviates."""
    sim, measured = pair.simulated, pair.middle
    phases = _that_count(pairing.phases(sim, measured), sim.loop)
    largest = max(phases, key=lambda phase: abs(phase.difference_us), default=None)
    own, theirs = (int((run.table["rows"] > 0).sum()) for run in (sim, measured))
    step_us = float(measured.summary["makespan_s"]) * 1e6 / max(theirs, 1)
    share = largest.difference_us / step_us if largest else 0.0
    kinds = {name: _compute_error(sim, measured, prefill) for name, prefill in KINDS.items()}
    return Cause((own, theirs), largest, share, kinds)


def _that_count(phases: Sequence[Phase], loop: str) -> Sequence[Phase]:
    """Return all phases but the wait; if CPU and device overlap, only the longer side's, since the other is free."""
    cpu = [phase for phase in phases if phase.name in PHASES and phase.name != WAIT]
    device = [phase for phase in phases if phase.name in LANES]
    if loop == "sync":
        return [*cpu, *device]
    return max((cpu, device), key=lambda side: sum(phase.measured_mean_us for phase in side))


def _compute_error(sim: LoadedRun, measured: LoadedRun, prefill: bool) -> tuple[float | None, float]:
    """Return for steps of a kind the relative error of their mean compute time, and its sum over all of them."""
    ours, theirs = (
        run.table.lane("compute")[(run.table["rows"] > 0) & ((run.table["prefill_tokens"] > 0) == prefill)] / 1e3
        for run in (sim, measured)
    )
    if not len(ours) or not len(theirs):
        return None, 0.0
    difference = float(ours.mean() - theirs.mean())
    return difference / float(theirs.mean()) if theirs.any() else None, abs(difference) * len(theirs)


def cause_table(cases: Sequence[ValidationCase]) -> list[Table]:
    """Return a table with a row for each case and loop with a bar that is not met; none if all are."""
    header = (
        *("case", "loop", "so", "differs most", "us a step", "its error", "of the step"),
        *("compute: decode steps", "prefill steps", "steps, simulated", "measured", "not met"),
    )
    rows = [
        (case.name, loop, *_cause_cells(cause(pair)), ", ".join(missed))
        for case in cases
        for loop, pair in case.loops.items()
        for own in [[score for score in case.scores if score.loop in (loop, BOTH)]]  # a speed-up is of both loops
        for missed in [[score.bar.label for score in own if score.verdict in ("missed", "undecided")]]
        if missed and pair.whole
    ]
    note = (
        "Means over the steps with rows, simulated against the measured run of median makespan: the CPU phase (but for "
        "the wait) or lane whose time differs most, also as a share of the measured time a step. In the async loop "
        "it is one of the side that takes longer, CPU or device: the other runs beside it. Decode steps read no "
        "prompt, prefill steps do."
    )
    return [Table("Where missed bars come from", header, rows, note)] if rows else []


def _cause_cells(reason: Cause) -> tuple[str, ...]:
    phase = reason.largest or Phase("-", 0.0, 0.0, 0.0, 0.0)
    differs = (phase.name, f"{phase.difference_us:+,.0f}", _relative(phase.error), f"{reason.share:+.1%}")
    kinds = (_relative(own) for own, _ in reason.kinds.values())
    return (reason.summary, *differs, *kinds, *(f"{count:,}" for count in reason.steps))


def _relative(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"
