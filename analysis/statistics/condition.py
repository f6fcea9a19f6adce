"""Conditions on how B differs from A: `tpot.p50>+5%`, `ttft.p99>+20ms`, `gpu_active<-2pt`, `makespan>±1%`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.statistics.compare import LEVEL, Difference, change_text, signed, unit
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

    def change(self, one: Difference) -> float:
        """What the bound is on. From 0 to something is infinitely much, relatively."""
        value = one.relative if self.relative else one.delta
        value = math.copysign(math.inf, one.delta) if value is None else value
        return abs(value) if self.magnitude else value

    def range(self, one: Difference) -> Range | None:
        """Its interval, None if there is none."""
        found = one.interval and (one.interval.relative if self.relative else one.interval.delta)
        if not found or not self.magnitude:
            return found
        ends = sorted(abs(edge) for edge in found)
        return (0.0 if found[0] <= 0 <= found[1] else ends[0]), ends[1]

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


def verdict(condition: Condition, differences: Sequence[Difference], *, sure: bool = False) -> tuple[bool, str]:
    """(failed, a line that says so). The change itself decides; a metric that either run does not have fails.

    With `sure` all of the interval must be beyond the bound; where there is none, the change decides.
    """
    one = next((one for one in differences if one.metric == condition.metric), None)
    if one is None:
        return True, f"FAILED  {condition.text}: not both runs have {condition.metric}"
    change, found = condition.change(one), condition.range(one)
    beyond = condition.meets(change)
    edges = [condition.meets(edge) for edge in found or ()]
    failed = all([beyond, *edges]) if sure else beyond
    line = f"{'FAILED' if failed else 'ok    '}  {condition.text}: {_facts(condition, one, found)}"
    if any(edge != beyond for edge in edges):
        line += f"; not certain: the interval reaches {'back over' if beyond else 'over'} the bound"
    return failed, line


def _facts(condition: Condition, one: Difference, found: Range | None) -> str:
    values = f"{one.metric} is {shown(one.a, one.unit)}, then {shown(one.b, one.unit)}"
    none = "no relative interval: A may be 0" if one.interval else one.method
    interval = f"{LEVEL} interval {_text(condition, one, found)}" if found else none
    return f"{values}: {_moved(condition, one)} ({interval}{', few samples' * one.few})"


def _moved(condition: Condition, one: Difference) -> str:
    if condition.relative:
        return change_text(one) if one.relative is None else f"{one.relative:+z.2%}".replace("%", " %")
    return signed(one.delta, one.unit)


def _text(condition: Condition, one: Difference, found: Range) -> str:
    if condition.relative:
        return " .. ".join(f"{edge * 100:+z.2f}" for edge in found) + " %"
    return " .. ".join(signed(edge, one.unit) for edge in found)
