"""Where tasks are done: here, in processes of this machine, or elsewhere. What differs is who calls `work`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from cbsim.sweeps.work import Made, Task, work


class Executor(Protocol):
    """Does tasks in any order. Each comes back once, whatever happens to who works on it."""

    @property
    def about(self) -> str:
        """Where it works, in a few words."""

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """What became of the tasks, as they are done. They are taken from `tasks` when there is a hand free."""

    def close(self) -> None:
        """Let go of everything at once; what is under way is lost. May be called twice."""


class Here:
    """One after the other, in this process."""

    about = "this process"

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        return map(work, tasks)

    def close(self) -> None:
        """Nothing is held."""
