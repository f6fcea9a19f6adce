"""How many drafts of a row come true: drawn from the seed by request and position, or as they were recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cbsim.policy.plan import StepPlan
from cbsim.policy.request import Request, RequestSpec

Accepted = tuple[tuple[RequestSpec, int], ...]
WORD = (1 << 64) - 1


def uniform(seed: int, request: int, position: int) -> float:
    """Return a number in [0, 1) that depends on all three (SplitMix64's finaliser over a combination of them)."""
    word = (seed * 0x9E3779B97F4A7C15 + request * 0xD1B54A32D192ED03 + position * 0x8CB92BA72F3D8DD7) & WORD
    for _ in range(2):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
        word ^= word >> 31
    return (word >> 11) / (1 << 53)


class Acceptance:
    """The acceptance of a server's drafts. `rates(n)` are the probabilities of n drafts to come true behind accepted
    ones. `recorded` has, by index of a request, the numbers of its verifications in order; from the first again if
    there are more.
    """

    def __init__(
        self, seed: int, rates: Callable[[int], Sequence[float]], recorded: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self._seed, self._rates, self._recorded = seed, rates, recorded
        self._by_drafts: dict[int, Sequence[float]] = {}
        self._verifications: dict[int, int] = {}  # so far, by index of the request

    def of(self, plan: StepPlan, ran: StepPlan, requests: Mapping[RequestSpec, Request]) -> Accepted:
        """Return how many drafts come true of each row that has some in the plan of a step; of those with which it
        `ran`, which may be fewer. Drafts that pad an admitted row never do.
        """
        accepted = list[tuple[RequestSpec, int]]()
        for chunk, row in zip(plan.work.chunks, ran.work.chunks, strict=True):
            if chunk.outputs > 1 and (request := requests.get(chunk.spec)) is not None:
                drafts = 0 if chunk.admitted else row.outputs - 1
                accepted.append((chunk.spec, self.row(chunk.spec, request.seen, drafts) if drafts else 0))
        return tuple(accepted)

    def row(self, spec: RequestSpec, position: int, drafts: int) -> int:
        """Return how many of the drafts behind output `position` come true."""
        if self._recorded is not None:
            numbers, at = self._recorded.get(spec.index) or [0], self._verifications.get(spec.index, 0)
            self._verifications[spec.index] = at + 1
            return min(numbers[at % len(numbers)], drafts)
        rates = self._by_drafts.get(drafts)
        if rates is None:
            rates = self._by_drafts[drafts] = self._rates(drafts)
        for accepted, rate in enumerate(rates):
            if uniform(self._seed, spec.index, position + accepted) >= rate:
                return accepted
        return drafts
