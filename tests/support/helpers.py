"""An executor made of nothing: drives the serving loop and checks what crosses to it and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from cbsim.policy.loop import Applied, Await, Completed, Effect, Launch, Poll, Polled, Refused, serve
from cbsim.policy.plan import Batch, Chunk, Row, StepChanges, StepCounts, StepPlan, StepResult, StepWork
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.policy.transfers import Direction
from cbsim.schedulers.sarathi.scheduler import SarathiServe
from cbsim.schedulers.sglang.scheduler import SglangScheduler
from cbsim.schedulers.simple.fcfs import Fcfs
from cbsim.schedulers.transformers.scheduler import TransformersScheduler
from cbsim.schedulers.trtllm.scheduler import TrtllmScheduler
from cbsim.schedulers.vllm.scheduler import VllmScheduler

AnyScheduler = VllmScheduler | TransformersScheduler | Fcfs | SarathiServe | TrtllmScheduler | SglangScheduler
MOST_POLLS = 20_000


def step_plan(chunks: tuple[Chunk, ...] = (), **values: Any) -> StepPlan:
    """A plan of these chunks, and of values of its parts by their names."""
    work, changes, counts = (
        {field.name: values.pop(field.name) for field in fields(part) if field.name in values}
        for part in (StepWork, StepChanges, StepCounts)
    )
    assert not values
    work = {"chunks": chunks, "prefill_tokens": sum(c.tokens for c in chunks)} | work
    return StepPlan(0, StepWork(**work), StepChanges(**changes), StepCounts(**counts))


class Ask(NamedTuple):
    """A request of a test: when it arrives and is cancelled, counted in polls, and the token at which it stops."""

    spec: RequestSpec
    arrives: int
    cancelled: int | None
    stops_at: int | None  # an unannounced stop token is output number so-and-so
    text: Sequence[int] = ()  # prompt and outputs, for those who look at contents

    @property
    def tokens(self) -> int:
        """Output tokens of an undisturbed run, but for a limit of the scheduler."""
        return min(self.stops_at or self.spec.output_tokens, self.spec.output_tokens)


def ask(index: int, prompt: int, outputs: int, arrives: int = 0, **more: Any) -> Ask:
    """A request that is neither cancelled nor stopped; `more` are further fields of its spec."""
    asked = {"max_tokens": outputs} | more
    return Ask(RequestSpec(index, f"r{index}", 0, prompt, outputs, **asked), arrives, None, None)


def again(asks: Sequence[Ask]) -> list[Ask]:
    """The same requests as other objects."""
    specs: dict[RequestSpec | None, RequestSpec] = {}
    for spec in (ask.spec for ask in asks):
        specs[spec] = replace(spec, sample_of=specs.get(spec.sample_of))
    return [ask._replace(spec=specs[ask.spec]) for ask in asks]


class Executor:
    """What an executor knows from plans alone: rows, block tables, and which output each row samples."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.batch = Batch()
        self.computed: dict[RequestSpec, int] = {}
        self.tables: dict[RequestSpec, list[int]] = {}
        self.sampled: dict[RequestSpec, dict[int, int]] = {}  # -> output number -> the last step that sampled it
        self.brought: set[RequestSpec] = set()  # whose KV moves have brought back, since it was let in last
        self._tokens = {ask.spec: ask.tokens for ask in asks}

    def rows(self, plan: StepPlan) -> list[Row]:
        """The rows of a plan: no request twice, each where its last row ended, sums as the plan says."""
        for spec, index, block in plan.changes.replaced:
            self.tables[spec][index] = block
        self.brought.update(
            move.spec for move in plan.transfers if move.direction is Direction.IN and move.spec is not None
        )
        rows = self.batch.rows(plan)
        assert len({row.spec for row in rows}) == len(rows) == plan.work.rows
        assert sum(row.tokens for row in rows) == plan.work.tokens
        for row in rows:
            if row.chunk is not None and row.chunk.admitted:
                kept = row.spec in self.brought and (row.chunk.resumed or row.spec.computed_elsewhere)
                assert row.start == row.chunk.cached or kept
                self.brought.discard(row.spec)
                self.tables[row.spec] = list(row.blocks)
            else:
                assert row.start == self.computed[row.spec], (row, self.computed[row.spec])
                self.tables[row.spec] += row.blocks
            self.computed[row.spec] = row.start + row.tokens
            self._sample(plan.step, row)
        return rows

    def _sample(self, step: int, row: Row) -> None:
        number = row.start + row.tokens - row.spec.prompt_tokens + 1
        samples = row.chunk is None or row.chunk.outputs
        assert not samples or number > 0, "a token is sampled before the prompt has been read"
        if samples:
            self.sampled.setdefault(row.spec, {})[number] = step

    def result(self, step: int) -> StepResult:
        """The requests whose stop token that step sampled."""
        stopped = [
            spec
            for spec, steps in self.sampled.items()
            if self._tokens[spec] < spec.max_tokens and steps.get(self._tokens[spec]) == step
        ]
        return StepResult(tuple(stopped))


