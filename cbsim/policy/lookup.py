"""The last prefix lookup of a block pool."""

from __future__ import annotations

from cbsim.policy.request import RequestSpec


class Lookup:
    """The last prefix lookup, kept until a key that it read changes: the head of a queue asks again at every step.

    `read` are the keys of the blocks it found, and the one it stopped at; `idle` of those blocks are free.
    """

    def __init__(self, spec: RequestSpec | None, most: int, found: list[int], read: set[int], idle: int) -> None:
        self.spec = spec
        self.most = most
        self.found = found
        self.blocks = set(found)
        self.read = read
        self.idle = idle


NEVER_ASKED = Lookup(None, 0, [], set(), 0)
