"""How numbers are shown: each in the form that its unit wants, and runs side by side in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

QUANTITIES: tuple[tuple[str, str, str], ...] = (  # label, metric, unit
    ("makespan", "makespan_s", "s"),
    ("steps", "steps", "count"),
    ("GPU active", "gpu_active", "fine share"),
    ("CPU busy", "cpu_busy", "fine share"),
    ("output tokens/s", "output_tokens_per_s", "number"),
    ("requests/s", "requests_per_s", "number"),
    ("TTFT p50", "ttft_s.p50", "s"),
    ("TTFT p99", "ttft_s.p99", "s"),
    ("TPOT p50", "tpot_s.p50", "s"),
    ("TPOT p99", "tpot_s.p99", "s"),
    ("E2E p50", "e2e_s.p50", "s"),
    ("E2E p99", "e2e_s.p99", "s"),
    ("KV used, mean", "kv_utilisation.mean", "share"),
    ("padding computed", "padding_share", "share"),
    ("prefix hits", "prefix_hit_rate", "share"),
    ("preemptions", "preemptions", "count"),
    ("KV blocks copied", "kv_moves.copied_blocks", "count"),
    ("KV blocks to the host", "kv_moves.out_blocks", "count"),
    ("KV blocks from the host", "kv_moves.in_blocks", "count"),
    ("recomputed tokens", "recomputed_tokens", "count"),
    ("wasted rows", "wasted_rows", "count"),
    ("SLO attainment", "slo.attainment", "share"),
    ("$ a million output tokens", "cost.usd_per_million_output_tokens", "number"),
    ("$ an hour for idle GPU", "cost.idle_usd_hour", "number"),
)


def lookup(summary: Mapping[str, Any], metric: str) -> Any:
    """A dotted metric of a summary, or None."""
    value: Any = summary
    for part in metric.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def shown(value: Any, unit: str) -> str:
    """A number in the form its unit wants."""
    if value is None:
        return "-"
    if unit.endswith("share"):
        return f"{value:.2%}" if unit == "fine share" else f"{value:.1%}"
    if unit == "count":
        return f"{value:,}"
    if unit == "number":
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if value == 0 or abs(value) >= 1:
        return f"{value:,.2f} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} us"


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """The summaries of the loops side by side; with two, how the second differs from the first."""
    loops = list(summaries)
    header = ["", *loops, *(["change"] if len(loops) == 2 else [])]
    rows = []
    for label, metric, unit in QUANTITIES:
        values = [lookup(summaries[loop], metric) for loop in loops]
        if any(value is not None for value in values):
            cells = [shown(value, unit) for value in values]
            rows.append([label, *cells, *([change(values, unit)] if len(loops) == 2 else [])])
    return aligned([header, *rows])


def change(values: Sequence[Any], unit: str) -> str:
    """The second value against the first: points for shares, percent for the rest."""
    before, after = values
    if before is None or after is None:
        return ""
    if unit.endswith("share"):
        return f"{(after - before) * 100:+.1f} pt" if before != after else "="
    if before == after:
        return "="
    return f"{after / before - 1:+.1%}" if before else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, the first row over a rule, the first column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)
