"""Golden traces of vLLM's scheduler: the replayed lines for the same workload, on the same virtual clock.

The formats, and the engine loop with its clock, are described beside the traces. Format 2 counts the tokens of an
update and, at the end, all blocks with a key instead of their distinct contents; it leaves out cached tokens. Its
fields on a connector are in offload_traces.py. Format 3 counts as format 1 does, and adds fields on layer groups
(group_traces.py). Times are integer microseconds.

At its end a trace reports for every request when it was queued, scheduled and got its tokens, and how often it was
preempted. The engine reports events with the next token of their request. From format 2 on the report has only these:
a request that is aborted before its first token was never reported as queued or scheduled, and a preemption without a
later token is not counted. Format 1 read the requests themselves, and so has every event.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cbsim.conformance import group_traces, offload_traces
from cbsim.conformance.group_traces import GroupLines, GroupsHeard
from cbsim.conformance.offload_traces import Heard, OffloadLines
from cbsim.conformance.reader import (
    Case,
    Line,
    Reader,
    guarded,
    header_fields,
    not_followed,
    not_modelled,
    stem,
    workload,
)
from cbsim.policy.loop import Applied, Await, Completed, Effect, Launch, Poll, Polled, serve
from cbsim.policy.observer import NULL_OBSERVER
from cbsim.policy.plan import Batch, Row, StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VERSIONS, VllmOptions
from cbsim.workload.scheduler_tests import vllm_requests

SIZES = ("policy", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
SWITCHES = (
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "long_prefill_token_threshold",
    "scheduler_reserve_full_isl",
)
SINCE_0_33 = ("watermark", "prefill_schedule_interval")
LAYERS = ("layers", "kv_bytes", "retention", "disable_hybrid")
OTHER = ("num_blocks", "timing", "long_prefill_token_threshold_adaptive", "connector", "stop_when_done")
OPTIONS = frozenset([*SIZES, *SWITCHES, *SINCE_0_33, *LAYERS, *OTHER])


def options(version: str, mode: str, config: Line) -> VllmOptions:
    """Return the scheduler options of a workload's `config`."""
    return VllmOptions(
        version="0.19" if version.startswith("0.19") else "0.33",
        async_scheduling=mode == "async",
        **{name: config[name] for name in (*SIZES, *SWITCHES)},
        **{name: config[name] for name in SINCE_0_33 if name in config},
        adaptive_long_prefill_threshold=config.get("long_prefill_token_threshold_adaptive", False),
        **group_traces.options(config),
        **offload_traces.options(config),
    )


class WatchedVllm(VllmScheduler):
    """The scheduler, with the free blocks recorded after each cancellation, as planning follows at once. Every full
    block has a key, as in the original, even if no request could hit it, because the trace counts them. With
    `leaves_stores` it counts as idle although stores are in flight.
    """

    free_after_cancel = 0
    leaves_stores = False

    @property
    def idle(self) -> bool:
        return super().idle or (self.leaves_stores and not (self.requests or self.decoding.ended))

    def add(self, spec: RequestSpec) -> None:
        super().add(spec)
        self.requests[spec].name_all()

    def cancel(self, spec: RequestSpec) -> None:
        super().cancel(spec)
        self.free_after_cancel = self.pool.free


