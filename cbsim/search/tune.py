"""`cbsim tune`: the best settings of a scenario over a few knobs, by a search whose runs are kept in a store."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cbsim.draw import report
from cbsim.draw.report import Report, Table
from cbsim.errors import ScenarioError
from cbsim.metrics import catalogue, coverage
from cbsim.scenario import documents
from cbsim.scenario.documents import wording
from cbsim.scenario.fields import cut
from cbsim.scenario.overrides import Changes
from cbsim.scenario.scenario import Scenario, drawn
from cbsim.search.racing import BREAKS, FAILED, IN, WORSE, Goal, Measure, Numbers, Outcome, search, with_draws
from cbsim.stats.intervals import COVERS, COVERS_TERMS, STILL
from cbsim.stats.replicated import label
from cbsim.sweeps import identity, sweep, sweep_file
from cbsim.sweeps.store import Runs
from cbsim.sweeps.sweep import Point
from cbsim.sweeps.sweep_file import Ranged
from cbsim.sweeps.work import Task
from cbsim.workload import generators

FORM = "expected FIELD=A..B (doubling), FIELD=A..B:STEP, or FIELD=VALUE,VALUE"
NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(?::({NUMBER}))?", re.ASCII)
MOST = 10_000
EVEN, SURE = 0.5, 1 - 1e-6


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of a search over settings. `candidates` and the trials of `outcome` are in one order."""

    scenario: str
    fields: Sequence[str]
    candidates: Sequence[Point]
    outcome: Outcome

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The settings with the best mean of those that keep all conditions; None if none does."""
        return None if self.outcome.best is None else self.settings(self.outcome.best)

    @cached_property
    def still(self) -> bool:
        """True if the seed changes nothing, so that all replicates of a candidate are one run."""
        return generators.still(self.candidates[0].scenario) and not self.outcome.draws

    @property
    def won(self) -> bool:
        """True if these settings are the best with the confidence of the goal, not only by their mean."""
        return self.outcome.won

    def __str__(self) -> str:
        return report.terminal(study(self))

    def __repr__(self) -> str:
        return f"<Tuned {self.scenario}: {self.best} of {len(self.candidates)} candidates>"

    def called(self, candidate: int) -> str:
        return label(self.settings(candidate)) if self.fields else "as it is"

    def settings(self, candidate: int) -> Mapping[str, Any]:
        point = self.candidates[candidate]
        return {name: point.loop if name == "loop.mode" else point.settings.get(name) for name in self.fields}


def parse_knobs(written: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Parse fields and values from `FIELD=A..B`, `FIELD=A..B:STEP` or `FIELD=VALUE,VALUE`. Raises ScenarioError."""
    knobs: dict[str, Sequence[Any]] = {}
    for knob in written:
        name, equals, values = (part.strip() for part in knob.partition("="))
        where = f"--knob {cut(knob)}"
        if not (equals and name and values):
            raise ScenarioError(f"{where}: {FORM}", value=knob, bound=FORM)
        if name in knobs:
            raise ScenarioError(f"{where}: {name} has another knob, expected one of them", field=name)
        knobs[name] = _values(name, values, where)
    return knobs


def _values(name: str, values: str, where: str) -> Sequence[Any]:
    span = RANGE.fullmatch(values)
    if span is None and ".." in values:
        raise ScenarioError(f"{where}: {FORM}", field=name, value=values, bound=FORM)
    if span is None:
        listed = documents.parse(values if values[0] in "[{" else f"[{values}]", where, lines=False)
        return list({repr(value): value for value in (listed if isinstance(listed, list) else [listed])}.values())
    try:
        low, high, step = (None if part is None else float(part) for part in span.groups())
        ends = {"low": low, "high": high}
        rule = {"log": {**ends, "factor": 2}} if step is None else {"range": {**ends, "step": step}}
        return Ranged.model_validate(rule).values()
    except ValidationError as error:
        entry: dict[str, Any] = dict(error.errors(include_url=False)[0])
        form = ""
        if step is None and low is not None and low <= 0:
            form = f" where it doubles; {name}=A..B:STEP may begin with less"
        raise ScenarioError(f"{where}: {wording(entry)}{form}", field=name, value=values) from None


def candidates(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    changes: Changes,
    knobs: Mapping[str, Sequence[Any]],
    goal: Goal,
) -> list[Point]:
    """Return each combination of the knobs' values, under each loop of the scenario. Raises a ScenarioError that lists
    all that cannot be built, or names a metric that no run will have.
    """
    if "seed" in knobs:
        raise ScenarioError("seed is no knob: replicates take seeds of their own", field="seed")
    for name, value, least, most in (("replicates", goal.most, 2, MOST), ("confidence", goal.confidence, EVEN, SURE)):
        if not least <= value <= most:
            raise ScenarioError(f"{name}: got {value}, must be from {least} to {most}", field=name, value=value)
    source = scenario.model_dump(mode="json") if isinstance(scenario, Scenario) else scenario
    fields = {"name": "tune", "scenario": str(source) if isinstance(source, Path) else source, "axes": dict(knobs)}
    built = sweep.of(*sweep_file.read(fields, changes, ("--set", "--knob")), option="--knob")
    _check(goal, [point.scenario for point in built])
    return built


