"""Groups of layers whose KV is kept together, and the changes of their block tables that a plan lists.

Layers see the whole sequence, the last tokens of it (sliding) or those of their part of it (chunked); or they attend
linearly, to a state that stands for all tokens before. What a layer no longer sees need not be kept, so layers that see
alike form a group with block tables of its own. A cache of one group that sees all lists nothing here: rows list their
blocks (plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import gcd
from typing import NamedTuple

from cbsim.policy.request import RequestSpec


class Sight(Enum):
    """The part of a sequence that a layer's attention sees."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "linear"


class Attention(NamedTuple):
    """A layer's attention. `span`: tokens that a sliding layer sees, its own included; those of a chunk; 0 if full. Of
    a state, which has no tokens, it tells states of several kinds apart.
    """

    sight: Sight = Sight.FULL
    span: int = 0

    @property
    def text(self) -> str:
        """The attention as a scenario writes it."""
        return f"{self.sight.value} {self.span}" if self.span else self.sight.value

    def gone(self, computed: int) -> int:
        """Return how many leading tokens of a sequence no query token from position `computed` on sees."""
        if self.sight is Sight.SLIDING:
            return max(0, computed - self.span + 1)
        if self.sight is Sight.STATE:
            return max(0, computed - 1)  # the state behind the last one is left
        return computed // self.span * self.span if self.sight is Sight.CHUNKED else 0

    def seen(self, start: int, tokens: int) -> int:
        """Return the KV tokens that query tokens start .. start + tokens - 1 read between them; none but a state."""
        if self.sight is Sight.FULL:
            return start + tokens
        return 0 if self.sight is Sight.STATE else start + tokens - self.gone(start)

    def pairs(self, start: int, tokens: int) -> int:
        """Return the pairs of these query tokens, each with every token that it sees."""
        if self.sight is Sight.FULL:
            return whole_pairs(start, tokens)
        return self._up_to(start + tokens) - self._up_to(start)

    def _up_to(self, tokens: int) -> int:
        """Return the pairs of the first `tokens` query tokens of a sequence."""
        if self.sight is Sight.STATE:
            return 0
        if self.sight is Sight.CHUNKED:
            return tokens // self.span * _triangle(self.span) + _triangle(tokens % self.span)
        short = min(tokens, self.span) if self.sight is Sight.SLIDING else tokens
        return _triangle(short) + (tokens - short) * self.span


def whole_pairs(start: int, tokens: int) -> int:
    """Return the pairs of these query tokens where each sees the whole sequence before it."""
    return tokens * start + _triangle(tokens)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


FULL = Attention()


class LayerGroup(NamedTuple):
    """A group of layers that share their block tables, all of one `attention`. With `ring`, a table has at most so many
    entries, and block i of a sequence lies in entry i modulo `ring`; with 0, in entry i. A block of states holds the
    one behind its `block_size` tokens, or behind fewer if they are the last. A server counts `states` of them for a
    request: one; two if later prompts find them, that of the row before and the next; three if a row can leave one
    within, too.
    """

    attention: Attention
    layers: tuple[int, ...]
    block_size: int  # tokens
    ring: int = 0
    states: int = 0


def page_layers(groups: Sequence[LayerGroup]) -> int:
    """Return the layers of a page: the largest piece of a cache that blocks of every group are made of."""
    return gcd(*[len(group.layers) for group in groups])


def pages_of(groups: Sequence[LayerGroup]) -> list[int]:
    """Return the pages of a block, by group; 1 of the only table without groups."""
    layers = page_layers(groups)
    return [len(group.layers) // layers for group in groups] or [1]


class TableChange(NamedTuple):
    """A change of the table that a request has in a group, by number. Its first `passed` entries are no longer in use,
    since no layer sees them; `replaced` gives (entry, block) where another block of equal content is now; then `blocks`
    are appended. The first change of a request since its admission is the whole table: `passed` entries that never
    were, then `blocks`.
    """

    spec: RequestSpec
    group: int
    passed: int
    blocks: tuple[int, ...]
    replaced: tuple[tuple[int, int], ...] = ()
