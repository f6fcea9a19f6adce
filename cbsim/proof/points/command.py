"""`cbsim score-points`: what a person sees of it while it works."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cbsim.draw.study import Study
from cbsim.proof.points import report, scoring
from cbsim.proof.points.published import Point
from cbsim.sweeps import identity
from cbsim.sweeps.command import Progress
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.store import Store


def run(place: Path, points: Sequence[Point], executor: Executor, store: Path, *, silent: bool) -> tuple[Study, bool]:
    """Build, simulate; the answer, and whether all runs came to their end."""
    chosen = scoring.sort(points)
    if not silent:
        _say_sorted(place, len(points), chosen)
    progress = Progress(len(chosen.buildable), silent=silent)
    try:
        with closing(executor):
            predicted, failed = scoring.score(chosen.buildable, executor, Store(store, identity.code()), progress)
    finally:
        progress.end()
    for reason, count in failed.most_common():
        print(f"failed    {count} points: {reason}", file=sys.stderr)
    return report.study(predicted, chosen.reasons + failed, len(points)), not failed


def _say_sorted(place: Path, points: int, chosen: scoring.Sorted) -> None:
    print(f"{place}: {points:,} points, {len(chosen.buildable):,} can be built")
    for reason, count in chosen.reasons.most_common():
        print(f"  {count:>5,} cannot: {reason}")
    print(flush=True)
