"""The tables of the documentation that follow from the code, below their marks; `python -m reports.reference_tables`
writes them: fields from the scenario's schema, columns from their declaration, metrics from the catalogue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from cbsim.metrics import catalogue
from cbsim.record import columns, optional_tables
from cbsim.scenario import catalog, scenario

DOCS = catalog.ROOT / "docs"
PAGES = ("scenario_reference.md", "run_directory.md", "metrics.md")
MARK = re.compile(r"^<!-- (fields|columns|metrics): (\S+) -->\n(?:\|.*\n)*", re.MULTILINE)
COLUMNS = {
    "steps.parquet": columns.STEPS,
    "requests.parquet": columns.REQUESTS,
    **optional_tables.TABLES,
    columns.TOKENS_FILE: columns.TOKENS,
}
METRICS = ("distributions", "numbers", "sweeps")
SIGNS = {
    ">=": ("ge", "minimum"),
    ">": ("gt", "exclusiveMinimum"),
    "<=": ("le", "maximum"),
    "<": ("lt", "exclusiveMaximum"),
}
TYPES = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text", "null": "null"}
Table = dict[str, Any]


@cache
def parts() -> dict[str, Table]:
    """JSON schema of every part of a scenario, by class name, and `Scenario` itself."""
    schema = scenario.json_schema()
    return {"Scenario": schema, **schema["$defs"]}


def tables() -> list[tuple[str, str]]:
    """The kind and name of every table that the pages have to have."""
    names: dict[str, Iterable[str]] = {"fields": parts(), "columns": COLUMNS, "metrics": METRICS}
    return [(kind, name) for kind, of in names.items() for name in of]


def page(name: str) -> str:
    """A page of docs/ with its tables as the code has them."""
    make = {"fields": _fields, "columns": _columns, "metrics": _metrics}
    text = (DOCS / name).read_text(encoding="utf-8")
    return MARK.sub(lambda mark: f"<!-- {mark[1]}: {mark[2]} -->\n" + "\n".join(make[mark[1]](mark[2])) + "\n", text)


def _fields(part: str) -> list[str]:
    schema = parts()[part]
    required = schema.get("required", ())
    rows = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for field, about in sorted(schema["properties"].items(), key=lambda item: item[0] not in ("kind", "name")):
        default = "required" if field in required else _default(about.get("default"))
        meaning = "" if "const" in about else " ".join(about["description"].split())
        rows.append(f"| `{field}` | {_value(about)} | {default} | {meaning} |".replace("|  |", "| |"))
    return rows


def _value(about: Table) -> str:
    options = about.get("anyOf") or about.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(_value(option) for option in options))
    if "const" in about or "enum" in about:
        return ", ".join(f"`{name}`" for name in about.get("enum", [about.get("const")]))
    if "$ref" in about:
        return "fields"
    if about["type"] == "object":
        if about["additionalProperties"] is True:
            return "fields"
        return f"by name: {_value(about['additionalProperties'])}"
    if "prefixItems" in about:
        return f"pair of: {_value(about['prefixItems'][0])}"
    value = f"list of: {_value(about['items'])}" if about["type"] == "array" else TYPES[about["type"]]
    bounds = [f"{sign} {about[key]:g}" for sign, keys in SIGNS.items() for key in keys if key in about]
    return " ".join([value, ", ".join(bounds)]) if bounds else value


def _default(value: Any) -> str:
    if isinstance(value, dict):
        kind = value.get("name") or value.get("kind")
        if kind:
            return f"`{kind}`"
        flat = all(not isinstance(v, dict | list | str) for v in value.values())
        stated = {k: v for k, v in value.items() if v is not None and v != 0.0} if flat else {}
        return f"`{{{', '.join(f'{k}: {v:g}' for k, v in sorted(stated.items()))}}}`" if stated else "its defaults"
    if isinstance(value, list) and len(value) > 6:
        return f"`{', '.join(map(str, value[:4]))} ... {value[-1]}` ({len(value)} of them)"
    return "empty" if value in ("", []) else f"`{json.dumps(value)}`".replace('"', "")


def _columns(file: str) -> list[str]:
    rows = ["| column | type | unit | definition |", "|---|---|---|---|"]
    for column in COLUMNS[file]:
        kind = f"{column.type} or null" if column.nullable else column.type
        rows.append(f"| `{column.name}` | {kind} | {column.unit} | {column.definition} |")
    return rows


def _metrics(name: str) -> list[str]:
    if name == "distributions":
        distributions = catalogue.DISTRIBUTIONS.values()
        rows = [f"| `{each.name}` | {each.label} | {each.definition} |" for each in distributions]
        return ["| key | label | definition |", "|---|---|---|", *rows]
    metrics = (catalogue.SINGLE if name == "numbers" else catalogue.OF_SWEEPS).values()
    rows = [
        f"| `{each.name}` | {each.unit} | {('-', 'more', 'less')[each.sign]} | {each.definition} |" for each in metrics
    ]
    return ["| key | unit | better | definition |", "|---|---|---|---|", *rows]


if __name__ == "__main__":
    for name in PAGES:
        Path(DOCS / name).write_text(page(name), encoding="utf-8")
