"""A sweep file: a scenario, the axes along which its fields change, and the files that are kept of each run.

The fields of one axis take their values together; axes multiply.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, ValidationError, model_validator

from cbsim.errors import ScenarioError
from cbsim.scenario import documents
from cbsim.scenario.documents import Document, split, value_at, wording
from cbsim.scenario.fields import Frozen, Real, Whole, as_tuple, complaint, shown
from cbsim.scenario.overrides import Changes, fields_of

Keep = Literal["summary", "tables", "all"]
MOST_POINTS = 1_000_000
MOST_VALUES = 100_000
Settings = Mapping[str, Any]  # dotted field -> value


class Range(Frozen):
    """Numbers from `low` to `high`, both included where they are reached: with a `step`, or a `count` of them."""

    low: Real  #: The first value.
    high: Real  #: No value is beyond it.
    step: Real | None = None  #: What each is more than the one before.
    count: Annotated[Whole, Field(ge=2, le=MOST_VALUES)] | None = None  #: How many values, at equal distances.

    @model_validator(mode="after")
    def _rises(self) -> Self:
        _check(self.low, self.high, "step", self.step, self.count, 0)
        return self

    def values(self) -> tuple[float, ...]:
        count = self.count or _reached(self.high - self.low, self.step)
        step = self.step or (self.high - self.low) / (count - 1)
        return tuple(_number(self.low + i * step) for i in range(count))


class LogRange(Frozen):
    """Numbers from `low` to `high` that multiply: by a `factor`, or a `count` of them at equal ratios."""

    low: Annotated[Real, Field(gt=0)]  #: The first value.
    high: Real  #: No value is beyond it.
    factor: Real | None = None  #: How many times the one before each is.
    count: Annotated[Whole, Field(ge=2, le=MOST_VALUES)] | None = None  #: How many values, at equal ratios.

    @model_validator(mode="after")
    def _rises(self) -> Self:
        _check(self.low, self.high, "factor", self.factor, self.count, 1)
        return self

    def values(self) -> tuple[float, ...]:
        octaves, factor = _octaves(self.low, self.high), self.factor
        if factor:
            return tuple(_number(self.low * factor**i) for i in range(_reached(octaves, math.log2(factor))))
        assert self.count is not None
        each = octaves / (self.count - 1)
        return tuple(_number(2 ** (math.log2(self.low) + i * each)) for i in range(self.count))


def _check(low: float, high: float, name: str, each: float | None, count: int | None, least: int) -> None:
    if high <= low:
        raise complaint(f"got {high:.12g}, must be > {low:.12g}, the first value", "high")
    if (each is None) == (count is None):
        raise complaint(f"got {'both' if count else 'neither'}, expected one of {name} and count", name)
    if each is not None and each <= least:
        raise complaint(f"got {each:.12g}, must be > {least}", name)
    if each is not None and (_octaves(low, high) / math.log2(each) if least else (high - low) / each) > MOST_VALUES:
        raise complaint(f"got {each:.12g}, gives more than {MOST_VALUES:,} values", name)


def _reached(span: float, each: float | None) -> int:
    """Return the number of values at this distance over a span."""
    return math.floor(span / (each or span) * (1 + 1e-12)) + 1


def _octaves(low: float, high: float) -> float:
    return math.log2(high) - math.log2(low)


def _number(value: float) -> float:
    """Round to 12 digits, which drops rounding errors; a whole number becomes an int, as some fields require."""
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


class Ranged(Frozen):
    """Values by a rule."""

    range: Range | None = None  #: At equal distances.
    log: LogRange | None = None  #: At equal ratios.

    @model_validator(mode="after")
    def _has_a_rule(self) -> Self:
        if (self.range is None) == (self.log is None):
            raise complaint("expected a list, or one of range and log")
        return self

    def values(self) -> tuple[float, ...]:
        return next(rule.values() for rule in (self.range, self.log) if rule is not None)


def _values(name: str, values: Any) -> tuple[Any, ...]:
    """Return the values of an axis's field, given as a list, a rule or a single value."""
    if isinstance(values, range | set) or hasattr(values, "tolist"):  # passed by a program
        values = values.tolist() if hasattr(values, "tolist") else list(values)
    if isinstance(values, list | tuple):
        if not values:
            raise complaint("got an empty list, needs at least 1 entry", name)
        return tuple(value.item() if hasattr(value, "item") else value for value in values)  # NumPy scalars
    if not (isinstance(values, Mapping) and values.keys() & {"range", "log"}):
        return (values,)
    try:
        return Ranged.model_validate(values).values()
    except ValidationError as error:
        entry: dict[str, Any] = dict(error.errors(include_url=False)[0])
        inner = [*map(str, entry["loc"]), entry.get("ctx", {}).get("field")]
        raise complaint(wording(entry), ".".join([name, *filter(None, inner)])) from None


