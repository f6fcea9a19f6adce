"""The rule for comparable runs: they served the same requests and counted alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from analysis.statistics.loading import LoadedRun, flat
from cbsim.errors import UserError

COUNTED_ALIKE = ("schema_version", "percentile_method", "window_s")
AT_MOST_NAMED = 5  # fields of a workload
ABSENT = object()


class Incomparable(UserError):  # noqa: N818  # the name states a property of the runs
    """An error for runs whose numbers must not be compared; the message names both and every reason, one a line."""


def check(runs: Sequence[LoadedRun], *, swept: bool = False) -> None:
    """Raise Incomparable unless all runs are complete, of one workload, and counted alike.

    The runs of a sweep may have been `swept` over their workloads.
    """
    reasons = [f"{run.label} ({run.path}): incomplete: {run.incomplete}" for run in runs if run.incomplete]
    for run in runs[1:]:
        reasons += [f"{runs[0].label} and {run.label}: {reason}" for reason in _differences(runs[0], run, swept)]
    if reasons:
        raise Incomparable("\n".join(["these runs cannot be compared:", *reasons]))


def same_workload(runs: Sequence[LoadedRun]) -> bool:
    """Whether all runs served the very same requests, with the same arrivals; False if one does not record it."""
    return all(_workload(a) is not None and _workload(a) == _workload(b) for a, b in pairwise(runs))


def _workload(run: LoadedRun) -> Any:
    return run.environment.get("workload_hash")


def _differences(a: LoadedRun, b: LoadedRun, swept: bool) -> Iterator[str]:
    if not swept and not same_workload((a, b)):
        yield f"the workload differs: {_changed(a, b)}"
    for key in COUNTED_ALIKE:
        ours, theirs = a.summary.get(key), b.summary.get(key)
        if ours != theirs:
            yield f"{key} is {_said(ours)} and {_said(theirs)}"


def _changed(a: LoadedRun, b: LoadedRun) -> str:
    """Return the scenario's fields that make the workloads differ."""
    if None in (_workload(a), _workload(b)):
        return "env.json has no workload_hash to tell by"
    ours, theirs = (flat(run.scenario) for run in (a, b))
    both = {name: (ours.get(name, ABSENT), theirs.get(name, ABSENT)) for name in {**ours, **theirs}}
    both = {name: each for name, each in both.items() if name == "seed" or name.startswith("workload.")}
    texts = [f"{name} is {_said(own)} and {_said(other)}" for name, (own, other) in both.items() if own != other]
    more = [f"{len(texts) - AT_MOST_NAMED} more fields"] * (len(texts) > AT_MOST_NAMED)
    return ", ".join([*texts[:AT_MOST_NAMED], *more]) or (
        "no field of it does, so the data that it was made from or the code that made it"
    )


def _said(value: Any) -> str:
    return "not there" if value is ABSENT else "null" if value is None else str(value)
