"""Golden traces of vLLM's scheduler: the replayed lines for the same workload, on the same virtual clock.

The formats, what each reports at the end, and the engine loop with its clock are described beside the traces. Format 0
counts distinct contents at the end, the others all blocks with a key, and reports what happens to a request at once,
the others with its next output. Format 2 counts the tokens of an update and leaves out cached tokens; its fields on a
connector are in offload_traces.py. Format 3 adds fields on layer groups. Formats 2 and 3 deliver one cancellation at a
time. Times are integer microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cbsim.conformance import offload_traces
from cbsim.conformance.offload_traces import ConnectorLines, Heard
from cbsim.conformance.reader import Case, Line, Reader, Replay, due, header_fields, not_followed, not_modelled, one_of
from cbsim.kv.group_pool import GroupPool
from cbsim.kv.layer_groups import Grouping, LayerKind, States, grouped, rules, units
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.policy.kind import Speculation
from cbsim.policy.loop import Applied, Await, Completed, Launch, Poll, Polled
from cbsim.policy.plan import Row, StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.schedulers.vllm.offload import LazyOffload
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VERSIONS, VllmOptions
from cbsim.workload.acceptance import Acceptance
from cbsim.workload.scheduler_tests import vllm_requests

THRESHOLD = "long_prefill_token_threshold"
SIZES = ("policy", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", THRESHOLD)
SWITCHES = ("enable_chunked_prefill", "enable_prefix_caching", "scheduler_reserve_full_isl")
SINCE_0_33 = ("watermark", "prefill_schedule_interval")
LAYERS = ("layers", "kv_bytes", "retention", "disable_hybrid", "layout", "state_checkpoints")
OTHER = ("num_blocks", "timing", f"{THRESHOLD}_adaptive", "connector", "stop_when_done", "spec", "pipeline")
OPTIONS = frozenset([*SIZES, *SWITCHES, *SINCE_0_33, *LAYERS, *OTHER])

MODES, FORMATS = ("sync", "async"), (0, 1, 2, 3)
SPANS = {Sight.SLIDING: "window", Sight.CHUNKED: "chunk", Sight.STATE: "state_bytes"}


def grouping(config: Line) -> Grouping:
    """Return the groups of a workload's layers, which it has to name."""
    size, pages = config["block_size"], _pages(config)
    layers = [LayerKind(_attention(layer), page) for layer, page in zip(config["layers"], pages, strict=True)]
    outermost = config.get("layout", "").startswith("B")  # the letters are dimensions, B is that of the blocks
    states = States(config["max_model_len"], 1)
    if config["enable_prefix_caching"]:
        states = States(size, 3 if config.get("state_checkpoints") else 2)
    return grouped(layers, size, together=config.get("disable_hybrid", False), outermost=outermost, states=states)


def group_options(config: Line) -> Line:
    """Return the scheduler options that follow from a workload's layers."""
    if "layers" not in config:
        return {"num_blocks": config["num_blocks"]}
    made = grouping(config)
    blocks = config["num_blocks"] if "num_blocks" in config else config["kv_bytes"] // made.block_bytes
    retention = config.get("retention", 0)
    return {"num_blocks": blocks, "groups": made.groups, "prefix_cache_retention_interval": retention}


def _attention(layer: Line) -> Attention:
    sight = Sight(layer["kind"])
    return Attention(sight, layer[SPANS[sight]]) if sight in SPANS else FULL


def _pages(config: Line) -> list[int]:
    """Return the bytes of each layer's page; a state has the largest of those of attention, or its own."""
    size = 4 * config["block_size"]
    attention = [size * each.get("kv_heads", 4) * each.get("head_size", 16) for each in config["layers"]]
    states = [each.get("state_bytes", 0) for each in config["layers"]]
    most = max([page for page, state in zip(attention, states, strict=True) if not state], default=0)
    return [(most or state) if state else page for page, state in zip(attention, states, strict=True)]


