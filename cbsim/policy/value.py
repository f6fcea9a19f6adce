"""Small values that are made for every step, and what the compiler is told of classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["mypyc_attr", "running", "value"]

COMPILED = not str(getattr(find_spec("cbsim.policy.request"), "origin", "")).endswith(".py")


def running() -> str:
    """Which core runs: `compiled` by mypyc, or `python`."""
    return "compiled" if COMPILED else "python"


if TYPE_CHECKING:
    from dataclasses import dataclass as value

    from mypy_extensions import mypyc_attr
else:
    T = TypeVar("T", bound=type)

    def value(*, frozen: bool = False, init: bool = True, eq: bool = True) -> Callable[[T], T]:
        """A dataclass that the type checker takes for frozen, or one of Final fields with an `__init__` of its own,
        which the compiler compiles. At run time nobody looks: to make a frozen one takes five times as long. A
        compiled class has slots of its own.
        """
        assert frozen or not init
        return dataclass(slots=not COMPILED, init=init, eq=eq, unsafe_hash=eq)

    def mypyc_attr(**attributes: Any) -> Callable[[T], T]:
        """What the compiler is told of a class; nothing at run time."""
        assert attributes
        return lambda cls: cls
