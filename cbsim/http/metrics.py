"""The Prometheus metrics of /metrics: names, types, labels and buckets of vLLM 0.33, and the clock's lag.

Seconds are those of the server's clock: simulated ones if time is simulated, whatever `cbsim_time_scale` is.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cbsim.http.backend import Backend, Meter, Stream

ENGINE = "0"
DONE = ("stop", "length")  # finish reasons of a complete text; latencies are of these, as in vLLM
ENDS = (*DONE, "abort", "error", "repetition")
REJECTIONS = {  # reason of the admission controller -> label; the last label is not vLLM's
    "queued_requests": "max_num_queued_reqs",
    "queued_tokens": "max_num_queued_tokens",
    "streams": "max_streams",
}
AWAKE = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}

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
LENGTH: tuple[float, ...] = ()  # bounds up to the server's longest text
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", TTFT_S),
    "inter_token_latency_seconds": ("Between deliveries of a text.", TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean time a token after the first.", TOKEN_S),
    "e2e_request_latency_seconds": ("Arrival to last token.", REQUEST_S),
    "request_queue_time_seconds": ("Arrival to first planned.", REQUEST_S),
    "request_inference_time_seconds": ("First planned to last token.", REQUEST_S),
    "request_prefill_time_seconds": ("First planned to first token.", REQUEST_S),
    "request_decode_time_seconds": ("First token to last token.", REQUEST_S),
    "request_prompt_tokens": ("Tokens of the prompt.", LENGTH),
    "request_generation_tokens": ("Tokens of the answer.", LENGTH),
    "request_max_num_generation_tokens": ("Of a request's longest answer.", LENGTH),
    "request_params_n": ("Answers asked for.", COPIES),
    "request_params_max_tokens": ("Limit of the answer.", LENGTH),
    "iteration_tokens_total": ("Query tokens of a step.", STEP_TOKENS),
    "request_num_preemptions": ("Preemptions of a request.", (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)),
    "request_prefill_kv_computed_tokens": ("Tokens of the prompt without those cached.", LENGTH),
}

Labels = Mapping[str, str]
Value = float | Mapping[str, Mapping[str, float]]  # a number, or numbers by the values of a label
Family = tuple[str, str, Labels, Value]  # (name, documentation, labels, value)


class VllmMeter(Meter, Collector):
    """A meter of requests and steps; families are made when they are read. No label has a value from a client."""

    def __init__(self, server: Backend, wall_s: Callable[[], float] = time.time) -> None:
        lengths = tokens_up_to(server.max_model_len)
        self._server, self._wall_s = server, wall_s
        self._histograms = {name: Histogram(bounds or lengths) for name, (_, bounds) in HISTOGRAMS.items()}
        self._first = self._histograms["time_to_first_token_seconds"]
        self._gaps = self._histograms["inter_token_latency_seconds"]
        self._steps = self._histograms["iteration_tokens_total"]
        self._ended = dict.fromkeys(ENDS, 0)
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        self._looked_up = self._hit = 0  # prompt tokens, counted when requests are first planned
        self._prompt_tokens = self._cached_tokens = 0  # prompt tokens, counted when requests get their first token
        self._generated = self._preempted = 0

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
        """Count a rejection for lack of room; those of a server that ends or has ended do not count."""
        if reason in self._rejected:
            self._rejected[reason] += 1

    def exposition(self) -> bytes:
        return generate_latest(self)

    def _observe(self, stream: Stream, first_s: float, last_s: float) -> None:
        """Observe a complete text, whose last token was emitted at `last_s`. TPOT of one token is 0, as in vLLM."""
        arrived_s, tokens, prompt = stream.arrived_s, stream.tokens, len(stream.generation.prompt)
        scheduled_s = arrived_s if stream.scheduled_s is None else stream.scheduled_s
        observed = {
            "e2e_request_latency_seconds": last_s - arrived_s,
            "request_queue_time_seconds": scheduled_s - arrived_s,
            "request_inference_time_seconds": last_s - scheduled_s,
            "request_prefill_time_seconds": first_s - scheduled_s,
            "request_decode_time_seconds": last_s - first_s,
            "request_time_per_output_token_seconds": (last_s - first_s) / (tokens - 1) if tokens > 1 else 0.0,
            "request_prompt_tokens": prompt,
            "request_prefill_kv_computed_tokens": prompt - stream.cached_tokens,
            "request_generation_tokens": tokens,
            "request_max_num_generation_tokens": tokens,
            "request_params_max_tokens": stream.generation.max_tokens,
            "request_params_n": 1,
            "request_num_preemptions": stream.preemptions,
        }
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        own = {"model_name": self._server.model, "engine": ENGINE}
        yield from (_family(GaugeMetricFamily, *gauge) for gauge in self._gauges(own))
        yield from (_family(CounterMetricFamily, *counter) for counter in self._counters(own))
        for name, (documentation, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", documentation, labels=[*own])
            values = self._histograms[name]
            family.add_metric([*own.values()], values.cumulative(), values.total)
            yield family
        yield from self._clock()

    def _gauges(self, own: Labels) -> Sequence[Family]:
        load = self._server.load
        reasons = {"reason": {"capacity": load.waiting, "deferred": 0}}
        adapters = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        none = "Requests of LoRA adapters, of which there are none; its value is now."
        cache = {"engine": ENGINE, "block_size": str(load.block_size), "num_gpu_blocks": str(load.num_blocks)}
        return (
            ("num_requests_running", "Requests in steps.", own, load.running),
            ("num_requests_waiting", "Requests that wait.", own, load.waiting),
            ("num_requests_waiting_by_reason", "Requests that wait, by reason.", own, reasons),
            ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.", own, load.kv_usage),
            ("engine_sleep_state", "Sleep state; it never sleeps.", own, {"sleep_state": AWAKE}),
            ("lora_requests_info", none, adapters, self._wall_s()),
            ("cache_config_info", "The KV cache.", cache, 1),
        )

    def _counters(self, own: Labels) -> Sequence[Family]:
        shared, media = "Of a cache shared with other servers: none.", "Of images and sound: none."
        computed, cached = self._prompt_tokens - self._cached_tokens, self._cached_tokens
        sources = {"local_compute": computed, "local_cache_hit": cached, "external_kv_transfer": 0}
        rejections = {REJECTIONS[reason]: count for reason, count in self._rejected.items()}
        model = {"model_name": self._server.model}
        return (
            ("prefix_cache_queries", "Prompt tokens looked up.", own, self._looked_up),
            ("prefix_cache_hits", "Prompt tokens whose KV was there.", own, self._hit),
            ("external_prefix_cache_queries", shared, own, 0),
            ("external_prefix_cache_hits", shared, own, 0),
            ("mm_cache_queries", media, own, 0),
            ("mm_cache_hits", media, own, 0),
            ("num_preemptions", "Preemptions.", own, self._preempted),
            ("prompt_tokens", "Prompt tokens of requests with a token.", own, self._prompt_tokens),
            ("prompt_tokens_cached", "The same, from a cache.", own, self._cached_tokens),
            ("generation_tokens", "Tokens of answers.", own, self._generated),
            ("prompt_tokens_by_source", "The same, by source of their KV.", own, {"source": sources}),
            ("request_success", "Requests that ended, by reason.", own, {"finished_reason": self._ended}),
            ("admission_rejections", "Requests turned away with 503.", model, {"reason": rejections}),
        )

    def _clock(self) -> Iterator[Metric]:
        """Yield the clock's metrics. A server without deadlines has no lag, and its scale is 1."""
        timing = self._server.timing
        scale = 1.0 if timing is None else timing.scale
        yield GaugeMetricFamily("cbsim_time_scale", "The server's seconds in one of this machine's.", value=scale)
        if timing is None:
            return
        lag = GaugeMetricFamily("cbsim_lag_seconds", "How late steps are, on this machine's clock.", labels=("stat",))
        for stat, value in (("now", timing.lag_s), ("max", timing.lag_max_s), ("p99", timing.lag_p99_s)):
            lag.add_metric((stat,), value)
        yield lag
        yield CounterMetricFamily("cbsim_late_steps", "Steps later than the bound.", value=timing.late_steps)
        faithful = "1 while the p99 of the lag is within 1 ms or 1 % of the median time between tokens."
        yield GaugeMetricFamily("cbsim_faithful", faithful, value=int(timing.faithful))


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, documentation: str, labels: Labels, value: Value
) -> Metric:
    """Return a family with one sample, or one by each value of a label."""
    if isinstance(value, float | int):
        family = kind(f"vllm:{name}", documentation, labels=[*labels])
        family.add_metric([*labels.values()], value)
        return family
    ((by, numbers),) = value.items()
    family = kind(f"vllm:{name}", documentation, labels=[*labels, by])
    for key, number in numbers.items():
        family.add_metric([*labels.values(), key], number)
    return family


def tokens_up_to(most: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50 ... up to `most`."""
    bounds = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(bound) for bound in bounds if bound <= most)


class Histogram:
    """A histogram: the number of values at or below each of its ascending bounds, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # counts of each bucket alone; the last one has no upper bound
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound as Prometheus writes it, number of values up to it); the last one counts all values."""
        return list(zip(map(floatToGoString, (*self.bounds, float("inf"))), accumulate(self.counts), strict=True))
