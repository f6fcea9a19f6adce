"""The simplest cache that could be right: texts written out, found by search. No tree, no counts, no shortcuts.

Every page has the whole text up to its end for a name. A node is the text that ends it; what it holds begins where the
longest other one that begins it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from cbsim.policy.request import RequestSpec

Token = tuple[str, int, int]
Words = tuple[Token, ...]
WIDTH = 3  # of declared blocks: pages lie across them
IDS: dict[tuple[int, ...], int] = {}  # chained: a number for every way to a block


def chained(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(IDS.setdefault(path[: i + 1], len(IDS)) for i in range(len(path)))


@st.composite
def specs(draw: st.DrawFn, index: int, size: int, others: list[RequestSpec]) -> RequestSpec:
    """A request whose head, whose whole prompt, or whose outputs too are declared; or a further sample of another."""
    outputs, priority = draw(st.integers(1, 2 * size + 1)), draw(st.integers(0, 2))
    if others and draw(st.integers(0, 5)) == 0:
        first = draw(st.sampled_from(others))
        prompt, sample_of = first.prompt_tokens, first
        prefix, declared = first.prefix, min(first.prefix_tokens, prompt)
        return RequestSpec(
            index, f"r{index}", 0, prompt, outputs, outputs, priority, prefix, WIDTH, declared, sample_of
        )
    prompt = draw(st.integers(1, 5 * size))
    path = draw(st.tuples(*[st.integers(0, 1 if i < 2 else 0) for i in range(-(-(prompt + outputs) // WIDTH))]))
    declared = draw(st.sampled_from((0, prompt // 2, prompt, prompt, prompt + outputs, prompt + outputs)))
    prefix = chained(path)
    return RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs, priority, prefix, WIDTH, declared)


def written(spec: RequestSpec) -> Words:
    """The text of a request, token by token, as its workload declares it."""
    declared = min(spec.prefix_tokens, len(spec.prefix) * spec.prefix_block_tokens)
    source = spec.sample_of or spec
    tokens: list[Token] = []
    for place in range(spec.prompt_tokens + spec.max_tokens):
        if place < declared:
            tokens.append(("block", spec.prefix[place // spec.prefix_block_tokens], place % spec.prefix_block_tokens))
        else:
            tokens.append(("own", source.index if place < spec.prompt_tokens else spec.index, place))
    return tuple(tokens)


@dataclass
class Held:
    hits: int
    born: float
    time: float
    priority: int


RANKS: dict[str, Callable[[Held], tuple[float, ...]]] = {
    "lru": lambda held: (held.time,),
    "lfu": lambda held: (held.hits, held.time),
    "fifo": lambda held: (held.born,),
    "mru": lambda held: (-held.time,),
    "filo": lambda held: (-held.born,),
    "slru": lambda held: (held.hits >= 2, held.time),
    "priority": lambda held: (held.priority, held.time),
}


class NaiveRadix:
    """`readers` are the texts that somebody reads: nothing that begins one is evicted."""

    def __init__(self, size: int, pages: int, strategy: str) -> None:
        self.size, self.rank = size, RANKS[strategy]
        self.free = list(range(pages))
        self.collected: list[int] | None = None
        self.pages: dict[Words, int] = {}
        self.ends: dict[Words, Held] = {}
        self.readers: list[Words] = []
        self.clock = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def give(self, pages: Sequence[int]) -> None:
        if self.collected is not None:
            self.collected += pages
        else:
            self.free = [*self.free, *pages] if self.size == 1 else [*pages, *self.free]

    def put_back(self) -> None:
        assert self.collected is not None
        pages, self.collected = self.collected, None
        self.give(pages)

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def whole(self, words: Words) -> Words:
        return words[: len(words) // self.size * self.size]

    def within(self, words: Words) -> Words:
        """The node that holds the last page of a text."""
        return min((end for end in self.ends if end[: len(words)] == words), key=len)

    def split(self, words: Words) -> None:
        below = self.within(words)
        self.ends[words] = replace(self.ends[below], time=self.tick())
        self.tick()
        self.ends[below].time = self.tick()

    def match(self, words: Words) -> Words:
        words = self.whole(words)
        while words and words not in self.pages:
            words = words[: -self.size]
        if words and words not in self.ends:
            self.split(words)
        now = self.tick()
        path = sorted((end for end in self.ends if words[: len(end)] == end), key=len, reverse=True)
        for age, end in enumerate(path):
            self.ends[end].time = now - age * 0.00001
        return words

    def insert(self, words: Words, table: list[int], priority: int, counted: int, owned: int) -> None:
        size, words = self.size, self.whole(words)
        at = 0
        while words[:at] != words and words[: at + size] in self.pages:
            node = self.within(words[: at + size])
            self.ends[node].time = self.tick()
            end = at
            while end < len(words) and words[: end + size] == node[: end + size] and end < len(node):
                end += size
            if words[:end] != node:
                self.split(words[:end])
            held = self.ends[words[:end]]
            held.priority = max(held.priority, priority)
            own = range(max(at // size, owned), end // size)
            self.give([table[i] for i in own])
            for i in own:
                table[i] = self.pages[words[: (i + 1) * size]]
            held.hits += end // size > counted
            at = end
        if words[:at] != words:
            for i in range(at // size, len(words) // size):
                self.pages[words[: (i + 1) * size]] = table[i]
            time = self.tick()
            self.ends[words] = Held(1, self.tick(), time, priority)

    def leaves(self) -> list[Words]:
        inner = {end for end in self.ends for other in self.ends if other != end and other[: len(end)] == end}
        read = {end for end in self.ends for text in self.readers if text[: len(end)] == end}
        return sorted(self.ends.keys() - inner - read, key=lambda end: self.rank(self.ends[end]))

    def make_room(self, tokens: int) -> list[list[int]]:
        evicted: list[list[int]] = []
        while len(self.free) * self.size < tokens and (leaves := self.leaves()):
            leaf = leaves[0]
            del self.ends[leaf]
            start = max((len(end) for end in self.ends if leaf[: len(end)] == end), default=0)
            lengths = range(start + self.size, len(leaf) + 1, self.size)
            evicted.append([self.pages.pop(leaf[:length]) for length in lengths])
            self.give(evicted[-1])
        return evicted

    @property
    def unread(self) -> int:
        """Pages that nobody reads."""
        return sum(all(text[: len(page)] != page for text in self.readers) for page in self.pages)
