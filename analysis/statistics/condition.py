"""Conditions on how B differs from A: `tpot.p50>+5%`, `ttft.p99>+20ms`, `gpu_active<-2pt`, `makespan>±1%`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.statistics.compare import LEVEL, MetricDifference, change_text, signed
from cbsim.errors import CheckError
from cbsim.metrics.catalogue import METRICS
from cbsim.metrics.checks import METRIC, NUMBER, OPERATORS, TIMES, bounded, named
from cbsim.metrics.terminal import shown

OPTION = "--fail-if"
FORM = re.compile(rf"{METRIC}(\+-|±|[+-]?)\s*{NUMBER}")
RELATIVE, POINTS = "%", "pt"
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a change; `rule` is the user's text. `bound` is on B / A - 1 if `relative`, else on B - A.

    With `magnitude` it is on the absolute value of the change.
    """

    rule: str
    metric: str
    compare: str
    bound: float
    relative: bool
    magnitude: bool

    def change(self, difference: MetricDifference) -> float:
        """Return the value that is compared with the bound. A relative change from 0 to something is infinite."""
        value = difference.relative if self.relative else difference.delta
        value = math.copysign(math.inf, difference.delta) if value is None else value
        return abs(value) if self.magnitude else value

    def range(self, difference: MetricDifference) -> Range | None:
        """Return the interval of that value, None if there is none."""
        both = difference.interval
        interval = both and (both.relative if self.relative else both.delta)
        if not interval or not self.magnitude:
            return interval
        ends = sorted(abs(edge) for edge in interval)
        return (0.0 if interval[0] <= 0 <= interval[1] else ends[0]), ends[1]

    def meets(self, change: float) -> bool:
        """Whether a change is beyond the bound."""
        return OPERATORS[self.compare](change, self.bound)


def parse(rule: str) -> Condition:
    """Parse METRIC OPERATOR CHANGE, for example tpot.p50>+5%. Raises CheckError.

    `%` is relative to A, also for shares; `pt` are points of a share; seconds take ns, us, ms, s or min; other numbers
    none. +- or ± before the number bounds the size of the change in either direction. No sign is +.
    """
    match, source = FORM.fullmatch(rule), f"{OPTION} {rule!r}"
    if not match:
        raise CheckError(f"{source}: expected METRIC>CHANGE, for example tpot.p50>+5%", value=rule)
    name, compare, sign, number, unit = match.groups()
    metric = named(name, source)
    bound = bounded(metric, number, unit, _allowed(metric), source)
    return Condition(rule, metric, compare, -bound if sign == "-" else bound, unit == RELATIVE, sign in ("+-", "±"))


def _allowed(metric: str) -> dict[str, float]:
    """Return a change's units and their size in the metric's own; a bare number is a unit only if unambiguous."""
    return {RELATIVE: 0.01} | {"s": TIMES, "share": {POINTS: 0.01}}.get(METRICS[metric].unit, {"": 1.0})


def verdict(condition: Condition, differences: Sequence[MetricDifference], *, sure: bool = False) -> tuple[bool, str]:
    """Return (failed, a line that states it). The change itself decides; a metric that either run lacks fails.

    With `sure` all of the interval must be beyond the bound; without an interval, the change decides.
    """
    difference = next((difference for difference in differences if difference.metric == condition.metric), None)
    if difference is None:
        return True, f"FAILED  {condition.rule}: not both runs have {condition.metric}"
    change, interval = condition.change(difference), condition.range(difference)
    beyond = condition.meets(change)
    edges = [condition.meets(edge) for edge in interval or ()]
    failed = all([beyond, *edges]) if sure else beyond
    line = f"{'FAILED' if failed else 'ok    '}  {condition.rule}: {_facts(condition, difference, interval)}"
    if any(edge != beyond for edge in edges):
        line += f"; not certain: the interval reaches {'back over' if beyond else 'over'} the bound"
    return failed, line


def _facts(condition: Condition, difference: MetricDifference, interval: Range | None) -> str:
    a, b = (shown(value, difference.unit) for value in (difference.a, difference.b))
    if condition.relative and difference.relative is not None:
        change = f"{difference.relative:+z.2%}".replace("%", " %")
    else:
        change = change_text(difference) if condition.relative else signed(difference.delta, difference.unit)
    extent = "no relative interval: A may be 0" if difference.interval else difference.method
    if interval and condition.relative:
        extent = f"{LEVEL} interval {' .. '.join(f'{end * 100:+z.2f}' for end in interval)} %"
    elif interval:
        extent = f"{LEVEL} interval {' .. '.join(signed(end, difference.unit) for end in interval)}"
    return f"{difference.metric} is {a}, then {b}: {change} ({extent}{', few samples' * difference.few})"
