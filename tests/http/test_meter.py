"""Metrics as a monitor reads them: names, types, labels and buckets of vLLM 0.33, and the counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cbsim.http.backend import ABORT, Generation, Load, Stream, Timing
from cbsim.http.metrics import Histogram, VllmMeter, tokens_up_to

MOST_TOKENS = 2000
LOAD = Load(running=3, waiting=2, kv_usage=0.25, block_size=16, num_blocks=1000)
TIMING = Timing(10.0, lag_s=0.001, lag_max_s=0.03, lag_p99_s=0.002, steps=100, late_steps=7, median_itl_s=0.01)
NOW_S = 1_795_000_000.0


@dataclass
class Server:
    """What a meter reads of a server."""

    timing: Timing | None = TIMING
    load: Load = LOAD
    model: str = 'ti"ny\n'  # is written escaped
    max_model_len: int = MOST_TOKENS


def meter(timing: Timing | None = TIMING) -> VllmMeter:
    return VllmMeter(Server(timing), lambda: NOW_S)


def samples(of: VllmMeter) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(of.exposition().decode()) for sample in family.samples]


def number(of: VllmMeter | list[Sample], name: str, **labels: str) -> float:
    read = samples(of) if isinstance(of, VllmMeter) else of
    (value,) = (s.value for s in read if s.name == name and labels.items() <= s.labels.items())
    return float(value)


# -- golden: what vLLM 0.33 exports

OWN = {"model_name", "engine"}
GAUGES = {
    "vllm:num_requests_running": OWN,
    "vllm:num_requests_waiting": OWN,
    "vllm:num_requests_waiting_by_reason": OWN | {"reason"},
    "vllm:kv_cache_usage_perc": OWN,
    "vllm:engine_sleep_state": OWN | {"sleep_state"},
    "vllm:lora_requests_info": {"max_lora", "waiting_lora_adapters", "running_lora_adapters"},
    "vllm:cache_config_info": {"engine", "block_size", "num_gpu_blocks"},
    "cbsim_time_scale": set(),
    "cbsim_lag_seconds": {"stat"},
    "cbsim_faithful": set(),
}
COUNTERS = {
    **dict.fromkeys(("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions"), OWN),
    **dict.fromkeys(("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits"), OWN),
    **dict.fromkeys(("vllm:mm_cache_queries", "vllm:mm_cache_hits", "vllm:generation_tokens"), OWN),
    **dict.fromkeys(("vllm:prompt_tokens", "vllm:prompt_tokens_cached"), OWN),
    "vllm:prompt_tokens_by_source": OWN | {"source"},
    "vllm:request_success": OWN | {"finished_reason"},
    "vllm:admission_rejections": {"model_name", "reason"},
    "cbsim_late_steps": set(),
}
FIRST = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TOKEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
LENGTH = "1 2 5 10 20 50 100 200 500 1000 2000"
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": FIRST,
    "vllm:inter_token_latency_seconds": TOKEN,
    "vllm:request_time_per_output_token_seconds": TOKEN,
    "vllm:e2e_request_latency_seconds": REQUEST,
    "vllm:request_queue_time_seconds": REQUEST,
    "vllm:request_inference_time_seconds": REQUEST,
    "vllm:request_prefill_time_seconds": REQUEST,
    "vllm:request_decode_time_seconds": REQUEST,
    "vllm:request_prompt_tokens": LENGTH,
    "vllm:request_generation_tokens": LENGTH,
    "vllm:request_max_num_generation_tokens": LENGTH,
    "vllm:request_params_max_tokens": LENGTH,
    "vllm:request_prefill_kv_computed_tokens": LENGTH,
    "vllm:request_params_n": "1 2 5 10 20",
    "vllm:request_num_preemptions": "1 2 3 4 5 10 20",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}


def test_names_and_types_are_those_that_readers_know() -> None:
    types = {family.name: family.type for family in text_string_to_metric_families(meter().exposition().decode())}
    expected = dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter")
    assert types == expected | dict.fromkeys(HISTOGRAMS, "histogram")


@pytest.mark.parametrize(("name", "labels"), (GAUGES | COUNTERS).items())
def test_labels_are_those_that_readers_select_by(name: str, labels: set[str]) -> None:
    exported = f"{name}_total" if name in COUNTERS else name
    of_name = [sample for sample in samples(meter()) if sample.name == exported]
    assert of_name and all(set(sample.labels) == labels for sample in of_name)


@pytest.mark.parametrize(("name", "bounds"), HISTOGRAMS.items())
def test_buckets_are_those_that_dashboards_sum_over(name: str, bounds: str) -> None:
    of_name = [sample for sample in samples(meter()) if sample.name == f"{name}_bucket"]
    expected = [*map(float, bounds.split()), float("inf")]
    assert [float(sample.labels["le"]) for sample in of_name] == expected
    assert all(set(sample.labels) == OWN | {"le"} for sample in of_name)


def test_le_is_written_as_vllm_writes_it() -> None:
    """A query names a bucket by its text."""
    names = {s.labels["le"] for s in samples(meter()) if s.name == "vllm:e2e_request_latency_seconds_bucket"}
    assert {"0.3", "1.0", "7680.0", "+Inf"} <= names


def test_states_at_rest() -> None:
    """What this server has not is exported as vLLM does of one that does not use it."""
    by = meter()
    assert number(by, "vllm:engine_sleep_state", sleep_state="awake") == 1
    assert number(by, "vllm:engine_sleep_state", sleep_state="weights_offloaded") == 0
    assert number(by, "vllm:lora_requests_info", max_lora="0") == NOW_S
    assert number(by, "vllm:cache_config_info", block_size="16", num_gpu_blocks="1000") == 1
    assert number(by, "vllm:num_requests_running", model_name=Server.model, engine="0") == 3
    assert number(by, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert number(by, "vllm:num_requests_waiting_by_reason", reason="deferred") == 0
    assert number(by, "vllm:kv_cache_usage_perc") == 0.25


def test_how_well_the_clock_is_kept() -> None:
    by = meter()
    assert number(by, "cbsim_time_scale") == 10
    assert [number(by, "cbsim_lag_seconds", stat=stat) for stat in ("now", "max", "p99")] == [0.001, 0.03, 0.002]
    assert number(by, "cbsim_late_steps_total") == 7
    assert number(by, "cbsim_faithful") == 0  # 2 ms of lag at the 99th percentile, 1 ms allowed


def test_a_real_server_has_no_deadlines() -> None:
    names = {sample.name for sample in samples(meter(None)) if sample.name.startswith("cbsim_")}
    assert names == {"cbsim_time_scale"}
    assert number(meter(None), "cbsim_time_scale") == 1


# -- property: the counts are those of what happened


@given(st.lists(st.floats(0, 200) | st.sampled_from([0.01, 0.025, 80.0]), max_size=50))
def test_cumulative_buckets_are_a_recount(values: list[float]) -> None:
    """A value on a bound belongs below it; the last bucket counts all."""
    bounds = tuple(map(float, TOKEN.split()))
    counts = Histogram(bounds)
    for value in values:
        counts.observe(value)
    recount = [sum(value <= bound for value in values) for bound in (*bounds, float("inf"))]
    assert [count for _, count in counts.cumulative()] == recount
    assert counts.total == pytest.approx(sum(values))


@given(st.integers(1, 10_000_000))
def test_bounds_of_lengths_end_at_the_longest(most: int) -> None:
    bounds = tokens_up_to(most)
    assert bounds[0] == 1 and bounds[-1] <= most < 2.5 * bounds[-1]
    assert all(b / a in (2, 2.5) for a, b in pairwise(bounds))


@dataclass
class Life:
    """A request: when its deliveries come and how many tokens each has, and how it ends."""

    prompt: int
    cached: int
    wait_s: float
    deliveries: list[tuple[int, float]]
    finish: str
    preemptions: int


LIVES = st.builds(
    Life,
    prompt=st.integers(1, 900),
    cached=st.integers(0, 0) | st.integers(1, 900),
    wait_s=st.floats(0, 30),
    deliveries=st.lists(st.tuples(st.integers(1, 4), st.floats(0, 3)), max_size=6),
    finish=st.sampled_from(["stop", "length", ABORT, "error"]),
    preemptions=st.integers(0, 3),
)


def live(life: Life, by: VllmMeter, arrived_s: float) -> Stream:
    stream = Stream(Generation(id="x", prompt=range(life.prompt), max_tokens=100), by)
    stream.arrive(arrived_s)
    if life.deliveries:
        stream.schedule(arrived_s + life.wait_s, min(life.cached, life.prompt - 1))
    at_s = arrived_s + life.wait_s
    for tokens, gap_s in life.deliveries:
        at_s += gap_s
        stream.put([7] * tokens, at_s)
    stream.preemptions = life.preemptions
    stream.end(life.finish, at_s)
    stream.end("error", at_s + 1)  # the first end counts
    return stream


@given(st.lists(LIVES, max_size=6))
def test_counts_are_those_of_the_streams(lives: list[Life]) -> None:
    """Tokens of every stream are counted; latencies and lengths of those whose text is whole."""
    by = meter()
    streams = [live(life, by, float(i)) for i, life in enumerate(lives)]
    heard = [stream for stream in streams if stream.tokens]
    whole = [stream for stream in heard if stream.finish in ("stop", "length")]
    read = samples(by)
    assert number(read, "vllm:generation_tokens_total") == sum(stream.tokens for stream in streams)
    assert number(read, "vllm:prompt_tokens_total") == sum(len(stream.generation.prompt) for stream in heard)
    cached = sum(stream.cached_tokens for stream in heard)
    assert number(read, "vllm:prompt_tokens_cached_total") == cached == number(read, "vllm:prefix_cache_hits_total")
    sources = [s.value for s in read if s.name == "vllm:prompt_tokens_by_source_total"]
    assert sum(sources) == number(read, "vllm:prompt_tokens_total")
    ends = Counter(stream.finish for stream in streams)
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert number(read, "vllm:request_success_total", finished_reason=reason) == ends[reason]
    gaps = sum(max(len(life.deliveries) - 1, 0) for life in lives)
    assert number(read, "vllm:inter_token_latency_seconds_count") == gaps
    assert number(read, "vllm:time_to_first_token_seconds_count") == len(heard)
    firsts = sum(stream.first_s - stream.arrived_s for stream in heard if stream.first_s is not None)
    assert number(read, "vllm:time_to_first_token_seconds_sum") == pytest.approx(firsts)
    for name in HISTOGRAMS:
        if name.startswith(("vllm:request_", "vllm:e2e_")):
            assert number(read, f"{name}_count") == len(whole)
    assert number(read, "vllm:request_generation_tokens_sum") == sum(stream.tokens for stream in whole)
    assert number(read, "vllm:request_num_preemptions_sum") == sum(stream.preemptions for stream in whole)


@given(LIVES.filter(lambda life: len(life.deliveries) > 1))
def test_the_parts_of_a_latency_are_the_whole(life: Life) -> None:
    """Queue + prefill + decode = e2e, queue + inference = e2e; TPOT is decode over the tokens after the first."""
    life.finish = "length"
    by = meter()
    stream = live(life, by, 5.0)
    read = samples(by)
    total = {name: number(read, f"vllm:{name}_sum") for name in (
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_inference_time_seconds", "e2e_request_latency_seconds", "request_time_per_output_token_seconds",
    )}  # fmt: skip
    queue, prefill, decode, inference, e2e, tpot = total.values()
    assert queue + prefill + decode == pytest.approx(e2e) == pytest.approx(queue + inference)
    assert tpot * (stream.tokens - 1) == pytest.approx(decode)


def test_steps_and_rejections() -> None:
    by = meter()
    for tokens, preempted in ((1, 0), (8, 2), (20_000, 0)):
        by.stepped(tokens, preempted)
    for reason in ("queued_requests", *["queued_tokens"] * 2, "streams", "closing", "because a client said so"):
        by.rejected(reason)
    assert number(by, "vllm:num_preemptions_total") == 2
    assert number(by, "vllm:iteration_tokens_total_sum") == 20_009
    assert number(by, "vllm:iteration_tokens_total_bucket", le="8.0") == 2
    counts = {s.labels["reason"]: s.value for s in samples(by) if s.name == "vllm:admission_rejections_total"}
    assert counts == {"max_num_queued_reqs": 1, "max_num_queued_tokens": 2, "max_streams": 1}


def test_two_meters_share_nothing() -> None:
    """No registry is global: two servers in one process count their own."""
    one, other = meter(), meter()
    one.stepped(5, 1)
    assert (number(one, "vllm:num_preemptions_total"), number(other, "vllm:num_preemptions_total")) == (1, 0)