def _check(goal: Goal, scenarios: Sequence[Scenario]) -> None:
    for scenario in scenarios:
        drawn(scenario, goal.draws)  # there are terms to draw
    for name in (goal.metric.name, *(check.metric for check in goal.slo)):
        for scenario in scenarios:
            slo = scenario.slo
            if name.startswith("slo.") and slo.ttft_s is slo.tpot_s is slo.e2e_s is None:
                bound = "needs a limit for requests, such as --set slo.ttft_s=2"
                raise ScenarioError(f"{name}: {scenario.name} has no slo, {bound}", field="slo", bound=bound)
            for within, server in scenario.pools if name.startswith("cost.") else ():
                if server.hardware.price_usd_hour is None:
                    bound = f"needs --set {within}hardware.price_usd_hour"
                    raise ScenarioError(f"{name}: {server.hardware.name} has no price, {bound}", field="hardware")


def measure(candidates_: Sequence[Point], runs: Runs) -> Measure:
    """Return a function that gives the metrics of candidates' replicates; it makes and stores the missing runs."""

    def of(point: Point) -> Numbers | str:
        made = runs.outcome(point.key)
        return made if isinstance(made, str) else sweep.numbers(point, made)

    still = generators.still(candidates_[0].scenario)

    def measured(chosen: Sequence[int], replicates: range) -> Mapping[int, Sequence[Numbers | str]]:
        seeds = [0] * len(replicates) if still else replicates
        points = {i: [sweep.again(candidates_[i], seed) for seed in seeds] for i in chosen}
        runs.make(Task(point.key, point.scenario, "summary") for made in points.values() for point in made)
        return {i: [of(point) for point in made] for i, made in points.items()}

    return measured


def tune(of: Sequence[Point], goal: Goal, runs: Runs) -> Tuned:
    """Search for the best of the points, round by round. Raises RunError, Interrupted."""
    servers = zip(*(drawn(point.scenario, goal.draws) for point in of), strict=True)  # of each draw
    pairs = [zip(of, row, strict=True) for row in servers]
    draws = [[replace(point, scenario=each, key=identity.key(each)) for point, each in row] for row in pairs]
    with closing(runs.executor):
        outcome, *made = [search(len(of), measure(each, runs), goal) for each in (of, *draws)]
    loops = ["loop.mode"] if len({point.loop for point in of}) > 1 else []
    fields = dict.fromkeys([*(name for point in of for name in point.settings), *loops])
    return Tuned(of[0].scenario.name, list(fields), of, with_draws(outcome, made) if made else outcome)


def study(tuned: Tuned) -> Report:
    outcome, goal = tuned.outcome, tuned.outcome.goal
    conditions = f" with {' and '.join(check.rule for check in goal.slo)}" if goal.slo else ""
    most = "most" if goal.metric.sign > 0 else "least"
    return Report(
        title=f"Settings of {tuned.scenario} for {goal.metric.spelled}",
        question=f"Which settings give {tuned.scenario} the {most} {goal.metric.spelled}{conditions}?",
        findings=_findings(tuned),
        tables=[_table(tuned)],
        data={
            "metric": goal.metric.name,
            "maximise": goal.metric.sign > 0,
            "slo": [check.rule for check in goal.slo],
            "confidence": None if tuned.still else goal.confidence,
            "confidence_each": outcome.confidence,
            "best": tuned.best,
            "sure_to_hold": outcome.sure,
            "won": outcome.won,
            "left": [tuned.settings(i) for i in outcome.left],
            "candidates": [_facts(tuned, i) for i in range(len(outcome.trials))],
        },
    )


def _metrics(goal: Goal) -> list[str]:
    return list(dict.fromkeys([goal.metric.name, *(check.metric for check in goal.slo)]))


def _findings(tuned: Tuned) -> list[str]:
    outcome, goal = tuned.outcome, tuned.outcome.goal
    intervals = f"all its intervals, each with {outcome.confidence:.6g}, hold at once with {goal.confidence:g}"
    rest = coverage.bases(point.scenario for point in tuned.candidates)
    covers = COVERS_TERMS if outcome.draws else STILL if tuned.still else COVERS
    covers = f"{covers[0].upper()}{covers[1:]}{';' if tuned.still else ':'} {'; '.join(rest)}."
    method = f"Means over a candidate's replicates; behind: paired differences to the best; {intervals} (Bonferroni)."
    if outcome.best is None:
        failed = all(trial.verdict == FAILED for trial in outcome.trials)
        return ["No candidate could be run." if failed else "No candidate keeps all conditions.", method, covers]
    findings = [f"{tuned.called(outcome.best)}: {_verdict(tuned)}."]
    if outcome.second is not None:
        ahead = outcome.against(outcome.second)
        mean, low, high = (_relative(end, ahead.second) for end in (ahead.mean, ahead.low, ahead.high))
        against = f"Against the second, {tuned.called(outcome.second)}: {mean}"
        if tuned.still:
            return [*findings, f"{against}.", covers]
        findings.append(f"{against}, from {low} to {high}, by {ahead.pairs} pairs of replicates.")
    return [*findings, *_terms(tuned), method, covers]


