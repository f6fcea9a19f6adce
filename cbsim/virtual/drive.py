"""`cbsim drive`: any asyncio program and a simulated server in one process, in virtual time.

The client connects to the server over the loopback interface with any HTTP library. It finds the address in
OPENAI_BASE_URL and a key in OPENAI_API_KEY, or takes the address as its only argument; its arguments are in sys.argv.

An installed `vllm bench serve` can be the client, too.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from cbsim.errors import ERROR, OK, ScenarioError
from cbsim.http.app import App
from cbsim.http.listen import Stop, listen
from cbsim.http.metrics import VllmMeter
from cbsim.http.tokenizer import open_tokenizer
from cbsim.runs.served import SessionDirectory
from cbsim.scenario.scenario import Scenario
from cbsim.virtual.clocks import Clock, VirtualLoop, VirtualTimeError, clocks, watched
from cbsim.virtual.server import IN_PROCESS, end
from cbsim.virtual.simulated import SimulatedBackend

VLLM = ("vllm", "bench", "serve")
FAILED = "client_error.txt"  # a file of the run directory
Client = Callable[[str], Awaitable[Any]]


def run(
    scenario: Scenario,
    argv: Sequence[str],
    out: Path,
    *,
    model: str | None = None,
    tokenizer: Path | None = None,
    quiet: bool = False,
) -> int:
    """Run a client against a scenario; write the run; return the exit status. Raises ScenarioError, RunError."""
    command = " ".join(("python -m cbsim drive", scenario.name, *argv))
    backend = SimulatedBackend(scenario, Clock(), open_tokenizer(tokenizer), model, command)
    loop = VirtualLoop()
    failure: BaseException | None = None
    try:
        with clocks(loop), watched(loop), as_program(argv):
            client = client_of(argv)
            directory = SessionDirectory(backend.session, backend.log, out.absolute())  # clients may change the folder
            work = loop.create_task(_together(backend, client))
            try:
                loop.run_until_complete(work)
            except (KeyboardInterrupt, Exception, SystemExit) as error:  # a client may raise anything
                failure = error
            loop.run_until_complete(end(work))
            loop.run_until_complete(end())
    finally:
        loop.close()
    return _close(loop, backend, directory, failure, quiet)


async def _together(backend: SimulatedBackend, client: Client) -> None:
    """Listen on a socket, run the client, and close."""
    stop, where = Stop(), asyncio.get_running_loop().create_future()
    app = App(backend, IN_PROCESS, VllmMeter(backend))
    door = asyncio.ensure_future(
        listen(
            app, port=0, stop=stop, signals=False, ready=lambda host, port: where.set_result(f"http://{host}:{port}/v1")
        )
    )
    await asyncio.wait({door, where}, return_when=asyncio.FIRST_COMPLETED)
    if not where.done():
        await door
    os.environ["OPENAI_BASE_URL"] = address = where.result()
    os.environ.setdefault("OPENAI_API_KEY", "none")
    try:
        value = await client(address)
        if value is not None:
            print(value)
    finally:
        stop.request()
        backend.abandon()
        await door


def _close(
    loop: VirtualLoop,
    backend: SimulatedBackend,
    directory: SessionDirectory,
    failure: BaseException | None,
    quiet: bool,
) -> int:
    """Write the run; print its result and any error; return the exit status."""
    wrong = _wrong(loop, backend, failure)
    result = directory.write(backend.timing.facts, wrong)
    for stray in dict.fromkeys(loop.strays):
        print(f"warning: {stray}", file=sys.stderr)
    if not quiet and result.summary["requests"]:
        print(result)
    print(f"run       {result.path}" if not quiet else result.path)
    if not backend.timing.faithful:
        print(backend.timing.unfaithful("the client kept the loop from its steps"), file=sys.stderr)
    if wrong is None:
        return OK
    where = ""
    if failure is not None and not isinstance(failure, VirtualTimeError):
        (directory.path / FAILED).write_text("".join(traceback.format_exception(failure)), encoding="utf-8")
        where = f"; see {directory.path / FAILED}"
    print(f"cbsim: {wrong}{where}", file=sys.stderr)
    return ERROR


def _wrong(loop: VirtualLoop, backend: SimulatedBackend, failure: BaseException | None) -> str | None:
    if loop.deadlock is not None:
        return loop.deadlock
    if isinstance(failure, VirtualTimeError):
        return str(failure)
    if backend.dead is not None:
        return backend.dead
    if isinstance(failure, SystemExit) and not failure.code:
        return None
    if isinstance(failure, KeyboardInterrupt):
        return str(failure) or "interrupted"
    return None if failure is None else f"the client failed: {type(failure).__name__}: {failure}"


@contextmanager
def as_program(argv: Sequence[str]) -> Iterator[None]:
    """Give the client its own arguments, and modules from the current folder. SIGTERM ends it as Ctrl-C does."""
    saved_argv, saved_path = sys.argv, list(sys.path)
    sys.argv = list(argv)
    sys.path.insert(0, str(Path.cwd()))
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.argv, sys.path[:] = saved_argv, saved_path


def _terminated(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise KeyboardInterrupt("SIGTERM")


def client_of(argv: Sequence[str]) -> Client:
    """Return the client function that the arguments name. Raises ScenarioError."""
    if tuple(argv[:3]) == VLLM:
        return client(argv[3:])
    module, colon, name = argv[0].partition(":")
    if not (module and colon and name):
        raise ScenarioError(f"client: got {argv[0]!r}, expected MODULE:FUNCTION, or vllm bench serve", field="client")
    try:
        function: Any = import_module(module)
    except ModuleNotFoundError as error:
        raise ScenarioError(f"client: {argv[0]}: there is no module {error.name}", field="client") from None
    except (Exception, SystemExit) as error:
        message = f"client: {module} cannot be imported: {type(error).__name__}: {error}"
        raise ScenarioError(message, field="client") from error
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise ScenarioError(f"client: {module} has no function {name}", field="client")
    return _called(argv[0], function)


def _called(name: str, function: Any) -> Client:
    """Return the function as a client, called with the address if it takes an argument. Raises ScenarioError."""
    needed = [
        p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    if len(needed) > 1:
        raise ScenarioError(
            f"client: {name} takes {len(needed)} arguments, expected none or the address", field="client"
        )

    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if not inspect.iscoroutinefunction(inspect.unwrap(called)):
        message = f"client: {name} is not asynchronous: it cannot run in virtual time; expected an `async def`"
        raise ScenarioError(message, field="client")

    async def client(address: str) -> Any:
        return await function(*[address] * len(needed))

    return client


def client(argv: Sequence[str]) -> Callable[[str], Awaitable[Any]]:
    """Return vLLM's benchmark with these arguments as a client of the server's host and port. Raises ScenarioError."""
    try:
        serve: Any = import_module("vllm.benchmarks.serve")
    except ModuleNotFoundError as error:
        raise ScenarioError(f"client: vllm bench serve: {error.name} is not installed", field="client") from None
    parser = getattr(serve, "FlexibleArgumentParser", argparse.ArgumentParser)()
    serve.add_cli_args(parser)

    async def run(address: str) -> None:
        url = urlsplit(address)
        await serve.main_async(parser.parse_args([*argv, "--host", str(url.hostname), "--port", str(url.port)]))

    return run
