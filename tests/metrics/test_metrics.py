"""Every metric by hand on tables small enough to read, and the weighted percentiles against numpy's own."""

from __future__ import annotations

import tracemalloc
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.machine import simulate
from cbsim.metrics import catalogue, checks, metrics
from cbsim.metrics.catalogue import METRICS
from cbsim.metrics.metrics import summarise
from cbsim.record import optional_tables
from cbsim.record.record import STEP_COLUMNS, RequestRow, TransferLog
from cbsim.record.tables import Steps, requests_of, token_times
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

MS = 1_000_000


def steps_of(*rows: dict[str, Any]) -> Steps:
    """A step table in milliseconds: `start` and `end` of the step, `compute` = (start, end); the rest as named."""
    table = np.zeros((len(rows), len(STEP_COLUMNS)), dtype=np.int64)
    for i, given_fields in enumerate(rows):
        row: dict[str, Any] = {"step": i, "rows": 1, "tokens": 1, "padded_tokens": 1} | given_fields
        start, end = row.pop("start") * MS, row.pop("end") * MS
        compute = row.pop("compute", (start // MS, start // MS))
        row |= {"schedule_start_ns": start, "schedule_end_ns": start, "update_start_ns": end, "update_end_ns": end}
        row |= {"compute_start_ns": compute[0] * MS, "compute_end_ns": compute[1] * MS}
        for name, value in row.items():
            table[i, STEP_COLUMNS.index(name)] = value
    return Steps(table)


def request(index: int, runs: Sequence[int], at: int = 0, **more: Any) -> RequestRow:
    """A request that arrived at `at` ms and got a token from each step of `runs`: first step, steps, ..."""
    outputs, first, status = max(sum(runs[1::2]), 1), runs[0] if runs else -1, "length" if runs else "waiting"
    came, lengths = (index, str(index), at * MS, 1, at * MS), (10, outputs, outputs)
    return RequestRow(*came, *lengths, 0, first, status, "", -1, 0, 0, list(runs))._replace(**more)


def summary_of(rows: Sequence[RequestRow], steps: Steps, **more: Any) -> dict[str, Any]:
    return summarise(rows, steps, total_blocks=10, **more)


TEN = steps_of(*({"start": 10 * i, "end": 10 * i + 10} for i in range(10)))  # ten steps of 10 ms, back to back


# -- latencies --------------------------------------------------------------------------------------------------------


def test_latencies_by_hand() -> None:
    """Arrived at 5 ms, seen by the server at 10, first row in the step at 20 ms, tokens at 40, 50, 60 and 70 ms.
    TTFT 35, TPOT (70 - 40) / 3, E2E 65, normalized 65 / 4; queue 20 - 10, prefill 40 - 20, decode 70 - 40."""
    row = request(0, [3, 4], at=5, queued_ns=10 * MS, first_step=2)
    summary = summary_of([row], TEN)
    expected = {"ttft_s": 0.035, "tpot_s": 0.010, "e2e_s": 0.065, "normalized_latency_s": 0.065 / 4}
    expected |= {"queue_s": 0.010, "prefill_s": 0.020, "decode_s": 0.030, "itl_s": 0.010}
    assert {name: summary[name]["mean"] for name in expected} == pytest.approx(expected)
    assert summary["itl_s"]["n"] == 3


def test_gaps_between_tokens_are_pooled() -> None:
    """One request gets tokens at 10, 20, 30 ms, is preempted, and gets the next at 80 and 90: gaps 10, 10, 50, 10. The
    other has them at 20 and 50: its gap is 30. ITL pools all five gaps: mean 22, most 50. TPOT is a request's own
    mean, preemption inside: (90 - 10) / 4 and 30."""
    rows = [request(0, [0, 3, 7, 2], preemptions=1), request(1, [1, 1, 4, 1])]
    summary = summary_of(rows, TEN)
    assert summary["itl_s"]["n"] == 5
    assert summary["itl_s"]["mean"] == pytest.approx(0.022)
    assert summary["itl_s"]["max"] == pytest.approx(0.050)
    assert summary["tpot_s"]["mean"] == pytest.approx((0.020 + 0.030) / 2)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=8, max_size=8),
    runs=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True), min_size=1, max_size=5),
)
def test_times_are_those_of_every_token(lengths: list[int], runs: list[list[int]]) -> None:
    """Token times are kept as runs of steps. Whatever the runs, first and last token, the number of tokens and the
    pooled gaps are those of the list of all tokens, written out."""
    ends = np.cumsum(lengths)
    steps = steps_of(*({"start": int(e - n), "end": int(e)} for e, n in zip(ends, lengths, strict=True)))
    rows, times = [], []
    for index, taken in enumerate(runs):
        times.append([int(ends[i]) * MS for i in sorted(taken)])
        rows.append(request(index, [number for i in sorted(taken) for number in (i, 1)]))
    requests = token_times(rows, steps)
    assert requests.first_token_ns.tolist() == [t[0] for t in times]
    assert requests.last_token_ns.tolist() == [t[-1] for t in times]
    assert requests.generated.tolist() == [len(t) for t in times]
    pooled = np.repeat(*requests.gaps_s)
    assert sorted(pooled.tolist()) == sorted(gap / 1e9 for t in times for gap in np.diff(t).tolist())


