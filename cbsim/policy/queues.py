"""Queues of requests that wait for admission, and their orders."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from cbsim.policy.request import Request


class Queue(Protocol):
    """A queue of waiting requests; iteration goes in the order in which they would be admitted."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def push(self, request: Request) -> None: ...
    def push_front(self, request: Request) -> None: ...
    def head(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...


class ArrivalQueue(deque[Request]):
    """A queue that is first come, first served; a preempted request goes to the front."""

    push = deque[Request].append
    push_front = deque[Request].appendleft
    pop = deque[Request].popleft

    def head(self) -> Request:
        return self[0]


class PriorityQueue:
    """A queue of least (priority, arrival, id) first. It has no front: a preempted request goes by the same key."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, str], int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))

    def push(self, request: Request) -> None:
        spec = request.spec
        heapq.heappush(self._heap, ((spec.priority, spec.arrival_ns, spec.id), spec.index, request))

    push_front = push

    def head(self) -> Request:
        return self._heap[0][-1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[-1] is not request]
        heapq.heapify(self._heap)
