"""An event loop with virtual time, which jumps to the next timer when nothing is left to do, and a server's clocks.

Sockets and threads work as on any loop, and take no virtual time: before a jump the loop checks for bytes in transit
over the loopback interface, and waits for work that threads are doing. It reports what it does not support: a sleep
that is not asyncio's, a call that blocks the loop, a thread that waits for the loop.
"""

from __future__ import annotations

import asyncio
import math
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from asyncio import Future, get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from itertools import count
from types import FrameType
from typing import Any

from cbsim.errors import RunError

EPOCH_S = 1_700_000_000  # the value of time.time() at the start, the same in every run
SETTLING = 3  # the number of checks for bytes in transit over sockets before a jump
PATIENCE_S = 10.0  # real seconds that a call may block the loop, or a thread may work, before this counts as a deadlock
SHORT_S = 0.05
RESOLUTION_S = 1e-9
WATCH_S = 1.0
FUNCTIONS = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "sleep")
REAL: dict[str, Callable[..., Any]] = {name: getattr(time, name) for name in FUNCTIONS}
_now_s, _thread_s = time.perf_counter, time.thread_time


class VirtualTimeError(RunError):
    """An error raised for an operation that virtual time does not support. The message states which, and where."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is virtual, in seconds from 0. `strays` lists unsupported calls and their effect;
    `deadlock` states what could not continue, even if the caller suppressed the error.
    """

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._resting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._threads: dict[asyncio.Future[Any], tuple[str, float]] = {}
        self.strays: list[str] = []
        self.deadlock: str | None = None
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        self._look = selector.select
        selector.select = self._wait  # type: ignore[method-assign, assignment]
        self._clock_resolution = RESOLUTION_S
        self._echo, self._sound = _loopback()
        self._leave()

    def time(self) -> float:
        return self._virtual_s

    def run_forever(self) -> None:
        self._leave()
        super().run_forever()

    def close(self) -> None:
        self._echo.close()
        self._sound.close()
        super().close()

    def at_rest(self, when_s: float, future: asyncio.Future[None]) -> None:
        """Resolve a future at `when_s`, after everything that happens at that moment, unless it is resolved."""
        heappush(self._resting, (when_s, next(self._order), future))

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = super().run_in_executor(executor, func, *args)
        self._threads[future] = (_name(func), _now_s())
        future.add_done_callback(lambda done: self._threads.pop(done, None))
        return future

    def _wait(self, timeout: float | None) -> list[Any]:
        """Replace the selector's wait. No callback is ready unless `timeout` is 0."""
        self._check_blocked()
        try:
            return self._ready_or_later(timeout)
        finally:
            self._leave()

    def _ready_or_later(self, timeout: float | None) -> list[Any]:
        ready = self._look(0)
        if ready or timeout == 0:
            return ready
        if self._threads:
            self._check_threads()
            return self._look(SHORT_S)
        for _ in range(SETTLING):
            self._sound.send(b".")  # once it is heard, everything that was sent before it has arrived, too
            self._echo.recv(1)
            if ready := self._look(0):
                return ready
        return self._jump()

    def _jump(self) -> list[Any]:
        timer_s = self._scheduled[0]._when if self._scheduled else float("inf")  # type: ignore[attr-defined]
        while self._resting and self._resting[0][2].done():
            heappop(self._resting)
        if self._resting and self._resting[0][0] < timer_s:
            when_s, _, future = heappop(self._resting)
            self._set(when_s)
            future.set_result(None)
            return []
        if timer_s < float("inf"):
            self._set(timer_s)
            return []
        return self._outside()

    def _set(self, when_s: float) -> None:
        """Jump to `when_s`. Timers are due within the clock's resolution, never finer than its floating-point one."""
        self._virtual_s = max(self._virtual_s, when_s)
        self._clock_resolution = max(RESOLUTION_S, math.ulp(self._virtual_s))

    def _outside(self) -> list[Any]:
        """Wait for bytes from outside, the only possible event. Raises VirtualTimeError after PATIENCE_S."""
        began = _now_s()
        while not (ready := self._look(SHORT_S)):
            if _now_s() - began > PATIENCE_S:
                self.deadlock = "nothing is left to do, and the client waits for something that never comes"
                raise VirtualTimeError(self.deadlock)
        return ready

    def _check_threads(self) -> None:
        """Raise VirtualTimeError if a thread has been working for longer than PATIENCE_S."""
        name, began = min(self._threads.values(), key=lambda thread: thread[1])
        if (worked := _now_s() - began) > PATIENCE_S:
            message = f"a thread has been in {name} for {worked:.0f} s of real time"
            self.deadlock = f"{message}: virtual time waits for threads, so none of them can wait for it"
            self._threads.clear()
            raise VirtualTimeError(self.deadlock)

    def _check_blocked(self) -> None:
        """Record a callback that waited of its own accord for a while; a delay by a busy machine does not count."""
        waited = _now_s() - self._left_at
        if waited <= SHORT_S or self._threads or _waits() == self._left_waits:
            return
        if waited - (_thread_s() - self._left_cpu) > waited / 2:
            self.strays.append(f"a callback kept the loop for {waited:.2f} s of real time, in which it did not compute")

    def _leave(self) -> None:
        """Record the moment from which callbacks run."""
        self._left_at, self._left_cpu, self._left_waits = _now_s(), _thread_s(), _waits()

    def check_deadlock(self) -> None:
        """Raise VirtualTimeError if there was a deadlock."""
        if self.deadlock is not None:
            raise VirtualTimeError(self.deadlock)

    def stray_sleep(self, seconds: float) -> None:
        """Replace time.sleep: the whole loop sleeps. Other threads really do, as the loop may not wait for them."""
        if threading.get_ident() != self._thread_id:  # type: ignore[attr-defined]
            self.strays.append(f"a thread slept for {seconds:g} s of real time, which took no virtual time")
            REAL["sleep"](seconds)
            return
        where = _location(sys._getframe(1))
        self.strays.append(f"time.sleep({seconds:g}) in {where} kept the loop: what was due meanwhile came late")
        self._virtual_s += seconds

    def blocked(self, signum: int, frame: FrameType | None) -> None:
        """Raise VirtualTimeError, as a signal handler, where the loop has been blocked for longer than PATIENCE_S."""
        del signum
        waited = _now_s() - self._left_at
        if self.is_running() and waited > PATIENCE_S and waited - (_thread_s() - self._left_cpu) > waited / 2:
            where = _location(frame)
            self.deadlock = f"{where} has blocked the loop for {waited:.0f} s: use an asynchronous call there"
            raise VirtualTimeError(self.deadlock)