def draft_options(config: Line, *, skips: bool) -> Line:
    """Return the scheduler options of a workload's `spec`, by name."""
    if "spec" not in config:
        return {}
    spec = config["spec"]
    by_rows = tuple((most, drafts) for _, most, drafts in spec.get("num_speculative_tokens_per_batch_size") or ())
    return {"speculation": Speculation(spec["method"], spec["k"], by_rows, skips)}


def options(version: str, mode: str, config: Line, *, skips_drafts: bool = True) -> VllmOptions:
    """Return the scheduler options of a workload's `config`."""
    return VllmOptions(
        version="0.19" if version.startswith("0.19") else "0.33",
        async_scheduling=mode == "async",
        **{name: config[name] for name in (*SIZES, *SWITCHES)},
        **{name: config[name] for name in SINCE_0_33 if name in config},
        adaptive_long_prefill_threshold=config.get(f"{THRESHOLD}_adaptive", False),
        stages=config.get("pipeline", 1),
        **group_options(config),
        **offload_traces.options(config),
        **draft_options(config, skips=skips_drafts),
    )


class WatchedVllm(VllmScheduler):
    """The scheduler, recording free blocks after cancellations. It may be idle despite stores (`leaves_stores`)."""

    free_after_cancel = 0
    leaves_stores = False

    @property
    def idle(self) -> bool:
        return super().idle or (self.leaves_stores and not (self.requests or self.decoding.ended))

    def cancel(self, spec: RequestSpec) -> None:
        super().cancel(spec)
        self.free_after_cancel = self.pool.free


