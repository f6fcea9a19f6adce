"""An OpenAI-compatible front that forwards requests to servers, ours or any vLLM, by a router of cbsim.

A request goes on to another server as long as none of its answer was passed on: if a server cannot be reached, breaks
off, or answers 503. Each server gets it once at most. An answer that breaks off later ends with an SSE event that has
the error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from cbsim.errors import ERROR, OK, in_line
from cbsim.http.answers import DONE
from cbsim.http.asgi import GENERATIONS, ApiError, Headers, read_body, reply, send_error
from cbsim.http.listen import ServeOptions, address, listen
from cbsim.http.requests import Encoder
from cbsim.http.settings import Settings, may_pass
from cbsim.http.tokenizer import Tokenizer, plain
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.record.directory import RunWriter
from cbsim.record.environment import environment
from cbsim.runs.routing import ENDS, FILE, Books, Head
from cbsim.runs.served import Contents, Log
from cbsim.scenario.fleet import Fleet

LOG = logging.getLogger("cbsim.http")
CONNECT_S = 5.0
KNOWN_BLOCKS = 1 << 20  # whose content is known again, of all prompts together
OF_A_CONNECTION = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"),
    *("content-length", "expect"),
}
METRICS = {  # of vLLM and SGLang
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_running": "running",
    "vllm:kv_cache_usage_perc": "kv_use",
    "sglang:num_queue_reqs": "waiting",
    "sglang:num_running_reqs": "running",
    "sglang:token_usage": "kv_use",
}
SAMPLE = re.compile(r"^([\w:]+)(?:\{.*\})? ([0-9.eE+-]+)(?: \d+)?$", re.MULTILINE)  # of Prometheus' text


def client(**options: Any) -> httpx.AsyncClient:
    """Return a client without bounds on the number of connections or the length of an answer."""
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(None, connect=CONNECT_S)
    return httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False, **options)


class RouteApp:
    """The ASGI application; `servers` are their addresses without `/v1`. Metrics are scraped every `metrics_s` seconds.
    Prompts are cut into tokens by `tokenizer`, and into contents of `block_tokens`.
    """

    def __init__(
        self,
        servers: Sequence[str],
        books: Books,
        http: httpx.AsyncClient,
        tokenizer: Tokenizer,
        *,
        settings: Settings | None = None,
        metrics_s: float = 0.05,
        block_tokens: int = 16,
    ) -> None:
        self.servers, self.books, self.http, self.settings = servers, books, http, settings or Settings()
        self.dead: str | None = None
        self._encoder, self._metrics_s = Encoder(tokenizer, self.settings.inline_characters), metrics_s
        self._contents = Contents(block_tokens, KNOWN_BLOCKS // 4)
        self._work: dict[int, asyncio.Task[str]] = {}  # by index of the request
        self._start_s: float | None = None
        self._closed = asyncio.Event()

    def now_ns(self) -> int:
        """Return the time since the first call."""
        now_s = asyncio.get_running_loop().time()
        if self._start_s is None:
            self._start_s = now_s
        return round((now_s - self._start_s) * NS)

    async def run(self) -> None:
        """Scrape the servers until `close`; return when all requests have ended."""
        scrapes = [asyncio.ensure_future(self._scrape(at)) for at in range(len(self.servers))]
        await self._closed.wait()
        while self._work:
            await asyncio.wait(self._work.values())
            await asyncio.sleep(0)
        for scrape in scrapes:
            scrape.cancel()
        await asyncio.gather(*scrapes, return_exceptions=True)
        await self.http.aclose()

    def close(self) -> None:
        self._closed.set()

    def cut(self) -> int:
        """Cancel the answers under way, which fail, and return their number."""
        count = len(self._work)
        for work in self._work.values():
            work.cancel("failed")
        return count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except ClientDisconnect:
            pass
        except ApiError as error:
            await send_error(send, error)
        except Exception:
            LOG.exception("%s %s failed", scope.get("method"), scope.get("path"))
            await send_error(send, ApiError(500, "Internal Server Error"))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not may_pass(self.settings.keys, path, scope["headers"]):
            raise ApiError(401, "an API key is needed: `Authorization: Bearer KEY`")
        up = [at for at, view in enumerate(self.books.views) if view.up]
        if path in ("/health", "/ping"):
            return await reply(send, 200 if up and not self._closed.is_set() else 503, b"")
        request = Request(scope, receive)
        body = await read_body(request, self.settings.max_body_bytes)
        call = Call(self, request, body, send)
        if path in GENERATIONS:
            if self._closed.is_set():
                raise ApiError(503, "the router is shutting down", retry_s=self.settings.retry_s)
            await self._routed(call, await self._spec(request, body), receive)
            return None
        if not up:
            raise ApiError(503, "no server is up", retry_s=self.settings.retry_s)
        try:
            return await call.attempt(up[0], lambda: None)
        except httpx.HTTPError as error:
            raise ApiError(502, f"the server failed: {in_line(error)}") from error

    async def _routed(self, call: Call, spec: RequestSpec, receive: Receive) -> None:
        """Forward a request until it has ended in one of routing.ENDS, which its client may cause by leaving."""
        books, index = self.books, spec.index
        books.came(spec)
        work = self._work[index] = asyncio.ensure_future(call.run(index))
        gone = asyncio.ensure_future(_until_gone(receive))
        end = "failed"
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel("cancelled")
            with suppress(asyncio.CancelledError):
                end = await work
            if work.cancelled():
                end = "cancelled" if gone.done() else "failed"
        finally:
            gone.cancel()
            if not work.done():  # the connection's task itself was cancelled
                work.cancel()
                await asyncio.wait({work})
            del self._work[index]
            books.ended(self.now_ns(), index, end)
        if end == "failed" and not gone.done():
            await call.fail(ApiError(503, "the router ended before the answer"))

    async def _spec(self, request: Request, body: bytes) -> RequestSpec:
        """Return the request as the router knows it; one that cannot be read has a prompt of one token of its own."""
        try:
            fields = json.loads(body)
        except ValueError:
            fields = None
        fields = fields if isinstance(fields, dict) else {}
        prompt = _prompt(fields)
        ids = await self._encoder.plain(prompt) if isinstance(prompt, str) else prompt
        index = self.books.count
        session, client_id = (request.headers.get(name, "") for name in ("x-session-id", "x-request-id"))
        name = f"{session}/{index}" if session else client_id
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
        most = limit if type(limit) is int and 0 < limit < 1 << 40 else 1
        prefix = self._contents.prefix(ids, str(fields.get("cache_salt") or ""))
        size = self._contents.block_tokens
        return RequestSpec(
            index=index,
            id=name if name and name.isprintable() else f"request-{index}",
            arrival_ns=self.now_ns(),
            prompt_tokens=max(1, len(ids)),
            output_tokens=most,
            max_tokens=most,
            prefix=prefix,
            prefix_block_tokens=size,
            prefix_tokens=len(prefix) * size,
        )

    async def _scrape(self, server: int) -> None:
        """Take a server's metrics at every interval. One without any counts as idle; one that fails is down."""
        while True:
            try:
                response = await self.http.get(f"{self.servers[server]}/metrics", timeout=CONNECT_S)
                if response.status_code >= 500:
                    raise httpx.HTTPError(f"status {response.status_code}")
                values = read_metrics(response.text)
                waiting, running = round(values["waiting"]), round(values["running"])
                self.books.scraped(self.now_ns(), server, waiting, running, values["kv_use"])
            except (httpx.HTTPError, ValueError):
                self.books.lost(self.now_ns(), server)
            await asyncio.sleep(self._metrics_s)


