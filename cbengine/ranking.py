"""The choice of a beam search, on the device and without looking at it: of all continuations of a request's texts by
one token the likeliest, as many as there are texts.

As `generate(num_beams=k)` of transformers chooses while no text ends: a text's score is the sum of the log
probabilities of its tokens, and the texts come back in the order of their scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cbengine.sequence import Sequence

Ints = npt.NDArray[np.int32]


class Ranked(NamedTuple):
    """What a step makes of the texts of its searches, row by row: int32 [rows] each, as they lie one after the other in
    a step's results.
    """

    tokens: Ints  # -1, for all texts of a search, where the logits of one were not numbers
    parents: Ints  # whose text the token continues: place among the texts of the search
    scores: Ints  # the bits of a float32

    @classmethod
    def of(cls, results: Ints) -> Ranked:
        return cls(*results.reshape(len(cls._fields), -1))


def rank(logits: Tensor, scores: Tensor, beams: int) -> Tensor:
    """Logits float32 [S, V] and the scores of the texts before [S], of which every `beams` are a search -> the arrays
    of `Ranked`, one after the other: int32 [3 S].
    """
    vocab = logits.shape[1]
    scored = (logits.log_softmax(dim=-1) + scores[:, None]).view(-1, beams * vocab)
    best, at = scored.topk(beams)  # a NaN is larger than all
    tokens = (at % vocab).masked_fill(best.isnan().any(dim=-1, keepdim=True), -1)
    return torch.stack((tokens.int(), (at // vocab).int(), best.view(torch.int32))).view(-1)


class Choice(NamedTuple):
    """What a step makes of the texts of one search."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


def choices(results: Ints, beams: int) -> list[Choice]:
    """The results of a step, search by search."""
    tokens, parents, scores = (column.reshape(-1, beams) for column in Ranked.of(results))
    columns = zip(tokens.tolist(), parents.tolist(), scores.view(np.float32).tolist(), strict=True)
    return [Choice(*column) for column in columns]


def go_on(texts: list[Sequence], choice: Choice) -> None:
    """Every text of a search becomes what was chosen for it."""
    before = [sequence.outputs for sequence in texts]
    for sequence, token, parent, score in zip(texts, *choice, strict=True):
        sequence.go_on(before[parent], token, score)
