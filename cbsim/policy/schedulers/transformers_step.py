"""What transformers' scheduler knows of a step that it is planning."""

from __future__ import annotations

from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request


class Step:
    """A step while it is being planned."""

    __slots__ = (
        "decodes",
        "failed",
        "fast",
        "full",
        "held_back",
        "kv",
        "lead",
        "requests",
        "rows",
        "starved",
        "tokens",
    )

    def __init__(self, tokens: int, kv: int, requests: int, fast: bool) -> None:
        self.tokens = tokens
        self.kv = kv
        self.requests = requests
        self.fast = fast
        self.rows: dict[Request, Chunk] = {}
        self.held_back: list[Request] = []  # rows without tokens: all that is left is the last one before a fork
        self.lead = 0
        self.decodes = 0
        self.failed = False  # an allocation failed
        self.starved: list[tuple[Request, int]] = []
        self.full = False  # a budget is used up

    @property
    def empty(self) -> bool:
        return not (self.rows or self.decodes or self.held_back)
