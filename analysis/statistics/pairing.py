"""A comparison of a simulated with a measured run of the same workload: metrics, phases of a step, decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.statistics import compare
from analysis.statistics.compare import MARK, SHOWN, MetricDifference, change_text
from analysis.statistics.loading import LoadedRun
from cbsim.draw.report import Table
from cbsim.errors import RunError, ScenarioError
from cbsim.metrics.terminal import flat
from cbsim.record.record import LANES, PHASES
from cbsim.runs import replan

NO_DECISION = ("name", "question", "model.name", "hardware.", "cost.", "slo.")  # fields that no plan depends on


class Phase(NamedTuple):
    """The time of a CPU phase or device lane in the steps with rows, microseconds. `error` is relative, of the mean."""

    name: str
    simulated_mean_us: float
    measured_mean_us: float
    simulated_p50_us: float
    measured_p50_us: float

    @property
    def difference_us(self) -> float:
        return self.simulated_mean_us - self.measured_mean_us

    @property
    def error(self) -> float | None:
        return self.simulated_mean_us / self.measured_mean_us - 1 if self.measured_mean_us else None


class ReplayOutcome(NamedTuple):
    """The outcome of deriving a run's plans again from its polls. `matched` is None if that failed; `says` is why."""

    run: str
    matched: int | None
    steps: int
    says: str

    @property
    def identical(self) -> bool:
        return self.says == "identical"


def errors(sim: LoadedRun, measured: LoadedRun) -> list[MetricDifference]:
    """Return the errors of every metric that both runs have: A is the measured run and B the simulated one, so that
    conditions on changes are conditions on errors. Raises Incomparable.
    """
    return compare.differences(measured, sim)


def phases(sim: LoadedRun, measured: LoadedRun) -> list[Phase]:
    """Return the times of every CPU phase and device lane; empty if a run has no step with rows."""
    if not all((run.table["rows"] > 0).any() for run in (sim, measured)):
        return []
    phases = []
    for name in (*PHASES, *LANES):
        times = [run.table.lane(name)[run.table["rows"] > 0] / 1e3 for run in (sim, measured)]
        phases.append(Phase(name, *(float(each.mean()) for each in times), *(float(np.median(each)) for each in times)))
    return phases


def divergence(sim: LoadedRun, measured: LoadedRun) -> tuple[int, str]:
    """Return the number of plans that both runs share from the start on, by the plans' hashes, row for row and block
    for block; and why the next one, whose step is named, differs.
    """
    ours, theirs = sim.table["plan_hash"], measured.table["plan_hash"]
    common = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:common] != theirs[:common])
    agreed = int(different[0]) if len(different) else common
    if agreed == max(len(ours), len(theirs)):
        return agreed, "every plan is the same"
    reason = _why(sim, measured, agreed) if len(different) else "one run has more steps"
    return agreed, f"step {agreed:,}: {reason}"


def _why(sim: LoadedRun, measured: LoadedRun, step: int) -> str:
    """Explain why plans differ: other settings, or a scheduler that had received other requests by then."""
    simulated, run_as = (flat(run.scenario) for run in (sim, measured))
    names = [name for name in {**simulated, **run_as} if simulated.get(name) != run_as.get(name)]
    set_otherwise = [name for name in names if not name.startswith(NO_DECISION)]
    if set_otherwise:
        return f"the scenarios differ in {', '.join(set_otherwise[:3])}"
    ours, theirs = (_taken_in(run, step) for run in (sim, measured))
    if ours != theirs:
        early, where = (ours - theirs, "simulated") if ours - theirs else (theirs - ours, "measured")
        return (
            f"request {min(early)} had been taken in by then in the {where} run only: arrivals meet other steps, normal"
        )
    for name in replan.COMPARED:
        values = [int(run.table[name][step]) for run in (sim, measured)]
        if values[0] != values[1] and name != "plan_hash":
            return f"{name} is {values[0]:,} simulated, {values[1]:,} measured"
    return "the counts agree, the rows or blocks do not"


def _taken_in(run: LoadedRun, step: int) -> set[int]:
    """Return the requests whose poll came before the step was planned."""
    queued = run.requests["queued_ns"] <= int(run.table["schedule_end_ns"][step])
    return set(run.requests["index"][queued].tolist())


def replayed(run: LoadedRun) -> ReplayOutcome:
    """Derive a run's plans again from its own polls (`cbsim.runs.replan`), without a clock."""
    try:
        verdict = replan.rederive(run.path)
    except (RunError, ScenarioError) as error:
        return ReplayOutcome(run.label, None, len(run.table), f"cannot be replayed: {error}")
    return ReplayOutcome(run.label, verdict.matched, verdict.steps, verdict.difference or "identical")


def tables(
    sim: LoadedRun, measured: LoadedRun, known: Sequence[MetricDifference], *, everything: bool = False
) -> list[Table]:
    """Return the `known` errors of the metrics, those of a step's phases, and the comparison of the plans."""
    cells = compare.rows(known, (measured, sim), everything=everything)
    rows = [(name, after, before, *rest) for name, before, after, *rest in cells]
    note = f"Simulated against measured, with 95 % intervals. {MARK}: too few samples to rely on."
    found = Table("Errors", ("metric", "simulated", "measured", "error", "interval"), rows, note)
    return [found, _phase_table(phases(sim, measured)), _plan_table(sim, measured)]


def _phase_table(times: Sequence[Phase]) -> Table:
    header = ("phase or lane", "simulated mean", "measured mean", "error", "simulated p50", "measured p50")
    rows = []
    for phase in times:
        error = "-" if phase.error is None else f"{phase.error:+z.1%}".replace("%", " %")
        means = (f"{phase.simulated_mean_us:,.1f}", f"{phase.measured_mean_us:,.1f}")
        rows.append((phase.name, *means, error, f"{phase.simulated_p50_us:,.1f}", f"{phase.measured_p50_us:,.1f}"))
    return Table("Time in a step", header, rows, "Microseconds, over the steps with rows.")


def _plan_table(sim: LoadedRun, measured: LoadedRun) -> Table:
    agreed, reason = divergence(sim, measured)
    steps = f"{len(sim.table):,} simulated, {len(measured.table):,} measured"
    rows = [("same plans from the start", f"{agreed:,}, of {steps}", reason)]
    for replay in map(replayed, (sim, measured)):
        matched = "-" if replay.matched is None else f"{replay.matched:,} of {replay.steps:,}"
        rows.append((f"replayed: {replay.run}", matched, replay.says))
    note = "Plans by their hash. Replayed: derived again from the run's own polls, without a clock."
    return Table("Decisions", ("check", "steps", "result"), rows, note)


def summary_line(errors: Sequence[MetricDifference]) -> str:
    """Summarise the largest and the median error of the main times, rates and shares; 0 of 0 is no error."""
    chosen = [error for error in errors if error.metric in SHOWN and error.unit != "count"]
    chosen = [error for error in chosen if error.change is not None and (error.a or error.b)]
    groups = [("times and rates", "%", [error for error in chosen if not error.is_share])]
    groups += [("shares", "pt", [error for error in chosen if error.is_share])]
    return "; ".join(_summary(*group) for group in groups if group[-1]) or "no metric to tell by"


def _summary(noun: str, mark: str, errors: Sequence[MetricDifference]) -> str:
    sizes = {error: abs(error.change or 0.0) for error in errors}
    worst = max(errors, key=lambda error: sizes[error])
    median = float(np.median(list(sizes.values()))) * 100
    return f"error of {len(errors)} {noun}: median {median:.1f} {mark}, largest {change_text(worst)} ({worst.label})"
