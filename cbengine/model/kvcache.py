"""The tensors that hold keys and values: blocks of tokens, a layer after the other. Who owns a block is policy's."""

from __future__ import annotations

import torch
from torch import Tensor

from cbengine.errors import UsageError
from cbengine.model.architecture import Architecture


class DeviceMemoryError(UsageError):
    """A device cannot hold what a run needs; the message says how much that is and which field asks for it."""


def free_bytes(device: torch.device) -> int | None:
    """What torch could still allocate on a GPU, blocks it keeps for reuse included; None where nobody can say."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


class KvCache:
    """`keys` and `values`: [layers, num_blocks + 1, block_size, kv_heads, head_dim], zeros at first.

    The block after the last belongs to nobody: rows that only pad a step read and write it. Raises DeviceMemoryError.
    """

    def __init__(
        self, architecture: Architecture, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (architecture.layers, num_blocks + 1, block_size, architecture.kv_heads, architecture.head_dim)
        self.scratch = num_blocks
        self.bytes = self.bytes_for(architecture, num_blocks, block_size, dtype)
        free = free_bytes(device)
        if free is not None and self.bytes > free:
            raise DeviceMemoryError(self._refusal(free, device))
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
                raise  # a broken GPU is no lack of memory
            raise DeviceMemoryError(self._refusal(free, device)) from None

    @staticmethod
    def bytes_for(architecture: Architecture, num_blocks: int, block_size: int, dtype: torch.dtype) -> int:
        """What a cache of so many blocks takes, its scratch block included."""
        values = architecture.layers * (num_blocks + 1) * block_size * architecture.kv_heads * architecture.head_dim
        return 2 * values * dtype.itemsize

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """One layer's (keys, values): views, [num_blocks + 1, block_size, kv_heads, head_dim]."""
        return self.keys[index], self.values[index]

    def _refusal(self, free: int | None, device: torch.device) -> str:
        cache = f"kv_cache.num_blocks: got {self.scratch:,}, which takes {self.bytes:,} bytes on {device}"
        if free is None:
            return f"{cache}: more than it gives"
        fit = max(free // (self.bytes // (self.scratch + 1)) - 1, 0)  # one of them would be scratch
        return f"{cache}, where {free:,} bytes are free: {fit:,} blocks would fit"
