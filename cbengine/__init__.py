"""A compact PyTorch engine for continuous batching that runs the simulator's own policies on a real device.

    result = cbengine.run("tiny_cpu", "inline")

Submodules are imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from cbengine.build import DeviceName
    from cbsim.runs.result import Result, Results
    from cbsim.scenario.overrides import Changes
    from cbsim.scenario.scenario import Scenario

__all__ = ["run"]


def run(
    scenario: str | Path | Mapping[str, Any] | Scenario,
    device: DeviceName | None = None,
    *,
    changes: Changes = (),
    requests: Any = None,
    window_s: tuple[float, float] | None = None,
    weights: str | Path | None = None,
    draft_weights: str | Path | None = None,
    tensor_parallel: int | None = None,
) -> Result | Results:
    """Serve a scenario on a device and return what `cbsim.run` does, measured. Nothing is written.

    `device` is inline, process, modelled or cuda; by default cuda if there is a GPU, else process. `weights` is a local
    Hugging Face folder, `draft_weights` that of a model that drafts; without it weights are random.
    `tensor_parallel` ranks share every layer, if given in place of the scenario's cost.tensor_parallel. `changes`,
    `requests` and `window_s` are those of `cbsim.run`.
    Raises ScenarioError, UsageError.
    """
    from cbengine import build
    from cbengine.errors import UsageError
    from cbengine.serving import fleet
    from cbsim.runs import running
    from cbsim.scenario.scenario import scenario_of

    chosen = device or build.default_device()
    if chosen not in get_args(build.DeviceName):
        bound = f"expected one of {', '.join(get_args(build.DeviceName))}"
        raise UsageError(f"device: got {chosen!r}, {bound}", field="device", value=chosen, bound=bound)
    target, drafter = (None if folder is None else Path(folder) for folder in (weights, draft_weights))
    setup = build.Setup(device=chosen, weights=target, draft_weights=drafter)
    command = f"python -m cbengine replay scenario.resolved.yaml --device {chosen}"
    ranks = {} if tensor_parallel is None else {"cost.tensor_parallel": tensor_parallel}
    ready = fleet.adapted(scenario_of(scenario_of(scenario, changes), ranks), setup, open_ended=requests is not None)
    return running.answer(ready, fleet.maker(setup), command, requests, window_s)
