"""YAML files as users write them: read as plain values, whose errors are traced back to a line.

Their size is bounded: a short text can become neither many values nor a deep one, whatever its aliases expand to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from cbsim.errors import ScenarioError, UserError
from cbsim.files import read_text
from cbsim.scenario.fields import cut, near, shown

Part = TypeVar("Part", bound=BaseModel)
PathParts = tuple[str | int, ...]
MOST_COMPLAINTS = 20  # most mistakes of one file that an error lists


@dataclass(frozen=True, slots=True)
class Document:
    """The values of one YAML file, and its nodes, which know their lines. Values not read from YAML have no nodes and
    may all be from the line `at`, of which one mistake is listed. `overrides` are (path, text as given); mistakes raise
    `error_type`.
    """

    file: str
    root: Node | None
    data: dict[str, Any]
    overrides: tuple[tuple[PathParts, str], ...] = ()
    at: int | None = None
    error_type: type[UserError] = ScenarioError

    def line(self, path: PathParts) -> int | None:
        """Return the line, from 1, of the key at `path` or of the nearest one around it; None if there is none."""
        node, line = self.root, self.at
        for part in path:
            child = _child(node, part)
            if child is None:
                break
            key, node = child
            line = key.start_mark.line + 1
        return line

    def within(self, field: str) -> Document:
        """Return the document whose only field has these values; their lines stay."""
        root = self.root and MappingNode("", [(ScalarNode("", field, self.root.start_mark), self.root)])
        return replace(self, root=root, data={field: self.data})

    def checked(self, part: type[Part], base: Path | None = None) -> Part:
        """Return the values validated as a `part`; paths in them are relative to `base`. Raises `error_type`."""
        try:
            return part.model_validate(self.data, context={"base": base})
        except ValidationError as error:
            entries = [dict(entry) for entry in error.errors(include_url=False)]
            most = 1 if self.at else MOST_COMPLAINTS
            complaints = list(dict.fromkeys(map(self._complaint, entries[:most])))
            if len(entries) > most > 1:
                complaints.append(f"{self.file}: {len(entries) - most} more mistakes are not listed")
            raise self.error("\n".join(complaints), path_of(entries[0], self.data), wording(entries[0])) from None

    def bad(self, field: str, expected: str) -> UserError:
        """Return the error of a field that is not as expected."""
        reason = f"expected {expected}"
        message = f"{self.where((field,))}: {field}: got {shown(self.data.get(field))}, {reason}"
        return self.error(message, (field,), reason)

    def error(self, message: str, path: PathParts, reason: str) -> UserError:
        """Return `message` as an error of the field at `path`; `reason` is what is wrong with it."""
        return self.error_type(
            message,
            file=self.file,
            line=self.line(path),
            field=".".join(map(str, path)) or None,
            value=value_at(self.data, path),
            bound=reason.partition(", ")[2] if reason.startswith("got ") else reason,
        )

    def _complaint(self, entry: dict[str, Any]) -> str:
        path, reason = path_of(entry, self.data), wording(entry)
        where = self.where(path)
        dotted = ".".join(cut(str(part), 60) for part in path)
        return f"{where}: {dotted}: {reason}" if dotted else f"{where}: {reason}"

    def where(self, path: PathParts) -> str:
        """Return the override that set `path`, or else file and line."""
        place = tuple(map(str, path))
        for names, override in reversed(self.overrides):
            written = tuple(map(str, names))
            if place[: len(written)] == written or (place and written[: len(place)] == place):
                return f"--set {cut(override)}"
        line = self.line(path)
        return f"{self.file}:{line}" if line else self.file


def _child(node: Node | None, part: str | int) -> tuple[Node, Node] | None:
    """Return key and value of a mapping's field (merged ones come first), or an entry of a list twice, or None."""
    if isinstance(node, MappingNode):
        return next(((key, value) for key, value in reversed(node.value) if key.value == str(part)), None)
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None


def path_of(entry: dict[str, Any], data: Mapping[Any, Any] | None = None) -> PathParts:
    """Return the path of an entry of a ValidationError of `data`. Fields that stand for a list have no position."""
    path = tuple(part for part in entry["loc"] if not re.fullmatch(r"<.*>|\[key\]", str(part)))
    if data and path[1:] and isinstance(path[1], int) and isinstance(data.get(path[0]), Mapping):
        path = (path[0], *path[2:])
    field = entry.get("ctx", {}).get("field")
    return (*path, *split(field)) if field else path


def wording(entry: dict[str, Any]) -> str:
    """Return what is wrong with a value and what is expected, from one entry of a ValidationError."""
    kind, ctx, got = entry["type"], entry.get("ctx", {}), f"got {shown(entry['input'])}"
    if kind == "complaint":
        return str(ctx["message"])
    if kind == "value_error":
        return str(ctx["error"])
    if kind == "missing":
        return "is required"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", ctx["expected"]) or [ctx["expected"]]
        expected = f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]
        return f"{got}, expected {expected}{near(entry['input'], allowed)}"
    expected = _EXPECTED.get(kind)
    return f"{got}, {expected.format(**ctx)}" if expected else f"{got}, {entry['msg'].lower()}"


