"""The computation of every metric from a run's tables, the same for simulated and measured runs.

Percentiles are numpy's `linear`, over all values: one distribution at a time is sorted in memory; token gaps are kept
as distinct values with their counts. Columns of long runs are read one after the other.

A request's token times are the ends of the steps that delivered them. The span of a run is from the first arrival to
the end of the last step. All results are plain numbers in seconds, tokens and shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from cbsim.policy.request import WHOLE
from cbsim.record.columns import NS
from cbsim.record.optional_tables import BROKEN, FETCHED, LEASE_OVER
from cbsim.record.record import HANDED_OFF, PHASES, RETRIED, STATUSES, RequestRow
from cbsim.record.tables import Floats, Ints, Mask, Requests, RequestTable, Steps, times, token_times

PERCENTILE_METHOD = "linear"
QUANTILES = (50, 90, 95, 99)
ENOUGH = 20  # arrivals or steps from which a trend can be read
LAG, GROWTH, QUEUED = 0.05, 1.2, 0.1
"""Overload: completions are below arrivals by LAG and by two roots of their number; the queue grows by GROWTH, and by
QUEUED of the difference: else it is the batch that grows."""
FURTHER = (RETRIED, HANDED_OFF)  # statuses of rows of requests that have another one
SAMPLES_NEEDED = {"p95": 72, "p99": 368}  # below, the percentile is marked: its interval is too wide to be quoted


def distribution(values: Floats, counts: Ints | None = None) -> dict[str, Any]:
    """Return n, mean, std, min, max and percentiles of `values`, each occurring `counts` times; {"n": 0} for none."""
    if counts is None:
        values = np.sort(values)
    else:
        order = np.argsort(values, kind="stable")
        values = values[order]  # one after the other, and nothing kept: a long run has millions of each
        counts = counts[order]
        del order
    total = len(values) if counts is None else int(counts.sum())
    if not total:
        return {"n": 0}
    mean = float((values if counts is None else values * counts).sum() / total)
    apart = values - mean
    apart *= apart
    if counts is not None:
        apart *= counts
    spread = float(np.sqrt(apart.sum() / total))
    del apart
    upto = None if counts is None else np.cumsum(counts)
    result: dict[str, Any] = {"n": total, "mean": mean, "std": spread}
    result |= {"min": float(values[0]), "max": float(values[-1])}
    for q in QUANTILES:
        rank = q / 100 * (total - 1)
        ranks = [int(rank), min(int(rank) + 1, total - 1)]
        low, high = values[ranks if upto is None else np.searchsorted(upto, ranks, side="right")]
        result[f"p{q}"] = float(low + (high - low) * (rank - int(rank)))
    result["too_few_for"] = [name for name, needed in SAMPLES_NEEDED.items() if total < needed]
    return result


def summarise(
    rows: Sequence[RequestRow],
    steps: Steps,
    *,
    total_blocks: int,
    servers: int = 1,
    fleet: Sequence[Mapping[str, Any]] = (),
    slo: Mapping[str, float] | None = None,
    price_usd_hour: float | None = None,
    window_s: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Return all metrics of a run. `slo` maps ttft_s, tpot_s, e2e_s to bounds. Latencies and SLOs are those of requests
    arriving in `window_s`, everything else is the whole run's. The summary names the window, null for an open end.
    `total_blocks` are those of each of `servers`; shares of the span are means over them. The servers of a `fleet` have
    `pool`, `gpus` and `total_blocks` of their own, and `drafts`: `per_server` of the summary repeats them.
    """
    table = RequestTable.of(rows)
    start = int(table.numbers("arrival_ns").min()) if len(table) else 0
    end = max(int(steps["update_end_ns"].max()), start) if len(steps) else start
    span_ns, servers = end - start, len(fleet) or servers
    shapes = [(each["total_blocks"], each["gpus"], _share(each, span_ns)) for each in fleet]
    shapes = shapes or [(total_blocks, 1, 1)] * servers
    machine = _machine(steps, span_ns, shapes)  # before the requests' columns are in memory
    requests = token_times(table, steps)
    counted, counted_ns = _counted(requests, steps, window_s, (start, end))
    summary: dict[str, Any] = {"percentile_method": PERCENTILE_METHOD, "total_blocks": total_blocks}
    summary |= {"servers": servers} if servers > 1 else {}
    summary |= {"window_s": named_window(window_s), "makespan_s": span_ns / NS, "steps": len(steps)}
    counts = {status: int(table.is_in((status,)).sum()) for status in STATUSES}
    by_status = {status: count for status, count in counts.items() if count or status not in FURTHER}
    summary |= {"requests": request_count(table), "requests_by_status": by_status}
    summary |= _throughput(requests, steps, span_ns / NS)
    summary |= {name: distribution(values) for name, values in latencies(counted).items()}
    summary["itl_s"] = distribution(*counted.gaps_s)
    summary |= machine
    summary |= _waste(requests, steps)
    if slo:
        summary["slo"] = attainment(counted, slo, counted_ns / NS)
    if price_usd_hour is not None:
        summary["cost"] = price(summary, price_usd_hour)
    if fleet:
        summary["per_server"] = _per_server(requests, counted, steps, span_ns, fleet)
        summary["imbalance"] = _imbalance(summary["per_server"])
    return summary


