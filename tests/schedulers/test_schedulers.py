"""What holds for every workload, whatever the scheduler: random small runs through the loop, checked at every step.

Budgets, seats and caches are tiny, so that nearly every step refuses, splits or takes something back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import AnyScheduler, Ask, Drive, again, token_steps

from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.schedulers.registry import OURS
from cbsim.schedulers.sarathi.scheduler import SarathiServe
from cbsim.schedulers.sarathi.settings import (
    FasterTransformerSettings,
    OrcaSettings,
    SarathiSettings,
    ServeOptions,
    SimpleChunkingSettings,
    VllmV0Settings,
)
from cbsim.schedulers.sglang.scheduler import SglangScheduler
from cbsim.schedulers.sglang.settings import SglangOptions
from cbsim.schedulers.simple.contiguous import CONTIGUOUS
from cbsim.schedulers.simple.fcfs import Fcfs
from cbsim.schedulers.simple.settings import ContiguousOptions
from cbsim.schedulers.transformers.scheduler import TransformersScheduler
from cbsim.schedulers.transformers.scheduler_523 import Transformers523
from cbsim.schedulers.transformers.settings import TransformersOptions
from cbsim.schedulers.trtllm.scheduler import TrtllmScheduler
from cbsim.schedulers.trtllm.settings import TrtllmOptions
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VllmOptions
from cbsim.workload.scheduler_tests import ChainedKeys

MOST_TOKENS = 24  # longest request
Case = tuple[Callable[[], AnyScheduler], list[Ask]]


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
    """A vLLM scheduler with any of its options, and a workload."""
    size, chunked = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    options = VllmOptions(
        version=draw(st.sampled_from(["0.19", "0.33"])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        block_size=size,
        num_blocks=1 + draw(st.integers(MOST_TOKENS // size, 3 * MOST_TOKENS // size)),
        max_model_len=draw(st.sampled_from([MOST_TOKENS, MOST_TOKENS, 16])),
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 30)) if chunked else draw(st.integers(MOST_TOKENS, 40)),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        adaptive_long_prefill_threshold=draw(st.booleans()),
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2])),
        prefill_schedule_interval=draw(st.sampled_from([1, 1, 3])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        host_blocks=draw(st.integers(0, 2 * MOST_TOKENS // size)),
    )
    return partial(VllmScheduler, options), draw(asks(size))


@st.composite
def transformers_cases(draw: st.DrawFn) -> Case:
    """A transformers scheduler and a workload."""
    size = draw(st.sampled_from([3, 4, 5]))
    options = TransformersOptions(
        name=draw(st.sampled_from(["transformers_fifo", "transformers_prefill_first"])),
        block_size=size,
        num_blocks=draw(st.integers(MOST_TOKENS // size + 2, 3 * MOST_TOKENS // size)),
        max_batch_tokens=draw(st.integers(1, 30)),
        max_requests_per_batch=draw(st.integers(1, 8)),
        max_blocks_per_request=draw(st.sampled_from([0, 2, 8])),
        safety_margin=draw(st.sampled_from([0.0, 0.0, 0.2])),
        allow_block_sharing=draw(st.booleans()),
        host_blocks=draw(st.sampled_from([0, 0, 3, 12])),
    )
    return partial(TransformersScheduler, options), draw(asks(size))


@st.composite
def sector_cases(draw: st.DrawFn) -> Case:
    """A transformers scheduler of 5.23, with one or more blocks in a sector, and a workload."""
    size, per = draw(st.sampled_from([3, 4, 5])), draw(st.sampled_from([1, 1, 2, 3]))
    least = -(-MOST_TOKENS // (size * per))
    options = TransformersOptions(
        name=draw(st.sampled_from(["transformers_fifo", "transformers_prefill_first"])),
        version="5.23",
        block_size=size,
        num_blocks=draw(st.integers(least, 3 * least)) * per,
        max_batch_tokens=draw(st.integers(1, 30)),
        max_requests_per_batch=draw(st.integers(1, 8)),
        max_blocks_per_request=draw(st.sampled_from([0, 2, 8])),
        safety_margin=draw(st.sampled_from([0.0, 0.0, 0.2])),
        allow_block_sharing=draw(st.booleans()),
        host_blocks=draw(st.sampled_from([0, 0, 1, 4])) * per,
        blocks_per_sector=per,
    )
    return partial(Transformers523, options), draw(asks(size))


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
    settings = draw(
        st.sampled_from(
            [
                SarathiSettings(**seats, chunk_size=chunk),
                SarathiSettings(**seats, **stages),
                VllmV0Settings(**seats, max_batched_tokens=sizes["max_model_len"]),
                SimpleChunkingSettings(**seats, chunk_size=chunk),
                OrcaSettings(**seats),
                FasterTransformerSettings(**seats),
            ]
        )
    )
    return partial(OURS[settings.name].make, ServeOptions.of(settings, **sizes)), draw(asks(size))


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


@st.composite
def sglang_cases(draw: st.DrawFn, *orders: str) -> Case:
    """An SGLang scheduler with any of its options, and a workload. The cache holds one request, or a few."""
    size = draw(st.sampled_from([1, 1, 2, 4]))
    order = draw(st.sampled_from(orders or ("fcfs", "lpm", "dfs-weight", "lof", "shortest-prefill-first", "hrrn")))
    options = SglangOptions(
        schedule_policy=order,
        schedule_conservativeness=draw(st.sampled_from([0.02, 0.5, 1.0, 2.0])),
        block_size=size,
        num_blocks=draw(st.integers(32, 80)) // size,
        max_running_requests=draw(st.integers(1, 8)),
        max_prefill_tokens=draw(st.integers(1, 30)),
        chunked_prefill_size=draw(st.sampled_from([-1, size, 4, 8, 16])),
        enable_mixed_chunk=draw(st.booleans()),
        context_length=draw(st.sampled_from([24, 60])),
        disable_radix_cache=draw(st.booleans()),
        radix_eviction_policy=draw(st.sampled_from(["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"])),
        enable_priority_scheduling=order in ("fcfs", "lof") and draw(st.booleans()),
        disable_priority_preemption=draw(st.booleans()),
        schedule_low_priority_values_first=draw(st.booleans()),
        priority_scheduling_preemption_threshold=draw(st.integers(0, 1)),
        retraction_policy=draw(st.sampled_from(["length", "priority"])),
        prefill_max_requests=draw(st.sampled_from([None, 1, 3])),
        prefill_decode_interval=draw(st.sampled_from([0, 0, 2])),
        ignore_eos=draw(st.booleans()),
    )
    return partial(SglangScheduler, options), draw(asks(size))


FAMILIES = pytest.mark.parametrize(
    "cases",
    [
        vllm_cases(),
        transformers_cases(),
        sector_cases(),
        contiguous_cases(),
        sarathi_cases(),
        trtllm_cases(),
        sglang_cases(),
    ],
    ids=["vllm", "transformers", "transformers 5.23", "contiguous", "sarathi", "trtllm", "sglang"],
)
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


def limits(scheduler: AnyScheduler) -> tuple[int, int]:
    """Most tokens and most rows of a step."""
    if isinstance(scheduler, SarathiServe):
        return scheduler.limits.tokens or 1000, scheduler.options.max_num_seqs
    if isinstance(scheduler, TrtllmScheduler):
        return scheduler.options.max_num_tokens, scheduler.options.max_batch_size
    if isinstance(scheduler, VllmScheduler | Fcfs):
        return scheduler.options.max_num_batched_tokens, scheduler.options.max_num_seqs
    if isinstance(scheduler, SglangScheduler):
        return scheduler.limits.tokens or 0, scheduler.options.max_running_requests
    return scheduler.options.max_batch_tokens, scheduler.options.max_requests_per_batch


def active(scheduler: AnyScheduler) -> list[Request]:
    return list(scheduler.running)


def table_of(scheduler: AnyScheduler, spec: RequestSpec) -> list[int]:
    return scheduler.pool.table(scheduler.requests[spec])


class Watch:
    """Checks each plan against the scheduler's own view of its requests."""

    def __init__(self, drive: Drive) -> None:
        self.drive = drive
        self.before: dict[RequestSpec, int] = {}
        drive.on_step = self.step

    def step(self, plan: StepPlan, rows: list[Row]) -> None:
        scheduler = self.drive.scheduler
        most_tokens, most_rows = limits(scheduler)
        assert plan.work.tokens <= most_tokens
        assert plan.work.rows <= most_rows
        assert plan.counts.free_blocks == scheduler.pool.free
        assert plan.counts.running == len(active(scheduler))
        assert plan.counts.waiting == len(list(scheduler.waiting))
        ran = {row.spec: row for row in rows}
        for request in active(scheduler):
            row = ran.get(request.spec)
            was = row.start if row else self.before.get(request.spec, request.entered)
            assert request.computed == was + (row.tokens if row else 0), (request.spec, row)
            assert scheduler.pool.allocated(request) * scheduler.pool.block_size >= request.computed
        assert ran.keys() <= {r.spec for r in active(scheduler)}
        assert all(self.drive.executor.tables[spec] == table_of(scheduler, spec) for spec in ran)
        assert plan.counts.table_blocks == sum(scheduler.pool.allocated(scheduler.requests[spec]) for spec in ran)
        self.before = {r.spec: r.computed for r in active(scheduler)}


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
        assert not len(scheduler.forks)
    assert len(set(drive.ended)) == len(drive.ended)