@contextmanager
def clocks(loop: VirtualLoop) -> Iterator[None]:
    """Make the functions of the module `time` return the loop's time. Names imported from it before stay real."""
    zero = {"time": EPOCH_S, "monotonic": 0, "perf_counter": 0}
    patched: dict[str, Callable[..., Any]] = {"sleep": loop.stray_sleep}
    for name, start in zero.items():
        patched[name] = lambda start=start: start + loop.time()
        patched[f"{name}_ns"] = lambda start=start: start * NS + round(loop.time() * NS)
    for name, function in patched.items():
        setattr(time, name, function)
    try:
        yield
    finally:
        for name in FUNCTIONS:
            setattr(time, name, REAL[name])


@contextmanager
def watched(loop: VirtualLoop) -> Iterator[None]:
    """Report a loop that is blocked by a call. Does nothing outside the main thread, as only it has signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, loop.blocked)
    signal.setitimer(signal.ITIMER_REAL, WATCH_S, WATCH_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _location(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "unknown"


def _waits() -> int:
    """Return how often this thread has yielded its core voluntarily; 0 where that is not counted."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if hasattr(resource, "RUSAGE_THREAD") else 0


def _name(function: Any) -> str:
    """Return the name of the function that a thread runs, without the wrappers of asyncio.to_thread."""
    while isinstance(function, partial):
        function = next(filter(callable, function.args[:1]), function.func)
    return str(getattr(function, "__qualname__", function))


def _loopback() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over the loopback interface, like those of clients."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return far, near


NS = 1_000_000_000
EARLY_S = 1.1e-3  # so long before a deadline polling with short sleeps begins: a selector wakes up to 1 ms late


class Clock:
    """Simulated ns since `start`: a virtual loop's, or `scale` in one of this machine's. No lag adds up."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_s = 0.0

    def start(self) -> None:
        self._loop = get_running_loop()
        self._start_s = self._loop.time()

    def now_ns(self) -> int:
        """Return the time; 0 before the start."""
        return 0 if self._loop is None else round((self._loop.time() - self._start_s) * self.scale * NS)

    def lag_s(self, at_ns: int) -> float:
        """Return how late an event due at `at_ns` is now, in seconds of this machine; 0 if it is early."""
        assert self._loop is not None
        return max(0.0, self._loop.time() - self._start_s - at_ns / self.scale / NS)

    async def until(self, at_ns: int, news: Future[None]) -> None:
        """Return at `at_ns`, or soon after `news`; in virtual time after all that clients do at that moment."""
        loop, at_s = self._loop, self._start_s + at_ns / self.scale / NS
        assert loop is not None
        if isinstance(loop, VirtualLoop):
            loop.at_rest(at_s, news)
            await news
            return
        if at_s - loop.time() > EARLY_S:
            timer = loop.call_at(at_s - EARLY_S, resolve, news)
            await news
            timer.cancel()
            if loop.time() < at_s - EARLY_S:
                return
        await asyncio.sleep(0)
        while (left_s := at_s - loop.time()) > 0:
            time.sleep(min(left_s, 2.5e-4))
            await asyncio.sleep(0)


def resolve(future: Future[None]) -> None:
    """Resolve a future unless it is done, waking the task that waits for it."""
    if not future.done():
        future.set_result(None)