class VllmReplay(Replay):
    """The replay of one workload, version and mode; the last line is the summary."""

    scheduler: WatchedVllm

    def __init__(self, header: Line, workload: Line) -> None:
        config, heard = header["config"], Heard()
        made = options(header["vllm"], header["mode"], config, skips_drafts=header.get("v2_model_runner", True))
        super().__init__(WatchedVllm(made, heard), made.stages + (header["mode"] == "async"))
        self._leaves_stores = config.get("stop_when_done", False)
        offload = self.scheduler.transfers.connector if self.scheduler.transfers is not None else None
        if self._leaves_stores and isinstance(offload, LazyOffload):
            offload.most_restless = 1 << 60  # the recording ends, so its stores need not
        self._format = header.get("format", 1)
        connector = config.get("connector")
        kind: type[ConnectorLines] | None = offload_traces.LINES[connector["kind"]] if connector else None
        self._offload = kind(self.scheduler, heard, connector, workload) if kind else None
        self._groups = GroupLines(self.scheduler, heard, config) if "layers" in config else None
        if self._groups:
            self.header = {"effective": self._groups.effective()}
        self._timing = config["timing"]
        self._coming = vllm_requests(workload)[::-1]
        specs = [spec for spec, _ in self._coming]
        self._drafts = DraftLines(self.scheduler, workload, specs) if "spec" in config else None
        if self._drafts:
            self.header = {"effective": self._drafts.effective()}
        self._parts = [part for part in (self._offload, self._drafts, self._groups) if part]
        aborts = [(abort, spec) for spec, abort in self._coming if abort is not None]
        self._aborts = sorted(aborts, key=lambda entry: (entry[0], entry[1].index))
        self._added: list[str] = []
        self._aborted: list[str] = []
        self._rows: dict[int, list[Row]] = {}
        self._dropped: set[tuple[int, RequestSpec]] = set()
        self._alive: dict[RequestSpec, None] = {}
        self._gpu_free = 0
        self._reports = Reports(self._format)

    def check(self) -> None:
        super().check()
        if self.scheduler.transfers is not None:
            self.scheduler.transfers.check()

    def _end(self) -> None:
        self._cancelled()
        line = {"ev": "summary", "steps": self._steps, "end_us": self._now, "requests": self._reports.lines}
        pool = self.scheduler.pool
        cached = self._groups.cached if self._groups else pool.keyed if self._format else pool.contents
        self._written.append(line | {"prefix_cache_final_cached_blocks": cached})

    def _cancelled(self) -> None:
        """Append the line on requests that were aborted since the last effect."""
        if self._aborted:
            free, ids = self.scheduler.free_after_cancel, self._aborted
            ids = sorted(ids) if self._format else ids
            self._written.append({"ev": "abort", "t": self._now, "ids": ids, "free": free})
        self._aborted = []

    def _launch(self, effect: Launch) -> int:
        self._cancelled()
        self._written.append(self._schedule(effect.plan))
        start = max(self._now, self._gpu_free)
        self._gpu_free = end = start + self._step_us(effect.plan)
        if self._drafts:
            self._drafts.launched(effect.plan)
        if self._offload:
            self._offload.launched(effect.plan, start, end)
        return end

    def _await(self, effect: Await) -> Completed:
        self._cancelled()
        self._now = max(self._now, effect.ticket)
        if self._drafts:
            accepted, drafted = self._drafts.accepted(effect.plan), self._drafts.drafted(effect.plan)
            return Completed(StepResult(accepted=accepted, drafted=drafted), self._due_aborts())
        stops = tuple(s for s in effect.plan.changes.ends if s.output_tokens < s.max_tokens)
        moved, broken = self._offload.over(effect.plan.step) if self._offload else ((), ())
        return Completed(StepResult(stops, moved=moved, broken=broken), self._due_aborts())

    def _step_us(self, plan: StepPlan) -> int:
        timing = self._timing
        if not plan.work.rows:
            return int(timing["empty_us"]) if self._offload else 0
        context = plan.work.decode_context + plan.work.decodes + sum(c.start + c.tokens for c in plan.work.chunks)
        tokens: int = timing["per_token_us"] * plan.work.tokens
        return int(timing["base_us"] + tokens + timing["per_kv_token_us"] * context)

    def _poll(self, effect: Poll) -> Polled | None:
        if self.scheduler.leaves_stores and self.scheduler.idle:
            return None  # even if stores are in flight
        self._cancelled()
        if effect.wait and self._coming:
            self._now = max(self._now, self._coming[-1][0].arrival_ns)
        arrivals = [spec for spec, _ in due(self._coming, self._now, lambda entry: entry[0].arrival_ns)]
        for spec in arrivals:
            self._added.append(spec.id)
            self._alive[spec] = None
            self._reports.arrived(spec, self._now)
        self.scheduler.leaves_stores = self._leaves_stores and not self._coming
        return Polled(arrivals, self._due_aborts(), closed=not self._coming)

    def _due_aborts(self) -> list[RequestSpec]:
        """Return live requests whose abort is due, by time; from format 2 on only the first. Others are lost."""
        count = sum(at <= self._now for at, _ in self._aborts)
        count = min(count, 1) if self._format > 1 else count
        due = [spec for _, spec in self._aborts[:count] if spec in self._alive]
        del self._aborts[:count]
        for spec in due:
            del self._alive[spec]
        self._aborted = [s.id for s in due]
        return due

    def _schedule(self, plan: StepPlan) -> Line:
        self._steps += 1
        rows = self._rows[plan.step] = self._batch.rows(plan)
        for row in rows:
            self._reports.scheduled(row.spec, self._now)
        for preempted in plan.changes.preempted:
            self._reports.preempted(preempted.spec)
            if self.scheduler.options.hands_on:  # its rows in flight are dropped
                self._dropped |= {(step, preempted.spec) for step in self._rows if step < plan.step}
        line = {
            "ev": "schedule",
            "step": plan.step + 1,
            "t": self._now,
            "added": self._added,
            "total": plan.work.tokens,
            "reqs": [self._row(row, plan) for row in rows],
            "preempted": [[p.spec.id, p.lost_tokens, p.blocks] for p in plan.changes.preempted],
            "finished": sorted(s.id for s in plan.changes.ended),
            "running": [r.spec.id for r in self.scheduler.running],
            "waiting": [r.spec.id for r in self.scheduler.waiting],
            "free": plan.counts.free_blocks,
        }
        for part in self._parts:
            line |= part.planned(plan)
        self._added = []
        self._now += self._timing["sched_us"]
        return line

    def _row(self, row: Row, plan: StepPlan) -> Line:
        chunk, request = row.chunk, self.scheduler.requests[row.spec]
        kind = "running" if not (chunk and chunk.admitted) else "resumed" if chunk.resumed else "new"
        blocks = self.scheduler.pool.allocated(request)
        line = {"id": row.spec.id, "kind": kind, "n": row.tokens, "computed": row.start, "held": blocks}
        line["blocks"] = list(row.blocks)
        if chunk and chunk.admitted and self._format < 2:
            line["cached"] = chunk.cached
        if self._groups:
            line |= self._groups.row(row, plan)
        if self._drafts:
            line |= self._drafts.row(row)
        if self.scheduler.options.async_scheduling:
            line["ph"] = request.scheduled - request.seen
        return line

    def _applied(self, effect: Applied) -> None:
        self._cancelled()
        finished, got = [spec.id for spec, _ in effect.outcome.finished], self._tokens(effect.plan.step)
        tokens: list[Any] = [[s.id, count] if self._format == 2 else s.id for s, count in got.items()]
        line = {"ev": "update", "step": effect.plan.step + 1, "t": self._now, "tokens": tokens}
        line |= {"finished": finished, "free": self.scheduler.pool.free}
        for part in self._parts:
            line |= part.updated(effect.plan)
        self._now += self._timing["update_us"]
        for spec, count in got.items():
            self._reports.token(spec, self._now, count)
        for spec, _ in effect.outcome.finished:
            del self._alive[spec]
        self._written.append(line)
        if self._drafts and (proposed := self._drafts.proposed(effect.plan)):
            self._written.append(proposed)

    def _tokens(self, step: int) -> dict[RequestSpec, int]:
        """Return how many tokens each live request got from a step."""
        count = self._drafts.took if self._drafts else {}
        return {
            row.spec: count.get(row.spec, 1)
            for row in self._rows.pop(step)
            if row.spec in self._alive and (row.chunk is None or row.chunk.outputs)
            if (step, row.spec) not in self._dropped
        }


