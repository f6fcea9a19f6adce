"""The form in which a device receives a step: a few int32 arrays, one after the other in one buffer.

The layout is defined here alone; code that builds, copies, computes or warms up a step takes the arrays by name. Table
updates come last, so that the inputs of a captured graph, which have none, are the head of every step of its size.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int32]
T = TypeVar("T")
Buffer = TypeVar("Buffer", Ints, Tensor)


class Arrays(NamedTuple, Generic[T]):
    """A step's arrays, or a property of each of them, in the order in which they lie."""

    slots: T  # [rows]: each row's line of the block tables
    kv_tokens: T  # [rows]: cached tokens, those of this step included
    starts: T  # [rows + 1]: first query token of each row
    uniforms: T  # [sampling rows], if random: the bits of a float32 in [0, 1); none with speculation
    seeds: T  # [2 sampling rows], if random, with speculation: the bits of an int64
    temperature: T  # [sampling rows], if random: the bits of a float32; 0: greedy
    top_k: T  # [sampling rows], if random; 0: all tokens
    top_p: T  # [2 sampling rows], if random: the bits of a float64
    scores: T  # [sampling rows], if beams: the bits of a float32, of the text so far
    first: T  # [rows], if padded: tokens before it are padding
    sampled: T  # [further]: the sampling rows behind the decodes
    verifies: T  # [sampling rows], with speculation: the drafts at each one's end
    tokens: T  # [tokens]: ids; negative if the host has not seen the token (sequence.CARRIED, device.drafts)
    places: T  # [updates]: flat indices into the block tables
    blocks: T  # [updates]: the blocks written there


class Ranked(NamedTuple):
    """A step's results where beams are ranked: int32 [rows] each, one after the other."""

    tokens: Ints  # -1, for all beams of a search, where the logits of one were not numbers
    parents: Ints  # the beam that the token continues, as an index within the search
    scores: Ints  # the bits of a float32

    @classmethod
    def of(cls, results: Ints) -> Self:
        return cls(*results.reshape(len(cls._fields), -1))


class Header(NamedTuple):
    """The lengths of a step's arrays. The first `decodes` rows have one query token each and all sample; `further` of
    the other rows sample. `live` of the decodes are real, the rest pads the step to a captured size. `random`: whether
    some sampling row draws its token, so that every one has settings; the others are greedy. `beams`: that
    many consecutive sampling rows are the beams of one search (sampling.rank); 0 without beam search. `most_drafts` are
    those of a row, 0 without speculation; `verified` those of all rows, `proposed` those to propose behind each row
    that samples.
    """

    rows: int
    decodes: int
    live: int
    tokens: int
    longest: int
    further: int
    updates: int
    random: bool
    padded: bool
    beams: int = 0
    most_drafts: int = 0
    verified: int = 0
    proposed: int = 0

    @property
    def sampling(self) -> int:
        return self.decodes + self.further

    @property
    def results(self) -> int:
        """The number of int32 values returned: a token of each sampling row, or a beam search's arrays, or with
        speculation the tokens of each row, `drafts.BLANK` behind the last, and then the drafts proposed behind each.
        """
        return self.sampling * (len(Ranked._fields) if self.beams else self.most_drafts + 2 if self.most_drafts else 1)

    @property
    def plain(self) -> bool:
        """Whether a step has the form of a captured one: decode rows alone; with speculation rows that all verify as
        many drafts as a row may have, and get as many.
        """
        drafts = self.most_drafts
        full = self.tokens - self.rows == self.verified == self.rows * drafts and self.proposed == drafts
        return (full if drafts else self.decodes == self.rows) and not (self.padded or self.beams)

    @property
    def lengths(self) -> Arrays[int]:
        drawn = self.sampling if self.random else 0
        return Arrays(
            slots=self.rows,
            kv_tokens=self.rows,
            starts=self.rows + 1,
            uniforms=0 if self.most_drafts else drawn,
            seeds=2 * drawn if self.most_drafts else 0,
            temperature=drawn,
            top_k=drawn,
            top_p=2 * drawn,
            scores=self.sampling if self.beams else 0,
            first=self.rows if self.padded else 0,
            sampled=self.further,
            verifies=self.sampling if self.most_drafts else 0,
            tokens=self.tokens,
            places=self.updates,
            blocks=self.updates,
        )

    @property
    def size(self) -> int:
        """The size of the whole step in int32 values."""
        return int(spans(self)[-1].stop)


@lru_cache(maxsize=4096)
def spans(header: Header) -> tuple[slice, ...]:
    """Return the slice of each array. The result is cached, because undisturbed decode steps are alike."""
    edges = (0, *accumulate(header.lengths))
    return tuple(slice(low, high) for low, high in pairwise(edges))


def arrays(buffer: Buffer, header: Header) -> Arrays[Buffer]:
    """Return the views of `buffer` that `header` describes."""
    return Arrays(*[buffer[span] for span in spans(header)])
