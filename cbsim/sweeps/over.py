"""The field of a workload that a capacity is sought over: its values, from less load to more."""

from __future__ import annotations

import json
import math
from typing import Any

from cbsim.scenario.fields import ScenarioError, cut, near, shown
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.sources import scenario_of

RATE = "workload.arrivals.rate_per_s"
LESS_IS_MORE = ("workload.time_scale", "workload.arrivals.think_s", "workload.arrivals.burstiness")
"""Fields that mean less load when they grow. With all others load rises."""

Value = float  # of the field; whole ones are ints


class Over:
    """A number of a scenario's workload. Raises ScenarioError if it is none, or none that can be doubled."""

    def __init__(self, scenario: Scenario, field: str) -> None:
        self.field, self.falls, self._base = field, field in LESS_IS_MORE, scenario
        value = _found(scenario.model_dump(mode="json"), field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ScenarioError(f"--over {field}: got {shown(value)}, expected a number", field=field, value=value)
        if value <= 0:
            raise ScenarioError(f"--over {field}: got {value:g}, must be > 0", field=field, value=value, bound="> 0")
        self.start: Value = value

    @property
    def whole(self) -> bool:
        """Are its values whole numbers?"""
        return isinstance(self.start, int)

    def scenario(self, value: Value, replicate: int) -> Scenario:
        """The one with that value and that seed after the scenario's own. Raises ScenarioError."""
        changes = [f"{self.field}={json.dumps(value)}", f"seed={self._base.seed + replicate}"]
        return scenario_of(self._base, changes)

    def load(self, value: Value) -> float:
        """Larger where there is more to do."""
        return 1 / value if self.falls else value

    def times(self, value: Value, factor: float) -> Value | None:
        """The value with `factor` times the load; None if there is none."""
        scaled = self._rounded(value / factor if self.falls else value * factor)
        return scaled if scaled > 0 and scaled != value else None

    def between(self, low: Value, high: Value) -> Value | None:
        """The middle of the two by ratio; None if nothing lies between."""
        middle = self._rounded(math.sqrt(low * high))
        return middle if min(low, high) < middle < max(low, high) else None

    def ratio(self, low: Value, high: Value) -> float:
        """How many times the load of `low` that of `high` is."""
        return self.load(high) / self.load(low)

    def _rounded(self, value: float) -> Value:
        return round(value) if self.whole else float(f"{value:.6g}")


def _found(scenario: dict[str, Any], field: str) -> Any:
    """The value of a dotted field. Raises ScenarioError if there is none or it is no load."""
    head, *rest = field.split(".")
    if head != "workload" or not rest:
        text = f"expected a number of the workload, such as {RATE}"
        raise ScenarioError(f"--over {cut(field)}: {text}", field=field, bound=text)
    path, part = head, scenario[head]
    for name in rest:
        if not isinstance(part, dict) or name not in part:
            known = list(part) if isinstance(part, dict) else []
            said = f"; it has {', '.join(known)}" if known else ""
            text = f"{path} has no {cut(name, 60)}{near(name, known) or said}"
            raise ScenarioError(f"--over {cut(field)}: {text}", field=field, value=name)
        path, part = f"{path}.{name}", part[name]
    return part
