"""Golden traces of Sarathi-Serve's schedulers: the replayed lines for the same workload, on the same virtual clock.

Format and engine loop are described beside the traces. Times are integer microseconds. Defects of the original, which
docs/policies.md lists, are added for the comparison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.conformance.reader import Case, Line, Reader, Replay, by_arrival, due, header_fields, not_modelled
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.plan import Outcome, Row, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.schedulers.sarathi import scheduler as policies
from cbsim.schedulers.sarathi.scheduler import Policy, SarathiServe, Step
from cbsim.schedulers.sarathi.settings import SCHEDULE, SarathiSettings, ServeOptions, VllmV0Settings

COMMIT = "96f9911790ecc00af12ee9fae47cb8fa9ba0d199"
PATIENCE = 4  # plans without rows after which a run without arrivals is a deadlock

KINDS: dict[str, SchedulerKind[Any, Any]] = {
    "faster_transformer": policies.FASTER_TRANSFORMER,
    "orca": policies.ORCA,
    "sarathi": policies.SARATHI,
    "simple_chunking": policies.SIMPLE_CHUNKING,
    "vllm": policies.VLLM_V0,
}
SIZES = ("block_size", "num_blocks", "max_model_len")
CONFIG = frozenset([*SIZES, "max_num_seqs", "scheduler", "options", "timing", "pipeline"])
OPTIONS = frozenset(["chunk_size", "enable_dynamic_chunking_schedule", "max_batched_tokens", *SCHEDULE])


class InFlight(NamedTuple):
    """A batch in the pipeline: its number in the trace, its plan, its rows with their requests' epochs, its end."""

    number: int
    plan: StepPlan
    rows: list[tuple[Row, int]]
    end: int


