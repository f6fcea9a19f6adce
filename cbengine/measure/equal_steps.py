"""Do equal steps take equally long in both loops? With one step in flight the GPU is idle when a step is launched.

A step's time begins at an event before its kernels. If the GPU is idle there, it waits, within that time, for the CPU
to hand over the rest of the launch; if a step is launched while the one before it runs, nothing is waited for. So the
difference is what synchronous kernel times are too long by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbsim.record.tables import Steps

SETTLING = 3  # first steps of a run, which find caches cold
KEYS = ("padded_tokens", "rows", "context_tokens")
Kinds = dict[tuple[int, ...], list[int]]


class EqualStepTimes(NamedTuple):
    """Kinds of decode steps that both loops ran, and the median over them of the kernels' seconds in each."""

    steps: int
    sync_s: float
    async_s: float
    difference_s: float  # median of the differences; above 0: synchronous steps are measured as longer

    def __str__(self) -> str:
        share = self.difference_s / self.async_s if self.async_s else 0.0
        both = f"{self.sync_s * 1e6:,.1f} us synchronous, {self.async_s * 1e6:,.1f} us asynchronous"
        return (
            f"kernels of {self.steps} equal steps: {both}, difference {self.difference_s * 1e6:+,.1f} us ({share:+.2%})"
        )


def equal_steps(runs: Sequence[tuple[Steps, Steps]]) -> EqualStepTimes | None:
    """Compare runs of the same scenarios, (synchronous, asynchronous); None if they have no decode step in common."""
    of_sync: Kinds = {}
    of_async: Kinds = {}
    for synchronous, asynchronous in runs:
        _add_decodes(of_sync, synchronous, np.ones(len(synchronous), dtype=bool))
        _add_decodes(of_async, asynchronous, launched_ahead(asynchronous))
    both = sorted(of_sync.keys() & of_async.keys())
    if not both:
        return None
    times = np.array([(np.median(of_sync[key]), np.median(of_async[key])) for key in both]) / 1e9
    sync_s, async_s = np.median(times, axis=0)
    return EqualStepTimes(len(both), float(sync_s), float(async_s), float(np.median(times[:, 0] - times[:, 1])))


def launched_ahead(steps: Steps) -> npt.NDArray[np.bool_]:
    """Which steps had been launched as a whole before the kernels of the one before them ended."""
    ahead = np.zeros(len(steps), dtype=bool)
    ahead[1:] = steps["launch_end_ns"][1:] < steps["compute_end_ns"][:-1]
    return ahead


def _add_decodes(kinds: Kinds, steps: Steps, which: npt.NDArray[np.bool_]) -> None:
    """Nanoseconds of the kernels of decode steps, by what the steps computed."""
    decodes = (steps["prefill_tokens"] == 0) & (steps["rows"] > 0) & (np.arange(len(steps)) >= SETTLING)
    chosen = decodes & which
    keys = zip(*(steps[name][chosen].tolist() for name in KEYS), strict=True)
    for key, took in zip(keys, steps.lane("compute")[chosen].tolist(), strict=True):
        kinds.setdefault(key, []).append(took)
