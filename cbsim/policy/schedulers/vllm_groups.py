"""vLLM's layer groups, when a server starts: what they are, how long a sequence they can hold, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

from cbsim.policy.group_rules import rules
from cbsim.policy.groups import FULL, LayerGroup
from cbsim.policy.kind import SettingsError, Site
from cbsim.policy.layer_groups import Grouping, LayerKind, grouped


def sees_all(groups: Sequence[LayerGroup]) -> bool:
    """One group of layers that see the whole sequence, or nothing said of any: a plain cache."""
    return all(group.attention == FULL for group in groups) and len(groups) <= 1


def layer_groups(site: Site, *, together: bool) -> Grouping:
    """The groups of the site's model and the layers of a block; no groups if all layers see everything."""
    pattern = site.attention
    if all(one == FULL for one in pattern):
        return Grouping((), site.layers)
    layers = [LayerKind(pattern[layer % len(pattern)], 1) for layer in range(site.layers)]
    return grouped(layers, site.block_size, together=together)


def least_blocks(groups: Sequence[LayerGroup], in_flight: int, longest: int) -> int:
    """Blocks without which a server does not start: what one request of `longest` tokens holds at most."""
    return sum([rule.most for rule in rules(groups, retention=0, in_flight=in_flight, longest=longest)])


def longest(groups: Sequence[LayerGroup], in_flight: int, blocks: int, given: int | None, most: int) -> int:
    """The longest sequence: as given, or what so many blocks hold, at most `most`. Raises SettingsError."""
    if given is not None:
        needed = least_blocks(groups, in_flight, given)
        if needed > blocks:
            text = f"got {given}, which needs {needed:,} blocks in {len(groups)} layer groups, the cache has {blocks:,}"
            raise SettingsError("max_model_len", text)
        return given
    low, high = 0, most  # tokens that fit, and the most that are asked for
    while low < high:
        middle = (low + high + 1) // 2
        if least_blocks(groups, in_flight, middle) <= blocks:
            low = middle
        else:
            high = middle - 1
    if not low:
        needed = least_blocks(groups, in_flight, 1)
        raise SettingsError("max_model_len", f"one token needs {needed:,} blocks, the cache has {blocks:,}")
    return low
