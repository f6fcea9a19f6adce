"""Overrides of a scenario's fields, `a.b=c`, applied to the plain values of its file before they are checked."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from cbsim.errors import ScenarioError, beginning
from cbsim.scenario import shapes
from cbsim.scenario.documents import Document, PathParts, parse, split, value_at
from cbsim.scenario.fields import By, Frozen, cut, shown

NOT_FINITE = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}  # in JSON, in YAML
Changes = Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""Fields that are otherwise: `{"loop.mode": "async"}`, or as `--set` has them, `["loop.mode=async"]`."""


def apply(
    document: Document, overrides: Sequence[str], part: type[Frozen], make: Callable[[], dict[str, Any]], base: Path
) -> Document:
    """Return the document of a `part` with the overrides applied in order, but those that choose a kind before those of
    other fields of that part.

    Parts of the path to a field that the file leaves out are taken from the defaults, unless their kind has changed or
    an override made them null; `make` is called once one is needed. Fields of the file that a chosen kind does not have
    are dropped.
    """
    written = _ordered(overrides, part)
    data, changed = copy.deepcopy(document.data), list[PathParts]()

    def usual(path: PathParts) -> Any:
        return None if any(path[: len(kind)] == kind for kind in changed) else copy.deepcopy(value_at(make(), path))

    for path, value, override in written:
        for at, name in enumerate(path[:-1]):
            if name in shapes.NAMED and path[:at][-1:] in ((), ("server",), ("drafter",)):
                _spell_out(value_at(data, path[:at]), str(name), base)
        union, present = union_at(part, path), value_at(data, path)
        if value is None:
            changed.append(path)
        if union and value != (usual(path) if present is None else present):
            changed.append(path[:-1])
        assign(data, path, value, override, usual)
        if union and (member := union.member(str(value))):
            chosen = value_at(data, path[:-1])
            for unknown in chosen.keys() - member.model_fields:
                del chosen[unknown]
    return Document(document.file, document.root, data, tuple((path, override) for path, _, override in written))


def _ordered(overrides: Sequence[str], part: type[Frozen]) -> list[tuple[PathParts, Any, str]]:
    """Return path, value and text of overrides in the order in which they apply: one that chooses a kind comes directly
    behind the last one that sets the part, or one around it, as a whole or chooses its kind.
    """
    ordered: list[tuple[PathParts, Any, str]] = []
    for override in overrides:
        path, value = parsed(override)
        at = len(ordered)
        if union_at(part, path):
            roots = [its[:-1] if union_at(part, its) else its for its, *_ in ordered]
            at = max((n for n, root in enumerate(roots, 1) if root == path[: len(root)]), default=0)
        ordered.insert(at, (path, value, override))
    return ordered


def union_at(part: type[Frozen], path: PathParts) -> By | None:
    """Return the union whose kind the field at `path` of a `part` chooses; None if it chooses none."""
    members: list[type[BaseModel]] = [part]
    union: By | None = None
    for name in path[:-1]:
        if isinstance(name, int):  # an entry of a list: the members are those of all entries
            continue
        field = next((member.model_fields[name] for member in members if name in member.model_fields), None)
        union = next((mark for mark in field.metadata if isinstance(mark, By)), None) if field else None
        members = list(union.members.values()) if union else _models(field.annotation, part) if field else []
    return union if union is not None and union.field == path[-1] else None


def _models(hint: Any, part: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the models that an annotation names; plain fields are those of a `part` (fleet.Pool.server)."""
    if hint == dict[str, Any]:
        return [part]
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [model for each in get_args(hint) for model in _models(each, part)]


def written(changes: Changes) -> list[str]:
    """Return changes in the form of `--set`. Raises ScenarioError for a value that a YAML file cannot hold."""
    if isinstance(changes, Mapping):
        dumps = partial(json.dumps, ensure_ascii=False)  # YAML knows no pairs of surrogates
        texts = ((name, dumps(value, default=partial(_plain, name))) for name, value in changes.items())
        return [f"{name}={NOT_FINITE.get(text, text)}" for name, text in texts]
    if isinstance(changes, Sequence) and not isinstance(changes, str):
        parts = [[part] if isinstance(part, str) else written(part) for part in changes]
        return [text for part in parts for text in part]
    bound = 'expected fields, {"loop.mode": "async"}, or a list of texts'
    raise ScenarioError(f"changes: got {shown(changes)}, {bound}", field="changes", value=changes, bound=bound)


def _plain(name: str, value: Any) -> Any:
    """Convert a NumPy scalar to a Python value. Raises ScenarioError for any other object."""
    try:
        return value.item()
    except (AttributeError, ValueError):
        bound = "expected what a YAML file can hold"
        raise ScenarioError(f"{name}: got {shown(value)}, {bound}", field=name, value=value, bound=bound) from None


def fields_of(changes: Changes) -> dict[str, Any]:
    """Return changes as fields: dotted names and their values. Raises ScenarioError."""
    return {".".join(map(str, path)): value for path, value in map(parsed, written(changes))}


def parsed(override: str) -> tuple[PathParts, Any]:
    """Return path and value of `a.b=c`; the value is YAML. Raises ScenarioError."""
    dotted, equals, value = override.partition("=")
    if not equals or not all(dotted.strip().split(".")):
        bound = "expected field=value, such as kv_cache.block_size=32"
        raise ScenarioError(f"--set {cut(override)}: {bound}", value=override, bound=bound)
    return split(dotted.strip()), copy.deepcopy(_value(value, f"--set {cut(override)}"))


@lru_cache(maxsize=1024)  # points of a sweep have most values in common
def _value(text: str, source: str) -> Any:
    return parse(text, source, lines=False)


def assign(
    data: Any, path: PathParts, value: Any, override: str, usual: Callable[[PathParts], Any] = lambda _: None
) -> None:
    """Set `path` in `data`, taking missing parts of the path from `usual`. Raises ScenarioError."""
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
            missing = usual(path[: depth + 1])
            data[step] = missing if isinstance(missing, dict | list) else {}
        data = data[step]


def _spell_out(data: Any, field: str, base: Path) -> None:
    """Replace a model's or GPU's name by its fields, so that one of them can be overridden."""
    name = value_at(data, (field,))
    if isinstance(name, str):
        with beginning(field, field=field):
            data[field] = shapes.NAMED[field](name, base).model_dump(mode="json")
