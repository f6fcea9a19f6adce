"""The tokens of a workload's requests: ids that are equal exactly where declared content is equal.

A workload declares how long prompts are and which of their blocks are shared, not their tokens. Here a shared block's
tokens follow from its id and the seed, a private prompt's from the request's index. A trace may declare the content of
outputs, too (a conversation's next turn repeats them): a request's actual outputs then replace what was declared.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cbsim.policy.request import RequestSpec

Ids = npt.NDArray[np.int32]
SHARED, PRIVATE = 1, 2  # disjoint streams of random numbers


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
        """Record an ended request's outputs in place of those that its workload declared, if it did. A next turn
        continues the first of several samples.
        """
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
