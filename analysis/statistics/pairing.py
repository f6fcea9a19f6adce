"""How far a simulated run is from a measured one of the same workload: metrics, phases of a step, decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analysis.statistics import comparable, compare
from analysis.statistics.compare import MARK, SHOWN, Difference, change_text, range_text
from analysis.statistics.loading import Run, flat
from cbsim.draw.markdown import Table
from cbsim.results.directory import RunError
from cbsim.results.record import LANES, PHASES
from cbsim.results.terminal import shown
from cbsim.scenario.fields import ScenarioError
from cbsim.server import replan

NO_DECISION = ("name", "question", "model.name", "hardware.", "cost.", "slo.")  # fields that no plan depends on


class NotAPair(ValueError):  # noqa: N818  # reads as what is said of the runs
    """Not a simulated and a measured run, in this order; the message names the run and what would do."""


@dataclass(frozen=True, slots=True)
class Error:
    """One metric, simulated against measured: `difference` has the measured run as A and the simulated one as B, so
    conditions on changes are conditions on errors.
    """

    difference: Difference

    @property
    def metric(self) -> str:
        return self.difference.metric

    @property
    def measured(self) -> float:
        return self.difference.a

    @property
    def simulated(self) -> float:
        return self.difference.b

    @property
    def error(self) -> float | None:
        """Simulated / measured - 1, None where that is undefined; of shares simulated - measured."""
        return self.difference.change


@dataclass(frozen=True, slots=True)
class Phase:
    """Time of a CPU phase or device lane in the steps with rows, microseconds. `error` is relative, of the mean."""

    name: str
    simulated_mean_us: float
    measured_mean_us: float
    simulated_p50_us: float
    measured_p50_us: float

    @property
    def error(self) -> float | None:
        return self.simulated_mean_us / self.measured_mean_us - 1 if self.measured_mean_us else None


@dataclass(frozen=True, slots=True)
class Divergence:
    """How many plans of both runs are the same from the start on. `step`: the first that is not; None: no such step."""

    agreed: int
    simulated_steps: int
    measured_steps: int
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Replay:
    """What deriving a run's plans again from its polls came to. `matched` is None if it could not be tried: `says`."""

    run: str
    matched: int | None
    steps: int
    says: str


def check(sim: Run, measured: Run) -> None:
    """Raises NotAPair unless one run is simulated and the other measured, Incomparable unless they may be compared."""
    for run, wanted in ((sim, "simulated"), (measured, "measured")):
        if run.measured is not (wanted == "measured"):
            is_one = "measured" if run.measured else "simulated"
            hint = "put the simulated run first" if sim.measured and not measured.measured else "use compare"
            raise NotAPair(f"{run.path}: is {is_one}, expected a {wanted} run; {hint}")
    comparable.check((sim, measured))


def errors(sim: Run, measured: Run) -> list[Error]:
    """Of every metric that both runs have. Raises NotAPair, Incomparable."""
    check(sim, measured)
    return [Error(one) for one in compare.differences(measured, sim)]


def phases(sim: Run, measured: Run) -> list[Phase]:
    """Of every CPU phase and device lane; empty if a run has no step with rows."""
    if not all((run.table["rows"] > 0).any() for run in (sim, measured)):
        return []
    return [_phase(name, *(_lasted_us(run, name) for run in (sim, measured))) for name in (*PHASES, *LANES)]


def _lasted_us(run: Run, name: str) -> npt.NDArray[np.float64]:
    return run.table.lane(name)[run.table["rows"] > 0] / 1e3


def _phase(name: str, sim: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]) -> Phase:
    return Phase(name, float(sim.mean()), float(measured.mean()), float(np.median(sim)), float(np.median(measured)))


def divergence(sim: Run, measured: Run) -> Divergence:
    """Where the plans part: by their hashes, row for row and block for block."""
    ours, theirs = sim.table["plan_hash"], measured.table["plan_hash"]
    common = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:common] != theirs[:common])
    agreed = int(different[0]) if len(different) else common
    if agreed == max(len(ours), len(theirs)):
        return Divergence(agreed, len(ours), len(theirs), None, "every plan is the same")
    reason = _why(sim, measured, agreed) if len(different) else "one run has more steps"
    return Divergence(agreed, len(ours), len(theirs), agreed, reason)


def _why(sim: Run, measured: Run, step: int) -> str:
    """Other settings decide otherwise, and so does a scheduler that has been told of other requests by then."""
    asked, run_as = (flat(run.scenario) for run in (sim, measured))
    names = [name for name in {**asked, **run_as} if asked.get(name) != run_as.get(name)]
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