class SarathiReplay(Replay):
    """The replay of one workload, in the original's own loop; the last line is the summary."""

    scheduler: DefectiveServe

    def __init__(self, config: Line, workload: Line) -> None:
        self._stages: int = config.get("pipeline", 1)
        server = {"max_num_seqs": config["max_num_seqs"], **config["options"]}
        kind, longest = KINDS[config["scheduler"]], config["max_model_len"]
        if kind is policies.VLLM_V0:
            server["max_batched_tokens"] = min(server.get("max_batched_tokens") or longest, longest)
        sizes = {name: config[name] for name in SIZES}
        options = ServeOptions(kind.settings(**server), **sizes, stages=self._stages)
        made: Any = kind.make(options)
        self._policy: Policy = made.policy
        effective = _effective(options)
        super().__init__(DefectiveServe(options, self._policy, effective["prompt_limit"]))
        self.header = {"effective": effective}
        self._timing: Line = config["timing"]
        self._coming = by_arrival(workload)[::-1]
        self._in_flight: deque[InFlight] = deque()
        self._free_at = [0] * self._stages
        self._added: list[str] = []  # requests added since the last plan
        self._lost: list[int] = []
        self._stats: dict[str, Line] = {}

    def lines(self) -> Iterator[Line]:
        fruitless = 0
        while self._in_flight or not self.scheduler.idle or self._coming:
            if self.scheduler.idle and not self._in_flight:
                self._skip()
            self._arrive()
            if len(self._in_flight) == self._stages:
                yield self._update()
                continue
            step = self.scheduler.attempt()
            plan = None if step.empty else self.scheduler.commit(step)
            yield self._schedule(plan)
            fruitless = 0 if plan else fruitless + 1
            if fruitless == PATIENCE and not (self._in_flight or self._coming):
                yield {"ev": "stuck", "t": self._now, **self._queues()}
                break
            yield from self._after(plan)
        line = {"ev": "summary", "steps": self._steps, "end_us": self._now, "lost_outputs": self._lost}
        yield line | {"requests": self._stats, "free": self.scheduler.pool.free}

    def _after(self, plan: StepPlan | None) -> Iterator[Line]:
        """Yield updates of batches that have left the pipeline by now; without a plan, of the next, or skip ahead."""
        if plan:
            while self._in_flight and self._stages > 1 and self._in_flight[0].end <= self._now:
                yield self._update()
        elif self._in_flight:
            yield self._update()
        elif self._coming and not self.scheduler.ignored:
            self._skip()

    def _skip(self) -> None:
        """Advance the clock to the next arrival."""
        self._now = max(self._now, self._coming[-1].arrival_ns)

    def _arrive(self) -> None:
        for spec in due(self._coming, self._now, lambda spec: spec.arrival_ns):
            self.scheduler.add(spec)
            self._stats[spec.id] = {"arrival": spec.arrival_ns, "n_out": 0, "preemptions": 0}
            self._added.append(spec.id)

    def _queues(self) -> Line:
        return {name: [r.spec.id for r in getattr(self.scheduler, name)] for name in ("running", "waiting")}

    def _schedule(self, plan: StepPlan | None) -> Line:
        self._steps += 1
        if self.scheduler.lost:
            self._lost.append(self._steps)
        for request in self.scheduler.preempted:
            self._stats[request.spec.id]["preemptions"] += 1
        rows = self._batch.rows(plan) if plan else []
        total = sum(row.tokens for row in rows)
        turn = None
        if isinstance(self._policy, policies.SimpleChunking):
            turn = "DECODE" if self._policy.decodes else "PREFILL"
        line = {
            "ev": "schedule",
            "step": self._steps,
            "t": self._now,
            "added": self._added,
            "total": total,
            "reqs": [self._row(row) for row in rows],
            "preempted": [request.spec.id for request in self.scheduler.preempted],
            "ignored": [spec.id for spec in self.scheduler.ignored],
            **self._queues(),
            "free": self.scheduler.pool.free,
            "turn": turn,
        }
        self._added = []
        if plan:
            self._send(plan, rows, total)
        return line

    def _row(self, row: Row) -> Line:
        scheduler = self.scheduler
        request = scheduler.requests[row.spec]
        prompt, known = scheduler.prompts[request], row.spec.prompt_tokens + request.seen
        claimed = scheduler.claimed.get(request, row.start)
        reads = claimed < prompt
        return {
            "id": row.spec.id,
            "n": row.tokens,
            "prompt": row.tokens if reads else 0,
            "done": claimed if reads else prompt,
            "len": known,
            "held": scheduler.pool.allocated(request),
        }

    def _send(self, plan: StepPlan, rows: list[Row], tokens: int) -> None:
        """Send the batch through the stages in order."""
        each = (self._timing["base_us"] + self._timing["per_token_us"] * tokens) // self._stages
        end = self._now
        for stage, free_at in enumerate(self._free_at):
            end = self._free_at[stage] = max(end, free_at) + each
        with_epochs = [(row, self.scheduler.requests[row.spec].epoch) for row in rows]
        self._in_flight.append(InFlight(self._steps, plan, with_epochs, end))
        if self._stages > 1:
            self._now = self._free_at[0]

    def _update(self) -> Line:
        """Apply the oldest batch in flight, and return its update line."""
        number, plan, rows, end = self._in_flight.popleft()
        self._now = max(self._now, end)
        alive = {request.spec: request.epoch for request in self.scheduler.requests.values()}
        sampling = [(row.spec, epoch) for row, epoch in rows if row.chunk is None or row.chunk.outputs]
        got = [spec for spec, epoch in sampling if alive.get(spec) == epoch]
        outcome = self.scheduler.update(plan, StepResult())
        for spec in got:
            stats = self._stats[spec.id]
            stats["n_out"] += 1
            stats.setdefault("first_token_ts", self._now)
            stats["last_token_ts"] = self._now
        return {
            "ev": "update",
            "step": number,
            "t": self._now,
            "tokens": [spec.id for spec in got],
            "finished": [spec.id for spec, _ in outcome.finished],
            "running": self._queues()["running"],
            "free": self.scheduler.pool.free,
        }


def _effective(options: ServeOptions[Any]) -> Line:
    """Return the limits that the original derives from its options."""
    settings = options.settings
    if isinstance(settings, VllmV0Settings):
        return dict.fromkeys(("prompt_limit", "max_num_batched_tokens"), settings.max_batched_tokens)
    line: Line = {"prompt_limit": options.max_model_len}
    if isinstance(settings, SarathiSettings) and settings.enable_dynamic_chunking_schedule:
        line |= {"_chunk_sizes": list(settings.chunk_sizes), "_tokens_per_stage": settings.stage_tokens}
    return line


