"""`cbsim tune`: the best settings of a scenario over a few knobs, by a search whose runs are kept in a store."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbsim.draw.markdown import Table
from cbsim.draw.study import Study, text
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.overrides import parsed
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import identity, points, sweep_file, table
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.metric import shown
from cbsim.sweeps.points import Point
from cbsim.sweeps.racing import BREAKS, FAILED, IN, WORSE, Goal, Numbers, Outcome, Trial, search
from cbsim.sweeps.replicated import called
from cbsim.sweeps.store import Store
from cbsim.sweeps.work import Made, Task

Hear = Callable[[Made], None]
MOST = 10_000
EVEN, SURE = 0.5, 1 - 1e-6


@dataclass(frozen=True, eq=False)
class Tuned:
    """What a search over settings found. `candidates` and the trials of `outcome` are in one order."""

    scenario: str
    fields: Sequence[str]
    candidates: Sequence[Point]
    outcome: Outcome

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The settings with the best mean of those that keep all conditions; None if nobody does."""
        return None if self.outcome.best is None else self.settings(self.outcome.best)

    @property
    def won(self) -> bool:
        """Are they the best with the confidence of the goal, and not only by their mean?"""
        return self.outcome.won

    def __str__(self) -> str:
        return text(study(self))

    def __repr__(self) -> str:
        return f"<Tuned {self.scenario}: {self.best} of {len(self.candidates)} candidates>"

    def called(self, candidate: int) -> str:
        """What a candidate sets."""
        return called(self.settings(candidate)) if self.fields else "as it is"

    def settings(self, candidate: int) -> Mapping[str, Any]:
        point = self.candidates[candidate]
        return {name: point.loop if name == "loop.mode" else point.settings.get(name) for name in self.fields}


def candidates(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    changes: Sequence[str],
    knobs: Mapping[str, Sequence[Any]],
    goal: Goal,
) -> list[Point]:
    """Every value of a knob with every one of the others, under each loop of the scenario. Raises ScenarioError, that
    tells of all that cannot be built, or of a metric that no run will have.
    """
    if "seed" in knobs:
        raise ScenarioError("seed is no knob: replicates take seeds of their own", field="seed")
    for name, value, least, most in (("replicates", goal.most, 2, MOST), ("confidence", goal.confidence, EVEN, SURE)):
        if not least <= value <= most:
            raise ScenarioError(f"{name}: got {value}, must be from {least} to {most}", field=name, value=value)
    source: Any = scenario
    if isinstance(scenario, Scenario):
        source = scenario.model_dump(mode="json")
    elif isinstance(scenario, Path):
        source = str(scenario)
    always = {".".join(map(str, path)): value for path, value in map(parsed, changes)}
    file = sweep_file.parse({"name": "tune", "scenario": source, "set": always, "axes": dict(knobs)})
    built = points.of(file, Path())
    for point in {point.scenario.workload: point for point in built}.values():
        points.check_workload(point)
    _check(goal, [point.scenario for point in built])
    return built


def _check(goal: Goal, scenarios: Sequence[Scenario]) -> None:
    for name in (goal.metric.name, *(check.metric for check in goal.slo)):
        for scenario in scenarios:
            slo = scenario.slo
            if name.startswith("slo.") and slo.ttft_s is slo.tpot_s is slo.e2e_s is None:
                bound = "needs a limit for requests, such as --set slo.ttft_s=2"
                raise ScenarioError(f"{name}: {scenario.name} has no slo, {bound}", field="slo", bound=bound)
            if name.startswith("cost.") and scenario.hardware.price_usd_hour is None:
                bound = "needs --set hardware.price_usd_hour"
                raise ScenarioError(f"{name}: {scenario.hardware.name} has no price, {bound}", field="hardware")


class Runs:
    """The runs of candidates: those that the store has, and the others, which are made and kept."""

    def __init__(
        self, of: Sequence[Point], store: Store, executor: Executor, begin: Callable[[int], Hear] = lambda _: _nobody
    ) -> None:
        self._of, self._store, self._executor, self._begin = of, store, executor, begin

    def measure(self, chosen: Sequence[int], replicates: range) -> Mapping[int, Sequence[Numbers | str]]:
        """As Measure."""
        asked = {i: [points.again(self._of[i], replicate) for replicate in replicates] for i in chosen}
        wanted = {point.key: point for made in asked.values() for point in made}
        missing = [point for key, point in wanted.items() if not self._store.holds(key, ("summary.json",))]
        hear = self._begin(len(missing))
        for made in self._executor.each(Task(point.key, point.scenario, "summary") for point in missing):
            self._store.keep(made)
            hear(made)
        return {i: [self._run(point) for point in made] for i, made in asked.items()}

    def _run(self, point: Point) -> Numbers | str:
        if self._store.holds(point.key, ("summary.json",)):
            return table.numbers(point, self._store.summary(point.key))
        return self._store.reason(point.key) or "it was not made"


def tune(
    of: Sequence[Point], goal: Goal, store: Path, executor: Executor, begin: Callable[[int], Hear] = lambda _: _nobody
) -> Tuned:
    """Search among points for the best. `begin` is told how many runs a round makes, and hears of each. Raises
    RunError.
    """
    with closing(executor):
        outcome = search(len(of), Runs(of, Store(store, identity.code()), executor, begin).measure, goal)
    loops = ["loop.mode"] if len({point.loop for point in of}) > 1 else []
    fields = dict.fromkeys([*(name for point in of for name in point.settings), *loops])
    return Tuned(of[0].scenario.name, list(fields), of, outcome)


def _nobody(made: Made) -> None:
    """Hears nothing."""


# -- what is said of it -----------------------------------------------------------------------------------------------