def test_a_request_of_one_token_has_no_tpot() -> None:
    """No gap, no TPOT sample; TTFT and E2E are the same; its SLO for TPOT is met: it counts as 0."""
    summary = summary_of([request(0, [2, 1])], TEN, slo={"tpot_s": 1e-9})
    assert summary["tpot_s"] == summary["itl_s"] == {"n": 0}
    assert summary["ttft_s"]["mean"] == summary["e2e_s"]["mean"] == pytest.approx(0.030)
    assert summary["slo"]["met"] == 1


def test_only_completed_requests_have_latencies() -> None:
    """A request given up after two tokens has none, but its tokens were generated; nor has one that still waits."""
    rows = [request(0, [0, 3]), request(1, [0, 2], status="aborted"), request(2, [], first_step=-1)]
    summary = summary_of(rows, TEN)
    assert summary["ttft_s"]["n"] == summary["e2e_s"]["n"] == 1
    assert +Counter(summary["requests_by_status"]) == {"aborted": 1, "length": 1, "waiting": 1}
    assert (summary["output_tokens"], summary["input_tokens"]) == (5, 10)


# -- rates, SLOs, money -----------------------------------------------------------------------------------------------


def test_rates_are_over_the_span_of_the_run() -> None:
    """From the first arrival (20 ms) to the end of the last step (100 ms): 80 ms, 2 requests, 20 tokens in, 6 out."""
    summary = summary_of([request(0, [3, 4], at=20), request(1, [5, 2], at=30)], TEN)
    assert summary["makespan_s"] == pytest.approx(0.080)
    assert summary["requests_per_s"] == pytest.approx(2 / 0.080)
    assert summary["input_tokens_per_s"] == pytest.approx(20 / 0.080)
    assert summary["output_tokens_per_s"] == pytest.approx(6 / 0.080)
    assert summary["total_tokens_per_s"] == pytest.approx(26 / 0.080)
    assert summary["steps_per_s"] == pytest.approx(10 / 0.080)


def test_goodput_wants_all_bounds_and_attainment_all_requests() -> None:
    """TTFT 10, 10 and 60 ms, TPOT 10, 30 and none. Bounds of 20 ms each: the first meets both, the second fails one,
    the third the other, the fourth was refused. Goodput 1 in 100 ms, attainment 1 of 4 sent. A bound is met exactly."""
    rows = [request(0, [0, 3]), request(1, [0, 1, 3, 1]), request(2, [5, 1]), request(3, [], status="refused")]
    slo = summary_of(rows, TEN, slo={"ttft_s": 0.020, "tpot_s": 0.020})["slo"]
    assert (slo["met"], slo["attainment"]) == (1, 0.25)
    assert slo["goodput_requests_per_s"] == pytest.approx(10)
    assert summary_of(rows, TEN, slo={"ttft_s": 0.010})["slo"]["met"] == 2
    assert "slo" not in summary_of(rows, TEN)


def test_the_price_of_a_million_tokens() -> None:
    """36 dollars an hour are 1 cent a second: 0.1 s cost 0.001 dollars, for 5 output tokens 200 a million, for 15 in
    and out 66.67. The GPU computes for 40 of 100 ms: of every 36 dollars 21.6 pay for idleness."""
    steps = steps_of(*({"start": 10 * i, "end": 10 * i + 10, "compute": (10 * i, 10 * i + 4)} for i in range(10)))
    cost = summary_of([request(0, [0, 5])], steps, price_usd_hour=36)["cost"]
    assert cost["usd_per_million_output_tokens"] == pytest.approx(200)
    assert cost["usd_per_million_tokens"] == pytest.approx(1000 / 15)
    assert cost["idle_usd_hour"] == pytest.approx(21.6)


# -- the machine ------------------------------------------------------------------------------------------------------

