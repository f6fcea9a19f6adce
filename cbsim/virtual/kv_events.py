"""The KV events of a simulated server over ZMQ, as vLLM publishes them: what routers build their index of caches from.

PUB: ["", number, batch], a batch a moment. ROUTER: for a number, those of the last BUFFERED batches that are not before
it, then END. A batch is msgpack of [seconds, events, rank]. A block's hash is a number of this server's own: readers
that compare servers, as those of vLLM do, go by the tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgpack
import zmq

from cbsim.errors import EndpointError, ScenarioError
from cbsim.virtual.simulated import SimulatedBackend

BUFFERED = 10_000  # batches for a replay
END = (-1).to_bytes(8, "big", signed=True)


class KvEvents:
    """The publisher of one server, bound to two ports of a host until it is closed. It is made on a running loop."""

    def __init__(self, backend: SimulatedBackend, host: str, port: int, replay_port: int) -> None:
        """Raises ScenarioError, and EndpointError if a port is taken."""
        pool, self._contents = backend.machine.scheduler.pool, backend.contents
        if not hasattr(pool, "watch") or pool.groups:
            reason = "KV events: this cache has none that vLLM's form can say: it is no prefix cache, or has groups"
            raise ScenarioError(reason, field="kv_cache")
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._events: list[dict[str, Any]] = []
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFERED)
        self._count = 0
        for socket, at in ((self._pub, port), (self._router, replay_port)):
            socket.sndhwm = 100_000
            try:
                socket.bind(f"tcp://{host}:{at}")
            except zmq.ZMQError as error:
                self.close()
                reason = f"cannot publish KV events on {host}:{at}: {zmq.strerror(error.errno)}"
                raise EndpointError(reason, field="kv_events", value=at) from error
        pool.watch(self._changed)
        self._contents.forgotten = lambda: self._add({"type": "AllBlocksCleared"})
        asyncio.get_running_loop().add_reader(self._router.FD, self._replay)

    def close(self) -> None:
        self._context.destroy(linger=100)

    def _changed(self, key: int, cached: bool) -> None:
        """Publish a change of a content key (BlockPool.watch), unless no other request has it, or can find it."""
        block = key >> 24
        if (content := self._contents.blocks.get(block)) is None:
            return
        if not cached:
            self._add({"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"})
            return
        before, tokens = content
        parent = before if isinstance(before, int) else None
        stored = {"block_hashes": [block], "parent_block_hash": parent, "token_ids": tokens}
        more = {"block_size": self._contents.block_tokens, "lora_id": None, "medium": "GPU", "lora_name": None}
        self._add({"type": "BlockStored", **stored, **more})

    def _add(self, event: dict[str, Any]) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        number, batch = self._count.to_bytes(8, "big"), msgpack.packb([time.time(), self._events, 0])
        self._events, self._count = [], self._count + 1
        self._batches.append((number, batch))
        self._pub.send_multipart([b"", number, batch], zmq.NOBLOCK)

    def _replay(self) -> None:
        """Answer each request for a replay that has come; a socket's file is readable once for all of them."""
        while self._router.events & zmq.POLLIN:
            client, *_, first = self._router.recv_multipart(zmq.NOBLOCK)
            for number, batch in [*(each for each in self._batches if each[0] >= first), (END, b"")]:
                self._router.send_multipart([client, b"", number, batch], zmq.NOBLOCK)