def study(tuned: Tuned) -> Study:
    """What was found, candidate by candidate."""
    outcome, goal = tuned.outcome, tuned.outcome.goal
    kept = f" with {' and '.join(check.text for check in goal.slo)}" if goal.slo else ""
    most = "most" if goal.metric.sign > 0 else "least"
    return Study(
        title=f"Settings of {tuned.scenario} for {goal.metric.name}",
        question=f"Which settings give {tuned.scenario} the {most} {goal.metric.name}{kept}?",
        findings=_findings(tuned),
        tables=[_table(tuned)],
        data={
            "metric": goal.metric.name,
            "maximise": goal.metric.sign > 0,
            "slo": [check.text for check in goal.slo],
            "confidence": goal.confidence,
            "confidence_each": outcome.confidence,
            "best": tuned.best,
            "sure_to_hold": outcome.sure,
            "won": outcome.won,
            "left": [tuned.settings(i) for i in outcome.left],
            "candidates": [_facts(tuned, i) for i in range(len(outcome.trials))],
        },
    )


def _findings(tuned: Tuned) -> list[str]:
    outcome, goal = tuned.outcome, tuned.outcome.goal
    intervals = f"all its intervals, each with {outcome.confidence:.6g}, hold at once with {goal.confidence:g}"
    method = f"Means over a candidate's replicates; behind: paired differences to the best; {intervals} (Bonferroni)."
    if outcome.best is None:
        failed = all(trial.verdict == FAILED for trial in outcome.trials)
        said = ["No candidate could be run." if failed else "No candidate keeps all conditions."]
        return [*said, method]
    said = [f"{tuned.called(outcome.best)}: {_verdict(tuned)}."]
    if outcome.second is not None:
        ahead = outcome.against(outcome.second)
        said.append(
            f"Against the second, {tuned.called(outcome.second)}: {_relative(ahead.mean, ahead.second)}, "
            f"from {_relative(ahead.low, ahead.second)} to {_relative(ahead.high, ahead.second)}, "
            f"by {ahead.pairs} pairs of replicates."
        )
    return [*said, method]


def _verdict(tuned: Tuned) -> str:
    outcome = tuned.outcome
    kept = "that keeps the conditions" if outcome.goal.slo else "of them"
    others = len(outcome.left) - 1
    if outcome.won:
        return f"the best {kept}, with a confidence of at least {outcome.goal.confidence:g}"
    sure = "" if outcome.sure else "; that it keeps the conditions is not sure"
    if not others:
        return f"the only one left{sure}"
    same = sum(outcome.against(i).none for i in outcome.left if i != outcome.best)
    if same == others:
        return f"the best {kept}, and {others} the same in every replicate{sure}"
    these = f", {same} of them the same in every replicate" if same else ""
    return f"the best mean {kept}, but {others} could not be told apart from it{these}{sure}"


def _relative(value: float, whole: float) -> str:
    return f"{value / abs(whole):+.2%}" if whole else f"{value:+.4g}"


def _table(tuned: Tuned) -> Table:
    goal, trials = tuned.outcome.goal, tuned.outcome.trials
    order = sorted(range(len(trials)), key=lambda i: _rank(tuned, i))
    metrics = list(dict.fromkeys([goal.metric.name, *(check.metric for check in goal.slo)]))
    rows = []
    for i in order:
        values = [trials[i].values(name) for name in metrics]
        cells = [shown(name, sum(of) / len(of) if of else None) for name, of in zip(metrics, values, strict=True)]
        rows.append((tuned.called(i), *cells, *_behind(tuned, i), str(len(trials[i].runs)), _said(tuned, i)))
    return Table("candidates", ("", *metrics, "behind", "from", "to", "replicates", "verdict"), rows)


def _rank(tuned: Tuned, i: int) -> tuple[int, float]:
    """The best one, those that are left, those that are worse, by how far they are behind; then the others."""
    outcome, trial = tuned.outcome, tuned.outcome.trials[i]
    if outcome.best is None or not trial.runs:
        return (IN, WORSE, BREAKS, FAILED).index(trial.verdict), 0.0
    return (IN, WORSE, BREAKS, FAILED).index(trial.verdict), -math.inf if i == outcome.best else outcome.behind(i)


def _behind(tuned: Tuned, i: int) -> tuple[str, str, str]:
    best = tuned.outcome.best
    if best in (None, i) or len(tuned.outcome.trials[i].runs) < 2:
        return "-", "-", "-"
    ahead = tuned.outcome.against(i)
    mean, low, high = (_relative(-end, ahead.first) for end in (ahead.mean, ahead.high, ahead.low))
    return mean, low, high


def _said(tuned: Tuned, i: int) -> str:
    outcome = tuned.outcome
    trial: Trial = outcome.trials[i]
    if trial.verdict in (BREAKS, FAILED):
        return f"{trial.verdict}: {trial.why}"
    if trial.verdict == WORSE:
        return "worse"
    if i == outcome.best:
        return "best" if outcome.won else "best mean"
    if outcome.best is not None and outcome.against(i).none:
        return "the same"
    return "not told apart" if outcome.best is not None else "may break a condition"


def _facts(tuned: Tuned, i: int) -> dict[str, Any]:
    outcome = tuned.outcome
    trial, goal = outcome.trials[i], outcome.goal
    names = dict.fromkeys([goal.metric.name, *(check.metric for check in goal.slo)])
    facts: dict[str, Any] = {"settings": tuned.settings(i), "verdict": _said(tuned, i), "replicates": len(trial.runs)}
    facts["values"] = {name: trial.values(name) for name in names}
    if outcome.best not in (None, i) and len(trial.runs) > 1:
        ahead = outcome.against(i)
        facts["behind_best"] = {"mean": -ahead.mean, "low": -ahead.high, "high": -ahead.low, "pairs": ahead.pairs}
    return facts