THREE = steps_of(
    {"start": 0, "end": 20, "compute": (5, 15), "used_blocks": 2, "waiting": 3, "rows": 4, "tokens": 40},
    {"start": 20, "end": 50, "compute": (30, 45), "used_blocks": 6, "waiting": 1, "rows": 2, "tokens": 2},
    {"start": 90, "end": 100, "compute": (92, 97), "used_blocks": 10, "waiting": 0, "rows": 1, "tokens": 1},
)


def test_gpu_activity_and_the_bubble() -> None:
    """Kernels run for 10 + 15 + 5 of 100 ms. Between the first kernel, at 5, and the last, at 97, 62 ms are idle."""
    summary = summary_of([request(0, [0, 3])], THREE)
    assert summary["gpu_active"] == pytest.approx(0.30)
    assert summary["bubble_s"] == pytest.approx(0.062)
    assert summary["step_time_s"]["mean"] == pytest.approx(0.010)
    assert (summary["rows_per_step"], summary["tokens_per_step"]) == pytest.approx((7 / 3, 43 / 3))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=12))
def test_the_bubble_is_the_idle_time_between_steps_with_rows(parts: list[tuple[int, int, bool]]) -> None:
    """Whatever steps the lane runs, each (idle ms before it, ms of kernels, has rows): the bubble is the idle time
    after the first step with rows up to the last, and so never negative, also if empty steps outside took time.
    """
    rows, end = [], 0
    for idle, kernels, has in parts:
        start, end = end + idle, end + idle + kernels
        rows.append({"start": start, "end": end, "compute": (start, end), "rows": int(has), "tokens": int(has)})
    ran = [i for i, part in enumerate(parts) if part[2]]
    idle_ms = sum(idle for idle, _, _ in parts[ran[0] + 1 : ran[-1] + 1]) if ran else 0
    assert summary_of([request(0, [ran[0], 1] if ran else [])], steps_of(*rows))["bubble_s"] == idle_ms / 1e3


def test_kv_use_is_weighted_by_time() -> None:
    """2 of 10 blocks for 20 ms, 6 for 30, none while the server is idle from 50 to 90 ms, 10 for 10 ms: a mean of
    (2 x 20 + 6 x 30 + 10 x 10) / 100 / 10 = 0.32. Three requests wait for 20 ms and one for 30: 0.9 on average."""
    summary = summary_of([request(0, [0, 3])], THREE)
    assert summary["kv_utilisation"] == {"mean": pytest.approx(0.32), "max": 1.0}
    assert summary["waiting"]["mean"] == pytest.approx(0.9)


def test_a_step_that_runs_nothing_is_no_bubble() -> None:
    """vLLM plans a last, empty step to report who has ended. No kernel runs in it, so nothing is idle up to it; its
    time is no step time; and what it finds in use is in use until the end."""
    empty = {"start": 10, "end": 30, "compute": (30, 30), "rows": 0, "tokens": 0, "padded_tokens": 0, "used_blocks": 0}
    steps = steps_of({"start": 0, "end": 10, "compute": (2, 8), "used_blocks": 6}, empty)
    summary = summary_of([request(0, [0, 1])], steps)
    assert summary["bubble_s"] == 0.0
    assert summary["step_time_s"]["n"] == 1
    assert summary["kv_utilisation"]["mean"] == pytest.approx(0.6 * 10 / 30)


def test_use_of_overlapping_steps_lasts_to_the_next_plan() -> None:
    """Two steps in flight: the second is planned at 10 ms, before the first ends at 40. From then on its count holds:
    (2 x 10 + 4 x 40) / 50 / 10."""
    steps = steps_of({"start": 0, "end": 40, "used_blocks": 2}, {"start": 10, "end": 50, "used_blocks": 4})
    assert summary_of([request(0, [0, 2])], steps)["kv_utilisation"]["mean"] == pytest.approx(0.36)


def test_cpu_shares() -> None:
    """The CPU plans for 3 ms of 10 and waits for 5: busy is everything but waiting."""
    steps = steps_of({"start": 0, "end": 10})
    table = steps.table.copy()
    for name, value in {"schedule_end_ns": 3, "await_start_ns": 3, "await_end_ns": 8, "update_start_ns": 8}.items():
        table[0, STEP_COLUMNS.index(name)] = value * MS
    summary = summary_of([request(0, [0, 1])], Steps(table))
    shares = {"schedule": 0.3, "prepare": 0.0, "launch": 0.0, "await": 0.5, "update": 0.2}
    assert summary["cpu_shares"] == pytest.approx(shares)
    assert summary["cpu_busy"] == pytest.approx(0.5)


