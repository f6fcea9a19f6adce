"""Replays of request logs, which others recorded at real servers: the simulator's errors for each run.

`python -m reports.fidelity.request_logs.make FOLDER` scores all runs of a folder (docs/data.md) that can be built; with
`--out reports/fidelity/request_logs` it makes the report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from cbsim.cli.arguments import Parser, a_path, answer, check_out, common_options, option, run_verb, verb
from cbsim.cli.measured import where_argument
from cbsim.draw.chart import Chart, Panel, Points, equality, series
from cbsim.draw.report import Report, Table
from cbsim.errors import ScenarioError
from cbsim.measured.recorded.score import METRICS
from reports.fidelity.request_logs import log, replay
from reports.fidelity.request_logs.log import Log
from reports.fidelity.request_logs.replay import BUILT, DRAWS, Ranged, Scored, missing

SHOWN = (("ttft", "mean"), ("ttft", "median"), ("ttft", "p95"), ("tpot", "mean"), ("tpot", "p95"), ("e2e", "mean"))
CALIBRATED = "*"
ERRORS = (
    "Simulated over measured, relative. Of several servers the mean of the draws. "
    f"{CALIBRATED}: something was chosen by looking at this run, see below; it is in no mean."
)

Left = dict[tuple[str, str, str], list[Log]]  # the runs that are not built, by servers, scenario and reason


def study(folder: Path, where: Mapping[str, str], overrides: Sequence[str]) -> Report:
    """Replay and score the runs of a folder. Raises ScenarioError if it holds none that can be built."""
    logs = log.chosen(log.read(folder), where)
    starts = log.starts(folder) if any(each.key.scenario == "sharegpt" for each in logs) else []
    left, scored = Left(), list[Scored]()
    for each in logs:
        reason = missing(each.key, len(each), len(starts))
        if reason is None:
            scored.append(replay.score(folder, each, starts, overrides))
        else:
            left.setdefault((each.key.run, each.key.scenario, reason), []).append(each)
    if not scored:
        reasons = "; ".join(dict.fromkeys(f"{run}: {reason}" for run, _, reason in left))
        raise ScenarioError(f"{folder / log.REQUESTS}: run: none of those chosen can be built: {reasons}")
    scored.sort(key=lambda each: (list(BUILT).index(each.key.run), each.key.scenario, each.key.qps))
    tables = [_systems(scored), _runs(scored), _values(scored), *_calibration(scored), *([_left(left)] if left else [])]
    return Report(
        title=f"Request logs of {folder.resolve().name}, replayed",
        question="How near does the simulator come to real servers, request by request, on rates it was not shown?",
        findings=_findings(scored, left, overrides),
        tables=tables,
        charts=[_chart(scored)],
        data=_data(scored, left, overrides),
    )


def _systems(scored: Sequence[Scored]) -> Table:
    rows = []
    for run, scenario in dict.fromkeys(each.key[:2] for each in scored):
        of = [each for each in scored if each.key[:2] == (run, scenario) and not each.calibrated]
        if of:
            rows.append((f"{_short(run)} {scenario}", str(len(of)), *(_mape(of, *what) for what in SHOWN)))
    header = ("runs", "rates", *(f"{metric.upper()} {statistic}" for metric, statistic in SHOWN))
    return Table("Mean absolute errors of predictions", header, rows, "Over rates; runs that were looked at left out.")


def _mape(scored: Sequence[Scored], metric: str, statistic: str) -> str:
    return f"{fmean(abs(each.error(metric, statistic)) for each in scored):.1%}"


def _runs(scored: Sequence[Scored]) -> Table:
    header = ("run", "n", "servers", "hits", *(f"{metric.upper()} {statistic}" for metric, statistic in SHOWN))
    rows = []
    for each in scored:
        errors = [f"{each.error(*what):+.1%}" for what in SHOWN]
        rows.append((_label(each), str(each.requests), str(each.servers), f"{each.hits:.0%}", *errors))
    return Table("Errors by run", header, rows, ERRORS)


def _values(scored: Sequence[Scored]) -> Table:
    """Tabulate TTFT and TPOT themselves: an error of a queue means little without its length."""
    header = ("run", "TTFT mean, ms", "measured", "draws", "TPOT mean, ms", "measured", "draws")
    rows = [
        (_label(each), *_shown(each.number("ttft", "mean")), *_shown(each.number("tpot", "mean"))) for each in scored
    ]
    caption = f"Runs of several servers are drawn {DRAWS} times: which server a connection leads to is random."
    return Table("Means", header, rows, caption)


def _shown(number: Ranged) -> tuple[str, str, str]:
    seconds = (number.score.simulated_s, number.score.measured_s, number.low_s, number.high_s)
    simulated, measured, low, high = (f"{each * 1e3:,.1f}" for each in seconds)
    return simulated, measured, f"{low} to {high}" if low != high else ""


def _calibration(scored: Sequence[Scored]) -> list[Table]:
    rows = [(_label(each), each.calibrated) for each in scored if each.calibrated]
    return [Table("What was chosen by looking at a run", ("run", "chosen"), rows)] if rows else []


def _left(left: Left) -> Table:
    rows = [
        (f"{_short(run)} {scenario}", str(len(of)), f"{sum(map(len, of)):,}", reason)
        for (run, scenario, reason), of in left.items()
    ]
    return Table("Not built", ("runs", "rates", "requests", "why"), rows)


def _findings(scored: Sequence[Scored], left: Left, overrides: Sequence[str]) -> list[str]:
    of = [each for each in scored if not each.calibrated]
    means = ", ".join(f"{metric.upper()} {_mape(of, metric, 'mean')}" for metric in METRICS) if of else "none"
    requests, others = sum(each.requests for each in scored), sum(map(len, left.values()))
    findings = [
        f"{len(scored)} runs with {requests:,} requests were built, {others} were not.",
        f"Mean absolute errors of the means, over the {len(of)} runs that were not looked at: {means}.",
        *_drawn([each for each in of if each.servers > 1]),
        "Of a run itself nothing enters but when its client sent each request, how long prompt and output were.",
    ]
    return [*findings, f"Changed: {', '.join(overrides)}."] if overrides else findings


def _drawn(scored: Sequence[Scored]) -> list[str]:
    """Return how many recorded means lie within the draws. One of n + 1 draws is neither the least nor the largest with
    probability (n - 1) / (n + 1).
    """
    numbers = [each.number(metric, "mean") for each in scored for metric in METRICS]
    inside = sum(number.low_s <= number.score.measured_s <= number.high_s for number in numbers)
    expected = f"were they another draw, {(DRAWS - 1) / (DRAWS + 1):.0%} would"
    means = f"{inside} of {len(numbers)} recorded means of several servers"
    return [f"{means} lie within the {DRAWS} draws; {expected}."] if numbers else []


def _short(run: str) -> str:
    return "/".join(part for part in run.split("/") if part != "openshift")


def _label(each: Scored) -> str:
    return f"{_short(each.key.run)} {each.key.scenario} {each.key.qps:g}{CALIBRATED if each.calibrated else ''}"


def _data(scored: Sequence[Scored], left: Left, overrides: Sequence[str]) -> dict[str, Any]:
    return {
        "set": list(overrides),
        "runs": [
            {
                **each.key._asdict(),
                "requests": each.requests,
                "servers": each.servers,
                "kv_blocks": each.blocks,
                "hits": round(each.hits, 4),
                "preemptions": each.preemptions,
                "chosen_by_it": each.calibrated,
                "errors": [_plain(number, each.servers) for number in each.numbers],
            }
            for each in scored
        ],
        "not_built": [
            {
                "run": run,
                "scenario": scenario,
                "qps": ", ".join(f"{each.key.qps:g}" for each in of),
                "requests": sum(map(len, of)),
                "reason": reason,
            }
            for (run, scenario, reason), of in left.items()
        ],
    }


def _plain(number: Ranged, servers: int) -> dict[str, Any]:
    """Return a statistic in seconds to the microsecond, with the range of the draws if there are several servers."""
    values = number.score.facts()
    if servers > 1:
        values |= {"low_s": number.low_s, "high_s": number.high_s}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def _chart(scored: Sequence[Scored]) -> Chart:
    shown = (("ttft", "mean", "s"), ("ttft", "p95", "s"), ("tpot", "mean", "ms"), ("e2e", "mean", "s"))
    panels = [_panel(scored, *each) for each in shown]
    caption = "A point is a run at one rate; on the line, simulated and measured are equal. "
    caption += "Runs looked at are drawn, too."
    return Chart("runs", "Request logs: simulated against measured", caption, panels, columns=2)


def _panel(scored: Sequence[Scored], metric: str, statistic: str, unit: str) -> Panel:
    factor = 1e3 if unit == "ms" else 1.0
    marks = list[Points]()
    for index, (run, scenario) in enumerate(dict.fromkeys(each.key[:2] for each in scored)):
        of = [each for each in scored if each.key[:2] == (run, scenario)]
        numbers = [each.number(metric, statistic).score for each in of]
        x, y = (np.array([getattr(each, name) for each in numbers]) * factor for name in ("measured_s", "simulated_s"))
        texts = [f"{each.key.qps:g}/s" for each in of]
        marks.append(Points(f"{_short(run)} {scenario}", x, y, series(index), texts))
    title = f"{metric.upper()} {statistic}, {unit}, measured"
    return Panel([equality(marks), *marks], title, "simulated", x_log=True, y_log=True)


@verb("score", "replay the runs of a folder of request logs, and print how far the simulator is off", "logs")
def logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=a_path, metavar="FOLDER", help=f"with {log.REQUESTS} and {log.PREFIXES}")
    where_argument(parser, "which runs, such as run=vllm-70b,scenario=sharegpt,qps=0.5 (all)")
    option(parser, "--set", help="override any field of the servers' scenarios")
    common_options(parser, "--out", "--json")


def score(arguments: argparse.Namespace) -> int:
    """Score the chosen runs of a folder, and print the simulator's errors."""
    check_out(arguments.out)
    made = study(arguments.folder, arguments.where, arguments.set)
    return answer(made, arguments, "simulated against recorded runs")


def main(argv: Sequence[str] | None = None) -> int:
    program = "reports.fidelity.request_logs.make"
    parser = Parser(prog=f"python -m {program}", description=logs_arguments.about)
    logs_arguments.arguments(parser)
    parser.set_defaults(command=logs_arguments.name, refuse=parser.error)
    return run_verb(program, parser, [logs_arguments], argv)


if __name__ == "__main__":
    sys.exit(main())
