"""A simulated session: its server, and the run that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cbsim.endpoint.tokenizer import Tokenizer
from cbsim.results.record import Record
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.scenario import Scenario, loops
from cbsim.server.result import SIMULATED
from cbsim.server.running import Session
from cbsim.server.served import session_of
from cbsim.serving.clocks import Clock
from cbsim.serving.simulated import SimulatedBackend
from cbsim.workload.generators import Workload


class Simulated:
    """The server of a session, as a run wants one: clients run it."""

    measured = False

    def __init__(self, backend: SimulatedBackend, scale: float) -> None:
        self.backend = backend
        self.facts: Mapping[str, Any] = {"device": SIMULATED, "time_scale": scale}

    @property
    def record(self) -> Record:
        return self.backend.machine.record

    @property
    def now_ns(self) -> int:
        return self.backend.machine.now_ns

    def run(self, on_step: Callable[[int], None]) -> None:
        del on_step
        raise AssertionError("a session is run by its clients")

    def files(self) -> Mapping[str, bytes]:
        return {}


@dataclass(frozen=True, slots=True)
class Opened:
    """A session that nobody has come to yet."""

    run: Session
    backend: SimulatedBackend


def open_session(scenario: Scenario, clock: Clock, tokenizer: Tokenizer, model: str | None, command: str) -> Opened:
    """The session of a scenario with one loop. Without a name of its own the `model` has the scenario's. Raises
    ScenarioError.
    """
    loop, *others = loops(scenario)
    if others:
        raise ScenarioError("loop.mode: got both, expected sync or async: a session has one loop", field="loop.mode")
    if scenario.kind.samples(scenario.scheduler) > 1:
        raise ScenarioError("scheduler: searches with several texts a request cannot be served", field="scheduler")
    made: list[SimulatedBackend] = []

    def serve(served: Scenario, loop: str, workload: Workload) -> Simulated:
        del workload
        made.append(SimulatedBackend(scenario, served, loop, clock, tokenizer, model or scenario.name))
        return Simulated(made[0], clock.scale)

    return Opened(session_of(scenario, loop, serve, command), made[0])