def _counted(
    requests: Requests, steps: Steps, window_s: tuple[float, float] | None, span_ns: tuple[int, int]
) -> tuple[Requests, float]:
    """Return the requests that arrive in the window, and how much of the run's span it is; all without one."""
    low, high = span_ns if window_s is None else (edge * NS for edge in window_s)
    if window_s is not None:
        inside = (requests.arrival_ns >= low) & (requests.arrival_ns < high)
        requests = token_times(requests.rows.rows(inside), steps)
    return requests, max(min(high, span_ns[1]) - max(low, span_ns[0]), 0.0)


def _per_server(
    requests: Requests, counted: Requests, steps: Steps, span_ns: int, fleet: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the numbers of each server: shares are of the span of all, or of the part of it that it was there."""
    numbers, low = list[dict[str, Any]](), 0
    started, ended = steps["schedule_start_ns"], steps["update_end_ns"]
    every = _by_server(requests.rows, len(fleet))
    tables = zip(every, every if counted is requests else _by_server(counted.rows, len(fleet)), strict=True)
    for server, (facts, both, high) in enumerate(zip(fleet, tables, steps.ends(len(fleet)), strict=True)):
        mine, within = (times(table, started, ended) for table in both)
        part = steps if len(fleet) == 1 else Steps(steps.window(low, high).table)
        low = high
        latency, waste = latencies(within, prefills=True), _waste(mine, part)
        tokens = _throughput(mine, part, 0, prefills=True)
        numbers.append(
            {
                "server": server,
                **{
                    name: facts[name] for name in ("pool", "gpus", "total_blocks", "lived_s", "drafts") if name in facts
                },
                "requests": len(mine.rows),
                "steps": len(part),
                **{name: value for name, value in tokens.items() if name.endswith("put_tokens")},
                **_machine(part, span_ns, [(facts["total_blocks"], 1, _share(facts, span_ns))]),
                **{name: waste[name] for name in ("preemptions", "prefix_hit_tokens", "prefix_hit_rate")},
                **{name: distribution(latency[name]) for name in ("ttft_s", "tpot_s")},
            }
        )
    return numbers


def _by_server(table: RequestTable, servers: int) -> list[RequestTable]:
    """Return the requests of each server."""
    order = np.argsort(table.numbers("server"), kind="stable")
    ends = np.searchsorted(table.numbers("server")[order], np.arange(servers), "right").tolist()
    table = table.rows(order)  # in memory
    return [table[low:high] for low, high in pairwise([0, *ends])]


def _imbalance(servers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest value of a server over the mean of all; 1 if all are 0."""
    of = {
        "tokens": [each["input_tokens"] + each["output_tokens"] for each in servers],
        "gpu_active": [each["gpu_active"] for each in servers],
    }
    return {name: max(each) / fmean(each) if any(each) else 1.0 for name, each in of.items()}


def named_window(window_s: tuple[float, float] | None) -> list[float | None] | None:
    """Return a window as it is in files: null for an open end."""
    return window_s and [edge if np.isfinite(edge) else None for edge in window_s]


def latencies(requests: Requests, *, prefills: bool = False) -> dict[str, Floats]:
    """Return the latencies in seconds of requests that ended with their last token, with those that were handed off if
    `prefills` count; TPOT needs two tokens or more.
    """
    done = _done(requests, prefills=prefills)
    arrival, first, last = requests.arrival_ns[done], requests.first_token_ns[done], requests.last_token_ns[done]
    queued, scheduled, tokens = requests.queued_ns[done], requests.scheduled_ns[done], requests.generated[done]
    several = tokens > 1
    return {
        "ttft_s": (first - arrival) / NS,
        "tpot_s": ((last - first)[several] / (tokens[several] - 1)) / NS,
        "e2e_s": (last - arrival) / NS,
        "normalized_latency_s": (last - arrival) / np.maximum(tokens, 1) / NS,
        "queue_s": np.maximum(scheduled - queued, 0) / NS,
        "prefill_s": (first - scheduled) / NS,
        "decode_s": (last - first) / NS,
    }


def _done(requests: Requests, *, prefills: bool) -> Mask:
    handed_off = requests.rows.is_in((HANDED_OFF,)) & (requests.generated > 0)
    return requests.done | handed_off if prefills else requests.done


def request_count(rows: RequestTable) -> int:
    """Return how many requests there are; one that was sent again, or handed off, has a further row for each time."""
    return len(rows) - int(rows.is_in(FURTHER).sum())


def attainment(requests: Requests, slo: Mapping[str, float], span_s: float) -> dict[str, Any]:
    """Return goodput (requests/s within all bounds) and attainment (their share, or None). TPOT of one token is 0."""
    values = latencies(requests)
    values["tpot_s"] = values["decode_s"] / np.maximum(requests.generated[requests.done] - 1, 1)
    met = np.ones(int(requests.done.sum()), dtype=bool)
    for name, bound in slo.items():
        met &= values[name] <= bound
    count, sent = int(met.sum()), request_count(requests.rows)
    share, rate = (count / sent if sent else None), (count / span_s if span_s else 0.0)
    return {"bounds": dict(slo), "met": count, "attainment": share, "goodput_requests_per_s": rate}


def overload(requests: Requests) -> str | None:
    """Return how far an open workload is above the capacity, if over the second half of the arrivals fewer requests end
    than arrive, and the queue of requests never scheduled so far grows.
    """
    sent = ~requests.rows.is_in(("refused", "aborted", "failed", *FURTHER))
    arrival, ended = requests.arrival_ns[sent] / NS, requests.last_token_ns[sent & requests.done] / NS
    if len(arrival) < ENOUGH:
        return None
    low, middle, high = edges = np.linspace((arrival.min() + arrival.max()) / 2, arrival.max(), 3)
    came, done = (int(((times > low) & (times <= high)).sum()) for times in (arrival, ended))
    if came < ENOUGH or came - done <= max(LAG * came, 2 * came**0.5):
        return None
    until = np.where(requests.scheduled_ns[sent] < 0, np.inf, requests.scheduled_ns[sent] / NS)
    waited = [np.diff(np.clip([arrival, until], *part), axis=0).clip(min=0).sum() for part in pairwise(edges)]
    before, after = (float(total / (middle - low)) for total in waited)
    if after < max(GROWTH * before, before + QUEUED * (came - done), 1):
        return None
    rates = f"{came / (high - low):.3g} and {done / (high - low):.3g} a second"
    return (
        f"in the second half of the arrivals {came:,} requests came and {done:,} ended ({rates}), and the mean queue "
        f"grew from {before:,.1f} to {after:,.1f} between its quarters: overload. Latencies grow with the length of "
        "the run."
    )


def _throughput(requests: Requests, steps: Steps, span_s: float, *, prefills: bool = False) -> dict[str, Any]:
    prompt = int(requests.rows.numbers("prompt_tokens")[_done(requests, prefills=prefills)].sum())
    output = int(requests.generated[~requests.rows.is_in(FURTHER)].sum())  # thrown away in these
    rate = 1 / span_s if span_s else 0.0
    return {
        "input_tokens": prompt,
        "output_tokens": output,
        "input_tokens_per_s": prompt * rate,
        "output_tokens_per_s": output * rate,
        "total_tokens_per_s": (prompt + output) * rate,
        "requests_per_s": int(requests.done.sum()) * rate,
        "steps_per_s": len(steps) * rate,
    }


def _share(server: Mapping[str, Any], span_ns: int) -> float:
    """Return the share of the span in which a server was there."""
    return server["lived_s"] * NS / span_ns if span_ns and "lived_s" in server else 1


def _machine(steps: Steps, span_ns: int, shapes: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """Return shares of the span, means over servers, of which each has so many (blocks, GPUs) for a share of it; those
    of the GPU are means over GPUs. KV use lasts until the next plan, or the end of the last step.
    """
    if not len(steps) or not span_ns:
        return {"gpu_active": 0.0, "cpu_busy": 0.0, "bubble_s": 0.0}
    servers, gpus = len(shapes), [gpus for _, gpus, _ in shapes]
    there = sum(share for _, _, share in shapes)  # servers, a mean over the span
    parts = [*map(slice, [0, *(ends := steps.ends(servers))], ends)]
    phases = {name: int(steps.lane(name).sum()) / (span_ns * there) for name in PHASES}
    averages = _held(steps, parts, span_ns, [blocks for blocks, _, _ in shapes], there)
    start, end, ran = steps["compute_start_ns"], steps["compute_end_ns"], steps["rows"] > 0
    compute = end - start
    return {
        "gpu_active": sum(int(compute[part].sum()) * count for part, count in zip(parts, gpus, strict=True))
        / (span_ns * sum(count * share for _, count, share in shapes)),
        "bubble_s": sum(_idle_ns(start[part], end[part], ran[part]) for part in parts) / servers / NS,
        "cpu_busy": sum(share for name, share in phases.items() if name != "await"),
        "cpu_shares": phases,
        "step_time_s": distribution(compute[ran] / NS),
        "rows_per_step": float(steps["rows"].mean()),
        "tokens_per_step": float(steps["tokens"].mean()),
        **averages,
    }


def _held(steps: Steps, parts: Sequence[slice], span_ns: int, blocks: Sequence[int], there: float) -> dict[str, Any]:
    """Return time averages of what lasts from one plan of a server to the next: blocks in use, the mean over servers,
    and waiting requests of all.
    """
    starts, ends = steps["schedule_start_ns"], steps["update_end_ns"]
    until = np.concatenate([each for part in parts for each in (starts[part][1:], ends[part][-1:])])
    lasted = np.minimum(until, ends, out=until) - starts
    total: Any = max(blocks[0], 1)
    if len(set(blocks)) > 1:
        total = np.repeat(blocks, [part.stop - part.start for part in parts])
    used = steps["used_blocks"] / total
    most = float(used.max())
    used *= lasted  # summed in numpy's order: that of a product of vectors depends on the number of threads
    return {
        "kv_utilisation": {"mean": float(used.sum()) / (span_ns * there), "max": most},
        "waiting": {"mean": int(steps["waiting"] @ lasted) / span_ns},
    }


def _idle_ns(start: Ints, end: Ints, ran: Mask) -> int:
    """Return the idle ns of the compute lane, from the first to the last step that `ran`; empty steps are busy."""
    if not ran.any():
        return 0
    inside = slice(int(ran.argmax()), len(ran) - int(ran[::-1].argmax()))
    edges = [edge(each[ran]) for each in (start, end) for edge in (np.min, np.max)]
    return int(np.ptp(edges) - (end - start)[inside].sum())


def _waste(requests: Requests, steps: Steps) -> dict[str, Any]:
    """Return the work without a result (padding, recomputed tokens, wasted rows) and the work saved by prefix hits."""
    computed, useful = int(steps["padded_tokens"].sum()), int(steps["tokens"].sum())
    table = requests.rows
    prompts = int(table.numbers("prompt_tokens")[table.numbers("first_step") >= 0].sum())
    hits = int(table.numbers("cached_tokens").sum())
    return {
        "computed_tokens": computed,
        "padding_tokens": computed - useful,
        "padding_share": (computed - useful) / computed if computed else 0.0,
        "recomputed_tokens": int(steps["recomputed_tokens"].sum()),
        "wasted_rows": int(steps["wasted_rows"].sum()),
        "preemptions": int(steps["preempted"].sum()),
        "prefix_hit_tokens": hits,
        "prefix_hit_rate": hits / prompts if prompts else 0.0,
    }


def hand_offs(table: Mapping[str, Ints], rows: RequestTable, bandwidth_gb_s: float, span_s: float) -> dict[str, Any]:
    """Return how many hand-offs there were, what became of them, the times of those that were fetched, and the busy
    share of the busiest NIC: the time of its bytes at its rate over the span.
    """
    fate, fetched = table["fate"], table["fate"] == FETCHED
    prefilled, taken, start, end = (table[f"{name}_ns"][fetched] for name in ("prefilled", "taken", "start", "end"))
    times = {
        "after_prefill": end - prefilled,
        "decode_wait": np.maximum(taken - prefilled, 0),
        "link_wait": start - np.maximum(prefilled, taken),
        "transfer": end - start,
    }
    spread = {name: distribution(values / NS) for name, values in times.items()}
    size, busy = table["bytes"][fetched], bandwidth_gb_s * NS * span_s
    most = max(np.bincount(table[side][fetched], weights=size).max(initial=0) for side in ("source", "target"))
    return {
        "transfers": int(fetched.sum()),
        "bytes": int(size.sum()),
        **{f"{name}_{of}_s": each.get(of) for name, each in spread.items() for of in ("mean", "p99")},
        "link_busy": float(most) / busy if busy else 0.0,
        "local_prefills": int(((rows.numbers("leg") == WHOLE) & (rows.numbers("first_step") >= 0)).sum()),
        "leases_ended": int((fate == LEASE_OVER).sum()),
        "broken": int((fate == BROKEN).sum()),
    }


def price(summary: Mapping[str, Any], price_usd_hour: float) -> dict[str, Any]:
    """Return the price of the span a million tokens, and the price of an hour's idle GPU time, USD."""
    spent = price_usd_hour * summary["makespan_s"] / 3600
    output, total = summary["output_tokens"], summary["output_tokens"] + summary["input_tokens"]
    return {
        "price_usd_hour": price_usd_hour,
        "usd_per_million_output_tokens": spent / output * 1e6 if output else None,
        "usd_per_million_tokens": spent / total * 1e6 if total else None,
        "idle_usd_hour": price_usd_hour * (1 - summary["gpu_active"]),
    }
