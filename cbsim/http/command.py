"""What `cbsim serve` and `cbengine serve` do with a session: a directory from its first moment, a door, a last word."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbsim.errors import ERROR, OK
from cbsim.http.backend import Backend, Timing
from cbsim.http.errors import EndpointError
from cbsim.http.listen import Ending, check_host, listen
from cbsim.http.metrics import VllmMeter
from cbsim.http.settings import Settings, read_keys
from cbsim.runs.result import Result
from cbsim.runs.running import Session
from cbsim.runs.served import Log, SessionDirectory


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a session is told besides its scenario, parsed."""

    host: str
    port: int
    out: Path
    settings: Settings
    quiet: bool = False


def settings_of(key_file: Path | None, *, insecure: bool, grace_s: float) -> Settings:
    """Raises EndpointError."""
    return Settings(keys=read_keys(file=key_file), insecure=insecure, grace_s=grace_s)


async def serve(backend: Backend, session: Session, log: Log, options: ServeOptions) -> int:
    """Serve until a signal; the exit status. The run directory is complete if every answer ended by itself or was given
    up by its client. Raises EndpointError, RunError.
    """
    check_host(options.host, options.settings)
    directory = SessionDirectory(session, log, options.out)

    log.alarm = lambda problem: print(f"{problem} the session is kept in memory only", file=sys.stderr, flush=True)

    def ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{port}/v1"
        print(f"serving   {backend.model} at {address}, up to {backend.max_model_len:,} tokens", flush=True)
        if not options.quiet:
            print(f"run       {directory.path}\nend it    with Ctrl-C: answers under way may end", flush=True)

    try:
        ending = await listen(
            backend, options.settings, options.host, options.port, meter=VllmMeter(backend), ready=ready
        )
    except EndpointError as error:
        directory.write(session_facts(backend.timing), str(error))
        raise
    return _close(directory, backend, ending, options)


def _close(directory: SessionDirectory, backend: Backend, ending: Ending, options: ServeOptions) -> int:
    """Write the run; say what came out."""
    result = directory.write(session_facts(backend.timing), _incomplete(ending))
    if not options.quiet:
        _say(result)
    if (timing := backend.timing) is not None and not timing.faithful:
        busy = f"it cannot keep up with scale={timing.scale:g} under this load: take less, or `drive`"
        why = busy if timing.scale > 1 else "the machine is busy"
        print(f"not faithful: {unfaithful(timing, why)}", file=sys.stderr)
    if result.incomplete is not None:
        print(f"incomplete: {result.incomplete}: see {result.path}", file=sys.stderr)
        return ERROR
    return OK


def _incomplete(ending: Ending) -> str | None:
    if ending.message:
        return ending.message
    if ending.cut:
        hurry = "told to hurry" if ending.interrupted else "out of time"
        answers = "1 answer was" if ending.cut == 1 else f"{ending.cut} answers were"
        return f"{answers} cut off: {hurry} after {ending.why}"
    return None


def _say(result: Result) -> None:
    count = result.summary["requests"]
    print(result if count else "no request was received")
    print(f"\nrun       {result.path}")


def session_facts(timing: Timing | None) -> dict[str, Any]:
    """What the summary of a session says of its time."""
    if timing is None:
        return {"time_scale": 1.0}
    return {
        "time_scale": timing.scale,
        "faithful": timing.faithful,
        "lag_p99_s": timing.lag_p99_s,
        "lag_max_s": timing.lag_max_s,
        "lag_bound_s": timing.bound_s,
        "late_steps": timing.late_steps,
    }


def unfaithful(timing: Timing, why: str) -> str:
    """Why a session's figures are not the model's alone."""
    lag, bound = (
        f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
        for seconds in (timing.lag_p99_s, timing.bound_s)
    )
    return f"1 % of its steps came {lag} late or more, the bound is {bound}: {why}"
