"""A block pool whose cache is a radix tree: SGLang 0.5.23's pages, and what requests and the tree have of them.

Free pages are handed out from the front. A page of one token is appended when it comes free; larger ones are put in
front, in the order given. A request keeps its own pages until they are inserted, or given up when it is released.
"""

from __future__ import annotations

from cbsim.kv.blocks import BlockPool
from cbsim.kv.free_lists import PageQueue
from cbsim.kv.radix import Node, RadixTree, Text
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr


class Place:
    """Where a request stands in the tree: it reads all up to `node`, the first pages of its table. Nodes within
    `counted` pages have been counted for it.
    """

    def __init__(self, text: Text, node: Node) -> None:
        self.text = text
        self.node = node
        self.counted = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixPool(BlockPool):
    """Owner of every page. `cached` are the tree's evictable ones; a page is `available` if it is in nobody's hands.
    `tables` hold the pages that are a request's own, those behind its place in the tree; lists of pages go from there
    into the tree, and from the tree to the free ones, as they are. With `shares` off nothing is kept and nothing found.
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
        super().__init__(block_size, num_blocks, PageQueue(range(num_blocks), in_front=block_size > 1), observer)
        self.tree = self.make_tree(strategy)
        self.places: dict[Request, Place] = {}
        self._shares = shares
        self._collected: list[int] | None = None

    def make_tree(self, strategy: str) -> RadixTree:
        return RadixTree(self.block_size, strategy)

    @property
    def free(self) -> int:
        """Blocks that can be handed out, if need be after an eviction."""
        return self._free.free + self.tree.evictable

    @property
    def available(self) -> int:
        """Blocks that can be handed out at once."""
        return self._free.free

    @property
    def contents(self) -> int:
        return self.keyed

    @property
    def keyed(self) -> int:
        return self.tree.evictable + self.tree.protected

    def match(self, text: Text, tokens: int) -> Node:
        """The node that ends what is cached of the first tokens of a text; `node.end` blocks are."""
        return self.tree.match(text, tokens if self._shares else 0)

    def lock(self, node: Node) -> None:
        """What a node ends is not evicted until `unlock`."""
        self.tree.lock(node)
        self._count()

    def unlock(self, node: Node) -> None:
        self.tree.unlock(node)
        self._count()

    def enter(self, request: Request, text: Text, node: Node) -> None:
        """A request is let in with what was matched: these blocks become the head of its table."""
        self.lock(node)
        self.tables[request] = []
        self.places[request] = Place(text, node)
        request.hash_to(node.end)

    def allocated(self, request: Request) -> int:
        place = self.places.get(request)
        return 0 if place is None else place.node.end + len(self.tables[request])

    def table(self, request: Request) -> list[int]:
        place = self.places.get(request)
        return [] if place is None else self.tree.path(place.node) + self.tables[request]

    def make_room(self, tokens: int) -> list[list[int]]:
        """Evict leaves until so many tokens are available, or no leaf is left; returns the blocks of each."""
        evicted: list[list[int]] = []
        while self._free.free * self.block_size < tokens:
            pages = self.tree.evict()
            if not pages:
                break
            evicted.append(pages)
            self._give(pages)
        self._count()
        return evicted

    def grow(self, request: Request, count: int) -> list[int]:
        assert count <= self._free.free, ("no room was made", count, self._free.free)
        return super().grow(request, count)

    def grow_each(self, requests: list[Request]) -> list[int]:
        assert len(requests) <= self._free.free, ("no room was made", len(requests), self._free.free)
        return super().grow_each(requests)

    def publish(self, request: Request, blocks: int) -> None:
        self.merge(request, blocks)

    def merge(self, request: Request, blocks: int) -> list[tuple[int, int]]:
        """The first `blocks` blocks of a request are full and go into the tree; those that it has already are freed.
        Outputs become a node of their own, so that they can be evicted alone. Returns (index in the table, block) of
        those that came in.
        """
        if not self._shares:
            return []
        place, own, tree, priority = self.places[request], self.tables[request], self.tree, request.spec.priority
        text, first, prompt = place.text, place.node.end, place.text.prompt_tokens // self.block_size
        full = blocks - first
        assert 0 <= full <= len(own), (request.spec.id, first, blocks, len(own))
        self.tables[request] = own[full:]
        del own[full:]
        inserted = tree.insert(text, own, first=first, priority=priority, counted=place.counted)
        for piece in inserted.duplicates:
            self._give(piece)
        if 0 < prompt < blocks:
            tree.insert(text, [], first=prompt, priority=priority + 1, counted=prompt)
        tree.lock(inserted.node)
        tree.unlock(place.node)
        place.node, place.counted = inserted.node, max(place.counted, blocks)
        request.hash_to(blocks)
        self._count()
        return list(enumerate(inserted.kept, first))

    def release(self, request: Request, *, returns: bool = False) -> int:
        """A request is over, and the tree keeps what it computed; or it `returns`, and its own blocks are given up.
        Returns blocks held.
        """
        if request not in self.places:
            return 0
        kv_tokens = min(request.computed, request.known)
        if not returns:
            self.merge(request, kv_tokens // self.block_size)
        held, table = self.allocated(request), self.table(request) if self._observer is not NULL_OBSERVER else []
        place, own = self.places.pop(request), self.tables.pop(request)
        written = self.blocks_for(kv_tokens) - place.node.end
        self._give(own[:written])
        self._give(own[written:])
        self.unlock(place.node)
        self._observer.released(request, table)
        return held

    def collect(self) -> None:
        """From now on blocks that come free are kept together: a result is being processed."""
        assert self._collected is None
        self._collected = []

    def put_back(self) -> None:
        """The result has been processed: they are free, as one piece."""
        assert self._collected is not None
        collected, self._collected = self._collected, None
        self._give(collected)

    def _give(self, blocks: list[int]) -> None:
        if self._collected is not None:
            self._collected += blocks
        elif blocks:
            self._free.give(blocks, 0)

    def _count(self) -> None:
        self.cached = self.tree.evictable

    def check(self) -> None:
        """Raise AssertionError unless every block is free, a request's or the tree's, once, and locks are a recount."""
        self.tree.check()
        nodes = self.tree.nodes()
        owners = [*self._free.order(), *(self._collected or ()), *(page for node in nodes for page in node.pages)]
        assert self.tables.keys() == self.places.keys(), "tables and places"
        locks = dict.fromkeys(nodes, 0)
        for request, place in self.places.items():
            owners += self.tables[request]
            node = place.node
            while node.parent is not None:
                locks[node] += 1
                node = node.parent
        assert len(owners) == len(set(owners)) == self.num_blocks, ("blocks", len(owners), len(set(owners)))
        for node, count in locks.items():
            assert node.lock == count, ("locks", node.start, node.lock, count)
        assert self.cached == self.tree.evictable, ("cached blocks", self.cached, self.tree.evictable)
