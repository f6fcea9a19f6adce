"""The search among candidates: what it says is false no more often than it says, and it wastes no runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from cbsim.metrics.checks import objective, parse
from cbsim.search.racing import BREAKS, FAILED, FIRST, IN, WORSE, Goal, Numbers, Outcome, search

MORE = objective("output_tokens_per_s", "")
TTFT = "ttft_s.p99"
SLO = (parse("ttft.p99<=2s", "--check"),)
TRIALS = 200


class World:
    """Candidates with known means of throughput and TTFT, noise in common, and noise of their own."""

    def __init__(self, seed: int, tokens: Sequence[float], ttft: Sequence[float] = (), own: float = 1.0) -> None:
        self._rng, self._tokens, self._ttft, self._own = random.Random(seed), tokens, ttft, own
        self._common: dict[int, float] = {}
        self.asked: list[tuple[list[int], range]] = []

    def measure(self, candidates: Sequence[int], replicates: range) -> Mapping[int, Sequence[Numbers | str]]:
        self.asked.append((list(candidates), replicates))
        for replicate in replicates:
            self._common.setdefault(replicate, self._rng.gauss(0, 10))
        return {i: [self._run(i, replicate) for replicate in replicates] for i in candidates}

    def _run(self, i: int, replicate: int) -> Numbers:
        run = {MORE.name: self._tokens[i] + self._common[replicate] + self._own * self._rng.gauss(0, 1)}
        return run | ({TTFT: self._ttft[i] + 0.1 * self._rng.gauss(0, 1)} if self._ttft else {})


def outcomes(make: Callable[[int], World], goal: Goal, candidates: int) -> list[Outcome]:
    return [search(candidates, make(seed).measure, goal) for seed in range(TRIALS)]


def at_least(share: float) -> float:
    """What a share of TRIALS is not below but by chance: three standard errors less."""
    return share - 3 * math.sqrt(share * (1 - share) / TRIALS)


# -- theory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("lead", [0.05, 1.0, 4.0])
def test_the_best_is_among_those_that_are_left(lead: float, confidence: float) -> None:
    """The statement that is made, with leads far below the noise and above it: the true best is not dropped, and who
    won is the true best.
    """
    tokens = [100 + lead, 100, 100, 99, 98]
    found = outcomes(lambda seed: World(seed, tokens), Goal(MORE, (), confidence, 40), len(tokens))
    assert sum(0 in outcome.left for outcome in found) / TRIALS >= at_least(confidence)
    won = [outcome for outcome in found if outcome.won]
    assert sum(outcome.best != 0 for outcome in won) / TRIALS <= 1 - at_least(confidence)


def test_a_clear_winner_is_found() -> None:
    """Four deviations ahead: it is not only kept, it wins, in nearly every search, and early."""
    goal = Goal(MORE, (), 0.95, 40)
    found = outcomes(lambda seed: World(seed, [104, 100, 100, 99]), goal, 4)
    assert sum(outcome.won and outcome.best == 0 for outcome in found) / TRIALS > 0.95
    assert sum(len(outcome.trials[0].runs) < 40 for outcome in found) / TRIALS > 0.5


def test_the_winner_keeps_the_conditions() -> None:
    """The fastest candidate truly breaks the limit, by a hair: it is declared the winner no more often than said."""
    tokens, ttft = [110, 104, 100, 100], [2.02, 1.9, 1.0, 0.5]
    found = outcomes(lambda seed: World(seed, tokens, ttft), Goal(MORE, SLO, 0.95, 20), 4)
    assert sum(outcome.sure and outcome.best == 0 for outcome in found) / TRIALS <= 1 - at_least(0.95)
    assert sum(1 in outcome.left for outcome in found) / TRIALS >= at_least(0.95)


def test_intervals_hold_at_once() -> None:
    """All intervals of a search against its best one, and not one of them alone, cover the true differences."""
    tokens = [101.0, 100.5, 100, 99, 98]
    found = outcomes(lambda seed: World(seed, tokens), Goal(MORE, (), 0.9, 20), 5)

    def covers(outcome: Outcome) -> bool:
        best = outcome.best
        assert best is not None
        all_of_them = ((i, outcome.against(i)) for i in range(5) if i != best)
        return all(ahead.low <= tokens[best] - tokens[i] <= ahead.high for i, ahead in all_of_them)

    assert sum(map(covers, found)) / TRIALS >= at_least(0.9)


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_only_those_that_are_left_get_more() -> None:
    """Replicates are consecutive, nobody is measured twice, and one that is far behind gets the first few only."""
    world = World(1, [100, 99.9, 50])
    outcome = search(3, world.measure, Goal(MORE, (), 0.95, 20))
    assert [replicates for _, replicates in world.asked] == [range(5), range(5, 10), range(10, 20)]
    assert [candidates for candidates, _ in world.asked] == [[0, 1, 2], [0, 1], [0, 1]]
    assert [len(trial.runs) for trial in outcome.trials] == [20, 20, FIRST]
    assert [trial.verdict for trial in outcome.trials] == [IN, IN, WORSE]
    assert not outcome.won and outcome.second in (0, 1)


def test_equal_candidates_end_the_search() -> None:
    """What is the same in every replicate cannot be told apart by more of them."""
    world = World(1, [100, 100, 90], own=0.0)
    outcome = search(3, world.measure, Goal(MORE, (), 0.95, 1000))
    assert len(world.asked) == 1
    assert outcome.left == [0, 1] and outcome.against(1).none and not outcome.won


def test_without_noise_the_first_round_decides() -> None:
    world = World(1, [100, 100.1, 99], own=0.0)
    outcome = search(3, world.measure, Goal(MORE, (), 0.95, 1000))
    assert outcome.won and outcome.best == 1 and len(world.asked) == 1
    less = search(3, World(1, [100, 100.1, 99], own=0.0).measure, Goal(replace(MORE, sign=-1), (), 0.95, 1000))
    assert less.won and less.best == 2


def test_who_breaks_a_condition_is_dropped_and_beats_nobody() -> None:
    outcome = search(3, World(1, [200, 150, 100], [5.0, 2.0, 1.0]).measure, Goal(MORE, SLO, 0.95, 10))
    assert outcome.trials[0].verdict == BREAKS and outcome.trials[0].why == "ttft.p99<=2s"
    assert outcome.trials[1].verdict == IN  # on the limit: nobody can tell, so it does not drop the slower one
    assert outcome.trials[2].verdict == IN and outcome.sure and outcome.best == 2


def test_nobody_keeps_the_conditions() -> None:
    world = World(1, [200, 150], [5.0, 6.0])
    outcome = search(2, world.measure, Goal(MORE, SLO, 0.95, 40))
    assert (outcome.best, outcome.left, outcome.sure, len(world.asked)) == (None, [], False, 1)


def test_a_run_that_fails_drops_its_candidate_alone() -> None:
    """A run without the metric is no run; of one that lacks a condition's metric the condition does not hold."""

    def measure(candidates: Sequence[int], replicates: range) -> Mapping[int, Sequence[Numbers | str]]:
        kinds: list[Numbers | str] = ["stuck", {TTFT: 1.0}, {MORE.name: 9.0}, {MORE.name: 5.0, TTFT: 1.0}]
        return {i: [kinds[i] for _ in replicates] for i in candidates}

    outcome = search(4, measure, Goal(MORE, SLO, 0.95, 10))
    assert [trial.verdict for trial in outcome.trials] == [FAILED, FAILED, BREAKS, IN]
    assert [trial.why for trial in outcome.trials[:2]] == ["stuck", f"the run has no {MORE.name}"]
    assert outcome.won and outcome.best == 3


def test_the_confidence_of_an_interval() -> None:
    """Three rounds; of four candidates one is compared with three; two conditions each: 3 (3 + 8) intervals."""
    goal = Goal(MORE, (*SLO, parse("tpot.p99<=50ms", "--check")), 0.95, 20)
    assert 1 - goal.each(4) == pytest.approx(0.05 / 33)
    assert Goal(MORE, (), 0.95, 20).each(1) == pytest.approx(0.95)
