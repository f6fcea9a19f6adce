"""What the cases of a validation score: how many bars are met, by how much the others are missed, as sentences and
tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

from analysis.statistics.pairing import ReplayOutcome
from analysis.validation.cases import LOOPS, ValidationCase
from cbsim.draw.markdown import Table
from cbsim.results.bars import BARS, BOTH, SPEED_UP, Bar, Score

MARKS = {"met": "", "missed": " *", "undecided": " ~"}
SHORT = {SPEED_UP: "speed-up", "output tokens/s": "tokens/s"}
REPEATED = ("makespan", "TPOT p50", "TPOT p99", "GPU active", SPEED_UP)
MOST_NAMED = 3


class CaseScore(NamedTuple):
    """A score, and the case that it is of."""

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
    """The scores that are held to a bar: to this one, or to any."""
    scores = [CaseScore(case, score) for case in cases for score in case.scores if score.counts]
    return [scored for scored in scores if bar is None or scored.score.bar == bar]


def of(case: ValidationCase, loop: str, label: str) -> Score | None:
    """The score in a row of the table: the speed-up stands in the async loop's."""
    wanted = BOTH if label == SPEED_UP and loop == "async" else loop
    return next((score for score in case.scores if (score.loop, score.bar.label) == (wanted, label)), None)


def replays(cases: Sequence[ValidationCase]) -> list[ReplayOutcome]:
    """Every measured run, replayed."""
    return [verdict for case in cases for verdicts in case.replays.values() for verdict in verdicts]


def identical(replay: ReplayOutcome) -> bool:
    return replay.says == "identical"


def holds(cases: Sequence[ValidationCase]) -> bool:
    """Is no bar missed, and does every measured run replay? What cannot be decided is not missed."""
    return all(scored.score.verdict != "missed" for scored in judged(cases)) and all(map(identical, replays(cases)))


# -- sentences --------------------------------------------------------------------------------------------------------


def findings(cases: Sequence[ValidationCase]) -> list[str]:
    """The verdict, where it is furthest from what is asked, the speed-up, and the plans."""
    return [_verdict(cases), *_furthest(cases), *_speed_up(cases), _replayed(cases)]