class VllmReplay:
    """The replay of one workload, version and mode; `lines()` yields its trace lines in order, the summary last."""

    def __init__(self, header: Line, workload: Line) -> None:
        config, heard, groups_heard = header["config"], Heard(), GroupsHeard()
        connector = config.get("connector")
        observer = heard if connector else groups_heard if "layers" in config else NULL_OBSERVER
        self.scheduler = WatchedVllm(options(header["vllm"], header["mode"], config), observer)
        self.scheduler.leaves_stores = config.get("stop_when_done", False)
        self._format = header.get("format", 1)
        self._offload = OffloadLines(self.scheduler, heard, connector, workload) if connector else None
        self._groups = GroupLines(self.scheduler, groups_heard, config) if "layers" in config else None
        self.effective = self._groups.effective() if self._groups else None  # the header's fields on groups
        self._depth = 2 if header["mode"] == "async" else 1
        self._timing = header["config"]["timing"]
        self._coming = vllm_requests(workload)[::-1]
        aborts = [(abort, spec) for spec, abort in self._coming if abort is not None]
        self._aborts = sorted(aborts, key=lambda entry: (entry[0], entry[1].index))
        self._added: list[str] = []
        self._aborted: list[str] = []
        self._batch = Batch()
        self._rows: dict[int, list[Row]] = {}
        self._dropped: set[tuple[int, RequestSpec]] = set()
        self._alive: dict[RequestSpec, None] = {}
        self._now = self._gpu_free = self._steps = 0
        self._reports = Reports(self._format)

    def check(self) -> None:
        """Raise AssertionError unless the scheduler's invariants hold."""
        self.scheduler.decoding.check()
        if self.scheduler.transfers is not None:
            self.scheduler.transfers.check()

    def lines(self) -> Iterator[Line]:
        loop = serve(self.scheduler, self._depth)
        answer: Any = None
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                yield self._summary()
                return
            if isinstance(effect, Poll) and self.scheduler.leaves_stores and self.scheduler.idle and not self._coming:
                yield self._summary()  # even if stores are in flight
                return
            if self._aborted:
                free, ids = self.scheduler.free_after_cancel, self._aborted
                self._aborted = []
                yield {"ev": "abort", "t": self._now, "ids": ids, "free": free}
            line, answer = self._do(effect)
            if line:
                yield line

    def _summary(self) -> Line:
        line = {"ev": "summary", "steps": self._steps, "end_us": self._now, "requests": self._reports.lines}
        pool = self.scheduler.pool
        if self._groups:
            return line | {"prefix_cache_final_cached_blocks": self._groups.cached()}
        return line | {"prefix_cache_final_cached_blocks": pool.contents if self._format == 1 else pool.keyed}

    def _do(self, effect: Effect) -> tuple[Line | None, Any]:
        if isinstance(effect, Poll):
            return self._poll(effect)
        if isinstance(effect, Launch):
            line = self._schedule(effect.plan)
            start = max(self._now, self._gpu_free)
            self._gpu_free = end = start + self._step_us(effect.plan)
            if self._offload:
                self._offload.launched(effect.plan, start, end)
            return line, end
        if isinstance(effect, Await):
            self._now = max(self._now, effect.ticket)
            stops = tuple(s for s in effect.plan.changes.ends if s.output_tokens < s.max_tokens)
            moved, broken = self._offload.over(effect.plan.step) if self._offload else ((), ())
            return None, Completed(StepResult(stops, moved=moved, broken=broken), self._due_aborts())
        assert isinstance(effect, Applied), effect
        return self._update(effect), None

    def _step_us(self, plan: StepPlan) -> int:
        timing = self._timing
        if not plan.work.rows:
            return int(timing["empty_us"]) if self._offload else 0
        context = plan.work.decode_context + plan.work.decodes + sum(c.start + c.tokens for c in plan.work.chunks)
        tokens: int = timing["per_token_us"] * plan.work.tokens
        return int(timing["base_us"] + tokens + timing["per_kv_token_us"] * context)

    def _poll(self, effect: Poll) -> tuple[Line | None, Polled]:
        if effect.wait and self._coming:
            self._now = max(self._now, self._coming[-1][0].arrival_ns)
        arrivals = []
        while self._coming and self._coming[-1][0].arrival_ns <= self._now:
            spec, _ = self._coming.pop()
            arrivals.append(spec)
            self._added.append(spec.id)
            self._alive[spec] = None
            self._reports.arrived(spec, self._now)
        return None, Polled(arrivals, self._due_aborts(), closed=not self._coming)

    def _due_aborts(self) -> list[RequestSpec]:
        """Return the live requests whose abort is due; an abort before its request's arrival is lost. Format 1 orders
        them by the times of the aborts, the others by the requests.
        """
        due = [s for at, s in self._aborts if at <= self._now]
        self._aborts = [(at, s) for at, s in self._aborts if at > self._now]
        due = [s for s in due if s in self._alive]
        if self._format > 1:
            due.sort(key=lambda spec: spec.index)
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
        if self._offload:
            line |= self._offload.planned(plan)
        if self._groups:
            line |= self._groups.planned(plan, self.scheduler.requests)
        self._added = []
        self._now += self._timing["sched_us"]
        return line

    def _row(self, row: Row, plan: StepPlan) -> Line:
        chunk, request = row.chunk, self.scheduler.requests[row.spec]
        kind = "running" if not (chunk and chunk.admitted) else "resumed" if chunk.resumed else "new"
        blocks = self.scheduler.pool.allocated(request)
        line = {"id": row.spec.id, "kind": kind, "n": row.tokens, "computed": row.start, "held": blocks}
        line["blocks"] = list(row.blocks)
        if chunk and chunk.admitted and self._format == 1:
            line["cached"] = chunk.cached
        if self._groups:
            line |= self._groups.row(row, plan)
        if self._depth > 1:
            line["ph"] = request.scheduled - request.seen
        return line

    def _update(self, effect: Applied) -> Line:
        finished = [spec.id for spec, _ in effect.outcome.finished]
        got = [
            row.spec
            for row in self._rows.pop(effect.plan.step)
            if row.spec in self._alive and (row.chunk is None or row.chunk.outputs)
            if (effect.plan.step, row.spec) not in self._dropped
        ]
        tokens: list[Any] = [s.id for s in got] if self._format != 2 else [[s.id, 1] for s in got]
        line = {"ev": "update", "step": effect.plan.step + 1, "t": self._now, "tokens": tokens}
        line |= {"finished": finished, "free": self.scheduler.pool.free}
        if self._offload:
            line |= self._offload.updated(effect.plan.step)
        if self._groups:
            line["cached"] = self._groups.cached()
        self._now += self._timing["update_us"]
        for spec in got:
            self._reports.token(spec, self._now)
        for spec, _ in effect.outcome.finished:
            del self._alive[spec]
        return line


