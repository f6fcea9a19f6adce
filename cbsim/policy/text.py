"""Which tokens two requests have in common, as their workload declares it. Nobody knows what they say.

A text is the tokens of a request, prompt and outputs. Every token has a number, and equal numbers at one place mean
equal texts up to and including it: a declared block has its chained id, what is private belongs to its request, a
prompt to the first of its samples. So texts, once different, never have an equal number again, and where they part is
found by halving: no text is ever written out, however long.
"""

from __future__ import annotations

from cbsim.policy.request import RequestSpec


class Text:
    """The tokens of a request. Ids of declared blocks are not negative, and blocks of one size in a whole run."""

    __slots__ = ("_declared", "_ids", "_own", "_source", "_width", "prompt_tokens")

    def __init__(self, spec: RequestSpec) -> None:
        self.prompt_tokens = spec.prompt_tokens
        self._ids = spec.prefix
        self._width = spec.prefix_block_tokens
        self._declared = min(spec.prefix_tokens, len(spec.prefix) * spec.prefix_block_tokens)
        self._own = -1 - spec.index
        self._source = self._own if spec.sample_of is None else -1 - spec.sample_of.index

    def at(self, place: int) -> int:
        """The number of a token. Any place has one, also beyond what the request will ever say."""
        if place < self._declared:
            return self._ids[place // self._width]
        return self._source if place < self.prompt_tokens else self._own

    def page(self, page: int, size: int) -> int:
        """The number of a page of `size` tokens, that of its last one: equal numbers, equal texts up to its end."""
        return self.at((page + 1) * size - 1)

    def common(self, other: Text, size: int, known: int, most: int) -> int:
        """How many leading pages are equal, of `most`, when `known` of them are."""
        if known < most and self.page(most - 1, size) == other.page(most - 1, size):
            return most
        while known + 1 < most:  # pages up to `known` are equal, page number `most` is not
            middle = (known + most) // 2
            if self.page(middle - 1, size) == other.page(middle - 1, size):
                known = middle
            else:
                most = middle
        return known