def check_tokens(drive: Drive, request: Request, ask: Ask) -> None:
    """Output number n was delivered by the step whose row sampled it, for all n up to the end."""
    steps = token_steps(request)
    assert steps == sorted(set(steps))
    assert len(steps) == request.seen
    sampled = drive.executor.sampled.get(ask.spec, {})
    assert steps == [sampled[n] for n in range(1, len(steps) + 1)]
    if request.finish is not Finish.ABORTED:
        assert len(steps) == min(ask.tokens, request.limit)
        length = len(steps) == request.limit
        assert request.finish is (Finish.LENGTH if length else Finish.STOP)


@FAMILIES
@DEPTHS
def test_every_request_ends_once_and_nothing_is_left(cases: st.SearchStrategy[Case], depth: int) -> None:
    """Budgets and seats are kept, rows continue where the last one ended, tokens come from the rows that sampled them,
    and at the end the cache is free; whatever was shared, preempted, stopped or cancelled on the way."""

    @given(case=cases)
    def check(case: Case) -> None:
        build, workload = case
        drive = Drive(build(), workload, depth)
        Watch(drive)
        drive.run()
        check_ends(drive)

    check()


@DEPTHS
def test_an_executor_learns_of_replaced_blocks(depth: int) -> None:
    """Two equal prompts read in the same step: one of the two first blocks is freed, so nobody may read it any more."""
    options = TransformersOptions(
        name="transformers_fifo",
        block_size=4,
        num_blocks=8,
        max_batch_tokens=32,
        max_requests_per_batch=4,
        max_blocks_per_request=0,
        safety_margin=0.0,
        allow_block_sharing=True,
    )
    specs = [RequestSpec(i, f"r{i}", 0, 5, 6, 6, prefix=(7,), prefix_block_tokens=4, prefix_tokens=4) for i in range(2)]
    drive = Drive(TransformersScheduler(options), [Ask(spec, 0, None, None) for spec in specs], depth)
    tables: list[bool] = []
    drive.on_step = lambda plan, rows: tables.extend(
        drive.executor.tables[row.spec] == table_of(drive.scheduler, row.spec) for row in rows
    )
    drive.run()
    assert all(tables)


