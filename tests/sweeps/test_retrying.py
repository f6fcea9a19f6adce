"""Tasks whose processes and machines die, without any: every task comes back once, and only who is to blame fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

import cbsim
from cbsim.sweeps.work import DIED, GIVEN_UP, MOST_LOST, Executor, Gone, Made, Task

SCENARIO = cbsim.load("8k_b32")
D, M = Gone.PROCESS, Gone.MACHINE


class Scripted(Executor):
    """Workers whose fates are written down: how often a task is lost and how, and who is done first."""

    def __init__(self, fates: Mapping[str, Sequence[Gone]], rooms: Sequence[int], order: Sequence[int]) -> None:
        self._fates = {key: list(fate) for key, fate in fates.items()}
        self._rooms, self._order = list(rooms), list(order)
        self.flying: list[str] = []
        self.deaths_alone: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.most = 0  # more than there was room for, at any time

    @property
    def room(self) -> int:  # type: ignore[override]
        self._rooms = [*self._rooms[1:], self._rooms[0]]
        return self._rooms[0]

    def give(self, task: Task) -> None:
        assert task.key not in self.flying
        self.flying.append(task.key)
        self.tries[task.key] += 1
        self.most = max(self.most, len(self.flying))

    def take(self) -> tuple[str, Made | Gone]:
        self._order = [*self._order[1:], self._order[0]]
        key = self.flying[self._order[0] % len(self.flying)]
        alone = len(self.flying) == 1
        self.flying.remove(key)
        became = self._fates[key].pop(0) if self._fates[key] else Made(key, {})
        self.deaths_alone[key] += alone and became is D
        return key, became


FATES = st.lists(st.lists(st.sampled_from([D, M]), max_size=4), max_size=12)


@given(fates=FATES, rooms=st.lists(st.integers(1, 6), min_size=1), order=st.lists(st.integers(0, 20), min_size=1))
def test_every_task_comes_back_once(fates: list[list[Gone]], rooms: list[int], order: list[int]) -> None:
    """Whatever dies and whoever is first. A task that fails died alone; one that died once at most is done; no more
    are under way than there was room for.
    """
    named = {f"task {at}": fate for at, fate in enumerate(fates)}
    workers = Scripted(named, rooms, order)
    made = list(workers.each(Task(key, SCENARIO, "summary") for key in named))
    assert sorted(each.key for each in made) == sorted(named)
    assert not workers.flying
    assert workers.most <= max(rooms)
    for each in made:
        assert each.reason in {None, DIED}
        if each.reason:
            assert workers.deaths_alone[each.key]
            assert named[each.key].count(D) >= 2
        if named[each.key].count(D) < 2:
            assert each.reason is None


def test_a_task_that_loses_every_machine_fails() -> None:
    """It would go on for ever."""
    workers = Scripted({"unlucky": [M] * MOST_LOST, "lucky": [M] * (MOST_LOST - 1)}, [2], [0])
    made = workers.each([Task(key, SCENARIO, "summary") for key in ("unlucky", "lucky")])
    assert {each.key: each.reason for each in made} == {"unlucky": GIVEN_UP, "lucky": None}
    assert workers.tries == {"unlucky": MOST_LOST, "lucky": MOST_LOST}
