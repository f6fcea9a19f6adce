"""A stand-in for `torch.cuda` that computes at once, on the CPU, and proves that a GPU could not do otherwise.

Everything that streams and the host do to memory is noted with a vector clock: what an actor has done, and what it
knows that others have done (Lamport; Fidge and Mattern). Streams learn from the host when work is queued and from
events that they wait for; the host learns when it waits. Two accesses of one buffer, one of them a write, of which
neither is known to have happened before the other, are a race: on a GPU they may come in any order. So is a time that
is read of an event which need not have happened, and memory that one stream's allocator may give out again while
another uses it. Memory that is shared out in blocks, as the KV cache is, is watched block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cbengine.device import cuda, gpu
from cbengine.model.ops import Rows, TorchOps
from cbsim.policy.groups import FULL, Attention

HOST = "host"
Clock = dict[str, int]


def join(one: Clock, other: Clock) -> None:
    for actor, count in other.items():
        one[actor] = max(one.get(actor, 0), count)


@dataclass
class Buffer:
    """Who wrote it last, and who has read it since; `owner`: the stream that it was made on while a run was on."""

    storage: Any  # kept, so that no other buffer takes its address
    owner: str | None
    written: tuple[str, int] | None = None
    read: Clock = field(default_factory=dict)


class World:
    """The actors' clocks, all buffers, and what was found to be out of order. An event that is asked says no `patience`
    times, and then that it has happened.
    """

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {HOST: 0}}
        self.buffers: dict[tuple[int, int], Buffer] = {}  # (storage, block of it, or -1) ->
        self.shared_out: dict[int, tuple[int, int]] = {}  # storage -> values of a block, blocks
        self.patience = 0
        self.races: list[str] = []
        self.names: dict[int, str] = {}
        self.on_host: list[Any] = []
        self.running = False
        self.ticks = 0
        self.stream = Stream(self, "default")
        self.graph: RecordedGraph | None = None

    def act(self, actor: str) -> Clock:
        """The actor does something now; what a stream does was queued by the host before."""
        self.ticks += 1
        clock = self.clocks.setdefault(actor, {})
        if actor != HOST:
            join(clock, self.clocks[HOST])
        clock[actor] = clock.get(actor, 0) + 1
        return clock

    def call(self, name: str, tensor: Tensor) -> None:
        """A buffer that stays for the whole run."""
        storage = tensor.untyped_storage()
        self.names[storage._cdata] = name
        self.buffers.setdefault((storage._cdata, -1), Buffer(storage, None))

    def share_out(self, name: str, tensor: Tensor, axis: int) -> None:
        """A buffer that stays, of blocks along an axis, which are watched one by one."""
        storage = tensor.untyped_storage()
        self.names[storage._cdata] = name
        self.shared_out[storage._cdata] = tensor.stride(axis), tensor.shape[axis]

    def touch(self, actor: str, storage: Any, *, write: bool, block: int = -1) -> None:
        key = storage._cdata, block
        if key not in self.buffers:
            owner = actor if self.running and actor != HOST and block < 0 else None
            self.buffers[key] = Buffer(storage, owner)
        buffer, clock = self.buffers[key], self.clocks[actor]
        told = f"{actor} {'writes' if write else 'reads'} {self.names.get(key[0], 'a buffer')}"
        if buffer.owner not in (None, actor):
            self.races.append(f"{told}, which {buffer.owner}'s allocator may give out again")
        before = [(buffer.written, "wrote")] if buffer.written else []
        before += [(reader, "reads") for reader in buffer.read.items()] if write else []
        for (other, count), did in before:
            if other != actor and clock.get(other, 0) < count:
                self.races.append(f"{told}, which {other} {did}: nothing orders the two")
        if write:
            buffer.written, buffer.read = (actor, clock[actor]), {}
        else:
            buffer.read[actor] = clock[actor]

    def shared(self, address: int) -> Any:
        """The storage that the host has taken as an array and that holds an address, or None."""
        spans = ((storage, storage.data_ptr(), storage.nbytes()) for storage in self.on_host)
        return next((storage for storage, start, size in spans if start <= address < start + size), None)


class Stream:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def wait_event(self, event: Event) -> None:
        join(self.world.act(self.name), event.known)

    def wait_stream(self, other: Stream) -> None:
        join(self.world.act(self.name), self.world.clocks.get(other.name, {}))


class Event:
    """Knows what its stream knew when it was recorded last."""

    def __init__(self, world: World) -> None:
        self.world, self.known, self.at, self.asked = world, Clock(), 0, 0

    def record(self, stream: Stream) -> None:
        self.known, self.at = dict(self.world.act(stream.name)), self.world.ticks

    def synchronize(self) -> None:
        join(self.world.act(HOST), self.known)

    def query(self) -> bool:
        self.asked += 1
        if self.asked <= self.world.patience:
            return False
        self.synchronize()
        return True

    def elapsed_time(self, later: Event) -> float:
        host = self.world.clocks[HOST]
        for event in (self, later):
            if any(host.get(actor, 0) < count for actor, count in event.known.items()):
                self.world.races.append("host reads the time of an event that need not have happened")
        return (later.at - self.at) / 1e3


class RecordedGraph:
    """What was done while it was captured; a replay does it again, to the same tensors."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.done: list[tuple[Any, Any, Any, Any]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        actor = self.world.stream.name
        self.world.act(actor)
        for op, args, kwargs, made in self.done:
            note(self.world, actor, op, args, kwargs, made)
            again = op(*args, **kwargs)
            for old, new in zip(tensors(made), tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(tree: Any) -> list[Tensor]:
    """Those of an operation's arguments or results, which are values, or lists and dicts of values."""
    if isinstance(tree, Tensor):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for each in inside for tensor in tensors(each)]


