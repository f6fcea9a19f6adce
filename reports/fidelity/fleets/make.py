"""llm-d's rate ladders, simulated: every published stage of several servers behind a router against draws of a fleet.

`python -m reports.fidelity.fleets.make` makes the report; with the path of a folder of such ladders, or with `--where
set=a2,arm=service`, it prints the tables of these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from cbsim.draw.chart import Chart, Line, Panel, Points, series
from cbsim.draw.report import Table
from cbsim.errors import USAGE, UserError
from cbsim.metrics.terminal import aligned
from cbsim.scenario import catalog
from reports import page
from reports.fidelity.fleets import ladder
from reports.fidelity.fleets.ladder import Arm, Stage

DATA = "public_measured/routed_servers"
DRAWS = 2  # of the order of prompts, of arrivals, of connections and of ties between servers
PEAK, TTFT, RATIO = 0.10, 0.25, 0.20  # the bars
SATURATED = 5.0  # no bar for a TTFT of so many times that at the arm's lowest rate, or more
WITHIN, BEYOND, CHOSEN = "within", "**beyond**", "chosen"


@dataclass(frozen=True, slots=True)
class Number:
    """A published number, and the same of each draw."""

    measured: float
    draws: Sequence[float]

    @property
    def simulated(self) -> float:
        return fmean(self.draws)

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1

    def cells(self, form: str, scale: float = 1.0) -> tuple[str, str, str]:
        """Return it as text: published, the mean and the range of the draws, the error of the mean."""
        numbers = (self.measured, self.simulated, min(self.draws), max(self.draws))
        measured, mean, low, high = (format(scale * number, form) for number in numbers)
        return measured, mean if low == high else f"{mean} ({low} to {high})", f"{self.error:+.1%}"


@dataclass(frozen=True, slots=True)
class Climbed:
    """An arm and its simulated stages, draw by draw."""

    arm: Arm
    draws: Sequence[Mapping[int, Stage]]

    def output(self, number: int) -> Number:
        return Number(self.arm.stages[number].output_tok_s, [draw[number].output_tok_s for draw in self.draws])

    def peak(self) -> Number:
        ladders = [self.arm.stages, *self.draws]
        measured, *drawn = (max(stage.output_tok_s for number, stage in each.items() if number) for each in ladders)
        return Number(measured, drawn)

    def ttft(self, number: int) -> tuple[str, Number] | None:
        """Return the first statistic that was published of a stage, with its name; None if there is none."""
        of = self.arm.stages[number].ttft_s
        name = next(iter(of), None)
        return (name, Number(of[name], [draw[number].ttft_s[name] for draw in self.draws])) if name else None

    def verdict(self, number: int) -> str:
        """Return what the bar of TTFT says of a stage; "" without TTFT, in the warm-up, and in saturation."""
        known = [known for at in sorted(self.arm.stages) if at and (known := self.ttft(at))]
        ttft = self.ttft(number)
        if self.arm.stages[number].rate in (self.arm.own or {}).get("chosen", {}) and number:
            return CHOSEN
        if not ttft or not number or ttft[1].measured >= SATURATED * known[0][1].measured:
            return ""
        off_s = abs(ttft[1].simulated - ttft[1].measured) - self.arm.stages[number].rounded_s
        return WITHIN if off_s <= TTFT * ttft[1].measured else BEYOND


def climbed(arms: Sequence[Arm], draws: int, jobs: int, overrides: Sequence[str]) -> list[Climbed]:
    """Simulate so many draws of each arm that can be built. Raises ScenarioError."""
    built = [arm for arm in arms if arm.own is not None]
    tasks = [(arm, seed) for arm in built for seed in range(draws)]
    one, ladders = partial(_one, overrides=overrides), list[dict[int, Stage]]()
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for task, done in zip(tasks, (pool.map if jobs > 1 else map)(one, tasks), strict=True):
            print(f"  {task[0]}, draw {task[1]}", file=sys.stderr)
            ladders.append(done)
    return [Climbed(arm, ladders[at * draws : (at + 1) * draws]) for at, arm in enumerate(built)]


def _one(task: tuple[Arm, int], overrides: Sequence[str]) -> dict[int, Stage]:
    return ladder.climb(*task, overrides)


def peaks(found: Sequence[Climbed]) -> Table:
    rows = [(f"{of.arm}", *of.peak().cells(",.0f"), WITHIN if abs(of.peak().error) <= PEAK else BEYOND) for of in found]
    return Table("Peak output tokens/s", ("arm", "published", "simulated", "error", f"{PEAK:.0%}"), rows)


def ratios(found: Sequence[Climbed]) -> Table:
    """Tabulate throughput over that of the Service, of the same set or of the one that the set is `against`."""
    services, rows = {of.arm.set: of for of in found if of.arm.arm == "service"}, list[tuple[str, ...]]()
    for of in found:
        base = services.get(of.arm.about.get("against", of.arm.set))
        if base is None or base is of:
            continue
        at = {stage.rate: number for number, stage in base.arm.stages.items() if number}
        shared = [(n, stage.rate) for n, stage in of.arm.stages.items() if n and stage.rate in at]
        pairs = [(f"{rate:g}/s", of.output(n), base.output(at[rate])) for n, rate in shared]
        for name, mine, other in [*pairs, ("peak", of.peak(), base.peak())]:
            drawn = [a / b for a, b in zip(mine.draws, other.draws, strict=False)]
            ratio = Number(mine.measured / other.measured, drawn)
            rows.append((f"{of.arm}, {name}", *ratio.cells(".2f"), WITHIN if abs(ratio.error) <= RATIO else BEYOND))
    return Table("Ratio to the Service", ("arm", "published", "simulated", "error", f"{RATIO:.0%}"), rows)


def stages(found: Sequence[Climbed]) -> Table:
    rows = []
    for of in found:
        for number, stage in of.arm.stages.items():
            name, ttft = of.ttft(number) or ("", None)
            seen = ttft.cells(",.0f", 1e3) if ttft else ("", "", "")
            hits = f"{fmean(draw[number].hits for draw in of.draws):.0%}"
            label = f"{of.arm}, {stage.rate:g}/s" if number else f"{of.arm}, warm-up"
            rows.append((label, *of.output(number).cells(",.0f"), name, *seen, of.verdict(number), hits))
    numbers = ("published", "simulated", "error")
    return Table("Stages", ("stage", "tokens/s", *numbers[1:], "TTFT, ms", *numbers, f"{TTFT:.0%}", "hits"), rows)


def summary(found: Sequence[Climbed]) -> Table:
    """Tabulate by set how many of its numbers are within the bars."""
    rows = []
    for group in dict.fromkeys(of.arm.set for of in found):
        part = [of for of in found if of.arm.set == group]
        known = [of for of in found if of in part or of.arm.set == part[0].arm.about.get("against")]
        compared = [row for row in ratios(known).rows if row[0].startswith(f"{group} ")]
        verdicts = [of.verdict(number) for of in part for number in of.arm.stages]
        throughput = [abs(of.output(number).error) for of in part for number in of.arm.stages if number]
        cells = (_count(row[-1] for row in table) for table in (peaks(part).rows, compared))
        rows.append((group, *cells, _count(verdicts), str(verdicts.count(CHOSEN)), f"{fmean(throughput):.1%}"))
    header = (
        "set",
        f"peaks, {PEAK:.0%}",
        f"ratios, {RATIO:.0%}",
        f"TTFT, {TTFT:.0%}",
        "chosen",
        "mean error, tokens/s",
    )
    return Table("Within the bars", header, rows)


def _count(verdicts: Any) -> str:
    counted = [each for each in verdicts if each in (WITHIN, BEYOND)]
    return f"{counted.count(WITHIN)} of {len(counted)}"


def numbers(found: Sequence[Climbed]) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each stage, for report.json."""
    for of in found:
        for number, stage in of.arm.stages.items():
            name, ttft = of.ttft(number) or ("", None)
            known = {"output_tok_s": of.output(number)} | ({f"ttft_{name}_s": ttft} if ttft else {})
            cells = {
                key: {"published": n.measured, "draws": [round(x, 4) for x in n.draws]} for key, n in known.items()
            }
            where = {"set": of.arm.set, "arm": of.arm.arm, "rate": stage.rate, "warm_up": not number}
            yield where | cells | {"hits": [round(draw[number].hits, 4) for draw in of.draws]}


