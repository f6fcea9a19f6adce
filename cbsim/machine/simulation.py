"""The simulated server, as a run wants a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cbsim.machine import simulate
from cbsim.scenario.scenario import Scenario
from cbsim.server.result import SIMULATED
from cbsim.workload.generators import Workload


class Simulation:
    """A server whose clock is simulated."""

    measured = False

    def __init__(self, scenario: Scenario, loop: str, workload: Workload) -> None:
        self._machine = simulate.machine(scenario, loop, workload)
        self.record = self._machine.record
        self.facts: Mapping[str, object] = {"device": SIMULATED}

    @property
    def now_ns(self) -> int:
        return self._machine.now_ns

    def run(self, on_step: Callable[[int], None]) -> None:
        simulate.run(self._machine, on_step)

    def files(self) -> Mapping[str, bytes]:
        return {}