def state(scheduler: AnyScheduler) -> dict[str, Any]:
    """All that the pool knows, by request id."""
    pool = scheduler.pool
    return {
        "tables": {request.spec.id: list(pool.table(request)) for request in pool.tables},
        "free": pool.free_order(),
        "keys": dict(pool._key_of),
        "waiting": [r.spec.id for r in scheduler.waiting],
        "running": [r.spec.id for r in active(scheduler)],
    }


def history(build: Callable[[], AnyScheduler], workload: list[Ask], depth: int, slow: bool) -> list[dict[str, Any]]:
    """Plans row by row, with the state after each."""
    steps: list[dict[str, Any]] = []
    drive = Drive(build(), workload, depth)
    scheduler, schedule = drive.scheduler, drive.scheduler.schedule

    def slowly() -> StepPlan | None:
        scheduler.decoding.split()  # so that each request is planned by the rules for one
        return schedule()

    def note(plan: StepPlan, rows: list[Row]) -> None:
        shown = [(r.spec.id, r.start, r.tokens, r.blocks, r.chunk is None or r.chunk.outputs) for r in rows]
        blocks = plan.counts.table_blocks, plan.counts.new_blocks
        ends = {*plan.changes.ends}, plan.changes.ended
        counts = plan.step, plan.work.tokens, *blocks, plan.work.fast_decode, *ends
        steps.append({"rows": shown, "counts": counts, "preempted": plan.changes.preempted, **state(scheduler)})

    drive.on_step = note
    if slow:
        drive.overridden["schedule"] = slowly
    drive.run()
    steps.append({"tokens": {s.id: r.runs for s, r in drive.requests.items()}, **state(scheduler)})
    return steps


