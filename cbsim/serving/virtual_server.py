"""Clients and a simulated server in one process, in virtual time: latencies are the model's, and nobody waits.

    server = cbsim.serving.virtual("8k_b32")

    async def client():
        async with server.openai() as openai:
            return await openai.completions.create(model=server.model, prompt="hello", max_tokens=16)

    print(server.run(client()))
    print(server.result)

What can join: whatever awaits on the event loop it is given. It is not asked to know of the clock: `time.time` and the
others say virtual time, threads that it waits for take none.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cbsim.endpoint.app import build
from cbsim.endpoint.command import said
from cbsim.endpoint.settings import Settings
from cbsim.endpoint.tokenizer import open_tokenizer
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.sources import scenario_of
from cbsim.server.result import Result
from cbsim.server.served import result_of, with_one_loop
from cbsim.serving.clocks import VirtualClock
from cbsim.serving.session import Opened, open_session
from cbsim.serving.transport import transport
from cbsim.serving.virtual_loop import VirtualLoop, VirtualTimeError, clocks, watched

T = TypeVar("T")
HOST = "http://simulated"
PATIENCE_S = 60.0
"""Virtual seconds for tasks to end that were told to."""
IN_PROCESS = Settings(inline_characters=sys.maxsize)
"""Threads end in any order, and virtual time waits for them anyhow: texts are encoded where they come in."""
COMMAND = "python -m cbsim run scenario.resolved.yaml"  # in the run directory


class VirtualServer:
    """A simulated server for one `run` of clients. `model` is the name to ask it for."""

    def __init__(self, scenario: Scenario, *, model: str | None = None, tokenizer: str | Path | None = None) -> None:
        """Raises ScenarioError, and UserError for a tokenizer that cannot be read."""
        self.session: Opened = open_session(scenario, VirtualClock(), open_tokenizer(tokenizer), model, COMMAND)
        self.model = self.session.backend.model
        self.app = build(self.session.backend, IN_PROCESS)
        self.base_url = f"{HOST}/v1"
        self._used = False
        self.strays: tuple[str, ...] = ()  # what virtual time was not made for, of the run
        self._result: Result | None = None

    def transport(self, http: Any) -> Any:
        """For an AsyncClient of `http`, the module httpx or httpx2: requests to any address come here."""
        return transport(self.app, http)

    def openai(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI` that talks to this server."""
        import openai

        http = import_http()
        options = {"base_url": self.base_url, "api_key": "none", "max_retries": 0, "timeout": None, **options}
        return openai.AsyncOpenAI(http_client=http.AsyncClient(transport=self.transport(http), timeout=None), **options)

    def run(self, client: Coroutine[Any, Any, T]) -> T:
        """What `client` returns. Requests that it leaves behind are given up. Raises VirtualTimeError for what cannot
        be had in virtual time, and whatever the client raises.
        """
        if self._used:
            client.close()
            raise VirtualTimeError("a virtual server is good for one run: make another")
        self._used, loop = True, VirtualLoop()
        try:
            with clocks(loop), watched(loop):
                try:
                    return loop.run_until_complete(serve_while(self.session, client))
                finally:
                    loop.run_until_complete(end_others())
        finally:
            loop.close()
            backend = self.session.backend
            self._result = result_of(self.session.run, backend.log, said(backend.timing), backend.dead)
            self.strays = tuple(dict.fromkeys(loop.strays))
            loop.check_stuck()

    @property
    def result(self) -> Result:
        """The run that the clients made. Raises VirtualTimeError before there is one."""
        if self._result is None:
            raise VirtualTimeError("nobody has run against this server yet")
        return self._result


def virtual(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    *overrides: str,
    model: str | None = None,
    tokenizer: str | Path | None = None,
) -> VirtualServer:
    """A simulated server in virtual time, for the scenario that `cbsim.load` makes of its first arguments; of both
    loops the asynchronous one. `tokenizer` is a folder with a tokenizer.json; without one texts are cut into tokens by
    a small vocabulary of ours. Raises ScenarioError, UserError.
    """
    return VirtualServer(with_one_loop(scenario_of(scenario, overrides)), model=model, tokenizer=tokenizer)


async def serve_while(session: Opened, client: Awaitable[T]) -> T:
    """Serve until `client` is done."""
    backend = session.backend
    serving = asyncio.ensure_future(backend.run())
    await asyncio.sleep(0)
    try:
        return await client
    finally:
        backend.abandon()
        backend.close()
        await serving


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel it, and let it clean up."""
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    if task.done() and not task.cancelled():
        task.exception()  # it is known


async def end_others() -> None:
    """What the client has started and not awaited. Whatever does not let itself be cancelled is left."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=PATIENCE_S)
    for task in others:
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        elif not task.cancelled():
            task.exception()


def import_http() -> Any:
    """The HTTP library that openai's client stands on."""
    try:
        import httpx2
    except ModuleNotFoundError:
        import httpx

        return httpx
    return httpx2
