"""YAML files as users write them: read as plain values, and traced back to a line when something in them is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from cbsim.scenario.bounded import MOST_BYTES, BoundedComposer, PlainConstructor
from cbsim.scenario.fields import ScenarioError, cut, near, shown

PathParts = tuple[str | int, ...]
MOST_COMPLAINTS = 20
"""Mistakes of one file that are told at once."""


@dataclass(frozen=True, slots=True)
class Document:
    """The values of one YAML file, and its nodes, which know their lines; None if nobody wrote any. `overrides` are
    (path, text as given).
    """

    file: str
    root: Node | None
    data: dict[str, Any]
    overrides: tuple[tuple[PathParts, str], ...] = ()

    def line(self, path: PathParts) -> int | None:
        """Line, from 1, of the key that `path` leads to or of the nearest one around it; None if there is none."""
        node, line = self.root, None
        for part in path:
            found = _child(node, part)
            if found is None:
                break
            key, node = found
            line = key.start_mark.line + 1
        return line

    def explain(self, error: ValidationError) -> ScenarioError:
        """The same errors in our words, one line each."""
        entries = [dict(entry) for entry in error.errors(include_url=False)]
        complaints = list(dict.fromkeys(map(self._complaint, entries[:MOST_COMPLAINTS])))
        if len(entries) > MOST_COMPLAINTS:
            complaints.append(f"{self.file}: {len(entries) - MOST_COMPLAINTS} more mistakes are not listed")
        return self.error("\n".join(complaints), _path(entries[0]), wording(entries[0]))

    def error(self, message: str, path: PathParts, text: str) -> ScenarioError:
        """`message` as an error of the field at `path`, of which `text` says what is wrong."""
        value: Any = self.data
        for part in path:
            inside = isinstance(value, dict) and part in value
            value = value[part] if inside or (isinstance(value, list) and isinstance(part, int)) else None
        return ScenarioError(
            message,
            file=self.file,
            line=self.line(path),
            field=".".join(map(str, path)) or None,
            value=value,
            bound=text.partition(", ")[2] if text.startswith("got ") else text,
        )

    def _complaint(self, entry: dict[str, Any]) -> str:
        path, text = _path(entry), wording(entry)
        where = self.where(path)
        dotted = ".".join(cut(str(part), 60) for part in path)
        return f"{where}: {dotted}: {text}" if dotted else f"{where}: {text}"

    def where(self, path: PathParts) -> str:
        """The override that wrote `path`, or file and line."""
        for written, text in reversed(self.overrides):
            if path[: len(written)] == written or (path and written[: len(path)] == path):
                return f"--set {cut(text)}"
        line = self.line(path)
        return f"{self.file}:{line}" if line else self.file


def _child(node: Node | None, part: str | int) -> tuple[Node, Node] | None:
    """Key and value of a mapping's field, in which those merged come first; an entry of a list twice; or None."""
    if isinstance(node, MappingNode):
        return next(((key, value) for key, value in reversed(node.value) if key.value == str(part)), None)
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None


def _path(entry: dict[str, Any]) -> PathParts:
    """Where in the document an entry of a ValidationError is."""
    path = tuple(part for part in entry["loc"] if not re.fullmatch(r"<.*>", str(part)))
    field = entry.get("ctx", {}).get("field")
    return (*path, field) if field else path


def wording(entry: dict[str, Any]) -> str:
    """What is wrong with a value and what would be right, from one entry of a ValidationError."""
    kind, ctx, got = entry["type"], entry.get("ctx", {}), f"got {shown(entry['input'])}"
    if kind == "complaint":
        return str(ctx["text"])
    if kind == "value_error":
        return str(ctx["error"])
    if kind == "missing":
        return "is required"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", ctx["expected"])
        return f"{got}, expected one of {', '.join(allowed)}{near(entry['input'], allowed)}"
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
    """The YAML file at `path`, which must hold fields."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content[:MOST_BYTES].decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ScenarioError(f"{path}: cannot be read: {reason}", file=path) from None
    if len(content) > MOST_BYTES:
        raise ScenarioError(f"{path}: is too large, must be <= {MOST_BYTES:,} bytes", file=path)
    root, data = _parsed(text, str(path))
    if not isinstance(data, dict):
        raise ScenarioError(f"{path}: got {shown(data)}, expected fields such as `name: value`")
    return Document(str(path), root, data)


def parse(text: str, source: str, *, lines: bool = True) -> Any:
    """Plain values of YAML 1.2 text, so that 1e6 is a number. Errors name the source, and the line if `lines`."""
    return _parsed(text, source, lines=lines)[1]


def _parsed(text: str, source: str, *, lines: bool = True) -> tuple[Node | None, Any]:
    """Nodes and values of a text; None is what an empty one holds."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer, yaml.Constructor = BoundedComposer, PlainConstructor
    try:
        root: Node | None = yaml.compose(text)
        return root, None if root is None else yaml.constructor.construct_document(root)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None and lines else ""
        problem = cut((error.problem or str(error)).splitlines()[0])
        raise ScenarioError(f"{source}{line}: not valid YAML: {problem}") from None
    except (YAMLError, ValueError) as error:
        raise ScenarioError(f"{source}: not valid YAML: {cut(str(error).splitlines()[0])}") from None
    except RecursionError:
        raise ScenarioError(f"{source}: not valid YAML: nested too deeply") from None


def write(values: dict[str, Any]) -> str:
    """Block-style YAML of plain values, keys in the order given."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 4096
    yaml.allow_unicode = True
    out = StringIO()
    yaml.dump(values, out)
    return out.getvalue()


def split(dotted: str) -> PathParts:
    """`a.0.b` -> ("a", 0, "b")."""
    return tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))
