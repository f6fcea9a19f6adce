"""Conditions on metrics, such as `ttft.p99<500ms` or `preemptions==0`, and objectives, such as `min:tpot.p99`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cbsim.errors import CheckError
from cbsim.files import real
from cbsim.metrics.catalogue import DISTRIBUTIONS, METRICS, OF_SWEEPS, SHORT, STATISTICS, Metric, metric
from cbsim.metrics.terminal import lookup
from cbsim.scenario.fields import near

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
UNITS = {"s": {"": 1.0, **TIMES}, "share": {"": 1.0, "%": 0.01}}  # by the metric's unit; any other takes none
METRIC = r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|==|<|>)\s*"
NUMBER = r"(inf|nan|[\d.][\d.eE+-]*?)\s*([A-Za-z%]*)\s*"  # with its unit
LISTED = "; docs/metrics.md has all names"
IMPLAUSIBLE = 100  # a bound of so many times the value may be one in milliseconds
DIRECTIONS = {"max:": 1, "min:": -1}
LATENCIES = ("ttft_s.", "tpot_s.", "e2e_s.")  # of which an SLO is above 0, too
FORM = re.compile(rf"{METRIC}\+?{NUMBER}")


class Verdict(NamedTuple):
    """The verdict of a condition on a run: true if it holds. It prints as the line that the command prints."""

    holds: bool
    line: str

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on a metric; `rule` is the user's text, and `option` the one that has it."""

    rule: str
    metric: str
    compare: str
    bound: float
    option: str = "--check"

    @property
    def broken(self) -> str:
        """How a value breaks the condition, in words, such as `TTFT p99 exceeds 50 ms`."""
        word = {"<": "exceeds", ">": "is below", "=": "is not"}[self.compare[0]]
        return f"{metric(self.metric).label} {word} {self.shown(self.bound)}"

    def shown(self, value: float) -> str:
        return metric(self.metric).shown(value)

    @property
    def spelled(self) -> str:
        return metric(self.metric).spelled

    def value(self, summary: Mapping[str, Any]) -> float | None:
        """Return the metric's value in a summary; None if the run has no sample of it."""
        value = lookup(summary, self.metric)
        return None if value is None else float(value)

    def verdict(self, summary: Mapping[str, Any]) -> Verdict:
        """Evaluate the condition on a summary. A metric without a sample fails."""
        value = self.value(summary)
        if value is None:
            return Verdict(False, f"FAILED  {self.rule}: the run has no {self.spelled}")
        holds, unit = OPERATORS[self.compare](value, self.bound), metric(self.metric).unit
        number = f"{value:.6g} s, the bound {self.bound:.6g} s" if unit == "s" else f"{value:.6g}"
        line = f"{'ok    ' if holds else 'FAILED'}  {self.rule}: {self.spelled} is {number}{self.doubt(value)}"
        return Verdict(holds, line)

    def doubt(self, value: float) -> str:
        """Return a hint if a bound without a unit is so far above the value that milliseconds may be meant, else ""."""
        plain = metric(self.metric).unit == "s" and self.rule.rstrip()[-1:] in "0123456789."
        if not plain or self.bound < IMPLAUSIBLE * value or not self.bound:
            return ""
        return f"; a bound without a unit is in seconds: is {self.bound:g}ms meant?"


def parse_all(conditions: Iterable[str], option: str = "--check", *, sweep: bool = False) -> list[Check]:
    """Parse conditions. Raises a CheckError that lists all that cannot be parsed."""
    parsed, errors = list[Check](), list[CheckError]()
    for condition in conditions:
        try:
            parsed.append(parse(condition, option, sweep=sweep))
        except CheckError as error:
            errors.append(error)
    if errors:
        first = errors[0]
        raise CheckError("\n".join(map(str, errors)), field=first.field, value=first.value, bound=first.bound)
    return parsed


