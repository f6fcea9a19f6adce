"""Golden traces of SGLang's scheduler: the replayed lines for the same workload, pass by pass.

The formats, and the protocol by which the recorder drove the event loops, are described beside the traces. Time is the
number of the pass, passes without work included. Slot s of page p is p * page_size + s; pages count from 1. Defects of
SGLang 0.5.23 are added for the comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from cbsim.conformance.reader import (
    Case,
    Line,
    Reader,
    Replay,
    case_of,
    due,
    header_fields,
    not_followed,
    not_modelled,
    one_of,
)
from cbsim.kv.radix_pool import RadixPool
from cbsim.policy.decode_batch import Completion
from cbsim.policy.loop import Applied, Await, Completed, Idle, Launch, Poll, Polled
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Row, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.schedulers.sglang.queue import Entry, Finishing, Prefill
from cbsim.schedulers.sglang.scheduler import SglangScheduler
from cbsim.schedulers.sglang.settings import TOO_LONG, SglangOptions, SglangSettings
from cbsim.workload import served
from cbsim.workload.scheduler_tests import STOP_TOKEN, ChainedKeys

OPEN = {"chunked_prefill_size", "prefill_decode_interval", "max_mamba_cache_size"}  # options that may be null
FIXED = {"name", "ignore_eos", "scheduler_recv_interval", "mamba_full_memory_ratio"}
SETTINGS = {field.name for field in fields(SglangSettings)} - FIXED - OPEN
APART = {name for name in SETTINGS if "decode_tokens" in name or "disaggregation" in name} | {"disaggregation_mode"}
CONFIG = frozenset(["page_size", "max_total_num_tokens", "vocab_size", *SETTINGS - APART, *OPEN])
VERSIONS = ("0.5.23",)


def options(config: Line) -> SglangOptions:
    """Return the scheduler options of a workload's `config`."""
    return SglangOptions(
        block_size=config["page_size"],
        num_blocks=config["max_total_num_tokens"] // config["page_size"],
        chunked_prefill_size=config["chunked_prefill_size"] or -1,
        prefill_decode_interval=config["prefill_decode_interval"] or 0,
        max_mamba_cache_size=config.get("max_mamba_cache_size"),
        host_blocks=1 << 20,  # it is in tensors of their own that retracted requests were recorded
        **{name: config[name] for name in SETTINGS - APART},
        **{name: config[name] for name in APART & config.keys()},
    )


class Heard(Observer):
    """An observer of the request table's rows as they become free, and of the effects of results."""

    def __init__(self, slots: int) -> None:
        self.free_rows = list(range(1, slots + 1))
        self.row_of: dict[Request, int] = {}
        self.ended: list[Request] = []
        self.dropped: list[str] = []

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        del blocks
        self.free_rows.append(self.row_of.pop(request))

    def admitted(self, requests: list[Request]) -> None:
        rows, self.free_rows = self.free_rows[-len(requests) :], self.free_rows[: -len(requests)]
        self.row_of.update(zip(requests, rows, strict=True))

    def completed(self, completion: Completion, over: bool) -> None:
        if over:
            self.ended.append(completion.request)

    def wasted(self, completion: Completion, step: int) -> None:
        del step
        self.dropped.append(completion.request.spec.id)


class WatchedPool(RadixPool):
    """A pool that records each call that has to evict."""

    evictions: list[list[list[int]]]

    def make_room(self, tokens: int) -> list[list[int]]:
        short = self._shares and self.ready * self.block_size < tokens
        evicted = super().make_room(tokens)
        if short:
            self.evictions.append(evicted)
        return evicted


class DefectivePrefill(Prefill):
    """A prefill with a defect: a request that ends after all others is inserted before the last of them."""

    def behind(self, line: list[Finishing]) -> int:
        return max(0, len(line) - 1)


