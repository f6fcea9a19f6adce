"""Conditions on a run's metrics: `ttft.p99<500ms`, `gpu_active>=0.9`, `preemptions==0`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cbsim.results import measures
from cbsim.results.measures import DISTRIBUTIONS, STATISTICS
from cbsim.results.record import STATUSES
from cbsim.scenario.errors import UserError
from cbsim.scenario.fields import near

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
UNITS = {"s": {"": 1.0, **TIMES}, "share": {"": 1.0, "%": 0.01}}  # by what the metric is in; anything else takes none
METRIC = r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|<|>)\s*"
NUMBER = r"(inf|nan|[\d.][\d.eE+-]*?)\s*([A-Za-z%]*)\s*"  # and its unit
FORM = re.compile(rf"{METRIC}([+-]?){NUMBER}")
SINGLE = (*measures.UNITS, *(f"requests_by_status.{status}" for status in STATUSES))
NAMES = (*SINGLE, *(f"{d}.{s}" for d in DISTRIBUTIONS for s in STATISTICS))


class CheckError(UserError):
    """A condition that cannot be understood; the message says what is wrong with it."""


class Verdict(NamedTuple):
    """What a condition says of a run: true if it holds. It prints as the line that the command prints."""

    holds: bool
    line: str

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True, slots=True)
class Check:
    """One condition; `text` is what the user wrote."""

    text: str
    metric: str
    compare: str
    bound: float

    def value(self, summary: Mapping[str, Any]) -> float | None:
        """The metric's value in a summary; None if the run has no sample of it."""
        value: Any = summary
        for part in self.metric.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return None if value is None else float(value)

    def verdict(self, summary: Mapping[str, Any]) -> Verdict:
        """Does it hold, and a line that says so. A metric without a sample fails."""
        value = self.value(summary)
        if value is None:
            return Verdict(False, f"FAILED  {self.text}: the run has no {self.metric}")
        holds = OPERATORS[self.compare](value, self.bound)
        return Verdict(holds, f"{'ok    ' if holds else 'FAILED'}  {self.text}: {self.metric} is {value:.6g}")


def parse(text: str, option: str = "--check", known: Callable[[str, str], str] | None = None) -> Check:
    """Understand a condition; messages begin with the `option` that it stands behind. Raises CheckError. Durations need
    no `_s`, and without a unit are seconds; `%` is a hundredth of a share. No bound is infinite: such a condition would
    hold of every run, or of none. `known` finds metrics in place of `named`.
    """
    match, source = FORM.fullmatch(text), f"{option} {text!r}"
    if not match:
        expected = "expected METRIC<VALUE[UNIT], for example ttft.p99<500ms"
        raise CheckError(f"{source}: {expected}", value=text, bound=expected)
    name, compare, sign, number, unit = match.groups()
    metric = (known or named)(name, source)
    allowed = UNITS.get(str(measures.unit(metric)), {"": 1.0})
    return Check(text, metric, compare, bounded(metric, f"{sign}{number}", unit, allowed, source))


def bounded(metric: str, number: str, unit: str, allowed: Mapping[str, float], source: str) -> float:
    """`number` in the unit of the metric. Raises CheckError unless the given one is allowed and the bound finite."""
    if unit not in allowed:
        takes = f"takes {', '.join(name or 'none' for name in allowed)}"
        given = f"unit {unit!r}" if unit else "no unit"
        raise CheckError(f"{source}: {given}, {metric} {takes}", field=metric, value=unit, bound=takes)
    try:
        value = float(number) * allowed[unit]
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        bound = "a finite number"
        raise CheckError(f"{source}: {metric}: {number!r} is not {bound}", field=metric, value=number, bound=bound)
    return value


def named(name: str, source: str) -> str:
    """The metric of that name; of a distribution `_s` may be left out. Raises CheckError, its text led by `source`."""
    head, dot, tail = name.partition(".")
    for candidate in (name, f"{head}_s{dot}{tail}"):
        if candidate in NAMES:
            return candidate
    if head in DISTRIBUTIONS or f"{head}_s" in DISTRIBUTIONS:
        each = [f"{head}.{statistic}" for statistic in STATISTICS]
        bound = f"needs one of {', '.join(each)}"
        raise CheckError(f"{source}: {head} {bound}{near(name, each) if tail else ''}", field=name, bound=bound)
    hints = [n.replace("_s.", ".") for n in NAMES]
    raise CheckError(f"{source}: unknown metric {name!r}{near(name, hints)}", field=name)
