"""How large a scheduler lets steps and requests become: what executors and graphs are made for."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """How large a scheduler's steps and requests can be. None: no limit of its own."""

    seats: int | None = None  # requests that run at a time
    rows: int | None = None  # requests in a step
    tokens: int | None = None  # query tokens in a step
    longest: int | None = None  # tokens of a sequence: what is longer is refused, or ends there
    graphs: int | None = None  # query tokens of the largest CUDA graph
    filled: bool = False  # are all rows of a step computed at the width of its longest, by tokens that nobody keeps?
    table: int | None = None  # blocks of the longest table, where it may have more room than its sequence needs
