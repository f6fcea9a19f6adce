"""The best of several candidates by replicates at common random numbers, in rounds, with a bound on being wrong.

All candidates get a few replicates. Then a candidate is dropped if it surely breaks a condition, or is surely worse
than the leader: the best mean among those that surely keep all conditions. The others get as many replicates again.

The test is an interval of Student's t: of the mean of a condition's metric, or of the mean paired difference to the
leader. Let b be the best of those that truly keep the conditions. The final answer can be wrong only if an interval
misses its mean that compares b with one of the other K - 1, or a candidate with one of C conditions, in one of L
rounds. These are L (K - 1 + K C) intervals, whichever candidate leads, so each has the confidence
1 - (1 - confidence) / (L (K - 1 + K C)) (Bonferroni), and all of them hold at once with `confidence`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from cbsim.metrics import catalogue
from cbsim.metrics.catalogue import Metric
from cbsim.metrics.checks import OPERATORS, Check
from cbsim.stats import intervals
from cbsim.stats.intervals import Interval, Paired

FIRST = 5
IN, WORSE, BREAKS, FAILED = "in", "worse", "breaks", "failed"
Numbers = Mapping[str, float]
Measure = Callable[[Sequence[int], range], Mapping[int, Sequence[Numbers | str]]]
"""A function of candidates and replicates: each run's metrics or failure reason, in order of the replicates."""


class Goal(NamedTuple):
    """The objective, the conditions, the answer's confidence, the most replicates (2 or more), and draws of terms."""

    metric: Metric
    slo: Sequence[Check]
    confidence: float
    most: int
    draws: int = 0

    @property
    def rounds(self) -> tuple[int, ...]:
        """The number of replicates that a candidate has after each round."""
        return intervals.doublings(FIRST, self.most)

    def each(self, candidates: int) -> float:
        count = candidates - 1 + candidates * len(self.slo)
        return intervals.each(self.confidence, len(self.rounds) * count)


@dataclass(slots=True)
class Trial:
    """The runs and the verdict of a candidate. `why` is the condition that it breaks, or the reason of its failure."""

    runs: list[Numbers] = field(default_factory=list)
    verdict: str = IN
    why: str = ""

    def add(self, runs: Sequence[Numbers | str], metric: str) -> None:
        """Append the runs of the next replicates; drop the candidate if one failed or lacks the metric."""
        for run in runs:
            if isinstance(run, str) or metric not in run:
                self.drop(FAILED, run if isinstance(run, str) else f"the run has no {catalogue.metric(metric).spelled}")
                return
            self.runs.append(run)

    def drop(self, verdict: str, why: str = "") -> None:
        self.verdict, self.why = verdict, why

    def values(self, metric: str) -> list[float]:
        return [run[metric] for run in self.runs if metric in run]

    def mean(self, metric: str) -> float:
        return fmean(self.values(metric))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search. `best` is the remaining candidate with the best mean among those that keep all
    conditions, at least by their means; `sure` if it keeps them for sure. `confidence` is that of each interval.
    """

    goal: Goal
    trials: Sequence[Trial]
    best: int | None
    sure: bool
    confidence: float
    draws: Sequence[Outcome] = ()
    """Of the same search with draws of terms: differences then count these, and a candidate is left that one leaves."""

    @property
    def left(self) -> list[int]:
        """The candidates that were not dropped: one of them is the best, with the confidence of the goal."""
        return _left(self.trials)

    @property
    def won(self) -> bool:
        """True if a single candidate is left and surely keeps the conditions."""
        return self.sure and len(self.left) == 1

    @property
    def second(self) -> int | None:
        """The candidate that is least behind the best, among those not found to break a condition."""
        behind = [i for i, trial in enumerate(self.trials) if i != self.best and trial.verdict in (IN, WORSE)]
        return min(behind, key=self.behind, default=None)

    def behind(self, other: int) -> float:
        """Return by how much the best is better than another, over the replicates that both have."""
        return self.goal.metric.sign * self.against(other).mean

    def against(self, other: int) -> Paired:
        """Compare the best one with another, over the replicates that both have."""
        at, over = self._difference(self.trials, other), self.joint(other)
        return at._replace(**over[0]._asdict()) if over else at

    def joint(self, other: int) -> tuple[Interval, float] | None:
        """Return the difference to another by all draws of terms, and the terms' part of it; None unless both ran."""
        ran = [of.trials for of in self.draws if of.trials[other].runs and of.trials[self.best or 0].runs]
        ends = [self._difference(trials, other)[4:6] for trials in ran]
        return intervals.joint(ends, self.confidence) if len(ends) > 1 else None

    def _difference(self, trials: Sequence[Trial], other: int) -> Paired:
        assert self.best is not None
        return difference(trials[self.best], trials[other], self.goal.metric.name, self.confidence)


