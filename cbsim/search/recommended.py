"""The answer of `cbsim recommend` as a report: the ranked table, price against latency, and a scenario an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cbsim.draw import folder, report
from cbsim.draw.chart import BLUE, ORANGE, Chart, Panel, Points, Style, Whiskers
from cbsim.draw.report import Report, Source, Table
from cbsim.metrics import catalogue, coverage
from cbsim.scenario import scenario as scenarios
from cbsim.search import recommend as searching
from cbsim.search.probe import Terms
from cbsim.search.recommend import COST, Candidate, Hunt, Wish
from cbsim.stats import intervals
from cbsim.stats.intervals import COVERS, STILL
from cbsim.sweeps.store import Progress, Runs, Store
from cbsim.sweeps.work import Executor

STYLES = {"holds": Style(BLUE), "likely": Style(ORANGE, marker="diamond")}
SCENARIOS = "scenarios"  # the folder of the answers' scenarios, in that of the report


@dataclass(frozen=True, eq=False)
class Recommended:
    """The answer: `hunts` ranked, those that surely hold first, by price. Its string is the table."""

    terms: Terms
    hunts: Sequence[Hunt]

    @property
    def best(self) -> Hunt:
        """The first: the cheapest that surely keeps the conditions, or if none is sure, likely does."""
        return self.hunts[0]

    @property
    def answers(self) -> list[Hunt]:
        return [hunt for hunt in self.hunts if hunt.at is not None]

    @property
    def rivals(self) -> list[Hunt]:
        """Candidates that may turn out to be cheaper than the best: their intervals reach below its price."""
        most = self.best.usd_hour
        return [
            hunt for hunt in self.answers[1:] if hunt.candidate.usd_hour(hunt.span[0]) < most * (1 - intervals.NOTHING)
        ]

    def __str__(self) -> str:
        return report.terminal(study(self))

    def __repr__(self) -> str:
        return f"<Recommended {self.best.candidate.label(self.best.count)} of {len(self.hunts)} candidates>"


def recommend(
    wish: Wish,
    of: Sequence[Candidate],
    slo: Sequence[str],
    precision: Mapping[str, float],
    store: Path,
    executor: Executor,
    progress: Progress | None = None,
) -> Recommended:
    """Search the least number of servers of each candidate, and rank them. Raises ScenarioError, CheckError, RunError,
    Interrupted.
    """
    with closing(executor):
        terms = searching.terms(wish, of, slo, **precision)
        return Recommended(terms, searching.search(wish, of, terms, Runs(Store(store), executor, progress)))


def study(answer: Recommended) -> Report:
    conditions = " and ".join(check.rule for check in answer.terms.conditions)
    first = answer.hunts[0].scenario
    return Report(
        title=f"Servers of {first.model.name}",
        question=f"Which servers of {first.model.name} keep {conditions} at the least price?",
        findings=_findings(answer),
        tables=[_table(answer), *_left(answer)],
        charts=[_chart(answer)],
        data={
            "slo": [check.rule for check in answer.terms.conditions],
            "confidence": None if answer.terms.still else answer.terms.confidence,
            "candidates": [_facts(answer, at) for at in range(len(answer.hunts))],
        },
        sources=[_source(answer, each) for each in answer.answers],
    )


def write(answer: Recommended, out: Path) -> None:
    """Write the scenario of each answer into a folder of the report's."""
    folder.write(out, {_file(answer, each): scenarios.dump(each.scenario).encode() for each in answer.answers})


def _file(answer: Recommended, hunt: Hunt) -> str:
    return f"{SCENARIOS}/{answer.hunts.index(hunt) + 1}.yaml"


def _label(hunt: Hunt) -> str:
    return hunt.candidate.label(hunt.count)


def _source(answer: Recommended, hunt: Hunt) -> Source:
    name = _file(answer, hunt)
    label = f"{answer.hunts.index(hunt) + 1}: {_label(hunt)}"
    return Source(label, name, "simulated", (), scenarios.dump(hunt.scenario), "", f"python -m cbsim run {name}")


def _sure(hunt: Hunt) -> str:
    least, most = hunt.span
    if hunt.sure is None:
        return f"likely; {least} or more"
    return "holds" if least == most else f"holds; {least} may do"