def test_waste_by_hand() -> None:
    """Of 64 tokens computed 50 were asked for; 8 of them a second time; 2 rows for nobody; 30 of 40 prompt tokens were
    found in the cache, those of a request that never ran not counted."""
    steps = steps_of(
        {"start": 0, "end": 1, "tokens": 44, "padded_tokens": 56, "recomputed_tokens": 8, "preempted": 1},
        {"start": 1, "end": 2, "tokens": 6, "padded_tokens": 8, "wasted_rows": 2},
    )
    rows = [request(0, [0, 1], prompt_tokens=40, cached_tokens=30), request(1, [], prompt_tokens=99)]
    summary = summary_of(rows, steps)
    expected = {"computed_tokens": 64, "padding_tokens": 14, "padding_share": 14 / 64, "recomputed_tokens": 8}
    expected |= {"wasted_rows": 2, "preemptions": 1, "prefix_hit_tokens": 30, "prefix_hit_rate": 0.75}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)


def test_metrics_of_a_long_run_take_few_columns_at_a_time() -> None:
    """A request that decodes in every of 100,000 steps has as many gaps: besides the tables, never more than six
    columns of steps are in memory."""
    count = 100_000
    start = np.cumsum(np.random.default_rng(1).integers(1, 9, count)) * MS
    table = np.zeros((count, len(STEP_COLUMNS)), dtype=np.int64)
    table[:, STEP_COLUMNS.index("rows")] = 1
    for at, name in enumerate(STEP_COLUMNS):
        if name.endswith("_ns"):
            table[:, at] = start + name.endswith("_end_ns")
    tracemalloc.start()
    try:
        summary_of([request(0, [0, count])], Steps(table))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 6 * start.nbytes


# -- distributions ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), max_size=30))
def test_weighted_percentiles_are_those_of_the_expanded_sample(pairs: list[tuple[int, int]]) -> None:
    """A value with a count stands for so many equal values: mean, spread and linear percentiles are numpy's."""
    values = np.array([value / 8 for value, _ in pairs])
    counts = np.array([count for _, count in pairs], dtype=np.int64)
    expanded = np.repeat(values, counts)
    result = metrics.distribution(values, counts)
    assert result["n"] == len(expanded)
    if len(expanded):
        numpys = {f"p{q}": np.percentile(expanded, q, method="linear") for q in metrics.QUANTILES}
        numpys |= {"mean": expanded.mean(), "std": expanded.std(), "min": expanded.min(), "max": expanded.max()}
        assert {name: result[name] for name in numpys} == pytest.approx(numpys, abs=1e-12)


@pytest.mark.parametrize(
    ("count", "marked"), [(1, ["p95", "p99"]), (71, ["p95", "p99"]), (72, ["p99"]), (367, ["p99"]), (368, [])]
)
def test_percentiles_that_need_a_larger_sample_are_marked(count: int, marked: list[str]) -> None:
    """72 is the least n at which a two-sided 95 % interval of p95 by order statistics exists: below, all values miss
    one of its ends with probability over 2.5 %: 0.95^n > 0.025 for n < 72. For p99 it is 368: 0.99^n."""
    assert metrics.distribution(np.zeros(count))["too_few_for"] == marked
    assert 0.95**72 < 0.025 < 0.95**71
    assert 0.99**368 < 0.025 < 0.99**367


# -- windows and empty runs -------------------------------------------------------------------------------------------


def test_a_window_keeps_the_latencies_of_those_who_arrive_in_it() -> None:
    """Arrivals at 0, 40 and 70 ms; the window is [40, 70) ms: the second only. Its SLO rate is over the 30 ms of the
    window. What the machine did is the whole run's, and no share of it exceeds 1."""
    steps = steps_of(*({"start": 10 * i, "end": 10 * i + 10, "compute": (10 * i, 10 * i + 9)} for i in range(10)))
    rows = [request(0, [0, 4]), request(1, [5, 2], at=40), request(2, [7, 3], at=70)]
    summary = summary_of(rows, steps, window_s=(0.040, 0.070), slo={"ttft_s": 1.0})
    assert summary["ttft_s"]["n"] == summary["itl_s"]["n"] == 1
    assert summary["ttft_s"]["mean"] == pytest.approx(0.020)
    assert summary["slo"]["goodput_requests_per_s"] == pytest.approx(1 / 0.030)
    assert summary["gpu_active"] == pytest.approx(0.9)
    assert summary["output_tokens_per_s"] == pytest.approx(9 / 0.100)


