"""Overrides of a scenario's fields, `a.b=c`, applied to the plain values of its file before they are checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cbsim.errors import ScenarioError
from cbsim.scenario import shapes
from cbsim.scenario.documents import Document, PathParts, parse, split
from cbsim.scenario.fields import By, Frozen, cut, shown


class Defaults:
    """The values of fields that a file leaves out. `make` is called once one of them is needed; parts whose kind an
    override has changed have none.
    """

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._changed: list[PathParts] = []

    def at(self, path: PathParts) -> Any:
        """Return the value at `path`, or None if there is none."""
        if any(path[: len(changed)] == changed for changed in self._changed):
            return None
        return copy.deepcopy(_at(self._make(), path))

    def drop(self, path: PathParts) -> None:
        self._changed.append(path)


def apply(
    document: Document, overrides: Sequence[str], part: type[Frozen], make: Callable[[], dict[str, Any]], base: Path
) -> Document:
    """Return the document of a `part` with the overrides applied in order, those that choose a kind before the rest.

    Parts of the path to a field that the file leaves out are taken from the defaults, unless their kind has changed.
    """
    written = [(*parsed(override), override) for override in overrides]
    written.sort(key=lambda entry: union_at(part, entry[0]) is None)
    data, defaults = copy.deepcopy(document.data), Defaults(make)
    for path, value, override in written:
        if len(path) > 1 and path[0] in ("model", "hardware"):
            _spell_out(data, str(path[0]), base)
        union = union_at(part, path)
        if union is None:
            assign(data, defaults, path, value, override)
        else:
            _choose(data, defaults, path, value, override, union)
    return Document(document.file, document.root, data, tuple((path, override) for path, _, override in written))


def union_at(part: type[Frozen], path: PathParts) -> By | None:
    """Return the union whose kind the field at `path` of a `part` chooses; None if it chooses none."""
    members: list[type[BaseModel]] = [part]
    union: By | None = None
    for name in path[:-1]:
        field = next((member.model_fields[name] for member in members if name in member.model_fields), None)
        union = next((mark for mark in field.metadata if isinstance(mark, By)), None) if field else None
        members = list(union.members.values()) if union else []
    return union if union is not None and union.field == path[-1] else None


def parsed(override: str) -> tuple[PathParts, Any]:
    """Return path and value of `a.b=c`; the value is YAML. Raises ScenarioError."""
    dotted, equals, value = override.partition("=")
    if not equals or not all(dotted.strip().split(".")):
        bound = "expected field=value, such as kv_cache.block_size=32"
        raise ScenarioError(f"--set {cut(override)}: {bound}", value=override, bound=bound)
    return split(dotted.strip()), parse(value, f"--set {cut(override)}", lines=False)


def assign(data: Any, defaults: Defaults, path: PathParts, value: Any, override: str) -> None:
    """Set `path` in `data`, taking missing parts of the path from `defaults`. Raises ScenarioError."""
    for depth, step in enumerate(path):
        if isinstance(data, list):
            if not (isinstance(step, int) and step < len(data)):
                bound = f"expected a position from 0 to {len(data) - 1}"
                raise ScenarioError(f"--set {cut(override)}: got {shown(step)}, {bound}")
        elif not isinstance(data, dict):
            raise ScenarioError(f"--set {cut(override)}: {shown(data)} has no field {cut(str(step), 60)}")
        if depth == len(path) - 1:
            data[step] = value
        elif isinstance(data, dict) and data.get(step) is None:
            usual = defaults.at(path[: depth + 1])
            data[step] = usual if isinstance(usual, dict | list) else {}
        data = data[step]


def _choose(data: Any, defaults: Defaults, path: PathParts, name: Any, override: str, union: By) -> None:
    """Make the part at `path` one of kind `name`: fields of the file that this kind does not have are dropped."""
    member, present = union.member(str(name)), _at(data, path)
    if name != (defaults.at(path) if present is None else present):
        defaults.drop(path[:-1])
    assign(data, defaults, path, name, override)
    part = _at(data, path[:-1])
    for unknown in [key for key in part if member and key not in member.model_fields]:
        del part[unknown]


def _at(values: Any, path: PathParts) -> Any:
    for step in path:
        values = values.get(step) if isinstance(values, dict) else None
    return values


def _spell_out(data: dict[str, Any], field: str, base: Path) -> None:
    """Replace a model's or GPU's name by its fields, so that one of them can be overridden."""
    name = data.get(field)
    if isinstance(name, str):
        try:
            data[field] = shapes.named(field, name, base).model_dump(mode="json")
        except ScenarioError as error:
            raise ScenarioError(f"{field}: {error}") from None
