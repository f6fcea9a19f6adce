"""What is asked of a capacity: conditions, and how sure an answer has to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cbsim.results.checks import Check, CheckError, parse
from cbsim.scenario.fields import ScenarioError, shown
from cbsim.scenario.scenario import Scenario

FIRST = 4
"""Replicates of the first look; each look has twice as many as the one before."""
MOST_PROBES = 20
"""Loads that a search looks at. The error is spread over them."""
SHARE = "slo.attainment"


@dataclass(frozen=True, slots=True)
class Terms:
    """What has to hold, and how sure that has to be. `replicates` of a load are the most; `width` is how far apart, by
    ratio less 1, the loads that hold and fail may be; `warmup` as in Task. Raises ScenarioError.
    """

    conditions: tuple[Check, ...]
    confidence: float = 0.95
    width: float = 0.05
    replicates: int = 32
    warmup: float = 0.1

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ScenarioError("capacity: no condition, expected --slo or --goodput")
        bounds = {"confidence": (0.5, 0.9999), "width": (0.001, 1), "replicates": (2, 10_000), "warmup": (0, 0.9)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                bound = f"must be from {least:g} to {most:g}"
                raise ScenarioError(f"{name}: got {value:g}, {bound}", field=name, value=value, bound=bound)

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many replicates it is looked whether a load is decided."""
        sizes, size = [], FIRST
        while size < self.replicates:
            sizes.append(size)
            size *= 2
        return (*sizes, self.replicates)

    @property
    def tail(self) -> float:
        """How often an interval may lie wholly beside what is meant, on either side: looks, conditions and loads that
        a search can have share the error, so that no decision of a search is wrong with probability `confidence`.
        """
        return (1 - self.confidence) / (MOST_PROBES * len(self.looks) * len(self.conditions))


def terms(scenario: Scenario, slo: Sequence[str], goodput: str | None, **others: Any) -> Terms:
    """What is asked of a scenario of one loop: conditions on metrics, the share of requests that keep its `slo`, and
    `others` as in Terms. Raises CheckError, ScenarioError.
    """
    if isinstance(slo, str):
        raise ScenarioError(f"slo: got {shown(slo)}, expected a list of conditions", field="slo", value=slo)
    checks = [parse(text, "--slo") for text in slo]
    if goodput is not None:
        checks.append(_goodput(goodput))
    bounds = scenario.slo.model_dump(exclude={"preset"}, exclude_none=True)
    needing = [check.text for check in checks if check.metric.startswith("slo.")]
    if needing and not bounds:
        text = "has no slo; expected its ttft_s, tpot_s, e2e_s or preset, such as --set slo.ttft_s=2"
        raise ScenarioError(f"{needing[0]}: the scenario {scenario.name} {text}", field="slo")
    if scenario.loop.mode == "both":
        bound = "a capacity is that of one loop, sync or async"
        raise ScenarioError(f"loop.mode: got both; {bound}", field="loop.mode", value="both", bound=bound)
    return Terms(tuple(checks), **others)


def _goodput(text: str) -> Check:
    """A share of requests as a condition. That all of them do can never be sure."""
    check = parse(f"{SHARE}>={text}", "--goodput")
    if not 0 < check.bound < 1:
        bound = "must be > 0 and < 1, such as 99%"
        raise CheckError(f"--goodput {text}: got {check.bound:g}, {bound}", field=SHARE, value=text, bound=bound)
    return check