def chart(found: Sequence[Climbed]) -> Chart:
    """Draw throughput and TTFT over the rate, a row a set."""
    panels = []
    for group in dict.fromkeys(of.arm.set for of in found):
        marks: tuple[list[Line | Points], list[Line | Points]] = ([], [])
        part_of = [of for of in found if of.arm.set == group]
        for of in part_of:
            service = of.arm.arm == "service"
            name, style = "Kubernetes Service" if service else "llm-d's router", series(0 if service else 1)
            rates = {number: stage.rate for number, stage in of.arm.stages.items() if number}
            known = {number: ttft[1] for number in rates if (ttft := of.ttft(number))}
            for part, values in zip(marks, ({number: of.output(number) for number in rates}, known), strict=True):
                x = np.array([rates[number] for number in values])
                part.append(Line(f"{name}, simulated", x, np.array([v.simulated for v in values.values()]), style))
                part.append(Points(f"{name}, published", x, np.array([v.measured for v in values.values()]), style))
        panels.append(
            Panel(
                marks[0], x="requests/s", y="output tokens/s", title=f"{group}. {part_of[0].arm.about.get('title', '')}"
            )
        )
        panels.append(Panel(marks[1], x="requests/s", y="TTFT, s", title=f"{group}. TTFT", y_log=True))
    caption = "Points are published, of one run each; lines are simulated, means of draws."
    return Chart(
        "ladders",
        "Eight (a4: sixteen) servers behind a Service or a router: published points, simulated lines",
        caption,
        panels,
        columns=2,
    )


def write(found: Sequence[Climbed]) -> None:
    """Make the report beside this script."""
    tables = {each.__name__: each(found) for each in (summary, peaks, ratios, stages)}
    kept = tables["summary"]
    page.write(__file__, tables, [chart(found)], {"summary": [kept.header, *kept.rows], "stages": [*numbers(found)]})


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate llm-d's published rate ladders of servers behind a router.")
    parser.add_argument("folder", nargs="?", type=Path, help=f"with {' or '.join(ladder.FILES)}")
    parser.add_argument("--where", default="", help="such as set=a2,arm=service")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--set", action="append", default=[], help="a field of every scenario, such as seed=7")
    of = parser.parse_args()
    try:
        where = dict(part.partition("=")[::2] for part in of.where.split(",") if part)
        arms = ladder.read(of.folder or catalog.data(f"{DATA}/{ladder.FILES[0]}", "the rate ladders").parent, where)
        found = climbed(arms, of.draws, of.jobs, of.set)
    except UserError as error:
        sys.exit(print(f"{parser.prog}: {error}", file=sys.stderr) or USAGE)
    if of.folder or of.where or of.set:
        for each in (summary, peaks, ratios, stages):
            print(f"{each(found).title}\n{aligned([each(found).header, *each(found).rows])}\n")
    else:
        write(found)


if __name__ == "__main__":
    main()
