"""The record of a run, as a driver reports it: one row a step, one row a request. Metrics are computed later.

Simulator and engine fill the same record, so a simulated and a measured run have the same columns; columns.py defines
each. All times are integer nanoseconds since the start of the run. Step rows are packed, because a run may have a
million of them. A record with a sink passes it the steps and the finished requests from time to time and drops them:
it then keeps only the running and waiting requests, and the steps since the last time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from librt.strings import BytesWriter, write_i64_le

from cbsim.policy.digest import digest
from cbsim.policy.plan import Outcome, StepPlan, StepResult
from cbsim.policy.request import DECODE, PREFILL, WHOLE, Finish, Request, RequestSpec
from cbsim.policy.transfers import IN_ORDER, Transfer
from cbsim.record import columns

PHASES, LANES = columns.PHASES, columns.LANES
STEP_COLUMNS = tuple(column.name for column in columns.STEPS)
STEP_TIMES = tuple(column.name for column in columns.STEPS if column.unit == "ns")
FAILED, RETRIED, HANDED_OFF = "failed", "retried", "handed_off"
UNREPORTED = -1
STATUSES = (*(finish.value for finish in Finish), FAILED, "unfinished", "waiting", RETRIED, HANDED_OFF)


class StepTimes:
    """The starts and ends of a step's phases and lanes. The driver fills them in while the step is under way."""

    __slots__ = (*STEP_TIMES, "padded_tokens", "ran", "update_ns")
    schedule_start_ns: int
    schedule_end_ns: int
    prepare_start_ns: int
    prepare_end_ns: int
    launch_start_ns: int
    launch_end_ns: int
    await_start_ns: int
    await_end_ns: int
    update_start_ns: int
    update_end_ns: int
    h2d_start_ns: int
    h2d_end_ns: int
    compute_start_ns: int
    compute_end_ns: int
    d2h_start_ns: int
    d2h_end_ns: int
    padded_tokens: int
    update_ns: int  # CPU time that applying the result will take

    ran: StepPlan | None  # the step as it ran, where it verified fewer drafts than planned

    def __init__(self, now_ns: int) -> None:
        self.schedule_start_ns = now_ns
        self.ran = None


class RequestRow(NamedTuple):
    """A request at the end of the run. `token_runs` is [first step, steps, ...]: the steps whose tokens it received, a
    step in as many pairs as it delivered tokens.
    """

    index: int  # type: ignore[assignment]  # a column's name; tuple.index is not called
    id: str
    arrival_ns: int
    queued_poll: int
    queued_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int
    first_step: int
    status: str
    reason: str
    cancelled_poll: int
    preemptions: int
    cached_tokens: int
    token_runs: list[int]
    server: int = 0
    leg: int = 0


class RequestRows:
    """Rows of requests, packed: `numbers` are the whole numbers of each RequestRow in its order, and then the count of
    those in `runs` that are its token runs, all little-endian 64-bit integers.
    """

    def __init__(self) -> None:
        self.numbers, self.runs = BytesWriter(), BytesWriter()
        self.id, self.status, self.reason = list[str](), list[str](), list[str]()

    def __len__(self) -> int:
        return len(self.id)


class TransferLog:
    """The KV transfers of a run, in the order in which plans list them: `rows` are the columns MOVES, row after row."""

    def __init__(self) -> None:
        self.rows = array("q")
        self._of_job: dict[int, list[int]] = {}  # positions of `reported_step` in the rows of a job

    def moved(self, step: int, transfer: Transfer, start_ns: int, end_ns: int) -> None:
        """Add a transfer that the plan of `step` lists, with its start and end, which may be in the future."""
        index, blocks = -1 if transfer.spec is None else transfer.spec.index, len(transfer.sources)
        row = (step, index, transfer.job, int(transfer.direction), blocks, start_ns, end_ns, UNREPORTED)
        self.rows.extend(row)
        if transfer.job != IN_ORDER:
            self._of_job.setdefault(transfer.job, []).append(len(self.rows) - 1)

    def timed(self, job: int, start_ns: int, end_ns: int) -> None:
        """Set the start and end of a job, which were not known when its plan listed it."""
        for at in self._of_job.get(job, ()):
            self.rows[at - 2], self.rows[at - 1] = start_ns, end_ns

    def reported(self, jobs: tuple[int, ...], step: int) -> None:
        for job in jobs:
            for at in self._of_job.pop(job, ()):
                self.rows[at] = step


