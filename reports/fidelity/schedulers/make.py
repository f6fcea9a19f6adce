"""The shares of a simulator's error that its scheduler and its cost model cause.

The recorded vLLM runs are replayed by the exact policy and by the simplifications that simulators make, each with the
measured kernel tables and with a data-sheet roofline in their place. The exact policy is the one whose every decision
equals vLLM's on the golden traces; the cost models are the same for all.

    no prefix cache         every prompt, and every preempted request, is computed from its first token
    no preemption           the cache has no limit: nobody waits for blocks, nobody loses them
    no preemption           the cache has no limit: no request waits for blocks, none is preempted
    one step early          a step sees every result and arrival before it is planned: the synchronous loop, free of
                            CPU cost and of its idle time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import Bars, Chart, Panel, series
from cbsim.draw.report import Table
from cbsim.measured.recorded import case as cases
from cbsim.measured.recorded.case import Case
from cbsim.measured.recorded.score import NO_CPU, MetricScore, recorded, replay, scores
from cbsim.scenario import catalog
from cbsim.scenario.scenario import MOST_BLOCKS
from reports import page

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
COSTS: Mapping[str, Mapping[str, Any]] = {
    "measured tables": {},
    "roofline": {"cost": {"kind": "roofline", "compute_efficiency": {}}},
}


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


def answers(case: Case) -> list[PolicyRun]:
    """A recorded run by all policies and cost models."""
    runs = []
    for cost, instead in COSTS.items():
        for policy, changes in POLICIES.items():
            done = replay(case, case.scenario({**instead, **changes}))
            steps = sum(len(table) for table in done.steps)
            made = scores(done.served, recorded(case))
            runs.append(PolicyRun(case.name, policy, cost, made, done.preemptions, steps))
    return runs


def table(answers: Sequence[PolicyRun]) -> Table:
    header = ("policy", "cost model", "TTFT mean", "TPOT mean", "E2E mean", "makespan", "preemptions")
    rows = [
        (a.policy, a.cost, *(f"{a.error(m):+.1%}" for m in ("ttft", "tpot", "e2e", "makespan")), f"{a.preemptions:,}")
        for a in answers
    ]
    return Table("", header, rows)


def chart(runs: Mapping[str, Sequence[PolicyRun]]) -> Chart:
    panels = []
    for name, of in runs.items():
        bars = []
        for number, cost in enumerate(COSTS):
            errors = np.array([100 * a.error("e2e") for a in of if a.cost == cost])
            labels = [f"{error:+.1f}" for error in errors]
            bars.append(Bars(cost, np.arange(len(POLICIES)), errors, series(number), labels))
        reach = 1.25 * max(float(np.abs(bar.height).max()) for bar in bars)
        title = name.replace("__", ", ")
        panels.append(Panel(bars, "", "error of mean E2E, %", title, (), [*POLICIES], y_range=(-reach, reach)))
    return Chart("schedulers", "Scheduler or cost model", "", panels)


def main() -> None:
    folders = [catalog.data(f"{path}/meta.json", "the study of schedulers").parent for path in RUNS]
    runs = {folder.name: answers(cases.read(folder)) for folder in folders}
    tables = {name.partition("__")[0]: table(of) for name, of in runs.items()}
    entries = [{**a._asdict(), "scores": [[*s, s.error] for s in a.scores]} for of in runs.values() for a in of]
    page.write(__file__, tables, [chart(runs)], {"answers": entries})


if __name__ == "__main__":
    main()
