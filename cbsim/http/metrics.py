"""What a monitor reads at /metrics: names, types, labels and buckets of vLLM 0.33, and how well the clock is kept.

Seconds are those of the server's clock: simulated ones where time is simulated, whatever `cbsim_time_scale` is.

Counts of values by size, as cheap to add to as a list.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cbsim.http.backend import Load, Stream, Timing

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
ENGINE = "0"
DONE = ("stop", "length")  # ends of a text that is whole; latencies are of these, as in vLLM
ENDS = (*DONE, "abort", "error", "repetition")
REJECTIONS = {  # by the admission controller's reasons; the last is ours
    "queued_requests": "max_num_queued_reqs",
    "queued_tokens": "max_num_queued_tokens",
    "streams": "max_streams",
}
AWAKE = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}

Labelled = Sequence[tuple[Sequence[str], float]]  # values of a family's own labels, and the number


class Metered(Protocol):
    """What is read of a server when somebody asks for its metrics."""

    model: str
    max_model_len: int

    @property
    def load(self) -> Load: ...

    @property
    def timing(self) -> Timing | None: ...


class VllmMeter:
    """Counts what happens to requests and steps, and writes it out. No label takes a value from a client."""

    def __init__(self, server: Metered, wall_s: Callable[[], float] = time.time) -> None:
        tokens = tokens_up_to(server.max_model_len)
        self.server, self._wall_s = server, wall_s
        self._first, self._gaps = Histogram(TTFT_S), Histogram(TOKEN_S)
        self._per_token = Histogram(TOKEN_S)
        self._whole, self._queued, self._served, self._prefill, self._decode = (Histogram(REQUEST_S) for _ in range(5))
        self._prompts, self._answers, self._longest, self._limits, self._computed = (
            Histogram(tokens) for _ in range(5)
        )
        self._copies, self._preemptions = Histogram(COPIES), Histogram(PREEMPTIONS)
        self._steps = Histogram(STEP_TOKENS)
        self._ended = dict.fromkeys(ENDS, 0)
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        self._looked_up = self._hit = 0  # tokens of prompts, when they are first planned
        self._prompt_tokens = self._cached_tokens = 0  # likewise, when their first token is there
        self._generated = self._preempted = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(self))

    # -- Meter

    def arrived(self, stream: Stream) -> None: ...

    def scheduled(self, stream: Stream) -> None:
        self._looked_up += len(stream.generation.prompt)
        self._hit += stream.cached_tokens

    def emitted(self, stream: Stream, tokens: int, gap_s: float) -> None:
        self._generated += tokens
        if stream.tokens == tokens:
            self._prompt_tokens += len(stream.generation.prompt)
            self._cached_tokens += stream.cached_tokens
            self._first.observe(gap_s)
        else:
            self._gaps.observe(gap_s)

    def ended(self, stream: Stream) -> None:
        assert stream.finish is not None
        self._ended[stream.finish] += 1
        if stream.finish in DONE and stream.first_s is not None and stream.last_s is not None:
            self._observe(stream, stream.first_s, stream.last_s)

    def stepped(self, tokens: int, preempted: int) -> None:
        self._steps.observe(tokens)
        self._preempted += preempted

    def rejected(self, reason: str) -> None:
        """For want of room. A server that ends or has ended does not admit, and rejects nobody."""
        if reason in self._rejected:
            self._rejected[reason] += 1

    # -- by the front end

    def exposition(self) -> bytes:
        """Everything, as Prometheus reads it; CONTENT_TYPE is its type."""
        return generate_latest(self._registry)

    def _observe(self, stream: Stream, first_s: float, last_s: float) -> None:
        """A whole text, whose last token came at `last_s`. The time a token of a single one is 0, as in vLLM."""
        generation = stream.generation
        scheduled_s = stream.arrived_s if stream.scheduled_s is None else stream.scheduled_s
        self._whole.observe(last_s - stream.arrived_s)
        self._queued.observe(scheduled_s - stream.arrived_s)
        self._served.observe(last_s - scheduled_s)
        self._prefill.observe(first_s - scheduled_s)
        self._decode.observe(last_s - first_s)
        self._per_token.observe((last_s - first_s) / (stream.tokens - 1) if stream.tokens > 1 else 0.0)
        self._prompts.observe(len(generation.prompt))
        self._computed.observe(len(generation.prompt) - stream.cached_tokens)
        self._answers.observe(stream.tokens)
        self._longest.observe(stream.tokens)
        self._limits.observe(generation.max_tokens)
        self._copies.observe(1)
        self._preemptions.observe(stream.preemptions)


class _Families(Collector):
    """A meter's counts as families of Prometheus, made when they are read."""

    def __init__(self, meter: VllmMeter) -> None:
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._clock()

    def _gauges(self) -> Iterator[Metric]:
        load = self._meter.server.load
        yield self._gauge("num_requests_running", "Requests in steps.", [((), load.running)])
        yield self._gauge("num_requests_waiting", "Requests that wait.", [((), load.waiting)])
        by_reason = [(("capacity",), load.waiting), (("deferred",), 0)]
        yield self._gauge("num_requests_waiting_by_reason", "Requests that wait, by reason.", by_reason, ("reason",))
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.", [((), load.kv_usage)])
        states = [((state,), value) for state, value in AWAKE.items()]
        yield self._gauge("engine_sleep_state", "Sleep state; it never sleeps.", states, ("sleep_state",))
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Requests of LoRA adapters, of which there are none; its value is now.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        lora.add_metric(("0", "", ""), self._meter._wall_s())
        yield lora
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=("engine", "block_size", "num_gpu_blocks")
        )
        cache.add_metric((ENGINE, str(load.block_size), str(load.num_blocks)), 1)
        yield cache

    def _counters(self) -> Iterator[Metric]:
        meter = self._meter
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", [((), meter._looked_up)])
        yield self._counter("prefix_cache_hits", "Prompt tokens whose KV was there.", [((), meter._hit)])
        for name in ("external_prefix_cache_queries", "external_prefix_cache_hits"):
            yield self._counter(name, "Of a cache shared with other servers: none.", [((), 0)])
        for name in ("mm_cache_queries", "mm_cache_hits"):
            yield self._counter(name, "Of images and sound: none.", [((), 0)])
        yield self._counter("num_preemptions", "Preemptions.", [((), meter._preempted)])
        yield self._counter("prompt_tokens", "Prompt tokens of requests with a token.", [((), meter._prompt_tokens)])
        sources = [
            (("local_compute",), meter._prompt_tokens - meter._cached_tokens),
            (("local_cache_hit",), meter._cached_tokens),
            (("external_kv_transfer",), 0),
        ]
        yield self._counter("prompt_tokens_by_source", "The same, by source of their KV.", sources, ("source",))
        yield self._counter("prompt_tokens_cached", "The same, from a cache.", [((), meter._cached_tokens)])
        yield self._counter("generation_tokens", "Tokens of answers.", [((), meter._generated)])
        ends = [((reason,), count) for reason, count in meter._ended.items()]
        yield self._counter("request_success", "Requests that ended, by reason.", ends, ("finished_reason",))
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests turned away with 503.", labels=("model_name", "reason")
        )
        for reason, count in meter._rejected.items():
            rejections.add_metric((meter.server.model, REJECTIONS[reason]), count)
        yield rejections

    def _histograms(self) -> Iterator[Metric]:
        meter = self._meter
        yield self._histogram("time_to_first_token_seconds", "Arrival to first token.", meter._first)
        yield self._histogram("inter_token_latency_seconds", "Between deliveries of a text.", meter._gaps)
        yield self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first.", meter._per_token
        )
        yield self._histogram("e2e_request_latency_seconds", "Arrival to last token.", meter._whole)
        yield self._histogram("request_queue_time_seconds", "Arrival to first planned.", meter._queued)
        yield self._histogram("request_inference_time_seconds", "First planned to last token.", meter._served)
        yield self._histogram("request_prefill_time_seconds", "First planned to first token.", meter._prefill)
        yield self._histogram("request_decode_time_seconds", "First token to last token.", meter._decode)
        yield self._histogram("request_prompt_tokens", "Tokens of the prompt.", meter._prompts)
        yield self._histogram("request_generation_tokens", "Tokens of the answer.", meter._answers)
        yield self._histogram("request_max_num_generation_tokens", "Of a request's longest answer.", meter._longest)
        yield self._histogram("request_params_n", "Answers asked for.", meter._copies)
        yield self._histogram("request_params_max_tokens", "Limit of the answer.", meter._limits)
        yield self._histogram("iteration_tokens_total", "Query tokens of a step.", meter._steps)
        yield self._histogram("request_num_preemptions", "Preemptions of a request.", meter._preemptions)
        yield self._histogram(
            "request_prefill_kv_computed_tokens", "Tokens of the prompt without those cached.", meter._computed
        )

    def _clock(self) -> Iterator[Metric]:
        """A server without deadlines has no lag, and its scale is 1."""
        timing = self._meter.server.timing
        scale = 1.0 if timing is None else timing.scale
        yield GaugeMetricFamily("cbsim_time_scale", "The server's seconds in one of this machine's.", value=scale)
        if timing is None:
            return
        lag = GaugeMetricFamily("cbsim_lag_seconds", "How late steps are, on this machine's clock.", labels=("stat",))
        for stat, value in (("now", timing.lag_s), ("max", timing.lag_max_s), ("p99", timing.lag_p99_s)):
            lag.add_metric((stat,), value)
        yield lag
        yield CounterMetricFamily("cbsim_late_steps", "Steps later than the bound.", value=timing.late_steps)
        emitted = "1 while the p99 of the lag is within 1 ms or 1 % of the median time between tokens."
        yield GaugeMetricFamily("cbsim_faithful", emitted, value=int(timing.faithful))

    def _gauge(self, name: str, documentation: str, numbers: Labelled, labels: Sequence[str] = ()) -> Metric:
        return self._filled(GaugeMetricFamily(f"vllm:{name}", documentation, labels=(*LABELS, *labels)), numbers)

    def _counter(self, name: str, documentation: str, numbers: Labelled, labels: Sequence[str] = ()) -> Metric:
        return self._filled(CounterMetricFamily(f"vllm:{name}", documentation, labels=(*LABELS, *labels)), numbers)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, numbers: Labelled) -> Metric:
        for labels, value in numbers:
            family.add_metric((self._meter.server.model, ENGINE, *labels), value)
        return family

    def _histogram(self, name: str, documentation: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
        family.add_metric((self._meter.server.model, ENGINE), values.cumulative(), values.total)
        return family


Buckets = list[tuple[str, float]]

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))  # 1, 8, 16 ... 16384
COPIES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def tokens_up_to(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    bounds = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(bound) for bound in bounds if bound <= most)


class Histogram:
    """How many values lie at or below each of its bounds, which ascend, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # of each bucket alone; the last one is open
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Buckets:
        """(upper bound as Prometheus writes it, values up to there), the last of them all."""
        sum_ = 0
        buckets: Buckets = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            sum_ += count
            buckets.append((floatToGoString(bound), sum_))
        return buckets