class Call:
    """A client's request while it is forwarded. Once `started`, some of an answer was passed on."""

    def __init__(self, app: RouteApp, request: Request, body: bytes, send: Send) -> None:
        self._app, self._send, self._body = app, send, body
        self._method, self._target = request.method, request.url.path
        if request.url.query:
            self._target += f"?{request.url.query}"
        self._headers = [(name, value) for name, value in request.headers.raw if name.decode() not in OF_A_CONNECTION]
        if "accept-encoding" not in request.headers:
            self._headers.append((b"accept-encoding", b"identity"))
        self.started = self.complete = False

    async def run(self, index: int) -> str:
        """Try one server after the other; return how the request ended."""
        app, books = self._app, self._app.books
        error: Exception | None = None
        while (server := books.choose(app.now_ns(), index)) is not None:
            try:
                await self.attempt(server, lambda: books.answered(app.now_ns(), index))
                return "finished"
            except (ApiError, httpx.HTTPError) as failure:
                error = failure
                if isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout):
                    books.lost(app.now_ns(), server)
            finally:
                books.returned(app.now_ns(), index)
            if self.started:
                break
        if isinstance(error, ApiError) or error is None:
            await self.fail(error or ApiError(503, "no server is up", retry_s=app.settings.retry_s))
            return "refused"
        await self.fail(ApiError(502, f"the server failed: {in_line(error)}"))
        return "failed"

    async def attempt(self, server: int, answered: Callable[[], None]) -> None:
        """Pass a server's answer on, a stream as it comes, any other as a whole. Raises httpx.HTTPError; ApiError for
        an answer of 503, of which nothing was passed on.
        """
        url = f"{self._app.servers[server]}{self._target}"
        request = self._app.http.build_request(self._method, url, headers=self._headers, content=self._body)
        response = await self._app.http.send(request, stream=True)
        try:
            head = [(name.lower(), value) for name, value in response.headers.raw]
            head = [(name, value) for name, value in head if name.decode() not in OF_A_CONNECTION]
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                content = b"".join([part async for part in response.aiter_raw()])
                if response.status_code == 503:
                    raise ApiError(503, "every server answered 503", retry_s=self._app.settings.retry_s)
                answered()
                await self._start(response.status_code, [*head, (b"content-length", b"%d" % len(content))])
                await self._write(content, last=True)
                return
            async for part in response.aiter_raw():
                if not self.started:
                    answered()
                    await self._start(response.status_code, head)
                await self._write(part)
            if not self.started:
                raise httpx.RemoteProtocolError("a stream without a byte")
            await self._write(b"", last=True)
        finally:
            await response.aclose()

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, or end the stream that has begun with one."""
        if not self.started:
            self.started = self.complete = True
            await send_error(self._send, error)
        elif not self.complete:
            await self._write(b"data: %b\n\n%b" % (error.body, DONE), last=True)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _write(self, body: bytes, *, last: bool = False) -> None:
        self.complete = last
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _prompt(fields: Mapping[str, Any]) -> str | list[int]:
    """Return the prompt of a request, the first one of several, as text or ids; empty if there is none."""
    if isinstance(messages := fields.get("messages"), list):
        turns = [each for each in messages if isinstance(each, dict)]
        return plain([{"role": str(turn.get("role")), "content": _content(turn.get("content"))} for turn in turns])
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return [token for token in prompt if type(token) is int]
    return prompt if isinstance(prompt, str) else ""


def _content(content: Any) -> str:
    parts: Iterable[Any] = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return content if isinstance(content, str) else "".join(part for part in texts if isinstance(part, str))


def read_metrics(exposition: str) -> dict[str, float]:
    """Return the load in Prometheus' text: sums over the engines of a server, of shares the mean; 0 if it has none."""
    values: dict[str, list[float]] = {"waiting": [], "running": [], "kv_use": []}
    for name, number in SAMPLE.findall(exposition):
        if name in METRICS:
            values[METRICS[name]].append(float(number))
    return {name: sum(each) / (len(each) if each and name == "kv_use" else 1) for name, each in values.items()}