class Axis(Frozen):
    """Fields that take their values together, or explicit points."""

    fields: dict[str, tuple[Any, ...]] = Field(default_factory=dict)  #: Dotted field: values; all advance together.
    points: Annotated[tuple[dict[str, Any], ...], BeforeValidator(as_tuple)] = ()  #: Each sets what it names.

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema of the written form, where the fields stand beside each other."""
        rule = handler(Ranged.__pydantic_core_schema__)
        points = {"type": "array", "minItems": 1, "items": {"type": "object"}}
        return {
            "type": "object",
            "minProperties": 1,
            "properties": {"points": points},
            "additionalProperties": {
                "anyOf": [{"type": "array", "minItems": 1}, rule, {"type": ["number", "string", "boolean"]}]
            },
        }

    @model_validator(mode="before")
    @classmethod
    def _fields_by_name(cls, data: Any) -> Any:
        """Convert the written form `{a: [1, 2], b: [3, 4]}` to `{fields: {...}}`."""
        if not isinstance(data, Mapping):
            raise complaint("expected fields and their values, or points")
        if "points" not in data:
            return {"fields": {str(name): _values(str(name), values) for name, values in data.items()}}
        for name in data:
            if name != "points":
                raise complaint("stands beside points, which say all; a field of its own belongs to another axis", name)
        return data

    @model_validator(mode="after")
    def _as_long(self) -> Self:
        lengths = {name: len(values) for name, values in self.fields.items()}
        if not lengths and not self.points:
            raise complaint("is empty, expected fields and their values, or points")
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise complaint(f"fields that advance together have as many values; got {counts}")
        seen: dict[Any, int] = {}
        for at, point in enumerate(self.settings()):
            for name in (name for name in point if in_part([point], name)):
                raise complaint(f"{name} is set twice by point {at}, expected once")
            plain = {name: each if isinstance(each, int | float | str) else repr(each) for name, each in point.items()}
            if (first := seen.setdefault(tuple(sorted(plain.items())), at)) != at:
                fields = ", ".join(f"{name}={shown(value)}" for name, value in point.items())
                raise complaint(f"has {fields} twice: at {first} and {at}")
        return self

    def settings(self) -> Sequence[Settings]:
        if self.points:
            return self.points
        return [dict(zip(self.fields, values, strict=True)) for values in zip(*self.fields.values(), strict=True)]


def _axes(data: Any) -> Any:
    """Return the axes as a sequence. Fields in a mapping multiply: each becomes an axis of its own."""
    if isinstance(data, Mapping) and "points" not in data:
        return tuple({name: values} for name, values in data.items())
    return (data,) if isinstance(data, Mapping) else as_tuple(data)


def _check_apart(axes: Sequence[Axis]) -> None:
    for (one, axis), (two, other) in permutations(enumerate(axes), 2):
        for name in dict.fromkeys(name for point in axis.settings() for name in point):
            if in_part(other.settings(), name) or any(name in point for point in other.settings()):
                raise complaint(f"{name} is set by axes {one} and {two}, expected one of them", "axes")


def _scenario(data: Any) -> Any:
    if not isinstance(data, str | dict):
        raise complaint(f"got {shown(data)}, expected a name, a file or fields")
    return data


class SweepFile(Frozen):
    """What is run: each point of an axis with each of all others, under each loop, as often as replicates say."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=150)] = "sweep"
    """Names the table; the file's name by default."""
    scenario: Annotated[str | dict[str, Any], BeforeValidator(_scenario)]
    """A scenario's name, its file from this one's folder, or its fields."""
    set: dict[str, Any] = Field(default_factory=dict)  #: Fields that all points have otherwise than the scenario.
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
    def _fits(self) -> Self:
        _check_apart(self.axes)
        seen = {name for axis in self.axes for point in axis.settings() for name in point}
        if "loop" in seen:
            raise complaint("loop is no axis, expected loop.mode, or loop beside axes", "axes")
        if len({*self.loop}) < len(self.loop):
            raise complaint(f"has a loop twice: {', '.join(self.loop)}", "loop")
        if "loop.mode" in seen and self.loop:
            raise complaint("is set by an axis, too; expected one of them", "loop")
        if "seed" in seen and self.replicates > 1:
            raise complaint("take seeds of their own, and so does an axis; expected one of them", "replicates")
        points = math.prod(len(axis.settings()) for axis in self.axes) * max(1, len(self.loop)) * self.replicates
        if points > MOST_POINTS:
            raise complaint(f"give {points:,} points, must be <= {MOST_POINTS:,}", "axes")
        return self

    def settings(self) -> Iterator[tuple[Settings, int]]:
        """Yield each point's settings, without those of `set`, and its replicate. The last axis changes fastest."""
        modes = [{"loop.mode": mode} for mode in self.loop] or [{}]
        for parts in product(*(axis.settings() for axis in self.axes), modes):
            settings = {name: value for part in parts for name, value in part.items()}
            for replicate in range(self.replicates):
                yield settings, replicate