class WatchedSglang(SglangScheduler):
    """The rules of SGLang with their defects, called in every pass, with records of the decisions in the last one."""

    pool: WatchedPool
    idle = False

    def __init__(self, options: SglangOptions, recorded: dict[RequestSpec, Recorded], heard: Heard) -> None:
        self._recorded = recorded
        self.retracted: list[list[Any]] = []
        self.preempted: list[list[Any]] = []
        self.aborted: list[str] = []
        self.turned_away = 0  # how many of these were refused when others arrived, before any cancellation
        self.written: dict[RequestSpec, int] = {}  # output tokens of requests that ended outside a result
        self._launched_tokens = 0  # of the last prefill
        self._batch_tokens = 0  # of the prefill whose object the decode batch is
        super().__init__(options, heard)

    def _merge(self) -> None:
        """Note which prefill's object the decode batch is; those that have ended are still in it."""
        fresh = not self.batch and not self._departed
        super()._merge()
        if fresh and self.batch:
            self._batch_tokens = self._launched_tokens

    def _launch(self, prefill: Prefill) -> StepPlan:
        """Count the decoding rows beside a prefill as processed, too."""
        plan = super()._launch(prefill)
        self._launched_tokens = plan.work.tokens
        self.waiting.processed += plan.work.tokens - plan.work.prefill_tokens
        return plan

    def _decode(self) -> StepPlan | None:
        """Count the tokens of a prefill as processed again with each decode step of its object."""
        plan = super()._decode()
        self.waiting.processed += self._batch_tokens if plan else 0
        return plan

    def make_prefill(self) -> DefectivePrefill:
        return DefectivePrefill(self.options, self.ratio, self.batch, self.most)

    def refusal(self, spec: RequestSpec) -> None:  # noqa: ARG002  (a prompt that is too long is replaced and run)
        return None

    def extend_tokens(self, entry: Entry) -> int:
        """Return the tokens of the last prefix match: 0 before the request was considered for admission."""
        return entry.todo

    def stranded(self, entry: Entry) -> list[Entry]:
        """Abort the last decoding request instead of preempting it."""
        self.retracted.append([entry.request.spec.id, entry.request.seen])
        self.leave_batch(entry.request)
        self._give_up(entry.request)
        return []

    def make_pool(self, observer: Observer) -> WatchedPool:
        o = self.options
        shares = not o.disable_radix_cache
        pool = WatchedPool(o.block_size, o.num_blocks, o.radix_eviction_policy, shares=shares, observer=observer)
        pool.evictions = []
        return pool

    def add(self, spec: RequestSpec) -> None:
        super().add(spec)
        if self._recorded[spec].too_long and spec in self.requests:
            self.decoding.defer_abort(self.requests[spec])
        self.turned_away = len(self.aborted)

    def rest(self) -> None:
        """Do nothing, as passes without work count here."""

    def outputs(self, spec: RequestSpec) -> int:
        return self.options.outputs(self._recorded[spec].prompt_tokens, self._recorded[spec].max_new)

    def reserves(self, spec: RequestSpec) -> bool:
        return self._recorded[spec].whole

    @property
    def finished(self) -> bool:
        """True if no request is left, not even one that has ended and is still listed."""
        return not (self.requests or self.in_flight or self.launched or self._departed)

    def forget(self) -> None:
        """Clear the records at the beginning of a pass."""
        self.retracted, self.preempted, self.aborted, self.turned_away = [], [], [], 0
        self.pool.evictions = []

    def schedule(self) -> StepPlan | None:
        return self.one_pass()

    def _preempt(self, entry: Entry, prefill: Any) -> bool:
        before = len(prefill.preempted)
        done = super()._preempt(entry, prefill)
        self.preempted += [[e.request.spec.id, e.request.seen] for e in prefill.preempted[before:]]
        self.retracted = []
        return done

    def _set_back(self, entry: Entry, remaining: int) -> None:
        self.retracted.append([entry.request.spec.id, entry.request.seen])
        super()._set_back(entry, remaining)

    def cancel(self, spec: RequestSpec) -> None:
        request = self.requests.get(spec)
        super().cancel(spec)
        if request is not None and request.finish is not None:
            self.written[spec] = request.seen

    def _give_up(self, request: Request) -> None:
        self.written[request.spec] = request.seen
        self.aborted.append(request.spec.id)
        super()._give_up(request)

    def refuse(self, request: Request, reason: str) -> None:  # noqa: ARG002  (no driver hears of it)
        self.written[request.spec] = request.seen
        self.aborted.append(request.spec.id)
        self.decoding.end(request, Finish.REFUSED)


