"""Formatting of numbers as text: values, changes and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def lookup(summary: Mapping[str, Any], metric: str) -> Any:
    """Return a dotted metric of a summary, or None."""
    value: Any = summary
    for part in metric.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of nested mappings, such as a summary's or a scenario's, by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def shown(value: Any, unit: str) -> str:
    """Return a number as its unit has it: s, share, fine share, count (also of a mean), number; "-" for None."""
    if value is None:
        return "-"
    if unit.endswith("share"):
        return f"{value:.2%}" if unit == "fine share" else f"{value:.1%}"
    if unit == "count":
        return f"{value:,.0f}" if value == round(value) or abs(value) >= 1e5 else f"{value:,.5g}"
    if unit == "number":
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if value == 0 or abs(value) >= 1:
        return f"{value:,.2f} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} us"


def change(values: Sequence[Any], unit: str) -> str:
    """Return the change from the first value to the second: points for shares, percent for the rest."""
    before, after = values
    if before is None or after is None:
        return ""
    if before == after:
        return "="
    if unit.endswith("share"):
        return f"{(after - before) * 100:+.1f} pt"
    return f"{after / before - 1:+.1%}" if before else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text aligned in columns, a rule below the first row, the first column left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)
