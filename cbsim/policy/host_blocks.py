"""Blocks of the host's tier that are found by their content: the free ones in vLLM's queue, the others referred to."""

from __future__ import annotations

from cbsim.policy.blocks import FreeQueue


class HostBlocks:
    """Blocks 1 to `num_blocks` - 1; block 0 is never used. One that nobody refers to is free, and found by its key
    until it is handed out again. Several may have the same key.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = FreeQueue(range(1, num_blocks), unhashed_first=True)
        self._refs: dict[int, int] = {}
        self._key_of: dict[int, int] = {}
        self._index: dict[int, dict[int, None]] = {}  # key -> blocks, oldest first

    @property
    def free(self) -> int:
        return self._free.free

    @property
    def contents(self) -> int:
        """Different contents that can be found."""
        return len(self._index)

    def find(self, key: int) -> int | None:
        """The oldest block with this content."""
        blocks = self._index.get(key)
        return next(iter(blocks)) if blocks else None

    def take(self, count: int) -> list[int]:
        """So many blocks that are free, each referred to once; what they held is forgotten."""
        blocks = self._free.take(count)
        for block in blocks:
            self._forget(block)
            self._refs[block] = 1
        return blocks

    def fill(self, block: int, key: int) -> None:
        """A block that was taken holds this content from now on."""
        self._key_of[block] = key
        self._index.setdefault(key, {})[block] = None

    def pin(self, blocks: list[int]) -> None:
        """One more reference to each."""
        for block in blocks:
            refs = self._refs.get(block, 0)
            if not refs:
                self._free.pick(block)
            self._refs[block] = refs + 1

    def put_back(self, blocks: list[int]) -> None:
        """One reference less to each. All are filled; the last used is the last to be handed out again."""
        for block in blocks:
            refs = self._refs.pop(block) - 1
            if refs:
                self._refs[block] = refs
            else:
                self._free.give([block], 1)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is None:
            return
        blocks = self._index[key]
        del blocks[block]
        if not blocks:
            del self._index[key]

    def check(self) -> None:
        """Raise AssertionError unless every block is free or referred to, and keys and index agree."""
        free = self._free.order()
        assert len(free) == len({*free}) == self.free, ("free list", len(free), self.free)
        assert not {*free} & self._refs.keys(), ("free and referred to", {*free} & self._refs.keys())
        assert sorted([*free, *self._refs]) == list(range(1, self.num_blocks)), "host blocks lost"
        indexed = sorted([(block, key) for key, blocks in self._index.items() for block in blocks])
        assert indexed == sorted(self._key_of.items()), "index and keys disagree"