class DefectiveServe(SarathiServe):
    """Sarathi-Serve with its defects: preemption adds outputs to the prompt; requests above `longest` are ignored; with
    stages a result counts for every request that runs when it comes, also for one preempted and planned again since.
    """

    def __init__(self, options: ServeOptions[Any], policy: Policy, longest: int) -> None:
        super().__init__(options, policy)
        self._longest = longest
        self.prompts: dict[Request, int] = {}
        self.read_tokens: dict[Request, int] = {}  # prompt tokens whose results have come, perhaps lost since
        self.in_flight: dict[int, dict[Request, int]] = {}  # by step: prompt tokens of its rows
        self.claimed: dict[Request, int] = {}  # tokens counted as computed for requests that this pass admitted
        self.ignored: list[RequestSpec] = []  # requests that this pass ignored
        self.preempted: list[Request] = []  # requests that this pass preempted
        self.lost = False  # whether the pass was discarded

    def add(self, spec: RequestSpec) -> None:
        request = self.decoding.add(spec, spec.max_tokens)
        self.prompts[request], self.read_tokens[request] = spec.prompt_tokens, 0
        self.waiting.append(request)

    def attempt(self) -> Step:
        self.claimed, self.ignored, self.preempted = {}, [], []
        step = super().attempt()
        changed = bool(self.preempted or self.ignored)
        self.lost = step.empty and changed and not self.staged
        if not self.lost:
            for request in self.preempted:
                self.read_tokens[request] = 0
                self.prompts[request] = request.spec.prompt_tokens + request.seen
                request.limit = request.last = request.seen + request.spec.max_tokens
        return step

    def commit(self, step: Step) -> StepPlan:
        plan = super().commit(step)
        self.in_flight[plan.step] = {request: row.tokens for request, row in step.prompts.items()}
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        early = []  # requests whose prompt is complete by a row of before their preemption, while another is in flight
        for request, tokens in self.in_flight.pop(plan.step).items():
            if request.status is not Status.WAITING and self.left(request):
                self.read_tokens[request] += tokens
                if not self.left(request) and self._rows.get(request, plan.step) != plan.step:
                    early.append(request)
        outcome = super().update(plan, result)
        for request in early:
            if request.status is not Status.FINISHED:
                request.advance(1, 1)
        return outcome

    def done(self, request: Request) -> int:
        return self.read_tokens[request]

    def left(self, request: Request) -> int:
        return self.prompts[request] - self.done(request)

    def preempt(self, request: Request, step: Step) -> None:
        self.preempted.append(request)
        super().preempt(request, step)
        step.preempts = False

    def head(self, step: Step) -> Request | None:
        while self.waiting and self.waiting[0].target > self._longest:
            step.taken = True
            request = self.waiting.popleft()
            self.ignored.append(request.spec)
            self.decoding.end(request, Finish.REFUSED)
        return super().head(step)

    def admit(self, request: Request, tokens: int, step: Step, computed: int = 0) -> None:
        """Admit a request whose row starts behind what will count as computed when its result comes."""
        self.claimed[request] = done = self.done(request)
        if tokens:
            counted = computed if request in self.preempted else done
            counted += sum(rows.get(request, 0) for rows in self.in_flight.values())
            super().admit(request, tokens, step, counted if counted + tokens <= request.target else 0)
            request.epoch -= counted == request.target  # so the row in flight delivers, too
            return
        step.taken = True
        self.waiting.popleft()
        self.decoding.admit(request, request.target - 1)  # the lost tokens are not computed again
        self.running[request] = None
        step.decodes[request] = self.decoding.row(request, 1, self.pool.grow(request, self._needed(request)))
        step.tokens += 1


def case(trace: Path, header: Line) -> Case:
    commit, config = header_fields(trace, header, sarathi=str, config=dict)
    scheduler, options = header_fields(trace, config, scheduler=str, options=dict)
    skipped = None if commit == COMMIT else f"commit {commit[:7]} is not followed, only {COMMIT[:7]}"
    skipped = skipped or not_modelled(config, CONFIG) or not_modelled(options, OPTIONS)
    return Case("sarathi-serve", commit[:7], scheduler, skipped, lambda recorded: SarathiReplay(config, recorded))


READER = Reader(lambda header: "sarathi" in header, case)
