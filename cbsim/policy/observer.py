"""An observer of what a policy does while it does it, for comparisons with recorded traces; no run needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cbsim.policy.decode_batch import Completion
    from cbsim.policy.request import Request


class Observer:
    """An observer that ignores every event. A subclass overrides the events that it records; it changes nothing."""

    def growing(self, request: Request, count: int) -> None:
        """The pool is about to add `count` fresh blocks to a table."""

    def grew(self, request: Request, blocks: Sequence[int]) -> None:
        """The pool has added these blocks."""

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        """A table was released; other tables may share blocks. Layer groups report each table."""

    def left(self, request: Request, group: int, blocks: Sequence[int]) -> None:
        """These blocks left a table of a layer group, for no layer sees them any more; in the order of the table."""

    def merged(self, request: Request, named: Sequence[int], replaced: Sequence[tuple[int, int]]) -> None:
        """Full blocks got their keys; of duplicates, (own, now) are the blocks before and after."""

    def looked_up(self, request: Request, tokens: int, blocks: Sequence[int]) -> None:
        """The first `tokens` tokens of a request were looked up in the prefix cache; these blocks hold some of them."""

    def evicted(self, blocks: Sequence[int]) -> None:
        """Everything cached was evicted: these blocks, oldest first."""

    def matched(self, request: Request, local: int, external: int | None) -> None:
        """A connector has `external` tokens behind `local` cached ones; None: it has to be queried again."""

    def loading(self, request: Request, external: int, blocks: Sequence[int]) -> None:
        """`external` tokens of a request are being loaded into the last of these blocks, its whole table."""

    def lacked(self, request: Request, blocks: int) -> None:
        """A row needed this many more blocks, and the pool has fewer."""

    def held_back(self, request: Request, position: int) -> None:
        """A row without tokens is the one at `position` of the step being planned. No plan lists it."""

    def starved(self, requests: Sequence[Request]) -> None:
        """No row could be planned, for want of blocks."""

    def reclaiming(self, starved: Sequence[Request]) -> None:
        """Some of these requests may have to be preempted."""

    def reclaimed(self, victims: Sequence[Request]) -> None:
        """These requests were preempted, and wait again, in this order."""

    def fitting(self, requests: Sequence[Request]) -> None:
        """These requests have cache for the step being planned, in the order in which rows are given."""

    def completed(self, completion: Completion, over: bool) -> None:
        """A row has come back, and its blocks have got their keys; the request may be over, and ends right after."""

    def wasted(self, completion: Completion, step: int) -> None:
        """A row has come back without use: its request has ended, or was set back."""


NULL_OBSERVER = Observer()
