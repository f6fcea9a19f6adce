"""The report of a validation folder: what the simulator is worth on the hardware that was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

from analysis.figures import predictions as figures
from analysis.figures.predictions import SpeedUpPoint
from analysis.statistics import trust
from analysis.statistics.content import Caveat, Report, Source
from analysis.statistics.loading import LoadedRun
from analysis.validation import causes, tally
from analysis.validation.cases import LOOPS, MEASURED, SIMULATED, DeviceCases, ValidationCase
from cbsim.draw import lane_chart
from cbsim.draw.chart import Chart
from cbsim.draw.lane_chart import STEPS_SHOWN
from cbsim.results import bars
from cbsim.results.bars import Score
from cbsim.scenario import documents

DRAWN_IF_THERE = "8k_b32"  # the case whose lanes are drawn
MOST_NAMED = 3  # runs of a caveat


def build(validation: DeviceCases, command: str) -> Report:
    """Everything that the cases say, in the order in which it is read."""
    cases = validation.cases
    return Report(
        title="Simulated against measured" + (f": {validation.device}" if validation.device else ""),
        question="How near are simulated runs to measured ones of the same workloads, and what are they off by?",
        sources=[source for case in cases for source in sources(case, validation)],
        caveats=[*validation.left_out, *not_kept(cases), *caveats(cases)],
        findings=tally.findings(cases),
        tables=[
            *(tally.bar_table(cases), tally.error_table(cases), *tally.repeat_table(cases), *causes.table(cases)),
            tally.case_table(cases),
        ],
        charts=charts(cases),
        command=command,
        coloured=False,
        facts={"scores": scores(cases), "replays": replays(cases)},
    )


def sources(case: ValidationCase, validation: DeviceCases) -> list[Source]:
    """Every run; what the runs of a case have in common is in the first simulated and the first measured one."""
    first = [next(run for run in case.runs if run.measured is measured) for measured in (True, False)]
    return [_source(run, run.path.relative_to(validation.place).as_posix(), whole=run in first) for run in case.runs]


def _source(run: LoadedRun, folder: str, *, whole: bool) -> Source:
    return Source(
        label=run.label,
        folder=folder,
        kind=f"measured on {run.environment.get('device')}" if run.measured else SIMULATED,
        tiles=(),
        scenario=documents.write(dict(run.scenario)) if whole and not run.measured else "",
        environment=json.dumps(run.environment, indent=2) if whole and run.measured else "",
        command=str(run.environment.get("command", "")),
    )


def caveats(cases: Sequence[ValidationCase]) -> list[Caveat]:
    """Caveats of the runs in tables and figures; of many runs only the first few are named."""
    pairs = [pair for case in cases for pair in case.loops.values() if pair.whole]
    runs = [run for pair in pairs for run in (pair.middle, pair.simulated)]
    labels = {run.label for run in runs}
    return [_shortened(caveat, labels) for caveat in trust.caveats(runs)]


def not_kept(cases: Sequence[ValidationCase]) -> list[Caveat]:
    """The packed cases without tables: only their numbers are known."""
    names = [case.name for case in cases if not _is_whole(case)]
    says = "packed without steps and requests: in the tables of errors only, and in no other caveat"
    return [Caveat("not kept", ", ".join(names), f"{says}.")] if names else []


def _is_whole(case: ValidationCase) -> bool:
    return all(pair.whole for pair in case.loops.values())


def _shortened(caveat: Caveat, labels: set[str]) -> Caveat:
    names = [name for name in caveat.run.split(", ") if name in labels]
    if len(names) <= MOST_NAMED:
        return caveat
    return replace(caveat, run=f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED:,} more")


# -- figures ----------------------------------------------------------------------------------------------------------


def charts(cases: Sequence[ValidationCase]) -> list[Chart]:
    """Errors, the curves of speed-up if there are any, requests, and the lanes of one case."""
    curves = speed_ups(cases)
    whole = [case for case in cases if _is_whole(case)]
    requests = {loop: [_requests(case, loop) for case in whole if loop in case.loops] for loop in LOOPS}
    return [
        figures.errors({case.name: case.scores for case in cases}),
        *([figures.speed_up(curves)] if curves else []),
        figures.scatter(requests),
        *([case_lanes(chosen(whole))] if whole else []),
    ]


def speed_ups(cases: Sequence[ValidationCase]) -> dict[str, list[SpeedUpPoint]]:
    """The points of every curve, of cases with both loops."""
    curves: dict[str, list[SpeedUpPoint]] = {}
    for case in cases:
        if case.curve is not None and set(LOOPS) <= case.loops.keys():
            measured = bars.speed_ups(
                {loop: [run.summary for run in pair.measured] for loop, pair in case.loops.items()}
            )
            simulated = bars.speed_up({loop: pair.simulated.summary for loop, pair in case.loops.items()})
            points = curves.setdefault(case.curve, [])
            points.append(SpeedUpPoint(case.name, case.injected_ms, simulated, measured))
            points += [SpeedUpPoint(case.name, float(at), gain, ()) for at, gain in case.predicted.items()]
    return curves


def _requests(case: ValidationCase, loop: str) -> Any:
    pair = case.loops[loop]
    return figures.matched(pair.middle.counted, pair.simulated.counted)


def chosen(cases: Sequence[ValidationCase]) -> ValidationCase:
    """The case whose lanes are drawn: a well-known one, else one on a curve, else the first."""
    named = [case for case in cases if case.name == DRAWN_IF_THERE]
    return [*named, *(case for case in cases if case.curve is not None), *cases][0]


def case_lanes(case: ValidationCase) -> Chart:
    """The lanes of the measured run above those of the simulated one, loop by loop, all from the same step on."""
    frames = {
        f"{loop} {kind}": run.table
        for loop, pair in case.loops.items()
        for kind, run in ((MEASURED, pair.middle), (SIMULATED, pair.simulated))
    }
    middle = min(map(len, frames.values())) // 2
    chart = lane_chart.lanes(frames, (max(0, middle - STEPS_SHOWN // 2), STEPS_SHOWN), as_given=True)
    return replace(chart, title=f"{case.name}: CPU and GPU, measured above simulated")


# -- facts ------------------------------------------------------------------------------------------------------------


def scores(cases: Sequence[ValidationCase]) -> list[dict[str, Any]]:
    """Every score as plain values, for others to read; what is no number is null."""
    return [_score(case.name, score) for case in cases for score in case.scores]


def _score(case: str, score: Score) -> dict[str, Any]:
    numbers = {"simulated": score.simulated, "measured": score.measured, "error": score.error, "spread": score.spread}
    finite = {name: value if value is not None and isfinite(value) else None for name, value in numbers.items()}
    about = {"case": case, "loop": score.loop, "metric": score.bar.label}
    return {**about, **finite, "bound": score.bar.bound, "verdict": score.verdict}


def replays(cases: Sequence[ValidationCase]) -> list[Mapping[str, Any]]:
    """What deriving the plans of every measured run again came to."""
    return [asdict(replay) for replay in tally.replays(cases)]
