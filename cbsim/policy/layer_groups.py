"""From layers to groups, as vLLM 0.33 plans its cache: layers that see alike share block tables, groups share blocks.

A block is so many pages, one for each layer of a group; every group has as many layers as the others, or fewer and then
leaves pages unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from typing import NamedTuple

from cbsim.policy.groups import FULL, Attention, LayerGroup

NEAR = 1.5  # kinds of layer whose numbers differ by less make one group each


class LayerKind(NamedTuple):
    """What a layer sees, and the bytes that it keeps of `block_size` tokens."""

    attention: Attention
    page_bytes: int


class Grouping(NamedTuple):
    """All groups in order, and the bytes of one block."""

    groups: tuple[LayerGroup, ...]
    block_bytes: int


class Units(NamedTuple):
    """`prefix`: what is found in the cache is a multiple of it. `hashed`: content is named in pieces of it. Tokens."""

    prefix: int
    hashed: int


def units(groups: Sequence[LayerGroup], *, caching: bool = True) -> Units:
    """Those of a cache of these groups."""
    sizes = [group.block_size for group in groups]
    return Units(lcm(*sizes), gcd(*sizes) if caching else lcm(*sizes))


def grouped(layers: Sequence[LayerKind], block_size: int, *, together: bool = False) -> Grouping:
    """The groups of these layers. `together`: beside layers that see all, the others are kept as if they did, too.
    Raises ValueError for page sizes that are no multiples of each other.
    """
    if together and any(layer.attention == FULL for layer in layers):
        layers = [LayerKind(FULL, layer.page_bytes) for layer in layers]
    if len({layer.attention for layer in layers}) == 1:
        whole = LayerGroup(layers[0].attention, tuple(range(len(layers))), block_size)
        return Grouping((whole,), sum(layer.page_bytes for layer in layers))
    page_bytes = max(layer.page_bytes for layer in layers)
    buckets: dict[tuple[Attention, int], list[int]] = {}
    for index, layer in enumerate(layers):
        if page_bytes % layer.page_bytes:
            raise ValueError(f"pages of {layer.page_bytes} bytes beside pages of {page_bytes}: no multiple")
        tokens = block_size * page_bytes // layer.page_bytes
        buckets.setdefault((layer.attention, tokens), []).append(index)
    fewest, most = (of(len(bucket) for bucket in buckets.values()) for of in (min, max))
    size = most if most < NEAR * fewest else fewest
    groups: list[LayerGroup] = []
    for (attention, tokens), bucket in buckets.items():
        count = -(-len(bucket) // size)
        groups += [LayerGroup(attention, tuple(bucket[first::count]), tokens) for first in range(count)]
    return Grouping(tuple(groups), size * page_bytes)
