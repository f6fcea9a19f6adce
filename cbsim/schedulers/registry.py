"""The registry of schedulers: ours by name, a user's own by entry point or as `package.module:KIND`."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from cbsim.errors import in_line
from cbsim.policy.kind import SchedulerKind

Kind = SchedulerKind[Any, Any]
GROUP = "cbsim.schedulers"  # of entry points that name a `SchedulerKind` each


class Named(Protocol):
    """A kind as the registry knows it."""

    @property
    def name(self) -> str: ...


K = TypeVar("K", bound=Named)


class Ours(UserDict[str, K]):
    """Our kinds by name. One that is given as `module:KIND` is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        kind = super().__getitem__(name)
        return EntryPoint(name, kind, "").load() if isinstance(kind, str) else kind


class KindError(ValueError):
    """A kind that is missing, or is none. The message gives the name looked for and what went wrong."""


class Registry(Generic[K]):
    """The kinds of one sort, a `what`: ours by name, those of installed packages by entry points of `group`."""

    def __init__(self, what: str, group: str, of: type[K], ours: Mapping[str, K]) -> None:
        self._what, self._group, self._of, self._ours = what, group, of, ours

    def find(self, name: str) -> K:
        """Return the kind of that name. Raises KindError."""
        if name in self._ours:
            return self._ours[name]
        if ":" in name:
            return self._loaded(EntryPoint(name, name, self._group))
        for entry in entry_points(group=self._group, name=name):
            return self._loaded(entry)
        raise KindError(f"no {self._what} {name!r}")

    def names(self) -> list[str]:
        """Return the names of all kinds: ours, then those of installed packages."""
        installed = {entry.name for entry in entry_points(group=self._group)}
        return [*self._ours, *sorted(installed - self._ours.keys())]

    def _loaded(self, entry: EntryPoint) -> K:
        module, _, attribute = entry.value.partition(":")
        try:
            kind: Any = import_module(module)
            for part in attribute.split("."):
                kind = getattr(kind, part)
        except (Exception, SystemExit) as error:  # a user's own code may raise anything
            raise KindError(f"{entry.value!r} cannot be loaded: {in_line(error)}") from error
        if not isinstance(kind, self._of):
            raise KindError(f"{entry.value!r} is a {type(kind).__name__}, expected a {self._of.__name__}")
        if not isinstance(kind.name, str) or not re.fullmatch(r"[\w.-]+", kind.name):
            raise KindError(f"{entry.value!r} has the name {kind.name!r}, expected letters, digits, dots, - and _")
        return kind


HOMES = {
    "sarathi.scheduler": ("faster_transformer", "orca", "sarathi", "simple_chunking", "vllm_v0"),
    "sglang.scheduler": ("sglang",),
    "simple.beam": ("beam",),
    "simple.fcfs": ("contiguous", "dynamic_padded", "static", "tgi"),
    "transformers.scheduler_523": ("transformers_fifo", "transformers_prefill_first"),
    "trtllm.scheduler": ("trtllm",),
    "vllm.scheduler": ("vllm",),
}
OURS = Ours[Any](sorted((name, f"cbsim.schedulers.{home}:{name.upper()}") for home in HOMES for name in HOMES[home]))
SCHEDULERS = Registry[Kind]("scheduler", GROUP, SchedulerKind, OURS)
find, names = SCHEDULERS.find, SCHEDULERS.names