def with_draws(fitted: Outcome, draws: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a search that counts those with draws of the terms."""
    every = list(zip(*(each.trials for each in (fitted, *draws)), strict=True))
    trials = [replace(of[0], verdict=IN, why="") if IN in {each.verdict for each in of} else of[0] for of in every]
    sure = all(each.sure for each in (fitted, *draws))
    return replace(fitted, trials=trials, sure=sure, draws=draws)


def search(candidates: int, measure: Measure, goal: Goal) -> Outcome:
    trials = [Trial() for _ in range(candidates)]
    confidence = goal.each(candidates)
    leader = None
    for done, upto in pairwise((0, *goal.rounds)):
        for i, runs in measure(_left(trials), range(done, upto)).items():
            trials[i].add(runs, goal.metric.name)
        leader = _drop(trials, goal, confidence)
        if _decided(trials, leader, goal, confidence):
            break
    if leader is not None:
        return Outcome(goal, trials, leader, True, confidence)
    likely = [
        i
        for i in _left(trials)
        if all(OPERATORS[check.compare](trials[i].mean(check.metric), check.bound) for check in goal.slo)
    ]
    return Outcome(goal, trials, _best(trials, likely, goal.metric), False, confidence)


def _left(trials: Sequence[Trial]) -> list[int]:
    return [i for i, trial in enumerate(trials) if trial.verdict == IN]


def _drop(trials: Sequence[Trial], goal: Goal, confidence: float) -> int | None:
    """Drop candidates that break a condition or are worse than the leader; return the leader, None if none is sure."""
    sure = []
    for i in _left(trials):
        trial = trials[i]
        answers: dict[str, bool | None] = {}
        for check in goal.slo:  # None if unsure; False if a run lacks the metric
            values = trial.values(check.metric)
            answers[check.rule] = len(values) == len(trial.runs) and intervals.holds(check, values, confidence)
        broken = [condition for condition, answer in answers.items() if answer is False]
        if broken:
            trial.drop(BREAKS, ", ".join(broken))
        elif None not in answers.values():
            sure.append(i)
    leader = _best(trials, sure, goal.metric)
    for i in _left(trials):
        if leader is not None and i != leader:
            ahead = difference(trials[leader], trials[i], goal.metric.name, confidence)
            if ahead.sign == goal.metric.sign:
                trials[i].drop(WORSE)
    return leader


def _decided(trials: Sequence[Trial], leader: int | None, goal: Goal, confidence: float) -> bool:
    """True if every remaining candidate is the leader or equals it in every replicate."""
    rest = [i for i in _left(trials) if i != leader]
    if leader is None:
        return not rest
    return all(difference(trials[leader], trials[i], goal.metric.name, confidence).none for i in rest)


def _best(trials: Sequence[Trial], among: Sequence[int], metric: Metric) -> int | None:
    """Return the candidate with the best mean, the first of equal ones; None if `among` is empty."""
    return max(among, key=lambda i: metric.sign * trials[i].mean(metric.name), default=None)


def difference(trial: Trial, other: Trial, metric: str, confidence: float) -> Paired:
    """Compare two candidates over the replicates that both have."""
    ours, theirs = (dict(enumerate(each.values(metric))) for each in (trial, other))
    compared = intervals.paired(ours, theirs, confidence)
    assert compared is not None
    return compared