def in_part(points: Iterable[Settings], field: str) -> bool:
    """Return whether a whole part that a point sets states this field of it."""
    parts = [(name, value) for point in points for name, value in point.items() if field.startswith(f"{name}.")]
    return any(value_at(value, split(field[len(name) + 1 :])) is not None for name, value in parts)


def check_once(fields: Settings, axes: Iterable[Sequence[Settings]], source: str, other: str) -> None:
    """Raise ScenarioError for a field of `source` that all points of an axis of `other` set, or a whole part in one."""
    for points in axes:
        always = [name for name in points[0] if all(name in point for point in points)]
        twice = [name for name in always if name in fields or in_part([fields], name)]
        for name in twice + [name for name in fields if in_part(points, name)]:
            raise ScenarioError(f"{source} {name}: is set by {other}, too; expected one of them", field=name)


def read(source: Any, changes: Changes = (), names: tuple[str, str] = ("", "axes or loop")) -> tuple[SweepFile, Path]:
    """Return a sweep given as a file or its fields, with changes of its scenario, and the folder of its paths. Raises
    ScenarioError, with other `names` of `set` and axes.
    """
    if isinstance(source, Mapping):
        document, base = Document("sweep", None, dict(source)), Path()
    elif isinstance(source, str | Path):
        document, base = documents.read(path := Path(source)), path.parent
        document.data.setdefault("name", documents.name_of(path.stem, "sweep"))
    else:
        raise ScenarioError(f"sweep: got {shown(source)}, expected a file or its fields", value=source)
    sweep = document.checked(SweepFile)
    sweep = sweep.model_copy(update={"set": {**sweep.set, **fields_of(changes)}})
    axes = [*(axis.settings() for axis in sweep.axes), [{"loop.mode": mode} for mode in sweep.loop] or [{}]]
    check_once(sweep.set, axes, names[0] or f"{document.where(('set',))}: set:", names[1])
    return sweep, base
