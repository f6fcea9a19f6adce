"""KV events of a served simulation: a subscriber's index equals what the cache can find; gaps are replayed."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from typing import Any

import pytest

zmq = pytest.importorskip("zmq", reason="needs the extra `kv-events`")
msgpack = pytest.importorskip("msgpack", reason="needs the extra `kv-events`")
httpx = pytest.importorskip("httpx", reason="needs the extra `serve`")

from support.in_process import Transport

from cbsim.errors import EndpointError
from cbsim.http.app import App
from cbsim.http.tokenizer import open_tokenizer
from cbsim.scenario.scenario import scenario_of
from cbsim.virtual.clocks import Clock
from cbsim.virtual.kv_events import END, KvEvents
from cbsim.virtual.server import IN_PROCESS, serve_while
from cbsim.virtual.simulated import SimulatedBackend

SCENARIO = {
    "question": "What does the cache hold?",
    "model": "tiny",
    "hardware": "laptop-cpu",
    "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
    "scheduler": {"name": "vllm"},
    "kv_cache": {"num_blocks": 24, "block_size": 4},  # so that blocks are evicted
    "loop": {"mode": "sync"},
    "cost": {"kind": "constant", "step_s": 0.0001},
}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Index:
    """A router's index of one server, by the events alone: the tokens up to each block that is cached."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.ever: dict[int, tuple[int, ...]] = {}

    def take(self, batch: bytes) -> None:
        _, events, rank = msgpack.unpackb(batch)
        assert rank == 0
        for event in events:
            if event["type"] == "BlockStored":
                before = self.ever.get(event["parent_block_hash"], ())
                size = event["block_size"]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                for at, block in enumerate(event["block_hashes"]):
                    before = (*before, *event["token_ids"][at * size : (at + 1) * size])
                    self.blocks[block] = self.ever[block] = before
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    del self.blocks[block]
            else:
                assert event == {"type": "AllBlocksCleared"}
                self.blocks.clear()


async def talk(backend: SimulatedBackend, prompts: list[list[int]]) -> None:
    app = App(backend, IN_PROCESS)
    async with httpx.AsyncClient(transport=Transport(app), base_url="http://s") as client:
        for prompt in prompts:
            fields = {"model": "m", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=fields)).status_code == 200
        await asyncio.sleep(0.01)


def new_since(backend: SimulatedBackend, block: int) -> set[int]:
    """The blocks that the pool can find whose content came after a block's."""
    return {key >> 24 for key in backend.machine.scheduler.pool._index if key >> 24 > block}


def cached(backend: SimulatedBackend) -> set[tuple[int, ...]]:
    """The tokens up to each block that the pool can find."""
    found = set()
    pool = backend.machine.scheduler.pool
    for key in pool._index:
        tokens: tuple[int, ...] = ()
        at: Any = key >> 24
        while isinstance(at, int):
            at, own = backend.contents.blocks[at]
            tokens = (*own, *tokens)
        found.add(tokens)
    return found


def test_an_index_of_events_equals_the_cache() -> None:
    """With evictions; a subscriber that missed the first batches asks for them, and gets all up to the end marker."""
    port, replay = free_ports(2)
    backend = SimulatedBackend(scenario_of(SCENARIO), Clock(), open_tokenizer(), "m", "test")
    index, later, numbers = Index(), Index(), list[int]()

    async def session(sub: Any, dealer: Any, events: KvEvents) -> set[tuple[int, ...]]:
        sub.connect(f"tcp://127.0.0.1:{port}")
        dealer.connect(f"tcp://127.0.0.1:{replay}")
        sub.subscribe(b"")
        stem = [*range(1, 17)]
        await talk(backend, [[*stem, *range(20 + 7 * at, 40 + 7 * at)] for at in range(6)])
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            _, number, batch = await until_there(dealer)
            if number == END:
                break
            numbers.append(int.from_bytes(number, "big"))
            index.take(batch)
        now = cached(backend)
        backend.forget_prefixes()
        await talk(backend, [[*stem, *range(300, 330)]] * 2)
        batches = [*events._batches][len(numbers) :]
        later.blocks, later.ever = dict(index.blocks), dict(index.ever)
        for _, batch in batches:
            later.take(batch)
        topic, number, batch = await until_there(sub)
        assert topic == b"" and int.from_bytes(number, "big") in numbers and msgpack.unpackb(batch)[1]
        return now

    async def served() -> set[tuple[int, ...]]:
        with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
            sub.linger = dealer.linger = 0
            with closing(KvEvents(backend, "127.0.0.1", port, replay)) as events:
                return await serve_while(backend, session(sub, dealer, events))

    held = asyncio.run(served())
    assert numbers == [*range(len(numbers))] and len(numbers) >= 6
    assert {*index.blocks.values()} == held and len(index.ever) > len(index.blocks)
    assert {*later.blocks} == new_since(backend, max(index.ever)) and later.blocks  # those before are forgotten


async def until_there(socket: Any) -> Any:
    while not socket.poll(0):
        await asyncio.sleep(0.001)
    return socket.recv_multipart()


def test_a_port_that_is_taken_is_reported() -> None:
    backend = SimulatedBackend(scenario_of(SCENARIO), Clock(), open_tokenizer(), "m", "test")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EndpointError, match=f"cannot publish KV events on 127.0.0.1:{port}: "):
            KvEvents(backend, "127.0.0.1", port, free_ports(1)[0])
