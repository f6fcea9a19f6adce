"""How long a move of KV takes: its bytes over the host's link, or read and written in the GPU's memory."""

from __future__ import annotations

from cbsim.cost.rounding import nearest
from cbsim.policy.moves import Way


class Copies:
    """`block_bytes` are one block's keys and values in all layers, on one GPU; rates are bytes a second, those of the
    data sheet: the host's link in each direction, the memory for reading and writing together.
    """

    def __init__(self, block_bytes: int, link_bytes_s: float, memory_bytes_s: float) -> None:
        self._host_ns = block_bytes / link_bytes_s * 1e9
        self._device_ns = 2 * block_bytes / memory_bytes_s * 1e9

    def ns(self, way: Way, blocks: int) -> int:
        """Nanoseconds of a move of so many blocks that has its lane to itself."""
        return nearest(blocks * (self._device_ns if way is Way.COPY else self._host_ns))
