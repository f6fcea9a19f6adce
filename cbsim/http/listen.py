"""An endpoint on a socket, from its start to its last answer; the session of `cbsim serve` and `cbengine serve`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from cbsim.errors import ERROR, OK, EndpointError
from cbsim.http.app import Endpoint
from cbsim.http.backend import Backend
from cbsim.http.connection import Connection
from cbsim.http.failures import FailingApp, Failures
from cbsim.http.metrics import VllmMeter
from cbsim.http.settings import VARIABLE, Settings
from cbsim.runs.served import SessionDirectory

LAST_WORDS_S = 1.0  # seconds for written bytes to be sent, once all answers have ended


@dataclass(frozen=True, slots=True)
class Ending:
    """A session's end: `why` (`asked`, a signal, `dead` and message), answers `cut`, `interrupted` if stopped twice."""

    why: str
    message: str = ""
    cut: int = 0
    interrupted: bool = False


class Stop:
    """A request to end a session: after the first one answers under way may end, after the second they are cut."""

    def __init__(self) -> None:
        self.why: str | None = None
        self.requested, self.hurried = asyncio.Event(), asyncio.Event()

    def request(self, why: str = "asked") -> None:
        if self.why is None:
            self.why = why
            self.requested.set()
        else:
            self.hurried.set()


async def listen(
    app: Endpoint | Sequence[Endpoint],
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    stop: Stop | None = None,
    signals: bool = True,
    bound: Callable[[], None] = lambda: None,
    ready: Callable[..., None] | None = None,
) -> Ending:
    """Serve until `stop`, SIGTERM or SIGINT, or the servers' own end. Several applications get the port and those
    behind it, any free ones if it is 0. `bound` is called once the ports are theirs, before the first connection;
    `ready`, when connections are accepted, with their addresses. Raises EndpointError if the host is empty or may not
    be open to others, or a port is taken.
    """
    apps = app if isinstance(app, Sequence) else [app]
    check_host(host, apps[0].settings)
    stop, doors = stop or Stop(), [_Door(each) for each in apps]
    with contextlib.ExitStack() as opened:
        ports = []
        for at, door in enumerate(doors):
            ports.append(await door.open(host, port and port + at))
            opened.callback(door.close)
        bound()
        opened.pop_all()
    for door in doors:
        await door.server.start_serving()
    work = asyncio.ensure_future(_run(apps))
    with _signals(stop if signals else None):
        if ready is not None:
            shown = f"[{host}]" if ":" in host else host
            ready(*(f"http://{shown}:{number}/v1" for number in ports))
        await _first(work, stop.requested)
        if stop.why is None:
            stop.request("dead" if work.result() else "asked")
        return await _finish(apps, doors, work, stop)


async def _run(apps: Sequence[Endpoint]) -> str:
    return next(filter(None, await asyncio.gather(*(app.run() for app in apps))), "")


async def _finish(apps: Sequence[Endpoint], doors: Sequence[_Door], work: asyncio.Task[str], stop: Stop) -> Ending:
    """Stop accepting requests; those in progress have `grace_s` seconds to end, or until a second stop."""
    loop, grace_s = asyncio.get_running_loop(), apps[0].settings.grace_s
    end = loop.time() + grace_s
    for app, door in zip(apps, doors, strict=True):
        app.close()
        door.close()
    await _first(work, stop.hurried, grace_s)
    cut = sum([app.cut() for app in apps])
    try:
        dead = await work
    finally:
        for door in doors:
            await door.empty(stop.hurried, max(LAST_WORDS_S, end - loop.time()))
    return Ending(stop.why or "asked", dead, cut, stop.hurried.is_set())