class SglangReplay(Replay):
    """The replay of one workload and loop; the last line is the footer."""

    scheduler: WatchedSglang

    def __init__(self, header: Line, workload: Line) -> None:
        o, keys = options(header["config"]), ChainedKeys(1)
        recorded = [Recorded(i, request, o, keys) for i, request in enumerate(workload["requests"])]
        self._recorded = {entry.spec: entry for entry in recorded}
        self._heard = Heard(o.max_running_requests)
        super().__init__(WatchedSglang(o, self._recorded, self._heard), 2 if header["loop"] == "overlap" else 1)
        self._coming = sorted(recorded, key=lambda entry: entry.arrival)[::-1]
        cancels = [entry for entry in recorded if entry.cancel is not None]
        self._cancels = sorted(cancels, key=lambda entry: entry.cancel or 0)[::-1]
        self._now, self._batches = -1, 0
        self._rows: dict[int, tuple[int, list[Row]]] = {}
        self._arrived: Line = {}
        self._open = False  # whether the pass has no line yet
        self._last = False  # whether no request was left when the pass began
        self._over: set[RequestSpec] = set()

    def check(self) -> None:
        self.scheduler.check()

    def _poll(self, effect: Poll) -> Polled | None:
        del effect
        self._close()
        if self._last:
            return None
        scheduler = self.scheduler
        self._now += 1
        scheduler.forget()
        arrived = due(self._coming, self._now, lambda entry: entry.arrival)
        cancelled = due(self._cancels, self._now, lambda entry: entry.cancel or 0)
        self._last = not (arrived or self._coming or self._cancels) and scheduler.finished
        self._arrived = {"arrivals": [a.id for a in arrived], "cancels": [a.id for a in cancelled]}
        self._open = True
        return Polled([a.spec for a in arrived], [a.spec for a in cancelled])

    def _close(self) -> None:
        """Append the line of a pass that has launched nothing."""
        if self._open:
            self._written.append(self._line(None))

    def _idle(self, effect: Idle) -> None:
        del effect
        self._close()

    def _launch(self, effect: Launch) -> None:
        self._written.append(self._line(effect.plan))

    def _await(self, effect: Await) -> Completed:
        self._close()
        return Completed(StepResult(tuple(s for s in effect.plan.changes.ends if self._recorded[s].stops)))

    def _line(self, plan: StepPlan | None) -> Line:
        self._open = False
        scheduler, o = self.scheduler, self.scheduler.options
        line = {"ev": "sched", "step": self._now, **self._arrived, "aborted": self._aborted()}
        line |= self._launched(plan) if plan else {"kind": "none", "n": 0, "rows": [], "decoding": []}
        chunked = scheduler.chunked
        for name, _ in (*scheduler.retracted, *scheduler.preempted):
            self._named(name).stats["retractions"] += 1
        line |= {
            "chunked": chunked.request.spec.id if chunked else None,
            "retracted": scheduler.retracted,
            "preempted": scheduler.preempted,
            "evicted": [[_ranges(pages, o.block_size) for pages in call] for call in scheduler.pool.evictions],
            "waiting": [entry.request.spec.id for entry in scheduler.waiting.entries],
            "running": [request.spec.id for request in scheduler.batch],
            "full": scheduler.full,
            "ratio": round(scheduler.ratio, 9),
        }
        if plan is None and not scheduler.requests and not scheduler.in_flight:
            scheduler.ratio = o.first_ratio
        return line | self._memory()

    def _named(self, name: str) -> Recorded:
        return next(recorded for recorded in self._recorded.values() if recorded.id == name)

    def _aborted(self) -> list[str]:
        """Return the requests that ended outside a result: those refused when others arrived, cancelled ones that
        waited, those that ended in the decision.
        """
        requests, given_up, first = self.scheduler.requests, self.scheduler.aborted, self.scheduler.turned_away
        gone = [name for name in self._arrived["cancels"] if self._named(name).spec not in requests]
        gone = [name for name in gone if self._named(name).spec not in self._over]
        named = [*given_up[:first], *(name for name in gone if name not in given_up), *given_up[first:]]
        for name in named:
            recorded = self._named(name)
            self._over.add(recorded.spec)
            recorded.over(self._now, "abort", self.scheduler.written.get(recorded.spec, 0))
        return named

    def _launched(self, plan: StepPlan) -> Line:
        rows = self._batch.rows(plan)
        scheduler, heard = self.scheduler, self._heard
        requests = [scheduler.requests[row.spec] for row in rows]
        new = [r for r, row in zip(requests, rows, strict=True) if row.chunk and row.chunk.admitted]
        if new:
            heard.admitted(new)
        prefilled = scheduler.keys.prefilled
        decoding = [request.spec.id for request in requests if request not in prefilled]
        kind = "decode" if not prefilled else "mixed" if decoding else "extend"
        self._rows[plan.step] = self._batches, rows
        self._batches += 1
        return {
            "kind": kind,
            "n": len(rows),
            "rows": [self._row(row, request) for row, request in zip(rows, requests, strict=True)],
            "decoding": decoding if kind == "mixed" else [],
            "batch": self._batches - 1,
        }

    def _row(self, row: Row, request: Request) -> list[Any]:
        pool = self.scheduler.pool
        size, table = pool.block_size, pool.table(request)
        slots = [(table[i // size] + 1) * size + i % size for i in range(row.start, row.start + row.tokens)]
        return [row.spec.id, row.start, row.tokens, self._heard.row_of[request], served.runs(slots)]

    def _memory(self) -> Line:
        pool = self.scheduler.pool
        size, tree = pool.block_size, pool.tree
        totals = {"evictable": tree.evictable * size, "protected": tree.protected * size}
        if (states := self.scheduler.options.max_mamba_cache_size) is not None:
            totals["states"] = states - len(self.scheduler.running)
        return {"avail": pool.ready * size, **totals}

    def _applied(self, effect: Applied) -> None:
        self._close()
        batch, rows = self._rows.pop(effect.plan.step)
        heard = self._heard
        useless, ended = set(heard.dropped), heard.ended
        heard.dropped, heard.ended = [], []
        useless |= {row.spec.id for row in rows if row.spec in self._over}  # including chunks of prompts
        dropped = [row.spec.id for row in rows if row.spec.id in useless]
        sampling = [row.spec for row in rows if row.chunk is None or row.chunk.outputs]
        got = [spec for spec in sampling if spec.id not in dropped]
        for spec in got:
            stats = self._recorded[spec].stats
            stats["first_step"] = self._now if stats["first_step"] is None else stats["first_step"]
        for name in dropped:
            self._named(name).stats["wasted"] += 1
        finished: list[list[Any]] = []
        for request in ended:
            recorded = self._recorded[request.spec]
            reason = self._reason(recorded, request)
            recorded.over(self._now, reason, request.seen)
            self._over.add(request.spec)
            finished.append([recorded.id, reason, request.seen])
        line = {"ev": "result", "step": self._now, "of": batch, "tokens": [spec.id for spec in got]}
        self._written.append(line | {"finished": finished, "dropped": dropped} | self._memory())

    def _reason(self, recorded: Recorded, request: Request) -> str:
        if request.finish is Finish.ABORTED:
            return "abort"
        stopped = recorded.stops and request.seen == len(recorded.outputs) <= self.scheduler.outputs(recorded.spec)
        return "stop" if stopped else "length"

    def _end(self) -> None:
        requests = {recorded.id: recorded.stats for recorded in self._recorded.values()}
        line = {"ev": "footer", "steps": self._now + 1, "batches": self._batches, "requests": requests}
        self._written.append(line)


def _ranges(pages: list[int], size: int) -> list[list[int]]:
    return served.runs([(page + 1) * size + i for page in pages for i in range(size)])


class Recorded:
    """A request of a workload: its recorded fields, and its statistics in the replay."""

    def __init__(self, index: int, request: Line, o: SglangOptions, keys: ChainedKeys) -> None:
        self.id: str = request["id"]
        self.arrival: int = request["arrival_step"]
        self.cancel: int | None = request.get("cancel_step")
        self.max_new: int = request["max_new_tokens"]
        self.whole: bool = request.get("ignore_eos", False)
        self.prompt_tokens = len(request["prompt"])
        self.too_long = self.prompt_tokens >= o.longest - TOO_LONG
        prompt, output = ([0], []) if self.too_long else (request["prompt"], request["output"])
        if not self.whole and STOP_TOKEN in output:
            output = output[: output.index(STOP_TOKEN) + 1]
        self.stops = not self.whole and STOP_TOKEN in output
        self.outputs: list[int] = output if self.stops else [*output, *[0] * (self.max_new - len(output))]
        tokens, most = [*prompt, *self.outputs], max(1, self.max_new)
        lengths = len(prompt), min(most, max(1, len(output))) if self.stops else most, most
        content = keys.of(tokens), 1, len(tokens)
        self.spec = RequestSpec(index, self.id, self.arrival, *lengths, self._priority(request, o), *content)
        self.stats: Line = {"first_step": None, "end_step": None, "reason": None, "n_out": 0}
        self.stats |= {"retractions": 0, "wasted": 0}

    @staticmethod
    def _priority(request: Line, o: SglangOptions) -> int:
        """Return a request's priority. One that has none is the least urgent."""
        least = sys.maxsize if o.schedule_low_priority_values_first else -sys.maxsize - 1
        given: int | None = request.get("priority")
        return given if given is not None else least if o.enable_priority_scheduling else 0

    def over(self, step: int, reason: str, outputs: int) -> None:
        self.stats |= {"end_step": step, "reason": reason, "n_out": outputs}


def case(trace: Path, header: Line) -> Case:
    version, loop, config = header_fields(trace, header, sglang=str, loop=str, config=dict)
    one_of(trace, "loop", loop, ("normal", "overlap"))
    skipped = not_followed(version, VERSIONS)
    skipped = skipped or not_modelled(config, CONFIG | APART)
    return case_of(
        trace, header, "sglang", version, loop, lambda: skipped, lambda recorded: SglangReplay(header, recorded)
    )


READER = Reader(lambda header: "sglang" in header, case)
