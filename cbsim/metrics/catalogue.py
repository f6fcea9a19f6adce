"""The list of all metrics: name in summary.json, unit, label, better direction, format, and definition.

The terminal, conditions, sweeps, `pareto`, `tune`, `contrast`, reports, pages and docs/metrics.md all read this list. A
new metric is an entry here and its computation in `metrics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cbsim.metrics.terminal import aligned, change, flat, lookup, shown
from cbsim.record.record import PHASES, STATUSES

MORE, LESS = 1, -1
FORMS = {"s": "s", "share": "share", "tokens/s": "number", "1/s": "number", "USD": "number", "USD/h": "number"}
FINE, REAL = "fine share", "number"  # a share with more digits; a count that need not be whole
MAIN, MAIN_OF_HAND_OFFS = ("p50", "p99"), ("mean", "p99")
NEUTRAL = ("length", "stop", "handed_off")  # statuses
POSITIONS = 8  # of drafts, each with a metric of its own; summary.json has the acceptance of all
COST = "cost.usd_per_million_output_tokens"
PER_GPU, PER_USER = "output_tokens_per_s_per_gpu", "output_tokens_per_s_per_user"
STATISTICS = ("mean", "std", "min", "max", "p50", "p90", "p95", "p99", "n")


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a run. `name` is its dotted key in summary.json; `sign` is MORE or LESS, whichever is better, or 0.
    `listed`: whether a run's printed table has it. `style`: a format other than that of the unit.
    """

    name: str
    unit: str
    sign: int
    label: str
    definition: str
    listed: bool = False
    style: str = ""

    @property
    def spelled(self) -> str:
        """The name as messages and conditions have it, without the unit of a duration: `ttft.p99` of `ttft_s.p99`."""
        head, dot, tail = self.name.partition(".")
        return f"{head.removesuffix('_s')}{dot}{tail}" if self.unit == "s" or head in DISTRIBUTIONS else self.name

    @property
    def form(self) -> str:
        return self.style or FORMS.get(self.unit, "count")

    def shown(self, value: float | None) -> str:
        """Return a value with its unit; "-" if there is none."""
        if value is None or math.isnan(value):
            return "-"
        return shown(value, self.form)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A set of values of requests, token gaps or steps: its STATISTICS are metrics in seconds; less is better."""

    name: str
    label: str
    definition: str
    listed: tuple[str, ...] = ()

    def metrics(self) -> Iterator[Metric]:
        """Yield a metric for every statistic; for the number of values no direction is better."""
        for statistic in STATISTICS:
            unit, sign = ("count", 0) if statistic == "n" else ("s", LESS)
            label, about = f"{self.label} {statistic}", f"{statistic} of {self.name}"
            yield Metric(f"{self.name}.{statistic}", unit, sign, label, about, listed=statistic in self.listed)


# fmt: off
_BEFORE = (
    Metric("makespan_s", "s", LESS, "makespan", "the span", listed=True),
    Metric("steps", "count", 0, "steps", "rows of the step table, empty steps included", listed=True),
    Metric("requests", "count", 0, "requests", "requests that the server was sent, rejected ones included"),
    Metric("input_tokens", "tokens", 0, "input tokens", "prompt tokens of requests that are done"),
    Metric("output_tokens", "tokens", 0, "output tokens",
           "tokens delivered, also to requests that did not finish; of one that was sent again by its last server"),
    Metric("gpu_active", "share", MORE, "GPU active", "busy time of the compute lane, over the span",
           listed=True, style=FINE),
    Metric("bubble_s", "s", LESS, "compute idle",
           "idle time of the compute lane between its first and its last step with rows"),
    Metric("cpu_busy", "share", 0, "CPU busy",
           "all CPU phases but `await`, over the span; planning that found nothing to run has no step and is not in it",
           listed=True, style=FINE),
    *(Metric(f"cpu_shares.{name}", "share", 0, f"CPU in {name}", f"time of the phase `{name}` over the span",
             style=FINE) for name in PHASES),
    Metric("input_tokens_per_s", "tokens/s", MORE, "input tokens/s", "`input_tokens` over the span"),
    Metric("output_tokens_per_s", "tokens/s", MORE, "output tokens/s", "`output_tokens` over the span", listed=True),
    Metric("total_tokens_per_s", "tokens/s", MORE, "total tokens/s", "input and output tokens over the span"),
    Metric("requests_per_s", "1/s", MORE, "requests/s", "requests that are done, over the span", listed=True),
    Metric("steps_per_s", "1/s", MORE, "steps/s", "`steps` over the span"),
)
_DISTRIBUTIONS = (
    Distribution("ttft_s", "TTFT", "first token - arrival", listed=MAIN),
    Distribution("tpot_s", "TPOT", "(last token - first token) / (tokens - 1); requests of one token have none",
                 listed=MAIN),
    Distribution("e2e_s", "E2E", "last token - arrival", listed=MAIN),
    Distribution("normalized_latency_s", "normalized latency", "`e2e_s` / tokens"),
    Distribution("queue_s", "queue time", "start of planning the step that first ran it, or took blocks for KV from "
                 "another server - the poll that took it in; 0 if that poll was part of the planning"),
    Distribution("prefill_s", "prefill time", "first token - the end of its queue time; preemptions stay inside, and "
                 "waiting for KV from another server"),
    Distribution("decode_s", "decode time", "last token - first token; preemptions stay inside"),
    Distribution("itl_s", "ITL", "every gap between two tokens of a request, pooled over all requests that got tokens, "
                 "also unfinished ones"),
    Distribution("step_time_s", "step time", "time on the compute lane of every step with rows"),
)
_AFTER = (
    Metric("rows_per_step", "count", 0, "rows per step", "mean over all steps; padding excluded", style=REAL),
    Metric("tokens_per_step", "count", 0, "tokens per step", "mean over all steps; padding excluded", style=REAL),
    Metric("kv_utilisation.mean", "share", 0, "KV used, mean", "blocks in use over all blocks, weighted by how long "
           "it lasted; between steps with nothing to do it counts as 0", listed=True),
    Metric("kv_utilisation.max", "share", 0, "KV used, max", "largest share after planning a step",
           listed=True),
    Metric("waiting.mean", "requests", LESS, "requests waiting, mean", "length of the queue, weighted likewise",
           style=REAL),
    Metric("computed_tokens", "tokens", LESS, "computed tokens", "query tokens computed, padding included"),
    Metric("padding_tokens", "tokens", LESS, "padding tokens",
           "of these, padding: CUDA graphs, left padding, rows that have ended"),
    Metric("padding_share", "share", LESS, "padding computed", "`padding_tokens` / `computed_tokens`", listed=True),
    Metric("prefix_hit_tokens", "tokens", MORE, "prefix hit tokens",
           "found in the prefix cache at a request's first admission"),
    Metric("prefix_hit_rate", "share", MORE, "prefix hits",
           "`prefix_hit_tokens` / prompt tokens of requests that were admitted", listed=True),
    Metric("preemptions", "count", LESS, "preemptions",
           "preemptions, whether by recompute or by swapping, and soft resets", listed=True),
    Metric("kv_moves.copied_blocks", "blocks", LESS, "KV blocks copied", "copied on the device; only of runs that move "
           "KV, as all of `kv_moves`", listed=True),
    Metric("kv_moves.out_blocks", "blocks", LESS, "KV blocks to the host", "moved to the host", listed=True),
    Metric("kv_moves.in_blocks", "blocks", LESS, "KV blocks from the host", "moved from the host", listed=True),
    Metric("kv_moves.out_busy", "share", LESS, "lane to the host, busy", "time that moves to the host took, over the "
           "span"),
    Metric("kv_moves.in_busy", "share", LESS, "lane from the host, busy", "time that moves from the host took, over "
           "the span"),
    Metric("hand_off.transfers", "count", 0, "hand-offs", "prefills whose KV went to the server that decodes; only of "
           "fleets with roles, as all of `hand_off`", listed=True),
    Metric("hand_off.bytes", "bytes", 0, "bytes handed over", "that went over"),
    *(Metric(f"hand_off.{name}_{of}_s", "s", LESS, f"{label} {of}", about, listed=name == "after_prefill")
      for name, label, about in (
          ("after_prefill", "prefill to last byte", "from the end of a prefill to the last byte of its KV"),
          ("decode_wait", "wait for decode blocks", "from the end of a prefill until the other server had blocks"),
          ("link_wait", "wait for the link", "from when both had blocks to the start of the transfer"),
          ("transfer", "KV transfer", "from the start of the transfer, layerwise that of what is left, to its end"))
      for of in MAIN_OF_HAND_OFFS),
    Metric("hand_off.link_busy", "share", LESS, "link busy", "bytes of the busiest NIC at its rate, over the span",
           listed=True),
    Metric("hand_off.local_prefills", "requests", 0, "prefills without hand-off", "at the server that decodes",
           listed=True),
    Metric("hand_off.leases_ended", "count", LESS, "leases ended", "hand-offs given up before both servers had "
           "blocks", listed=True),
    Metric("hand_off.broken", "count", LESS, "broken hand-offs", "by the death of a server, or a prefill that was not "
           "made", listed=True),
    Metric("pipeline.gpu_active", "share", MORE, "GPUs of all stages active", "busy time of a stage of the pipeline, "
           "from the first kernel to the last, mean of all; only with several, as all of `pipeline`", listed=True,
           style=FINE),
    Metric("pipeline.bubble", "share", LESS, "bubbles", "1 - `pipeline.gpu_active`", listed=True, style=FINE),
    Metric("drafts.acceptance_length", "count", MORE, "tokens a verification", "mean tokens that a row with drafts "
           "gives, the target's own included; only with speculation, as all of `drafts`", listed=True, style=REAL),
    Metric("drafts.acceptance_rate", "share", MORE, "drafts accepted",
           "`drafts.accepted_tokens` / `drafts.verified_tokens`", listed=True),
    *(Metric(f"drafts.acceptance_by_position.{at}", "share", MORE, f"accepted at position {at}",
             f"of rows that verified {at} drafts or more, those in which the first {at} came true", listed=True)
      for at in range(1, POSITIONS + 1)),
    Metric("drafts.verified_tokens", "tokens", 0, "draft tokens verified", "of requests that had not ended",
           listed=True),
    Metric("drafts.accepted_tokens", "tokens", MORE, "draft tokens accepted", "of these, those that came true",
           listed=True),
    Metric("drafts.rejected_tokens", "tokens", LESS, "draft tokens rejected", "of these, those that did not: "
           "computed for nothing", listed=True),
    Metric("drafts.verifications", "rows", 0, "rows with drafts", "rows that verified them"),
    Metric("recomputed_tokens", "tokens", LESS, "recomputed tokens", "query tokens that had been computed before a "
           "preemption, and were lost: those of swapped requests are not", listed=True),
    Metric("wasted_rows", "rows", LESS, "wasted rows",
           "rows whose request had ended or been reset while they were in flight", listed=True),
    Metric("imbalance.tokens", "ratio", LESS, "tokens, most over mean", "prompt tokens of requests that are done and "
           "output tokens of the server of a fleet that has most, over the mean of all servers", listed=True,
           style=REAL),
    Metric("imbalance.gpu_active", "ratio", LESS, "GPU active, most over mean", "`gpu_active` likewise", listed=True,
           style=REAL),
    Metric("scaling.server_hours", "h", LESS, "server hours", "hours of all servers from start to end; only of "
           "fleets whose servers come and go, as all of `scaling`", listed=True, style=REAL),
    Metric("scaling.usd", "USD", LESS, "$ of all servers", "their hours at the price of their GPUs", listed=True),
    Metric("scaling.starts", "count", 0, "servers started", "after the beginning", listed=True),
    Metric("scaling.deaths", "count", 0, "servers that died", "failures, and drained too long", listed=True),
    *(Metric(f"requests_by_status.{status}", "requests", 0 if status in NEUTRAL else LESS,
             f"requests: {status.replace('_', ' ')}", f"requests with status `{status}` at the end")
      for status in STATUSES),
    Metric("slo.met", "requests", MORE, "requests within SLO", "done, and within all bounds of the scenario's `slo`"),
    Metric("slo.attainment", "share", MORE, "SLO attainment",
           "`slo.met` over all requests sent, null of none; a request of one token has TPOT 0 here", listed=True),
    Metric("slo.goodput_requests_per_s", "1/s", MORE, "goodput, requests/s", "`slo.met` over the span"),
    Metric(COST, "USD", LESS, "$ a million output tokens",
           "price of the span over `output_tokens`", listed=True),
    Metric("cost.usd_per_million_tokens", "USD", LESS, "$ a million tokens",
           "price of the span over input and output tokens"),
    Metric("cost.idle_usd_hour", "USD/h", LESS, "$ an hour for idle GPU", "price of an hour x (1 - `gpu_active`)",
           listed=True),
)
_OF_SWEEPS = (
    Metric(PER_GPU, "tokens/s", MORE, "output tokens/s per GPU", "`output_tokens_per_s` over the scenario's GPUs"),
    Metric(PER_USER, "tokens/s", MORE, "output tokens/s per user", "1 / `tpot_s.mean`"),
)
# fmt: on
DISTRIBUTIONS: Mapping[str, Distribution] = {each.name: each for each in _DISTRIBUTIONS}
SINGLE: Mapping[str, Metric] = {each.name: each for each in (*_BEFORE, *_AFTER)}
_STATISTICS = tuple(metric for distribution in _DISTRIBUTIONS for metric in distribution.metrics())
METRICS: Mapping[str, Metric] = {each.name: each for each in (*_BEFORE, *_STATISTICS, *_AFTER)}
OF_SWEEPS: Mapping[str, Metric] = {each.name: each for each in _OF_SWEEPS}
SHORT = {"goodput": "slo.goodput_requests_per_s", "attainment": "slo.attainment", "throughput": "output_tokens_per_s"}
SHORT |= {status: f"requests_by_status.{status}" for status in STATUSES if status not in METRICS}


def metric(name: str) -> Metric:
    """Return the metric of a dotted name, of a run or a sweep's table; for an unknown column one made of its name."""
    return METRICS.get(name) or OF_SWEEPS.get(name) or Metric(name, "", 0, name, "", style=REAL)


