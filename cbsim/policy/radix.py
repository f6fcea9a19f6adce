"""The radix tree of SGLang 0.5.23 (its UnifiedRadixCache, one group of full-attention layers): which pages hold which
text, who reads them, and which go when room is needed.

A clock counts uses: every use has a time of its own, and the ancestors of a node that was matched are a hundred
thousandth older each. All is in whole pages; with pages of one token that is every token.
"""

from __future__ import annotations

from typing import Final

from cbsim.policy.radix_leaves import Leaves
from cbsim.policy.radix_node import Node
from cbsim.policy.request import RequestSpec
from cbsim.policy.text import Text
from cbsim.policy.value import mypyc_attr, value

TICK = 100_000  # of the clock; an ancestor is 1 older


@value(init=False)
class Inserted:
    """`node` ends where the text that went in ends. Of the pages that came with it, `duplicates` were in the tree
    already, a piece for each node; `kept` are the tree's pages in their place.
    """

    node: Final[Node]
    duplicates: Final[list[list[int]]]
    kept: Final[list[int]]

    def __init__(self, node: Node, duplicates: list[list[int]], kept: list[int]) -> None:
        self.node = node
        self.duplicates = duplicates
        self.kept = kept


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixTree:
    """Texts by their pages. `evictable` pages lie in nodes that nobody reads, `protected` ones in the others."""

    def __init__(self, page_size: int, strategy: str) -> None:
        self.page_size = page_size
        self.root = Node(None, Text(RequestSpec(0, "root", 0, 1, 1, 1)), 0, [])
        self.evictable = self.protected = 0
        self._clock = 0
        self._leaves = Leaves(strategy)

    def match(self, text: Text, tokens: int) -> Node:
        """The node that ends the longest held prefix of the first `tokens` tokens; one that is held in part is split.
        All on the way to it count as used.
        """
        node, pages = self.root, tokens // self.page_size
        while (child := self._next(node, text, pages)) is not None:
            end = text.common(child.text, self.page_size, child.start + 1, min(child.end, pages))
            node = child if end == child.end else self.split(child, end)
        now, used = self._tick(), node
        while used.parent is not None:
            self._used(used, now)
            now -= 1
            used = used.parent
        return node

    def _next(self, node: Node, text: Text, pages: int) -> Node | None:
        """The child with the next page of a text of so many pages."""
        return node.children.get(text.page(node.end, self.page_size)) if node.end < pages else None

    def split(self, node: Node, at: int) -> Node:
        """Cut a node in front of page `at` of its text; returns the part before it, which takes its place."""
        parent, size, head = node.parent, self.page_size, at - node.start
        assert parent is not None
        assert node.start < at < node.end, (node.start, at, node.end)
        upper = self._new(parent, node.text, node.start, node.pages[:head])
        upper.lock, upper.hits, upper.born, upper.priority = node.lock, node.hits, node.born, node.priority
        parent.children[node.text.page(node.start, size)] = upper
        upper.children[node.text.page(at, size)] = node
        node.parent, node.start, node.pages = upper, at, node.pages[head:]
        self._used(node, self._tick())
        return upper

    def insert(self, text: Text, own: list[int], *, first: int, priority: int, counted: int) -> Inserted:
        """Hold a text up to the end of these pages, of which the first is its page number `first`; those before it are
        in the tree. The list is the tree's from now on. Nodes that end within `counted` pages have been counted for
        this text.
        """
        node, size, pages = self.root, self.page_size, first + len(own)
        duplicates: list[list[int]] = []
        kept: list[int] = []
        while (child := self._next(node, text, pages)) is not None:
            self._used(child, self._tick())
            end = text.common(child.text, size, child.start + 1, min(child.end, pages))
            node = child if end == child.end else self.split(child, end)
            node.priority = max(node.priority, priority)
            if first < end:
                known = first + len(kept)
                duplicates.append(own[known - first : end - first])
                kept += node.pages[known - node.start :]
            node.hits += end > counted
        matched = node.end
        if matched < pages:
            leaf = self._new(node, text, matched, own[matched - first :] if matched > first else own)
            leaf.priority, leaf.hits = priority, 1
            node.children[text.page(matched, size)] = node = leaf
            self.evictable += pages - matched
            self._leaves.add(leaf)
        return Inserted(node, duplicates, kept)

    def path(self, node: Node) -> list[int]:
        """The pages of the text that a node ends."""
        parts: list[list[int]] = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        pages: list[int] = []
        for part in reversed(parts):
            pages += part
        return pages

    def lock(self, node: Node) -> None:
        """One more reads a node, and so all before it."""
        while node.parent is not None:
            count = len(node.pages)
            if not node.lock:
                self.evictable -= count
                self.protected += count
            node.lock += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """One of its readers is through."""
        while node.parent is not None:
            count = len(node.pages)
            assert node.lock > 0, "nobody reads it"
            node.lock -= 1
            if not node.lock:
                self.evictable += count
                self.protected -= count
                if not node.children:
                    self._leaves.add(node)
            node = node.parent

    def evict(self) -> list[int]:
        """Forget the evictable leaf of least rank; returns its pages, none if there is no such leaf."""
        node = self._leaves.pop()
        if node is None:
            return []
        parent = node.parent
        assert parent is not None
        del parent.children[node.text.page(node.start, self.page_size)]
        node.parent = None
        self.evictable -= len(node.pages)
        if parent.evictable:
            self._leaves.add(parent)
        return node.pages

    def _new(self, parent: Node, text: Text, start: int, pages: list[int]) -> Node:
        node = Node(parent, text, start, pages)
        node.time, node.born = self._tick(), self._tick()
        return node

    def _tick(self) -> int:
        self._clock += TICK
        return self._clock

    def _used(self, node: Node, time: int) -> None:
        node.time = time
        if self._leaves.falls and node.evictable:
            self._leaves.add(node)

    def nodes(self) -> list[Node]:
        """All but the root, parents before children, older children first."""
        found: list[Node] = []
        ahead = list(self.root.children.values())[::-1]
        while ahead:
            node = ahead.pop()
            found.append(node)
            ahead += list(node.children.values())[::-1]
        return found

    def check(self) -> None:
        """Raise AssertionError unless nodes hang together, texts part where nodes do, and the sums are a recount."""
        nodes = self.nodes()
        for node in (self.root, *nodes):
            for name, child in node.children.items():
                assert child.parent is node, "a child of another"
                assert child.start == node.end, ("a gap in a text", node.end, child.start)
                assert child.start < child.end == child.start + len(child.pages), "an empty node"
                assert name == child.text.page(child.start, self.page_size), "a child under a wrong key"
                below = child.text.common(node.text, self.page_size, 0, node.end)
                assert below == node.end, ("a child of another text", below, node.end)
                assert child.lock <= node.lock or node is self.root, ("locks", node.lock, child.lock)
        counts = (
            sum(len(node.pages) for node in nodes if not node.lock),
            sum(len(node.pages) for node in nodes if node.lock),
        )
        assert (self.evictable, self.protected) == counts, (
            "pages evictable, protected",
            self.evictable,
            self.protected,
        )
        self._leaves.check([node for node in nodes if node.evictable])
