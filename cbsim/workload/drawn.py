"""Requests that were drawn from distributions, as the numbers that were drawn: a million of them are some arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from cbsim.policy.request import RequestSpec

Ints = NDArray[np.int64]
AT_ONCE = 1 << 12  # numbers made objects together


@dataclass(frozen=True, eq=False)
class Drawn(Sequence[RequestSpec]):
    """Requests in order of index and of arrival. Whoever looks at them gets the same objects each time; `once` makes
    them one by one, and keeps none.
    """

    arrival_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    priority: Ints
    shared_tokens: int  # that all have in common
    samples: int = 1  # so many in a row have one prompt

    def __post_init__(self) -> None:
        assert (np.diff(self.arrival_ns) >= 0).all()

    def once(self) -> Iterator[RequestSpec]:
        """Each of them once: those that somebody has looked at, or else made as they are asked for."""
        if "kept" in self.__dict__:
            yield from self.kept
            return
        columns = (self.arrival_ns, self.prompt_tokens, self.output_tokens, self.max_tokens, self.priority)
        first: RequestSpec | None = None
        for low in range(0, len(self), AT_ONCE):
            parts = (column[low : low + AT_ONCE].tolist() for column in columns)
            for index, numbers in enumerate(zip(*parts, strict=True), low):
                if self.samples == 1:
                    yield self._made(index, *numbers)
                    continue
                spec = self._sample(index, first if index % self.samples else None, *numbers)
                first = spec.sample_of or spec
                yield spec

    def one(self, index: int) -> RequestSpec:
        """One of them, made anew."""
        columns = (self.arrival_ns, self.prompt_tokens, self.output_tokens, self.max_tokens, self.priority)
        numbers = (int(column[index]) for column in columns)
        if self.samples == 1:
            return self._made(index, *numbers)
        first = index - index % self.samples
        return self._sample(index, self.one(first) if index > first else None, *numbers)

    def _made(self, index: int, at_ns: int, prompt: int, output: int, most: int, priority: int) -> RequestSpec:
        if not (shared := self.shared_tokens):
            return RequestSpec(index, str(index), at_ns, prompt, output, most, priority)
        return RequestSpec(index, str(index), at_ns, prompt, output, most, priority, (0,), shared, min(shared, prompt))

    def _sample(
        self, index: int, first: RequestSpec | None, at_ns: int, prompt: int, output: int, most: int, priority: int
    ) -> RequestSpec:
        """One of several with a prompt that is named in whole: what all have in common, then the request's own."""
        number, sample = divmod(index, self.samples)
        shared = self.shared_tokens or prompt
        own = number + 1
        ids = (0 if self.shared_tokens else own, *[own] * (-(-prompt // shared) - 1))
        name = f"{sample}_{number}"
        return RequestSpec(index, name, at_ns, prompt, output, most, priority, ids, shared, prompt, first)

    @cached_property
    def kept(self) -> list[RequestSpec]:
        """All of them."""
        return list(self.once())

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @overload
    def __getitem__(self, at: int) -> RequestSpec: ...
    @overload
    def __getitem__(self, at: slice) -> list[RequestSpec]: ...
    def __getitem__(self, at: int | slice) -> RequestSpec | list[RequestSpec]:
        return self.kept[at]

    def __iter__(self) -> Iterator[RequestSpec]:
        return iter(self.kept)