def _terms(tuned: Tuned) -> list[str]:
    """Return which settings are the best with draws of the terms, and what part of an interval is theirs."""
    outcome, seed = tuned.outcome, tuned.candidates[0].scenario.seed
    best = Counter("none" if each.best is None else tuned.called(each.best) for each in outcome.draws)
    counts = ", ".join(f"{name} in {count}" for name, count in best.most_common())
    over = None if outcome.second is None else outcome.joint(outcome.second)
    part = f"; {over[1]:.0%} of the squared width of the difference to the second is theirs" if over else ""
    return [f"Best with {len(outcome.draws)} draws of the terms by seed {seed}: {counts}{part}."] if best else []


def _verdict(tuned: Tuned) -> str:
    outcome = tuned.outcome
    best = "that keeps the conditions" if outcome.goal.slo else "of them"
    count = len(outcome.left) - 1
    if tuned.still:
        return f"the best {best}"
    if outcome.won:
        return f"the best {best}, with a confidence of at least {outcome.goal.confidence:g}"
    sure = "" if outcome.sure else "; that it keeps the conditions is not sure"
    if not count:
        return f"the only one left{sure}"
    same = sum(outcome.against(i).none for i in outcome.left if i != outcome.best)
    if same == count:
        return f"the best {best}, and {count} the same in every replicate{sure}"
    equal = f", {same} of them the same in every replicate" if same else ""
    return f"the best mean {best}, but {count} could not be told apart from it{equal}{sure}"


def _relative(value: float, whole: float) -> str:
    return f"{value / abs(whole):+.2%}" if whole else f"{value:+.4g}"


def _table(tuned: Tuned) -> Table:
    trials, metrics = tuned.outcome.trials, _metrics(tuned.outcome.goal)
    rows = []
    for i in sorted(range(len(trials)), key=lambda i: _rank(tuned, i)):
        values = [trials[i].values(name) for name in metrics]
        means = [sum(of) / len(of) if of else None for of in values]
        cells = [catalogue.metric(name).shown(mean) for name, mean in zip(metrics, means, strict=True)]
        rows.append((tuned.called(i), *cells, *_behind(tuned, i), str(len(trials[i].runs)), _note(tuned, i)))
    spelled = [catalogue.metric(name).spelled for name in metrics]
    return Table("candidates", ("", *spelled, "behind", "from", "to", "replicates", "verdict"), rows)


def _rank(tuned: Tuned, i: int) -> tuple[int, float]:
    """Return a sort key: candidates left, best first, then worse ones, each by how far behind; then the others."""
    outcome, trial = tuned.outcome, tuned.outcome.trials[i]
    behind = 0.0
    if outcome.best is not None and trial.runs:
        behind = -math.inf if i == outcome.best else outcome.behind(i)
    return (IN, WORSE, BREAKS, FAILED).index(trial.verdict), behind


def _behind(tuned: Tuned, i: int) -> tuple[str, str, str]:
    best = tuned.outcome.best
    if best in (None, i) or len(tuned.outcome.trials[i].runs) < 2:
        return "-", "-", "-"
    ahead = tuned.outcome.against(i)
    mean, low, high = (_relative(-end, ahead.first) for end in (ahead.mean, ahead.high, ahead.low))
    return (mean, "-", "-") if tuned.still else (mean, low, high)


def _note(tuned: Tuned, i: int) -> str:
    outcome = tuned.outcome
    trial = outcome.trials[i]
    if trial.verdict != IN:
        return f"{trial.verdict}: {trial.why}" if trial.why else trial.verdict
    if i == outcome.best:
        return "best" if outcome.won else "best mean"
    if outcome.best is not None and outcome.against(i).none:
        return "the same"
    return "not told apart" if outcome.best is not None else "may break a condition"


def _facts(tuned: Tuned, i: int) -> dict[str, Any]:
    outcome = tuned.outcome
    trial = outcome.trials[i]
    facts: dict[str, Any] = {"settings": tuned.settings(i), "verdict": _note(tuned, i), "replicates": len(trial.runs)}
    facts["values"] = {name: trial.values(name) for name in _metrics(outcome.goal)}
    if outcome.best not in (None, i) and len(trial.runs) > 1:
        ahead = outcome.against(i)
        facts["behind_best"] = {"mean": -ahead.mean, "low": -ahead.high, "high": -ahead.low, "pairs": ahead.pairs}
    return facts
