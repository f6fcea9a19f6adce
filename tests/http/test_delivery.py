"""Streamed texts are written by rounds, past clients that are behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.endpoint_calls import (
    Feeding,
    Instant,
    Session,
    call,
    embedded,
    events,
    listening,
    read_answer,
    request,
    scripted,
    text_of,
)

from cbsim.http.admission import AdmissionController, ClientStream
from cbsim.http.answers import BATCH, DONE, Choice, Chunks, Delivery, FlushRound
from cbsim.http.app import App
from cbsim.http.backend import Generation
from cbsim.http.settings import Settings


class Narrow:
    """A writer that is full after some of the writes, until it is drained."""

    def __init__(self, full_after: Iterator[bool]) -> None:
        self._full_after = full_after
        self.full = False
        self.body = b""

    def write(self, body: bytes) -> None:
        assert not self.full
        self.body += body
        self.full = next(self._full_after, False)

    async def drain(self) -> None:
        while self.full:
            await asyncio.sleep(0)
            self.full = False

    def abort(self) -> None: ...


@given(
    st.lists(st.integers(1, 2 * BATCH), min_size=1, max_size=12),
    st.lists(st.booleans(), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
)
@example([300, 300], [], [1, 0])  # more comes, and the end, while what is written is behind
@example([300, 300], [], [2, 0])
async def test_a_text_is_whole_however_its_client_reads(puts: list[int], full: list[bool], turns: list[int]) -> None:
    """Nothing is written to a writer that is full, and at the end nothing is kept."""
    tokens = sum(puts)
    admission = AdmissionController(scripted(), Settings(max_unread_tokens=tokens + 1))
    stream = ClientStream(Generation("a", [1], max_tokens=tokens), admission, lambda: None)
    writer, complete = Narrow(iter(full)), list[Choice]()
    ids = [300 + at % 3000 for at in range(tokens)]

    choice = Choice(0, stream, embedded().decoder(), None)
    chunks = Chunks(choice, {"id": "a"}, chat=False, continuous=False)
    delivery = Delivery(choice, lambda texts: writer.write(chunks.encode(texts)), writer, FlushRound(), complete.append)
    emitted, rest = asyncio.ensure_future(delivery.run()), ids
    for at, count in enumerate(puts):
        stream.put(rest[:count], float(at))
        rest = rest[count:]
        for _ in range(turns[at % len(turns)] if turns else 0):
            await asyncio.sleep(0)
    stream.end("length", float(len(puts)))
    await emitted
    parts = writer.body.split(b"\n\n")
    assert parts.pop() == b""
    assert len(parts) in (tokens, tokens + 1)  # one a token, and the end if it came alone
    assert text_of(events(writer.body + DONE)) == embedded().decode(ids)
    assert (admission.unread, stream.unread, len(complete)) == (0, 0, 1)


async def test_a_round_is_written_when_the_step_is_over() -> None:
    """Not from within the step that has the tokens: the server is not held up, and may be asked to cancel."""
    order = list[str]()
    round_ = FlushRound()
    for name in "abc":
        round_.join(lambda name=name: order.append(name))  # type: ignore[misc]
    order.append("step")
    await asyncio.sleep(0)
    assert order == ["step", "a", "b", "c"]


async def test_what_fails_in_a_round_is_one_answers_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer that cannot decode a token: that client hears of it, the others of the round have their texts."""

    def broken(token: int) -> str:
        raise LookupError(token)

    async def body(server: Session) -> bytes:
        reader, writer = await server.connect()
        writer.write(request("/v1/completions", {"prompt": "a b c", "max_tokens": 6, "stream": True}))
        return (await read_answer(reader)).body

    feeds = iter([broken, embedded().decoder()])
    backend = scripted()
    backend.tokenizer = Feeding(lambda: next(feeds))
    caplog.set_level(logging.ERROR)
    async with listening(backend) as server:
        failed, whole = await asyncio.gather(body(server), body(server))
    assert b'"the answer could not be written"' in failed and failed.endswith(DONE)
    assert whole.count(b'"text":') == 6 and whole.endswith(DONE)
    assert [record.message for record in caplog.records] == ["an answer could not be written"]


@pytest.mark.parametrize("prompts", [["a b c"], ["a", "b c"]])
async def test_any_asgi_server_can_send_it(prompts: list[str]) -> None:
    """One that knows nothing of our way of writing: by ASGI's own messages."""
    fields = {"prompt": prompts, "max_tokens": 6, "stream": True}
    answer = await call(App(Instant()), "/v1/completions", fields)
    for index in range(len(prompts)):
        assert text_of(answer.events, index) == embedded().decode(range(300, 306))