def _taken_in(run: Run, step: int) -> set[int]:
    """The requests whose poll came before the step was planned."""
    queued = run.requests["queued_ns"] <= int(run.table["schedule_end_ns"][step])
    return set(run.requests["index"][queued].tolist())


def replays(runs: Sequence[Run]) -> list[Replay]:
    """Every run's plans derived again from its own polls (`cbsim.server.replan`), without a clock."""
    return [_replay(run) for run in runs]


def _replay(run: Run) -> Replay:
    try:
        verdict = replan.rederive(run.path)
    except (RunError, ScenarioError) as error:
        return Replay(run.label, None, len(run.steps), f"cannot be replayed: {error}")
    says = verdict.difference or "identical"
    return Replay(run.label, verdict.matched, verdict.steps, says)


def tables(sim: Run, measured: Run, *, everything: bool = False, found: Sequence[Error] | None = None) -> list[Table]:
    """Errors of the metrics (`found`, if they are known), of a step's phases, and what became of the plans.

    Raises NotAPair, Incomparable.
    """
    check(sim, measured)
    return [
        _error_table(errors(sim, measured) if found is None else found, everything),
        _phase_table(phases(sim, measured)),
        _plan_table(divergence(sim, measured), replays((sim, measured))),
    ]


def _error_table(found: Sequence[Error], everything: bool) -> Table:
    known = {one.metric: one for one in found}
    rows = [_error_row(known[name].difference) for name in (known if everything else SHOWN) if name in known]
    says = f"Simulated against measured, with 95 % intervals. {MARK}: too few samples to rely on."
    return Table("Errors", ("metric", "simulated", "measured", "error", "interval"), rows, says)


def _error_row(one: Difference) -> tuple[str, ...]:
    name = f"{one.label} {MARK}" if one.few else one.label
    return (name, shown(one.b, one.unit), shown(one.a, one.unit), change_text(one), range_text(one))


def _phase_table(found: Sequence[Phase]) -> Table:
    header = ("phase or lane", "simulated mean", "measured mean", "error", "simulated p50", "measured p50")
    rows = [_phase_row(one) for one in found]
    return Table("Time in a step", header, rows, "Microseconds, over the steps with rows.")


def _phase_row(one: Phase) -> tuple[str, ...]:
    error = "-" if one.error is None else f"{one.error:+z.1%}".replace("%", " %")
    means = (f"{one.simulated_mean_us:,.1f}", f"{one.measured_mean_us:,.1f}")
    return (one.name, *means, error, f"{one.simulated_p50_us:,.1f}", f"{one.measured_p50_us:,.1f}")


def _plan_table(parted: Divergence, again: Sequence[Replay]) -> Table:
    steps = f"{parted.simulated_steps:,} simulated, {parted.measured_steps:,} measured"
    at = "" if parted.step is None else f"step {parted.step:,}: "
    rows = [("same plans from the start", f"{parted.agreed:,}, of {steps}", f"{at}{parted.reason}")]
    rows += [(f"replayed: {one.run}", _matched(one), one.says) for one in again]
    says = "Plans by their hash. Replayed: derived again from the run's own polls, without a clock."
    return Table("Decisions", ("check", "steps", "result"), rows, says)


def _matched(one: Replay) -> str:
    return "-" if one.matched is None else f"{one.matched:,} of {one.steps:,}"


def summary_line(found: Sequence[Error]) -> str:
    """The largest and the median error of the times, rates and shares that a reader looks at first; 0 of 0 is none."""
    chosen = [one.difference for one in found if one.metric in SHOWN and one.difference.unit != "count"]
    chosen = [one for one in chosen if one.change is not None and (one.a or one.b)]
    groups = [("times and rates", "%", [one for one in chosen if not one.is_share])]
    groups += [("shares", "pt", [one for one in chosen if one.is_share])]
    return "; ".join(_summary(*group) for group in groups if group[-1]) or "no metric to tell by"


def _summary(noun: str, mark: str, own: Sequence[Difference]) -> str:
    sizes = {one: abs(one.change or 0.0) for one in own}
    worst = max(own, key=lambda one: sizes[one])
    median = float(np.median(list(sizes.values()))) * 100
    return f"error of {len(own)} {noun}: median {median:.1f} {mark}, largest {change_text(worst)} ({worst.label})"
