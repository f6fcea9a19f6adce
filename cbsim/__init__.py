"""Simulator of continuous batching: scheduling, KV blocks, chunked prefill and CPU/GPU overlap.

    scenario = cbsim.load("8k_b32", "loop.mode=async")
    result = cbsim.run(scenario)
    print(result)

Nothing is loaded before it is used, nothing is written before `save`, nothing is remembered between two calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cbsim.results.checks import CheckError
    from cbsim.results.directory import RunError
    from cbsim.scenario.errors import UserError
    from cbsim.scenario.fields import ScenarioError
    from cbsim.scenario.scenario import Scenario
    from cbsim.server.result import Result, Results
    from cbsim.sweeps.capacity import Capacity
    from cbsim.sweeps.sweep import Swept
    from cbsim.sweeps.tune import Tuned

__all__ = [
    "Capacity",
    "CheckError",
    "Result",
    "Results",
    "RunError",
    "Scenario",
    "ScenarioError",
    "Swept",
    "Tuned",
    "UserError",
    "capacity",
    "load",
    "read",
    "run",
    "sweep",
    "tune",
]
HOMES = {
    "Capacity": "cbsim.sweeps.capacity",
    "CheckError": "cbsim.results.checks",
    "Result": "cbsim.server.result",
    "Results": "cbsim.server.result",
    "RunError": "cbsim.results.directory",
    "Scenario": "cbsim.scenario.scenario",
    "ScenarioError": "cbsim.scenario.fields",
    "Swept": "cbsim.sweeps.sweep",
    "Tuned": "cbsim.sweeps.tune",
    "UserError": "cbsim.scenario.errors",
}
COMMAND = "python -m cbsim run scenario.resolved.yaml"  # in the run directory


def load(source: str | Path | Mapping[str, Any] | Scenario, *overrides: str) -> Scenario:
    """A scenario by its name, from a file, or from the fields themselves; overrides are those of `--set`, such as
    `loop.mode=async`. Raises ScenarioError.
    """
    from cbsim.scenario.sources import scenario_of

    return scenario_of(source, overrides)


def run(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    *,
    requests: Any = None,
    window_s: tuple[float, float] | None = None,
) -> Result | Results:
    """Simulate a scenario in memory: a Result, or with `loop.mode: both` the Results of both loops.

    `requests` are served in place of the scenario's workload: a data frame or a table of Arrow with columns arrival_s,
    prompt_tokens, output_tokens, and if wanted max_tokens, priority and id. Latencies are of the requests that arrive
    in `window_s`. Raises ScenarioError.
    """
    from cbsim.machine.simulation import Simulation
    from cbsim.server import running

    return running.answer(load(scenario), Simulation, COMMAND, requests, window_s)


def read(path: str | Path) -> Result:
    """The Result of a run directory, simulated or measured. Raises RunError."""
    from cbsim.server import result

    return result.read(path)


def sweep(
    source: str | Path | Mapping[str, Any], *, store: str | Path = "sweeps", jobs: int = 1, ray: str | None = None
) -> Swept:
    """Make the runs of a sweep file, or of its fields, that `store` lacks: in this process, or in `jobs` others. Then a
    script stands under `if __name__ == "__main__":`, since each of them imports it. Or on the Ray cluster at the
    address `ray`. What comes back has a `table` with a row a point. Raises ScenarioError, RunError.
    """
    from cbsim.sweeps import sweep as sweeps
    from cbsim.sweeps import sweep_file
    from cbsim.sweeps.hands import hands

    executor = hands(jobs, ray)
    return sweeps.Sweep(*sweep_file.given(source), Path(store)).run(executor)


def capacity(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    slo: Sequence[str] = (),
    *,
    goodput: str | None = None,
    over: str = "workload.arrivals.rate_per_s",
    store: str | Path = "sweeps",
    jobs: int = 1,
    ray: str | None = None,
    **terms: float,
) -> Capacity:
    """How much load a server of one loop holds within conditions such as `ttft.p99<=2s`, and with a `goodput` such as
    `99%` of the requests within the scenario's slo. `terms` are confidence, width, replicates and warmup as those of
    the command. `store`, `jobs` and `ray` are those of `sweep`. Raises ScenarioError, CheckError, RunError.
    """
    from contextlib import closing

    from cbsim.sweeps import identity, search
    from cbsim.sweeps import terms as asked
    from cbsim.sweeps.hands import hands
    from cbsim.sweeps.runs import Runs
    from cbsim.sweeps.store import Store

    loaded = load(scenario)
    wanted = asked.terms(loaded, slo, goodput, **terms)
    with closing(hands(jobs, ray)) as executor:
        return search.search(loaded, over, wanted, Runs(Store(Path(store), identity.code()), executor))


def tune(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    knobs: Mapping[str, Sequence[Any]],
    metric: str,
    *,
    slo: Sequence[str] = (),
    changes: Sequence[str] = (),
    replicates: int = 20,
    confidence: float = 0.95,
    store: str | Path = "sweeps",
    jobs: int = 1,
    ray: str | None = None,
) -> Tuned:
    """Search the values of `knobs` for the best `metric`, such as `goodput` or `min:ttft.p99`, with all conditions of
    `slo` kept. `changes` are overrides as for `load`; `store`, `jobs` and `ray` are those of `sweep`. What comes back
    prints as what is known of each candidate. Raises ScenarioError, CheckError, RunError.
    """
    from cbsim.sweeps import metric as metrics
    from cbsim.sweeps import tune as tuning
    from cbsim.sweeps.hands import hands
    from cbsim.sweeps.racing import Goal

    for name, texts in (("slo", slo), ("changes", changes)):
        metrics.check_texts(name, texts)
    conditions = [metrics.condition(text, "slo") for text in slo]
    goal = Goal(metrics.metric(metric, f"metric {metric!r}"), conditions, confidence, replicates)
    candidates = tuning.candidates(scenario, changes, knobs, goal)
    return tuning.tune(candidates, goal, Path(store), hands(jobs, ray))


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
