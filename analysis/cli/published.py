"""Numbers that the project publishes, and whether runs still give them.

A YAML file lists them: which run, by fields of its resolved scenario, and for each metric the value and how far off it
may be. A number whose run is not there has drifted, too: nothing passes because it was not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from analysis.statistics.loading import LoadedRun, flat
from cbsim.results.checks import NAMES
from cbsim.results.terminal import lookup
from cbsim.scenario import documents
from cbsim.scenario.fields import Frozen, Real, complaint, near


class Number(Frozen):
    """A published value of a metric, in its unit of summary.json."""

    value: Real
    """As published."""
    within: Annotated[Real, Field(ge=0)]
    """Largest difference that is no drift."""


class Expectation(Frozen):
    """What one run has to give."""

    @field_validator("where")
    @classmethod
    def _named(cls, where: dict[str, Any]) -> dict[str, Any]:
        if "name" not in where:
            raise complaint(f"got {', '.join(where) or 'nothing'}, needs the scenario's `name`")
        return where

    where: dict[str, Any]
    """Fields of the resolved scenario, by dotted name, that pick the run; `name` among them."""
    expect: dict[str, Number]
    """Metric -> its number."""

    @field_validator("expect")
    @classmethod
    def _known(cls, expect: dict[str, Number]) -> dict[str, Number]:
        for metric in expect:
            if metric not in NAMES:
                raise complaint(f"unknown metric {metric!r}{near(metric, NAMES)}")
        return expect


class Published(Frozen):
    """A file of published numbers."""

    numbers: Annotated[list[Expectation], Field(min_length=1)]
    """Run by run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One published number beside what a run gave: None if there is no such run, or no such value in it."""

    run: str
    metric: str
    expected: Number
    value: float | None

    @property
    def holds(self) -> bool:
        return self.value is not None and abs(self.value - self.expected.value) <= self.expected.within

    @property
    def line(self) -> str:
        number = f"{self.expected.value:.6g} within {self.expected.within:.3g}"
        got = "is not there: no such run, or no such value in it" if self.value is None else f"is {self.value:.6g}"
        return f"{'ok     ' if self.holds else 'DRIFTED'}  {self.run}: {self.metric} {got}, published {number}"


def read(path: Path) -> Published:
    """Published numbers of a YAML file. Raises ScenarioError naming file, line, field and what is allowed."""
    document = documents.read(path)
    try:
        return Published.model_validate(document.data)
    except ValidationError as error:
        raise document.explain(error) from None


def compared(published: Published, runs: Sequence[LoadedRun]) -> list[Finding]:
    """Every number against every run that it is about."""
    findings = []
    for expectation in published.numbers:
        meant = [run for run in runs if _is_meant(expectation.where, flat(run.scenario))]
        title = ", ".join(str(value) for value in expectation.where.values())
        for metric, number in expectation.expect.items():
            values = [lookup(run.summary, metric) for run in meant] or [None]
            findings += [Finding(title, metric, number, None if v is None else float(v)) for v in values]
    return findings


def _is_meant(where: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    return all(field in fields and fields[field] == value for field, value in where.items())
