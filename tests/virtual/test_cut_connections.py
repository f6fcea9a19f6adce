"""Clients that go away at any byte of their requests or answers: all blocks are free afterwards."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from support.endpoint_calls import Session, listening, request

from cbsim.http.tokenizer import open_tokenizer
from cbsim.runs.served import result_of
from cbsim.scenario.scenario import scenario_of
from cbsim.virtual.clocks import Clock, VirtualLoop
from cbsim.virtual.simulated import SimulatedBackend

TOKENIZER = open_tokenizer()
REQUEST = request("/v1/completions", {"prompt": [*range(40)], "max_tokens": 30, "stream": True, "ignore_eos": True})
ANSWER = 6000  # bytes, about: thirty chunks
CLIENT = st.tuples(
    st.integers(0, len(REQUEST)),  # bytes that it sends
    st.integers(1, 40),  # at a time
    st.one_of(st.none(), st.integers(0, ANSWER)),  # bytes that it reads, or all
    st.integers(0, 200),  # ms at which it comes
)


async def talk(server: Session, sends: int, at_a_time: int, reads: int | None, at_ms: int) -> bytes:
    await asyncio.sleep(at_ms / 1e3)
    reader, writer = await server.connect()
    for begin in range(0, sends, at_a_time):
        writer.write(REQUEST[begin : min(sends, begin + at_a_time)])
        await asyncio.sleep(1e-4)
    answer = b""
    while sends == len(REQUEST) and (reads is None or len(answer) < reads) and b"[DONE]" not in answer:
        data = await reader.read(97 if reads is None else min(97, reads - len(answer)))
        assert data
        answer += data
    writer.transport.abort()
    return answer


async def session(backend: SimulatedBackend, clients: list[tuple[int, int, int | None, int]]) -> list[bytes]:
    async with listening(backend) as server:
        answers = await asyncio.gather(*(talk(server, *client) for client in clients))
        await asyncio.sleep(2)  # requests of clients that left have been given up
        pool = backend.machine.scheduler.pool
        pool.check()
        assert pool.free == pool.num_blocks
        assert backend.load.running == backend.load.waiting == 0
    return answers


SCENARIO = {
    "question": "Whose connection is cut?",
    "model": "tiny",
    "hardware": "laptop-cpu",
    "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
    "scheduler": {"name": "vllm"},
    "kv_cache": {"num_blocks": 16},  # for three of the requests
    "loop": {"mode": "async"},
    "cost": {"kind": "constant", "step_s": 0.005},
}


@settings(max_examples=25)
@given(clients=st.lists(CLIENT, min_size=1, max_size=6))
def test_a_client_may_go_at_any_byte(clients: list[tuple[int, int, int | None, int]]) -> None:
    """Those who stay get all their tokens; the rest have requested nothing, or are given up."""
    backend = SimulatedBackend(scenario_of(SCENARIO), Clock(), TOKENIZER, None, "test")
    loop = VirtualLoop()
    try:
        answers = loop.run_until_complete(session(backend, clients))
    finally:
        loop.close()
    result = result_of(backend.session, backend.log, {})
    statuses, log = result.summary["requests_by_status"], backend.log.content().splitlines()
    whole = [client[0] == len(REQUEST) for client in clients]
    stayed = [answer for answer, all_of_it in zip(answers, whole, strict=True) if all_of_it and b"[DONE]" in answer]
    assert all(answer.count(b'"text":') == 30 for answer in stayed)
    assert statuses["length"] >= len(stayed)
    assert statuses["length"] + statuses["aborted"] == len(log) - statuses["aborted"]
    assert result.summary["requests"] <= sum(whole)
