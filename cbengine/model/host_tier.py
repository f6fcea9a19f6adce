"""The KV of a host tier behind the cache, and the carrier that copies blocks inside the cache and between the two.
Policy decides which request owns a block of either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cbengine.model.architecture import Architecture
from cbengine.model.kvcache import DeviceMemoryError, KvCache
from cbsim.policy.transfers import Direction


class HostTier:
    """A host tier, `blocks`: [host_blocks, 2, layers, block_size, kv_heads, head_dim] in host memory, zeros at first. A
    block's keys and values of all layers are contiguous, so that one copy transfers a block over a GPU's link; for that
    the memory is `pinned`. Raises DeviceMemoryError.
    """

    def __init__(
        self, architecture: Architecture, host_blocks: int, block_size: int, dtype: torch.dtype, *, pinned: bool
    ) -> None:
        shape = (2, architecture.layers, block_size, architecture.kv_heads, architecture.head_dim)
        try:
            self.blocks = torch.zeros((host_blocks, *shape), dtype=dtype, pin_memory=pinned)
        except RuntimeError as error:
            if pinned and "memory" not in str(error):
                raise  # a broken GPU is no lack of memory
            size = self.bytes_for(architecture, host_blocks, block_size, dtype)
            taken = pinned_size(size) if pinned else size
            raise DeviceMemoryError(f"{too_large(host_blocks, taken)}: more than it gives") from None

    @staticmethod
    def bytes_for(architecture: Architecture, host_blocks: int, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of this many blocks."""
        values = architecture.layers * block_size * architecture.kv_heads * architecture.head_dim
        return 2 * host_blocks * values * dtype.itemsize


def pinned_size(size: int) -> int:
    """Return the bytes that this size takes in pinned memory: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def too_large(host_blocks: int, size: int) -> str:
    """Return the beginning of an error: the size requested of a tier. Each scheduler has its own name for it."""
    return f"scheduler: got a host tier of {host_blocks:,} blocks, which takes {size:,} bytes of the host"


class Carrier:
    """A carrier copies whole blocks, one after the other; between cache and host each passes through one staging block
    beside the cache. On a GPU everything is queued on the current stream, without waiting. Every block uses the same
    staging block, so all work of one carrier has to be on one stream.

    Between cache and host a block takes three copies, two of them beside the cache. The CPU queues each, and the link
    is idle during those two. The cost of that has not been measured.
    """

    def __init__(self, cache: KvCache, host: HostTier | None) -> None:
        self._cache = cache
        if host is not None:
            self._host = host.blocks
            self._staging = torch.empty_like(host.blocks[0], device=cache.keys.device, pin_memory=False)

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