def _table(answer: Recommended) -> Table:
    checks = answer.terms.conditions
    bases = coverage.bases(server for each in answer.answers for _, server in each.scenario.pools)
    header = ("", "GPUs", "$/h", "$/M output", "J/token", *(check.spelled for check in checks), "binds", "times", "")
    rows = []
    for at, hunt in enumerate(answer.answers, start=1):
        cells = []
        for metric in map(catalogue.metric, (COST, *(check.metric for check in checks))):
            value = hunt.interval(metric.name, answer.terms.confidence)
            half = f" ± {metric.shown((value.high - value.low) / 2)}" if value and value.high > value.low else ""
            cells.append(metric.shown(value.mean) + half if value else "-")
        joules = hunt.joules
        energy = "-" if joules is None else f"{joules:.3g}"
        of = coverage.bases(server for _, server in hunt.scenario.pools)
        rest = ", ".join(f"[{bases.index(each) + 1}]" for each in of)
        lead = f"{at}: {_label(hunt)}", f"{hunt.candidate.gpus(hunt.count):,}", f"{hunt.usd_hour:,.2f}"
        rows.append((*lead, cells[0], energy, *cells[1:], hunt.binds, rest, _sure(hunt)))
    return Table("candidates", header, rows)


def _left(answer: Recommended) -> list[Table]:
    """Return a table of the candidates without an answer, and why they have none."""
    rows = [(_label(each), each.out) for each in answer.hunts if each.at is None]
    return [Table("left out", ("", "why"), rows)] if rows else []


def _findings(answer: Recommended) -> list[str]:
    best, terms, rivals = answer.best, answer.terms, answer.rivals
    sure = " by its means, which is not sure" if best.sure is None else ""
    findings = [f"{_label(best)}: $ {best.usd_hour:,.2f} an hour, the cheapest that keeps the conditions{sure}."]
    if rivals:
        findings.append(f"Not sure to be dearer: {', '.join(_label(each) for each in rivals)}.")
    every = coverage.bases(server for each in answer.answers for _, server in each.scenario.pools)
    once = f"intervals of the numbers of servers hold at once with a confidence of {terms.confidence:g} (Bonferroni), "
    covers = STILL if terms.still else f"{once}those of metrics each; {COVERS}"
    return [
        *findings,
        *(f"[{at}] {each}" for at, each in enumerate(every, start=1)),
        "J/token: the power that data sheets allow, while a GPU is active: an estimate, without idle time.",
        "More servers are taken to be never worse; dearer ones were left by means of two runs, or by the data sheet.",
        f"{covers[0].upper()}{covers[1:]}.",
    ]


def _chart(answer: Recommended) -> Chart:
    check = answer.terms.conditions[0]
    marks: list[Points | Whiskers] = []
    for name, style in STYLES.items():
        drawn = [each for each in answer.answers if (each.sure is not None) == (name == "holds")]
        pairs = [(each, value) for each in drawn if (value := each.interval(check.metric, answer.terms.confidence))]
        if not pairs:
            continue
        x, y, low, high = (
            np.array(values, dtype=float) for values in zip(*((each.usd_hour, *of) for each, of in pairs), strict=True)
        )
        labels = [str(answer.hunts.index(each) + 1) for each, _ in pairs]
        texts = [_label(each) for each, _ in pairs]
        marks += [Whiskers("", x, low, high, style), Points(name, x, y, style, texts, labels)]
    caption = f"Numbers are the table's. Bars: intervals with a confidence of {answer.terms.confidence:g} each."
    title = f"{check.spelled} against $ an hour"
    return Chart("price", title, caption, [Panel(marks, "$ an hour", catalogue.metric(check.metric).label)])


def _facts(answer: Recommended, at: int) -> dict[str, Any]:
    hunt = answer.hunts[at]
    names = (COST, *(check.metric for check in answer.terms.conditions))
    values = {name: hunt.interval(name, answer.terms.confidence) for name in names}
    least, most = hunt.span if hunt.at is not None else (None, None)
    return {
        "rank": at + 1,
        "label": _label(hunt),
        "servers": hunt.count,
        "least": least,
        "sure": most,
        "gpus": hunt.candidate.gpus(hunt.count),
        "usd_hour": hunt.usd_hour,
        "joules_per_output_token": hunt.joules,
        "binds": hunt.binds,
        "verdict": hunt.out or _sure(hunt),
        "runs": len(hunt.runs),
        "values": {name: value._asdict() if value else None for name, value in values.items()},
        "scenario": json.loads(hunt.scenario.model_dump_json()) if hunt.at is not None else None,
    }
