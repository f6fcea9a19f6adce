"""The best of several candidates by replicates at common random numbers, in rounds, with a bound on being wrong.

All candidates get a few replicates. Then those go that break a condition for sure, and those that are worse for sure
than the leader: the best mean among those that keep all conditions for sure. The others get as many replicates again.

A candidate goes if an interval of Student's t says so: of the mean of a condition's metric, or of the mean paired
difference to the leader. Call the best of those that truly keep the conditions b. What is said at the end can be false
only if an interval misses its mean that compares b with one of the other K - 1, or a candidate with one of C
conditions, in one of L rounds. These are L (K - 1 + K C) intervals, whoever leads when, so each has the confidence
1 - (1 - confidence) / (L (K - 1 + K C)) (Bonferroni), and all of them hold at once with `confidence`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from cbsim.metrics.checks import OPERATORS, Check, Objective
from cbsim.stats import intervals, paired
from cbsim.stats.paired import Paired

FIRST = 5
IN, WORSE, BREAKS, FAILED = "in", "worse", "breaks", "failed"
Numbers = Mapping[str, float]
Measure = Callable[[Sequence[int], range], Mapping[int, Sequence[Numbers | str]]]
"""Candidates and replicates: the metrics of each run, or the reason why there are none, in order of the replicates."""


class Goal(NamedTuple):
    """What is best, what has to hold, with which confidence, and after how many replicates at most: 2 or more."""

    metric: Objective
    slo: Sequence[Check]
    confidence: float
    most: int

    @property
    def rounds(self) -> tuple[int, ...]:
        """Replicates that a candidate has after each."""
        return intervals.doublings(FIRST, self.most)

    def each(self, candidates: int) -> float:
        """The confidence of an interval."""
        count = candidates - 1 + candidates * len(self.slo)
        return intervals.each(self.confidence, len(self.rounds) * count)


@dataclass(slots=True)
class Trial:
    """What is known of a candidate. `why` says more of a verdict: the condition, or the reason of a failure."""

    runs: list[Numbers] = field(default_factory=list)
    verdict: str = IN
    why: str = ""

    def add(self, runs: Sequence[Numbers | str], metric: str) -> None:
        """What became of its next replicates."""
        for run in runs:
            if isinstance(run, str) or metric not in run:
                self.drop(FAILED, run if isinstance(run, str) else f"the run has no {metric}")
                return
            self.runs.append(run)

    def drop(self, verdict: str, why: str = "") -> None:
        self.verdict, self.why = verdict, why

    def values(self, metric: str) -> list[float]:
        """Of the runs that have the metric."""
        return [run[metric] for run in self.runs if metric in run]

    def mean(self, metric: str) -> float:
        return fmean(self.values(metric))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a search. `best` is the candidate with the best mean of those left that keep all conditions, by their
    means at least; `sure` if it is for sure that it keeps them. `confidence` is that of each interval.
    """

    goal: Goal
    trials: Sequence[Trial]
    best: int | None
    sure: bool
    confidence: float

    @property
    def left(self) -> list[int]:
        """Candidates that may be the best: one of them is, with the confidence of the goal."""
        return [i for i, trial in enumerate(self.trials) if trial.verdict == IN]

    @property
    def won(self) -> bool:
        """Is one left, and sure to keep the conditions?"""
        return self.sure and len(self.left) == 1

    @property
    def second(self) -> int | None:
        """The least behind the best of those that were not found to break a condition."""
        behind = [i for i, trial in enumerate(self.trials) if i != self.best and trial.verdict in (IN, WORSE)]
        return min(behind, key=self.behind, default=None)

    def behind(self, other: int) -> float:
        """By how much the best is better than another, over the replicates that both have."""
        return self.goal.metric.sign * self.against(other).mean

    def against(self, other: int) -> Paired:
        """The best one against another, over the replicates that both have."""
        assert self.best is not None
        return difference(self.trials[self.best], self.trials[other], self.goal.metric.name, self.confidence)


def search(candidates: int, measure: Measure, goal: Goal) -> Outcome:
    """Find the best of so many candidates, called 0, 1, ..."""
    trials = [Trial() for _ in range(candidates)]
    confidence = goal.each(candidates)
    done = 0
    leader = None
    for upto in goal.rounds:
        left = [i for i, trial in enumerate(trials) if trial.verdict == IN]
        for i, runs in measure(left, range(done, upto)).items():
            trials[i].add(runs, goal.metric.name)
        done = upto
        leader = _drop(trials, goal, confidence)
        if _decided(trials, leader, goal, confidence):
            break
    if leader is not None:
        return Outcome(goal, trials, leader, True, confidence)
    likely = [i for i, trial in enumerate(trials) if trial.verdict == IN and _keeps_by_mean(trial, goal.slo)]
    return Outcome(goal, trials, _best(trials, likely, goal.metric), False, confidence)


def _drop(trials: Sequence[Trial], goal: Goal, confidence: float) -> int | None:
    """Drop what breaks a condition or is worse than the leader; the leader, if one keeps all conditions for sure."""
    sure = []
    for i, trial in enumerate(trials):
        if trial.verdict != IN:
            continue
        answers = {check.rule: _holds(check, trial, confidence) for check in goal.slo}
        broken = [condition for condition, answer in answers.items() if answer is False]
        if broken:
            trial.drop(BREAKS, ", ".join(broken))
        elif None not in answers.values():
            sure.append(i)
    leader = _best(trials, sure, goal.metric)
    for i, trial in enumerate(trials):
        if leader is not None and trial.verdict == IN and i != leader:
            ahead = difference(trials[leader], trial, goal.metric.name, confidence)
            if ahead.sign == goal.metric.sign:
                trial.drop(WORSE)
    return leader


def _decided(trials: Sequence[Trial], leader: int | None, goal: Goal, confidence: float) -> bool:
    """Are all that are left the leader, or the same as the leader in every replicate?"""
    left = [i for i, trial in enumerate(trials) if trial.verdict == IN]
    if leader is None:
        return not left
    return all(difference(trials[leader], trials[i], goal.metric.name, confidence).none for i in left if i != leader)


def _best(trials: Sequence[Trial], among: Sequence[int], metric: Objective) -> int | None:
    """The best mean; of equal ones the first."""
    return max(among, key=lambda i: metric.sign * trials[i].mean(metric.name), default=None)


def difference(trial: Trial, other: Trial, metric: str, confidence: float) -> Paired:
    """Of two candidates, over the replicates that both have."""
    ours, theirs = (dict(enumerate(each.values(metric))) for each in (trial, other))
    compared = paired.paired(ours, theirs, confidence)
    assert compared is not None
    return compared


def _holds(check: Check, trial: Trial, confidence: float) -> bool | None:
    """Does a condition hold of a candidate's mean? Of a run that has no such metric none does."""
    values = trial.values(check.metric)
    return intervals.holds(check, values, confidence) if len(values) == len(trial.runs) else False


def _keeps_by_mean(trial: Trial, slo: Sequence[Check]) -> bool:
    return all(OPERATORS[check.compare](trial.mean(check.metric), check.bound) for check in slo)
