"""An OpenAI-compatible front that forwards requests to servers, ours or any vLLM, by a router of cbsim.

A request goes on to another server as long as none of its answer was passed on: if a server cannot be reached, breaks
off, or answers 503. Each server gets it once at most. An answer that breaks off later ends with an SSE event that has
the error.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from hashlib import sha256
from typing import Any

import httpx
from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from cbsim.errors import ERROR, OK, in_line
from cbsim.http.app import Endpoint
from cbsim.http.asgi import ApiError, read_body, reply, send_error, until_gone
from cbsim.http.generating import failed
from cbsim.http.listen import ServeOptions, listen
from cbsim.http.requests import Encoder, ForwardedRequest
from cbsim.http.settings import Settings
from cbsim.http.tokenizer import Tokenizer
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.record.directory import RunWriter
from cbsim.record.environment import environment
from cbsim.routers.base import RouterError
from cbsim.runs.routing import BLOCK_TOKENS, ENDS, FILE, MOST_BLOCKS, Books, Head
from cbsim.runs.served import Contents, Log

LOG = logging.getLogger("cbsim.http")
CONNECT_S = 5.0
OF_A_CONNECTION = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host", "expect")
}
NAMES = (
    "num_requests_waiting|num_queue_reqs",
    "num_requests_running|num_running_reqs",
    "kv_cache_usage_perc|token_usage",
)
LOADS = [re.compile(rf"^(?:vllm|sglang):(?:{each})(?:{{.*}})? ([0-9.eE+-]+)", re.MULTILINE) for each in NAMES]


def read_load(exposition: str) -> tuple[float, float, float]:
    """Return the load in metrics: sums over the engines of a server, of shares the mean; 0 if there are none."""
    waiting, running, kv_use = ([float(number) for number in each.findall(exposition)] for each in LOADS)
    return sum(waiting), sum(running), sum(kv_use) / max(1, len(kv_use))


class RouteApp(Endpoint):
    """The application in front of the servers of a router's books. It is made on a running loop."""

    def __init__(self, books: Books, http: httpx.AsyncClient, tokenizer: Tokenizer, settings: Settings) -> None:
        super().__init__(settings)
        self.books, self._http = books, http
        self._encoder = Encoder(tokenizer, settings.inline_characters)
        self._contents = Contents(BLOCK_TOKENS, MOST_BLOCKS)
        self._work = set[asyncio.Task[None]]()
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._scrapes, self._is_cut, self._dead = list[asyncio.Task[None]](), False, ""

    def now_ns(self) -> int:
        return round((self._loop.time() - self._start_s) * NS)

    async def run(self) -> str | None:
        """Scrape the servers until `close`, or the router fails; return when all requests have ended."""
        self._scrapes += [self._loop.create_task(self._scrape(at)) for at in range(len(self.books.head.servers))]
        await asyncio.gather(*self._scrapes, return_exceptions=True)
        while self._work:
            await asyncio.wait(self._work)
        return self._dead

    def close(self) -> None:
        super().close()
        for scrape in self._scrapes:
            scrape.cancel()

    def cut(self) -> int:
        """Cancel the answers under way, which fail, and return their number."""
        self._is_cut = True
        return sum([work.cancel() for work in self._work])

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, until it has ended or its client has left."""
        if scope["path"] in ("/health", "/ping"):
            up = not self.closing and any(view.up for view in self.books.views)
            await reply(send, 200 if up else 503, b"")
            return
        request = Request(scope, receive)
        body = await read_body(request, self.settings.max_body_bytes)
        spec = await self._spec(request, body)
        if self.closing:
            raise ApiError(503, "the router is shutting down", retry_s=self.settings.retry_s)
        self.books.came(spec)
        work = self._loop.create_task(self._forward(spec.index, request, body, send))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        gone = self._loop.create_task(until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _spec(self, request: Request, body: bytes) -> RequestSpec:
        """Return a request as the router knows it; one that cannot be read has a prompt of one token of its own."""
        try:
            fields = ForwardedRequest.model_validate_json(body)
            if fields.messages:
                ids = await self._encoder.chat(fields.messages)
            else:
                several = isinstance(fields.prompt, list) and not isinstance(fields.prompt[0], int)
                prompt: Any = fields.prompt[0] if several else fields.prompt
                ids = await self._encoder.plain(prompt) if isinstance(prompt, str) else prompt
        except (ValidationError, ApiError):
            fields, ids = ForwardedRequest(), []
        most = fields.max_completion_tokens or fields.max_tokens or 1
        index, session = self.books.count, request.headers.get("x-session-id", "")
        prefix, size = self._contents.prefix(ids, fields.cache_salt or ""), self._contents.block_tokens
        return RequestSpec(
            index=index,
            id=f"{session}/{index}" if session and session.isprintable() else f"request-{index}",
            arrival_ns=self.now_ns(),
            prompt_tokens=max(1, len(ids)),
            output_tokens=most,
            max_tokens=most,
            prefix=prefix,
            prefix_block_tokens=size,
            prefix_tokens=len(prefix) * size,
        )

    async def _forward(self, index: int, request: Request, body: bytes, send: Send) -> None:
        """Try one server after the other until one answers, and record how the request ended."""
        books, begun, end = self.books, False, "refused"
        error = ApiError(503, "no server is up", retry_s=self.settings.retry_s)
        try:
            while not begun and (server := books.choose(self.now_ns(), index)) is not None:
                try:
                    async with aclosing(self._messages(server, request, body)) as messages:
                        async for message in messages:
                            if not begun:
                                begun = True
                                books.news(self.now_ns(), index, ended=False)
                            await send(message)
                    end = "finished"
                except ApiError as failure:
                    end, error = "refused", failure
                except httpx.HTTPError as failure:
                    end, error = "failed", ApiError(502, f"the server failed: {in_line(failure)}")
                    if isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout):
                        books.scraped(self.now_ns(), server, None)
                finally:
                    books.news(self.now_ns(), index, ended=True)
        except asyncio.CancelledError:
            end = "failed" if self._is_cut else "cancelled"
            error = ApiError(503, "the router ended before the answer")
        except RouterError as wrong:  # of a user's own router
            end, error, self._dead = "failed", ApiError(500, str(wrong)), str(wrong)
            self.close()
        except Exception as wrong:
            LOG.exception("request %d failed", index)
            end, error = "failed", ApiError(500, in_line(wrong))
        books.end(self.now_ns(), index, end)
        if end == "finished":
            return
        if begun:
            await send({"type": "http.response.body", "body": failed(error), "more_body": False})
        else:
            await send_error(send, error)

    async def _messages(self, server: int, request: Request, body: bytes) -> AsyncGenerator[Message, None]:
        """Yield a server's answer, a stream as it comes, any other as a whole. Raises httpx.HTTPError, and ApiError for
        a status of 503.
        """
        target = b"?".join(filter(None, (request.scope["raw_path"], request.scope["query_string"])))
        url = f"{self.books.head.servers[server]}{target.decode()}"
        headers = [each for each in request.headers.raw if each[0].decode() not in OF_A_CONNECTION]
        async with self._http.stream(request.method, url, headers=headers, content=body) as response:
            parts = response.aiter_raw()
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                first = await anext(parts, b"")
                if not first:
                    raise httpx.RemoteProtocolError("a stream without a byte")
            else:
                first = b"".join([part async for part in parts])
                if response.status_code == 503:
                    raise ApiError(503, "every server answered 503", retry_s=self.settings.retry_s)
            head = [(name.lower(), value) for name, value in response.headers.raw]
            head = [each for each in head if each[0].decode() not in OF_A_CONNECTION]
            yield {"type": "http.response.start", "status": response.status_code, "headers": head}
            yield {"type": "http.response.body", "body": first, "more_body": True}
            async for part in parts:
                yield {"type": "http.response.body", "body": part, "more_body": True}
            yield {"type": "http.response.body", "body": b"", "more_body": False}

    async def _scrape(self, server: int) -> None:
        """Take a server's metrics at every interval. One without any counts as idle; one that fails is down."""
        while not self.closing:
            load = None
            with suppress(httpx.HTTPError, ValueError):
                response = await self._http.get(f"{self.books.head.servers[server]}/metrics", timeout=CONNECT_S)
                if response.status_code < 500:
                    load = read_load(response.text)
            self.books.scraped(self.now_ns(), server, load)
            await asyncio.sleep(self.books.head.fleet.signals.metrics_s)


