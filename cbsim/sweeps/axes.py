"""The axes of a sweep: which values its fields take, together or each with each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, ValidationError, model_validator

from cbsim.scenario.documents import wording
from cbsim.scenario.fields import Frozen, Real, Whole, as_tuple, complaint

MOST_VALUES = 100_000
Settings = Mapping[str, Any]  # dotted field -> value


class Range(Frozen):
    """Numbers from `low` to `high`, both included where they are reached: with a `step`, or a `count` of them."""

    low: Real
    """The first value."""
    high: Real
    """No value is beyond it."""
    step: Real | None = None
    """What each is more than the one before."""
    count: Annotated[Whole, Field(ge=2, le=MOST_VALUES)] | None = None
    """How many values, at equal distances."""

    @model_validator(mode="after")
    def _rises(self) -> Range:
        _check(self.low, self.high, "step", self.step, self.count, 0)
        return self

    def values(self) -> tuple[float, ...]:
        """In rising order."""
        if self.count is not None:
            width = (self.high - self.low) / (self.count - 1)
            return tuple(_number(self.low + i * width) for i in range(self.count))
        assert self.step is not None
        count = math.floor((self.high - self.low) / self.step * (1 + 1e-12)) + 1
        return tuple(_number(self.low + i * self.step) for i in range(count))


class LogRange(Frozen):
    """Numbers from `low` to `high` that multiply: by a `factor`, or a `count` of them at equal ratios."""

    low: Annotated[Real, Field(gt=0)]
    """The first value."""
    high: Real
    """No value is beyond it."""
    factor: Real | None = None
    """How many times the one before each is."""
    count: Annotated[Whole, Field(ge=2, le=MOST_VALUES)] | None = None
    """How many values, at equal ratios."""

    @model_validator(mode="after")
    def _rises(self) -> LogRange:
        _check(self.low, self.high, "factor", self.factor, self.count, 1)
        return self

    def values(self) -> tuple[float, ...]:
        """In rising order."""
        if self.count is not None:
            each = _octaves(self.low, self.high) / (self.count - 1)
            return tuple(_number(2 ** (math.log2(self.low) + i * each)) for i in range(self.count))
        assert self.factor is not None
        count = math.floor(_octaves(self.low, self.high) / math.log2(self.factor) * (1 + 1e-12)) + 1
        return tuple(_number(self.low * self.factor**i) for i in range(count))


def _check(low: float, high: float, name: str, each: float | None, count: int | None, least: int) -> None:
    if high <= low:
        raise complaint(f"got {high:g}, must be > {low:g}, the first value", "high")
    if (each is None) == (count is None):
        raise complaint(f"got {'both' if count else 'neither'}, expected one of {name} and count", name)
    if each is not None and each <= least:
        raise complaint(f"got {each:g}, must be > {least}", name)
    if each is not None and (_octaves(low, high) / math.log2(each) if least else (high - low) / each) > MOST_VALUES:
        raise complaint(f"got {each:g}, gives more than {MOST_VALUES:,} values", name)


def _octaves(low: float, high: float) -> float:
    """How often `low` doubles on its way to `high`."""
    return math.log2(high) - math.log2(low)


def _number(value: float) -> float:
    """Without the last digits, which are the arithmetic's; whole ones as whole numbers, which some fields want."""
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


class Ranged(Frozen):
    """Values by a rule."""

    range: Range | None = None
    """At equal distances."""
    log: LogRange | None = None
    """At equal ratios."""

    @model_validator(mode="after")
    def _has_a_rule(self) -> Ranged:
        if (self.range is None) == (self.log is None):
            raise complaint("expected a list, or one of range and log")
        return self

    def values(self) -> tuple[float, ...]:
        rule = self.range or self.log
        assert rule is not None
        return rule.values()


def _values(name: str, given: Any) -> tuple[Any, ...]:
    """What stands behind a field of an axis: a list, or a rule. A single value is a list of it."""
    if isinstance(given, range | set) or hasattr(given, "tolist"):  # of a program
        given = given.tolist() if hasattr(given, "tolist") else list(given)
    if isinstance(given, list | tuple):
        if not given:
            raise complaint("got an empty list, needs at least 1 entry", name)
        return tuple(value.item() if hasattr(value, "item") else value for value in given)  # numbers of numpy
    if not (isinstance(given, Mapping) and given.keys() & {"range", "log"}):
        return (given,)
    try:
        return Ranged.model_validate(given).values()
    except ValidationError as error:
        entry: dict[str, Any] = dict(error.errors(include_url=False)[0])
        inner = [*map(str, entry["loc"]), entry.get("ctx", {}).get("field")]
        raise complaint(wording(entry), ".".join([name, *filter(None, inner)])) from None


class Axis(Frozen):
    """Fields that take their values together, or explicit points."""

    fields: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Dotted field: its values. Several fields advance together."""
    points: Annotated[tuple[dict[str, Any], ...], BeforeValidator(as_tuple)] = ()
    """Each sets what it names."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """As it is written."""
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
    def _fields_by_name(cls, given: Any) -> Any:
        """`{a: [1, 2], b: [3, 4]}` is written, `{fields: {...}}` is meant."""
        if not isinstance(given, Mapping):
            raise complaint("expected fields and their values, or points")
        if "points" not in given:
            return {"fields": {str(name): _values(str(name), values) for name, values in given.items()}}
        others = [name for name in given if name != "points"]
        if others:
            raise complaint(
                "stands beside points, which say all; a field of its own belongs to another axis", others[0]
            )
        return given

    @model_validator(mode="after")
    def _as_long(self) -> Axis:
        lengths = {name: len(values) for name, values in self.fields.items()}
        if not lengths and not self.points:
            raise complaint("is empty, expected fields and their values, or points")
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise complaint(f"fields that advance together have as many values; got {said}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that it sets."""
        return tuple(dict.fromkeys((*self.fields, *(name for point in self.points for name in point))))

    def settings(self) -> Sequence[Settings]:
        """What it sets, place by place."""
        if self.points:
            return self.points
        return [dict(zip(self.fields, values, strict=True)) for values in zip(*self.fields.values(), strict=True)]


def each_with_each(axes: Sequence[Axis]) -> Iterator[Settings]:
    """Every place of one axis with every place of all others; the last one changes first."""
    for places in product(*(axis.settings() for axis in axes)):
        yield {name: value for place in places for name, value in place.items()}
