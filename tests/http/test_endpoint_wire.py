"""Bytes on a socket: however they come, whoever leaves, whatever is too long or too late."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.endpoint_calls import Answer, Session, embedded, listening, read_answer, request, scripted, text_of

from cbsim.http import connection
from cbsim.http.connection import MOST_PIPELINED
from cbsim.http.settings import Settings

COMPLETION = request("/v1/completions", {"prompt": "a b c", "max_tokens": 6, "stream": True})
ENDLESS = {"prompt": "a b c", "max_tokens": 1 << 19}


async def sent(server: Session, *parts: bytes) -> Answer:
    """The answer to a request that comes in these parts, to those of them that are taken."""
    reader, writer = await server.connect()
    answer = asyncio.get_running_loop().create_task(read_answer(reader))
    for piece in parts:
        if answer.done():
            break
        writer.write(piece)
        await asyncio.sleep(0.0001)
    try:
        return await answer
    finally:
        writer.transport.abort()


@settings(max_examples=25)
@given(st.lists(st.integers(0, len(COMPLETION)), max_size=8))
async def test_a_request_is_the_same_in_any_pieces(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(COMPLETION)]
    parts = [COMPLETION[start:end] for start, end in pairwise(ends) if end > start]

    async with listening() as server:
        answer = await sent(server, *parts)
    assert answer.status == 200 and text_of(answer.events) == embedded().decode(range(300, 306))


def six_tokens(stream: bool) -> bytes:
    fields = {"prompt": "a b c", "max_tokens": 6, "stream": stream}
    return request("/v1/completions", fields, "connection: close\r\n")


SIZES: dict[bool, int] = {}  # of whole answers, streamed or not


async def size_of_an_answer(stream: bool) -> int:
    if stream not in SIZES:
        async with listening() as server:
            reader, writer = await server.connect()
            writer.write(six_tokens(stream))
            SIZES[stream] = len(await reader.read())
    return SIZES[stream]


@settings(max_examples=40)
@given(st.booleans(), st.booleans(), st.floats(0, 1))
async def test_a_client_may_leave_at_any_byte(stream: bool, while_it_asks: bool, share: float) -> None:
    """Of its request, or of its answer: its stream is cancelled once, unless it has ended, and nothing is left."""
    data, size = six_tokens(stream), await size_of_an_answer(stream)

    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(data[: int(share * len(data))] if while_it_asks else data)
        if not while_it_asks:
            await reader.readexactly(int(share * size))
        writer.transport.abort()
        await server.until_empty()
        cancelled = server.backend.cancelled
    assert cancelled in ([], ["cmpl-0"])


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_is_cancelled_at_once(stream: bool) -> None:
    """Also one that would get its answer in one piece."""
    async with listening() as server:
        _, writer = await server.connect()
        writer.write(request("/v1/completions", {**ENDLESS, "stream": stream}))
        await server.until_submitted()
        writer.transport.abort()
        await server.until_empty()
        assert server.backend.cancelled == ["cmpl-0"]


@settings(max_examples=60)
@given(st.binary(max_size=60), st.integers(0, len(COMPLETION)), st.integers(0, 40))
async def test_garbage_is_answered_or_closed(garbage: bytes, at: int, left_out: int) -> None:
    """A request with bytes of it replaced: an answer that is one, or none; and the next client is served."""
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(COMPLETION[:at] + garbage + COMPLETION[at + left_out :])
        writer.write_eof()
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        writer.transport.abort()
        next_answer = await sent(server, COMPLETION)
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in answer[:13]
    assert len(next_answer.events) == 6


async def test_a_connection_is_used_again() -> None:
    async with listening() as server:
        reader, writer = await server.connect()
        answers = []
        for number in range(3):
            writer.write(request("/v1/completions", {"prompt": [number + 1], "max_tokens": 2}))
            answers.append(await read_answer(reader))
        writer.write(COMPLETION * 3)  # without waiting for answers
        answers += [await read_answer(reader) for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 6
    assert [answer.json["id"] for answer in answers[:3]] == ["cmpl-0", "cmpl-1", "cmpl-2"]
    assert [answer.events[0]["id"] for answer in answers[3:]] == ["cmpl-3", "cmpl-4", "cmpl-5"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
JSON_BODY = HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize("parts", [[], [HEAD], [JSON_BODY % 9 + b"{"], [CHUNKED, b"1\r\n{\r\n"], [b"\r\n" * 20]])
async def test_what_is_too_late_is_told_so(parts: list[bytes]) -> None:
    async with listening(settings=Settings(head_s=0.03, body_s=0.03)) as server:
        answer = await sent(server, *parts)
    assert answer.status == 408 and answer.error["message"].endswith("has not come within 0.03 s")


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"GET /" + b"a" * 3000], 431),
        ([HEAD + b"x: " + b"a" * 3000 + b"\r\n\r\n"], 431),
        ([HEAD, *[b"a: b\r\n" * 50] * 10], 431),
        ([b"NONSENSE\r\n\r\n"], 400),
        ([b"\x16\x03\x01\x02\x00\x01"], 400),
        ([JSON_BODY % 2000], 413),
        ([CHUNKED, *[b"80\r\n%b\r\n" % (b"a" * 128)] * 9], 413),
        ([b"GET /health HTTP/1.1\r\n\r\n"], 200),
        ([b"GET /a%2Fb HTTP/1.1\r\n\r\n"], 404),
    ],
)
async def test_what_is_too_long_is_told_so(parts: list[bytes], status: int) -> None:
    async with listening(settings=Settings(max_head_bytes=2000, max_body_bytes=1000)) as server:
        answer = await sent(server, *parts)
    assert answer.status == status
    assert status == 200 or answer.error["code"] == status


CLOSE = HEAD + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (CLOSE % 5_000_000 + b"a" * 5_000_000, 413),
        (CLOSE % 20_000_000 + b"a" * 20_000_000, 413),
        (HEAD + b"x: " + b"a" * 5_000_000, 431),
        (b"NONSENSE\r\n\r\n" * 300_000, 400),
    ],
    ids=["5 MB", "20 MB", "head", "garbage"],
)
async def test_who_sends_all_before_it_reads_has_its_answer(data: bytes, status: int) -> None:
    """Closed with bytes unread, the socket would reset and the client lose the answer. Its end comes at once."""

    def answer_at(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(data)
            answer = b""
            while part := client.recv(65536):
                answer += part
            return answer

    async with listening() as server:
        answer = await asyncio.to_thread(answer_at, server.port)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.endswith(b'"code": %d}}' % status)


async def test_garbage_ends_what_is_under_way() -> None:
    """An answer that has not begun is given up: its client is told what was wrong with the rest, and no more."""
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(request("/v1/completions", ENDLESS))
        await server.until_submitted()
        writer.write(b"NONSENSE\r\n\r\n")
        answer, rest = await read_answer(reader), await reader.read()
        await server.until_empty()
        cancelled = server.backend.cancelled
    assert (answer.status, rest, len(cancelled)) == (400, b"", 1)


STREAM = request("/v1/completions", {**ENDLESS, "stream": True})
MANY = request("/v1/completions", {**ENDLESS, "prompt": ["x"] * 20, "stream": True})


@pytest.mark.parametrize("then", [COMPLETION, COMPLETION[:-3], b"NONSENSE\r\n\r\n", COMPLETION + b"NONSENSE\r\n\r\n"])
@pytest.mark.parametrize("first", [STREAM, MANY], ids=["one", "many"])
async def test_who_asks_again_and_leaves_is_cancelled(
    first: bytes, then: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A request behind one that is being answered: the first hears that its client left, whatever came behind it. And
    nothing but its answer is written meanwhile.
    """
    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(first)
        emitted = await reader.readuntil(b'"text":')
        writer.write(then)
        for _ in range(5):
            emitted += await reader.read(65536)
            await asyncio.sleep(0.002)
        writer.transport.abort()
        await server.until_empty()
        cancelled, submitted = len(server.backend.cancelled), len(server.backend.generations)
    assert emitted.count(b"HTTP/1.1 ") == 1
    assert cancelled == submitted == (20 if first is MANY else 1)
    assert not caplog.records


