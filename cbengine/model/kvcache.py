"""The tensors that hold keys and values: blocks of tokens, a layer after the other. Policy decides who owns a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbengine.errors import UsageError
from cbengine.model.architecture import Architecture
from cbsim.policy.groups import LayerGroup


class DeviceMemoryError(UsageError):
    """A lack of device memory for a run; the message states the bytes needed and the field that requests them."""


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that torch can still allocate on a GPU, its cached ones included; None if unknown."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def pages_of(architecture: Architecture, groups: Sequence[LayerGroup]) -> int:
    """Return the number of layers whose KV is in one block: all of them, or as many as the largest group has."""
    return max((len(group.layers) for group in groups), default=architecture.layers)


class KvCache:
    """A KV cache, `keys` and `values`: [layers, num_blocks + 1, block_size, kv_heads, head_dim], zeros at first; with
    groups of layers [(num_blocks + 1) * pages, block_size, kv_heads, head_dim], where a block has as many `pages` as
    the largest group has layers, whichever group uses it.

    The last block is scratch: rows that only pad a step read and write it. Raises DeviceMemoryError.
    """

    def __init__(
        self,
        architecture: Architecture,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[LayerGroup] = (),
    ) -> None:
        assert all(group.block_size == block_size for group in groups), "pages of several sizes"
        layers, page = architecture.layers, (block_size, architecture.kv_heads, architecture.head_dim)
        self.pages = pages_of(architecture, groups) if groups else 1
        shape = ((num_blocks + 1) * self.pages, *page) if groups else (layers, num_blocks + 1, *page)
        self.scratch = num_blocks
        self.bytes = self.bytes_for(architecture, num_blocks, block_size, dtype, groups)
        free = free_bytes(device)
        if free is not None and self.bytes > free:
            raise DeviceMemoryError(self._too_large(free, device))
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
                raise  # a broken GPU is no lack of memory
            raise DeviceMemoryError(self._too_large(free, device)) from None
        self._spots = _spots(groups, layers) if groups else []

    @staticmethod
    def bytes_for(
        architecture: Architecture,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        groups: Sequence[LayerGroup] = (),
    ) -> int:
        """Return the bytes of a cache with this many blocks, its scratch block included."""
        tokens = pages_of(architecture, groups) * (num_blocks + 1) * block_size
        return 2 * tokens * architecture.kv_heads * architecture.head_dim * dtype.itemsize

    @property
    def block_size(self) -> int:
        """The number of tokens in a block."""
        return self.keys.shape[-3]

    def group(self, layer: int) -> int:
        """Return the group whose block tables a layer uses."""
        return self._spots[layer][0] if self._spots else 0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one layer's (keys, values): views, [pages, block_size, kv_heads, head_dim]. Its keys of block b are in
        page b * `pages`; the views of a group's later layers begin that many pages later.
        """
        if not self._spots:
            return self.keys[index], self.values[index]
        at = self._spots[index][1]
        return self.keys[at:], self.values[at:]

    def block(self, index: int) -> tuple[Tensor, Tensor]:
        """Return all of one block, (keys, values): views, [layers or pages, block_size, kv_heads, head_dim]."""
        if not self._spots:
            return self.keys[:, index], self.values[:, index]
        pages = slice(index * self.pages, (index + 1) * self.pages)
        return self.keys[pages], self.values[pages]

    def _too_large(self, free: int | None, device: torch.device) -> str:
        cache = f"kv_cache.num_blocks: got {self.scratch:,}, which takes {self.bytes:,} bytes on {device}"
        if free is None:
            return f"{cache}: more than it gives"
        fit = max(free // (self.bytes // (self.scratch + 1)) - 1, 0)  # less the scratch block
        return f"{cache}, where {free:,} bytes are free: {fit:,} blocks would fit"


def _spots(groups: Sequence[LayerGroup], layers: int) -> list[tuple[int, int]]:
    """Return the group of every layer, and its index in it."""
    spots = {layer: (g, at) for g, group in enumerate(groups) for at, layer in enumerate(group.layers)}
    assert sorted(spots) == list(range(layers)), "every layer is of one group"
    return [spots[layer] for layer in range(layers)]
