"""Recorded polls in, the same plans out: the check that a run's decisions follow from what it was told, and when.

A run directory says in which poll each request arrived or was given up. The policy is run again on those polls, without
a clock, and every plan must have the recorded digest: row by row, block by block. This holds for a simulated run and
for one measured on hardware alike, and is how the two are shown to have run the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.policy.loop import Await, Landed, Launch, Poll, Polled, serve
from cbsim.policy.plan import StepPlan, StepResult
from cbsim.policy.request import Finish, RequestSpec
from cbsim.results import directory
from cbsim.results.directory import Run, RunError
from cbsim.results.record import RequestRow
from cbsim.scenario.scenario import depth, load
from cbsim.server import assemble
from cbsim.workload import generators

OWN = "cbengine"  # of the engines, the one that runs our policies; a simulated run names none
COMPARED = (
    *("rows", "decode_rows", "prefill_tokens", "tokens", "new_blocks", "used_blocks"),
    *("cached_blocks", "running", "waiting", "preempted", "plan_hash"),
)


class Replanned(NamedTuple):
    """Steps whose plans were identical, and the first difference, or None."""

    matched: int
    steps: int
    difference: str | None


def rederive(path: Path, say: Callable[[str], None] | None = None) -> Replanned:
    """Derive the plans of the run in `path` again. Raises RunError or ScenarioError if it cannot be read."""
    run = directory.load(path)
    engine = run.environment.get("engine", OWN)
    if engine != OWN:
        raise RunError(f"{path / 'env.json'}: served by {engine}, which records no plans to derive again")
    scenario = load(path / "scenario.resolved.yaml")
    policy = assemble.scheduler(scenario, scenario.loop.mode)
    specs = _specs(run, generators.build(scenario))
    if say:
        say(f"{path}: {len(run.steps)} steps, {len(specs)} requests, {scenario.scheduler.name}, {scenario.loop.mode}")
    return _compare(run, policy, depth(scenario.loop.mode), specs)


def _specs(run: Run, workload: generators.Workload) -> dict[int, RequestSpec]:
    """The requests of the run: content from the scenario, arrival times of followers from the record."""
    specs = {spec.index: spec for spec in workload.specs()}
    for row in run.requests:
        spec = specs.get(row.index)
        recorded = (row.id, row.prompt_tokens, row.output_tokens, row.max_tokens, row.priority)
        if spec is None or recorded != (
            spec.id,
            spec.prompt_tokens,
            spec.output_tokens,
            spec.max_tokens,
            spec.priority,
        ):
            raise RunError(f"{run.path / 'requests.parquet'}: request {row.id} is not one of the scenario's workload")
        specs[row.index] = replace(spec, arrival_ns=row.arrival_ns)
    return specs


def _compare(run: Run, policy: Any, steps_in_flight: int, specs: dict[int, RequestSpec]) -> Replanned:
    polls, stops = _Polls(run, specs), _stops(run.requests, specs)
    total, step = policy.pool.num_blocks, 0
    recorded = {name: run.steps[name] for name in COMPARED}
    loop = serve(policy, steps_in_flight)
    answer: Any = None
    while True:
        try:
            effect = loop.send(answer)
        except StopIteration:
            return Replanned(step, len(run.steps), None if step >= len(run.steps) else f"only {step} steps are planned")
        answer = None
        if isinstance(effect, Poll):
            answer = polls.answer(effect.wait)
        elif isinstance(effect, Launch):
            if step == len(run.steps):
                return Replanned(
                    step, step, None if run.incomplete else f"step {step} is planned, but was not recorded"
                )
            difference = _difference(effect.plan, total, {name: int(column[step]) for name, column in recorded.items()})
            if difference:
                return Replanned(step, len(run.steps), f"step {step}: {difference}")
            step += 1
        elif isinstance(effect, Await):
            stopped = StepResult(tuple(stops.get(effect.plan.step, ())))
            answer = Landed(stopped, polls.answer().cancels if effect.cancels else ())


def _stops(rows: Sequence[RequestRow], specs: dict[int, RequestSpec]) -> dict[int, list[RequestSpec]]:
    """The requests that sampled a stop token, by the step that did: declared by the workload or found in the text."""
    stops: dict[int, list[RequestSpec]] = {}
    for row in rows:
        if row.status == Finish.STOP.value:
            stops.setdefault(sum(row.token_runs[-2:]) - 1, []).append(specs[row.index])
    return stops


class _Polls:
    """The answers to the polls of a run, in order."""

    def __init__(self, run: Run, specs: dict[int, RequestSpec]) -> None:
        rows = run.requests
        self._arrivals: dict[int, list[RequestSpec]] = {}
        self._cancels: dict[int, list[RequestSpec]] = {}
        self._poll = 0
        for row in sorted(rows, key=lambda row: (row.arrival_ns, row.index)):
            spec = specs[row.index]
            if row.queued_poll >= 0:
                self._arrivals.setdefault(row.queued_poll, []).append(spec)
            if row.cancelled_poll >= 0:
                self._cancels.setdefault(row.cancelled_poll, []).append(spec)
        self._waits, self._file = 2 * len(rows), run.path / "requests.parquet"
        self._last = max([*self._arrivals, *self._cancels, 0])

    def answer(self, wait: bool = False) -> Polled:
        """Raises RunError if more polls waited for nothing than there are arrivals and cancels to wait for."""
        self._poll += 1
        arrivals, cancels = self._arrivals.get(self._poll, []), self._cancels.get(self._poll, [])
        self._waits -= wait and not arrivals and not cancels
        if self._waits < 0:
            problem = f"nobody comes or leaves for so long before poll {self._last:,} that no run gets there"
            raise RunError(f"{self._file}: {problem}", file=self._file)
        return Polled(arrivals, cancels, closed=self._poll >= self._last)


def _difference(plan: StepPlan, total_blocks: int, recorded: dict[str, int]) -> str | None:
    """What a plan says otherwise than the record, the plainest difference first."""
    work, counts = plan.work, plan.counts
    derived = {
        "rows": work.rows,
        "decode_rows": work.decodes,
        "prefill_tokens": work.prefill_tokens,
        "tokens": work.tokens,
        "new_blocks": counts.new_blocks,
        "used_blocks": total_blocks - counts.free_blocks,
        "cached_blocks": counts.cached_blocks,
        "running": counts.running,
        "waiting": counts.waiting,
        "preempted": len(plan.changes.preempted),
        "plan_hash": plan.digest(),
    }
    for name, value in derived.items():
        if value != recorded[name]:
            detail = "" if name != "plan_hash" else " (the counts agree, the rows or blocks do not)"
            return f"{name} is {value}, recorded {recorded[name]}{detail}"
    return None
