"""The answer of `cbsim recommend` as a report: the ranked table, price against latency, and a scenario an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cbsim.draw import folder, report
from cbsim.draw.chart import BLUE, Chart, Panel, Points, Style, Whiskers
from cbsim.draw.report import Report, Source, Table
from cbsim.metrics import catalogue, coverage
from cbsim.metrics.catalogue import COST
from cbsim.scenario import scenario as scenarios
from cbsim.search import recommend as searching
from cbsim.search.probe import Terms
from cbsim.search.recommend import Candidate, Search
from cbsim.stats.intervals import COVERS, STILL
from cbsim.sweeps.store import Runs


@dataclass(frozen=True, eq=False)
class Recommended:
    """The answer: `searches` ranked, those that surely hold first, by price. Its string is the table."""

    searches: Sequence[Search]

    @property
    def best(self) -> Search:
        """The first: the cheapest that surely keeps the conditions, or if none is sure, likely does."""
        return self.searches[0]

    @cached_property
    def answers(self) -> Sequence[tuple[str, Search]]:
        """Each candidate that has an answer, with its rank and label."""
        return [(f"{rank}: {each.label}", each) for rank, each in enumerate(self.searches, start=1) if each.answered]

    @cached_property
    def bases(self) -> list[str]:
        """What the step times of answers rest on, and what of it was not measured."""
        return coverage.bases(server for _, search in self.answers for _, server in search.scenario.pools)

    def __str__(self) -> str:
        return report.terminal(study(self))

    def __repr__(self) -> str:
        return f"<Recommended {self.best.label} of {len(self.searches)} candidates>"


def recommend(of: Sequence[Candidate], terms: Terms, runs: Runs) -> Recommended:
    """Search the least number of servers of each candidate, and rank them. Raises UserError, Interrupted."""
    with closing(runs.executor):
        return Recommended(searching.search(of, terms, runs))


def study(answer: Recommended, out: Path = Path()) -> Report:
    """Return the report, which names the scenarios that `write` puts into the folder `out`."""
    terms, model = answer.best.terms, answer.best.scenario.model.name
    rules = [check.rule for check in terms.conditions]
    left = [(search.label, search.out) for search in answer.searches if not search.answered]
    data = {"slo": rules, "confidence": None if terms.still else terms.confidence}
    return Report(
        title=f"Servers of {model}",
        question=f"Which servers of {model} keep {' and '.join(rules)} at the least price?",
        findings=_findings(answer),
        tables=[_table(answer), *([Table("left out", ("", "why"), left)] if left else [])],
        charts=[_chart(answer)],
        data={**data, "candidates": [_facts(search) for search in answer.searches]},
        sources=[
            Source(label, name, "simulated", (), content, "", f"python -m cbsim run {out / name}")
            for (label, _), (name, content) in zip(answer.answers, _scenarios(answer).items(), strict=True)
        ],
    )


def _scenarios(answer: Recommended) -> dict[str, str]:
    """Return the files of the answers' scenarios, by name."""
    return {f"scenarios/{name.partition(':')[0]}.yaml": scenarios.dump(each.scenario) for name, each in answer.answers}


def write(answer: Recommended, out: Path, command: str) -> None:
    """Write the page, and the scenario of each answer, into the folder of the report."""
    for earlier in (out / "scenarios").glob("[0-9]*.yaml"):
        earlier.unlink()
    files = {"report.html": report.page(replace(study(answer), command=command)), **_scenarios(answer)}
    folder.write(out, {name: content.encode() for name, content in files.items()})


def _verdict(search: Search) -> str:
    least, most = search.span
    sure = f"likely; {least} or more" if most is None else "holds" if least == most else f"holds; {least} may do"
    return search.out or sure


def _metrics(search: Search) -> list[str]:
    return list(dict.fromkeys([COST, *(check.metric for check in search.terms.conditions)]))


def _table(answer: Recommended) -> Table:
    metrics, rows = [catalogue.metric(name) for name in _metrics(answer.best)], []
    for label, search in answer.answers:
        cells = []
        for metric in metrics:
            value = search.interval(metric.name)
            half = f" ± {metric.shown((value.high - value.low) / 2)}" if value and value.high > value.low else ""
            cells.append(metric.shown(value.mean) + half if value else "-")
        energy = "-" if search.joules is None else f"{search.joules:.3g}"
        notes = [f"[{answer.bases.index(each) + 1}]" for each in coverage.bases(of for _, of in search.scenario.pools)]
        lead = label, f"{search.scenario.all_gpus:,}", f"{search.usd_hour:,.2f}"
        rows.append((*lead, cells[0], energy, *cells[1:], search.binds, ", ".join(notes), _verdict(search)))
    spelled = [metric.spelled for metric in metrics[1:]]
    return Table("candidates", ("", "GPUs", "$/h", "$/M output", "J/token", *spelled, "binds", "times", ""), rows)


def _findings(answer: Recommended) -> list[str]:
    best, terms = answer.best, answer.best.terms
    sure = " by its means, which is not sure" if best.sure is None else ""
    once = f"Intervals of the numbers of servers hold at once with a confidence of {terms.confidence:g} (Bonferroni), "
    return [
        f"{best.label}: $ {best.usd_hour:,.2f} an hour, the cheapest that keeps the conditions{sure}.",
        *(f"[{at}] {each}" for at, each in enumerate(answer.bases, start=1)),
        "J/token: the power that data sheets allow, while a GPU is active: an estimate, without idle time.",
        "More servers are taken to be never worse; dearer ones were left by means of two runs, or by the data sheet.",
        f"{STILL[0].upper()}{STILL[1:]}." if terms.still else f"{once}those of metrics each; {COVERS}.",
    ]


def _chart(answer: Recommended) -> Chart:
    """Return latency against price; the first interval of a price is labelled with its ranks."""
    terms, ranks = answer.best.terms, dict[float, str]()
    metric = catalogue.metric(terms.conditions[0].metric)
    drawn = [(label, each.usd_hour, *value) for label, each in answer.answers if (value := each.interval(metric.name))]
    labels, *columns = zip(*drawn, strict=True)
    x, y, low, high = (np.array(column, dtype=float) for column in columns)
    for label, usd, *_ in drawn:
        ranks[usd] = f"{ranks[usd]}, {label.partition(':')[0]}" if usd in ranks else label.partition(":")[0]
    style, first = Style(BLUE), [ranks.pop(usd, "") for _, usd, *_ in drawn]
    marks = Whiskers("", x, low, high, style), Points("", x, y, style, labels, first)
    caption = f"Numbers are the table's. Bars: intervals with a confidence of {terms.confidence:g} each."
    title = f"{metric.spelled} against $ an hour"
    return Chart("price", title, caption, [Panel(marks, "$ an hour", f"{metric.label}, {metric.unit}")])


def _facts(search: Search) -> dict[str, Any]:
    values = {name: search.interval(name) for name in _metrics(search)}
    least, most = search.span if search.answered else (None, None)
    return {
        "label": search.label,
        "servers": search.candidate.count(search.at),
        "least": least,
        "sure": most,
        "gpus": search.candidate.gpus(search.at),
        "usd_hour": search.usd_hour,
        "joules_per_output_token": search.joules,
        "binds": search.binds,
        "verdict": _verdict(search),
        "runs": len(search.runs),
        "values": {name: value._asdict() if value else None for name, value in values.items()},
        "scenario": json.loads(search.scenario.model_dump_json()) if search.answered else None,
    }