async def serve(
    servers: Sequence[str],
    fleet: Fleet,
    seed: int,
    tokenizer: Tokenizer,
    options: ServeOptions,
    *,
    block_tokens: int,
    command: str,
) -> int:
    """Route until a signal; return the exit status: 1 if answers were cut off. The run directory has the log of the
    router's calls, and how requests ended. Raises EndpointError, RunError, RouterError.
    """
    first, log = Head(fleet=fleet, seed=seed, servers=list(servers)).line(), Log(in_memory=False)
    books, writers = Books(fleet, seed, log.add), list[RunWriter]()
    log.alarm = lambda problem: print(f"{problem} the log ends here", file=sys.stderr, flush=True)

    def bound() -> None:
        writer = RunWriter.new(options.out, f"route-{fleet.router.name}", sha256(first.encode()).hexdigest())
        writers.append(writer)
        writer.json("env.json", environment(command, "", seed))
        log.write_to(writer.path / FILE)
        log.add(first)

    def ready(host: str, port: int) -> None:
        print(f"routing   {len(servers)} servers by {fleet.router.name} at {address(host, port)}/v1", flush=True)
        if not options.quiet:
            print(f"run       {writers[0].path}\nend it    with Ctrl-C: answers under way may end", flush=True)

    more: dict[str, Any] = {"metrics_s": fleet.signals.metrics_s, "block_tokens": block_tokens}
    app = RouteApp(servers, books, client(), tokenizer, settings=options.settings, **more)
    ending = await listen(app, options.host, options.port, bound=bound, ready=ready)
    log.close()
    ends = {end: books.ends[end] for end in ENDS}
    sent = [books.choices[server] for server in range(len(servers))]
    writers[0].json("summary.json", {"requests": books.count, "ends": ends, "sent": sent})
    if log.problem is None:
        writers[0].complete()
    print(f"{books.count} requests: {', '.join(f'{count} {end}' for end, count in ends.items())}; sent {sent}")
    return ERROR if ending.cut or log.problem else OK
