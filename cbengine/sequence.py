"""A request as the engine knows it: the ids of its tokens, and its slot and blocks on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cbengine.sampling import Sampling, request_seed
from cbsim.policy.request import RequestSpec

FIRST_SCORE, OTHER_SCORE = 0.0, -1e9
"""The scores of beams before their first output: all are the prompt, and only one of them is to count."""
CARRIED = -1
"""The id that stands for a token that the device has sampled and the host has not seen yet."""


class Sequence:
    """A request's prompt and outputs, and its sampling. Outputs are those whose step has ended; later ones may be in
    flight. `stops` are token ids that end it, except among its first `least` tokens. `seed` is given, or follows from
    that of `sampling` and its index.
    """

    __slots__ = (
        *("blocks", "least", "outputs", "over", "prompt", "sampling", "score", "seed"),
        *("slot", "spec", "stops", "tables"),
    )

    def __init__(
        self,
        spec: RequestSpec,
        prompt: npt.NDArray[np.int32],
        sampling: Sampling,
        stops: frozenset[int] = frozenset(),
        least: int = 0,
        seed: int | None = None,
    ) -> None:
        assert len(prompt) == spec.prompt_tokens
        self.spec, self.prompt, self.sampling = spec, prompt, sampling
        self.stops, self.least = stops, least
        self.seed = request_seed(sampling.seed, spec.index) if seed is None else seed
        self.outputs: list[int] = []
        self.slot = -1  # line of the device's tables; -1 without blocks
        self.blocks = 0  # entries of its block table
        self.tables: dict[int, int] = {}  # with layer groups instead: entries of each group's table
        self.over = False
        self.score = OTHER_SCORE if spec.sample_of else FIRST_SCORE  # of the outputs, in a beam search

    @property
    def stopped(self) -> bool:
        """Whether its last token is one that ends it."""
        return len(self.outputs) > self.least and self.outputs[-1] in self.stops

    def forget(self) -> None:
        """Drop the tokens of a request that has ended and will not be read."""
        self.over, self.prompt, self.outputs = True, self.prompt[:0].copy(), []

    def write(self, start: int, into: npt.NDArray[np.int32]) -> None:
        """Write token ids from position `start` on into `into`; the one that is still in flight is CARRIED."""
        head = self.prompt[start : start + len(into)]
        into[: len(head)] = head
        if len(head) < len(into):
            low = max(start - len(self.prompt), 0)
            landed = self.outputs[low : low + len(into) - len(head)]
            into[len(head) : len(head) + len(landed)] = landed
            missing = len(into) - len(head) - len(landed)
            assert missing <= 1, (self.spec.id, start, len(into), len(self.outputs))
            into[len(into) - missing :] = CARRIED

    def go_on(self, outputs: list[int], token: int, score: float) -> None:
        """Continue a beam: take over the outputs of a beam of its search, its own or another, and one token more."""
        self.outputs = [*outputs, token]
        self.score = score

    def expect(self, position: int) -> None:
        """Drop the outputs from `position` on, since a row will sample the token at `position`."""
        del self.outputs[position - len(self.prompt) :]