Take = Callable[[bytearray, Any], None]
"""A sink of a long run's tables while it is under way (directory.Pieces.take): it takes the next steps, and requests as
they are after them. A later row of a request replaces earlier ones."""
by_index = attrgetter("index")
NONE: Final[list[list[int]]] = []
NEVER_BYTES = 1 << 60
LEAST_PIECE = 1 << 12  # steps that one of several servers has before its sink takes them
STEP_BYTES = 8 * len(STEP_COLUMNS)


class Record:
    """The run so far, except for the parts that its sink has taken. `total_blocks` is the size of the KV cache."""

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self.steps = bytearray()  # rows of STEP_COLUMNS, each a little-endian 64-bit integer
        self.refusals: dict[RequestSpec, str] = {}
        self.failures: dict[RequestSpec, str] = {}
        self._elsewhere: dict[RequestSpec, str] = {}  # RETRIED, HANDED_OFF: their requests have another row
        self.cancels: dict[RequestSpec, int] = {}
        self.transfers = TransferLog()
        self.parents = array("q")  # rows of columns.PARENTS
        self.drafts = array("q")  # rows of columns.DRAFTS
        self.stages = array("q")  # rows of columns.STAGES
        self.polls = 0
        self.digests = True  # whether steps have those of their plans, which no metric needs
        self.sampled_tokens = 0  # output tokens that steps have delivered
        self._accepted_tokens = 0  # drafts that came true in the step whose result is being applied
        self._queued: dict[RequestSpec, tuple[int, int]] = {}  # -> (poll, time)
        self._first_step: dict[RequestSpec, int] = {}
        self._requests: dict[RequestSpec, Request] = {}
        self._take: Take | None = None
        self._full_bytes = NEVER_BYTES  # size of steps at which the sink takes them
        self._taken_steps = 0  # steps that the sink has taken
        self._forgotten = 0  # finished requests that were dropped, each counted once
        self._passed_polls = 0  # polls whose requests the sink has rows of

    @property
    def step_count(self) -> int:
        return self._taken_steps + len(self.steps) // STEP_BYTES

    @property
    def finished_count(self) -> int:
        return self._forgotten + sum([self._counts(spec) for spec in self._queued])

    def _counts(self, spec: RequestSpec) -> bool:
        """Whether a request is over, and has no other row."""
        request = self._requests.get(spec)
        hands_over = spec.fetched_later and request is not None and request.finish is Finish.LENGTH
        return self._over(spec) and not hands_over and spec not in self._elsewhere

    @property
    def logs(self) -> dict[str, array[int]]:
        """The rows of optional tables, by name."""
        return {"moves": self.transfers.rows, "parents": self.parents, "drafts": self.drafts, "stages": self.stages}

    def request(self, spec: RequestSpec) -> Request:
        return self._requests[spec]

    def hand_to(self, take: Take, steps: int) -> None:
        """Let `take` from now on have the finished parts whenever there are `steps` steps."""
        self._take, self._full_bytes = take, steps * STEP_BYTES

    def hand_over(self) -> None:
        """Pass the sink the steps, and a row of every request that may have changed; drop finished requests."""
        assert self._take is not None
        rows = RequestRows()
        for spec, (poll, _) in list(self._queued.items()):
            over, admitted = self._over(spec), spec in self._requests
            if over or admitted or poll > self._passed_polls:
                self._pack(spec, rows)
            if over:
                self._forget(spec)
        self._taken_steps, self._passed_polls = self.step_count, self.polls
        steps, self.steps = self.steps, bytearray()
        self._take(steps, rows)

    def _over(self, spec: RequestSpec) -> bool:
        """True if the row of a request can no longer change. Called between steps."""
        request = self._requests.get(spec)
        if request is None:
            return spec in self.refusals or spec in self.cancels
        return request.finish is not None

    def _forget(self, spec: RequestSpec) -> None:
        self._forgotten += self._counts(spec)
        del self._queued[spec]
        self._elsewhere.pop(spec, None)
        self._requests.pop(spec, None)
        self._first_step.pop(spec, None)
        self.refusals.pop(spec, None)
        self.failures.pop(spec, None)
        self.cancels.pop(spec, None)

    def queued(self, spec: RequestSpec, now_ns: int) -> None:
        """Note that the scheduler got a request in poll number `polls`."""
        self._queued[spec] = (self.polls, now_ns)

    def cancelled(self, spec: RequestSpec) -> bool:
        """Note a cancellation in poll number `polls`. Returns False if the request is over, or not queued yet."""
        request = self._requests.get(spec)
        over = spec in self.refusals or spec in self.cancels or (request is not None and request.finish is not None)
        if over or spec not in self._queued:
            return False
        self.cancels[spec] = self.polls
        return True

    def failed(self, spec: RequestSpec, reason: str) -> bool:
        """Note that the engine failed a request. If it is not over, it is cancelled in poll number `polls`."""
        self.failures[spec] = reason
        return self.cancelled(spec)

    def goes_on(self, spec: RequestSpec, status: str) -> None:
        """Note that a request has a row at another server, whatever becomes of this one: RETRIED or HANDED_OFF."""
        self._elsewhere[spec] = status

    def refused(self, spec: RequestSpec, reason: str) -> None:
        self.refusals[spec] = reason

    def admitted(self, request: Request, step: int) -> None:
        """Note the first row of a request since it was queued or preempted."""
        self._first_step.setdefault(request.spec, step)
        self._requests[request.spec] = request

    def fetching(self, request: Request, step: int) -> None:
        """Note a request whose KV is being fetched; from another server, it is not in the queue any more."""
        self._requests.setdefault(request.spec, request)
        if request.spec.computed_elsewhere:
            self._first_step.setdefault(request.spec, step)

    def took_over(self, step: int, parents: tuple[tuple[RequestSpec, RequestSpec], ...]) -> None:
        """Note from the result of a step that these beams continue the text of their parents."""
        for spec, parent in parents:
            self.parents.extend((step, spec.index, parent.index))

    def verified(self, plan: StepPlan, result: StepResult, alive: Mapping[RequestSpec, Request]) -> None:
        """Note what a step with speculation has verified and proposed, before its result is applied."""
        accepted, drafted = dict(result.accepted), dict(result.drafted)
        for chunk in plan.work.chunks:
            if chunk.outputs and chunk.spec in alive:
                true = accepted.get(chunk.spec, 0)
                proposed = drafted.get(chunk.spec, plan.work.drafts)
                self.drafts.extend((plan.step, chunk.spec.index, chunk.drafts, true, proposed))
                self._accepted_tokens += true
        self.sampled_tokens += self._accepted_tokens

    def applied(self, plan: StepPlan, outcome: Outcome, times: StepTimes) -> None:
        work, counts = (times.ran or plan).work, plan.counts
        chunks, decodes = work.chunks, work.decodes
        rows, tokens, context = len(chunks) + decodes, work.prefill_tokens + decodes, work.decode_context
        sampled, recomputed, cached, drafts, accepted = decodes, 0, 0, 0, self._accepted_tokens
        finished = len(outcome.finished)
        for chunk in chunks:
            recomputed += chunk.recomputed
            cached += chunk.cached
            context += chunk.start
            if chunk.outputs:
                sampled += 1
                decodes += chunk.decodes
                drafts += chunk.drafts
        self._accepted_tokens = 0
        self.sampled_tokens += sampled - outcome.wasted_rows
        row = BytesWriter()
        write_i64_le(row, plan.step)
        write_i64_le(row, rows)
        write_i64_le(row, decodes)
        write_i64_le(row, tokens - decodes - drafts)
        write_i64_le(row, drafts)
        write_i64_le(row, accepted)
        write_i64_le(row, tokens)
        write_i64_le(row, times.padded_tokens)
        write_i64_le(row, context + work.padding_context)
        write_i64_le(row, sampled)
        write_i64_le(row, counts.new_blocks)
        write_i64_le(row, self.total_blocks - counts.free_blocks)
        write_i64_le(row, counts.cached_blocks)
        write_i64_le(row, counts.running)
        write_i64_le(row, counts.waiting)
        write_i64_le(row, len(plan.changes.preempted))
        write_i64_le(row, recomputed)
        write_i64_le(row, cached)
        write_i64_le(row, finished if finished < sampled else sampled)  # others ended with the KV that came
        write_i64_le(row, outcome.wasted_rows)
        write_i64_le(row, digest(plan) if self.digests else 0)
        _write_times(row, times)
        self.steps += row.getvalue()  # at once: an interrupt leaves whole rows
        if len(self.steps) >= self._full_bytes:
            self.hand_over()

    def rows(self) -> RequestRows:
        """Return a row for every request that was queued or rejected and is not dropped, in order of index."""
        rows = RequestRows()
        for spec in sorted(self._queued, key=by_index):
            self._pack(spec, rows)
        return rows

    def _pack(self, spec: RequestSpec, rows: RequestRows) -> None:
        """Add a request's row. It leaves out steps that were cut short: tables of an interrupted run agree."""
        request, steps, first_step = self._requests.get(spec), self.step_count, self._first_step.get(spec, -1)
        poll, queued_ns = self._queued[spec]
        count = delivered = 0
        for run in request.delivered() if request else NONE:
            first = run[0]
            if first < steps:
                inside = min(run[1], steps - first)
                write_i64_le(rows.runs, first)
                write_i64_le(rows.runs, inside)
                count += 2
                delivered += inside
        rows.id.append(spec.id)
        rows.status.append(self._status(spec, request, whole=request is not None and delivered == request.seen))
        rows.reason.append(self.failures.get(spec) or self.refusals.get(spec, ""))
        out = rows.numbers
        write_i64_le(out, spec.index)
        write_i64_le(out, spec.arrival_ns)
        write_i64_le(out, poll)
        write_i64_le(out, queued_ns)
        write_i64_le(out, spec.prompt_tokens)
        write_i64_le(out, spec.output_tokens)
        write_i64_le(out, spec.max_tokens)
        write_i64_le(out, spec.priority)
        write_i64_le(out, first_step if first_step < steps else -1)
        write_i64_le(out, self.cancels.get(spec, -1))
        write_i64_le(out, request.preemptions if request else 0)
        write_i64_le(out, (request.cached or 0) if request else 0)
        write_i64_le(out, 0)  # the server
        write_i64_le(out, PREFILL if spec.fetched_later else DECODE if spec.computed_elsewhere else WHOLE)
        write_i64_le(out, count)

    def _status(self, spec: RequestSpec, request: Request | None, *, whole: bool) -> str:
        """Return a request's status; `whole`: all its tokens are in the tables."""
        finish = request.finish if request else None
        if spec in self._elsewhere:
            return self._elsewhere[spec]
        if spec.fetched_later and finish is Finish.LENGTH:
            return HANDED_OFF
        if spec in self.failures:
            return FAILED
        if spec in self.refusals:
            return Finish.REFUSED.value
        if spec in self.cancels:
            return Finish.ABORTED.value
        if finish and whole:
            return finish.value
        return "waiting" if finish is None and self._first_step.get(spec, -1) < 0 else "unfinished"


