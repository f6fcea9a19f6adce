"""Clients that go away at any byte, of what they say or of what they are told: all blocks are free afterwards."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from cbsim.http.app import App
from cbsim.http.listen import Stop, listen
from cbsim.http.tokenizer import open_tokenizer
from cbsim.runs.served import result_of
from cbsim.scenario.scenario import scenario_of
from cbsim.virtual.clocks import VirtualClock, VirtualLoop
from cbsim.virtual.simulated import SimulatedBackend, open_session

TOKENIZER = open_tokenizer()
ASKED = json.dumps({"prompt": list(range(40)), "max_tokens": 30, "stream": True, "ignore_eos": True}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(ASKED), ASKED)
)
ANSWER = 6000  # bytes, about: thirty chunks
CLIENT = st.tuples(
    st.integers(0, len(REQUEST)),  # bytes that it says
    st.integers(1, 40),  # at a time
    st.one_of(st.none(), st.integers(0, ANSWER)),  # bytes that it hears, or all
    st.integers(0, 200),  # ms at which it comes
)


async def talk(address: tuple[str, int], says: int, at_a_time: int, hears: int | None, at_ms: int) -> bytes:
    await asyncio.sleep(at_ms / 1e3)
    reader, writer = await asyncio.open_connection(*address)
    for begin in range(0, says, at_a_time):
        writer.write(REQUEST[begin : min(says, begin + at_a_time)])
        await asyncio.sleep(1e-4)
    emitted = b""
    while says == len(REQUEST) and (hears is None or len(emitted) < hears) and b"[DONE]" not in emitted:
        data = await reader.read(97 if hears is None else min(97, hears - len(emitted)))
        assert data
        emitted += data
    writer.transport.abort()
    return emitted


async def session(backend: SimulatedBackend, clients: list[tuple[int, int, int | None, int]]) -> list[bytes]:
    stop, where = Stop(), asyncio.get_running_loop().create_future()
    door = asyncio.ensure_future(
        listen(App(backend), port=0, stop=stop, signals=False, ready=lambda *address: where.set_result(address))
    )
    address = await where
    emitted = await asyncio.gather(*(talk(address, *client) for client in clients))
    await asyncio.sleep(2)  # whoever left has been given up
    pool = backend.machine.scheduler.pool
    pool.check()
    assert pool.free == pool.num_blocks
    assert backend.load.running == backend.load.waiting == 0
    stop.request()
    await door
    return emitted


@settings(max_examples=25)
@given(clients=st.lists(CLIENT, min_size=1, max_size=6))
def test_a_client_may_go_at_any_byte(clients: list[tuple[int, int, int | None, int]]) -> None:
    """Those who stay get all their tokens; the others have asked for nothing, or are given up."""
    wanted = scenario_of(
        {
            "question": "Who goes?",
            "model": "tiny",
            "hardware": "laptop-cpu",
            "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
            "scheduler": {"name": "vllm"},
            "kv_cache": {"num_blocks": 16},  # for three of them
            "loop": {"mode": "async"},
            "cost": {"kind": "constant", "step_s": 0.005},
        }
    )
    backend = open_session(wanted, VirtualClock(), TOKENIZER, None, "test")
    loop = VirtualLoop()
    try:
        emitted = loop.run_until_complete(session(backend, clients))
    finally:
        loop.close()
    result = result_of(backend.session, backend.log, {})
    statuses = result.summary["requests_by_status"]
    asked = [client for client in clients if client[0] == len(REQUEST)]
    stayed = [text for client, text in zip(clients, emitted, strict=True) if client in asked and b"[DONE]" in text]
    assert all(text.count(b'"text":') == 30 for text in stayed)
    assert statuses["length"] >= len(stayed)
    assert statuses["length"] + statuses["aborted"] == len(backend.log.content().splitlines()) - statuses["aborted"]
    assert result.summary["requests"] <= len(asked)
