"""`cbsim score-points`: what a person sees of it while it works, and the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from cbsim.draw import folder as folders
from cbsim.draw import study as studies
from cbsim.proof.points import published, report, scoring
from cbsim.server.status import ERROR, OK
from cbsim.sweeps import identity
from cbsim.sweeps.command import Progress
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.store import Store


class PointsOptions(NamedTuple):
    """What `cbsim score-points` was told, parsed."""

    where: Mapping[str, str]
    data: Path | None
    store: Path
    out: Path | None
    as_json: bool
    command: str


def run(options: PointsOptions, executor: Executor) -> int:
    """Build, simulate, say. The exit status: 1 if a run failed."""
    place = published.folder(options.data)
    points = published.read(place, options.where)
    if options.out is not None:  # before the work, not after it
        folders.check(options.out)
        folders.write(options.out, {})
    found = scoring.sort(points)
    if not options.as_json:
        _say_sorted(place, len(points), found)
    store = Store(options.store, identity.code())
    progress = Progress(len(found.buildable), silent=options.as_json)
    try:
        with closing(executor):
            predicted, failed = scoring.score(found.buildable, executor, store, progress)
    except KeyboardInterrupt:
        progress.end()
        print("cbsim: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return ERROR
    progress.end()
    for reason, count in failed.most_common():
        print(f"failed    {count} points: {reason}", file=sys.stderr)
    study = report.study(predicted, found.reasons + failed, len(points))
    if options.as_json:
        print(json.dumps(study.data, indent=2, allow_nan=False))
    else:
        studies.say(study)
    if options.out is not None:
        studies.write(study, options.out, options.command, "simulated against published measurements")
        if not options.as_json:
            print(f"\nfigures   {options.out / 'report.md'}")
    return ERROR if failed else OK


def _say_sorted(place: Path, points: int, found: scoring.Sorted) -> None:
    print(f"{place}: {points:,} points, {len(found.buildable):,} can be built")
    for reason, count in found.reasons.most_common():
        print(f"  {count:>5,} cannot: {reason}")
    print(flush=True)
