"""What a simulated model says, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from cbsim.endpoint.backend import Generation
from cbsim.endpoint.tokenizer import Tokenizer
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

TEXT = (
    " No model has read your prompt, and none has written this answer. Its words are always the same; what is computed"
    " is the time at which each of them would have come from the server that the scenario describes, with its"
    " scheduler, its cache, its CPU and its GPU, beside the requests of everybody else. Please do not mind the words."
)
MOST_LENGTHS = 10_000


class Speech:
    """Every answer is the same text, again and again. It ends where an answer of the scenario's workload would: its
    length is drawn from those of the workload, by the number of the request and the seed of the scenario.
    """

    def __init__(self, scenario: Scenario, tokenizer: Tokenizer) -> None:
        requests = islice(generators.build(scenario).arriving(), MOST_LENGTHS)
        self._lengths = [spec.output_tokens for spec in requests]
        self._seed = scenario.seed
        self._ids = tokenizer.encode(TEXT)
        self._alone = [(token,) for token in self._ids]

    def tokens(self, index: int, generation: Generation) -> int:
        """How many tokens the answer to this request has."""
        if generation.ignore_eos or not self._lengths:
            return generation.max_tokens
        rng = np.random.default_rng((self._seed, index))
        drawn = self._lengths[int(rng.integers(len(self._lengths)))]
        return min(generation.max_tokens, max(generation.min_tokens, drawn, 1))

    def ids(self, first: int, end: int) -> Sequence[int]:
        """Tokens `first` to `end` of any answer."""
        ids = self._ids
        if end - first == 1:
            return self._alone[first % len(ids)]
        return [ids[at % len(ids)] for at in range(first, end)]
