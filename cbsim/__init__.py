"""A simulator of continuous batching: scheduling, KV blocks, chunked prefill and CPU/GPU overlap.

    scenario = cbsim.load("8k_b32", {"loop.mode": "async"})
    result = cbsim.run(scenario)
    print(result)

Nothing is loaded before it is used, nothing is written before `save`, no state is kept between two calls. A package
named like a function of this module (`run`, `sweep`, `read`) would shadow it once it is imported, so the rooms are
called `runs` and `sweeps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbsim.collector import no_collections

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cbsim.errors import CheckError, RunError, ScenarioError, UserError
    from cbsim.runs.result import Result, Results
    from cbsim.scenario.overrides import Changes
    from cbsim.scenario.scenario import Scenario
    from cbsim.search.capacity import Capacity
    from cbsim.search.probe import Probe
    from cbsim.search.recommended import Recommended
    from cbsim.search.tune import Tuned
    from cbsim.sweeps.sweep import Swept

__all__ = ["Capacity", "CheckError", "Recommended", "Result", "Results", "RunError", "Scenario", "ScenarioError"]
__all__ += ["Swept", "Tuned", "UserError", "capacity", "load", "read", "recommend", "run", "sweep", "tune"]
HOMES = {
    "Capacity": "cbsim.search.capacity",
    "Recommended": "cbsim.search.recommended",
    "Scenario": "cbsim.scenario.scenario",
    "Swept": "cbsim.sweeps.sweep",
    "Tuned": "cbsim.search.tune",
    **dict.fromkeys(("Result", "Results"), "cbsim.runs.result"),
    **dict.fromkeys(("CheckError", "RunError", "ScenarioError", "UserError"), "cbsim.errors"),
}
COMMAND = "python -m cbsim run scenario.resolved.yaml"  # in the run directory


@no_collections()
def load(source: str | Path | Mapping[str, Any] | Scenario, *changes: Mapping[str, Any] | str) -> Scenario:
    """Return a scenario by name, from a file or from fields, with changes of its fields: `{"loop.mode": "async"}`, or
    texts as of `--set`. Raises ScenarioError.
    """
    from cbsim.scenario.scenario import scenario_of

    return scenario_of(source, changes)


@no_collections()
def run(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    changes: Changes = (),
    *,
    requests: Any = None,
    window_s: tuple[float, float] | None = None,
) -> Result | Results:
    """Simulate a scenario in memory, with changes of its fields such as `{"loop.mode": "async"}`: a Result, or with
    `loop.mode: both` the Results of both loops. `requests` are served in place of the scenario's workload: a data frame
    or a table of Arrow with columns arrival_s, prompt_tokens, output_tokens, and optionally max_tokens, priority and
    id. Latencies are of the requests that arrive in `window_s`. Raises ScenarioError.
    """
    from cbsim.machine.simulate import Simulation
    from cbsim.runs import running
    from cbsim.scenario.scenario import scenario_of

    return running.answer(scenario_of(scenario, changes), Simulation, COMMAND, requests, window_s)


def read(path: str | Path) -> Result:
    """Read the Result of a run directory, simulated or measured. Raises RunError."""
    from cbsim.runs import result

    return result.read(path)


def sweep(
    source: str | Path | Mapping[str, Any],
    changes: Changes = (),
    *,
    store: str | Path = "sweeps",
    jobs: int = 1,
    ray: str | None = None,
) -> Swept:
    """Make the runs of a sweep file, or of its fields, that `store` lacks: in this process, in `jobs` others, or on the
    Ray cluster at the address `ray`. Other processes import the calling script, so its code must be under
    `if __name__ == "__main__":`. `changes` are those of `run`, at all points. The result's `table` has a row a point.
    Raises ScenarioError, RunError.
    """
    from cbsim.sweeps.sweep import executor, opened

    workers = executor(jobs, ray)
    return opened(source, changes, Path(store)).run(workers)


def capacity(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    slo: Sequence[str] = (),
    *,
    changes: Changes = (),
    goodput: str | None = None,
    over: str = "rate_per_s",
    confidence: float = 0.95,
    width: float = 0.05,
    replicates: int = 32,
    warmup: float = 0.1,
    draws: int = 0,
    progress: Callable[[Probe], object] = lambda _: None,
    store: str | Path = "sweeps",
    jobs: int = 1,
    ray: str | None = None,
) -> Capacity:
    """Find the load that a server of one loop sustains within conditions such as `ttft.p99<=2s`, and with a `goodput`
    such as `99%` of the requests within the scenario's slo. `over` is a number of the workload, by default its rate,
    that of a trace too. `progress` is called with each load as it is made: `print` shows a line. `confidence` to
    `draws` are as in the command, `changes` those of `run`; `store`, `jobs` and `ray` are those of `sweep`. Raises
    ScenarioError, CheckError, RunError.
    """
    from contextlib import closing

    from cbsim.scenario.scenario import scenario_of
    from cbsim.search import capacity, probe
    from cbsim.sweeps.store import Runs, Store
    from cbsim.sweeps.sweep import executor

    loaded = scenario_of(scenario, changes)
    precision = {"confidence": confidence, "width": width, "replicates": replicates, "warmup": warmup, "draws": draws}
    required = probe.terms(loaded, slo, goodput, **precision)
    with closing(executor(jobs, ray)) as workers:
        return capacity.search(loaded, over, required, Runs(Store(Path(store)), workers), progress)


def tune(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    knobs: Mapping[str, Sequence[Any]],
    metric: str,
    *,
    slo: Sequence[str] = (),
    changes: Changes = (),
    replicates: int = 20,
    confidence: float = 0.95,
    draws: int = 0,
    store: str | Path = "sweeps",
    jobs: int = 1,
    ray: str | None = None,
) -> Tuned:
    """Search the values of `knobs` for the best `metric`, such as `goodput` or `min:ttft.p99`, with all conditions of
    `slo` kept. `changes` are those of `run`; `store`, `jobs` and `ray` are those of `sweep`. The result prints
    as a table of the candidates. Raises ScenarioError, CheckError, RunError.
    """
    from cbsim.metrics import checks
    from cbsim.scenario.fields import check_strings
    from cbsim.search import tune as tuning
    from cbsim.search.racing import Goal
    from cbsim.sweeps.store import Runs, Store
    from cbsim.sweeps.sweep import executor

    check_strings("slo", slo)
    conditions = checks.parse_all(slo, "slo", sweep=True)
    goal = Goal(checks.objective(metric, f"metric {metric!r}"), conditions, confidence, replicates, draws)
    candidates = tuning.candidates(scenario, changes, knobs, goal)
    return tuning.tune(candidates, goal, Runs(Store(Path(store)), executor(jobs, ray)))


def recommend(
    model: str,
    load: str | Path | Mapping[str, Any],
    slo: Sequence[str],
    cards: Sequence[str],
    *,
    tensor: Sequence[int] = (1, 2, 4, 8),
    knobs: Mapping[str, Sequence[Any]] | None = None,
    most_gpus: int = 64,
    apart_gb_s: float | None = None,
    changes: Changes = (),
    confidence: float = 0.95,
    replicates: int = 20,
    store: str | Path = "sweeps",
    jobs: int = 1,
    ray: str | None = None,
) -> Recommended:
    """Find which cards, how many, and with which settings serve a load within the conditions of `slo` at the least
    price. `load` is a scenario, or a workload's fields or their file; `prices` are those of an hour of a card, where
    its file has none or another. With `apart_gb_s` prefill and decode are tried apart, too, over NICs of that rate. The
    rest is as in the command and in `tune`. The result prints as a ranked table.
    Raises ScenarioError, CheckError, RunError.
    """
    from cbsim.scenario.fields import check_strings
    from cbsim.search import recommend as searching
    from cbsim.search import recommended
    from cbsim.sweeps.store import Runs, Store
    from cbsim.sweeps.sweep import executor

    check_strings("slo", slo)
    check_strings("cards", cards)
    sizing = searching.sizing(model, load, changes, most_gpus, apart_gb_s)
    of = searching.candidates(sizing, cards, tensor, knobs or {})
    terms = searching.terms(of, slo, confidence=confidence, replicates=replicates)
    return recommended.recommend(of, terms, Runs(Store(Path(store)), executor(jobs, ray)))


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
