"""Overrides of a scenario's fields, `a.b=c`, applied to the plain values of its file before they are checked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbsim.scenario import shapes
from cbsim.scenario.costs import cost_by
from cbsim.scenario.demand import arrivals_by, workload_by
from cbsim.scenario.documents import Document, PathParts, parse, split
from cbsim.scenario.fields import By, ScenarioError, cut, shown
from cbsim.scenario.schedulers import SchedulerUnion

UNIONS: dict[PathParts, By | SchedulerUnion] = {
    ("scheduler",): SchedulerUnion(),
    ("cost",): cost_by,
    ("workload",): workload_by,
    ("workload", "arrivals"): arrivals_by,
}


def apply(document: Document, overrides: Sequence[str], defaults: dict[str, Any], base: Path) -> Document:
    """The document with the overrides applied in order, those that choose a kind before the others.

    What the file leaves out on the way to a field is taken from `defaults`, unless its kind has changed.
    """
    given = [(*parsed(text), text) for text in overrides]
    given.sort(key=lambda entry: not _chooses(entry[0]))
    data, defaults = copy.deepcopy(document.data), copy.deepcopy(defaults)
    for path, value, text in given:
        if len(path) > 1 and path[0] in ("model", "hardware"):
            _spell_out(data, str(path[0]), base)
        if _chooses(path):
            _choose(data, defaults, path, value, text)
        else:
            assign(data, defaults, path, value, text)
    written = tuple((path, text) for path, _, text in given)
    return Document(document.file, document.root, data, written)


def parsed(text: str) -> tuple[PathParts, Any]:
    """Path and value of `a.b=c`; the value is YAML."""
    dotted, equals, value = text.partition("=")
    if not equals or not all(dotted.strip().split(".")):
        bound = "expected field=value, such as kv_cache.block_size=32"
        raise ScenarioError(f"--set {cut(text)}: {bound}", value=text, bound=bound)
    return split(dotted.strip()), parse(value, f"--set {cut(text)}", lines=False)


def assign(data: Any, defaults: Any, path: PathParts, value: Any, text: str) -> None:
    """Set `path` in `data`, taking what is missing on the way from `defaults`."""
    head, rest = path[0], path[1:]
    below = defaults.get(head) if isinstance(defaults, dict) else None
    if isinstance(data, list):
        if not (isinstance(head, int) and head < len(data)):
            raise ScenarioError(f"--set {cut(text)}: got {shown(head)}, expected a position from 0 to {len(data) - 1}")
    elif not isinstance(data, dict):
        raise ScenarioError(f"--set {cut(text)}: {shown(data)} has no field {cut(str(head), 60)}")
    elif rest and data.get(head) is None:
        data[head] = below if isinstance(below, dict | list) else {}
    if rest:
        assign(data[head], below, rest, value, text)
    else:
        data[head] = value


def _chooses(path: PathParts) -> bool:
    union = UNIONS.get(path[:-1])
    return union is not None and union.field == path[-1]


def _choose(data: Any, defaults: Any, path: PathParts, name: Any, text: str) -> None:
    """Make the part at `path` one of kind `name`: fields of the file that this kind does not have are dropped."""
    field, known = path[-1], UNIONS[path[:-1]].fields_of(str(name))
    usual = _at(defaults, path[:-1])
    if isinstance(usual, dict) and usual.get(field) != name:
        usual.clear()
    assign(data, defaults, path, name, text)
    part = _at(data, path[:-1])
    for stranger in [key for key in part if known and key not in known]:
        del part[stranger]


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