@FAMILIES
@DEPTHS
def test_the_decode_batch_changes_no_decision(cases: st.SearchStrategy[Case], depth: int) -> None:
    """Decoding requests advanced all at once, or each by the general rules: the same plans, blocks and tokens."""

    @given(case=cases)
    @settings(max_examples=80)
    def check(case: Case) -> None:
        build, workload = case
        fast, slow = (history(build, workload, depth, slow) for slow in (False, True))
        for ours, theirs in zip(fast, slow, strict=True):
            assert ours == theirs

    check()


@FAMILIES
def test_same_workload_same_run(cases: st.SearchStrategy[Case]) -> None:
    """A run is a function of scheduler options and workload: specs compare by identity, and no order depends on it."""

    @given(case=cases)
    @settings(max_examples=30)
    def check(case: Case) -> None:
        build, workload = case
        first, second = (history(build, w, 2, slow=False) for w in (workload, again(workload)))
        for one, other in zip(first, second, strict=True):
            assert _by_id(one) == _by_id(other)

    check()


def _by_id(step: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in step.items() if k not in ("counts", "preempted")}


# -- contiguous reservations -------------------------------------------------------------------------------------------


@DEPTHS
@given(case=contiguous_cases())
def test_nobody_grows_out_of_a_reservation(depth: int, case: Case) -> None:
    """A request has one piece from its admission on, large enough by its rule to the end: no block is added, nobody is
    preempted, and the queue is taken in order.
    """
    build, workload = case
    drive = Drive(build(), workload, depth)
    pieces: dict[RequestSpec, tuple[int, ...]] = {}

    def look(plan: StepPlan, rows: list[Row]) -> None:
        assert not plan.changes.grown and not plan.changes.preempted
        for chunk in plan.work.chunks:
            assert chunk.admitted == bool(chunk.blocks)
            if chunk.admitted:
                assert chunk.spec not in pieces
                pieces[chunk.spec] = chunk.blocks
        for row in rows:
            assert row.start + row.tokens <= len(pieces[row.spec]) * drive.scheduler.pool.block_size

    drive.on_step = look
    drive.run()
    check_ends(drive)
    came = [spec for spec in drive.requests if spec in pieces]
    assert [spec for spec in pieces if spec in came] == [*pieces]
    assert [*pieces] == came


# -- reserve_output ---------------------------------------------------------------------------------------------------