class _Door:
    """The listening socket, once it is open, and its connections."""

    server: asyncio.Server

    def __init__(self, app: Endpoint) -> None:
        self._settings = app.settings
        self._loop = asyncio.get_running_loop()
        self._state = ServerState()
        # Only uvicorn's protocol is used, not its server, which would check ten times a second whether to stop.
        self._config = Config(
            app,
            http=Connection,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="error",  # no log line for every request that is not HTTP
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=app.settings.idle_s,  # type: ignore[arg-type] # any number of seconds
        )
        self._config.load()

    async def open(self, host: str, port: int) -> int:
        """Take the port, without accepting connections, and return it. Raises EndpointError."""
        files_for(self._settings.max_connections)
        connection = partial(Connection, self._config, self._state, self._settings, self._loop)
        try:
            self.server = await self._loop.create_server(connection, host, port, backlog=2048, start_serving=False)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise EndpointError(f"cannot listen on {host}:{port}: {reason}", field="port", value=port) from error
        return int(self.server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more connections; idle ones are closed, the others once they have their answer."""
        self.server.close()
        for connection in [*self._state.connections]:
            connection.shutdown()

    async def empty(self, hurried: asyncio.Event, within_s: float) -> None:
        """Wait for answers that are being written, then cut the remaining ones."""
        writing = self._loop.create_task(self._written())
        await _first(writing, hurried, within_s)
        writing.cancel()
        for connection in [*self._state.connections]:
            connection.transport.abort()
        await asyncio.sleep(0)  # let connections receive connection_lost
        left = {task for task in self._state.tasks if not task.done()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _written(self) -> None:
        if tasks := {task for task in self._state.tasks if not task.done()}:
            await asyncio.wait(tasks)
        end = self._loop.time() + LAST_WORDS_S
        while self._state.connections and self._loop.time() < end:
            await asyncio.sleep(0.01)


async def _first(work: asyncio.Task[Any], event: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until the work is done, the event is set, or the timeout."""
    waiting = asyncio.get_running_loop().create_task(event.wait())
    try:
        await asyncio.wait({work, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


@contextlib.contextmanager
def _signals(stop: Stop | None) -> Iterator[None]:
    """Make SIGTERM and SIGINT request the stop; does nothing outside a process's main thread."""
    if stop is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    heard = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in heard]
    for number in heard:
        loop.add_signal_handler(number, stop.request, number.name)
    try:
        yield
    finally:
        for number, handler in zip(heard, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def check_host(host: str, settings: Settings) -> None:
    """Raise EndpointError if the host is empty, or other machines could reach it and there is no key."""
    if not host:
        reason = f"host {host!r} is empty: it has to be a name or an address, 0.0.0.0 for all interfaces"
        raise EndpointError(reason, field="host", value=host, bound="a name or an address")
    if not (settings.keys or settings.insecure or _loopback(host)):
        remedy = f"give one by --api-key-file or the variable {VARIABLE}, or allow it by --insecure"
        reason = f"host {host} is open to other machines, and there is no API key: {remedy}"
        raise EndpointError(reason, field="host", value=host, bound="a loopback address, as 127.0.0.1")


def _loopback(host: str) -> bool:
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise EndpointError(f"host {host!r} is not known: {error.strerror}", field="host", value=host) from error
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses)


def files_for(connections: int) -> None:
    """Raise this process's limit of open files for `connections` connections, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + 64  # for all else
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if most > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The parsed options of a session, without its scenario."""

    host: str
    port: int
    out: Path
    settings: Settings
    quiet: bool = False
    failures: Failures = field(default_factory=Failures)


async def serve(backend: Backend | Sequence[Backend], options: ServeOptions) -> int:
    """Serve until a signal, each server behind a port and in a run directory of its own; return the exit status. A
    directory is complete if every answer ended by itself or was cancelled by its client. Raises EndpointError and
    RunError.
    """
    backends = [backend] if isinstance(backend, Backend) else backend
    made: list[SessionDirectory] = []  # the sessions' directories, from when the ports are their own

    def bound() -> None:
        made.extend(SessionDirectory(each.session, each.log, options.out) for each in backends)

    def ready(*addresses: str) -> None:
        for each, address in zip(backends, addresses, strict=True):
            print(f"serving   {each.model} at {address}, up to {each.max_model_len:,} tokens", flush=True)
        if not options.quiet:
            runs = "".join(f"run       {each.path}\n" for each in made)
            print(f"{runs}end it    with Ctrl-C: answers under way may end", flush=True)

    apps = [FailingApp(options.failures, each, options.settings, VllmMeter(each)) for each in backends]
    ending = await listen(apps, options.host, options.port, bound=bound, ready=ready)
    return max(_close(*each, ending, options) for each in zip(made, backends, strict=True))


def _close(directory: SessionDirectory, backend: Backend, ending: Ending, options: ServeOptions) -> int:
    """Write the run and print its result; return the exit status."""
    timing = backend.timing
    result = directory.write({"time_scale": 1.0} if timing is None else timing.facts, _incomplete(ending))
    if not options.quiet:
        print(result if result.summary["requests"] else "no request was received")
        print(f"\nrun       {result.path}")
    if timing is not None and not timing.faithful:
        busy = f"it cannot keep up with scale={timing.scale:g} under this load: take less, or `drive`"
        print(timing.unfaithful(busy if timing.scale > 1 else "the machine is busy"), file=sys.stderr)
    if result.incomplete is not None:
        print(f"incomplete: {result.incomplete}: see {result.path}", file=sys.stderr)
        return ERROR
    return OK


def _incomplete(ending: Ending) -> str | None:
    if ending.message or not ending.cut:
        return ending.message or None
    hurry = "told to hurry" if ending.interrupted else "out of time"
    answers = "1 answer was" if ending.cut == 1 else f"{ending.cut} answers were"
    return f"{answers} cut off: {hurry} after {ending.why}"
