"""Deriving a run's plans again from its recorded polls: the check that its decisions follow from its requests alone.

A run directory has the poll in which each request arrived or was cancelled. The policy is run again on those polls,
without a clock, and every plan must have the recorded digest: row by row, block by block. This holds for simulated runs
and for runs measured on hardware, which shows that both ran the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cbsim.errors import DeadlockError, RunError
from cbsim.policy.digest import digest
from cbsim.policy.loop import Await, Completed, Launch, Poll, Polled, Scheduler, Waves, serve
from cbsim.policy.plan import StepPlan, StepResult, Underway
from cbsim.policy.request import Finish, RequestSpec, leg
from cbsim.policy.transfers import Direction, Transfer
from cbsim.record import invariants, optional_tables
from cbsim.record.optional_tables import DRAFTS, PARENTS, STAGES, TRANSFERS, by_step
from cbsim.record.tables import Ints, RequestTable
from cbsim.runs import assemble, reading
from cbsim.runs.reading import Run
from cbsim.scenario.scenario import Scenario, depth, load
from cbsim.workload import generators
from cbsim.workload.requests import Workload

OWN = "cbengine"  # the engine that runs our policies; a simulated run names none
Find = Callable[[int], RequestSpec | None]
OnPlan = Callable[[Scheduler, StepPlan], None]
Drafts = Mapping[int, Sequence[tuple[int, ...]]]
READ_TOGETHER = 1 << 14  # steps
NEVER = 1 << 63
DECLARED = ("id", "prompt_tokens", "output_tokens", "max_tokens", "priority")  # fields that the workload gives
COMPARED = (  # columns of a step; the counts before the digest
    *("rows", "decode_rows", "prefill_tokens", "draft_tokens", "tokens", "new_blocks", "used_blocks"),
    *("cached_blocks", "running", "waiting", "preempted", "plan_hash"),
)

OF_TOKENS = ("draft_tokens", "tokens")


class Replanned(NamedTuple):
    """The number of steps whose plans were identical, of how many, and the first difference, or None."""

    matched: int
    steps: int
    difference: str | None


def rederive(path: Path) -> Replanned:
    """Derive the plans of the run in `path` again. Raises RunError or ScenarioError if it cannot be read."""
    run = reading.load(path)
    scenario = load(path / "scenario.resolved.yaml")
    reading.fields(run)
    reading.check(path / "summary.json", run.summary, reading.SUMMARY)
    reading.check_tables(run, apart=scenario.fleet is not None and scenario.fleet.hand_off is not None)
    return derived(run, scenario, generators.build_of_run(scenario, path))


def derived(run: Run, scenario: Scenario, workload: Workload, on_plan: OnPlan | None = None) -> Replanned:
    """Derive the plans of a run that has been read. `on_plan` is called after each identical plan. Raises RunError."""
    engine = run.environment.get("engine", OWN)
    if engine != OWN:
        raise RunError(f"{run.path / 'env.json'}: served by {engine}, which records no plans to derive again")
    _check_requests(run, workload)
    servers = scenario.replicas(run.summary) * scenario.ranks
    matched, low, several = 0, 0, len(servers) > 1
    numbers = _waves(run) if scenario.ranks > 1 else None
    drafts = _drafts(run) if any(its.speculation for its in servers) else {}
    reading.check_servers(run, len(servers))
    stages = np.repeat([its.stages for its in servers], np.diff([0, *run.steps.ends(len(servers))]))
    with reading.refusing(run.path / STAGES):
        invariants.check_stages(run.steps, optional_tables.read(run.source, STAGES), stages)
    moved, unfetched = _Moved(run), optional_tables.unfetched(run.source)
    for server, (its, part) in enumerate(zip(servers, reading.servers(run, len(servers)), strict=True)):
        loop = its.loop.mode
        policy, on_plans = assemble.scheduler(its, loop), on_plan
        if numbers is not None and hasattr(policy, "waves"):
            on_plans = _Together(part, numbers[low : low + len(part.steps)], policy, on_plan)
        moved.begin(low, unfetched.get(server, set()))
        verified = drafts if its.speculation else None
        steps_in_flight = depth(loop, its.stages)
        verdict = _compare(part, policy, steps_in_flight, workload.find_attempt, on_plans, moved, verified)
        low += len(part.steps)
        matched += verdict.matched
        if verdict.difference is not None:
            difference = f"server {server}: {verdict.difference}" if several else verdict.difference
            return Replanned(matched, len(run.steps), difference)
    moved.check_rest()
    return Replanned(matched, len(run.steps), None)


class _Moved:
    """What a run recorded of the transfers of its plans. Of the server that is derived, `first` is the number of its
    first step in the run's tables, and `unfetched` has the requests whose loads others did not fill.
    """

    def __init__(self, run: Run) -> None:
        self._file, self._whole = run.path / TRANSFERS, not run.incomplete
        self.jobs = optional_tables.reported_jobs(run.source)
        self._rows = {step: [row[:4] for row in rows] for step, rows in by_step(run.source, TRANSFERS).items()}
        self.begin(0, set())

    def begin(self, first: int, unfetched: set[int]) -> None:
        self.first, self._unfetched = first, unfetched
        self._blocks: dict[int, tuple[int, ...]] = {}  # of jobs that have been planned

    def planned(self, plan: StepPlan) -> None:
        """Raises RunError unless the plan's transfers were recorded, of a run cut short those that were over."""
        self._check(plan.step + self.first, plan.transfers)
        for transfer in plan.transfers:
            if transfer.direction is Direction.IN and transfer.spec and transfer.spec.index in self._unfetched:
                self._blocks[transfer.job] = transfer.targets

    def broken(self, jobs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([block for job in jobs for block in self._blocks.pop(job, ())])

    def check_rest(self) -> None:
        """Raises RunError for a complete run with rows of steps that it did not have."""
        for step in list(self._rows) if self._whole else ():
            self._check(step, ())

    def _check(self, step: int, transfers: Sequence[Transfer]) -> None:
        rows = sorted(self._rows.pop(step, ()))
        planned = sorted([(t.spec.index if t.spec else -1, t.job, t.direction, len(t.sources)) for t in transfers])
        if rows != planned and (self._whole or not set(rows) <= set(planned)):
            problem = f"got {rows}, expected rows of (request, job, way, blocks) {planned}"
            raise RunError(f"{self._file}: step {step}: {problem}", file=self._file)


class _Together:
    """What a server in step with others knows of them after each plan: `numbers` are of the waves that its steps were
    part of, -1 for none. Whether prompts waited for those of others is an input, like polls: if so, a step prefills
    nothing.
    """

    def __init__(self, run: Run, numbers: Ints, policy: Any, on_plan: OnPlan | None) -> None:
        self._next = 0
        prefilled = [*(run.steps["prefill_tokens"] > 0).tolist(), False]
        policy.waves = self._waves = Waves(lambda *_: prefilled[self._next])
        self._numbers, self._on_plan = numbers.tolist(), on_plan

    def __call__(self, policy: Scheduler, plan: StepPlan) -> None:
        self._next = plan.step + 1
        self._waves.next = max(self._waves.next, self._numbers[plan.step] + 1)
        if self._on_plan:
            self._on_plan(policy, plan)


def _drafts(run: Run) -> Drafts:
    """Return what the rows of each step verified and proposed. Raises RunError unless they are of the run's steps, in
    order.
    """
    file, steps = run.path / DRAFTS, optional_tables.read(run.source, DRAFTS)["step"]
    wrong = np.flatnonzero((steps < np.maximum.accumulate(np.maximum(steps, 0))) | (steps >= len(run.steps)))
    if len(wrong):
        row, bound = int(wrong[0]), f"expected steps in order, from 0 to {len(run.steps) - 1}"
        raise RunError(f"{file}: step: row {row}: got {steps[row]}, {bound}", file=file)
    return by_step(run.source, DRAFTS)


def _waves(run: Run) -> Ints:
    """Return the number of the wave that each step was part of: servers that step together start at the same times."""
    started, ran = run.steps["compute_start_ns"], run.steps["rows"] > 0
    waves: Ints = np.searchsorted(np.unique(started[ran]), started)
    return np.where(ran, waves, -1)


def _check_requests(run: Run, workload: Workload) -> None:
    """Raise RunError unless all requests of the run are the workload's."""
    for row in run.requests:
        spec = workload.find_attempt(row.index)
        spec = spec and leg(spec, row.leg)
        if spec is None or any(getattr(spec, name) != getattr(row, name) for name in DECLARED):
            raise RunError(f"{run.path / 'requests.parquet'}: request {row.id} is not one of the scenario's workload")


def _compare(
    run: Run,
    policy: Any,
    steps_in_flight: int,
    find: Find,
    on_plan: OnPlan | None = None,
    moved: _Moved | None = None,
    drafts: Drafts | None = None,
) -> Replanned:
    """Derive the plans of one server, that which has `moved`. With speculation `drafts` has what the rows verified and
    proposed, by step.
    """
    polls, steps = _Polls(run, find), len(run.steps)
    total, step = policy.pool.num_blocks, 0
    recorded = _recorded(run)
    moved, parents = moved or _Moved(run), by_step(run.source, PARENTS)
    underway = Underway(policy.pool.block_size)
    loop = serve(policy, steps_in_flight)
    answer: Any = None
    while True:
        try:
            effect = loop.send(answer)
        except (StopIteration, DeadlockError):
            return Replanned(step, steps, None if step >= steps else f"only {step} steps are planned")
        answer = None
        if isinstance(effect, Poll):
            answer = polls.answer(effect.wait)
        elif isinstance(effect, Launch):
            if step == steps:
                surplus = None if run.incomplete else f"step {step} is planned, but was not recorded"
                return Replanned(step, step, surplus)
            if difference := _difference(effect.plan, total, next(recorded)):
                return Replanned(step, steps, f"step {step}: {difference}")
            if on_plan:
                on_plan(policy, effect.plan)
            polls.over(effect.plan.changes.ended)
            moved.planned(effect.plan)
            try:
                underway.planned(effect.plan)
            except AssertionError as error:
                return Replanned(step, steps, f"step {step}: {error}")
            step += 1
        elif isinstance(effect, Await):
            done, joined = effect.plan.step, moved.first + effect.plan.step
            pairs = polls.pairs(parents.get(joined, ()))
            verified = {} if drafts is None else polls.verified(effect.plan, drafts.get(joined, ()), policy.requests)
            jobs = moved.jobs.get(joined, ())
            broken = moved.broken(jobs)
            underway.completed(jobs)
            result = StepResult(polls.stopped(done), moved=jobs, parents=pairs, broken=broken, **verified)
            answer = Completed(result, polls.answer().cancels if effect.cancels else ())


def _recorded(run: Run) -> Iterator[tuple[int, ...]]:
    """Yield the compared columns of each step, in order, read in parts."""
    for low in range(0, len(run.steps), READ_TOGETHER):
        steps = run.steps.part(low, low + READ_TOGETHER)
        yield from zip(*(steps[name].tolist() for name in COMPARED), strict=True)


class _Numbered:
    """The indices of requests by a number, a poll or a step, looked up in ascending order of it."""

    def __init__(self, numbers: Ints, index: Ints) -> None:
        """Sort by number; indices of one number keep their order."""
        order = np.argsort(numbers, kind="stable")
        self._numbers, self._index = numbers[order], index[order]
        self._next = int(self._numbers[0]) if len(order) else NEVER
        self.last = int(self._numbers[-1]) if len(order) else 0

    def at(self, number: int) -> list[int]:
        if number < self._next:
            return []
        low, high = np.searchsorted(self._numbers, (number, number + 1))
        self._next = int(self._numbers[high]) if high < len(self._numbers) else NEVER
        indices: list[int] = self._index[low:high].tolist()
        return indices


class _Polls:
    """The results of a run's polls, in order, and the steps in which requests sampled a stop token, as declared by the
    workload or found in the text. A request is made when it arrives and dropped when it ends.
    """

    def __init__(self, run: Run, find: Find) -> None:
        requests = RequestTable.of(run.requests)
        arrival, index = requests.numbers("arrival_ns"), requests.numbers("index")
        queued, cancelled = requests.numbers("queued_poll"), requests.numbers("cancelled_poll")
        order = np.lexsort((index, arrival))
        come, go = order[queued[order] >= 0], order[cancelled[order] >= 0]
        self._arrivals, self._cancels = _Numbered(queued[come], come), _Numbered(cancelled[go], index[go])
        stopped = np.flatnonzero(requests.is_in((Finish.STOP.value,)) & (requests.lengths > 0))
        ends = np.cumsum(requests.lengths)[stopped]
        last_steps = requests.runs[ends - 2] + requests.runs[ends - 1] - 1
        self._stops = _Numbered(last_steps, index[stopped])
        self._index, self._arrival, self._find = index, arrival, find
        self._leg = requests.numbers("leg")
        self._open: dict[int, RequestSpec] = {}
        self._poll = 0
        self._waits, self._file = 2 * len(requests), run.path / "requests.parquet"
        self._last = max(self._arrivals.last, self._cancels.last, 0)

    def answer(self, wait: bool = False) -> Polled:
        """Return the next poll's result. Raises RunError if more polls wait in vain than arrivals and cancels exist."""
        self._poll += 1
        arrivals = [self._come(row) for row in self._arrivals.at(self._poll)]
        cancels = self._known(self._cancels.at(self._poll))
        self._waits -= wait and not arrivals and not cancels
        if self._waits < 0 and self._poll < self._last:
            reached = f"before poll {self._last:,} that no run gets there"
            problem = f"no request arrives or is cancelled for so long {reached}"
            raise RunError(f"{self._file}: {problem}", file=self._file)
        return Polled(arrivals, cancels, closed=self._poll >= self._last)

    def stopped(self, step: int) -> tuple[RequestSpec, ...]:
        return tuple(self._known(self._stops.at(step)))

    def verified(
        self, plan: StepPlan, rows: Sequence[tuple[int, ...]], alive: Mapping[RequestSpec, Any]
    ) -> dict[str, Any]:
        """Return the fields of a result that say what a step has verified and proposed. Raises RunError unless the rows
        are of its requests that are `alive` and sample, in order, with no more drafts than planned.
        """
        chunks = [chunk for chunk in plan.work.chunks if chunk.outputs and chunk.spec in alive]
        planned = [(c.spec.index, 0 if c.admitted else c.outputs - 1, plan.work.drafts) for c in chunks]
        if len(rows) != len(planned) or not all(map(_fits, rows, planned)):
            bound = f"expected rows of (request, drafts, proposed) up to {planned}"
            raise RunError(f"{self._file.with_name(DRAFTS)}: step {plan.step}: got {rows}, {bound}", file=self._file)
        known = [(chunk.spec, row[1:]) for chunk, row in zip(chunks, rows, strict=True)]
        accepted = tuple([(spec, true) for spec, (_, true, _) in known])
        drafted = tuple([(spec, proposed) for spec, (*_, proposed) in known if proposed != plan.work.drafts])
        return {"accepted": accepted, "drafted": drafted}

    def pairs(self, indices: Iterable[tuple[int, ...]]) -> tuple[tuple[RequestSpec, RequestSpec], ...]:
        """Return pairs of requests by their indices, where both have arrived and not ended."""
        come = self._open
        return tuple([(come[one], come[other]) for one, other in indices if one in come and other in come])

    def over(self, ended: Sequence[RequestSpec]) -> None:
        """Drop requests that have ended."""
        for spec in ended:
            self._open.pop(spec.index, None)

    def _come(self, row: int) -> RequestSpec:
        """Make the request of a row: content from the workload, a follower's arrival from the record."""
        index, arrival_ns = int(self._index[row]), int(self._arrival[row])
        spec = self._find(index)
        assert spec is not None, index
        spec = leg(spec, int(self._leg[row]))
        of = self._open.get(spec.sample_of.index, spec.sample_of) if spec.sample_of else None
        if spec.arrival_ns != arrival_ns or of is not spec.sample_of:
            spec = replace(spec, arrival_ns=arrival_ns, sample_of=of)
        self._open[index] = spec
        return spec

    def _known(self, indices: list[int]) -> list[RequestSpec]:
        """Return those of the requests that have arrived and not ended."""
        return [self._open[index] for index in indices if index in self._open]


def _fits(row: tuple[int, ...], planned: tuple[int, int, int]) -> bool:
    """True if a row of verified drafts is of the planned request, with no more drafts than planned."""
    index, drafts, true, proposed = row
    planned_index, most, ahead = planned
    return index == planned_index and 0 <= true <= drafts <= most and 0 <= proposed <= ahead


def _difference(plan: StepPlan, total_blocks: int, recorded: tuple[int, ...]) -> str | None:
    """Return the first difference of a plan from the record, or None. A step may have verified fewer drafts."""
    work, counts = plan.work, plan.counts
    drafts, tokens = sum([chunk.drafts for chunk in work.chunks]), work.tokens
    decodes = work.decodes + sum([chunk.decodes for chunk in work.chunks])
    derived = (
        *(work.rows, decodes, tokens - decodes - drafts, drafts, tokens),
        *(counts.new_blocks, total_blocks - counts.free_blocks, counts.cached_blocks, counts.running, counts.waiting),
        *(len(plan.changes.preempted), digest(plan)),
    )
    for name, value, before in zip(COMPARED, derived, recorded, strict=True):
        if value != before and not (work.guesses and name in OF_TOKENS):
            detail = "" if name != "plan_hash" else " (the counts agree, the rows or blocks do not)"
            return f"{name} is {value}, recorded {before}{detail}"
    return None
