"""Content keys of token sequences, so that policies can match prefixes without seeing a token."""

from __future__ import annotations

from collections.abc import Sequence


class ChainedKeys:
    """Gives every distinct (everything before, block of tokens) an id: exact, where a hash could collide."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}

    def of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Ids of the full blocks of `tokens`."""
        keys: list[int] = []
        parent = -1
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            parent = self.after(parent, tokens[end - self.block_size : end])
            keys.append(parent)
        return tuple(keys)

    def after(self, parent: int, tokens: Sequence[int]) -> int:
        """Id of the block `tokens` behind the block `parent`, -1 for none. The block may be shorter than full."""
        return self._ids.setdefault((parent, tuple(tokens)), len(self._ids))
