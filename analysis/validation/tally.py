"""The tally of a validation's cases: how many bars are met, by how much the rest are missed, and what causes a miss:
which phase or lane of a step, in which kind of step, or the number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

from analysis.statistics import pairing
from analysis.statistics.loading import LoadedRun
from analysis.statistics.pairing import Phase, ReplayOutcome
from analysis.validation.cases import LOOPS, Pair, ValidationCase
from cbsim.draw.report import Table
from cbsim.metrics.bars import BARS, BOTH, SPEED_UP, Bar, Score
from cbsim.record.record import LANES, PHASES

MARKS = {"met": "", "missed": " *", "undecided": " ~"}
SHORT = {SPEED_UP: "speed-up", "output tokens/s": "tokens/s"}
REPEATED = ("makespan", "TPOT p50", "TPOT p99", "GPU active", SPEED_UP)
MOST_NAMED = 3


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


# -- sentences --------------------------------------------------------------------------------------------------------


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


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(cases: Sequence[ValidationCase]) -> list[Table]:
    """Return all tables, in the order in which they are read."""
    accuracy = [bar_table(cases), error_table(cases), *repeat_table(cases), *cause_table(cases)]
    return [*accuracy, case_table(cases)]


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


# -- causes -----------------------------------------------------------------------------------------------------------

WAIT = "await"  # depends on the phases that are waited for
KINDS = {"decode steps": False, "prefill steps": True}  # whether they read prompts


@dataclass(frozen=True, slots=True)
class Cause:
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
