"""What the cases of a validation score: how many bars are met, by how much the others are missed, as sentences and
tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

from analysis.statistics.pairing import Replay
from analysis.validation.cases import LOOPS, Case
from cbsim.draw.markdown import Table
from cbsim.proof.bars import BARS, BOTH, SPEED_UP, Bar, Score

MARKS = {"met": "", "missed": " *", "undecided": " ~"}
SHORT = {SPEED_UP: "speed-up", "output tokens/s": "tokens/s"}
REPEATED = ("makespan", "TPOT p50", "TPOT p99", "GPU active", SPEED_UP)
MOST_NAMED = 3


class Scored(NamedTuple):
    """A score, and the case that it is of."""

    case: Case
    score: Score

    @property
    def where(self) -> str:
        return self.case.name if self.score.loop == BOTH else f"{self.case.name}, {self.score.loop}"

    @property
    def size(self) -> float:
        """Of the error; what is no number is the worst."""
        return abs(self.score.error) if isfinite(self.score.error) else inf


def asked(cases: Sequence[Case], bar: Bar | None = None) -> list[Scored]:
    """The scores that a bar is asked of: of one bar, or all."""
    found = [Scored(case, score) for case in cases for score in case.scores if score.counts]
    return [one for one in found if bar is None or one.score.bar == bar]


def of(case: Case, loop: str, label: str) -> Score | None:
    """The score of a row: the speed-up is told in that of the async loop."""
    wanted = BOTH if label == SPEED_UP and loop == "async" else loop
    return next((one for one in case.scores if (one.loop, one.bar.label) == (wanted, label)), None)


def replays(cases: Sequence[Case]) -> list[Replay]:
    """Of every measured run."""
    return [one for case in cases for some in case.replays.values() for one in some]


def identical(one: Replay) -> bool:
    return one.says == "identical"


def holds(cases: Sequence[Case]) -> bool:
    """Is no bar missed, and does every measured run replay? What cannot be decided is not missed."""
    return all(one.score.verdict != "missed" for one in asked(cases)) and all(map(identical, replays(cases)))


# -- sentences --------------------------------------------------------------------------------------------------------


def findings(cases: Sequence[Case]) -> list[str]:
    """The verdict, where it is furthest from what is asked, the speed-up, and the plans."""
    return [_verdict(cases), *_furthest(cases), *_speed_up(cases), _replayed(cases)]


def _verdict(cases: Sequence[Case]) -> str:
    verdicts = [one.score.verdict for one in asked(cases)]
    met, missed, undecided = (verdicts.count(name) for name in MARKS)
    reason = " (missed by no more than the measured runs themselves lie apart)" if undecided else ""
    runs = sum(len(pair.measured) for case in cases for pair in case.loops.values())
    return (
        f"{met:,} of {len(verdicts):,} asked scores are met, {missed:,} missed, {undecided:,} undecided{reason}: "
        f"{_count(len(cases), 'workload')}, {_count(runs, 'measured run')}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _furthest(cases: Sequence[Case]) -> Iterator[str]:
    """The largest errors, one a bar, measured by what is asked."""
    worst = [max(found, key=lambda one: one.size) for bar in BARS if (found := asked(cases, bar))]
    found = sorted(worst, key=lambda one: -one.size / one.score.bar.bound)[:MOST_NAMED]
    told = [f"{one.score.bar.label} {error_text(one.score)} ({one.where}; {wanted(one.score.bar)})" for one in found]
    if told:
        yield f"Largest errors, by what is asked: {', '.join(told)}."


def _speed_up(cases: Sequence[Case]) -> Iterator[str]:
    found = [one for one in asked(cases) if one.score.bar.label == SPEED_UP]
    if not found:
        return
    worst = max(found, key=lambda one: one.size)
    simulated, measured, _ = worst.score.shown()
    at = f"{worst.case.name}, with {worst.case.injected_ms:g} ms of CPU work added to every step"
    yield (
        f"Speed-up of the async loop over the sync one: largest error {error_text(worst.score)}, in {at} "
        f"({simulated} simulated, {measured} measured)."
    )


def _replayed(cases: Sequence[Case]) -> str:
    found = replays(cases)
    others = [one for one in found if not identical(one)]
    if not others:
        return f"Every measured run replays to identical plans: {len(found):,} of {len(found):,}."
    told = "; ".join(f"{one.run}: {one.says}" for one in others[:MOST_NAMED])
    more = f"; {len(others) - MOST_NAMED:,} more" if len(others) > MOST_NAMED else ""
    agreed = len(found) - len(others)
    return f"{agreed:,} of {_count(len(found), 'measured run')} replay to identical plans; not {told}{more}."


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


def bar_table(cases: Sequence[Case]) -> Table:
    """A row a bar, and one for the plans."""
    header = ("metric", "asked", "met", "missed", "undecided", "median |error|", "largest error", "where")
    rows = [_bar_row(bar, asked(cases, bar)) for bar in BARS]
    says = (
        "Simulated against the median of the measured runs; errors of shares in points. TTFT is asked below saturation."
    )
    return Table("Bars", header, [*rows, _plans_row(replays(cases))], says)


def _bar_row(bar: Bar, found: Sequence[Scored]) -> tuple[str, ...]:
    if not found:
        return (bar.label, wanted(bar), "not asked", "-", "-", "-", "-", "-")
    worst = max(found, key=lambda one: one.size)
    verdicts = [one.score.verdict for one in found]
    counts = (
        f"{verdicts.count('met'):,} of {len(found):,}",
        *(f"{verdicts.count(v):,}" for v in ("missed", "undecided")),
    )
    middle = size_text(bar, median(one.size for one in found))
    return (bar.label, wanted(bar), *counts, middle, error_text(worst.score), worst.where)


def _plans_row(found: Sequence[Replay]) -> tuple[str, ...]:
    others = [one for one in found if not identical(one)]
    where = others[0].run if others else "-"
    counts = (f"{len(found) - len(others):,} of {len(found):,}", f"{len(others):,}", "0")
    return ("measured runs, replayed", "identical plans", *counts, "-", others[0].says if others else "-", where)


def error_table(cases: Sequence[Case]) -> Table:
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


def _error_row(case: Case, loop: str) -> tuple[str, ...]:
    cells = [_error_cell(of(case, loop, bar.label)) for bar in BARS]
    return (case.name, loop, *cells, _replay_cell(case.replays[loop]))


def _error_cell(score: Score | None) -> str:
    if score is None:
        return "-"
    return f"{error_text(score)}{MARKS[score.verdict]}" if score.counts else f"({error_text(score)})"


def _replay_cell(found: Sequence[Replay]) -> str:
    matched = f"{sum(one.matched or 0 for one in found):,} of {sum(one.steps for one in found):,}"
    return matched if all(map(identical, found)) else f"{matched} *"


def repeat_table(cases: Sequence[Case]) -> list[Table]:
    """How far the measured runs of one workload and loop lie apart; none if there is one of each."""
    repeated = [(case, loop, len(pair.measured)) for case in cases for loop, pair in case.loops.items()]
    rows = [_repeat_row(case, loop, count) for case, loop, count in repeated if count > 1]
    header = ("case", "loop", "runs", *(SHORT.get(label, label) for label in REPEATED))
    says = "The largest less the smallest of the measured runs, as a share of their median or in points (pt). ~: more "
    says += "than the bar allows the simulated run to be off, so that it cannot be told whether a miss is one."
    return [Table("Repeats", header, rows, says)] if rows else []


def _repeat_row(case: Case, loop: str, count: int) -> tuple[str, ...]:
    scores = [of(case, loop, label) for label in REPEATED]
    return (case.name, loop, f"{count:,}", *map(_spread_cell, scores))


def _spread_cell(score: Score | None) -> str:
    if score is None or score.spread is None:
        return "-"
    return size_text(score.bar, score.spread) + ("" if score.spread <= score.bar.bound else MARKS["undecided"])


def case_table(cases: Sequence[Case]) -> Table:
    """What the cases are."""
    header = ("case", "model", "scheduler", "CPU work added", "arrivals", "requests", "runs of a loop", "about")
    says = (
        "Runs of a loop: how often it was measured. Arrivals: their rate as a share of the synchronous loop's capacity."
    )
    return Table("Workloads", header, [_case_row(case) for case in cases], says)


def _case_row(case: Case) -> tuple[str, ...]:
    arrivals = "all at once" if case.load is None else f"{case.load:.0%} of capacity"
    pairs = [case.loops[loop] for loop in LOOPS if loop in case.loops]
    runs = ", ".join(dict.fromkeys(f"{len(pair.measured):,}" for pair in pairs))
    requests = f"{pairs[0].simulated.summary['requests']:,}"
    return (case.name, case.model, case.scheduler, f"{case.injected_ms:g} ms", arrivals, requests, runs, case.about)