def parse(condition: str, option: str = "--check", *, sweep: bool = False) -> Check:
    """Parse a condition; messages begin with the `option` that has it. Raises CheckError. Names are as in `named`.
    Values without a unit are seconds; `%` is a hundredth of a share. Bounds are finite, and no metric is below 0: else
    a condition would hold for every run, or for none.
    """
    match, source = FORM.fullmatch(condition), f"{option} {condition!r}"
    if not match:
        expected = "expected METRIC<VALUE[UNIT] with VALUE >= 0, for example ttft.p99<500ms"
        raise CheckError(f"{source}: {expected}", value=condition, bound=expected)
    name, compare, number, unit = match.groups()
    name = named(name, source, sweep=sweep)
    allowed = UNITS.get(metric(name).unit, {"": 1.0})
    bound = bounded(name, number, unit, allowed, source)
    if impossible := _impossible(metric(name), compare, bound):
        raise CheckError(f"{source}: {metric(name).spelled} {impossible}", field=name, value=number, bound=impossible)
    return Check(condition, name, compare, bound, option)


def _impossible(of: Metric, compare: str, bound: float) -> str:
    """Return what every value of a metric is, if that alone decides a condition; empty if it does not."""
    if of.unit == "share" and (bound > 1 or (bound == 1 and compare == ">")):
        return "is at most 100 %"
    if not bound and compare in ("<=", "==") and of.name.startswith(LATENCIES) and not of.name.endswith((".std", ".n")):
        return "is always above 0"
    return "is never below 0" if not bound and compare == "<" else ""


def bounded(name: str, number: str, unit: str, allowed: Mapping[str, float], source: str) -> float:
    """Return `number` in the unit of the metric. Raises CheckError unless its unit is allowed and the bound finite."""
    if unit not in allowed:
        takes = f"takes {', '.join(each or 'none' for each in allowed)}"
        unexpected = f"unit {unit!r}" if unit else "no unit"
        raise CheckError(f"{source}: {unexpected}, {metric(name).spelled} {takes}", field=name, value=unit, bound=takes)
    if not math.isfinite(value := real(number) * allowed[unit]):
        bound = f"{metric(name).spelled}: {number!r} is not a finite number"
        raise CheckError(f"{source}: {bound}", field=name, value=number, bound="a finite number")
    return value


def objective(name: str, source: str, sign: int | None = None, *, directed: bool = True) -> Metric:
    """Return a metric of a sweep with its direction: `sign`, else `min:` or `max:` before its name, else its usual one.
    Raises CheckError, its message led by `source`, for an unknown metric, and if `directed` for one without direction.
    """
    prefix = next((prefix for prefix in DIRECTIONS if name.startswith(prefix)), "")
    known = metric(named(name.removeprefix(prefix), source, sweep=True))
    sign = sign or DIRECTIONS.get(prefix) or known.sign
    if directed and not sign:
        bound = f"expected max:{known.spelled} or min:{known.spelled}"
        raise CheckError(f"{source}: neither more nor less of it is better, {bound}", field=known.name, bound=bound)
    return replace(known, sign=sign)


def named(name: str, source: str, *, sweep: bool = False) -> str:
    """Return the full name of a metric, dotted or short; a distribution may omit `_s`. `sweep`: metrics that only the
    table of a sweep has are known, too. Raises CheckError, its message led by `source`.
    """
    head, dot, tail = name.partition(".")
    for candidate in (name, f"{head}_s{dot}{tail}", SHORT.get(name, "")):
        if candidate in METRICS or (sweep and candidate in OF_SWEEPS):
            return candidate
    if head in DISTRIBUTIONS or f"{head}_s" in DISTRIBUTIONS:
        each = [f"{head}.{statistic}" for statistic in STATISTICS]
        bound = f"needs one of {', '.join(each)}"
        raise CheckError(f"{source}: {head} {bound}{near(name, each) if tail else ''}", field=name, bound=bound)
    hints = [metric(known).spelled for known in (*METRICS, *SHORT, *(OF_SWEEPS if sweep else ()))]
    raise CheckError(f"{source}: unknown metric {name!r}{near(name, hints) or LISTED}", field=name)
