"""What the listed rows of a step come to, once they are promised."""

from __future__ import annotations

from typing import Final

from cbsim.policy.request import RequestSpec
from cbsim.policy.value import value


@value(init=False)
class Promised:
    """Who decodes from now on, whose last token is sampled; query tokens, blocks of the tables, new ones among them."""

    joined: Final[list[RequestSpec]]
    ends: Final[list[RequestSpec]]
    tokens: Final[int]
    table_blocks: Final[int]
    new_blocks: Final[int]

    def __init__(
        self,
        joined: list[RequestSpec],
        ends: list[RequestSpec],
        tokens: int,
        table_blocks: int,
        new_blocks: int,
    ) -> None:
        self.joined = joined
        self.ends = ends
        self.tokens = tokens
        self.table_blocks = table_blocks
        self.new_blocks = new_blocks


NOTHING = Promised([], [], 0, 0, 0)
