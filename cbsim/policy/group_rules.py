"""What vLLM 0.33 does with the blocks of one group of layers: what it gives up, counts and keeps for later prompts."""

from __future__ import annotations

from collections.abc import Sequence

from cbsim.policy.groups import LayerGroup, Sight
from cbsim.policy.layer_groups import units

NEVER = 1 << 60
EVERY_HIT = None  # retention: every prefix of a known prompt that could be found is


class GroupRule:
    """A group of a cache whose hits are multiples of `unit` tokens. `most` blocks are what one request holds of it at
    most, if all its tokens number `longest` and steps in flight compute `in_flight` of them; a lookup needs a run of
    `run` cached blocks, if the group is a sliding one.
    """

    def __init__(self, group: LayerGroup, unit: int, retention: int | None, in_flight: int, longest: int) -> None:
        self.group = group
        self.attention = group.attention
        self.block_size = size = group.block_size
        self.unit = unit
        self.retention = retention
        span, sight = self.attention.span, self.attention.sight
        self.sliding = sight is Sight.SLIDING
        self.full = sight is Sight.FULL
        self.run = self.blocks_for(span - 1) if self.sliding else 0
        if self.full:
            self.most = -(-longest // size)
        elif self.sliding:
            self.most = self.blocks_for(min(span - 1 + in_flight, longest)) + 1
        else:
            self.most = self.blocks_for(min(span + in_flight, longest))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def gone(self, computed: int) -> int:
        """Leading blocks that nobody sees any more once so many tokens are computed."""
        return self.attention.gone(computed) // self.block_size

    def goes_at(self, block: int) -> int:
        """Tokens computed from which on nobody sees a block any more."""
        end, span = (block + 1) * self.block_size, self.attention.span
        if self.full:
            return NEVER
        return end + span - 1 if self.sliding else -(-end // span) * span

    def capped(self, tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most at a time."""
        return min(self.blocks_for(tokens), self.most)

    def keeps(self, block: int, prompt: int, junction: int) -> bool:
        """Is a full block kept for later prompts? Of a sliding group only what a lookup could end with: the run before
        the place where the same prompt would resume, and before a junction; and the runs before every `retention`
        tokens.
        """
        if not self.sliding:
            return True
        size, run, unit, retention = self.block_size, self.run, self.unit, self.retention
        if retention is EVERY_HIT or retention > 0:
            segment = (unit if retention is EVERY_HIT else retention) // size
            if run >= segment or block % segment >= segment - run:
                return True
        if retention is EVERY_HIT:
            return False
        end = (prompt - 1) // unit * (unit // size)
        if end - run <= block < end:
            return True
        end = junction // unit * (unit // size)
        return junction > 0 and end - run <= block < end


def rules(groups: Sequence[LayerGroup], *, retention: int | None, in_flight: int, longest: int) -> list[GroupRule]:
    """Those of all groups of a cache. Chunks are whole blocks: a hit begins with one."""
    unit = units(groups).prefix
    assert not any(group.attention.sight is Sight.CHUNKED and group.attention.span % unit for group in groups), "chunks"
    return [GroupRule(group, unit, retention, in_flight, longest) for group in groups]
