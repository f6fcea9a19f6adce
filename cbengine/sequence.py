"""A request as the engine knows it: the ids of its tokens, and its slot and blocks on the device; and the prompts of a
workload's requests: ids that are equal exactly where declared content is equal.

A workload declares how long prompts are and which of their blocks are shared, not their tokens. Here a shared block's
tokens follow from its id and the seed, a private prompt's from the request's index. A trace may declare the content of
outputs, too (a conversation's next turn repeats them): a request's actual outputs then replace what was declared.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cbengine.sampling import Sampling, request_seed
from cbsim.policy.request import RequestSpec

Ids = npt.NDArray[np.int32]
SHARED, PRIVATE = 1, 2  # disjoint streams of random numbers
FIRST_SCORE, OTHER_SCORE = 0.0, -1e9
"""The scores of beams before their first output: all are the prompt, and only one of them is to count."""
CARRIED = -1  # the id that stands for a token that the device has sampled and the host has not seen yet


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
        prompt: Ids,
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

    def write(self, start: int, into: Ids) -> None:
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

    def expect(self, position: int) -> None:
        """Drop the outputs from `position` on, since a row will sample the token at `position`."""
        del self.outputs[position - len(self.prompt) :]


class Prompts:
    """The prompts of one run's requests, as token ids in 0 .. vocab - 1."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._seed, self._vocab = seed, vocab
        self._said: dict[int, Ids] = {}  # id of a declared block -> its tokens, where an output has filled part of it

    def of(self, spec: RequestSpec) -> Ids:
        """Return a request's prompt, int32 [prompt_tokens]. Further samples of a request have the same prompt."""
        if spec.sample_of is not None:
            assert spec.prompt_tokens == spec.sample_of.prompt_tokens, (spec.id, spec.sample_of.id)
            return self.of(spec.sample_of)
        width, shared = spec.prefix_block_tokens, min(spec.prefix_tokens, spec.prompt_tokens)
        blocks = -(-shared // width)
        parts = [self._block(key, width) for key in spec.prefix[:blocks]]
        head = np.concatenate(parts)[:shared] if parts else np.empty(0, dtype=np.int32)
        return np.concatenate((head, self._draw(PRIVATE, spec.index, spec.prompt_tokens - len(head))))

    def answered(self, spec: RequestSpec, outputs: list[int]) -> None:
        """Record outputs in place of declared ones. A next turn continues the first of several samples."""
        if spec.sample_of is not None:
            return
        width, low = spec.prefix_block_tokens, spec.prompt_tokens
        high = min(low + len(outputs), spec.prefix_tokens, len(spec.prefix) * width)
        for start in [low, *range((low // width + 1) * width, high, width)] if low < high else ():
            stop = min((start // width + 1) * width, high)
            key = spec.prefix[start // width]
            block = self._said.setdefault(key, self._block(key, width))
            block[start % width : start % width + stop - start] = outputs[start - low : stop - low]

    def _block(self, key: int, width: int) -> Ids:
        known = self._said.get(key)
        return self._draw(SHARED, key, width) if known is None else known

    def _draw(self, stream: int, key: int, count: int) -> Ids:
        rng = np.random.default_rng((self._seed, stream, key & (1 << 64) - 1))
        return rng.integers(0, self._vocab, count, dtype=np.int32)
