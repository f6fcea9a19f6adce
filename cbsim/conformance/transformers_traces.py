"""Golden traces of transformers' continuous batching, 5.17: the replayed lines for the same workload, pass by pass.

The format is described beside the traces. One line is one pass of the generation loop; its events are those of the
scheduler's observer. With layers of several kinds every table is named by its group, `kind.index`. Defects of the
original, which docs/policies.md lists, are added for the comparison. Two more: keys are assigned by count, from the
first block without one, so 5.17 keys a block that is not full after a whole-prompt hit; in 5.23 the KV reads of a row
without tokens are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cbsim.conformance.reader import Line, Replay
from cbsim.kv.blocks import BlockPool, CachedLast, Replaced
from cbsim.kv.keys import Keys, KeysWhenCompleted
from cbsim.kv.table_pools import RingPool
from cbsim.policy.captures import up_to_multiple, up_to_power
from cbsim.policy.decode_batch import Completion
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.policy.loop import Applied, Await, Completed, Idle, Launch, Poll, Polled
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Chunk, Outcome, Row, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import replace
from cbsim.schedulers.transformers import settings
from cbsim.schedulers.transformers.scheduler import Step, TransformersScheduler
from cbsim.schedulers.transformers.settings import TransformersOptions, TransformersSettings
from cbsim.workload.scheduler_tests import TransformersRequests

TOKEN_BYTES = 2 * 2 * 64  # keys and values, two layers, one head of 16 in float32, as in the recorded models
SETTINGS = {field.name for field in fields(TransformersSettings)} - {"name", "version", "cpu_offload_gib"}
KINDS = {Sight.FULL: "full_attention", Sight.SLIDING: "sliding_attention"}
STATUS = {Status.PREFILL: "PREFILLING", Status.DECODE: "DECODING"}


def options(resolved: Line, workload: Line) -> TransformersOptions:
    """Return the scheduler options of a trace's `resolved` header. Older headers lack the number of host blocks."""
    host_bytes = int((workload["cb"].get("cpu_offload_space") or 0) * settings.GIB)
    return TransformersOptions(
        version="5.17" if resolved["transformers"].startswith("5.17.") else "5.23",
        name=settings.FIFO if resolved["scheduler"] == "FIFOScheduler" else settings.PREFILL_FIRST,
        **{name: resolved[name] for name in ("block_size", "num_blocks", *SETTINGS)},
        host_blocks=resolved.get("cpu_blocks", host_bytes // (TOKEN_BYTES * resolved["block_size"])),
        blocks_per_sector=resolved.get("blocks_per_sector", 1),
        groups=resolved.get("layer_groups", ()),
    )


class TransformersWorkload(TransformersRequests):
    """The requests, and the content keys of their blocks as the original assigns them."""

    def __init__(self, workload: Line, block_size: int) -> None:
        super().__init__(workload, block_size)
        self._misnamed: dict[tuple[Request, int], dict[int, int]] = {}  # (request, admission) -> block -> id

    def key(self, request: Request, block: int) -> int:
        """Return a block's content key at the time when the original computes its hash, perhaps before it is full."""
        misnamed = self._misnamed.setdefault((request, request.order), {})
        known, size = request.known, self.block_size
        if block - 1 in misnamed or known < (block + 1) * size:
            parent = misnamed.get(block - 1, request.spec.prefix[block - 1] if block else -1)
            tokens = self.texts[request.spec][block * size : min(known, (block + 1) * size)]
            misnamed[block] = self.keys.after(parent, tokens)
            return (misnamed[block] << 24) + block
        return request.spec.block_key(block, size)


class NamedByContent:
    """A pool whose keys are ids of the tokens that the original hashes."""

    workload: TransformersWorkload

    def key(self, request: Request, block: int) -> int:
        return self.workload.key(request, block)


class ContentPool(NamedByContent, BlockPool):
    """A pool keyed by content, for layers that all have full attention."""


class ContentRings(NamedByContent, RingPool):
    """A pool keyed by content, for layers of several kinds."""


class CountedKeys(KeysWhenCompleted):
    """A rule that keys as many blocks as the row has filled, starting at the first block without a key."""

    def __init__(self, pool: BlockPool, scheduler: TransformersScheduler) -> None:
        super().__init__(pool)
        self._scheduler = scheduler

    def fills(self, request: Request, row: Chunk) -> int:
        """Return the number of blocks that the row fills; the first row after a swap-in adds the swapped-in blocks."""
        size = self.pool.block_size
        before = 0 if request in self._scheduler.returned else row.start // size
        return (row.start + row.tokens) // size - before

    def completed(self, completion: Completion, over: bool) -> list[Replaced]:
        request = completion.request
        if not completion.fills or over or not (completion.outputs or request.status is Status.PREFILL):
            return []
        return self.merge(request, self.reach(request, completion.fills))

    def reach(self, request: Request, count: int) -> int:
        """Return the number of keyed blocks after `count` more; no request can hit the last one if it is not full."""
        blocks = min(request.hashed + count, self.pool.entries(request))
        if blocks * self.pool.block_size > request.known:
            request.name_all()
        return blocks


class Events(Observer):
    """An observer of the events between two lines. A request cancelled in flight still samples, and finishes again."""

    scheduler: WatchedTransformers

    def __init__(self, options: TransformersOptions, names: list[str]) -> None:
        self.finished: list[tuple[RequestSpec, Finish]] = []  # since the last update, in the order of the rows
        self.free_list = CachedLast(range(options.num_blocks))
        self.lines: list[Line] = []
        self.empty_rows: list[tuple[int, Request]] = []  # (position, request) in the step being planned
        self.entries = 0  # block-table entries that a row needs
        self.names = names
        self._full = [name for name, group in zip(names, options.groups, strict=False) if not group.ring]
        self._counted = bool(options.groups)  # whether entries of a table are counted, not blocks
        self._size = options.block_size
        self._grown, self._freed = list[list[int]](), list[list[int]]()
        self._hashed: list[int] = []
        self._replaced: list[list[int]] = []
        self._by_name: dict[str, list[list[int]]] = {}  # blocks replaced in tables of groups
        self._offload: Line = {}

    @property
    def nothing(self) -> Any:
        """The empty tables of all groups."""
        return {name: [] for name in self.names} if self.names else []

    def note(self, op: str, request: Request | None = None, **fields: Any) -> Line:
        if op == "free" and not fields["blocks"]:
            fields["blocks"] = self.nothing
        line = {"op": op, **({"req": request.spec.id} if request else {}), **fields}
        self.lines.append(line)
        return line

    def take_lines(self) -> list[Line]:
        lines, self.lines = self.lines, []
        return lines

    def _by_group(self, heard: list[list[int]], table: Sequence[int]) -> list[int] | dict[str, list[int]] | None:
        """Return a table; of several groups, whose tables come in turn, all by name with the last one, else None."""
        if not self.names:
            return list(table)
        heard.append(list(table))
        if len(heard) < len(self.names):
            return None
        tables = dict(zip(self.names, heard, strict=True))
        heard.clear()
        return tables

    def growing(self, request: Request, count: int) -> None:  # noqa: ARG002
        evicted = list(self.free_list.cached)[::-1][: max(0, count - len(self.free_list.plain))]
        if evicted:
            self.note("evict", blocks=evicted)

    def grew(self, request: Request, blocks: Sequence[int]) -> None:
        tables = self._by_group(self._grown, blocks)
        if tables is not None:
            self.note("alloc", request, n=self.entries if self._counted else len(blocks), blocks=tables)

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        tables = self._by_group(self._freed, blocks)
        if tables is not None:
            self.note("free", request, blocks=tables)

    def merged(self, request: Request, named: Sequence[int], replaced: Sequence[tuple[int, int]]) -> None:  # noqa: ARG002
        """Record merged blocks; called once per group with full attention. Events have the blocks of all groups."""
        exchanged = [[own, now] for own, now in replaced]
        if self.names:
            self._by_name[self._full[len(self._by_name) % len(self._full)]] = exchanged
        self._hashed, self._replaced = [*self._hashed, *named], self._replaced + exchanged

    def looked_up(self, request: Request, tokens: int, blocks: Sequence[int]) -> None:
        matched = len(blocks) * self._size
        self.note("prefix_lookup", request, lookup_tokens=tokens, matched_tokens=matched, blocks=list(blocks))

    def lacked(self, request: Request, blocks: int) -> None:
        self.note("alloc_fail", request, n=blocks, free=self.free_list.free)

    def held_back(self, request: Request, position: int) -> None:
        self.empty_rows.append((position, request))

    def starved(self, requests: Sequence[Request]) -> None:
        self.note("schedule_returned_none", starved=_ids(requests))

    def reclaiming(self, starved: Sequence[Request]) -> None:
        self._offload = self.note("offload", starved=_ids(starved))

    def reclaimed(self, victims: Sequence[Request]) -> None:
        in_order = sorted(victims, key=lambda request: request.order)
        on_host = self.scheduler.host.tables
        out = [request for request in in_order if request in on_host]
        reset = [request for request in in_order if request not in on_host]
        self._offload |= {"soft_reset": _ids(reset), "cpu_offloaded": _ids(out), "requeue_order": _ids(victims)}

    def completed(self, completion: Completion, over: bool) -> None:
        if over:
            self.finished.append((completion.request.spec, completion.request.natural_end))
        hashed, replaced, by_name = sorted(self._hashed), self._replaced, self._by_name
        self._hashed, self._replaced, self._by_name = [], [], {}
        request = completion.request
        if completion.fills and (completion.outputs or request.status is Status.PREFILL):
            dedup = {"dedup": self.nothing | by_name if self.names else replaced} if replaced else {}
            self.note("complete", request, n=completion.fills, hashed=hashed, **dedup)

    def wasted(self, completion: Completion, step: int) -> None:
        request = completion.request
        if request.finish is not Finish.ABORTED or not completion.outputs:
            return
        request.receive(step)
        if request.seen == request.last:
            if completion.fills:
                self.note("complete", request, n=completion.fills, hashed=[])
            self.note("free", request, blocks=[])
            self.finished.append((request.spec, request.natural_end))


def _ids(requests: Sequence[Request]) -> list[str]:
    return [request.spec.id for request in requests]


class WatchedTransformers(TransformersScheduler):
    """The rules with their defects, and an observer of their events. `objects`: all requests, ended ones included."""

    events: type[Events] = Events
    heard: Events

    def __init__(self, options: TransformersOptions, workload: TransformersWorkload, names: list[str]) -> None:
        self.workload = workload
        self.heard = self.events(options, names)
        super().__init__(options, self.heard)
        self.heard.scheduler = self
        self.objects: dict[RequestSpec, Request] = {}

    def make_pool(self, observer: Observer) -> BlockPool:
        o, free = self.options, self.heard.free_list
        pool: ContentRings | ContentPool = (
            ContentRings(o.groups, o.block_size, o.num_blocks, free, observer)
            if o.groups
            else ContentPool(o.block_size, o.num_blocks, free, observer)
        )
        pool.workload = self.workload
        return pool

    def make_keys(self) -> Keys:
        return CountedKeys(self.pool, self)

    def refusal(self, spec: RequestSpec) -> None:  # noqa: ARG002  (no request is rejected)
        return None

    def _allocate(self, request: Request, step: Step) -> list[int] | None:
        reach = request.computed + self._query(request, step)
        self.heard.entries = self._table_size(reach) - self.pool.entries(request)
        return super()._allocate(request, step)

    def add(self, spec: RequestSpec) -> None:
        super().add(spec)
        self.objects[spec] = self.requests[spec]

    def _fork(self) -> None:
        """Fork requests; their allocations are not among the recorded events."""
        lines = list(self.heard.lines)
        super()._fork()
        self.heard.lines = lines

    def cancel(self, spec: RequestSpec) -> None:
        closed, lines = self.block_new_requests, list(self.heard.lines)
        request = self.requests.get(spec)
        if request is None:
            self.heard.note("free", blocks=[])["req"] = spec.id
        else:
            for sample in [*self.sampling.samples.get(request, ())]:  # not forked yet: the original never makes it
                super().cancel(sample.spec)
            self.heard.lines = lines
        super().cancel(spec)
        self.block_new_requests = closed

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = super().update(plan, result)
        finished, self.heard.finished = self.heard.finished, []
        if len(finished) > len(outcome.finished):
            self.block_new_requests = False
        return replace(outcome, finished=tuple(finished))


def sights(model: Line) -> list[Attention]:
    """Return the attention of each layer of a workload's model."""
    window = Attention(Sight.SLIDING, model.get("sliding_window") or 1)
    return [FULL if kind == KINDS[Sight.FULL] else window for kind in model["layer_types"]]


def several_kinds(workload: Line) -> bool:
    """True if some layers do not have full attention."""
    return bool(set(workload.get("model", {}).get("layer_types") or ()) - {KINDS[Sight.FULL]})


class TransformersReplay(Replay):
    """The replay of one workload and mode; the last line is the footer."""

    scheduler: WatchedTransformers
    scheduler_type: type[WatchedTransformers] = WatchedTransformers

    def __init__(self, header: Line, workload: Line) -> None:
        self._names: list[str] = []  # names of groups, if there are several
        self.resolved = self.resolve(header["resolved"], workload)
        ours = TransformersWorkload(workload, self.resolved["block_size"])
        scheduler = self.scheduler_type(options(self.resolved, workload), ours, self._names)
        super().__init__(scheduler, 2 if self.resolved["async"] else 1)
        self._tokens, self._arriving = ours.tokens, ours.arriving
        by_id = {s.id: s for group in self._arriving.values() for s in group}
        self._cancels: dict[int, list[RequestSpec]] = {}
        for cancel in workload.get("cancels", []):
            self._cancels.setdefault(cancel["step"], []).append(by_id[cancel["id"]])
        self._last = max([*self._arriving, *self._cancels, 0])
        self._in_flight: list[tuple[list[Row], dict[RequestSpec, int]]] = []
        self._completion: list[tuple[str, RequestSpec, int]] = []  # (fate, request, position) of the sampling rows
        self._line: Line = {}
        self._now = -1
        self._generated: dict[str, list[int]] = {s.id: [] for s in by_id.values()}
        self._outputs: dict[str, Line] = {}

    def resolve(self, resolved: Line, workload: Line) -> Line:
        """Return the header's sizes, under the names of 5.17."""
        if not several_kinds(workload):
            return resolved
        groups = settings.cut(sights(workload["model"]), resolved["block_size"], "5.17").groups
        if len(groups) > 1:
            self._names = [f"{KINDS[group.attention.sight]}.{g}" for g, group in enumerate(groups)]
        return resolved | {"layer_groups": groups}

    def check(self) -> None:
        super().check()
        self.scheduler.host.check()

    def _end(self) -> None:
        self._close()
        self._written.append({"footer": True, "outputs": self._outputs})

    def _poll(self, effect: Poll) -> Polled:
        del effect
        self._close()
        self._now += 1
        arrivals, cancels = self._arriving.get(self._now, []), self._cancels.get(self._now, [])
        ids = [s.id for s in arrivals if s.sample_of is None]
        self._line = {"step": self._now, "scheduled": False, "arrivals": ids}
        if cancels:
            self._line["cancels"] = [s.id for s in cancels]
        return Polled(arrivals, cancels, closed=self._now >= self._last)

    def _close(self) -> None:
        """Append the line of the pass, which may have planned nothing."""
        if self._line:
            if "after_schedule" not in self._line and "final_update_only" not in self._line:
                self._line |= self._scheduled()
            self._written.append(self._line)
        self._line = {}

    def _scheduled(self) -> Line:
        return {"schedule_events": self.scheduler.heard.take_lines(), "after_schedule": self._state()}

    def _launch(self, effect: Launch) -> None:
        self._line |= self._planned(effect.plan) | {"batch_no": effect.plan.step} | self._scheduled()

    def _idle(self, effect: Idle) -> None:
        del effect
        self._line |= self._scheduled()

    def _planned(self, plan: StepPlan) -> Line:
        rows = self._batch.rows(plan)
        objects = self.scheduler.objects
        self._in_flight.append((rows, {row.spec: objects[row.spec].epoch for row in rows}))
        batch = [self._row(row.spec, row.start, row.tokens, row.chunk is None or row.chunk.outputs > 0) for row in rows]
        for position, request in self.scheduler.heard.empty_rows:
            batch.insert(position, self._row(request.spec, request.computed, 0, False))
        self.scheduler.heard.empty_rows = []
        window = self.scheduler.options.window
        read = sum(min(row["past"], window) if window else row["past"] for row in batch)
        return {
            "scheduled": True,
            "batch": batch,
            "decode_fast_path": plan.work.fast_decode,
            "num_q_tokens": plan.work.tokens,
            "kv_read_charged": read,
            "padded_if_graphs": self._padded(plan, read),
        }

    def _row(self, spec: RequestSpec, start: int, tokens: int, samples: bool) -> Line:
        complete = self._completes(spec, start, tokens)
        return {"req": spec.id, "q": tokens, "past": start, "new_token": samples, "complete_blocks": complete}

    def _completes(self, spec: RequestSpec, start: int, tokens: int) -> Any:
        """Return the number of blocks keyed when a row completes, as the original counts: with swapped-in blocks."""
        if not self.resolved["allow_block_sharing"]:
            return 0
        size = self.resolved["block_size"]
        before = 0 if self.scheduler.requests[spec] in self.scheduler.returned else start // size
        return (start + tokens) // size - before

    def _padded(self, plan: StepPlan, read: int) -> list[int]:
        resolved = self.resolved
        if plan.work.fast_decode:
            return [up_to_power(plan.work.tokens, resolved["max_requests_per_batch"]), 0]
        query = up_to_multiple(plan.work.tokens, 64, resolved["max_batch_tokens"])
        return [query, up_to_multiple(read, 16384, resolved["cache_budget"])]

    def _state(self) -> Line:
        scheduler = self.scheduler
        return {
            "active": [[r.spec.id, STATUS[r.status]] for r in scheduler.running],
            "waiting": [r.spec.id for r in scheduler.waiting],
            "block_new_requests": scheduler.block_new_requests,
            **self._free(),
            **self._host(),
            "block_tables": {r.spec.id: self._named(scheduler.pool.tables_of(r)) for r in scheduler.pool.tables},
        }

    def _named(self, tables: list[list[int]]) -> Any:
        """Return a request's tables by group, or the single table if there are no group names."""
        named = [list(table) for table in tables]
        return dict(zip(self._names, named, strict=True)) if self._names else named[0]

    def _free(self) -> Line:
        """Return the fields on the free lists."""
        free = self.scheduler.heard.free_list
        return {
            "free": free.free,
            "uninit": len(free.plain),
            "init": len(free.cached),
            "uninit_order": list(free.plain),
            "init_order": list(free.cached),
        }

    def _host(self) -> Line:
        """Return the fields on the host's blocks, if the trace has them."""
        host = self.scheduler.host
        if "cpu_blocks" not in self.resolved:
            return {}
        blocks = {r.spec.id: [block for table in tables for block in table] for r, tables in host.tables.items()}
        per_group = {r.spec.id: [len(table) for table in tables] for r, tables in host.tables.items()}
        return {"cpu": {"free": host.places.order(), "held": blocks, "per_group": per_group}}

    def _await(self, effect: Await) -> Completed:
        """Record which tokens are new before a result is applied; one in flight at the end has its own line."""
        if not self._line["scheduled"]:
            self._close()
            self._line = {"step": self._now, "scheduled": False, "final_update_only": True}
        rows, epochs = self._in_flight.pop(0)
        self._completion = []
        for row in rows:
            if row.chunk is not None and not row.chunk.outputs:
                continue
            request = self.scheduler.objects[row.spec]
            dead = request.finish is not None and request.finish is not Finish.ABORTED
            fate = "discarded" if dead or request.epoch != epochs[row.spec] else "new"
            self._completion.append((fate, row.spec, row.start + row.tokens))
        return Completed(StepResult(tuple(s for s in effect.plan.changes.ends if s.output_tokens < s.max_tokens)))

    def _applied(self, effect: Applied) -> None:
        new = {}
        for fate, spec, position in self._completion:
            if fate == "new":
                new[spec.id] = self._tokens.at(spec.id, position)
                self._generated[spec.id].append(new[spec.id])
        finished = [spec.id for spec, _ in effect.outcome.finished]
        for spec, _ in effect.outcome.finished:
            output = {"generated": self._generated[spec.id], "status": "FINISHED", "prompt_len": spec.prompt_tokens}
            self._outputs[spec.id] = output
        self._line |= {
            "updated_batch_no": effect.plan.step,
            "new_tokens": new,
            "finished": finished,
            "discarded_tokens": [spec.id for fate, spec, _ in self._completion if fate == "discarded"],
            "update_events": self.scheduler.heard.take_lines(),
            "after_update": self._state(),
        }
