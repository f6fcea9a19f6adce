"""Speculative decoding as a scheduler sees it: how many drafts each row brings, and what room they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Method = Literal["ngram", "eagle", "draft_model"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """Each row that samples brings `k` draft tokens, or by the rows of a step: `by_rows` has pairs of (most rows,
    drafts) in ascending order, the last of them also for more rows. `eagle` stands for all heads on the target's
    states, such as MTP modules. A runner that `skips` drafts does not propose those that no row would verify.
    """

    method: Method
    k: int
    by_rows: Sequence[tuple[int, int]] = ()
    skips: bool = True

    def drafts(self, rows: int) -> int:
        """Return the drafts that a step of so many rows proposes for each."""
        if not self.by_rows:
            return self.k
        return next((drafts for most, drafts in self.by_rows if rows <= most), self.by_rows[-1][1])

    @property
    def ahead(self) -> int:
        """The tokens behind a row for which it takes room in the cache, since a drafter will write them."""
        return 0 if self.method == "ngram" else self.k

    @property
    def slots(self) -> int:
        """The tokens of a step's budget that a row takes beside its own."""
        return int(self.method == "draft_model")

    @property
    def hashed_ahead(self) -> int:
        """The tokens behind a block that its content covers: a head reads the next token with each state."""
        return int(self.method == "eagle")