class GroupLines:
    """The fields of a scheduler with groups in trace lines. A plain cache is one of a single group."""

    def __init__(self, scheduler: VllmScheduler, heard: Heard, config: Line) -> None:
        self._scheduler = scheduler
        self._heard = heard
        self._config = config

    def effective(self) -> Line:
        """Return the header's fields on groups and sizes, without the layout of tensors."""
        o, made = self._scheduler.options, grouping(self._config)
        unit = units(made.groups, caching=o.enable_prefix_caching)
        retention = o.prefix_cache_retention_interval
        groups = []
        for rule in rules(made.groups, retention=retention, in_flight=o.most_in_flight, longest=o.max_model_len):
            group = rule.group
            line = {"kind": group.attention.sight.value, "block_size": group.block_size, "layers": list(group.layers)}
            size = {} if rule.state else {"block_size": group.block_size}
            line["page_bytes"] = _pages(self._config | size)[group.layers[0]]
            if not (rule.full or rule.state):
                line |= {SPANS[group.attention.sight]: group.attention.span, "admission_cap": rule.most}
            groups.append(line)
        several = "HybridKVCacheCoordinator" if len(groups) > 1 else "UnitaryKVCacheCoordinator"
        return {
            "coordinator": several if o.enable_prefix_caching else "KVCacheCoordinatorNoPrefixCache",
            "groups": groups,
            "num_blocks": o.num_blocks,
            "scheduler_block_size": unit.prefix,
            "hash_block_size": unit.hashed,
            "retention": retention,
            "max_in_flight_tokens": o.most_in_flight,
            "watermark_blocks": int(o.watermark * o.num_blocks),
        }

    def row(self, row: Row, plan: StepPlan) -> Line:
        """Return a row's fields: blocks added to each group's table (all if admitted), lengths, the junction."""
        request, pool = self._scheduler.requests[row.spec], self._scheduler.pool
        admitted = row.chunk is not None and row.chunk.admitted
        if isinstance(pool, GroupPool):
            blocks: list[list[int]] = [[] for _ in pool.groups]
            for change in plan.tables:
                if change.spec is row.spec:
                    blocks[change.group] = [*[0] * (change.passed if admitted else 0), *change.blocks]
            tables, junction = pool.group_tables(request), pool.junctions.get(request, 0)
            counts, live = [len(table.blocks) for table in tables], [len(table.live) for table in tables]
        else:
            blocks, junction = [list(row.blocks)], 0
            counts = live = [pool.allocated(request)]
        line: Line = {"blocks": blocks, "held": counts, "live": live}
        return line | {"junction": junction} if admitted else line

    def planned(self, plan: StepPlan) -> Line:
        """Return a step's fields: blocks that left the windows, and the block counts of preempted requests."""
        requests, (dropped, tables) = self._scheduler.requests, self._heard.take_tables()
        preempted = [[p.spec.id, p.lost_tokens, tables[requests[p.spec]]] for p in plan.changes.preempted]
        return {"dropped": dropped, "preempted": preempted}

    def updated(self, plan: StepPlan) -> Line:
        del plan
        return {"cached": self.cached}

    @property
    def cached(self) -> list[int]:
        """The number of blocks with a key, by group."""
        pool = self._scheduler.pool
        return pool.keyed_in_groups() if isinstance(pool, GroupPool) else [pool.keyed]


