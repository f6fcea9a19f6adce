"""How much of a simulator's error is its scheduler, and how much its cost model?

The recorded vLLM runs are replayed by the exact policy and by the simplifications that simulators make, each with the
measured kernel tables and with a data-sheet roofline in their place. The exact policy is the one whose every decision
equals vLLM's on the golden traces; the cost models are the same for all.

    no prefix cache         every prompt, and every preempted request, is computed from its first token
    no preemption           the cache has no limit: nobody waits for blocks, nobody loses them
    static reservation      a request is admitted when its whole output has room, as in FasterTransformer or TGI
    one step early          a step sees every result and arrival before it is planned: the synchronous loop, free of
                            CPU cost and of its idle time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import Bars, Chart, Panel, series
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.proof.recorded import case as cases
from cbsim.proof.recorded.ablation import NO_CPU
from cbsim.proof.recorded.case import Case
from cbsim.proof.recorded.reenactment import recorded, replay
from cbsim.proof.recorded.score import MetricScore, scores
from cbsim.scenario import catalog
from cbsim.scenario.scenario import MOST_BLOCKS

RUNS = ("measured_vllm/cases/RTX4090__Llama-3.1-8B", "measured_vllm/cases/RTXPRO6000__Llama-3.1-8B")
EARLY = {"loop.mode": "sync", "cost.cpu": NO_CPU}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "exact vLLM 0.19": {},
    "no prefix cache": {"scheduler.enable_prefix_caching": False},
    "no preemption": {"kv_cache.num_blocks": MOST_BLOCKS},
    "static reservation": {"scheduler.reserve_output": True},
    "one step early": EARLY,
    "all but the limitless cache": {
        **EARLY,
        "scheduler.enable_prefix_caching": False,
        "scheduler.reserve_output": True,
    },
}
COSTS: Mapping[str, Mapping[str, Any]] = {"measured tables": {}, "roofline": {"cost": {"kind": "roofline"}}}


class PolicyRun(NamedTuple):
    """One run by one policy and one cost model."""

    run: str
    policy: str
    cost: str
    scores: Sequence[MetricScore]
    preemptions: int
    steps: int

    def error(self, metric: str) -> float:
        """Of the mean."""
        return next(score.error for score in self.scores if score.metric == metric and score.statistic in ("mean", ""))


def study() -> Study:
    """All runs by all policies and cost models. Raises ScenarioError if the runs are not there."""
    answers = [answer for place in RUNS for answer in _answers(cases.read(_folder(place)))]
    return Study(
        title="Scheduler or cost model: where a simulator's error comes from",
        question="How far off is each simplified scheduler on recorded vLLM runs, and how far a simpler cost model?",
        findings=_findings(answers),
        tables=[_table(run, [a for a in answers if a.run == run]) for run in dict.fromkeys(a.run for a in answers)],
        charts=[_chart(answers)],
        data={"answers": [{**a._asdict(), "scores": [[*s, s.error] for s in a.scores]} for a in answers]},
    )


def _folder(place: str) -> Path:
    return catalog.data(f"{place}/meta.json", "study schedulers").parent


def _answers(case: Case) -> list[PolicyRun]:
    runs = []
    for cost, instead in COSTS.items():
        for policy, changes in POLICIES.items():
            done = replay(case, case.scenario({**instead, **changes}))
            steps = sum(len(table) for table in done.steps)
            runs.append(
                PolicyRun(case.name, policy, cost, scores(done.served, recorded(case)), done.preemptions, steps)
            )
    return runs


def _table(run: str, answers: Sequence[PolicyRun]) -> Table:
    header = ("policy", "cost model", "TTFT mean", "TPOT mean", "E2E mean", "makespan", "preemptions")
    rows = [
        (a.policy, a.cost, *(f"{a.error(m):+.1%}" for m in ("ttft", "tpot", "e2e", "makespan")), f"{a.preemptions:,}")
        for a in answers
    ]
    return Table(run.replace("__", ", "), header, rows, "Errors against the recorded run.")


def _chart(answers: Sequence[PolicyRun]) -> Chart:
    panels = []
    for run in dict.fromkeys(answer.run for answer in answers):
        bars = []
        for number, cost in enumerate(COSTS):
            errors = np.array([100 * a.error("e2e") for a in answers if (a.run, a.cost) == (run, cost)])
            labels = [f"{error:+.1f}" for error in errors]
            bars.append(Bars(cost, np.arange(len(POLICIES)), errors, series(number), labels))
        reach = 1.25 * max(float(np.abs(bar.height).max()) for bar in bars)
        panels.append(
            Panel(bars, "", "error of mean E2E, %", run.replace("__", ", "), (), [*POLICIES], y_range=(-reach, reach))
        )
    says = (
        "Error of the mean E2E latency against the recorded run, by policy, with measured kernel tables and a roofline."
    )
    return Chart("schedulers", "Scheduler or cost model", says, panels)


def _findings(answers: Sequence[PolicyRun]) -> list[str]:
    said = []
    for run in dict.fromkeys(answer.run for answer in answers):
        mine = {(a.policy, a.cost): a.error("e2e") for a in answers if a.run == run}
        exact = mine["exact vLLM 0.19", "measured tables"]
        worst = max((p for p in POLICIES if p != "exact vLLM 0.19"), key=lambda p: abs(mine[p, "measured tables"]))
        said.append(
            f"{run.replace('__', ', ')}: mean E2E is {exact:+.1%} off with exact policy and measured tables, "
            f"{mine['exact vLLM 0.19', 'roofline']:+.1%} with the roofline instead of the tables, and "
            f"{mine[worst, 'measured tables']:+.1%} with the tables and the worst of the simpler schedulers ({worst})."
        )
    return said