class Overridden:
    """An object with some of its methods replaced. A compiled one cannot be given others."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self._inner = inner
        self.__dict__ |= methods

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Drive:
    """One run of `serve` over `asks`. After `run`, what happened is in its fields."""

    def __init__(self, scheduler: AnyScheduler, asks: Sequence[Ask], depth: int) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.asks = {ask.spec: ask for ask in asks}
        self.executor = Executor(asks)
        self.requests: dict[RequestSpec, Request] = {}
        self.finished: list[tuple[RequestSpec, Finish]] = []
        self.refused: list[RequestSpec] = []
        self.cancelled: list[RequestSpec] = []
        self.ended: list[RequestSpec] = []
        self.rows: list[Row] = []  # of the step planned last
        self.on_step: Callable[[StepPlan, list[Row]], None] = lambda plan, rows: None
        self._polls = 0
        self._coming = sorted(asks, key=lambda ask: ask.arrives)
        self.overridden: dict[str, Callable[..., Any]] = {"add": self._adding}  # methods of the scheduler

    def _adding(self, spec: RequestSpec) -> None:
        self.scheduler.add(spec)
        self.requests[spec] = self.scheduler.requests[spec]

    def run(self) -> None:
        loop = serve(Overridden(self.scheduler, **self.overridden), self.depth)
        answer: Any = None
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                return
            self.check()
            answer = self._answer(effect)

    def check(self) -> None:
        self.scheduler.decoding.check()
        if isinstance(self.scheduler, TransformersScheduler):
            self.scheduler.host.check()
        if isinstance(self.scheduler, SglangScheduler):
            self.scheduler.check()

    def _answer(self, effect: Effect) -> Any:
        if isinstance(effect, Poll):
            return self._poll(effect)
        if isinstance(effect, Launch):
            return self._launch(effect.plan)
        if isinstance(effect, Await):
            assert effect.ticket == effect.plan.step
            self._tick()
            return Completed(self.executor.result(effect.ticket), self._cancels([]) if effect.cancels else ())
        if isinstance(effect, Applied):
            self.finished += effect.outcome.finished
        elif isinstance(effect, Refused):
            self.refused.append(effect.spec)
        return None

    def _launch(self, plan: StepPlan) -> int:
        self.rows = self.executor.rows(plan)
        self.ended += plan.changes.ended
        self.on_step(plan, self.rows)
        return plan.step

    def _poll(self, poll: Poll) -> Polled:
        if poll.wait and self._coming:
            self._polls = max(self._polls, self._coming[0].arrives)
        self._tick()
        arrivals = []
        while self._coming and self._coming[0].arrives <= self._polls:
            arrivals.append(self._coming.pop(0).spec)
        return Polled(arrivals, self._cancels(arrivals), closed=not self._coming)

    def _tick(self) -> None:
        assert self._polls < MOST_POLLS, "the run does not end"
        self._polls += 1

    def _cancels(self, arrivals: Sequence[RequestSpec]) -> list[RequestSpec]:
        """Requests cancelled by now: known to the scheduler, or arriving in the same breath."""
        cancels = [ask.spec for ask in self.asks.values() if self._is_due(ask, arrivals)]
        self.cancelled += cancels
        return cancels

    def _is_due(self, ask: Ask, arrivals: Sequence[RequestSpec]) -> bool:
        due = ask.cancelled is not None and ask.cancelled <= self._polls and ask.spec not in self.cancelled
        return due and (ask.spec in self.scheduler.requests or ask.spec in arrivals)


def token_steps(request: Request) -> list[int]:
    """The step of every delivered token."""
    return [step for first, count in request.runs for step in range(first, first + count)]
