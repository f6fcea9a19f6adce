"""Small values that are made for every step, and attributes that tell the compiler about classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["mypyc_attr", "replace", "running", "value"]

V = TypeVar("V")
COMPILED = not str(getattr(find_spec("cbsim.policy.request"), "origin", "")).endswith(".py")


def running() -> str:
    """Return which core runs: `compiled` by mypyc, or `python`."""
    return "compiled" if COMPILED else "python"


def replace(old: V, **changes: Any) -> V:
    """Return a value with other fields; the type checker does not know those that an `__init__` makes."""
    return dataclasses.replace(old, **changes)  # type: ignore[type-var]


if TYPE_CHECKING:
    from dataclasses import dataclass as value

    from mypy_extensions import mypyc_attr
else:
    T = TypeVar("T", bound=type)

    def value(*, frozen: bool = False, init: bool = True, eq: bool = True) -> Callable[[T], T]:
        """A dataclass that the type checker takes for frozen, or one whose fields are the parameters of its own
        `__init__`, which the compiler compiles. Nothing checks at run time: to make a frozen one takes five times as
        long. A compiled class has slots of its own, and knows its fields.
        """
        assert frozen or not init

        def decorated(cls: T) -> T:
            if not init:
                names = getattr(cls, "__mypyc_attrs__", None) or [*signature(cls.__init__).parameters][1:]
                cls.__annotations__ = dict.fromkeys(names, Any)
            return dataclasses.dataclass(slots=not COMPILED, init=init, eq=eq, unsafe_hash=eq)(cls)

        return decorated

    def mypyc_attr(**attributes: Any) -> Callable[[T], T]:
        """Return the class unchanged; only the compiler reads the attributes."""
        assert attributes
        return lambda cls: cls