class Reports:
    """The reports of all requests; `lines` are the fields reported so far. Times are those of the trace."""

    def __init__(self, trace_format: int) -> None:
        self.lines: dict[str, Line] = {}
        self._events: dict[str, Line] = {}  # as `lines`, with events that are not reported yet
        self._at_once = trace_format == 0

    def arrived(self, spec: RequestSpec, now: int) -> None:
        line = self.lines[spec.id] = {"arrival": spec.arrival_ns, "preemptions": 0, "n_out": 0}
        self._events[spec.id] = line if self._at_once else {}
        self._events[spec.id] |= {"queued_ts": now, "preemptions": 0}

    def scheduled(self, spec: RequestSpec, now: int) -> None:
        """Record the time when a request's first row was planned."""
        self._events[spec.id].setdefault("scheduled_ts", now)

    def preempted(self, spec: RequestSpec) -> None:
        self._events[spec.id]["preemptions"] += 1

    def token(self, spec: RequestSpec, now: int, count: int) -> None:
        line = self.lines[spec.id]
        line |= self._events[spec.id]
        line["n_out"] += count
        line.setdefault("first_token_ts", now)
        line["last_token_ts"] = now


class DraftLines:
    """The lines of speculation, and the recording's executor: a verification, which no row of an admission is, accepts
    the next of a request's declared numbers, a proposal has the next declared length.
    """

    def __init__(self, scheduler: VllmScheduler, workload: Line, requests: Iterable[RequestSpec]) -> None:
        assert scheduler.options.speculation is not None
        self._speculation = scheduler.options.speculation
        self._scheduler, self._async = scheduler, scheduler.options.async_scheduling
        self._declared = {r["id"]: r for r in workload["requests"]}
        accept = {spec.index: self._declared[spec.id]["accept"] for spec in requests}
        self._acceptance = Acceptance(0, lambda _: (), accept)
        self._proposed: dict[str, int] = {}
        self.took: dict[RequestSpec, int] = {}  # tokens of the rows with drafts of the newest result
        self._accepted: dict[int, list[list[Any]]] = {}  # by step: [id, drafts, accepted]

    def effective(self) -> Line:
        speculation = self._speculation
        ahead, hashed = speculation.ahead, self._scheduler.pool.hashed_ahead
        line = {"method": speculation.method, "k": speculation.k, "lookahead": ahead, "draft_slots": speculation.slots}
        drops = speculation.hashed_ahead > hashed  # the last block of a hit, which without a cache there is not
        line |= {"hash_lookahead": hashed, "eagle_block_drop": drops, "prefill_lookahead": speculation.hashed_ahead}
        return line | {"can_skip_drafts": speculation.skips and bool(ahead)}

    def row(self, row: Row) -> Line:
        drafts = row.chunk.outputs - 1 if row.chunk else 0
        return {"draft": drafts} if drafts > 0 else {}

    def planned(self, plan: StepPlan) -> Line:
        del plan
        skipped = self._speculation.skips and self._speculation.ahead > 0 and not self._scheduler.drafting
        return {"k": self._scheduler.drafts, "skip_drafts": skipped}

    def launched(self, plan: StepPlan) -> None:
        """Verify the drafts of a step."""
        accepted = self._accepted[plan.step] = []
        for chunk in plan.work.chunks:
            if (drafts := chunk.outputs - 1) > 0:
                true = 0 if chunk.admitted else self._acceptance.row(chunk.spec, 0, drafts)
                accepted.append([chunk.spec.id, drafts, true])

    def accepted(self, plan: StepPlan) -> tuple[tuple[RequestSpec, int], ...]:
        """Return how many drafts of each row came true. `took` has its tokens, up to the last one of its request."""
        true = {name: count for name, _, count in self._accepted[plan.step]}
        requests = self._scheduler.requests
        rows = [(requests[c.spec], true[c.spec.id]) for c in plan.work.chunks if c.outputs > 1 and c.spec in requests]
        self.took = {request.spec: min(1 + count, request.last - request.seen) for request, count in rows}
        return tuple([(request.spec, count) for request, count in rows])

    def drafted(self, plan: StepPlan) -> tuple[tuple[RequestSpec, int], ...]:
        """Return the drafts that a step proposes, where they are declared."""
        counts = []
        for chunk in plan.work.chunks:
            declared = self._declared[chunk.spec.id].get("drafts")
            if chunk.outputs and declared and self._scheduler.drafts:
                at = self._proposed[chunk.spec.id] = self._proposed.get(chunk.spec.id, -1) + 1
                counts.append((chunk.spec, min(declared[at % len(declared)], self._scheduler.drafts)))
        return tuple(counts)

    def updated(self, plan: StepPlan) -> Line:
        alive = [self._scheduler.requests[c.spec] for c in plan.work.chunks if c.spec in self._scheduler.requests]
        progress = [[r.spec.id, r.computed, *([r.scheduled - r.seen] if self._async else [])] for r in alive]
        return {"verified": self._accepted.pop(plan.step), "computed": progress}

    def proposed(self, plan: StepPlan) -> Line | None:
        """Return the line on the drafts that wait to be verified, which only a synchronous engine hands over."""
        if self._async or not plan.work.rows:
            return None
        waiting = [[r.spec.id, r.drafts] for r in self._scheduler.running if r.drafts]
        return {"ev": "drafts", "step": plan.step + 1, "spec": waiting}


def case(trace: Path, header: Line) -> Case:
    version, mode, config = header_fields(trace, header, vllm=str, mode=str, config=dict)
    one_of(trace, "mode", mode, MODES)
    skipped = not_followed(version, VERSIONS) or not_modelled(config, OPTIONS)
    both = "speculation with a connector is not modelled" if {"spec", "connector"} <= config.keys() else None
    skipped = skipped or offload_traces.unsupported(config) or both
    return Case("vllm", version, mode, skipped, lambda recorded: VllmReplay(header, recorded))


def comparable(line: Line) -> Line:
    """Return the line with sets sorted, as their order is arbitrary, and with null fields removed."""
    if line.get("ev") == "schedule" and isinstance(line.get("finished"), list):
        line["finished"] = sorted(line["finished"])
    if line.get("ev") == "summary" and isinstance(line.get("requests"), dict):
        requests = line["requests"].items()
        line["requests"] = {name: {k: v for k, v in stats.items() if v is not None} for name, stats in requests}
    return line


READER = Reader(lambda header: header.get("ev") == "header" and "vllm" in header, case, comparable, FORMATS)
