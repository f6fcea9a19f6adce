"""Clients whose next request follows the end of their last one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from cbsim.policy.request import RequestSpec


class Draw(Protocol):
    """A client's own random numbers."""

    def exponential(self, scale: float) -> float: ...


class Users:
    """A closed loop: whoever's request ends sends the next one of the list, after thinking, unless that is after
    `until_ns`. The first users are those of the requests that are sent at the start, by their index.

    Thinking takes `think_ns`; where users have `draws` of their own, one each, it is exponential with that mean. So how
    long a user thinks before its nth request depends on the two alone, not on who else has ended before.

    A request of several `samples` is so many in a row of the list; it ends when all of them have.
    """

    def __init__(
        self,
        waiting: Sequence[RequestSpec],
        think_ns: int,
        draws: Sequence[Draw] = (),
        until_ns: int | None = None,
        samples: int = 1,
    ) -> None:
        self._waiting = list(waiting)[::-1]
        self._think_ns, self._draws, self._until_ns, self._samples = think_ns, draws, until_ns, samples
        self._user: dict[int, int] = {}  # by the number of a request that is not a first one
        self._ended: dict[int, int] = {}  # samples of a request, by its number, while there are others

    def after(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        number = spec.index // self._samples
        if not self._waiting or not self._is_over(number):
            return []
        user = self._user.pop(number, number)
        at_ns = now_ns + (round(self._draws[user].exponential(self._think_ns)) if self._draws else self._think_ns)
        if self._until_ns is not None and at_ns > self._until_ns:
            return []
        first = replace(self._waiting.pop(), arrival_ns=at_ns)
        self._user[first.index // self._samples] = user
        others = [replace(self._waiting.pop(), arrival_ns=at_ns, sample_of=first) for _ in range(1, self._samples)]
        return [first, *others]

    def _is_over(self, number: int) -> bool:
        """One more sample of a request has ended. Was it the last one?"""
        ended = self._ended.pop(number, 0) + 1
        if ended < self._samples:
            self._ended[number] = ended
        return ended == self._samples

    def drafts(self) -> Iterator[tuple[RequestSpec, int]]:
        return ((spec, self._think_ns) for spec in reversed(self._waiting))


class Sessions:
    """Conversations: the end of a turn is followed by the next turn of its session, after the delay of that turn."""

    def __init__(self, following: dict[int, tuple[RequestSpec, int]]) -> None:
        self._following = following  # index of a turn -> the next turn, its delay in ns

    def after(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        following = self._following.pop(spec.index, None)
        return [replace(following[0], arrival_ns=now_ns + following[1])] if following else []

    def drafts(self) -> Iterator[tuple[RequestSpec, int]]:
        return iter(self._following.values())