def _verdict(cases: Sequence[ValidationCase]) -> str:
    verdicts = [scored.score.verdict for scored in judged(cases)]
    met, missed, undecided = (verdicts.count(name) for name in MARKS)
    reason = " (missed by no more than the measured runs themselves lie apart)" if undecided else ""
    runs = sum(len(pair.measured) for case in cases for pair in case.loops.values())
    return (
        f"{met:,} of {len(verdicts):,} asked scores are met, {missed:,} missed, {undecided:,} undecided{reason}: "
        f"{_count(len(cases), 'workload')}, {_count(runs, 'measured run')}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _furthest(cases: Sequence[ValidationCase]) -> Iterator[str]:
    """The largest errors, one a bar, measured by what is asked."""
    worst = [max(scores, key=lambda scored: scored.size) for bar in BARS if (scores := judged(cases, bar))]
    largest = sorted(worst, key=lambda scored: -scored.size / scored.score.bar.bound)[:MOST_NAMED]
    sentences = [
        f"{scored.score.bar.label} {error_text(scored.score)} ({scored.where}; {wanted(scored.score.bar)})"
        for scored in largest
    ]
    if sentences:
        yield f"Largest errors, by what is asked: {', '.join(sentences)}."


def _speed_up(cases: Sequence[ValidationCase]) -> Iterator[str]:
    speed_ups = [scored for scored in judged(cases) if scored.score.bar.label == SPEED_UP]
    if not speed_ups:
        return
    worst = max(speed_ups, key=lambda scored: scored.size)
    simulated, measured, _ = worst.score.shown()
    at = f"{worst.case.name}, with {worst.case.injected_ms:g} ms of CPU work added to every step"
    yield (
        f"Speed-up of the async loop over the sync one: largest error {error_text(worst.score)}, in {at} "
        f"({simulated} simulated, {measured} measured)."
    )


def _replayed(cases: Sequence[ValidationCase]) -> str:
    verdicts = replays(cases)
    others = [replay for replay in verdicts if not identical(replay)]
    if not others:
        return f"Every measured run replays to identical plans: {len(verdicts):,} of {len(verdicts):,}."
    reasons = "; ".join(f"{replay.run}: {replay.says}" for replay in others[:MOST_NAMED])
    more = f"; {len(others) - MOST_NAMED:,} more" if len(others) > MOST_NAMED else ""
    agreed = len(verdicts) - len(others)
    return f"{agreed:,} of {_count(len(verdicts), 'measured run')} replay to identical plans; not {reasons}{more}."


def error_text(score: Score) -> str:
    return score.shown()[2] if isfinite(score.error) else "no number"


def size_text(bar: Bar, size: float) -> str:
    """The size of an error or a spread."""
    if not isfinite(size):
        return "no number"
    return f"{size * 100:.2f} pt" if bar.points else f"{size:.1%}"


def wanted(bar: Bar) -> str:
    """What a bar asks, in words."""
    bound = bar.bound * 100
    return f"within {bound:g} point{'' if bound == 1 else 's'}" if bar.points else f"within {bound:g} %"


# -- tables -----------------------------------------------------------------------------------------------------------


def bar_table(cases: Sequence[ValidationCase]) -> Table:
    """A row a bar, and one for the plans."""
    header = ("metric", "asked", "met", "missed", "undecided", "median |error|", "largest error", "where")
    rows = [_bar_row(bar, judged(cases, bar)) for bar in BARS]
    says = (
        "Simulated against the median of the measured runs; errors of shares in points. TTFT is asked below saturation."
    )
    return Table("Bars", header, [*rows, _plans_row(replays(cases))], says)


def _bar_row(bar: Bar, scores: Sequence[CaseScore]) -> tuple[str, ...]:
    if not scores:
        return (bar.label, wanted(bar), "not asked", "-", "-", "-", "-", "-")
    worst = max(scores, key=lambda scored: scored.size)
    verdicts = [scored.score.verdict for scored in scores]
    counts = (
        f"{verdicts.count('met'):,} of {len(scores):,}",
        *(f"{verdicts.count(v):,}" for v in ("missed", "undecided")),
    )
    middle = size_text(bar, median(scored.size for scored in scores))
    return (bar.label, wanted(bar), *counts, middle, error_text(worst.score), worst.where)


def _plans_row(verdicts: Sequence[ReplayOutcome]) -> tuple[str, ...]:
    others = [replay for replay in verdicts if not identical(replay)]
    where = others[0].run if others else "-"
    counts = (f"{len(verdicts) - len(others):,} of {len(verdicts):,}", f"{len(others):,}", "0")
    return ("measured runs, replayed", "identical plans", *counts, "-", others[0].says if others else "-", where)


def error_table(cases: Sequence[ValidationCase]) -> Table:
    """A row for each case and loop, a column for each metric."""
    header = ("case", "loop", *(SHORT.get(bar.label, bar.label) for bar in BARS), "plans replayed")
    rows = [_error_row(case, loop) for case in cases for loop in case.loops]
    counts = sorted({len(pair.measured) for case in cases for pair in case.loops.values()})
    measured = " to ".join(f"{count}" for count in dict.fromkeys((counts[0], counts[-1]))) + " times"
    says = (
        "*: the bar is missed. ~: undecided, missed by no more than the measured runs lie apart. In "
        f"parentheses: not asked. pt: points. Each loop was measured {'once' if counts[-1] == 1 else measured}. "
        "Plans replayed: steps of the measured runs whose plan was derived again."
    )
    return Table("Errors by workload", header, rows, says)


def _error_row(case: ValidationCase, loop: str) -> tuple[str, ...]:
    cells = [_error_cell(of(case, loop, bar.label)) for bar in BARS]
    return (case.name, loop, *cells, _replay_cell(case.replays[loop]))


def _error_cell(score: Score | None) -> str:
    if score is None:
        return "-"
    return f"{error_text(score)}{MARKS[score.verdict]}" if score.counts else f"({error_text(score)})"


def _replay_cell(verdicts: Sequence[ReplayOutcome]) -> str:
    matched = f"{sum(replay.matched or 0 for replay in verdicts):,} of {sum(replay.steps for replay in verdicts):,}"
    return matched if all(map(identical, verdicts)) else f"{matched} *"


def repeat_table(cases: Sequence[ValidationCase]) -> list[Table]:
    """How far the measured runs of one workload and loop lie apart; none if there is one of each."""
    repeated = [(case, loop, len(pair.measured)) for case in cases for loop, pair in case.loops.items()]
    rows = [_repeat_row(case, loop, count) for case, loop, count in repeated if count > 1]
    header = ("case", "loop", "runs", *(SHORT.get(label, label) for label in REPEATED))
    says = "The largest less the smallest of the measured runs, as a share of their median or in points (pt). ~: more "
    says += "than the bar allows the simulated run to be off, so that it cannot be told whether a miss is one."
    return [Table("Repeats", header, rows, says)] if rows else []


def _repeat_row(case: ValidationCase, loop: str, count: int) -> tuple[str, ...]:
    scores = [of(case, loop, label) for label in REPEATED]
    return (case.name, loop, f"{count:,}", *map(_spread_cell, scores))


def _spread_cell(score: Score | None) -> str:
    if score is None or score.spread is None:
        return "-"
    return size_text(score.bar, score.spread) + ("" if score.spread <= score.bar.bound else MARKS["undecided"])


def case_table(cases: Sequence[ValidationCase]) -> Table:
    """What the cases are."""
    header = ("case", "model", "scheduler", "CPU work added", "arrivals", "requests", "runs of a loop", "about")
    says = (
        "Runs of a loop: how often it was measured. Arrivals: their rate as a share of the synchronous loop's capacity."
    )
    return Table("Workloads", header, [_case_row(case) for case in cases], says)


def _case_row(case: ValidationCase) -> tuple[str, ...]:
    arrivals = "all at once" if case.load is None else f"{case.load:.0%} of capacity"
    pairs = [case.loops[loop] for loop in LOOPS if loop in case.loops]
    runs = ", ".join(dict.fromkeys(f"{len(pair.measured):,}" for pair in pairs))
    requests = f"{pairs[0].simulated.summary['requests']:,}"
    return (case.name, case.model, case.scheduler, f"{case.injected_ms:g} ms", arrivals, requests, runs, case.about)
