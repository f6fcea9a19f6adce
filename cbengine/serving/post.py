"""Messages of the event loop to the engine's thread: requests, cancellations, and the end of requests."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from cbengine.device.clock import WallClock
from cbengine.sequence import Sequence
from cbsim.http.backend import NS
from cbsim.policy.request import RequestSpec
from cbsim.runs.inbox import NEVER_NS


class Left(NamedTuple):
    """A client's cancellation of its request, and its time (ns since the start)."""

    spec: RequestSpec
    at_ns: int


class Post:
    """A queue of messages from one thread to another, in order, without a lock: one appends, the other takes. A thread
    that waits for messages sleeps until there are some.
    """

    def __init__(self) -> None:
        self.closed = False  # no request follows the messages in the queue
        self.stopped = False  # the reader is to end at once
        self._letters: deque[Sequence | Left] = deque()
        self._news = threading.Event()

    def send(self, letter: Sequence | Left) -> None:
        self._letters.append(letter)
        self._news.set()

    def close(self) -> None:
        self.closed = True
        self._news.set()

    def stop(self) -> None:
        self.stopped = True
        self._news.set()

    def take(self) -> list[Sequence | Left]:
        """Return and remove the messages in the queue."""
        letters = []
        while self._letters:
            letters.append(self._letters.popleft())
        return letters

    def wait(self, seconds: float | None) -> None:
        """Wait until something is sent since the last wait, or the time is over; None: without a limit."""
        self._news.wait(seconds)
        self._news.clear()


class WokenClock(WallClock):
    """A wall clock for an engine whose waits end when its post receives a message."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def wait_until(self, at_ns: int) -> None:
        self._post.wait(None if at_ns >= NEVER_NS else max(0, at_ns - self.now_ns()) / NS)
