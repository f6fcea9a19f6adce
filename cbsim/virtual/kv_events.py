"""The KV events of a simulated server over ZMQ, as vLLM publishes them: what routers build their index of caches from.

PUB: [topic, number, batch], a batch a moment. ROUTER: for a number, those of the last BUFFERED batches that are not
before it, then END. A batch is msgpack of [seconds, events, rank]. A block's hash is a number of this server's own:
readers that compare servers, as those of vLLM do, go by the tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import zmq

from cbsim.errors import EndpointError, ScenarioError
from cbsim.runs.served import Contents

BUFFERED = 10_000  # batches for a replay
END = (-1).to_bytes(8, "big", signed=True)


class KvEvents:
    """The publisher of one server, bound to two ports of a host; `topic` as vLLM's."""

    def __init__(self, host: str, port: int, replay_port: int, topic: str = "") -> None:
        """Raises EndpointError if a port is taken."""
        self._context, self._topic = zmq.Context(), topic.encode()
        self._sockets: list[Any] = []
        self._pub, self._router = self._bound(zmq.PUB, host, port), self._bound(zmq.ROUTER, host, replay_port)
        self._events: list[dict[str, Any]] = []
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFERED)
        self._count = 0
        self._cleared = 0

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close(100)
        self._context.term()

    def _bound(self, kind: int, host: str, port: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 100_000)
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            socket.close(0)
            self._close()
            reason = f"cannot publish KV events on {host}:{port}: {error.strerror}"
            raise EndpointError(reason, field="kv_events", value=port) from error
        self._sockets.append(socket)
        return socket

    def watch(self, pool: Any, contents: Contents) -> None:
        """Publish what is cached in a pool, whose blocks are those of `contents`. Raises ScenarioError."""
        if not hasattr(pool, "watch") or pool.groups:
            reason = "KV events: this cache has none that vLLM's form can say: it is no prefix cache, or has groups"
            raise ScenarioError(reason, field="kv_cache")
        self._contents = contents
        pool.watch(self._changed)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer requests for replays while the block runs, on the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._router.FD, self._replay)
        try:
            yield
        finally:
            loop.remove_reader(self._router.FD)
            self._flush()
            self._close()

    def cleared(self, last: int) -> None:
        """Publish that nothing of what is cached, contents up to number `last`, can be found any more."""
        self._cleared = last
        self._add({"type": "AllBlocksCleared"})

    def _changed(self, key: int, cached: bool) -> None:
        """Publish a change of a content key (BlockPool.watch), unless no other request has it."""
        block = key >> 24
        if block <= self._cleared or (content := self._contents.block(block)) is None:
            return None
        if not cached:
            return self._add({"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"})
        before, tokens = content
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockStored" and last["block_hashes"][-1] == before:
            last["block_hashes"].append(block)
            last["token_ids"] += tokens
            return None
        parent = before if isinstance(before, int) else None
        stored = {"block_hashes": [block], "parent_block_hash": parent, "token_ids": [*tokens]}
        more = {"block_size": self._contents.block_tokens, "lora_id": None, "medium": "GPU", "lora_name": None}
        return self._add({"type": "BlockStored", **stored, **more})

    def _add(self, event: dict[str, Any]) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        if self._events:
            number, batch = self._count.to_bytes(8, "big"), msgpack.packb([time.time(), self._events, 0])
            self._events, self._count = [], self._count + 1
            self._batches.append((number, batch))
            self._pub.send_multipart([self._topic, number, batch], zmq.NOBLOCK)

    def _replay(self) -> None:
        """Answer each request for a replay that has come; a socket's file is readable once for all of them."""
        while self._router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            client, *_, first = self._router.recv_multipart(zmq.NOBLOCK)
            for number, batch in [*(each for each in self._batches if each[0] >= first), (END, b"")]:
                self._router.send_multipart([client, b"", number, batch], zmq.NOBLOCK)
