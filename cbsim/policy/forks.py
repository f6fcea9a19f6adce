"""Requests of several samples: one of them reads the prompt, and the others go on from there.

The prompt is read up to its last token by the request that came first. Its samples then take over what it has, and each
computes the last token by itself, so that each draws a first output of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from cbsim.policy.decoding import Decoding
from cbsim.policy.moves import Move, Way
from cbsim.policy.request import Request


class Fork(NamedTuple):
    """A request whose prompt is read but for one token, and its further samples."""

    request: Request
    samples: list[Request]


class Forks:
    """Samples that wait for the request they are of, which has not read its prompt yet."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._samples: dict[Request, list[Request]] = {}
        self.due: list[Request] = []  # will have read its prompt but for one token, in the order planned
        self._untold: dict[Request, list[int]] = {}  # active, without a row listed since: blocks got for empty rows

    def __contains__(self, request: Request) -> bool:
        """Has it samples that wait for it?"""
        return request in self._samples

    def __len__(self) -> int:
        """Samples that wait."""
        return sum([len(samples) for samples in self._samples.values()])

    def expect(self, request: Request, sample: Request) -> None:
        assert sample.spec.prompt_tokens == request.spec.prompt_tokens, (request.spec.id, sample.spec.id)
        self._samples.setdefault(request, []).append(sample)

    def reached(self, request: Request) -> None:
        """It has been planned up to the last token of its prompt."""
        self.due.append(request)

    def hold(self, request: Request, blocks: list[int]) -> None:
        """Its row had no tokens; these blocks are told of with the next one."""
        self._untold.setdefault(request, []).extend(blocks)

    def has_begun(self, request: Request) -> bool:
        """Has it had a row that was empty, or come out of a fork, and no row since?"""
        return request in self._untold

    def told(self, request: Request, blocks: list[int]) -> list[int]:
        """The blocks to list with a row: `blocks`, behind those of rows that were not listed."""
        return [*self._untold.pop(request, ()), *blocks] if self._untold else blocks

    def take(self) -> list[Fork]:
        """The forks that are due, the last planned first. Nobody waits for these requests any more."""
        due, self.due = self.due, []
        return [Fork(request, self._samples.pop(request)) for request in reversed(due) if request in self._samples]

    def fork(self, request: Request, samples: list[Request], whole: int) -> None:
        """Admit samples with all that the request has computed. The first `whole` blocks are shared; of the others each
        gets its own, with copies of what is written there.
        """
        decoding, computed = self._decoding, request.computed
        pool = decoding.pool
        pool.fan_out(request, samples, whole)
        for sample in samples:
            sources: list[int] = []
            targets: list[int] = []
            own, written = pool.tables_of(sample), pool.blocks_for(computed)
            for group, table in enumerate(pool.tables_of(request)):
                copied = [i for i, block in enumerate(table[:written]) if block != own[group][i]]
                sources += pool.pages(group, [table[i] for i in copied])
                targets += pool.pages(group, [own[group][i] for i in copied])
            if sources:
                decoding.moves.append(Move(Way.COPY, tuple(sources), tuple(targets), sample.spec))
            decoding.admit(sample, computed)
            self.hold(sample, [])

    def set_back(self, request: Request) -> None:
        """It has lost its blocks. Its samples go on waiting."""
        self._untold.pop(request, None)
        self.due = [due for due in self.due if due is not request]

    def orphans(self, request: Request) -> list[Request]:
        """It is over; these waited for it, and have to wait for themselves."""
        self.set_back(request)
        return self._samples.pop(request, [])

    def drop(self, sample: Request) -> None:
        """A sample that waits is over."""
        for request, samples in self._samples.items():
            if sample in samples:
                samples.remove(sample)
                if not samples:
                    del self._samples[request]
                return
