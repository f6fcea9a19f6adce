"""A radix tree over the blocks of prompts: what two routers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar


class Node:
    """A node: blocks that follow those of its parent. Nodes are numbered as they are made."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.keys: tuple[int, ...] = ()
        self.parent: Self | None = None
        self.children: dict[int, Self] = {}

    def split(self, upper: Self) -> None:
        """Give `upper`, the new parent that has taken over the first blocks of this node, what it has to know."""

    def line(self) -> Iterator[Self]:
        """Yield the node and those above it."""
        node: Self | None = self
        while node is not None:
            yield node
            node = node.parent


N = TypeVar("N", bound=Node)


class Tree(Generic[N]):
    """Prompts by their common beginnings. `make` makes a node of a number."""

    def __init__(self, make: Callable[[int], N]) -> None:
        self._make, self._count = make, 0
        self.root = self._new((), None)

    def match(self, keys: tuple[int, ...]) -> tuple[N, int]:
        """Return the last node that begins as the prompt goes on, and how many blocks of the prompt are in the tree."""
        node, at = self.root, 0
        while at < len(keys) and (child := node.children.get(keys[at])) is not None:
            node, same = child, _same(child.keys, keys, at)
            at += same
            if same < len(child.keys):
                break
        return node, at

    def insert(self, keys: tuple[int, ...]) -> list[N]:
        """Put a prompt into the tree, splitting the node in whose middle it ends or parts; return its nodes in order,
        without the root.
        """
        node, at, path = self.root, 0, list[N]()
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                child = self._new(keys[at:], node)
            elif (same := _same(child.keys, keys, at)) < len(child.keys):
                child = self._split(child, same)
            at += len(child.keys)
            path.append(child)
            node = child
        return path

    def nodes(self) -> Iterator[N]:
        """Yield all nodes but the root."""
        stack = [*self.root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def _new(self, keys: tuple[int, ...], parent: N | None) -> N:
        node = self._make(self._count)
        self._count += 1
        node.keys, node.parent = keys, parent
        if parent is not None:
            parent.children[keys[0]] = node
        return node

    def _split(self, lower: N, at: int) -> N:
        """Return a new parent of a node, with its first `at` blocks."""
        upper = self._new(lower.keys[:at], lower.parent)
        lower.keys, lower.parent = lower.keys[at:], upper
        upper.children[lower.keys[0]] = lower
        lower.split(upper)
        return upper


def _same(node: tuple[int, ...], keys: tuple[int, ...], at: int) -> int:
    """Return how many blocks of a node the prompt has from `at` on."""
    rest = keys[at : at + len(node)]
    if rest == node:
        return len(node)
    return next((i for i, (one, other) in enumerate(zip(node, rest, strict=False)) if one != other), len(rest))
