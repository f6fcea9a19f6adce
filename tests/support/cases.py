"""Random small runs of every family of schedulers, and what holds of any of them at every step and at the end.

Budgets, seats and caches are tiny, so that nearly every step refuses, splits or takes something back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st

from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.registry import OURS
from cbsim.schedulers.sarathi.scheduler import SarathiServe
from cbsim.schedulers.sarathi.settings import ServeOptions
from cbsim.schedulers.sglang.scheduler import SglangScheduler
from cbsim.schedulers.sglang.settings import SglangOptions
from cbsim.schedulers.simple.fcfs import CONTIGUOUS, Fcfs
from cbsim.schedulers.simple.settings import ContiguousOptions
from cbsim.schedulers.transformers.scheduler import TransformersScheduler
from cbsim.schedulers.transformers.scheduler_523 import Transformers523
from cbsim.schedulers.transformers.settings import TransformersOptions
from cbsim.schedulers.trtllm.scheduler import TrtllmScheduler
from cbsim.schedulers.trtllm.settings import TrtllmOptions
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VllmOptions
from cbsim.workload.scheduler_tests import ChainedKeys
from support.contents import Memory
from support.helpers import AnyScheduler, Ask, Drive, token_steps

MOST_TOKENS = 24  # longest request
POLICIES, SPARED = ("fcfs", "priority"), (0.0, 0.0, 0.2)  # of vLLM
Case = tuple[Callable[[], AnyScheduler], list[Ask]]
OnStep = Callable[[StepPlan, list[Row]], Any]
D = TypeVar("D", bound=Drive)


@st.composite
def asks(draw: st.DrawFn, block_size: int) -> list[Ask]:
    """Up to a dozen requests; texts come from two families, so prefixes are shared and some requests are the same. Some
    have further samples.
    """
    unit = draw(st.sampled_from([1, block_size]))
    keys = ChainedKeys(unit)
    made: list[Ask] = []
    for _ in range(draw(st.integers(1, 12))):
        first = _ask(draw, len(made), unit, keys)
        made.append(first)
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
            made.append(_ask(draw, len(made), unit, keys, first))
    return made


def _ask(draw: st.DrawFn, index: int, unit: int, keys: ChainedKeys, first: Ask | None = None) -> Ask:
    prompt = first.spec.prompt_tokens if first else draw(st.integers(1, 14))
    most = draw(st.integers(1, MOST_TOKENS - prompt))
    outputs = draw(st.one_of(st.just(most), st.integers(1, most)))
    family, common = draw(st.integers(0, 1)), draw(st.sampled_from([0, 4, prompt, prompt + outputs]))
    text = [family if i < common else 100 + index for i in range(prompt + outputs)]
    if first:
        text[:prompt] = first.text[:prompt]
    declared = draw(st.sampled_from([0, prompt, prompt + outputs]))
    spec = RequestSpec(
        index=index,
        id=f"r{index}",
        arrival_ns=first.spec.arrival_ns if first else draw(st.integers(0, 3)),
        prompt_tokens=prompt,
        output_tokens=outputs,
        max_tokens=most,
        priority=draw(st.integers(0, 2)),
        prefix=keys.of(text[:declared]),
        prefix_block_tokens=unit,
        prefix_tokens=declared,
        sample_of=first.spec if first else None,
    )
    cancelled = draw(st.one_of(st.none(), st.none(), st.integers(0, 40)))
    stops_at = draw(st.one_of(st.none(), st.none(), st.integers(1, outputs)))
    return Ask(spec, first.arrives if first else draw(st.integers(0, 25)), cancelled, stops_at, text)


@st.composite
def vllm_cases(draw: st.DrawFn) -> Case:
    """A vLLM scheduler with any of its options, and a workload. By priority, prompts are shared only where chunks are
    not cut short and no blocks are spared: as in vLLM, a victim that has a row in the step loses it, but its blocks
    keep the keys that planning gave them, and others would read what was never computed.
    """
    size, chunked, policy = draw(st.sampled_from([1, 2, 4])), draw(st.booleans()), draw(st.sampled_from(POLICIES))
    threshold, watermark, adaptive = *(draw(st.sampled_from(of)) for of in ([0, 0, 3], SPARED)), draw(st.booleans())
    loses = policy == "priority" and (threshold > 0 or adaptive or watermark > 0)
    options = VllmOptions(
        version=draw(st.sampled_from(["0.19", "0.33"])),
        policy=policy,
        block_size=size,
        num_blocks=1 + draw(st.integers(MOST_TOKENS // size, 3 * MOST_TOKENS // size)),
        max_model_len=draw(st.sampled_from([MOST_TOKENS, MOST_TOKENS, 16])),
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 30)) if chunked else draw(st.integers(MOST_TOKENS, 40)),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=not loses and draw(st.booleans()),
        long_prefill_token_threshold=threshold,
        adaptive_long_prefill_threshold=adaptive,
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=watermark,
        prefill_schedule_interval=draw(st.sampled_from([1, 1, 3])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        host_blocks=draw(st.integers(0, 2 * MOST_TOKENS // size)),
    )
    return partial(VllmScheduler, options), draw(asks(size))


@st.composite
def transformers_cases(draw: st.DrawFn, version: str = "5.17") -> Case:
    """A transformers scheduler, of 5.23 with one or more blocks in a sector, and a workload."""
    size, new = draw(st.sampled_from([3, 4, 5])), version == "5.23"
    per = draw(st.sampled_from([1, 1, 2, 3])) if new else 1
    least = -(-MOST_TOKENS // (size * per)) if new else MOST_TOKENS // size + 2
    most = 3 * least if new else 3 * MOST_TOKENS // size
    options = TransformersOptions(
        name=draw(st.sampled_from(["transformers_fifo", "transformers_prefill_first"])),
        version="5.23" if new else "5.17",
        block_size=size,
        num_blocks=draw(st.integers(least, most)) * per,
        max_batch_tokens=draw(st.integers(1, 30)),
        max_requests_per_batch=draw(st.integers(1, 8)),
        max_blocks_per_request=draw(st.sampled_from([0, 2, 8])),
        safety_margin=draw(st.sampled_from([0.0, 0.0, 0.2])),
        allow_block_sharing=draw(st.booleans()),
        host_blocks=draw(st.sampled_from([0, 0, 1, 4] if new else [0, 0, 3, 12])) * per,
        blocks_per_sector=per,
    )
    return partial(Transformers523 if new else TransformersScheduler, options), draw(asks(size))


@st.composite
def contiguous_cases(draw: st.DrawFn) -> Case:
    """A scheduler with contiguous reservations by any rule, placed anyhow, and a workload."""
    size, seats = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 8))
    options = ContiguousOptions(
        reserve=draw(st.sampled_from(["max_model_len", "max_tokens", "power_of_two", "exact"])),
        placement=draw(st.sampled_from(["first_fit", "best_fit", "buddy"])),
        block_size=size,
        num_blocks=draw(st.integers(MOST_TOKENS // size, 4 * MOST_TOKENS // size)),
        max_model_len=draw(st.sampled_from([MOST_TOKENS, MOST_TOKENS, 16])),
        max_num_seqs=seats,
        max_num_batched_tokens=draw(st.integers(seats, 30)),
        enable_chunked_prefill=draw(st.booleans()),
    )
    if not options.enable_chunked_prefill:
        options = replace(options, max_num_batched_tokens=draw(st.integers(MOST_TOKENS, 40)))
    return partial(CONTIGUOUS.make, options), draw(asks(size))


@st.composite
def sarathi_cases(draw: st.DrawFn) -> Case:
    """One of Sarathi-Serve's schedulers, and a workload."""
    size = draw(st.sampled_from([1, 2, 4]))
    sizes: dict[str, Any] = {
        "block_size": size,
        "num_blocks": draw(st.integers(MOST_TOKENS // size, 3 * MOST_TOKENS // size)),
        "max_model_len": draw(st.sampled_from([MOST_TOKENS, MOST_TOKENS, 16])),
    }
    seats: dict[str, Any] = {"max_num_seqs": draw(st.integers(1, 8))}
    chunk = draw(st.integers(1, 30))
    stages = {
        "enable_dynamic_chunking_schedule": True,
        "low_chunk_size": draw(st.integers(1, 6)),
        "high_chunk_size": draw(st.integers(6, 20)),
        "chunk_schedule_max_tokens": draw(st.integers(1, 14)),
        "chunk_schedule_stages": draw(st.integers(1, 4)),
    }
    chunks, whole = {"chunk_size": chunk}, {"max_batched_tokens": sizes["max_model_len"]}
    given = [("sarathi", chunks), ("sarathi", stages), ("vllm_v0", whole), ("simple_chunking", chunks)]
    name, own = draw(st.sampled_from([*given, ("orca", {}), ("faster_transformer", {})]))
    kind = OURS[name]
    return partial(kind.make, ServeOptions(kind.settings(**seats, **own), **sizes)), draw(asks(size))


@st.composite
def trtllm_cases(draw: st.DrawFn, **given: Any) -> Case:
    """A TensorRT-LLM scheduler with any of its options, or those given, and a workload."""
    size, tokens = draw(st.sampled_from([1, 2, 4])), draw(st.one_of(st.integers(1, 6), st.integers(1, 30)))
    policy = draw(st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "MAX_UTILIZATION", "STATIC_BATCH"]))
    options = TrtllmOptions(
        capacity_scheduler_policy=policy,
        block_size=size,
        num_blocks=MOST_TOKENS // size + draw(st.one_of(st.integers(0, 3), st.integers(0, 2 * MOST_TOKENS // size))),
        max_seq_len=draw(st.sampled_from([MOST_TOKENS, MOST_TOKENS, 16])),
        max_batch_size=draw(st.integers(1, 8)),
        max_num_requests=draw(st.integers(1, 8)),
        max_active_requests=draw(st.integers(1, 12)),
        max_num_tokens=tokens,
        enable_chunked_prefill=draw(st.booleans()),
        context_chunking_policy=draw(st.sampled_from(["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"])),
        chunk_unit_size=draw(st.integers(1, tokens)),
        two_step_lookahead=policy == "MAX_UTILIZATION" and draw(st.booleans()),
        batch_wait_timeout_iters=draw(st.sampled_from([0, 0, 3])),
        batch_wait_max_tokens_ratio=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    options = replace(options, **given)
    return partial(TrtllmScheduler, options), draw(asks(size))


def with_states(block_size: int, layers: int = 8, blocks: int | None = None, fraction: float = 0.9) -> Place:
    """A model three of whose four layers keep a state of a request, on a GPU of 80 GB."""
    linear = {"rule": "gated_delta", "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
    shape = shapes.model("tiny").model_dump() | {"layers": layers, "attention": ("linear", "linear", "linear", "full")}
    model = shapes.ModelShape.model_validate(shape | {"linear": linear | {"state_dtype": "float32"}})
    return Place(model, shapes.hardware("h100-sxm"), 2, block_size, fraction, blocks)


@st.composite
def sglang_cases(draw: st.DrawFn, *orders: str) -> Case:
    """An SGLang scheduler with any of its options, and a workload. The cache holds one request, or a few. Without the
    tree `ignore_eos` is drawn where no outputs are cut to an empty cache: such a request would wait for ever.
    """
    size = draw(st.sampled_from([1, 1, 2, 4]))
    order = draw(st.sampled_from(orders or ("fcfs", "lpm", "dfs-weight", "lof", "shortest-prefill-first", "hrrn")))
    tokens, context, shares = draw(st.integers(32, 80)), draw(st.sampled_from([24, 60])), draw(st.booleans())
    options = SglangOptions(
        schedule_policy=order,
        schedule_conservativeness=draw(st.sampled_from([0.02, 0.5, 1.0, 2.0])),
        block_size=size,
        num_blocks=tokens // size,
        max_running_requests=draw(st.integers(1, 8)),
        max_prefill_tokens=draw(st.integers(1, 30)),
        chunked_prefill_size=draw(st.sampled_from([-1, size, 4, 8, 16])),
        enable_mixed_chunk=draw(st.booleans()),
        context_length=context,
        disable_radix_cache=not shares,
        radix_eviction_policy=draw(st.sampled_from(["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"])),
        enable_priority_scheduling=order in ("fcfs", "lof") and draw(st.booleans()),
        disable_priority_preemption=draw(st.booleans()),
        schedule_low_priority_values_first=draw(st.booleans()),
        priority_scheduling_preemption_threshold=draw(st.integers(0, 1)),
        retraction_policy=draw(st.sampled_from(["length", "priority"])),
        prefill_max_requests=draw(st.sampled_from([None, 1, 3])),
        prefill_decode_interval=draw(st.sampled_from([0, 0, 2])),
        max_queued_requests=draw(st.sampled_from([None, None, 1, 4])),
        max_mamba_cache_size=None if shares else draw(st.sampled_from([None, 8])),
        ignore_eos=draw(st.booleans()) and (shares or tokens >= context + 3 * size),
    )
    return partial(SglangScheduler, options), draw(asks(size))


STRATEGIES = {
    "vllm": vllm_cases(),
    "transformers": transformers_cases(),
    "transformers 5.23": transformers_cases("5.23"),
    "contiguous": contiguous_cases(),
    "sarathi": sarathi_cases(),
    "trtllm": trtllm_cases(),
    "sglang": sglang_cases(),
}
FAMILIES = pytest.mark.parametrize("cases", STRATEGIES.values(), ids=STRATEGIES)
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


def limits(scheduler: AnyScheduler) -> tuple[int, int]:
    """Most tokens and most rows of a step."""
    if isinstance(scheduler, SarathiServe):
        return scheduler.limits.tokens or 1000, scheduler.options.settings.max_num_seqs
    if isinstance(scheduler, TrtllmScheduler):
        return scheduler.options.max_num_tokens, scheduler.options.max_batch_size
    if isinstance(scheduler, VllmScheduler | Fcfs):
        return scheduler.options.max_num_batched_tokens, scheduler.options.max_num_seqs
    if isinstance(scheduler, SglangScheduler):
        return scheduler.limits.tokens or 0, scheduler.options.max_running_requests
    return scheduler.options.max_batch_tokens, scheduler.options.max_requests_per_batch


def table_of(scheduler: AnyScheduler, spec: RequestSpec) -> list[int]:
    return scheduler.pool.table(scheduler.requests[spec])


class Watch:
    """Checks each plan against the scheduler's own view of its requests, and what rows read against what was
    written.
    """

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.before: dict[RequestSpec, int] = {}
        self.memory = Memory(drive)
        drive.on_step = self.step

    def step(self, plan: StepPlan, rows: list[Row]) -> None:
        scheduler = self.drive.scheduler
        self.memory.step(plan, rows)
        most_tokens, most_rows = limits(scheduler)
        assert plan.work.tokens <= most_tokens
        assert plan.work.rows <= most_rows
        assert plan.counts.free_blocks == scheduler.pool.free
        assert 0 <= plan.counts.new_blocks <= scheduler.pool.num_blocks - scheduler.pool.free
        assert plan.counts.running == len(scheduler.running)
        assert plan.counts.waiting == len(list(scheduler.waiting))
        ran = {row.spec: row for row in rows}
        for request in scheduler.running:
            row = ran.get(request.spec)
            was = row.start if row else self.before.get(request.spec, request.entered)
            assert request.computed == was + (row.tokens if row else 0), (request.spec, row)
            assert scheduler.pool.allocated(request) * scheduler.pool.block_size >= request.computed
        assert ran.keys() <= {r.spec for r in scheduler.running}
        assert all(self.drive.executor.tables[spec] == table_of(scheduler, spec) for spec in ran)
        assert plan.counts.table_blocks == sum(scheduler.pool.allocated(scheduler.requests[spec]) for spec in ran)
        contexts = [row.start for row in rows if row.chunk is None]
        assert plan.work.longest_context == max(contexts, default=0)
        assert plan.work.decode_context == sum(contexts)
        self.before = {r.spec: r.computed for r in scheduler.running}


def ran(drive: D, on_step: OnStep | None = None, **overridden: Callable[..., Any]) -> D:
    """Run to the end, with these methods of the scheduler replaced, and check the ends."""
    if on_step is not None:
        drive.on_step = on_step
    drive.overridden |= overridden
    drive.run()
    check_ends(drive)
    return drive


def check_ends(drive: Drive) -> None:
    """Every request ended exactly once, with all its tokens unless it was cancelled, and nothing is left."""
    over = [spec for spec, _ in drive.finished]
    assert len(set(over)) == len(over)
    assert not set(over) & {s for s, request in drive.requests.items() if request.finish is Finish.ABORTED}
    assert {*over, *drive.refused, *drive.cancelled} == drive.asks.keys()
    for spec, request in drive.requests.items():
        check_tokens(drive, request, drive.asks[spec])
    scheduler = drive.scheduler
    assert scheduler.idle
    assert not scheduler.requests
    assert not scheduler.decoding.batched
    assert not scheduler.decoding.unbatched
    assert scheduler.pool.free == scheduler.pool.num_blocks
    assert not scheduler.pool.tables
    assert not scheduler.pool.saved
    if isinstance(scheduler, TransformersScheduler):
        assert scheduler.host.free == scheduler.host.num_blocks
        assert not scheduler.sampling.samples
    assert len(set(drive.ended)) == len(drive.ended)


def check_tokens(drive: Drive, request: Request, ask: Ask) -> None:
    """Output number n was delivered by the step whose row sampled it, for all n up to the end."""
    steps = token_steps(request)
    assert steps == sorted(set(steps))
    assert len(steps) == request.seen
    sampled = drive.executor.sampled.get(ask.spec, {})
    assert steps == [sampled[n] for n in range(1, len(steps) + 1)]
    if request.finish not in (Finish.ABORTED, Finish.REFUSED):
        assert len(steps) == min(ask.tokens, request.limit)
        length = len(steps) == request.limit
        assert request.finish is (Finish.LENGTH if length else Finish.STOP)
