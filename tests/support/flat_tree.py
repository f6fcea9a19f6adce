"""A radix tree of texts as a flat table: a node is the text from the root to its end. The second implementation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Generic, TypeVar

T = TypeVar("T")


class Flat(Generic[T]):
    """All nodes by their ends, in the order in which they were made."""

    def __init__(self, make: Callable[[], T], split: Callable[[str, T, str], T]) -> None:
        self.nodes: dict[str, T] = {}
        self._make, self._split = make, split

    def parent(self, end: str) -> str:
        return max((other for other in self.nodes if other != end and end.startswith(other)), key=len, default="")

    def children(self, end: str) -> list[str]:
        return [other for other in self.nodes if other and self.parent(other) == end and other != end]

    def tokens(self, end: str) -> int:
        return len(end) - len(self.parent(end))

    def insert(self, text: str) -> list[str]:
        """Return the ends of the nodes of the text."""
        for end in [*self.nodes]:
            common = shared(end, text)
            if len(self.parent(end)) < len(common) < len(end):
                self.nodes[common] = self._split(end, self.nodes[end], common)
                break
        if text and text not in self.nodes:
            self.nodes[text] = self._make()
        return self.path(text)

    def path(self, text: str) -> list[str]:
        return sorted((end for end in self.nodes if end and text.startswith(end)), key=len)

    def match(self, text: str) -> tuple[int, str]:
        """Return how much of a text is in the tree, and the end of the node in which that ends."""
        common = max((shared(end, text) for end in self.nodes), key=len, default="")
        inside = [end for end in self.nodes if common and end.startswith(common)]
        return len(common), min(inside, key=len, default="")


def shared(one: str, other: str) -> str:
    """Return the common beginning of two texts."""
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]
