"""Clients and a simulated server in one process, in virtual time: latencies are simulated and take no real time.

    server = cbsim.virtual.virtual("8k_b32")

    async def client():
        async with server.openai() as openai:
            return await openai.completions.create(model=server.model, prompt="hello", max_tokens=16)

    print(server.run(client()))
    print(server.result)

Any client works that awaits on the event loop it runs in. It need not know the clock: `time.time` and the other
functions return virtual time, and threads that it waits for take none.

`cbsim drive` runs any asyncio program so. It connects to the server over the loopback interface with any HTTP library.
It finds the address in OPENAI_BASE_URL and a key in OPENAI_API_KEY, or takes the address as its only argument; its
arguments are in sys.argv. An installed `vllm bench serve` can be the client, too.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cbsim.errors import ERROR, OK, ScenarioError, in_line
from cbsim.http.app import App
from cbsim.http.asgi import EXTENSION
from cbsim.http.listen import Stop, listen
from cbsim.http.metrics import VllmMeter
from cbsim.http.settings import Settings
from cbsim.http.tokenizer import open_tokenizer
from cbsim.runs.result import Result
from cbsim.runs.served import SessionDirectory, result_of
from cbsim.scenario.scenario import Scenario, scenario_of
from cbsim.virtual.clocks import Clock, VirtualLoop, VirtualTimeError, clocks, watched
from cbsim.virtual.simulated import SimulatedBackend

T = TypeVar("T")
VLLM = ("vllm", "bench", "serve")
FAILED = "client_error.txt"  # a file of the run directory
Client = Callable[[str], Awaitable[Any]]
HOST = "http://simulated"
PATIENCE_S = 60.0  # virtual seconds within which cancelled tasks have to end
IN_PROCESS = Settings(inline_characters=sys.maxsize)
"""Settings that encode all texts without threads, which would end in any order, and for which virtual time waits."""
COMMAND = "python -m cbsim run scenario.resolved.yaml"  # to be run in the run directory


class VirtualServer:
    """A simulated server for one `run` of clients. `model` is the model's name in their requests."""

    def __init__(self, scenario: Scenario, *, model: str | None = None, tokenizer: str | Path | None = None) -> None:
        """Open the session. Raises ScenarioError, and UserError for a tokenizer that cannot be read."""
        self.backend = SimulatedBackend(scenario, Clock(), open_tokenizer(tokenizer), model, COMMAND)
        self.model = self.backend.model
        self.app = App(self.backend, IN_PROCESS)
        self.base_url = f"{HOST}/v1"
        self._used = False
        self.strays: tuple[str, ...] = ()  # the run's calls that virtual time does not support
        self._result: Result | None = None

    def transport(self, http: Any) -> Any:
        """Return a streaming transport to this server for an AsyncClient of `http`, the module httpx or httpx2."""
        app = self.app

        class Parts(Exchange, http.AsyncByteStream):  # type: ignore[misc]
            pass

        class Transport(http.AsyncBaseTransport):  # type: ignore[misc]
            async def handle_async_request(self, request: Any) -> Any:
                parts = Parts(app, request, bytes(await request.aread()))
                await parts.started()
                return http.Response(parts.status, headers=parts.headers, stream=parts)

        return Transport()

    def openai(self, **options: Any) -> Any:
        """Return an `openai.AsyncOpenAI` connected to this server."""
        import openai

        http = import_module("httpx2" if find_spec("httpx2") else "httpx")  # the library that openai's client uses
        options = {"base_url": self.base_url, "api_key": "none", "max_retries": 0, "timeout": None, **options}
        return openai.AsyncOpenAI(http_client=http.AsyncClient(transport=self.transport(http), timeout=None), **options)

    def run(self, client: Coroutine[Any, Any, T]) -> T:
        """Run `client`, return its value, cancel what it leaves. Raises VirtualTimeError, and what it raises."""
        if self._used:
            client.close()
            raise VirtualTimeError("a virtual server is good for one run: make another")
        self._used, loop = True, VirtualLoop()
        try:
            with clocks(loop), watched(loop):
                try:
                    return loop.run_until_complete(serve_while(self.backend, client))
                finally:
                    loop.run_until_complete(end())
        finally:
            loop.close()
            backend = self.backend
            self._result = result_of(backend.session, backend.log, backend.timing.facts, backend.dead)
            self.strays = tuple(dict.fromkeys(loop.strays))
            loop.check_deadlock()

    @property
    def result(self) -> Result:
        """The result of the clients' run. Raises VirtualTimeError before there is one."""
        if self._result is None:
            raise VirtualTimeError("nobody has run against this server yet")
        return self._result


