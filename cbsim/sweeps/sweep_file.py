"""A sweep file: a scenario, the fields that change, and what is kept of each run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from cbsim.scenario import documents
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Frozen, ScenarioError, Whole, as_tuple, complaint, shown
from cbsim.sweeps.axes import Axis, Settings, each_with_each

Keep = Literal["summary", "tables", "all"]
MOST_POINTS = 1_000_000
LOOP = "loop"


def _axes(given: Any) -> Any:
    """A list of axes. Fields without a list multiply: each is an axis."""
    if isinstance(given, Mapping) and "points" not in given:
        return tuple({name: values} for name, values in given.items())
    return (given,) if isinstance(given, Mapping) else as_tuple(given)


def _scenario(given: Any) -> Any:
    if not isinstance(given, str | dict):
        raise complaint(f"got {shown(given)}, expected a name, a file or fields")
    return given


class SweepFile(Frozen):
    """What is run: each place of an axis with each place of the others, under each loop, as often as replicates say."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=150)] = "sweep"
    """Names the table; the file's name by default."""
    scenario: Annotated[str | dict[str, Any], BeforeValidator(_scenario)]
    """A scenario's name, its file from this one's folder, or its fields."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Fields that all points have otherwise than the scenario."""
    axes: Annotated[tuple[Axis, ...], BeforeValidator(_axes, json_schema_input_type=Axis | tuple[Axis, ...])] = ()
    """Fields and their values: lists, `{range: {low, high, step}}`, `{log: {low, high, factor}}`, or with `count`.
    Axes multiply; in a list of axes the fields of one advance together; `{points: [...]}` names what no rule gives.
    """
    loop: Annotated[tuple[Literal["sync", "async"], ...], BeforeValidator(as_tuple)] = ()
    """Loops of each point; left out: what the scenario says."""
    replicates: Annotated[Whole, Field(ge=1, le=100_000)] = 1
    """Runs of each point, with the scenario's seed and the numbers after it. A replicate has one seed at all points."""
    keep: Keep = "summary"
    """What stays of a run: summary.json, with the scenario and env.json; the tables too; or all that `run` writes."""

    @model_validator(mode="after")
    def _set_once(self) -> SweepFile:
        seen: dict[str, int] = {}
        for at, axis in enumerate(self.axes):
            for name in axis.names:
                if name in seen:
                    raise complaint(f"{name} is set by axes {seen[name]} and {at}, expected one of them", "axes")
                seen[name] = at
        if LOOP in seen:
            raise complaint("loop is no axis, expected loop.mode, or loop beside axes", "axes")
        if "loop.mode" in seen and self.loop:
            raise complaint("is set by an axis, too; expected one of them", "loop")
        if "seed" in seen and self.replicates > 1:
            raise complaint("take seeds of their own, and so does an axis; expected one of them", "replicates")
        return self

    @model_validator(mode="after")
    def _none_undone(self) -> SweepFile:
        before: list[str] = []
        for name in (*self.set, *self.names):
            undone = next((other for other in before if other.startswith(f"{name}.")), None)
            if undone is not None:
                text = f"{name} would undo {undone}, which is set before it; expected {name} first, or fields of it"
                raise complaint(text, "axes")
            before.append(name)
        return self

    @model_validator(mode="after")
    def _countable(self) -> SweepFile:
        points = math.prod(len(axis.settings()) for axis in self.axes) * max(1, len(self.loop)) * self.replicates
        if points > MOST_POINTS:
            raise complaint(f"give {points:,} points, must be <= {MOST_POINTS:,}", "axes")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that axes set, in their order."""
        return tuple(name for axis in self.axes for name in axis.names)

    def settings(self) -> Iterator[tuple[Settings, int]]:
        """What each point sets beside `set`, and its replicate."""
        modes = [{"loop.mode": mode} for mode in self.loop] or [{}]
        for place in each_with_each(self.axes):
            for mode in modes:
                for replicate in range(self.replicates):
                    yield {**place, **mode}, replicate


def overrides(settings: Settings) -> list[str]:
    """Settings as `--set` takes them. Raises ScenarioError for a value that no file could hold."""
    return [f"{name}={json.dumps(value, default=partial(_plain, name))}" for name, value in settings.items()]


def _plain(name: str, value: Any) -> Any:
    """A value of numpy as one of Python."""
    try:
        return value.item()
    except (AttributeError, ValueError):
        bound = "expected what a YAML file can hold"
        raise ScenarioError(f"{name}: got {shown(value)}, {bound}", field=name, value=value, bound=bound) from None


def read(path: Path) -> tuple[SweepFile, Path]:
    """A sweep file, and the folder that its paths begin at. Raises ScenarioError."""
    document = documents.read(path)
    document.data.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:150].strip("-._") or "sweep")
    return _validated(document), path.parent


def given(source: Any) -> tuple[SweepFile, Path]:
    """A sweep as a caller has it: a file, or its fields. Raises ScenarioError."""
    if isinstance(source, Mapping):
        return parse(source), Path()
    if isinstance(source, str | Path):
        return read(Path(source))
    raise ScenarioError(f"sweep: got {shown(source)}, expected a file or its fields", value=source)


def parse(data: Mapping[str, Any]) -> SweepFile:
    """A sweep from plain values. Raises ScenarioError."""
    return _validated(Document("sweep", None, dict(data)))


def _validated(document: Document) -> SweepFile:
    try:
        return SweepFile.model_validate(document.data)
    except ValidationError as error:
        raise document.explain(error) from None


__all__ = ["Keep", "ScenarioError", "SweepFile", "given", "overrides", "parse", "read"]
