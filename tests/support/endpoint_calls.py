"""Helpers: an application asked without a socket, and one behind a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from cbsim.http.app import App
from cbsim.http.backend import Stream
from cbsim.http.listen import Ending, Stop, listen
from cbsim.http.settings import Settings
from cbsim.http.tokenizer import Tokenizer, open_tokenizer
from support.scripted import Script, Scripted, counting

ITL_S = 0.001
JSON = ("content-type", "application/json")


@cache
def embedded() -> Tokenizer:
    return open_tokenizer()


def chat_ids(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer | None = None) -> list[int]:
    """The prompt of a conversation."""
    tokenizer = tokenizer or embedded()
    return tokenizer.encode(tokenizer.render(messages), special=False)


class Feeding:
    """Our tokenizer, whose decoders feed like this, each made anew."""

    def __init__(self, feeds: Callable[[], Callable[[int], str]]) -> None:
        self._feeds = feeds

    def __getattr__(self, name: str) -> Any:
        return getattr(embedded(), name)

    def decoder(self) -> Any:
        return self._feeds()


def scripted(script: Script = counting, itl_s: float = ITL_S, **more: Any) -> Scripted:
    return Scripted(embedded(), itl_s, script, **more)


def saying(*parts: str) -> Script:
    """The model's tokens are those of these texts, one text after the other; then it ends."""
    ids = [token for part in parts for token in embedded().encode(part)]
    return lambda _: iter(ids)


class Instant(Scripted):
    """Needs no `run`: the steps of a request are made as soon as the loop comes to it."""

    def __init__(self, script: Script = counting, **more: Any) -> None:
        super().__init__(embedded(), 0.0, script, **more)

    def submit(self, stream: Stream) -> None:
        super().submit(stream)
        asyncio.get_running_loop().call_soon(self._steps, stream)

    def _steps(self, stream: Stream) -> None:
        while stream.finish is None:
            self.step(self.now_s)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return error

    @property
    def events(self) -> list[Any]:
        """What was streamed, without the end."""
        return events(self.body)


def events(body: bytes) -> list[Any]:
    *chunks, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(chunk.startswith(b"data: ") for chunk in chunks)
    return [json.loads(chunk[6:]) for chunk in chunks]


def text_of(chunks: Iterable[Any], index: int = 0) -> str:
    emitted = [choice for chunk in chunks for choice in chunk.get("choices", ()) if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in emitted)


async def call(
    app: App, path: str, body: Any = None, method: str | None = None, headers: Iterable[tuple[str, str]] = (JSON,)
) -> Answer:
    """A request by ASGI's messages. A body that is not bytes is sent as JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    scope = {
        "type": "http",
        "method": method or ("GET" if body is None else "POST"),
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
    }
    messages = iter([{"type": "http.request", "body": raw, "more_body": False}])
    answer = Answer(0, {}, b"")

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.get_running_loop().create_future()  # the client stays
        assert message is not None
        return message

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message["body"]

    await app(scope, receive, send)
    return answer


def answer_to(
    path: str, body: Any = None, script: Script = counting, settings: Settings | None = None, **more: Any
) -> Answer:
    """One request of a new application."""

    async def once() -> Answer:
        return await call(App(Instant(script), settings), path, body, **more)

    return asyncio.run(once())


def completion(script: Script = counting, **fields: Any) -> Answer:
    return answer_to("/v1/completions", {"prompt": "a b c", **fields}, script)


def chat(script: Script = counting, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": "a b c"}]
    return answer_to("/v1/chat/completions", {"messages": messages, **fields}, script)


@dataclass
class Session:
    app: App
    backend: Any
    port: int
    stop: Stop
    ending: asyncio.Task[Ending]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is closed with the session."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def until_submitted(self, requests: int = 1) -> None:
        while len(self.backend.generations) < requests:
            await asyncio.sleep(0.001)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def openai(self) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.address, api_key="none", max_retries=0)

    async def until_empty(self) -> None:
        """No stream, no token that is kept, no connection's task."""
        while self.app.admission.open or self.backend.load.running or self.app.admission.streams:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def listening(backend: Any = None, settings: Settings | None = None) -> AsyncIterator[Session]:
    """An application behind a socket; once the block is left it has ended, and nothing of it is left."""
    backend = backend or scripted()
    app, stop = App(backend, settings), Stop()
    where: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ending = asyncio.get_running_loop().create_task(
        listen(app, port=0, stop=stop, signals=False, ready=where.set_result)
    )
    await asyncio.wait({ending, where}, return_when=asyncio.FIRST_COMPLETED)
    if not where.done():
        await ending
    session = Session(app, backend, int(urlsplit(where.result()).port or 0), stop, ending)
    try:
        yield session
    finally:
        for writer in session.writers:
            writer.close()
        if stop.why is None:
            stop.request()
        else:
            stop.hurried.set()
        await ending
        await asyncio.gather(*(writer.wait_closed() for writer in session.writers), return_exceptions=True)
    admission = app.admission
    assert not (admission.open or admission.queued or admission.queued_tokens or admission.unread)
    assert not admission.streams and not backend.load.running


def request(path: str, fields: dict[str, Any], headers: str = "") -> bytes:
    """A POST as bytes."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The next answer of a connection, chunked or not."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return Answer(int(head[0].split()[1]), headers, body)
