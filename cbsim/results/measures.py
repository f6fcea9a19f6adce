"""The unit of every metric, by its dotted name in summary.json. docs/metrics.md has the definitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

STATISTICS = ("mean", "std", "min", "max", "p50", "p90", "p95", "p99", "n")
DISTRIBUTIONS = (
    *("ttft_s", "tpot_s", "itl_s", "e2e_s", "normalized_latency_s"),
    *("queue_s", "prefill_s", "decode_s", "step_time_s"),
)
UNITS = {
    "makespan_s": "s",
    "steps": "count",
    "requests": "count",
    "input_tokens": "tokens",
    "output_tokens": "tokens",
    "input_tokens_per_s": "tokens/s",
    "output_tokens_per_s": "tokens/s",
    "total_tokens_per_s": "tokens/s",
    "requests_per_s": "1/s",
    "steps_per_s": "1/s",
    "gpu_active": "share",
    "bubble_s": "s",
    "cpu_busy": "share",
    "rows_per_step": "count",
    "tokens_per_step": "count",
    "kv_utilisation.mean": "share",
    "kv_utilisation.max": "share",
    "waiting.mean": "requests",
    "computed_tokens": "tokens",
    "padding_tokens": "tokens",
    "padding_share": "share",
    "recomputed_tokens": "tokens",
    "wasted_rows": "rows",
    "preemptions": "count",
    "prefix_hit_tokens": "tokens",
    "prefix_hit_rate": "share",
    "kv_moves.copied_blocks": "blocks",
    "kv_moves.out_blocks": "blocks",
    "kv_moves.in_blocks": "blocks",
    "kv_moves.out_busy": "share",
    "kv_moves.in_busy": "share",
    "slo.met": "requests",
    "slo.attainment": "share",
    "slo.goodput_requests_per_s": "1/s",
    "cost.usd_per_million_output_tokens": "USD",
    "cost.usd_per_million_tokens": "USD",
    "cost.idle_usd_hour": "USD/h",
}


def unit(metric: str) -> str | None:
    """The unit of a dotted metric; None for what is no quantity."""
    head, _, statistic = metric.partition(".")
    if head in DISTRIBUTIONS:
        return "count" if statistic == "n" else "s"
    if head in ("requests_by_status", "cpu_shares"):
        return "requests" if head == "requests_by_status" else "share"
    return UNITS.get(metric)


def quantities(summary: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a summary that has a unit, by its dotted name."""
    return {name: value for name, value in _flat(summary) if unit(name) and isinstance(value, int | float)}


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
