"""The tensors that hold keys and values: blocks of tokens, a layer after the other; a host tier behind them; and the
carrier that copies blocks inside the cache and between the two. Policy decides who owns a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbengine.errors import UsageError
from cbsim.policy.groups import LayerGroup
from cbsim.policy.transfers import Direction
from cbsim.scenario.shapes import ModelShape


class DeviceMemoryError(UsageError):
    """A lack of device memory for a run; the message states the bytes needed and the field that requests them."""


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that torch can still allocate on a GPU, its cached ones included; None if unknown."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def pages_of(architecture: ModelShape, groups: Sequence[LayerGroup]) -> int:
    """Return the number of layers whose KV is in one block: all of them, or as many as the largest group has."""
    return max((len(group.layers) for group in groups), default=architecture.layers)


def _spots(groups: Sequence[LayerGroup], layers: int) -> dict[int, tuple[int, int]]:
    """Return the group of every layer and its index in it; empty without groups."""
    spots = {layer: (g, at) for g, group in enumerate(groups) for at, layer in enumerate(group.layers)}
    assert not groups or sorted(spots) == list(range(layers)), "every layer is of one group"
    return spots


class KvCache:
    """A KV cache, `keys` and `values`: [layers, num_blocks + 1, block_size, kv_heads, head_dim], zeros at first; with
    groups of layers [(num_blocks + 1) * pages, block_size, kv_heads, head_dim], where a block has as many `pages` as
    the largest group has layers, whichever group uses it. The last block is scratch: rows that only pad a step read and
    write it. `memory` are its bytes, all zero, which other processes may have, too. Raises DeviceMemoryError.
    """

    def __init__(
        self,
        architecture: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[LayerGroup] = (),
        memory: Tensor | None = None,
    ) -> None:
        assert all(group.block_size == block_size for group in groups), "pages of several sizes"
        layers, page = architecture.layers, (block_size, architecture.kv_heads, architecture.head_dim)
        self.pages = pages_of(architecture, groups) if groups else 1
        shape = ((num_blocks + 1) * self.pages, *page) if groups else (layers, num_blocks + 1, *page)
        self.scratch, self.block_size = num_blocks, block_size
        self.bytes = self.bytes_for(architecture, num_blocks, block_size, dtype, groups)
        self.block_bytes = self.bytes // (num_blocks + 1)
        free = free_bytes(device) if memory is None else None
        if free is not None and self.bytes > free:
            raise DeviceMemoryError(self._too_large(free, device))
        try:
            if memory is None:
                self.keys = torch.zeros(shape, dtype=dtype, device=device)
                self.values = torch.zeros(shape, dtype=dtype, device=device)
            else:
                self.keys, self.values = memory.view(dtype).view(2, *shape)
        except RuntimeError as error:
            if device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
                raise  # a broken GPU is no lack of memory
            raise DeviceMemoryError(self._too_large(free, device)) from None
        self._spots = _spots(groups, layers)

    @staticmethod
    def bytes_for(
        architecture: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        groups: Sequence[LayerGroup] = (),
    ) -> int:
        """Return the bytes of a cache with this many blocks, its scratch block included."""
        tokens = pages_of(architecture, groups) * (num_blocks + 1) * block_size
        return 2 * tokens * architecture.kv_heads * architecture.head_dim * dtype.itemsize

    def group(self, layer: int) -> int:
        """Return the group whose block tables a layer uses."""
        return self._spots[layer][0] if self._spots else 0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one layer's (keys, values): views, [pages, block_size, kv_heads, head_dim]. Its keys of block b are in
        page b * `pages`; the views of a group's later layers begin that many pages later.
        """
        if not self._spots:
            return self.keys[index], self.values[index]
        _, at = self._spots[index]
        return self.keys[at:], self.values[at:]

    def block(self, index: int) -> tuple[Tensor, Tensor]:
        """Return all of one block, (keys, values): views, [layers or pages, block_size, kv_heads, head_dim]."""
        if not self._spots:
            return self.keys[:, index], self.values[:, index]
        pages = slice(index * self.pages, (index + 1) * self.pages)
        return self.keys[pages], self.values[pages]

    def like(self, blocks: int) -> Tensor:
        """Return memory beside the cache for so many blocks: [2, layers, blocks, block_size, kv_heads, head_dim]."""
        layers, _, *page = self.keys.shape
        return self.keys.new_empty((2, layers, blocks, *page))

    def taken(self, at: Tensor) -> Tensor:
        """Return a copy of blocks, as `like` shapes it."""
        return torch.stack((self.keys.index_select(1, at), self.values.index_select(1, at)))

    def put(self, at: Tensor, blocks: Tensor) -> None:
        """Write blocks, shaped as `like`."""
        for mine, new in zip((self.keys, self.values), blocks, strict=True):
            mine.index_copy_(1, at, new)

    def _too_large(self, free: int | None, device: torch.device) -> str:
        cache = f"kv_cache.num_blocks: got {self.scratch:,}, which takes {self.bytes:,} bytes on {device}"
        if free is None:
            return f"{cache}: more than it gives"
        fit = max(free // self.block_bytes - 1, 0)  # less the scratch block
        return f"{cache}, where {free:,} bytes are free: {fit:,} blocks would fit"


def host_tier(model: ModelShape, host_blocks: int, block_size: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return a host tier: [host_blocks, 2, layers, block_size, kv_heads, head_dim] in host memory, zeros at first. A
    block's keys and values of all layers are contiguous, so that one copy transfers a block over a GPU's link; for that
    the memory is `pinned`. Raises DeviceMemoryError.
    """
    shape = (host_blocks, 2, model.layers, block_size, model.kv_heads, model.head_dim)
    try:
        return torch.zeros(shape, dtype=dtype, pin_memory=pinned)
    except RuntimeError as error:
        if pinned and "memory" not in str(error):
            raise  # a broken GPU is no lack of memory
        size = KvCache.bytes_for(model, host_blocks - 1, block_size, dtype)
        taken = pinned_size(size) if pinned else size
        raise DeviceMemoryError(f"{too_large(host_blocks, taken)}: more than it gives") from None


def pinned_size(size: int) -> int:
    """Return the bytes that this size takes in pinned memory: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def too_large(host_blocks: int, size: int) -> str:
    """Return the beginning of an error: the size requested of a tier. Each scheduler has its own name for it."""
    return f"scheduler: got a host tier of {host_blocks:,} blocks, which takes {size:,} bytes of the host"


class Carrier:
    """A carrier copies whole blocks, one after the other; between cache and host each passes through one staging block
    beside the cache. On a GPU everything is queued on the current stream, without waiting. Every block uses the same
    staging block, so all work of one carrier has to be on one stream. Between cache and host a block takes three
    copies, two of them beside the cache. The CPU queues each, and the link is idle during those two. The cost of that
    has not been measured.
    """

    def __init__(self, cache: KvCache, host: Tensor | None) -> None:
        self._cache = cache
        if host is not None:
            self._host = host
            self._staging = torch.empty_like(host[0], device=cache.keys.device, pin_memory=False)

    @torch.inference_mode()
    def carry(self, direction: Direction, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block `sources[i]` to `targets[i]`, in this order."""
        act = (self._copy, self._out, self._in)[direction]
        for source, target in zip(sources, targets, strict=True):
            act(source, target)

    def _copy(self, source: int, target: int) -> None:
        for new, old in zip(self._cache.block(target), self._cache.block(source), strict=True):
            new.copy_(old)

    def _out(self, source: int, slot: int) -> None:
        for part, cached in zip(self._staging, self._cache.block(source), strict=True):
            part.copy_(cached)
        self._host[slot].copy_(self._staging, non_blocking=True)

    def _in(self, slot: int, target: int) -> None:
        self._staging.copy_(self._host[slot], non_blocking=True)
        for part, cached in zip(self._staging, self._cache.block(target), strict=True):
            cached.copy_(part)
