"""A block pool whose cache is a radix tree: SGLang 0.5.23's pages.

Free pages are handed out from the front. A page of one token is appended when it comes free; larger ones are put in
front. A request owns its new pages until they are inserted in the tree, or freed when it is released.
"""

from __future__ import annotations

from functools import partial

from librt.strings import BytesWriter, read_i64_le, write_i64_le

from cbsim.kv.blocks import BlockPool, OnCache
from cbsim.kv.free_lists import PageQueue
from cbsim.kv.radix import Node, RadixKey, RadixTree
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import PACKED, unpacked
from cbsim.policy.request import NO_BLOCKS, Request
from cbsim.policy.value import mypyc_attr


class Position:
    """The position of a request in the tree: it reads all up to `node`, the first pages of its table; those behind are
    its `own`. Nodes within `counted` pages have counted its key.
    """

    def __init__(self, key: RadixKey, node: Node) -> None:
        self.key = key
        self.node = node
        self.counted = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixPool(BlockPool):
    """The owner of every page. `cached` are the tree's evictable ones. Packed pages go from a request into the
    tree, and from there to the free ones; `tables` are empty. With `shares` off nothing is cached.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        strategy: str = "lru",
        *,
        shares: bool = True,
        observer: Observer = NULL_OBSERVER,
    ) -> None:
        self._pages = PageQueue(range(num_blocks), in_front=block_size > 1)
        super().__init__(block_size, num_blocks, self._pages, observer)
        self.tree = RadixTree(block_size, strategy)
        self.positions: dict[Request, Position] = {}
        self._shares = shares
        self._collected: bytes | None = None

    @property
    def free(self) -> int:
        """The blocks that can be handed out, some of them only after an eviction."""
        return self._pages.free + self.tree.evictable

    def match(self, key: RadixKey, tokens: int) -> Node:
        """Return the node that ends the cached prefix of a text's first `tokens` tokens, `node.end` blocks long."""
        return self.tree.match(key, tokens if self._shares else 0)

    def lock(self, node: Node) -> None:
        """Keep a node and its ancestors from eviction until `unlock`."""
        self.tree.lock(node)
        self._count()

    def unlock(self, node: Node) -> None:
        self.tree.unlock(node)
        self._count()

    def admit(self, request: Request, key: RadixKey, node: Node) -> None:
        """Make the matched blocks the head of a request's table."""
        self.lock(node)
        self.tables[request] = []
        self.positions[request] = Position(key, node)
        request.pack(BytesWriter())
        request.hash_to(node.end)

    def allocated(self, request: Request) -> int:
        position = self.positions.get(request)
        return 0 if position is None else position.node.end + len(request.own) // PACKED

    def table(self, request: Request) -> list[int]:
        return [*unpacked(self.listed(request))]

    def listed(self, request: Request) -> bytes:
        position = self.positions.get(request)
        return b"" if position is None else self.tree.path(position.node) + request.own.getvalue()

    def extend(self, request: Request, tokens: int) -> bytes:
        """Add the blocks that a request lacks for its first `tokens` tokens; return them packed."""
        pages = self._pages.cut(self.missing(request, tokens))
        request.own.write(pages)
        return pages

    def grow(self, request: Request, count: int) -> list[int]:
        return [*unpacked(self.extend(request, (self.allocated(request) + count) * self.block_size))]

    def grow_each(self, requests: list[Request]) -> bytes:
        pages = self._pages.cut(len(requests))
        for i, request in enumerate(requests):
            write_i64_le(request.own, read_i64_le(pages, PACKED * i))
        return pages

    def make_room(self, tokens: int) -> list[bytes]:
        """Evict leaves until `tokens` tokens are available, or no leaf is left; return the blocks of each, packed."""
        evicted: list[bytes] = []
        while self._pages.free * self.block_size < tokens:
            pages = self.tree.evict()
            if not pages:
                break
            evicted.append(pages)
            self._give(pages)
        self._count()
        return evicted

    def merge(self, request: Request, blocks: int) -> list[tuple[int, int]]:
        """Move the first `blocks` blocks of a request, all full, into the tree; duplicates are freed. Outputs become a
        node of their own, so that they can be evicted alone. Return (index in the table, block) of those replaced.
        """
        if not self._shares:
            return []
        position, tree, priority = self.positions[request], self.tree, request.spec.priority
        key, first, prompt = position.key, position.node.end, position.key.prompt_tokens // self.block_size
        own, counted = request.cut(PACKED * (blocks - first)), position.counted
        assert first + len(own) // PACKED == blocks, (request.spec.id, first, len(own) // PACKED, blocks)
        node, duplicates, shared = tree.insert(position.node, key, own, first=first, priority=priority, counted=counted)
        for piece in duplicates:
            self._give(piece)
        if 0 < prompt < blocks:
            tree.insert(node, key, b"", first=prompt, priority=priority + 1, counted=prompt)
        tree.lock(node)
        tree.unlock(position.node)
        position.node, position.counted = node, max(counted, blocks)
        request.hash_to(blocks)
        self._count()
        return list(enumerate(unpacked(shared), first)) if shared else []

    def release(self, request: Request, *, returns: bool = False) -> int:
        """Insert what is computed into the tree; if the request `returns`, free its own blocks instead."""
        if request not in self.positions:
            return 0
        kv_tokens = min(request.computed, request.known)
        if not returns:
            self.merge(request, kv_tokens // self.block_size)
        count, table = self.allocated(request), self.table(request) if self._observer is not NULL_OBSERVER else []
        position = self.positions.pop(request)
        del self.tables[request]
        self._give(request.cut(PACKED * max(0, self.blocks_for(kv_tokens) - position.node.end)))
        self._give(request.own.getvalue())
        request.pack(NO_BLOCKS)
        self.unlock(position.node)
        self._observer.released(request, table)
        return count

    def watch(self, on_cache: OnCache) -> None:
        for node in self.tree.nodes():
            self._report(on_cache, node, True)
        self.tree.on_cache = partial(self._report, on_cache)

    def _report(self, on_cache: OnCache, node: Node, cached: bool) -> None:
        for page in range(node.start, node.end):
            content = node.key.page(page, self.block_size)
            if content >= 0:  # else no other request has it
                on_cache((content << 24) + page, cached)

    def collect(self) -> None:
        """Collect freed blocks until `put_back`, while a result is processed."""
        assert self._collected is None
        self._collected = b""

    def put_back(self) -> None:
        """Free the collected blocks, as one piece, when the result has been processed."""
        assert self._collected is not None
        collected, self._collected = self._collected, None
        self._give(collected)

    def _give(self, blocks: bytes) -> None:
        if self._collected is not None:
            self._collected += blocks
        elif blocks:
            self._pages.put(blocks)

    def _count(self) -> None:
        self.cached = self.tree.evictable

    def check(self) -> None:
        """Raise AssertionError unless every block is free, a request's or the tree's, once, and locks are a recount."""
        self.tree.check()
        nodes = self.tree.nodes()
        owners = [*self._free.order(), *unpacked(b"".join([self._collected or b"", *[node.pages for node in nodes]]))]
        assert self.tables.keys() == self.positions.keys(), "tables and positions"
        assert not len(NO_BLOCKS), "blocks of a request that was not admitted"
        locks = dict.fromkeys(nodes, 0)
        for request, position in self.positions.items():
            owners += unpacked(request.own.getvalue())
            for node in position.node.lineage():
                locks[node] += 1
        assert len(owners) == len(set(owners)) == self.num_blocks, ("blocks", len(owners), len(set(owners)))
        for node, count in locks.items():
            assert node.lock == count, ("locks", node.start, node.lock, count)
        assert self.cached == self.tree.evictable, ("cached blocks", self.cached, self.tree.evictable)