@DEPTHS
@given(case=vllm_cases())
def test_with_outputs_reserved_nobody_is_preempted(depth: int, case: Case) -> None:
    """A request is admitted only if everybody who runs could reach its limit; whoever waits is admitted in the end,
    since an empty cache holds any request that was not refused."""
    build, workload = case
    options = replace(build().options, reserve_output=True)  # type: ignore[type-var]
    drive = Drive(VllmScheduler(options), workload, depth)  # type: ignore[arg-type]
    preempted: list[object] = []
    drive.on_step = lambda plan, rows: preempted.extend(plan.changes.preempted)
    drive.run()
    check_ends(drive)
    assert not preempted


def reserving(blocks: int, *, reserve: bool) -> VllmScheduler:
    options = VllmOptions(
        version="0.33",
        policy="fcfs",
        block_size=4,
        num_blocks=1 + blocks,
        max_model_len=MOST_TOKENS,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        long_prefill_token_threshold=0,
        adaptive_long_prefill_threshold=False,
        scheduler_reserve_full_isl=True,
        watermark=0.0,
        prefill_schedule_interval=1,
        reserve_output=reserve,
    )
    return VllmScheduler(options)


@pytest.mark.parametrize(("blocks", "most"), [(5, 1), (6, 2), (8, 2), (9, 3)])
def test_room_for_outputs_by_hand(blocks: int, most: int) -> None:
    """Prompts of 4 with 9 outputs need 12 tokens of cache at their ends (the last token is never computed): 3 blocks
    each. Without reservation all three run at once, and fewer than 9 blocks mean that somebody loses theirs."""
    specs = [RequestSpec(i, f"r{i}", i, 4, 9, 9) for i in range(3)]
    for reserve in (True, False):
        drive = Drive(reserving(blocks, reserve=reserve), [Ask(spec, 0, None, None) for spec in specs], 1)
        plans: list[StepPlan] = []
        drive.on_step = lambda plan, rows, plans=plans: plans.append(plan)  # type: ignore[misc]
        drive.run()
        assert max(plan.counts.running for plan in plans) == (most if reserve else 3)
        assert any(plan.changes.preempted for plan in plans) == (not reserve and blocks < 9)


@pytest.mark.parametrize(("holds", "most"), [(True, 2), (False, 1)])
def test_shared_blocks_are_needed_once_and_idle_ones_are_taken_from_the_free(holds: bool, most: int) -> None:
    """Five blocks; a request needs 3, of a prompt whose two first ones are known. While the first request holds
    them the second adds one, and both run. When they lie idle beside a stranger with 3, they are the two free ones: to
    use them leaves none for the third, so it waits."""
    shared: dict[str, Any] = {"prefix": (7, 8), "prefix_block_tokens": 4, "prefix_tokens": 8}
    first, again = (RequestSpec(i, f"r{i}", i, 9, 4, 4, **shared) for i in range(2))
    stranger = RequestSpec(2, "r2", 0, 9, 4, 4)
    asks = [Ask(first, 0, None, None), *([] if holds else [Ask(stranger, 30, None, None)])]
    drive = Drive(reserving(5, reserve=True), [*asks, Ask(again, 2 if holds else 31, None, None)], 1)
    plans: list[StepPlan] = []
    drive.on_step = lambda plan, rows: plans.append(plan)
    drive.run()
    assert max(plan.counts.running for plan in plans) == most
    assert max(chunk.cached for plan in plans for chunk in plan.work.chunks) == 8
    assert not any(plan.changes.preempted for plan in plans)


# -- the longest row --------------------------------------------------------------------------------------------------


@FAMILIES
@DEPTHS
def test_plans_know_their_longest_decoding_row(cases: st.SearchStrategy[Case], depth: int) -> None:
    """As recounted from the rows that nobody listed, in every step; 0 if there are none."""

    @given(case=cases)
    @settings(max_examples=60)
    def check(case: Case) -> None:
        build, workload = case
        drive = Drive(build(), workload, depth)

        def compare(plan: StepPlan, rows: list[Row]) -> None:
            contexts = [row.start for row in rows if row.chunk is None]
            assert plan.work.longest_context == max(contexts, default=0)
            assert plan.work.decode_context == sum(contexts)

        drive.on_step = compare
        drive.run()

    check()
