"""The requests of a run: those that arrive whatever the server does, those that follow the end of others, and the
lineage of beams in beam search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b, sha256
from itertools import chain
from typing import NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec

Ints = NDArray[np.int64]
AT_ONCE = 1 << 12  # requests made together
LONGEST_NS = 1 << 61  # 73 years: later times would not fit their columns


class Streams(NamedTuple):
    """The random generators of a run."""

    arrivals: np.random.Generator
    prompts: np.random.Generator
    outputs: np.random.Generator
    priorities: np.random.Generator
    spread: np.random.Generator
    users: np.random.Generator  # spawns one for each user
    prefixes: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Self:
        return cls(*map(np.random.default_rng, np.random.SeedSequence(seed).spawn(len(cls._fields))))


@dataclass
class Workload:
    """The requests sent to the server. An object serves one run, as it keeps track of what has been sent.

    `open` holds the requests whose arrival does not depend on the server, by (arrival_ns, index). `on_finish` returns
    the others; `total` counts both. `cancels` are (time in ns, request) in order of time.
    """

    open: Sequence[RequestSpec]
    total: int
    cancels: list[tuple[int, RequestSpec]] = field(default_factory=list)
    follow: Users | Sessions | None = None
    terms: str = ""  # the rule by which requests follow others, beyond their delays; part of the fingerprint
    notices: tuple[str, ...] = ()  # likely mistakes of the user, a line each

    def __post_init__(self) -> None:
        if not isinstance(self.open, Drawn):
            self.open = sorted(self.open, key=lambda spec: (spec.arrival_ns, spec.index))
        self._later = tuple(self.follow.drafts()) if self.follow else ()
        self._by_index: dict[int, RequestSpec] | None = None

    @property
    def last_ns(self) -> int:
        """The last arrival; or the longest delay of a request behind another, if that is more."""
        open_ns = self.open.arrival_ns if isinstance(self.open, Drawn) else [spec.arrival_ns for spec in self.open[-1:]]
        return max([*map(int, open_ns[-1:]), *(delay_ns for _, delay_ns in self._later)], default=0)

    def arriving(self) -> Iterator[RequestSpec]:
        """Yield the requests of `open` one by one, for a run that keeps none of them longer than it has to."""
        return self.open.once() if isinstance(self.open, Drawn) else iter(self.open)

    def part(self, at: Ints) -> Workload:
        """Return the requests of `open` at these positions, in order, with their cancellations."""
        if isinstance(self.open, Drawn) and not self.cancels:
            return Workload(self.open.part(at), len(at))
        chosen = dict.fromkeys([self.open[number] for number in at.tolist()])
        return Workload([*chosen], len(at), [(at_ns, spec) for at_ns, spec in self.cancels if spec in chosen])

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Return the requests that follow `spec`, which ended at `now_ns`. It must be called once for every request
        that ends, for whatever reason, rejection included.
        """
        return self.follow.after(spec, now_ns) if self.follow else []

    def find(self, index: int) -> RequestSpec | None:
        """Return the request of this index as it was before the run, or None. A drawn one is made anew."""
        if isinstance(self.open, Drawn):
            return self.open.one(index) if 0 <= index < len(self.open) else None
        if self._by_index is None:
            self._by_index = {spec.index: spec for spec in self.specs()}
        return self._by_index.get(index)

    def attempt(self, spec: RequestSpec, number: int) -> RequestSpec:
        """Return a request as it is sent again for the nth time: the same but for its index."""
        return replace(spec, index=spec.index % self.total + number * self.total)

    def find_attempt(self, index: int) -> RequestSpec | None:
        """Return the request of an index like `find`, also one that was sent again."""
        number, first = divmod(index, self.total) if self.total else (0, index)
        spec = self.find(first)
        return spec and (self.attempt(spec, number) if number else spec)

    def specs(self) -> list[RequestSpec]:
        """Return all requests as they were before the run; those that follow others have no arrival time yet."""
        return [*self.open, *(spec for spec, _ in self._later)]

    def fingerprint(self) -> str:
        """Return the SHA-256 of all fields of all requests as before the run; equal workloads have equal ones."""
        digest = sha256()
        for spec, delay_ns in chain(((spec, -1) for spec in self.arriving()), self._later):
            lengths = (spec.arrival_ns, spec.prompt_tokens, spec.output_tokens, spec.max_tokens, spec.priority)
            shared = (spec.prefix, spec.prefix_block_tokens, spec.prefix_tokens)
            of = f" of {spec.sample_of.index}" if spec.sample_of else ""
            digest.update(f"{spec.index} {spec.id!r} {lengths} {shared} {delay_ns}{of}\n".encode())
        digest.update(self.terms.encode())
        for at_ns, spec in self.cancels:
            digest.update(f"cancel {spec.index} {at_ns}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Drawn(Sequence[RequestSpec]):
    """A sequence of requests in order of index and of arrival. Indexing and iteration give the same objects each time;
    `once` makes them one by one and keeps none.
    """

    arrival_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    priority: Ints
    shared_tokens: int = 0  # the prefix that prompts have in common
    prefix: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Its id for each request: 0 if there is one, else more than there are requests."""
    samples: int = 1  # consecutive requests with the same prompt
    names: Sequence[str] | None = None  # by index, where a file has them
    numbers: Ints | None = None  # the index of each request, of a part of such a sequence

    def __post_init__(self) -> None:
        assert (np.diff(self.arrival_ns) >= 0).all()

    def scaled(self, scale: float) -> Drawn:
        """Return the requests with their times multiplied by `scale`."""
        times = np.rint(np.minimum(self.arrival_ns * scale, 2 * LONGEST_NS)).astype(np.int64)
        return self if scale == 1 else replace(self, arrival_ns=times)

    def part(self, at: Ints) -> Drawn:
        """Return the requests at these positions, all samples of each or none, for `once` and nothing else."""
        names = ("arrival_ns", "prompt_tokens", "output_tokens", "max_tokens", "priority")
        return replace(self, **{name: getattr(self, name)[at] for name in names}, numbers=at)

    def once(self) -> Iterator[RequestSpec]:
        """Yield each request once: the kept objects if there are any, else requests made one by one and not kept."""
        if "specs" in self.__dict__:
            yield from self.specs
            return
        numbers = np.arange(len(self)) if self.numbers is None else self.numbers
        columns = (numbers, self.arrival_ns, self.prompt_tokens, self.output_tokens, self.max_tokens, self.priority)
        first: RequestSpec | None = None
        for low in range(0, len(self), AT_ONCE):
            parts = [column[low : low + AT_ONCE].tolist() for column in columns]
            if self.samples == 1:
                yield from map(self._made, *parts)
                continue
            for index, *values in zip(*parts, strict=True):
                spec = self._sample(index, first if index % self.samples else None, *values)
                first = spec.sample_of or spec
                yield spec

    def one(self, index: int) -> RequestSpec:
        """Return the request of an index, made anew."""
        columns = (self.arrival_ns, self.prompt_tokens, self.output_tokens, self.max_tokens, self.priority)
        numbers = (int(column[index]) for column in columns)
        if self.samples == 1:
            return self._made(index, *numbers)
        first = index - index % self.samples
        return self._sample(index, self.one(first) if index > first else None, *numbers)

    def _made(self, index: int, at_ns: int, prompt: int, output: int, most: int, priority: int) -> RequestSpec:
        name = str(index) if self.names is None else self.names[index]
        if not (shared := self.shared_tokens):
            return RequestSpec(index, name, at_ns, prompt, output, most, priority)
        ids = (int(self.prefix[index]),)
        return RequestSpec(index, name, at_ns, prompt, output, most, priority, ids, shared, min(shared, prompt))

    def _sample(
        self, index: int, first: RequestSpec | None, at_ns: int, prompt: int, output: int, most: int, priority: int
    ) -> RequestSpec:
        """Return one of several samples. Its prompt has ids in whole: a shared prefix, then the request's."""
        number, sample = divmod(index, self.samples)
        shared = self.shared_tokens or prompt
        own = number + 1
        ids = (int(self.prefix[index]) if self.shared_tokens else own, *[own] * (-(-prompt // shared) - 1))
        name = f"{sample}_{number}"
        return RequestSpec(index, name, at_ns, prompt, output, most, priority, ids, shared, prompt, first)

    @cached_property
    def specs(self) -> list[RequestSpec]:
        """All requests, made once and kept."""
        return list(self.once())

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @overload
    def __getitem__(self, at: int) -> RequestSpec: ...
    @overload
    def __getitem__(self, at: slice) -> list[RequestSpec]: ...
    def __getitem__(self, at: int | slice) -> RequestSpec | list[RequestSpec]:
        return self.specs[at]

    def __iter__(self) -> Iterator[RequestSpec]:
        return iter(self.specs)


class Users:
    """A closed loop: a user whose request ends sends the next one of the list, after thinking, unless that is after
    `until_ns`. Users are numbered by the index of the request that they send at the start.

    Thinking takes `think_ns`; where users have `draws` of their own, one each, it is exponential with that mean. So the
    time before a user's nth request depends on the user and n alone, not on the order in which requests end.

    A request of several `samples` is so many consecutive entries of the list; it ends when all of them have ended.
    """

    def __init__(
        self,
        waiting: Sequence[RequestSpec],
        think_ns: int,
        draws: Sequence[np.random.Generator] = (),
        until_ns: int | None = None,
        samples: int = 1,
    ) -> None:
        self._waiting = list(waiting)[::-1]
        self._think_ns, self._draws, self._until_ns, self._samples = think_ns, draws, until_ns, samples
        self._user: dict[int, int] = {}  # by the number of a request that is not its user's first
        self._ended: dict[int, int] = {}  # ended samples of a request, by its number, while others have not ended

    def after(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        number = spec.index // self._samples
        ended = self._ended.pop(number, 0) + 1
        if ended < self._samples:
            self._ended[number] = ended
        if ended < self._samples or not self._waiting:
            return []
        user = self._user.pop(number, number)
        at_ns = now_ns + (round(self._draws[user].exponential(self._think_ns)) if self._draws else self._think_ns)
        if self._until_ns is not None and at_ns > self._until_ns:
            return []
        first = replace(self._waiting.pop(), arrival_ns=at_ns)
        self._user[first.index // self._samples] = user
        samples = [replace(self._waiting.pop(), arrival_ns=at_ns, sample_of=first) for _ in range(1, self._samples)]
        return [first, *samples]

    def drafts(self) -> Iterator[tuple[RequestSpec, int]]:
        return ((spec, self._think_ns) for spec in reversed(self._waiting))


class Sessions:
    """A set of conversations: the end of a turn is followed by its session's next turn, after that turn's delay."""

    def __init__(self, following: dict[int, tuple[RequestSpec, int]]) -> None:
        self._following = following  # index of a turn -> the next turn, its delay in ns

    def after(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        following = self._following.pop(spec.index, None)
        return [replace(following[0], arrival_ns=now_ns + following[1])] if following else []

    def drafts(self) -> Iterator[tuple[RequestSpec, int]]:
        return iter(self._following.values())


Parents = tuple[tuple[RequestSpec, RequestSpec], ...]


def parents(plan: StepPlan) -> Parents:
    """Return the simulated parents of beams for the ranked rows of a plan: (beam, parent) where they differ."""
    starts = {chunk.spec: chunk.start for chunk in plan.work.chunks}
    replaced: list[tuple[RequestSpec, RequestSpec]] = []
    for group in plan.ranked:
        start = starts[group[0]]
        if start < group[0].prompt_tokens:
            continue
        drawn = [(spec, group[_draw(spec.index, start, len(group))]) for spec in group]
        replaced += [(spec, parent) for spec, parent in drawn if parent is not spec]
    return tuple(replaced)


def _draw(index: int, start: int, count: int) -> int:
    seed = index.to_bytes(8, "little") + start.to_bytes(8, "little")
    return int.from_bytes(blake2b(seed, digest_size=8).digest(), "little") % count
