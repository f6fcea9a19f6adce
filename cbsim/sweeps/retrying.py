"""What happens to a task when who works on it is gone: it is done again, and only a task that is to blame fails."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import Protocol

from cbsim.sweeps.processes import DIED
from cbsim.sweeps.work import Made, Task

MOST_LOST = 10
LOST = f"{MOST_LOST} machines that worked on it were lost"


class Gone(Enum):
    """Why a task came back undone."""

    PROCESS = "the process that worked on it died"
    MACHINE = "the machine did, or what it had made was lost with it"


class Workers(Protocol):
    """Who works on tasks, one task a process."""

    @property
    def room(self) -> int:
        """So many tasks may be under way now, at least 1. It may change at any time."""

    def give(self, task: Task) -> None: ...

    def take(self) -> tuple[str, Made | Gone]:
        """The key of a task that is done or came back, and what became of it. Waits for it."""


def each(tasks: Iterable[Task], workers: Workers) -> Iterator[Made]:
    """What became of the tasks, as they are done. One whose process dies is done again when nothing else is under way:
    after all others, or when there are as many of its kind as there is room; it fails if its process dies again. One
    whose machine is lost is not to blame, and is done again at once, but not for ever.
    """
    waiting, suspects = iter(tasks), deque[Task]()
    flying, lost = dict[str, Task](), Counter[str]()
    while True:
        room = workers.room
        fresh = list(islice(waiting, max(0, room - len(flying)))) if len(suspects) < room else []
        alone = bool(suspects) and not (fresh or flying)
        for task in [suspects.popleft()] if alone else fresh:
            flying[task.key] = task
            workers.give(task)
        if not flying:
            return
        key, became = workers.take()
        task = flying.pop(key)
        if isinstance(became, Made):
            yield became
        elif became is Gone.PROCESS:
            if alone:
                yield Made(key, {}, DIED)
            else:
                suspects.append(task)
        else:
            lost[key] += 1
            if lost[key] == MOST_LOST:
                yield Made(key, {}, LOST)
            else:
                flying[key] = task
                workers.give(task)
