"""What a set of measured tables answers: kernel times of one GPU, of whole steps, all layers counted."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Attention(NamedTuple):
    """What attention has to do in a step.

    The chunks are taken together as one of `prefill` query tokens behind `cached` tokens of context; `decodes` rows
    read `context` cached tokens on average and the longest of them `longest`.
    """

    prefill: float
    cached: float
    decodes: int
    context: float
    longest: float


class Tables(Protocol):
    """Nanoseconds of kernels on one GPU of a tensor-parallel group, as measured; nothing is added to them."""

    def linear_ns(self, tokens: int) -> float:
        """All that goes with the number of query tokens: embedding, linear layers, and what small kernels there are."""

    def head_ns(self, rows: int) -> float:
        """The output head and the sampler, of `rows` rows."""

    def attention_ns(self, work: Attention, *, skew: bool) -> float:
        """Attention in all layers; with `skew`, as far as measured, the wait for the longest of the decoding rows."""

    def experts_ns(self, tokens: int, ranks: int) -> float:
        """Mixture-of-experts blocks of all layers, on one of `ranks` GPUs that share the experts and bring `tokens`
        tokens each; 0 for a dense model.
        """