class Reports:
    """The reports of all requests; `lines` are the fields reported so far. Times are those of the trace."""

    def __init__(self, trace_format: int) -> None:
        self.lines: dict[str, Line] = {}
        self._events: dict[str, Line] = {}  # as `lines`, with events that are not reported yet
        self._at_once = trace_format == 1

    def arrived(self, spec: RequestSpec, now: int) -> None:
        self.lines[spec.id] = {"arrival": spec.arrival_ns, "preemptions": 0, "n_out": 0}
        self._events[spec.id] = {"queued_ts": now, "preemptions": 0}
        self._happened(spec)

    def scheduled(self, spec: RequestSpec, now: int) -> None:
        """Record the time when a request's first row was planned."""
        if "scheduled_ts" not in self._events[spec.id]:
            self._events[spec.id]["scheduled_ts"] = now
            self._happened(spec)

    def preempted(self, spec: RequestSpec) -> None:
        self._events[spec.id]["preemptions"] += 1
        self._happened(spec)

    def token(self, spec: RequestSpec, now: int) -> None:
        line = self.lines[spec.id]
        line |= self._events[spec.id]
        line["n_out"] += 1
        line.setdefault("first_token_ts", now)
        line["last_token_ts"] = now

    def _happened(self, spec: RequestSpec) -> None:
        if self._at_once:
            self.lines[spec.id] |= self._events[spec.id]


def case(trace: Path, header: Line) -> Case:
    version, mode, config = header_fields(trace, header, vllm=str, mode=str, config=dict)
    name = stem(trace).removesuffix(f".{mode}")
    skipped = "speculation" if "spec" in config else not_followed(version, VERSIONS) or not_modelled(config, OPTIONS)
    skipped = skipped or guarded(trace, lambda: offload_traces.unsupported(config))
    if skipped:
        return Case(name, "vllm", version, mode, skipped=skipped)
    recorded = workload(trace, name)
    replay = guarded(trace, lambda: VllmReplay(header, recorded))
    derived = {} if replay.effective is None else {"effective": replay.effective}
    return Case(name, "vllm", version, mode, replay, header=derived)


def comparable(line: Line) -> Line:
    """Return the line with sets sorted, as their order is arbitrary, and with null fields removed."""
    if line.get("ev") == "schedule" and isinstance(line.get("finished"), list):
        line["finished"] = sorted(line["finished"])
    if line.get("ev") == "summary" and isinstance(line.get("requests"), dict):
        requests = line["requests"].items()
        line["requests"] = {name: {k: v for k, v in stats.items() if v is not None} for name, stats in requests}
    return line


READER = Reader(lambda header: header.get("ev") == "header" and "vllm" in header, case, comparable)
