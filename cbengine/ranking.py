"""The choice of a beam search, on the device without a synchronisation: the likeliest continuations of a request's
beams by one token, as many as there are beams.

The choice is that of `generate(num_beams=k)` of transformers while no beam ends: a beam's score is the sum of its
tokens' log probabilities, and beams are returned in the order of their scores.
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
    """The ranked continuations of a step's beams, row by row: int32 [rows] each, as they lie one after the other in a
    step's results.
    """

    tokens: Ints  # -1, for all beams of a search, where the logits of one were not numbers
    parents: Ints  # the beam that the token continues, as an index within the search
    scores: Ints  # the bits of a float32

    @classmethod
    def of(cls, results: Ints) -> Ranked:
        return cls(*results.reshape(len(cls._fields), -1))


def rank(logits: Tensor, scores: Tensor, beams: int) -> Tensor:
    """Rank logits float32 [S, V] with the beams' scores so far [S], of which every `beams` are a search; return the
    arrays of `Ranked`, one after the other: int32 [3 S].
    """
    vocab = logits.shape[1]
    scored = (logits.log_softmax(dim=-1) + scores[:, None]).view(-1, beams * vocab)
    best, at = scored.topk(beams)  # topk ranks a NaN above all
    tokens = (at % vocab).masked_fill(best.isnan().any(dim=-1, keepdim=True), -1)
    return torch.stack((tokens.int(), (at // vocab).int(), best.view(torch.int32))).view(-1)


class Choice(NamedTuple):
    """The ranked continuations of one search's beams."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


def choices(results: Ints, beams: int) -> list[Choice]:
    """Return the results of a step, search by search."""
    tokens, parents, scores = (column.reshape(-1, beams) for column in Ranked.of(results))
    columns = zip(tokens.tolist(), parents.tolist(), scores.view(np.float32).tolist(), strict=True)
    return [Choice(*column) for column in columns]


def go_on(texts: list[Sequence], choice: Choice) -> None:
    """Replace every beam of a search by the continuation chosen for it."""
    before = [sequence.outputs for sequence in texts]
    for sequence, token, parent, score in zip(texts, *choice, strict=True):
        sequence.go_on(before[parent], token, score)
