"""Conditions on how B differs from A: `tpot.p50>+5%`, `ttft.p99>+20ms`, `gpu_active<-2pt`, `makespan>±1%`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.statistics.compare import LEVEL, MetricDifference, change_text, signed, unit
from cbsim.results.checks import OPERATORS, CheckError, named
from cbsim.results.checks import UNITS as TIMES
from cbsim.results.terminal import shown

OPTION = "--fail-if"
FORM = re.compile(
    r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|<|>)\s*(\+-|±|[+-]?)\s*(inf|nan|[\d.][\d.eE+-]*?)\s*([A-Za-z%]*)\s*"
)
RELATIVE, POINTS = "%", "pt"
SECONDS = {name: scale for name, scale in TIMES.items() if name not in ("", RELATIVE)}
Range = tuple[float, float]


class ConditionError(ValueError):
    """A condition that cannot be understood; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; `text` is what the user wrote. `bound` is on B / A - 1 if `relative`, else on B - A.

    With `magnitude` it is on the absolute value of the change.
    """

    text: str
    metric: str
    compare: str
    bound: float
    relative: bool
    magnitude: bool

    def change(self, difference: MetricDifference) -> float:
        """What the bound is on. From 0 to something is infinitely much, relatively."""
        value = difference.relative if self.relative else difference.delta
        value = math.copysign(math.inf, difference.delta) if value is None else value
        return abs(value) if self.magnitude else value

    def range(self, difference: MetricDifference) -> Range | None:
        """Its interval, None if there is none."""
        both = difference.interval
        interval = both and (both.relative if self.relative else both.delta)
        if not interval or not self.magnitude:
            return interval
        ends = sorted(abs(edge) for edge in interval)
        return (0.0 if interval[0] <= 0 <= interval[1] else ends[0]), ends[1]

    def meets(self, change: float) -> bool:
        """Is a change beyond the bound?"""
        return OPERATORS[self.compare](change, self.bound)


def parse(text: str) -> Condition:
    """Understand METRIC OPERATOR CHANGE, for example tpot.p50>+5%. Raises ConditionError.

    `%` is relative to A, also for shares; `pt` are points of a share; seconds take ns, us, ms, s or min; other numbers
    none. +- or ± before the number bounds the size of the change in either direction. No sign is +.
    """
    match = FORM.fullmatch(text)
    if not match:
        raise ConditionError(f"{OPTION} {text!r}: expected METRIC>CHANGE, for example tpot.p50>+5%")
    name, compare, sign, number, given = match.groups()
    metric = _metric(name, text)
    bound = _number(number, text) * _scale(metric, given, text)
    return Condition(text, metric, compare, -bound if sign == "-" else bound, given == RELATIVE, sign in ("+-", "±"))


def _number(text: str, condition: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConditionError(f"{OPTION} {condition!r}: {text!r} is not a finite number")
    return value


def _scale(metric: str, given: str, text: str) -> float:
    """What one of the given unit is in the metric's own; a bare number only where it can mean but one thing."""
    if given == RELATIVE:
        return 0.01
    own = unit(metric)
    allowed = SECONDS if own == "s" else {POINTS: 0.01} if own.endswith("share") else {"": 1.0}
    if given not in allowed:
        names = ", ".join([RELATIVE, *(name or "none" for name in allowed)])
        raise ConditionError(f"{OPTION} {text!r}: {f'unit {given!r}' if given else 'no unit'}, {metric} takes {names}")
    return allowed[given]


def _metric(name: str, text: str) -> str:
    """The metric that is meant, by the names of `--check`."""
    try:
        return named(name, f"{OPTION} {text!r}")
    except CheckError as error:
        raise ConditionError(str(error)) from None


def verdict(condition: Condition, differences: Sequence[MetricDifference], *, sure: bool = False) -> tuple[bool, str]:
    """(failed, a line that says so). The change itself decides; a metric that either run does not have fails.

    With `sure` all of the interval must be beyond the bound; where there is none, the change decides.
    """
    difference = next((difference for difference in differences if difference.metric == condition.metric), None)
    if difference is None:
        return True, f"FAILED  {condition.text}: not both runs have {condition.metric}"
    change, interval = condition.change(difference), condition.range(difference)
    beyond = condition.meets(change)
    edges = [condition.meets(edge) for edge in interval or ()]
    failed = all([beyond, *edges]) if sure else beyond
    line = f"{'FAILED' if failed else 'ok    '}  {condition.text}: {_facts(condition, difference, interval)}"
    if any(edge != beyond for edge in edges):
        line += f"; not certain: the interval reaches {'back over' if beyond else 'over'} the bound"
    return failed, line


def _facts(condition: Condition, difference: MetricDifference, interval: Range | None) -> str:
    values = (
        f"{difference.metric} is {shown(difference.a, difference.unit)}, then {shown(difference.b, difference.unit)}"
    )
    none = "no relative interval: A may be 0" if difference.interval else difference.method
    extent = f"{LEVEL} interval {_text(condition, difference, interval)}" if interval else none
    return f"{values}: {_moved(condition, difference)} ({extent}{', few samples' * difference.few})"


def _moved(condition: Condition, difference: MetricDifference) -> str:
    if condition.relative:
        relative = difference.relative
        return change_text(difference) if relative is None else f"{relative:+z.2%}".replace("%", " %")
    return signed(difference.delta, difference.unit)


def _text(condition: Condition, difference: MetricDifference, interval: Range) -> str:
    if condition.relative:
        return " .. ".join(f"{edge * 100:+z.2f}" for edge in interval) + " %"
    return " .. ".join(signed(edge, difference.unit) for edge in interval)
