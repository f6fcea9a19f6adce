"""The engine of a session: requests arrive while it runs, and sizes follow from limits instead of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbengine import build
from cbengine.build import Setup
from cbengine.content import Prompts
from cbengine.device import gpu
from cbengine.driver import Hooks, OnStep
from cbengine.errors import UsageError
from cbengine.load import Load
from cbengine.serving.post import Post, WokenClock
from cbengine.serving.reporter import Reporter
from cbsim.http.backend import longest_text
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload


def check(scenario: Scenario, setup: Setup) -> None:
    """Raise UsageError if a scenario or device cannot serve clients."""
    if scenario.kind.samples(scenario.scheduler) > 1:
        raise UsageError(f"scheduler.name: got {scenario.scheduler.name}, which searches: a stream has one text")
    if setup.device == "modelled":
        raise UsageError("--device: got modelled, which computes no tokens, expected inline, process or cuda")


class EngineServer:
    """An engine that serves the requests of its post, behind a session's server interface. `workload` is empty. Raises
    the errors of `build.assembled`.
    """

    measured = True

    def __init__(
        self, setup: Setup, post: Post, reporter: Reporter, scenario: Scenario, loop: str, workload: Workload
    ) -> None:
        assert not workload.total
        longest, blocks = longest_text(scenario, loop), scenario.options(loop).num_blocks
        most = Load(requests=blocks, prompt=longest - 1, answer=longest - 1, longest=longest)  # a block a request
        plan = build.executor_plan(scenario, loop, [], setup, most)
        self.clock, self.start_ns = WokenClock(post), 0
        self.engine, self._device = build.assembled(
            scenario,
            loop,
            plan,
            setup,
            reporter,
            Prompts(scenario.seed, plan.architecture.vocab),
            Hooks(reporter.begin, reporter.on_plan, reporter.on_token, reporter.feed),
            clock=self.clock,
        )
        reporter.serve(self.engine)
        self.record, self._on_gpu = self.engine.record, setup.device == "cuda"
        self._facts: dict[str, Any] = {
            **({"gpu_before": gpu.state()} if self._on_gpu else {}),
            "engine": "cbengine",
            "weights": str(setup.weights) if setup.weights else "random",
            "dtype": scenario.model.dtype,
            "sampling": "as requests ask",
        }

    @property
    def now_ns(self) -> int:
        return self.engine.now_ns

    @property
    def facts(self) -> Mapping[str, Any]:
        return {**self._device.facts, **self._facts}

    def run(self, on_step: OnStep) -> None:
        """Serve until the post is closed and everything has ended; times count from `start_ns`. Raises DeadlockError,
        ServerError. All cache blocks are free after it.
        """
        try:
            self.engine.run(on_step, self.start_ns)
            self.engine.check_returned()
        finally:
            if self._on_gpu:
                self._facts["gpu_after"] = gpu.state()
            self.engine.close()

    def files(self) -> Mapping[str, bytes]:
        """Return no files: a session keeps the log of its requests, not their text."""
        return {}
