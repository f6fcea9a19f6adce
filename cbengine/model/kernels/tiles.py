"""How the attention kernels are cut into programs and iterations, by the type and width of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import triton
from torch import Tensor

REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut: query rows (tokens times heads of a group) of a program, cached tokens of an iteration,
    warps, stages; and how many programs a multiprocessor must have registers for, at the least.
    """

    queries: int
    cached: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Launch options; fused multiply-adds by name, since Triton's default differs between versions."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        if self.programs > 1:
            options["maxnreg"] = REGISTERS // (self.programs * self.warps * 32) // 8 * 8  # handed out in eights
        return options


# By (bytes an element, head_dim); narrower heads take the entry of 64. Loading the block table takes pipeline stages of
# its own, so 5 stages are two buffers of keys and values with a whole iteration to fill one, 3 or 4 stages none.
DECODE = {
    (2, 64): Tiles(16, 64, 4, 5, 6),  # 38 KB shared: six programs keep a multiprocessor's memory queue full
    (2, 128): Tiles(16, 64, 4, 5, 3),  # 73 KB shared
    (4, 64): Tiles(16, 16, 4, 2),  # exact float32 products have no tensor cores: small enough not to spill
    (4, 128): Tiles(16, 16, 4, 2),
}
PREFILL = {
    (2, 64): Tiles(128, 64, 8, 5, 2),  # 4 warps spill
    (2, 128): Tiles(128, 64, 8, 5),  # three buffers, since keys are read while a product runs; 4 warps spill
    (4, 64): Tiles(32, 16, 8, 2),
    (4, 128): Tiles(32, 16, 8, 2),
}


def fitted(cut: Tiles | None, table: Mapping[tuple[int, int], Tiles], queries: Tensor, kv_heads: int) -> Tiles:
    """`cut`, or else the entry of `table` for these queries; one token's heads of a group always fit into a program."""
    _, heads, width = queries.shape
    tiles = cut or table[queries.element_size(), max(width, min(w for _, w in table))]
    return replace(tiles, queries=max(tiles.queries, triton.next_power_of_2(heads // kv_heads)))