def virtual(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    *overrides: str,
    model: str | None = None,
    tokenizer: str | Path | None = None,
) -> VirtualServer:
    """Return a simulated server in virtual time for the scenario that `cbsim.load` makes of the first arguments; a
    scenario with both loops gets the asynchronous one. `tokenizer` is a folder with a tokenizer.json; the default is
    the small vocabulary of cbsim. Raises ScenarioError, UserError.
    """
    return VirtualServer(scenario_of(scenario, overrides), model=model, tokenizer=tokenizer)


async def serve_while(backend: SimulatedBackend, client: Awaitable[T]) -> T:
    """Serve until `client` is done, and return its value."""
    serving = asyncio.ensure_future(backend.run())
    await asyncio.sleep(0)
    try:
        return await client
    finally:
        backend.abandon()
        backend.close()
        await serving


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, or all but this one, and wait until they have cleaned up; one that resists is left."""
    rest = {*tasks} or asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=PATIENCE_S)
    for task in rest:
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        elif not task.cancelled():
            task.exception()  # mark it as retrieved


Message = MutableMapping[str, Any]
Asgi = Callable[[Any, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Exchange:
    """A request of httpx and its answer, whose parts it yields."""

    def __init__(self, app: Asgi, request: Any, body: bytes) -> None:
        self._waiting: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._left = asyncio.Event()
        self._started = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.status, self.headers = 500, list[tuple[bytes, bytes]]()
        scope = {
            "type": "http",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "extensions": {EXTENSION: {"writer": self}},
        }
        self._task = asyncio.ensure_future(self._answer(app, scope))

    async def started(self) -> None:
        """Return when status and headers are available. Raises an exception that the application raised before."""
        await self._started.wait()
        if self._task.done():
            self._task.result()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            yield part
        await self._task

    async def aclose(self) -> None:
        """End the exchange as if the client had closed its connection."""
        self._left.set()
        if not self._task.done():
            await asyncio.wait([self._task])

    full = False  # it is the ResponseWriter of a streamed answer: the client buffers what it has not read

    def write(self, body: bytes) -> None:
        self._parts.put_nowait(body)

    async def drain(self) -> None: ...

    def abort(self) -> None:
        self._left.set()

    async def _answer(self, app: Asgi, scope: Message) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._parts.put_nowait(None)
            self._started.set()

    async def _receive(self) -> Message:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            return waiting
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
            self._started.set()
            return
        if body := message.get("body"):
            self._parts.put_nowait(bytes(body))


def drive(
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


async def _together(backend: SimulatedBackend, client: Client) -> None:
    """Listen on a socket, run the client, and close."""
    stop, where = Stop(), asyncio.get_running_loop().create_future()
    app = App(backend, IN_PROCESS, VllmMeter(backend))

    door = asyncio.ensure_future(listen(app, port=0, stop=stop, signals=False, ready=where.set_result))
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
    return None if failure is None else f"the client failed: {in_line(failure)}"


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
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if len(needed) > 1:
        message = f"client: {name} takes {len(needed)} arguments, must take none or one, the server's address"
        raise ScenarioError(message, field="client")
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
