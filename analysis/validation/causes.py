"""Where a missed bar comes from: which phase or lane of a step, in which kind of step, or the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from analysis.statistics import pairing
from analysis.statistics.loading import LoadedRun
from analysis.statistics.pairing import Phase
from analysis.validation.cases import Pair, ValidationCase
from cbsim.draw.markdown import Table
from cbsim.results.bars import BOTH
from cbsim.results.record import LANES, PHASES

WAIT = "await"  # follows from what is waited for


class Regime(NamedTuple):
    """A kind of step: its mean compute time in both runs, microseconds, and how many the measured run has."""

    name: str
    simulated_us: float
    measured_us: float
    steps: int

    @property
    def error(self) -> float | None:
        return self.simulated_us / self.measured_us - 1 if self.measured_us > 0 and self.simulated_us >= 0 else None

    @property
    def weight(self) -> float:
        """Microseconds that the simulated run is off in all of these steps."""
        difference = self.simulated_us - self.measured_us
        return 0.0 if np.isnan(difference) else abs(difference) * self.steps


@dataclass(frozen=True, slots=True)
class Cause:
    """How the simulated run of a loop differs from the measured one, step by step. `step_us`: the measured makespan a
    step; `largest`: of the phases and lanes the one whose mean differs most, None without steps.
    """

    bars: Sequence[str]
    simulated_steps: int
    measured_steps: int
    step_us: float
    largest: Phase | None
    regimes: Sequence[Regime]

    @property
    def difference_us(self) -> float:
        return self.largest.simulated_mean_us - self.largest.measured_mean_us if self.largest else 0.0

    @property
    def share(self) -> float:
        """The difference as a share of a step."""
        return self.difference_us / self.step_us

    @property
    def more_steps(self) -> float:
        return self.simulated_steps / self.measured_steps - 1 if self.measured_steps else 0.0

    @property
    def says(self) -> str:
        """In a line, what weighs most."""
        if self.largest is None:
            return "no step with rows to tell by"
        if abs(self.more_steps) > abs(self.share):
            return f"{self.more_steps:+.1%} steps: other batches"
        if self.largest.name == "compute":
            worst = max(self.regimes, key=lambda regime: regime.weight)
            return f"compute of {worst.name} {_relative(worst.error)}"
        return f"{self.largest.name} {self.difference_us:+,.0f} us a step"


def cause(pair: Pair, bars: Sequence[str]) -> Cause:
    """How the simulated run differs from the measured one of median makespan."""
    sim, measured = pair.simulated, pair.middle
    phases = _that_count(pairing.phases(sim, measured), sim.loop)
    largest = max(phases, key=lambda phase: abs(phase.simulated_mean_us - phase.measured_mean_us), default=None)
    ours, theirs = (int((run.table["rows"] > 0).sum()) for run in (sim, measured))
    step_us = float(measured.summary["makespan_s"]) * 1e6 / max(theirs, 1)
    return Cause(bars, ours, theirs, step_us, largest, regimes(sim, measured))


def _that_count(phases: Sequence[Phase], loop: str) -> Sequence[Phase]:
    """All phases but the wait. Where CPU and device overlap, those of the longer side: the other is free."""
    cpu = [phase for phase in phases if phase.name in PHASES and phase.name != WAIT]
    device = [phase for phase in phases if phase.name in LANES]
    if loop == "sync":
        return [*cpu, *device]
    return max((cpu, device), key=lambda side: sum(phase.measured_mean_us for phase in side))


def regimes(sim: LoadedRun, measured: LoadedRun) -> list[Regime]:
    """Steps that only decode, and steps that read prompts."""
    return [
        Regime(name, _compute_us(sim, prefill)[0], *_compute_us(measured, prefill))
        for name, prefill in (("decode steps", False), ("prefill steps", True))
    ]


def _compute_us(run: LoadedRun, prefill: bool) -> tuple[float, int]:
    """The mean compute time of the steps of a kind, NaN if there is none, and their number."""
    kind = (run.table["rows"] > 0) & ((run.table["prefill_tokens"] > 0) == prefill)
    count = int(kind.sum())
    return (float(run.table.lane("compute")[kind].mean()) / 1e3 if count else float("nan"), count)


def table(cases: Sequence[ValidationCase]) -> list[Table]:
    """A row for each case and loop with a bar that is not met; none if all are."""
    header = (
        *("case", "loop", "so", "differs most", "us a step", "its error", "of the step"),
        *("compute: decode steps", "prefill steps", "steps, simulated", "measured", "not met"),
    )
    rows = [
        (case.name, loop, *_cells(cause(pair, bars)))
        for case in cases
        for loop, pair in case.loops.items()
        for bars in [not_met(case, loop)]
        if bars and pair.whole
    ]
    says = (
        "Means over the steps with rows, simulated against the measured run of median makespan: the CPU phase (but for "
        "the wait) or lane whose time differs most, also as a share of the measured time a step. In the async loop "
        "it is one of the side that takes longer, CPU or device: the other runs beside it. Decode steps read no "
        "prompt, prefill steps do."
    )
    return [Table("Where missed bars come from", header, rows, says)] if rows else []


def not_met(case: ValidationCase, loop: str) -> list[str]:
    """The bars that this loop misses or that cannot be decided; a speed-up is of both loops."""
    failing = [
        score for score in case.scores if score.loop in (loop, BOTH) and score.verdict in ("missed", "undecided")
    ]
    return [score.bar.label for score in failing]


def _cells(reason: Cause) -> tuple[str, ...]:
    name, error = (reason.largest.name, reason.largest.error) if reason.largest else ("-", None)
    differs = (name, f"{reason.difference_us:+,.0f}", _relative(error), f"{reason.share:+.1%}")
    kinds = (_relative(regime.error) for regime in reason.regimes)
    return (
        reason.says,
        *differs,
        *kinds,
        f"{reason.simulated_steps:,}",
        f"{reason.measured_steps:,}",
        ", ".join(reason.bars),
    )


def _relative(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"