@cache
def schema(op: Any) -> tuple[list[str], set[str]]:
    """The names of an operation's arguments, and of those that it writes."""
    arguments = op._schema.arguments
    return [a.name for a in arguments], {a.name for a in arguments if a.alias_info and a.alias_info.is_write}


def note(world: World, actor: str, op: Any, args: Any, kwargs: Any, made: Any) -> None:
    """The accesses of one operation: what its schema says that it writes, and what it must read for that or for a
    result of its own. Views touch nothing.
    """
    names, writes = schema(op)
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = {name: found for name, value in given.items() if (found := tensors(value))}
    taken = {tensor.untyped_storage()._cdata for found in inputs.values() for tensor in found}
    fresh = [tensor for tensor in tensors(made) if tensor.untyped_storage()._cdata not in taken]
    if not writes and not fresh:
        return
    for name, found in inputs.items():
        for tensor in found:
            for block in blocks(world, tensor, given.get("indices")):
                world.touch(actor, tensor.untyped_storage(), write=name in writes, block=block)
    for tensor in fresh:
        world.touch(actor, tensor.untyped_storage(), write=True)


def blocks(world: World, tensor: Tensor, indices: Any) -> list[int]:
    """Which blocks of its buffer an operation touches: -1 is a buffer that is not shared out. A view is of one block,
    or it has an axis of blocks or of their places, along which `indices` say which.
    """
    values, count = world.shared_out.get(tensor.untyped_storage()._cdata, (0, 0))
    if not values:
        return [-1]
    if indices:
        return sorted({int(at) * tensor.stride(0) // values for at in indices[0].unique()})
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    assert all(size == 1 or stride < values or stride >= values * count for size, stride in axes), tensor.shape
    return [tensor.storage_offset() // values % count]


class Noting(TorchDispatchMode):
    """Every operation is one of the current stream's."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to import the compiler takes seconds

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        world = self.world
        if world.graph is not None:
            world.graph.done.append((op, args, kwargs or {}, made))
        else:
            world.act(world.stream.name)
            note(world, world.stream.name, op, args, kwargs or {}, made)
        return made


class Noted(np.ndarray):
    """Memory that the host writes with numpy."""

    world: World

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, value)
        touched = self.world.shared(self.ctypes.data) if self.size else None
        if touched is not None:
            self.world.act(HOST)
            self.world.touch(HOST, touched, write=True)


class WholeTables(TorchOps):
    """Attention that asks for no value on the host, so that it can be captured and replayed."""

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, rows: Rows, sees: Attention = FULL) -> Tensor:
        assert sees == FULL
        each = torch.arange(len(queries))
        owner = torch.searchsorted(rows.starts[1:].contiguous(), each.int(), right=True)
        last = rows.kv_tokens[owner] - (rows.starts[owner + 1] - each)
        tables, group = rows.tables[rows.slots[owner]].long(), queries.shape[1] // keys.shape[2]
        used = torch.arange(tables.shape[1]) * keys.shape[1] < rows.kv_tokens[owner][:, None]
        tables = torch.where(
            used, tables, len(keys) - 1
        )  # entries behind those say nothing, or who had the slot before
        k, v = (cache[tables].flatten(1, 2).repeat_interleave(group, dim=2) for cache in (keys, values))
        at = torch.arange(k.shape[1])
        seen = at <= last[:, None]
        if rows.first is not None:
            seen = seen & ((at >= rows.first[owner][:, None]) | (at == last[:, None]))
        scores = torch.einsum("thd,tshd->ths", queries, k) * queries.shape[-1] ** -0.5
        return torch.einsum("ths,tshd->thd", scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1), v)


@contextmanager
def ordered() -> Iterator[World]:
    """Inside, `torch.cuda` is the stand-in, and every operation is noted."""
    world, names = World(), iter(("compute", "h2d", "d2h", "out", "in"))
    plain_numpy = Tensor.numpy

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, world.stream = world.stream, stream
        try:
            yield
        finally:
            world.stream = before

    @contextmanager
    def capture(graph: RecordedGraph, *, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        with on(stream):
            world.graph = graph
            try:
                yield
            finally:
                world.graph = None

    def synchronize() -> None:
        for clock in list(world.clocks.values()):
            join(world.act(HOST), clock)

    def numpy(tensor: Tensor) -> Any:
        world.act(HOST)
        world.touch(HOST, tensor.untyped_storage(), write=False)
        if not world.running:
            world.on_host.append(tensor.untyped_storage())
        return plain_numpy(tensor).view(Noted)

    Noted.world = world
    said: dict[str, Callable[..., Any]] = {
        "Stream": lambda: Stream(world, next(names)),
        "Event": lambda **_: Event(world),
        "CUDAGraph": lambda: RecordedGraph(world),
        "graph": capture,
        "stream": on,
        "current_stream": lambda: world.stream,
        "synchronize": synchronize,
        "graph_pool_handle": lambda: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in said.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(gpu, "pinned", lambda count: torch.from_numpy(np.zeros(count, dtype=np.int32)))
        patch.setattr(gpu, "facts", lambda: {"device": "a stand-in"})
        patch.setattr(Tensor, "numpy", numpy)
        cuda.streams.cache_clear()
        try:
            with Noting(world):
                yield world
        finally:
            cuda.streams.cache_clear()
