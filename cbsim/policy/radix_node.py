"""A node of the radix tree: a stretch of text and the pages that hold it."""

from __future__ import annotations

from cbsim.policy.text import Text

Rank = tuple[int, int]


class Node:
    """Pages `start` up to `end` of a text, and what eviction asks of them. Pages before `start` are the ancestors'; a
    node that is split keeps its end.

    `lock`: requests that read it. `hits`: texts that went through it. `born` and `time` (last use) are the tree's
    clock. `queued`: the rank under which it waits among the leaves, if it does. `parent` is None for the root, and for
    what was evicted.
    """

    __slots__ = (
        "born",
        "children",
        "end",
        "hits",
        "lock",
        "pages",
        "parent",
        "priority",
        "queued",
        "start",
        "text",
        "time",
    )

    def __init__(self, parent: Node | None, text: Text, start: int, pages: list[int]) -> None:
        self.parent = parent
        self.text = text
        self.start = start
        self.end = start + len(pages)
        self.pages = pages
        self.children: dict[int, Node] = {}  # by the number of their first page, in the order in which they came
        self.lock = self.hits = self.born = self.time = self.priority = 0
        self.queued: Rank | None = None

    @property
    def evictable(self) -> bool:
        """Is it a leaf that nobody reads?"""
        return not self.lock and not self.children and self.parent is not None
