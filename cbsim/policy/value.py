"""Small values that are made for every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

__all__ = ["value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:
    T = TypeVar("T", bound=type)

    def value(*, frozen: bool) -> Callable[[T], T]:
        """A dataclass that the type checker takes for frozen. At run time it has slots and nobody looks: to make a
        frozen one takes five times as long.
        """
        assert frozen
        return dataclass(slots=True, unsafe_hash=True)