@pytest.mark.parametrize(("seconds", "most"), [(0.03, 1 << 30), (1e6, 1000)])
async def test_what_is_dropped_has_bounds(seconds: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends on and on is closed, in time or after so many bytes."""
    monkeypatch.setattr(connection, "LINGER_S", seconds)
    monkeypatch.setattr(connection, "LINGER_BYTES", most)

    async with listening() as server:
        reader, writer = await server.connect()
        writer.write(CLOSE % 5_000_000)
        answer = await read_answer(reader)
        with pytest.raises(ConnectionError):  # noqa: PT012
            while True:
                writer.write(b"a" * 100)
                await writer.drain()
                await asyncio.sleep(0.0001)
        assert answer.status == 413


async def test_a_connection_that_asks_no_more_is_closed() -> None:
    async with listening(settings=Settings(idle_s=0.03)) as server:
        reader, writer = await server.connect()
        writer.write(COMPLETION)
        await read_answer(reader)
        rest = await reader.read()
        assert rest == b""


async def test_a_connection_too_many_is_turned_away() -> None:
    async with listening(settings=Settings(max_connections=1)) as server:
        await server.connect()
        answer = await sent(server, b"GET /health HTTP/1.1\r\n\r\n")
    assert answer.status == 503 and answer.headers["retry-after"] == "1" and "connections" in answer.error["message"]


async def test_what_is_slow_is_not_what_is_late() -> None:
    """An answer may take longer than any deadline of a request; so may the next request wait for it."""
    patience = Settings(head_s=0.3, body_s=0.3, idle_s=0.3, stall_s=0.3)
    async with listening(scripted(itl_s=0.07), patience) as server:
        reader, writer = await server.connect()
        writer.write(COMPLETION + COMPLETION[:-1])  # the second lacks a byte, and its time begins after the first
        first = await read_answer(reader)
        writer.write(COMPLETION[-1:])
        second = await read_answer(reader)
        assert len(first.events) == len(second.events) == 6


@pytest.mark.parametrize(("waiting", "rejected"), [(MOST_PIPELINED, False), (MOST_PIPELINED + 1, True)])
async def test_a_connection_may_pipeline_so_many_requests_behind_the_one_in_progress(
    waiting: int, rejected: bool
) -> None:
    """MOST_PIPELINED requests may wait behind one that streams; the next is a 400 and the connection closes."""
    async with listening() as server:
        reader, writer = await server.connect()
        first = request("/v1/completions", {"prompt": "a", "max_tokens": 50})
        last = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        writer.write(first + b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" * (waiting - 1) + last)
        data = await reader.read()
    assert data.count(b"HTTP/1.1 200") == (0 if rejected else waiting + 1)
    assert (b"HTTP/1.1 400" in data) == rejected
