"""The session of `cbsim serve` and `cbengine serve`: a directory, created at the start, a socket, a result."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbsim.errors import ERROR, OK
from cbsim.http.app import App
from cbsim.http.backend import Backend
from cbsim.http.errors import EndpointError
from cbsim.http.listen import Ending, check_host, listen
from cbsim.http.metrics import VllmMeter
from cbsim.http.settings import Settings
from cbsim.runs.served import SessionDirectory


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The parsed options of a session, without its scenario."""

    host: str
    port: int
    out: Path
    settings: Settings
    quiet: bool = False


async def serve(backend: Backend, options: ServeOptions) -> int:
    """Serve until a signal; return the exit status. The run directory is complete if every answer ended by itself or
    was cancelled by its client. Raises EndpointError, RunError.
    """
    check_host(options.host, options.settings)
    directory = SessionDirectory(backend.session, backend.log, options.out)

    def alarm(problem: str) -> None:
        print(f"{problem} the session is kept in memory only", file=sys.stderr, flush=True)

    def ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}/v1"
        print(f"serving   {backend.model} at {address}, up to {backend.max_model_len:,} tokens", flush=True)
        if not options.quiet:
            print(f"run       {directory.path}\nend it    with Ctrl-C: answers under way may end", flush=True)

    backend.log.alarm = alarm
    try:
        app = App(backend, options.settings, VllmMeter(backend))
        ending = await listen(app, options.host, options.port, ready=ready)
    except EndpointError as error:
        directory.write(_facts(backend), str(error))
        raise
    return _close(directory, backend, ending, options)


def _facts(backend: Backend) -> dict[str, Any]:
    return {"time_scale": 1.0} if backend.timing is None else backend.timing.facts


def _close(directory: SessionDirectory, backend: Backend, ending: Ending, options: ServeOptions) -> int:
    """Write the run and print its result; return the exit status."""
    result = directory.write(_facts(backend), _incomplete(ending))
    if not options.quiet:
        print(result if result.summary["requests"] else "no request was received")
        print(f"\nrun       {result.path}")
    if (timing := backend.timing) is not None and not timing.faithful:
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
