"""The engine as a driver of the serving loop: it performs the loop's effects on a real clock and times them.

CPU phases follow each other without a gap: whatever is done between two of them, recording included, belongs to the
later one. Only waiting for arrivals belongs to none.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from cbengine.batch import Batcher, Sent
from cbengine.device.base import Clock, EngineDevice
from cbengine.device.drafts import BLANK
from cbengine.device.layout import Ints, Ranked
from cbengine.sequence import Prompts, Sequence
from cbsim.collector import no_collections
from cbsim.policy.loop import Applied, Await, Completed, Effect, Idle, Launch, Poll, Polled, Refused, Scheduler, serve
from cbsim.policy.plan import NOTHING_STOPPED, StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from cbsim.record.record import Record, StepTimes
from cbsim.runs.inbox import CLOSED, OPEN, Client, Inbox, note_admissions
from cbsim.workload.requests import Parents

OnStep = Callable[[int], None]
Choice = tuple[list[int], list[int], list[float]]  # of one search's beams: tokens, parents, scores


class Ticket(NamedTuple):
    """A step in flight."""

    slot: int
    sent: Sent
    times: StepTimes


class Hooks(NamedTuple):
    """The callbacks of an engine. `begin` makes the sequence of a request, `on_plan` gets every plan, `on_token` each
    token of a request, except in a beam search. `feed` puts into the inbox what has arrived while the engine runs, and
    sets its `news` to None when nothing more will: it is called at every poll, and whenever a wait ends.
    """

    begin: Callable[[RequestSpec], Sequence]
    on_plan: Callable[[StepPlan], None] | None = None
    on_token: Callable[[RequestSpec, int], None] | None = None
    feed: Callable[[Inbox], None] | None = None


class Engine:
    """A server with one device. `sequences` keep the tokens after a run. `injected`: CPU ns a step, by phase."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: EngineDevice,
        batcher: Batcher,
        prompts: Prompts,
        client: Client,
        *,
        depth: int,
        hooks: Hooks,
        clock: Clock,
        injected: Mapping[str, int],
    ) -> None:
        self.record = Record(scheduler.pool.num_blocks)
        self.scheduler = scheduler
        self.sequences = batcher.sequences
        self._device, self._prompts, self._depth, self._batcher = device, prompts, depth, batcher
        self._begin, self._on_plan, self._on_token, self._feed = hooks
        self._inbox = Inbox(client, self.record)
        self._inbox.news = self._feed
        self._injected, self._clock = injected, clock
        self.accepted = array("q")  # of each verification: the request's index, and how many drafts came true
        self._failed: list[RequestSpec] = []
        self._moving: dict[tuple[int, int], Transfer] = {}  # (step, index in its plan) -> a transfer under way
        self._broken: list[int] = []  # blocks that transfers have not filled, until the result that says so
        self._start_ns = self._cpu_ns = 0
        self._times = self._completion = StepTimes(0)
        for spec in client.open:  # prompts exist before their requests arrive
            self._known(spec)

    @property
    def now_ns(self) -> int:
        """The time in nanoseconds that the run has reached."""
        return self._cpu_ns

    def run(self, on_step: OnStep | None = None, start_ns: int | None = None) -> None:
        """Serve to the end of the workload; the record holds what happened until then. Raises DeadlockError,
        DeviceError, and what `on_step` raises, which is called after every step and while waiting. Times count from
        `start_ns` of the engine's clock, or from now.
        """
        with nullcontext() if self._feed else no_collections():  # clients that feed it leave reference cycles behind
            self._run(on_step or (lambda _: None), start_ns)

    def close(self) -> None:
        """Free the device's memory."""
        self._device.close()

    def check_returned(self) -> None:
        """Raise AssertionError unless every cache block is free again; called after a complete run."""
        pool = self.scheduler.pool
        pool.check()
        assert pool.free == pool.num_blocks, (pool.free, pool.num_blocks)

    def _run(self, on_step: OnStep, start_ns: int | None) -> None:
        loop = serve(self.scheduler, self._depth)
        handlers: dict[type, Callable[[Any], Any]] = {
            Poll: lambda effect: self._poll(effect, on_step),
            Launch: self._launch,
            Idle: lambda _: self._elapsed(),
            Await: self._await,
            Applied: self._applied,
            Refused: self._refused,
        }
        self._start_ns = self._clock.now_ns() if start_ns is None else start_ns
        answer: Any = None
        while True:
            try:
                effect: Effect = loop.send(answer)
            except StopIteration:
                return
            answer = handlers[type(effect)](effect)
            if type(effect) is Applied:
                on_step(self._cpu_ns)

    def _elapsed(self) -> int:
        self._cpu_ns = self._clock.now_ns() - self._start_ns
        return self._cpu_ns

    def _inject(self, phase: str) -> None:
        """Keep the CPU busy for the extra work of this phase, if there is any."""
        if extra := self._injected.get(phase):
            self._clock.work_until(self._clock.now_ns() + extra)

    def _poll(self, effect: Poll, on_step: OnStep) -> Polled:
        """Return arrivals and cancellations until now. A step may be planned next, so its times start here."""
        inbox = self._inbox
        self._times = StepTimes(self._cpu_ns)
        if self._feed:
            self._feed(inbox)
        if effect.wait and inbox and not self._failed:
            self._wait(inbox, on_step)
            self._times.schedule_start_ns = self._cpu_ns
        now = self._elapsed()
        self.record.polls += 1
        arrived = inbox.arrived(now) if inbox.due_ns <= now else ()
        for spec in arrived:
            self._known(spec)
        cancels = self._given_up(now) if inbox.quits or self._failed else ()
        if arrived or cancels:
            return Polled(arrived, cancels)
        return OPEN if inbox else CLOSED

    def _wait(self, inbox: Inbox, on_step: OnStep) -> None:
        """Wait until something has arrived; an inbox that is fed, also for a cancellation or the end of arrivals."""
        while self._elapsed() < inbox.due_ns and inbox and not (self._feed and inbox.quits):
            self._clock.wait_until(inbox.due_ns + self._start_ns)
            if self._feed:
                self._feed(inbox)
            on_step(self._cpu_ns)

    def _known(self, spec: RequestSpec) -> None:
        if spec not in self.sequences:
            self.sequences[spec] = self._begin(spec)

    def _given_up(self, now_ns: int) -> list[RequestSpec]:
        """Return the requests that clients cancelled or that failed on the device."""
        cancels = self._inbox.given_up(now_ns)
        for spec in self._failed:
            if self.record.failed(spec, "the logits of a token were not numbers"):
                cancels.append(spec)
                self._inbox.ended(spec, now_ns)
        self._failed = []
        for spec in cancels:
            sequence = self.sequences[spec]
            sequence.over = True
            self._prompts.answered(spec, sequence.outputs)  # the cache may hold them: a next turn has to repeat them
        return sorted(cancels, key=lambda spec: (spec.arrival_ns, spec.index))

    def _launch(self, effect: Launch) -> Ticket:
        """Perform the phases `schedule` (which ends here), `prepare` and `launch`."""
        plan, times, slot = effect.plan, self._times, effect.plan.step % self._depth
        if plan.work.chunks or plan.transfers:
            note_admissions(self.record, self.scheduler, plan)
        self._inject("schedule")
        times.schedule_end_ns = times.prepare_start_ns = self._elapsed()
        if self._on_plan:
            self._on_plan(plan)
        sent = self._batcher.build(plan, self._device.staging[slot], self._device.bucket)
        times.padded_tokens = sent.header.tokens
        self._inject("prepare")
        times.prepare_end_ns = times.launch_start_ns = self._elapsed()
        self._inject("launch")
        self._device.launch(slot, sent.header, plan, sent.excess)
        if plan.transfers:
            self._moving.update(((plan.step, at), move) for at, move in enumerate(plan.transfers))
        times.launch_end_ns = self._elapsed()
        return Ticket(slot, sent, times)

    def _await(self, effect: Await) -> Completed:
        """Block until the step's tokens have arrived and append them to their requests."""
        ticket: Ticket = effect.ticket
        times = self._completion = ticket.times
        times.await_start_ns = self._cpu_ns
        results, lanes = self._device.wait(ticket.slot)
        moved = self._moved(effect.plan) if self._moving else ()
        broken, self._broken = self._broken, []
        times.await_end_ns = times.update_start_ns = self._elapsed()
        start = self._start_ns
        times.h2d_start_ns, times.h2d_end_ns = lanes.h2d_start_ns - start, lanes.h2d_end_ns - start
        times.compute_start_ns, times.compute_end_ns = lanes.compute_start_ns - start, lanes.compute_end_ns - start
        times.d2h_start_ns, times.d2h_end_ns = lanes.d2h_start_ns - start, lanes.d2h_end_ns - start
        plan = effect.plan
        if ticket.sent.header.most_drafts:
            result = self._verify(ticket.sent, plan, results, moved)
            self.record.verified(plan, result, self.scheduler.requests)
            return Completed(result, self._cancels(effect))
        parents = self._rank(plan, results) if plan.ranked else ()
        stopped = [] if plan.ranked else self._deliver(ticket.sent, results.tolist())
        stopped += [s for s in plan.changes.ends if s.output_tokens < s.max_tokens and s not in stopped]
        cancels = self._cancels(effect)
        if not (stopped or moved or parents):
            return Completed(NOTHING_STOPPED, cancels)
        return Completed(StepResult(tuple(stopped), moved=moved, parents=parents, broken=tuple(broken)), cancels)

    def _cancels(self, effect: Await) -> list[RequestSpec]:
        """Return what was cancelled until now, if the scheduler takes it between a result and its application."""
        if not effect.cancels:
            return []
        self.record.polls += 1
        if self._feed:
            self._feed(self._inbox)
        return self._given_up(self._cpu_ns) if self._inbox.quits or self._failed else []

    def _moved(self, plan: StepPlan) -> tuple[int, ...]:
        """Return the jobs that have ended, each once. A step without rows waits for one of them, or for a request."""
        until_ns = None if plan.work.rows else self._start_ns + self._inbox.due_ns
        log, start, over = self.record.transfers, self._start_ns, set()
        for moved in self._device.moved(until_ns):
            move = self._moving.pop((moved.step, moved.at))
            log.moved(moved.step, move, moved.start_ns - start, moved.end_ns - start)
            over.add(move.job)
            if moved.broken and move.direction is Direction.IN:
                self._broken += move.targets
        if not over:
            return ()
        jobs = tuple(sorted(over - {move.job for move in self._moving.values()} - {IN_ORDER}))
        log.reported(jobs, plan.step)
        return jobs

    def _deliver(self, sent: Sent, tokens: list[int]) -> list[RequestSpec]:
        """Append tokens to their sequences; return the requests that sampled a stop token."""
        header = sent.header
        del tokens[header.live : header.decodes]
        stopped = []
        for sequence, token in zip(sent.readers, tokens, strict=True):
            if sequence.over:
                continue
            if token < 0:
                self._fail([sequence])
                continue
            sequence.outputs.append(token)
            if token in sequence.stops and sequence.stopped:
                stopped.append(sequence.spec)
            if self._on_token:
                self._on_token(sequence.spec, token)
        return stopped

    def _verify(self, sent: Sent, plan: StepPlan, results: Ints, moved: tuple[int, ...]) -> StepResult:
        """Append the tokens of rows that may have verified drafts, up to a stop token or the declared end. What lies
        behind a stop token has not come true.
        """
        each = sent.header.most_drafts + 1
        rows, proposed = np.split(results, [sent.header.sampling * each])
        stopped = list[RequestSpec]()
        accepted, drafted = list[tuple[RequestSpec, int]](), list[tuple[RequestSpec, int]]()
        chunks = [chunk for chunk in plan.work.chunks if chunk.outputs]
        for chunk, row, drafts in zip(chunks, rows.reshape(-1, each).tolist(), proposed.tolist(), strict=False):
            spec, request = chunk.spec, self.scheduler.requests.get(chunk.spec)
            if request is None:
                continue
            tokens = [token for token in row if token != BLANK]
            true, stop = len(tokens) - 1, self._append(self.sequences[spec], tokens[: request.last - request.seen])
            if stop is not None:
                stopped.append(spec)
                true = stop
            accepted += [(spec, true)] * (chunk.outputs > 1)
            drafted += [(spec, drafts)] * (drafts != plan.work.drafts)
            if chunk.tokens == chunk.outputs and chunk.start >= spec.prompt_tokens and not chunk.admitted:
                self.accepted.extend((spec.index, true))
        return StepResult(tuple(stopped), moved=moved, accepted=tuple(accepted), drafted=tuple(drafted))

    def _append(self, sequence: Sequence, tokens: list[int]) -> int | None:
        """Append the tokens of a row that may have verified drafts; return the index of a stop token among them."""
        for at, token in enumerate(tokens if not sequence.over else ()):
            if token < 0:
                self._fail([sequence])
                return None
            sequence.outputs.append(token)
            if self._on_token:
                self._on_token(sequence.spec, token)
            if token in sequence.stops and sequence.stopped:
                return at
        return None

    def _rank(self, plan: StepPlan, results: Ints) -> Parents:
        """Continue the beams of searches as they were ranked. Returns (beam, its parent) where these differ."""
        parents: list[tuple[RequestSpec, RequestSpec]] = []
        for group, choice in zip(plan.ranked, choices(results, len(plan.ranked[0])), strict=True):
            texts, (tokens, best, _) = [self.sequences[spec] for spec in group], choice
            if any(sequence.over for sequence in texts):
                continue
            if min(tokens) < 0:
                self._fail(texts)
                continue
            if texts[0].outputs:  # before the first output all beams are the same
                parents += [(s, group[p]) for s, p in zip(group, best, strict=True) if group[p] is not s]
            go_on(texts, choice)
        self.record.took_over(plan.step, tuple(parents))
        return tuple(parents)

    def _fail(self, texts: list[Sequence]) -> None:
        """Mark requests as failed: a token is missing, and so is what would follow it."""
        for sequence in texts:
            sequence.over = True
            self._failed.append(sequence.spec)

    def _applied(self, effect: Applied) -> None:
        times = self._completion
        for spec, _ in effect.outcome.finished:
            sequence = self.sequences[spec]
            sequence.over = True
            if spec not in self.record.cancels:  # transformers' defects may finish a cancelled request: once is enough
                self._prompts.answered(spec, sequence.outputs)
                self._inbox.ended(spec, self._cpu_ns)
        self._inject("update")
        times.update_end_ns = self._elapsed()
        self.record.applied(effect.plan, effect.outcome, times)

    def _refused(self, effect: Refused) -> None:
        self.sequences[effect.spec].over = True
        self.record.refused(effect.spec, effect.reason)
        if effect.spec not in self.record.cancels:
            self._inbox.ended(effect.spec, self._elapsed())


def choices(results: Ints, beams: int) -> list[Choice]:
    """Return the ranked continuations in a step's results, search by search."""
    tokens, parents, scores = (column.reshape(-1, beams) for column in Ranked.of(results))
    return list(zip(tokens.tolist(), parents.tolist(), scores.view(np.float32).tolist(), strict=True))


def go_on(texts: list[Sequence], choice: Choice) -> None:
    """Replace every beam of a search by the continuation chosen for it: one token more, behind its own or another's."""
    before = [sequence.outputs for sequence in texts]
    for sequence, token, parent, score in zip(texts, *choice, strict=True):
        sequence.outputs, sequence.score = [*before[parent], token], score
