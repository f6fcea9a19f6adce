"""Metrics by the names that people use, which way each is better, and how its numbers are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cbsim.results import checks, measures, terminal
from cbsim.results.checks import Check, CheckError
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.fields import shown as shown_value
from cbsim.sweeps.table import PER_GPU, PER_USER

SHORT = {"goodput": "slo.goodput_requests_per_s", "attainment": "slo.attainment", "throughput": "output_tokens_per_s"}
SYSTEM = (PER_GPU, PER_USER)
LEAST_IS_BEST = (
    *("makespan_s", "bubble_s", "waiting.", "padding_", "recomputed_", "wasted_", "preemptions", "kv_moves.", "cost."),
    *(f"{name}." for name in measures.DISTRIBUTIONS),
)
SIGNS = {"max:": 1, "min:": -1}


class Metric(NamedTuple):
    """A metric by its dotted name; `sign` is 1 where more of it is better, -1 where less is."""

    name: str
    sign: int

    def better(self, value: float, other: float) -> float:
        """By how much a value is better than another."""
        return self.sign * (value - other)

    def shown(self, value: float | None) -> str:
        return shown(self.name, value)


def metric(text: str, source: str, sign: int | None = None) -> Metric:
    """The metric of a name, short or dotted; `min:` or `max:` before it say which way is better. Raises CheckError, its
    text led by `source`.
    """
    said = next((prefix for prefix in SIGNS if text.startswith(prefix)), "")
    name = named(text.removeprefix(said), source)
    return Metric(name, sign or SIGNS.get(said) or (-1 if name.startswith(LEAST_IS_BEST) else 1))


def named(text: str, source: str) -> str:
    """The dotted name of a metric that a sweep's table has. Raises CheckError, its text led by `source`."""
    if text in SHORT or text in SYSTEM:
        return SHORT.get(text, text)
    try:
        return checks.named(text, source)
    except CheckError as error:
        also = "" if "did you mean" in str(error) else f"; also {', '.join((*SHORT, *SYSTEM))}"
        raise CheckError(f"{error}{also}", field=error.field, bound=error.bound) from None


def condition(text: str, option: str) -> Check:
    """A condition on such a metric. Raises CheckError."""
    return checks.parse(text, option, named)


def shown(name: str, value: float | None) -> str:
    """A value of a metric, in the form of its unit."""
    unit = measures.unit(name)
    return terminal.shown(value, unit if unit in ("s", "share") else "number")


def check_texts(name: str, texts: object) -> None:
    """Raises ScenarioError unless it is a list of texts."""
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ScenarioError(f"{name}: got {shown_value(texts)}, expected a list of texts", field=name, value=texts)
