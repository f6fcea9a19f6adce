"""What every part of a scenario is made of: frozen values, whole numbers, unions found by a name, errors of a user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cbsim.scenario.described import documented
from cbsim.scenario.errors import UserError
from cbsim.scenario.paths import PATH_BOUND, too_long

MOST_HINTS = 8


class ScenarioError(UserError):
    """Something a user wrote cannot be used. Its text says where it is, what it is, and what would be allowed."""


def bare(name: str) -> str:
    """A name without case and separators: `H100 SXM` is `h100sxm`."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")


def either(words: Sequence[str]) -> str:
    """`a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def near(word: object, known: Iterable[str]) -> str:
    """`; did you mean a, b or c?`: all known words that begin with the given one, or that contain it, else the most
    similar one and one about as similar. Nothing if there is none.
    """
    names, part = list(known), bare(str(word)[:100])
    begin = [name for name in names if part and bare(name).startswith(part)]
    close = begin or [name for name in names if len(part) > 2 and part in bare(name)] or _similar(word, names)
    return f"; did you mean {either(close[:MOST_HINTS])}?" if close else ""


def _similar(word: object, known: Iterable[str]) -> list[str]:
    scores = {name: difflib.SequenceMatcher(None, str(word)[:100].lower(), name.lower()).ratio() for name in known}
    best = max(scores.values(), default=0.0)
    close = [name for name in sorted(scores, key=lambda name: -scores[name]) if scores[name] >= max(0.6, best - 0.1)]
    return close[:2]


def shown(value: object) -> str:
    """A value as a user would recognise it, in at most 60 characters."""
    try:
        text = str(value).lower() if isinstance(value, bool) else "nothing" if value is None else repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def cut(text: str, most: int = 200) -> str:
    """A user's own words in one line of at most so many characters."""
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in short)


def complaint(text: str, field: str = "") -> PydanticCustomError:
    """An error at `field` of the value being validated, or at the value itself, in our own words."""
    return PydanticCustomError("complaint", "{text}", {"text": text, "field": field})


class Frozen(BaseModel):
    """A part of a scenario: no unknown fields, no silent conversions, nothing changes once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The fields with the words below them. For pydantic to read these takes a tenth of a second at every start."""
        made = handler(schema)
        fields = handler.resolve_ref_schema(made).get("properties", {})
        for name, words in documented(cls).items():
            if name in fields:
                fields[name].setdefault("description", words)
        return made

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                raise complaint(f"unknown field{_hint(key, list(cls.model_fields))}", str(key))
        return data


def _hint(key: object, fields: list[str]) -> str:
    return near(key, fields) or f"; allowed: {', '.join(fields)}"


LARGEST_WHOLE, LARGEST_REAL = 10**15, 1e30
"""Beyond these no quantity of a run can lie; arithmetic on what is allowed does not overflow."""


def _integral(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > LARGEST_WHOLE:
        raise complaint(f"got {shown(value)}, must be <= {LARGEST_WHOLE:,}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _decimal(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and LARGEST_REAL < abs(value) < float("inf"):
        raise complaint(f"got {shown(value)}, must be <= {LARGEST_REAL:g}")
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _lookable(path: str) -> str:
    if too_long(path):
        raise complaint(f"got {shown(path)}, {PATH_BOUND}")
    return path


def _anchored(path: str, info: ValidationInfo) -> str:
    base = (info.context or {}).get("base")
    if base is not None and not Path(path).is_absolute() and (Path(base) / path).is_file():
        return str((Path(base) / path).resolve())
    return path


def as_tuple(value: Any) -> Any:
    """A list as a tuple; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


Whole = Annotated[int, BeforeValidator(_integral)]
"""A whole number; 1e6 counts as one."""

Real = Annotated[float, BeforeValidator(_decimal)]
"""A finite number."""

Wholes = Annotated[tuple[Whole, ...], BeforeValidator(as_tuple)]

PlainPath = Annotated[str, AfterValidator(_lookable)]
"""A path as it was written."""

DataPath = Annotated[PlainPath, AfterValidator(_anchored)]
"""A file of data. If it lies beside the scenario file the value is its absolute path, else it stays as written."""


class By:
    """Finds the member of a union by the value of one field. Tags look like <this>: error paths leave them out."""

    def __init__(self, field: str, *members: type[Frozen]) -> None:
        self.field, self.__name__ = field, f"by_{field}"  # pydantic names a discriminator by its function
        self.members = {name: member for member in members for name in _names(member, field)}

    def __call__(self, value: Any) -> str:
        name = value.get(self.field) if isinstance(value, dict) else getattr(value, self.field, None)
        return self.tag(self.members[name]) if name in self.members else "<?>"

    def fields_of(self, name: str) -> frozenset[str] | None:
        """The fields of the member of this name, or None if there is none."""
        member = self.members.get(name)
        return frozenset(member.model_fields) if member else None

    @staticmethod
    def tag(member: type[Frozen]) -> str:
        return f"<{member.__name__}>"

    def check(self, value: Any) -> Any:
        """`value`, if it says which member it is."""
        if isinstance(value, tuple(set(self.members.values()))):
            return value
        allowed = ", ".join(self.members)
        if not isinstance(value, dict):
            raise complaint(f"got {shown(value)}, expected fields, of which `{self.field}` is one of {allowed}")
        name = value.get(self.field)
        if name is None:
            raise complaint(f"is required: one of {allowed}", self.field)
        if not isinstance(name, str) or name not in self.members:
            raise complaint(f"got {shown(name)}, expected one of {allowed}{near(name, self.members)}", self.field)
        return value


def _names(member: type[Frozen], field: str) -> tuple[str, ...]:
    names: tuple[str, ...] = member.model_fields[field].annotation.__args__  # type: ignore[union-attr]
    return names
