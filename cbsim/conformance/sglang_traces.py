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

from cbsim.conformance.reader import Case, Line, Reader, Replay, due, header_fields, not_followed, not_modelled, one_of
from cbsim.kv.radix import Node, RadixKey
from cbsim.kv.radix_pool import RadixPool
from cbsim.policy.decode_batch import Completion
from cbsim.policy.loop import Applied, Await, Completed, Idle, Launch, Poll, Polled
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Row, StepPlan, StepResult, unpacked
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
        **{name: config[name] for name in SETTINGS - APART | APART & config.keys()},
    )


class Heard(Observer):
    """An observer of the request table's rows as they become free, and of the effects of results."""

    def __init__(self, o: SglangOptions) -> None:
        self.at_once = o.decodes  # rows are given with blocks, and not with those of a batch
        more = (o.disaggregation_decode_extra_slots or 0) if o.decodes else 0
        self.free_rows = list(range(1, o.max_running_requests + more + 1))
        self.row_of: dict[Request, int] = {}
        self.ended: list[Request] = []
        self.dropped: list[str] = []

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        del blocks
        self.free_rows.append(self.row_of.pop(request))

    def placed(self, request: Request) -> None:
        if self.at_once:
            self.row_of[request] = self.free_rows.pop(0)

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
    """A pool that records each call that has to evict, and who gets blocks, with how many that were cached."""

    evictions: list[list[list[int]]]
    placed: list[tuple[Request, int]]
    heard: Heard

    def admit(self, request: Request, key: RadixKey, node: Node) -> None:
        super().admit(request, key, node)
        self.heard.placed(request)
        self.placed.append((request, node.end))

    def make_room(self, tokens: int) -> list[bytes]:
        short = self._shares and self.ready * self.block_size < tokens
        evicted = super().make_room(tokens)
        if short:
            self.evictions.append([[*unpacked(pages)] for pages in evicted])
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
        self.objects: dict[RequestSpec, Request] = {}  # all requests but those refused when they came
        self.entered: list[tuple[Request, bool]] = []  # in the last pass, with whether that was their end
        self._heard = heard
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
        pool.evictions, pool.placed, pool.heard = [], [], self._heard
        return pool

    def add(self, spec: RequestSpec) -> None:
        super().add(spec)
        if request := self.requests.get(spec):
            self.objects[spec] = request
            if self._recorded[spec].too_long:
                self.decoding.defer_abort(request)
        self.turned_away = len(self.aborted)

    def rest(self) -> None:
        """Do nothing, as passes without work count here."""

    def outputs(self, spec: RequestSpec) -> int:
        return self.most_outputs(self._recorded[spec].prompt_tokens, self._recorded[spec].max_new)

    def reserves(self, spec: RequestSpec) -> bool:
        return self._recorded[spec].whole

    @property
    def finished(self) -> bool:
        """True if no request is left, not even one that has ended and is still listed."""
        return not (self.requests or self.in_flight or self.launched or self._departed or self.pending)

    def forget(self) -> None:
        """Clear the records at the beginning of a pass."""
        self.retracted, self.preempted, self.aborted, self.turned_away = [], [], [], 0
        self.pool.evictions, self.pool.placed, self.entered = [], [], []

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

    def _give_up(self, request: Request) -> None:
        self.aborted.append(request.spec.id)
        super()._give_up(request)

    def _enter(self, entry: Entry) -> None:
        super()._enter(entry)
        self.entered.append((entry.request, entry.request.finish is not None))

    def _drop(self, request: Request, reason: str) -> None:
        super()._drop(request, reason)
        self.refused.clear()
        self.aborted.append(request.spec.id)

    def refuse(self, request: Request, reason: str) -> None:  # noqa: ARG002  (no driver hears of it)
        self.aborted.append(request.spec.id)
        self.decoding.end(request, Finish.REFUSED)


