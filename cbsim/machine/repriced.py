"""The steps of a simulated run, priced again with other costs: how far would its latencies move?

In a closed loop without think time the plans of a server hardly depend on how long its steps take. So the end of every
step moves by the sum of what the steps up to it take more, and latencies by differences of that: derivatives in all
terms of a cost model come from one run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import log2

import numpy as np
import numpy.typing as npt

from cbsim.cost.base import Cost
from cbsim.machine.simulate import Simulation
from cbsim.policy.plan import StepPlan
from cbsim.record import directory
from cbsim.record.columns import NS
from cbsim.record.tables import Steps, token_times
from cbsim.runs.assemble import cost_model
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

REPRICED = "repriced.json"
STEPS_AN_OCTAVE = 8  # decode batches of as many rows share a price in so many steps of doubled context
NEVER_NS = 1 << 62
Floats = npt.NDArray[np.float64]


class Prices:
    """The first of `costs`, which a machine goes by, with what the others say on the same steps noted in passing."""

    def __init__(self, costs: Sequence[Cost]) -> None:
        self._cost, self._others = costs[0], costs[1:]
        self.cpu_ns, self.launch_ns = self._cost.cpu_ns, self._cost.launch_ns
        self.more_launch_ns = np.array([other.launch_ns - self.launch_ns for other in self._others], float)
        self.own_ns: list[int] = []  # of each step
        self.more_ns: list[list[int]] = []  # of each step, by cost
        self._known: dict[tuple[int, int, int], list[int]] = {}

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: Sequence[int]) -> int:
        own, *more = [cost.lockstep_ns(plans, tokens) for cost in (self._cost, *self._others)]  # type: ignore[attr-defined]
        self.own_ns.append(own)
        self.more_ns.append([each - own for each in more])
        return int(own)

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        own, work = self._cost.gpu_ns(plan, tokens), plan.work
        alike = tokens, work.decodes, int(STEPS_AN_OCTAVE * log2(1 + work.decode_context))
        more = None if work.chunks else self._known.get(alike)
        if more is None:
            more = [other.gpu_ns(plan, tokens)[1] - own[1] for other in self._others]
            if not work.chunks:
                self._known[alike] = more
        self.own_ns.append(own[1])
        self.more_ns.append(more)
        return own


class Repriced(Simulation):
    """A simulated server whose steps are also priced by the costs of other scenarios: REPRICED has the seconds by which
    mean TTFT and TPOT would move with each.
    """

    def __init__(self, scenario: Scenario, loop: str, workload: Workload, others: Sequence[Scenario]) -> None:
        self._prices = Prices([cost_model(each) for each in (scenario, *others)])
        self._share = scenario.cost.contention.gpu
        super().__init__(scenario, loop, workload, self._prices)

    def files(self) -> Mapping[str, bytes]:
        table, steps = directory.contents(self.record)
        requests, ended_ns = token_times(table, steps), steps["update_end_ns"]
        if steps.server is not None:  # of servers in step all steps of a wave are one
            _, first = np.unique(steps["compute_start_ns"] + (steps["rows"] == 0) * NEVER_NS, return_index=True)
            steps = Steps(steps.table[first[: len(self._prices.own_ns)]])
            ended_ns = steps["compute_end_ns"]
        moved = np.vstack([np.zeros(len(self._prices.more_launch_ns)), self._moved_ns(steps)])
        done = requests.done
        arrived, first, last = (
            moved[np.searchsorted(ended_ns, at[done], "right")]
            for at in (requests.arrival_ns, requests.first_token_ns, requests.last_token_ns)
        )
        gaps = np.maximum(requests.generated[done] - 1, 1)[:, None]
        ttft, tpot = (first - arrived).mean(axis=0), ((last - first) / gaps).mean(axis=0)
        return {REPRICED: json.dumps({"ttft_s": (ttft / NS).tolist(), "tpot_s": (tpot / NS).tolist()}).encode()}

    def _moved_ns(self, steps: Steps) -> Floats:
        """Return how far the end of each step would move, by cost. A step follows the kernels of the one before it; if
        the device waited for its launch, the launch of the one before or the end of the one before that. One that is
        launched kernel by kernel may end with its last launch.
        """
        prices, starts, ends = self._prices, steps["compute_start_ns"], steps["compute_end_ns"]
        took, own = ends - starts, np.array(prices.own_ns)
        launched = took > own * (1 + self._share) + 0.5
        waited = launched | (starts > np.append(0, ends[:-1]))
        more = np.array(prices.more_ns, float).reshape(len(starts), -1)
        more *= (took / np.maximum(own, 1))[:, None]  # contention
        more[launched] = prices.more_launch_ns
        moved = np.zeros_like(more)
        at = 0
        for late in [*np.flatnonzero(waited).tolist(), len(starts)]:
            moved[at:late] = np.cumsum(more[at:late], axis=0) + (moved[at - 1] if at else 0.0)
            if late < len(starts):
                since = late - 1 if late and launched[late - 1] else late - 2
                moved[late] = more[late] + (moved[since] if since >= 0 else 0.0)
            at = late + 1
        return moved