_EXPECTED = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "dict_type": "expected fields",
    "model_type": "expected fields",
    "none_required": "must be null",
    "finite_number": "expected a finite number",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "too_short": "needs at least {min_length} entries",
    "too_long": "needs at most {max_length} entries",
    "string_too_short": "needs at least {min_length} characters",
    "string_too_long": "needs at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
}


def read(path: Path) -> Document:
    """Read the YAML file at `path`, which must hold fields. Raises ScenarioError."""
    root, data = _parsed(read_text(path, most_bytes=MOST_BYTES), str(path))
    if not isinstance(data, dict):
        raise ScenarioError(f"{path}: got {shown(data)}, expected fields such as `name: value`")
    return Document(str(path), root, data)


def name_of(file: str, usual: str) -> str:
    """Return the name of what a file or folder defines: its own, in plain letters, or the `usual` one without any."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file)[:150].strip("-._") or usual


def parse(content: str, source: str, *, lines: bool = True) -> Any:
    """Parse YAML 1.2 text, in which 1e6 is a number, to plain values. Errors name the source, the line if `lines`."""
    return _parsed(content, source, lines=lines)[1]


def _parsed(content: str, source: str, *, lines: bool = True) -> tuple[Node | None, Any]:
    """Return the nodes and values of a text; both are None for an empty one."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Constructor = BoundedComposer, PlainConstructor
    try:
        root: Node | None = yaml.compose(content)
        return root, None if root is None else yaml.constructor.construct_document(root)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None and lines else ""
        problem = cut((error.problem or str(error)).splitlines()[0].partition(' with value "')[0])
        raise ScenarioError(f"{source}{line}: not valid YAML: {problem}") from None
    except (YAMLError, ValueError) as error:
        raise ScenarioError(f"{source}: not valid YAML: {cut(str(error).splitlines()[0])}") from None
    except RecursionError:
        raise ScenarioError(f"{source}: not valid YAML: nested too deeply") from None


def write(values: dict[str, Any]) -> str:
    """Return block-style YAML of plain values, keys in the order given."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 4096
    yaml.allow_unicode = True
    out = StringIO()
    yaml.dump(values, out)
    return out.getvalue()


def value_at(values: Any, path: PathParts) -> Any:
    """Return the value at a path in fields and lists, None if there is none."""
    for step in path:
        entry = isinstance(values, list) and isinstance(step, int) and step < len(values)
        values = values[step] if entry else values.get(step) if isinstance(values, dict) else None
    return values


def split(dotted: str) -> PathParts:
    """Split a dotted path: `a.0.b` -> ("a", 0, "b")."""
    return tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))


MOST_BYTES = 500_000
"""Largest YAML file, bytes."""
MOST_VALUES = 12_000
"""Most keys and values of a file, its aliases written out; a text counts as one more for every 100 characters."""
MOST_DEPTH = 40
"""Deepest nesting of values."""
TAGS = {"str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge"}
NAMES = {"int": "a whole number of at most 4,300 digits", "float": "a number", "bool": "true or false"}


class BoundedComposer(Composer):
    """A composer that counts values and their depth while it reads, an alias as what it stands for."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        self.warn_double_anchors = False
        self._values = self._level = self._deepest = 0
        self._anchored: dict[str, tuple[int, int]] = {}  # values in what an anchor names, levels below it

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        before, deepest, anchor = self._values, self._deepest, event.anchor
        is_alias = isinstance(event, AliasEvent)
        if is_alias and anchor in self.anchors and anchor not in self._anchored:
            raise ComposerError(None, None, f"*{anchor} stands inside of what it names", event.start_mark)
        scalar = getattr(event, "value", "") or ""
        values, levels = self._anchored.get(anchor, (0, 0)) if is_alias else (1 + len(scalar) // 100, 0)
        self._level += 1
        self._values, self._deepest = before + values, self._level + levels
        if self._values > MOST_VALUES:
            reason = f"holds too many values, must be <= {MOST_VALUES:,}, aliases written out"
            raise ComposerError(None, None, reason, event.start_mark)
        if self._deepest > MOST_DEPTH:
            raise ComposerError(None, None, f"nested too deeply, must be <= {MOST_DEPTH} levels", event.start_mark)
        if anchor is not None and not is_alias:
            self._anchored.pop(anchor, None)  # a name may be given again
        node = super().compose_node(parent, index)
        if anchor is not None and not is_alias:
            self._anchored[anchor] = (self._values - before, self._deepest - self._level)
        self._level, self._deepest = self._level - 1, max(deepest, self._deepest)
        return node


class PlainConstructor(SafeConstructor):
    """A constructor of plain values only, whose errors have the line of the value."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        tag = str(node.tag)
        kind = tag.rpartition(":")[2]
        if kind not in TAGS:
            raise ConstructorError(None, None, f"tag {tag} is not known here, expected plain values", node.start_mark)
        if kind in ("int", "float") and "_" in node.value:
            return node.value  # a text of YAML 1.2; ruamel.yaml reads 1_0 as 10
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            reason = f"got {shown(node.value)}, expected {NAMES.get(kind, kind)}"
            raise ConstructorError(None, None, reason, node.start_mark) from None