def quantities(summary: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in flat(summary).items() if name in METRICS and isinstance(value, int | float)}


OF_A_SERVER = (
    *("requests", "input_tokens", "output_tokens", "gpu_active", "kv_utilisation.max", "prefix_hit_rate"),
    *("ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "drafts.acceptance_length", "drafts.rejected_tokens"),
)
MOST_LISTED = 64  # servers


def servers(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return a table of the servers of a fleet, its header first; of drafts only if a server has any."""
    speculates = any("drafts" in server for server in summary["per_server"])
    found = [METRICS[name] for name in OF_A_SERVER if speculates or not name.startswith("drafts.")]
    header = ["server", "pool", "GPUs", *(each.label for each in found)]
    rows = [
        [
            *(str(server[name]) for name in ("server", "pool", "gpus")),
            *(each.shown(lookup(server, each.name)) for each in found),
        ]
        for server in summary["per_server"][:MOST_LISTED]
    ]
    return [header, *rows]


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the loops' summaries side by side; with two, with the change from first to second."""
    loops = list(summaries)
    header = ["", *loops, *(["change"] if len(loops) == 2 else [])]
    rows = []
    for each in METRICS.values():
        values = [lookup(summaries[loop], each.name) for loop in loops] if each.listed else []
        if any(value is not None for value in values):
            cells = [each.shown(value) for value in values]
            rows.append([each.label, *cells, *([change(values, each.unit)] if len(loops) == 2 else [])])
    return aligned([header, *rows])