def test_an_open_window_is_the_whole_run() -> None:
    """From 0 to infinity nothing is left out; a window without arrivals has no samples: no latency, and no share of
    requests within limits."""
    rows = [request(0, [0, 4]), request(1, [5, 2], at=40)]
    everything = summary_of(rows, TEN, window_s=(0.0, float("inf")), slo={"ttft_s": 0.015})
    assert everything == summary_of(rows, TEN, slo={"ttft_s": 0.015}) | {"window_s": [0.0, None]}
    assert summary_of(rows, TEN, window_s=(-float("inf"), 9.0))["window_s"] == [None, 9.0]
    nobody = summary_of(rows, TEN, window_s=(0.050, 0.060), slo={"ttft_s": 1.0})
    assert nobody["ttft_s"] == {"n": 0}
    assert (nobody["slo"]["attainment"], nobody["slo"]["goodput_requests_per_s"]) == (None, 0.0)
    assert "SLO attainment" not in catalogue.table({"sync": nobody})


@pytest.mark.parametrize("rows", [[], [request(0, [], status="refused"), request(1, [], at=5, status="refused")]])
def test_a_run_that_served_nobody(rows: list[RequestRow]) -> None:
    """No request, or all of them refused: no step, no samples, no rates, and money for nothing has no price a token."""
    summary = summary_of(rows, Steps(TEN.table[:0]), slo={"ttft_s": 1.0}, price_usd_hour=2.0)
    assert summary["requests"] == len(rows)
    assert +Counter(summary["requests_by_status"]) == ({"refused": 2} if rows else {})
    assert summary["ttft_s"] == summary["itl_s"] == {"n": 0}
    assert summary["makespan_s"] == summary["output_tokens_per_s"] == summary["gpu_active"] == 0.0
    assert summary["slo"]["attainment"] == (0.0 if rows else None)
    assert summary["cost"]["usd_per_million_output_tokens"] is None


# -- names ------------------------------------------------------------------------------------------------------------

UNCHECKED = {  # what a user put in
    *("total_blocks", "cost.price_usd_hour", "slo.bounds.ttft_s", "slo.bounds.tpot_s", "slo.bounds.e2e_s")
}


def leaves(value: Any, path: str = "") -> dict[str, float]:
    """Every number in a summary by its dotted path."""
    if isinstance(value, dict):
        return {k: v for name, part in value.items() for k, v in leaves(part, f"{path}.{name}".strip(".")).items()}
    return {path: value} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def test_every_number_of_a_summary_can_be_checked_and_every_check_finds_one() -> None:
    """A real run with SLOs and a price: the names that --check knows and the numbers in its summary are the same, but
    for those left out on purpose."""
    workload = {"kind": "synthetic", "requests": 20, "prompt_tokens": 50, "output_tokens": 8}
    machine = {"model": "llama-3.1-8b", "hardware": "h200-sxm", "cost": {"kind": "roofline"}}
    asked = Scenario.model_validate({"question": "Is everything named?", "workload": workload, **machine})
    load = generators.build(asked)
    server = simulate.machine(asked, "async", load)
    simulate.run(server)
    slo = {"ttft_s": 1.0, "tpot_s": 1.0, "e2e_s": 9.0}
    summary = summarise(
        requests_of(server.record), Steps.of(server.record), total_blocks=100, slo=slo, price_usd_hour=5.0
    )
    summary["imbalance"] = {"tokens": 1.0, "gpu_active": 1.0}  # of fleets
    summary["scaling"] = {name.partition(".")[2]: 1.0 for name in METRICS if name.startswith("scaling.")}
    summary["requests_by_status"]["retried"] = 0  # both of fleets whose servers come and go
    summary["hand_off"] = {name.partition(".")[2]: 1.0 for name in METRICS if name.startswith("hand_off.")}
    summary["requests_by_status"]["handed_off"] = 0  # both of fleets with roles
    summary["kv_moves"] = optional_tables.summarise_transfers(
        optional_tables.values_of(optional_tables.TRANSFERS, TransferLog().rows), 1.0
    )  # of runs that move KV
    stages = array("q", (0, 0, 0, 5, 0, 1, 5, 9))  # step, stage, start and end
    summary["pipeline"] = optional_tables.summarise_stages(stages)  # of runs on stages of a pipeline
    summary["drafts"] = optional_tables.summarise_drafts(array("q", (0, 0, 8, 1, 2)))  # of runs with drafts
    found = leaves(summary)
    assert set(METRICS) - set(found) == set()
    assert set(found) - set(METRICS) <= UNCHECKED
    assert all(checks.parse(f"{name}>=0").value(summary) == found[name] for name in METRICS)
