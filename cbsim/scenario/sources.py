"""A scenario as a caller has it: by name, in a file, or as fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from cbsim.scenario import scenario as scenarios
from cbsim.scenario.fields import ScenarioError, shown
from cbsim.scenario.scenario import Scenario


def scenario_of(source: str | Path | Mapping[str, Any] | Scenario, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario meant. Raises ScenarioError."""
    if isinstance(overrides, str) or not all(isinstance(override, str) for override in overrides):
        raise ScenarioError(f"overrides: got {shown(overrides)}, expected texts such as 'loop.mode=async'")
    if isinstance(source, Scenario):
        return scenarios.parse(source.model_dump(mode="json"), "scenario", overrides) if overrides else source
    if isinstance(source, Mapping):
        return scenarios.parse(deepcopy(dict(source)), "scenario", overrides)
    if isinstance(source, str | Path):
        return scenarios.load(source, overrides)
    raise ScenarioError(f"scenario: got {shown(source)}, expected a name, a path or fields", value=source)