async def serve(head: Head, tokenizer: Tokenizer, options: ServeOptions, command: str) -> int:
    """Route until a signal; return the exit status: 1 if answers were cut off. The run directory has the log of the
    router's calls, and how requests ended. Raises EndpointError, RunError, RouterError.
    """
    log, name, writers = Log(in_memory=False), head.fleet.router.name, list[RunWriter]()
    books, first = Books(head, log.add), head.model_dump_json() + "\n"

    def bound() -> None:
        writer = RunWriter.new(options.out, f"route-{name}", sha256(first.encode()).hexdigest())
        writers.append(writer)
        writer.json("env.json", environment(command, "", head.seed))
        log.write_to(writer.path / FILE)
        log.add(first)

    def ready(address: str) -> None:
        print(f"routing   {len(head.servers)} servers by {name} at {address}", flush=True)
        if not options.quiet:
            print(f"run       {writers[0].path}\nend it    with Ctrl-C: answers under way may end", flush=True)

    plain = {"accept-encoding": "identity"}  # unless a request has another
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(None, connect=CONNECT_S)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=plain, trust_env=False) as http:
        app = RouteApp(books, http, tokenizer, options.settings)
        ending = await listen(app, options.host, options.port, bound=bound, ready=ready)
    log.close()
    ends = {end: books.ends[end] for end in ENDS}
    sent = [view.sent for view in books.views]
    writers[0].json("summary.json", {"requests": books.count, "ends": ends, "sent": sent})
    if problem := log.problem or ending.message:
        writers[0].note(problem)
    else:
        writers[0].complete()
    print(f"{books.count} requests: {', '.join(f'{count} {end}' for end, count in ends.items())}; sent {sent}")
    if ending.message:
        raise RouterError(ending.message)
    return ERROR if ending.cut or log.problem else OK