class SglangReplay(Replay):
    """The replay of one workload and loop; the last line is the footer."""

    scheduler: WatchedSglang

    def __init__(self, header: Line, workload: Line) -> None:
        o, keys = options(header["config"]), ChainedKeys(1)
        recorded = [Recorded(i, request, o, keys) for i, request in enumerate(workload["requests"])]
        self._recorded = {entry.spec: entry for entry in recorded}
        self._heard = Heard(o)
        super().__init__(WatchedSglang(o, self._recorded, self._heard), 2 if header["loop"] == "overlap" else 1)
        self._coming = sorted(recorded, key=lambda entry: entry.arrival)[::-1]
        cancels = [entry for entry in recorded if entry.cancel is not None]
        self._cancels = sorted(cancels, key=lambda entry: entry.cancel or 0)[::-1]
        self._now, self._batches = -1, 0
        self._rows: dict[int, list[Row]] = {}
        self._arrived: Line = {}
        self._open = False  # whether the pass has no line yet
        self._last = False  # whether no request was left when the pass began
        self._over: set[RequestSpec] = set()
        self._retired: set[RequestSpec] = set()  # requests that end with a result, and get nothing from it

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
        if plan is None and not scheduler.requests and not scheduler.in_flight and not scheduler.pending:
            scheduler.ratio = o.first_ratio
        return line | self._queues() | self._memory()

    def _queues(self) -> Line:
        """Return the queues of a server with a role."""
        return {}

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
            request = self.scheduler.objects.get(recorded.spec)
            recorded.over(self._now, "abort", request.seen if request else 0)
        return named

    def _launched(self, plan: StepPlan) -> Line:
        rows = self._batch.rows(plan)
        scheduler, heard = self.scheduler, self._heard
        requests = [scheduler.requests[row.spec] for row in rows]
        new = [r for r, row in zip(requests, rows, strict=True) if row.chunk and row.chunk.admitted]
        if new and not heard.at_once:
            heard.admitted(new)
        prefilled = scheduler.keys.prefilled
        decoding = [request.spec.id for request in requests if request not in prefilled]
        kind = "decode" if not prefilled else "mixed" if decoding else "extend"
        self._rows[plan.step], self._batches = rows, plan.step + 1
        return {
            "kind": kind,
            "n": len(rows),
            "rows": [self._row(row, request) for row, request in zip(rows, requests, strict=True)],
            "decoding": decoding if kind == "mixed" else [],
            "batch": plan.step,
        }

    def _row(self, row: Row, request: Request) -> list[Any]:
        pool = self.scheduler.pool
        size, table = pool.block_size, pool.table(request)
        slots = [(table[i // size] + 1) * size + i % size for i in range(row.start, row.start + row.tokens)]
        return [row.spec.id, row.start, row.tokens, self._heard.row_of[request], served.runs(slots)]

    def _memory(self) -> Line:
        pool = self.scheduler.pool
        size, tree = pool.block_size, pool.tree
        protected = sum([node.end - node.start for node in tree.nodes() if node.lock])
        totals = {"evictable": tree.evictable * size, "protected": protected * size}
        if (states := self.scheduler.options.max_mamba_cache_size) is not None:
            totals["states"] = states - len(self.scheduler.running)
        return {"avail": pool.ready * size, **totals}

    def _applied(self, effect: Applied) -> None:
        self._close()
        rows, heard = self._rows.pop(effect.plan.step), self._heard
        useless, ended = set(heard.dropped), heard.ended
        heard.dropped, heard.ended = [], []
        useless |= {row.spec.id for row in rows if row.spec in self._over}  # including chunks of prompts
        dropped = [row.spec.id for row in rows if row.spec.id in useless]
        sampling = [row.spec for row in rows if row.chunk is None or row.chunk.outputs]
        got = [spec for spec in sampling if spec.id not in dropped and spec not in self._retired]
        for spec in got:
            self._recorded[spec].got_token(self._now)
        for name in dropped:
            self._named(name).stats["wasted"] += 1
        finished = [self._finished(request) for request in ended]
        line = {"ev": "result", "step": self._now, "of": effect.plan.step, "tokens": [spec.id for spec in got]}
        self._written.append(line | {"finished": finished, "dropped": dropped} | self._memory())

    def _finished(self, request: Request) -> list[Any]:
        """Note that a request is over; return its id, the reason, and its outputs."""
        recorded, spec = self._recorded[request.spec], request.spec
        reason, outputs = self._reason(recorded, request), 0 if spec in self._retired else request.seen
        recorded.over(self._now, reason, outputs)
        self._over.add(spec)
        return [recorded.id, reason, outputs]

    def _reason(self, recorded: Recorded, request: Request) -> str:
        if request.finish is Finish.ABORTED:
            return "abort"
        stopped = recorded.stops and request.seen == len(recorded.outputs) <= self.scheduler.outputs(recorded.spec)
        return "stop" if stopped else "length"

    def _end(self) -> None:
        requests = {recorded.id: recorded.stats for recorded in self._recorded.values()}
        line = {"ev": "footer", "steps": self._now + 1, "batches": self._batches, "requests": requests}
        self._written.append(line)


class ApartReplay(SglangReplay):
    """The replay of a server with a role. Its transfers are over by their passes, not by results."""

    def __init__(self, header: Line, workload: Line) -> None:
        super().__init__(header, workload)
        self._prefills = self.scheduler.options.prefills
        self._due: dict[int, tuple[int, Request]] = {}  # job -> pass, of transfers under way
        self._unready: list[Recorded] = []  # the other server is not ready for them
        self._late: list[str] = []  # they were aborted after the line of a pass

    def _poll(self, effect: Poll) -> Polled | None:
        self._close()
        if self._prefills:
            self._sent()
        self._last &= not self._unready
        polled = super()._poll(effect)
        if polled is None:
            return None
        ready = self._ready(polled)
        self._open &= not (self._last and self._prefills and self._depth > 1)  # that loop ends before it decides
        if self._prefills:
            self._due |= {job: (self._now, r) for job, (_, r) in self._due.items() if r.spec in polled.cancels}
        else:
            self._received()
        return Polled([each.spec for each in ready], polled.cancels)

    def _ready(self, polled: Polled) -> list[Recorded]:
        """Return the requests that have arrived and for which the other server is ready."""
        arrived = self._unready + [self._recorded[spec] for spec in polled.arrivals]
        gone = [spec for spec in polled.cancels if spec not in self.scheduler.requests]
        ready = [each for each in arrived if each.arrival + each.kv["ready"] <= self._now]
        self._unready = [each for each in arrived if each not in ready and each.spec not in gone]
        self._last &= not arrived
        return ready

    def _over_by_now(self) -> list[tuple[int, Request]]:
        return [(job, request) for job, (end, request) in self._due.items() if end <= self._now]

    def _received(self) -> None:
        over, lost = self._over_by_now(), list[int]()
        for job, request in over:
            del self._due[job]
            lost += self.scheduler.pool.table(request)[-1:] if self._recorded[request.spec].kv.get("fails") else []
        self.scheduler.moved(tuple(job for job, _ in over), tuple(lost))

    def _sent(self) -> None:
        """Write the line of requests whose KV is sent, or given up, at the end of a pass."""
        done = self._over_by_now()
        self.scheduler.moved(tuple(job for job, _ in done))
        for job, request in done:
            recorded = self._recorded[request.spec]
            del self._due[job]
            aborted = recorded.kv.get("fails") or (recorded.cancel is not None and recorded.cancel <= self._now)
            recorded.over(self._now, "abort" if aborted else "length", 1)
            self._late += [recorded.id] * bool(aborted)
        if done:
            names = [request.spec.id for _, request in done]
            self._written.append({"ev": "sent", "step": self._now, "requests": names, **self._memory()})

    def _aborted(self) -> list[str]:
        late, self._late = self._late, []
        return sorted([*late, *super()._aborted()])

    def _queues(self) -> Line:
        scheduler, receiving, pool = self.scheduler, self.scheduler.receiving, self.scheduler.pool
        if receiving is None:
            return self._sending_queues()
        size, placed = pool.block_size, [(r, cached) for r, cached in pool.placed if not r.preemptions]
        pages = [[page + 1 for page in pool.table(r)[cached:]] for r, cached in placed]
        for job, request in receiving.hand_off._loading.items():
            self._due.setdefault(job, (self._now + self._recorded[request.spec].kv["moves"], request))
        return {
            "waiting": [entry.request.spec.id for entry in receiving.ready.entries],
            "entered": [self._entered(*entered) for entered in scheduler.entered],
            "allocated": [[r.spec.id, n * size, served.runs(p)] for (r, n), p in zip(placed, pages, strict=True)],
            "allocating": [entry.request.spec.id for entry in scheduler.waiting.entries],
            "receiving": [request.spec.id for request in receiving.loading],
            "retracted_queue": [entry.request.spec.id for entry in receiving.retracted],
        }

    def _sending_queues(self) -> Line:
        scheduler = self.scheduler
        assert scheduler.sending is not None
        waits = [*(entry.request.spec for entry in scheduler._sent), *(each.spec for each in self._unready)]
        waits.sort(key=lambda spec: spec.index)
        sending = [request.spec.id for request in scheduler.sending.unfetched]
        return {"bootstrapping": [spec.id for spec in waits], "sending": sending}

    def _entered(self, request: Request, ended: bool) -> list[Any]:
        self._recorded[request.spec].got_token(self._now)
        self._recorded[request.spec].stats["n_out"] = request.seen
        return [request.spec.id, self._finished(request)[1] if ended else None]

    def _applied(self, effect: Applied) -> None:
        aborted = [request for request in self._heard.ended if request.finish is Finish.ABORTED]
        self._late += [request.spec.id for request in aborted]
        if self._prefills:
            self._heard.ended, self._retired = aborted, {request.spec for request in aborted}
        super()._applied(effect)
        if self._prefills and self.scheduler.sending is not None:
            for request, job in self.scheduler.sending.unfetched.items():
                self._over.add(request.spec)
                self._due.setdefault(job, (self._now + self._recorded[request.spec].kv["moves"], request))


def _ranges(pages: list[int], size: int) -> list[list[int]]:
    return served.runs([(page + 1) * size + i for page in pages for i in range(size)])


class Recorded:
    """A request of a workload: its recorded fields, and its statistics in the replay."""

    def __init__(self, index: int, request: Line, o: SglangOptions, keys: ChainedKeys) -> None:
        self.id: str = request["id"]
        self.arrival: int = request["arrival_step"]
        self.cancel: int | None = request.get("cancel_step")
        self.kv: Line = request.get("kv", {})
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
        role = None, o.decodes, o.prefills
        self.spec = RequestSpec(index, self.id, self.arrival, *lengths, self._priority(request, o), *content, *role)
        self.stats: Line = {"first_step": None, "end_step": None, "reason": None, "n_out": 0}
        self.stats |= {"retractions": 0, "wasted": 0}

    @staticmethod
    def _priority(request: Line, o: SglangOptions) -> int:
        """Return a request's priority. One that has none is the least urgent."""
        least = sys.maxsize if o.schedule_low_priority_values_first else -sys.maxsize - 1
        priority: int | None = request.get("priority")
        return priority if priority is not None else least if o.enable_priority_scheduling else 0

    def got_token(self, step: int) -> None:
        if self.stats["first_step"] is None:
            self.stats["first_step"] = step

    def over(self, step: int, reason: str, outputs: int) -> None:
        self.stats |= {"end_step": step, "reason": reason, "n_out": outputs}


def case(trace: Path, header: Line) -> Case:
    version, loop, config = header_fields(trace, header, sglang=str, loop=str, config=dict)
    one_of(trace, "loop", loop, ("normal", "overlap"))
    skipped = not_followed(version, VERSIONS) or not_modelled(config, CONFIG | APART)
    role = config.get("disaggregation_mode")
    one_of(trace, "disaggregation_mode", role, (None, "prefill", "decode"))
    replay = SglangReplay if role is None else ApartReplay
    return Case("sglang", version, loop, skipped, lambda recorded: replay(header, recorded))


READER = Reader(lambda header: "sglang" in header, case)
