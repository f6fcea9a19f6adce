"""Many clients that behave badly: nothing of them is left, nobody else waits for them, nothing is logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import socket
from pathlib import Path

import pytest
from support.endpoint_calls import Feeding, Session, listening, read_answer, request, scripted

from cbsim.http.connection import Connection
from cbsim.http.listen import files_for
from cbsim.http.settings import Settings

SILENT = 10_000
DEATHS = 1_000
SPARE = 512


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> object:
    caplog.set_level(logging.WARNING)
    yield
    emitted = [
        record for record in caplog.get_records("call") if record.name.startswith(("cbsim", "asyncio", "uvicorn"))
    ]
    assert not [record.getMessage() for record in emitted]


def open_files() -> int | None:
    folder = Path("/proc/self/fd")
    return len([*folder.iterdir()]) if folder.exists() else None


async def health(server: Session) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.split(b"\r\n")[0]


@pytest.mark.slow
async def test_10_000_connections_that_never_speak() -> None:
    """Each is open until its head is late; others are served meanwhile; then all are closed."""
    files_for(2 * SILENT + SPARE)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    silent = min(SILENT, (most - SPARE) // 2)  # both ends are files of this process

    loop = asyncio.get_running_loop()
    patience = Settings(head_s=1.0, max_connections=silent + 1)
    before = open_files()
    async with listening(settings=patience) as server:
        tasks = len(asyncio.all_tasks())
        clients = []
        for _ in range(silent):
            client = socket.socket()
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            clients.append(client)
        assert await health(server) == b"HTTP/1.1 200 OK"
        for client in clients:
            answer = await loop.sock_recv(client, 1000)
            assert answer.startswith(b"HTTP/1.1 408")
            client.close()
        assert len(asyncio.all_tasks()) == tasks
    assert open_files() == before


async def test_a_client_that_dies_at_random_1_000_times() -> None:
    """Each asks for more than it will read, and is gone after some bytes or none, politely or not."""
    draw = random.Random(1)

    async def client(server: Session) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        stream, path = draw.random() < 0.7, draw.choice(["/v1/completions", "/v1/chat/completions"])
        words = (
            {"messages": [{"role": "user", "content": "a"}]}
            if "chat" in path
            else {"prompt": ["a"] * draw.randint(1, 3)}
        )
        bytes_ = request(path, {**words, "max_tokens": 1 << 16, "stream": stream})
        writer.write(bytes_ if draw.random() < 0.7 else bytes_[: draw.randrange(len(bytes_))])
        try:
            if stream:
                await asyncio.wait_for(reader.readexactly(draw.randrange(2000)), 0.02)
            else:
                await asyncio.sleep(draw.random() * 0.01)
        except (TimeoutError, asyncio.IncompleteReadError):
            pass
        if draw.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    before = open_files()
    async with listening() as server:
        tasks = len(asyncio.all_tasks())
        for _ in range(DEATHS // 50):
            await asyncio.gather(*(client(server) for _ in range(50)))
        await server.until_empty()
        while len(asyncio.all_tasks()) > tasks:
            await asyncio.sleep(0.001)
        cancelled = server.backend.cancelled
        assert len({*cancelled}) == len(cancelled) == len(server.backend.generations)  # none would have ended
    assert open_files() == before


async def deaf(server: Session, **fields: object) -> socket.socket:
    """A client that asks, and never reads."""
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    await loop.sock_sendall(client, request("/v1/completions", {"stream": True, **fields}))
    return client


@pytest.mark.parametrize("bounds", [Settings(max_unread_tokens=2000), Settings(max_unread_sum=2000)])
async def test_a_client_that_does_not_read_is_cut(bounds: Settings) -> None:
    """Once too many of its tokens are unread, of its own or of all; one that reads does not notice."""
    async with listening(scripted(itl_s=0.0), bounds) as server:
        slow = await deaf(server, prompt="x", max_tokens=1 << 19)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while not server.app.admission.slow:
            writer.write(request("/v1/completions", {"prompt": "y", "max_tokens": 500, "stream": True}))
            answer = await read_answer(reader)
            assert len(answer.events) == 500
        await server.until_empty()
        slow.close()
        writer.close()
        await writer.wait_closed()
        cancelled, slow, _ = server.backend.cancelled, server.app.admission.slow, answer
    assert (cancelled, slow) == (["cmpl-0"], 1)


async def test_a_client_that_reads_late_misses_nothing() -> None:
    """As long as it stays within the bounds: what was kept comes in the end, a chunk a token."""
    tokens = 30_000

    loop = asyncio.get_running_loop()
    async with listening(scripted(itl_s=0.0)) as server:
        late = await deaf(server, prompt="x", max_tokens=tokens)
        while not server.backend.generations or server.app.admission.open:
            await asyncio.sleep(0.001)
        assert server.app.admission.unread  # more than sockets hold
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += await loop.sock_recv(late, 1 << 20)
        late.close()
        assert server.app.admission.slow == 0
        assert (answer.count(b'"text":')) == tokens


async def test_a_client_that_has_stopped_reading_is_not_kept_for_ever() -> None:
    """Its answer is whole and in a buffer, and it does not come for it."""
    async with listening(scripted(itl_s=0.0), Settings(stall_s=0.05)) as server:
        slow = await deaf(server, prompt=["x"] * 8, max_tokens=20_000)
        await server.until_submitted()
        await server.until_empty()
        slow.close()


async def test_a_client_that_does_not_read_is_not_kept_to_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is to close, less is left than makes a socket full, and it never comes for it."""
    made, connections = Connection.connection_made, list[Connection]()

    def narrow(self: Connection, transport: asyncio.Transport) -> None:
        made(self, transport)
        connections.append(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)

    monkeypatch.setattr(Connection, "connection_made", narrow)

    async with listening(scripted(itl_s=0.0), Settings(stall_s=0.05, idle_s=0.01)) as server:
        slow = await deaf(server, prompt="x", max_tokens=300)
        await server.until_submitted()
        await server.until_empty()
        while connections[0] in connections[0].connections:
            await asyncio.sleep(0.001)
        slow.close()


async def test_nothing_is_told_to_nobody() -> None:
    """What a client has not read when it goes is not made into text for it."""
    fed = 0

    def feed(token: int) -> str:
        nonlocal fed
        fed += 1
        return str(token)

    backend = scripted(itl_s=0.0)
    backend.tokenizer = Feeding(lambda: feed)
    async with listening(backend) as server:
        slow = await deaf(server, prompt="x", max_tokens=1 << 19)
        while not server.app.admission.unread > 20_000:
            await asyncio.sleep(0.001)
        before = fed
        slow.close()
        await server.until_empty()
        assert (fed - before) < 5_000


@pytest.mark.parametrize("itl_s", [0.0, 0.3])
async def test_a_hurried_end_says_nothing_of_answers_it_cuts(itl_s: float) -> None:
    """Clients that do not read, or whose next token is far away: cut off and counted, without a traceback."""
    async with listening(scripted(itl_s=itl_s)) as server:
        clients = [await deaf(server, prompt=prompt, max_tokens=1 << 19) for prompt in ("x", ["y", "z"])]
        streams = server.app.admission.streams
        while len(streams) < 3 or (not itl_s and min(stream.unread for stream in streams.values()) < 1000):
            await asyncio.sleep(0.001)
        server.stop.request()
        server.stop.request()
        ending = await server.ending
        for client in clients:
            client.close()
        assert ending.cut == 3
