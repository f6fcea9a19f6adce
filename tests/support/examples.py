"""How many random cases a property test draws."""

from __future__ import annotations

from hypothesis import settings

from cbsim.policy import value


def cases(count: int) -> int:
    """All of them of the Python core, a third of the compiled one: its source is the same and has met them all."""
    return count if value.running() == "python" else -(-count // 3)


def examples(count: int) -> settings:
    """Settings of a property test with so many cases, as above."""
    return settings(max_examples=cases(count))