class Part(Protocol):
    """What a server of several leaves behind: its record, or its tables once it is over (tables.FinishedRecord)."""

    total_blocks: int
    steps: bytearray
    sampled_tokens: int
    digests: bool

    @property
    def logs(self) -> dict[str, array[int]]: ...
    @property
    def step_count(self) -> int: ...
    @property
    def finished_count(self) -> int: ...
    def hand_to(self, take: Take, steps: int) -> None: ...
    def hand_over(self) -> None: ...


class Records:
    """The records of several servers, each with its own steps, which are joined when the run is over: the steps of each
    follow those of the one before, and are numbered so in all tables. `total_blocks` is the size of the largest cache.
    """

    def __init__(self, records: Sequence[Part]) -> None:
        self.records, self._alone = list(records), len(records) == 1
        self.fleet: list[dict[str, object]] = []  # pool, gpus, total_blocks of each, where servers come and go
        self.scaling: dict[str, object] = {}  # what became of them, once the run is over
        self.hand_offs = array("q")  # rows of columns.HAND_OFFS
        self.total_blocks = max([record.total_blocks for record in records], default=0)
        self._take: Callable[..., None] | None = None
        self._piece_steps = 0
        self._digests = True

    @property
    def digests(self) -> bool:
        """Whether steps have digests of their plans, those of servers to come, too."""
        return self._digests

    @digests.setter
    def digests(self, digests: bool) -> None:
        self._digests = digests
        for record in self.records:
            record.digests = digests

    def hand_to(self, take: Callable[..., None], steps: int) -> None:
        """Let `take` from now on have the finished parts of each `server`, when all together have about `steps`."""
        self._take, self._piece_steps = take, max(steps // max(1, len(self.records)), min(steps, LEAST_PIECE))
        for server, record in enumerate(self.records):
            self.put(server, record)

    def put(self, server: int, record: Part) -> None:
        """Set the record of a server."""
        self.records[server] = record
        record.digests = self._digests
        if self._take is not None:
            record.hand_to(self._take if self._alone else partial(self._take, server=server), self._piece_steps)

    def add(self, record: Part, server: dict[str, object]) -> None:
        """Add the record of a server that starts while others run."""
        self.records.append(record)
        self.fleet.append(server)
        self.total_blocks = max(self.total_blocks, record.total_blocks)
        self.put(len(self.records) - 1, record)

    def hand_over(self) -> None:
        for record in self.records:
            record.hand_over()

    @property
    def firsts(self) -> list[int]:
        """The number of each server's first step."""
        counts = [record.step_count for record in self.records]
        return list(accumulate(counts[:-1], initial=0))

    @property
    def logs(self) -> dict[str, array[int]]:
        """The logs of all servers, joined, and the hand-offs between them."""
        joined = {name: array("q") for name in columns.OPTIONAL} | {"hand_offs": self.hand_offs}
        for record, first in zip(self.records, self.firsts, strict=True):
            for name, own in record.logs.items():
                rows, declared = array("q", own), columns.OPTIONAL[name]
                for at in [at for at, column in enumerate(declared) if column.name in ("step", "reported_step")]:
                    for cell in range(at, len(rows), len(declared)):
                        if rows[cell] != UNREPORTED:
                            rows[cell] += first
                joined[name].extend(rows)
        return joined

    @property
    def step_count(self) -> int:
        return sum([record.step_count for record in self.records])

    @property
    def finished_count(self) -> int:
        return sum([record.finished_count for record in self.records])

    @property
    def sampled_tokens(self) -> int:
        return sum([record.sampled_tokens for record in self.records])


def _write_times(row: BytesWriter, times: StepTimes) -> None:
    write_i64_le(row, times.schedule_start_ns)
    write_i64_le(row, times.schedule_end_ns)
    write_i64_le(row, times.prepare_start_ns)
    write_i64_le(row, times.prepare_end_ns)
    write_i64_le(row, times.launch_start_ns)
    write_i64_le(row, times.launch_end_ns)
    write_i64_le(row, times.await_start_ns)
    write_i64_le(row, times.await_end_ns)
    write_i64_le(row, times.update_start_ns)
    write_i64_le(row, times.update_end_ns)
    write_i64_le(row, times.h2d_start_ns)
    write_i64_le(row, times.h2d_end_ns)
    write_i64_le(row, times.compute_start_ns)
    write_i64_le(row, times.compute_end_ns)
    write_i64_le(row, times.d2h_start_ns)
    write_i64_le(row, times.d2h_end_ns)
