"""Base types of a scenario's parts: frozen values, whole numbers, unions selected by a name, errors of a user.

Fields are described by a comment `#: text` behind them, or by the string below where that does not fit the line; both
are read from the source when a schema is made, not before.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from cbsim.errors import ScenarioError
from cbsim.files import PATH_BOUND, too_long

T = TypeVar("T")


@lru_cache(maxsize=1024)
def bare(name: str) -> str:
    """Return a name without case and separators: `H100 SXM` is `h100sxm`."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")


def either(names: Sequence[str]) -> str:
    """Join names as `a, b or c`."""
    *rest, last = names
    return f"{', '.join(rest)} or {last}" if rest else last


def near(word: object, known: Iterable[str]) -> str:
    """Return `; did you mean a, b or c?`: all known words that begin with the given one, or that contain it, else the
    most similar one and one about as similar. Returns an empty string if there is none.
    """
    names, part = list(known), bare(str(word)[:100])
    begin = [name for name in names if part and bare(name).startswith(part)]
    close = begin or [name for name in names if len(part) > 2 and part in bare(name)] or _similar(word, names)
    return f"; did you mean {either(close[:8])}?" if close else ""


def _similar(word: object, known: Iterable[str]) -> list[str]:
    scores = {name: difflib.SequenceMatcher(None, str(word)[:100].lower(), name.lower()).ratio() for name in known}
    best = max(scores.values(), default=0.0)
    close = [name for name in sorted(scores, key=lambda name: -scores[name]) if scores[name] >= max(0.6, best - 0.1)]
    return close[:2]


def shown(value: object) -> str:
    """Return a value as a user would recognise it, in at most 60 characters."""
    try:
        line = str(value).lower() if isinstance(value, bool) else "nothing" if value is None else repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return line if len(line) <= 60 else f"{line[:57]}..."


def cut(line: str, most: int = 200) -> str:
    """Return a user's text as one printable line of at most `most` characters."""
    short = line if len(line) <= most else f"{line[: most - 3]}..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in short)


def check_strings(name: str, values: object) -> None:
    """Raise ScenarioError unless the values of the argument `name` are strings in a list or tuple."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(one, str) for one in values):
        raise ScenarioError(f"{name}: got {shown(values)}, expected a list of texts", field=name, value=values)


def complaint(message: str, field: str = "") -> PydanticCustomError:
    """Return an error at `field` of the value being validated, or at the value itself, in our own words."""
    return PydanticCustomError("complaint", "{message}", {"message": message, "field": field})


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple; any other value unchanged."""
    return tuple(value) if isinstance(value, list) else value


Many = Annotated[tuple[T, ...], BeforeValidator(as_tuple)]  # a list of a file as a tuple


def known_only(data: Any, known: Iterable[str]) -> Any:
    """Return `data` unless it has a field that is not known."""
    for key in data if isinstance(data, dict) else ():
        if key not in known:
            hint = near(key, known) or f"; allowed: {', '.join(known)}"
            raise complaint(f"unknown field{hint}", str(key))
    return data


class Form(BaseModel):
    """An object in a file that another tool wrote: undeclared fields are ignored, no value is converted."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, defer_build=True)


Count = Annotated[int, Field(ge=1, lt=10**12)]  # of a form, such as tokens
Natural = Annotated[int, Field(ge=0, lt=2**62)]
Milliseconds = Annotated[float, Field(ge=0, lt=1e12)]  # 30 years
Pair = Annotated[tuple[Natural, Natural], BeforeValidator(as_tuple)]


class Frozen(BaseModel):
    """A part of a scenario: no unknown fields, no silent conversions, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)
    described: ClassVar[type | None] = None  # what has the fields' texts, if it is another class

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the fields' docstrings. If pydantic read them itself, every start would take a tenth of a second more."""
        made = handler(schema)
        fields = handler.resolve_ref_schema(made).get("properties", {})
        texts = documented(cls.described or cls)
        for name, field in fields.items():
            if name in texts or "const" in field:
                field.setdefault("description", texts.get(name) or str(field["const"]))
        return made

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        return known_only(data, cls.model_fields)


LARGEST_WHOLE, LARGEST_REAL = 10**15, 1e30  # of every quantity: arithmetic on what is allowed does not overflow


def _integral(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > LARGEST_WHOLE:
        raise complaint(f"got {shown(value)}, must be {'<= ' if value > 0 else '>= -'}{LARGEST_WHOLE:,}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _decimal(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and LARGEST_REAL < abs(value) < float("inf"):
        raise complaint(f"got {shown(value)}, must be {'<= ' if value > 0 else '>= -'}{LARGEST_REAL:g}")
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _lookable(path: str) -> str:
    if not path:
        raise complaint("got '', expected a path")
    if too_long(path):
        raise complaint(f"got {shown(path)}, {PATH_BOUND}")
    return path


def _anchored(path: str, info: ValidationInfo) -> str:
    """Return a path as absolute if something of that name lies beside the scenario file, else unchanged."""
    base = (info.context or {}).get("base")
    if base is not None and not Path(path).is_absolute() and (Path(base) / path).exists():
        return str((Path(base) / path).resolve())
    return path


def _plain(text: str) -> str:
    if re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", text):
        raise complaint(f"got {shown(text)}, expected one line without control characters")
    return text


def one_of(names: Callable[[], Collection[str]]) -> BeforeValidator:
    """Return a validator of a name, whatever its case and separators; the value is the name as in `names`."""

    def spelt(value: Any) -> str:
        known = names()
        for name in known if isinstance(value, str) else ():
            if bare(name) == bare(value):
                return name
        raise complaint(f"got {shown(value)}, expected one of {', '.join(known)}{near(value, known)}")

    return BeforeValidator(spelt)


Whole = Annotated[int, BeforeValidator(_integral)]  # 1e6 counts as one
Real = Annotated[float, BeforeValidator(_decimal)]  # finite
Number = Annotated[Whole, Field(ge=1)]
Text = Annotated[str, AfterValidator(_plain)]  # what a terminal shows as it is
Positive = Annotated[Real, Field(gt=0)]
PerSecond = Annotated[Real, Field(ge=1)]  # of a device
Seconds = Annotated[Real, Field(ge=0)]
PlainPath = Annotated[str, AfterValidator(_lookable)]  # as it was written
DataPath = Annotated[PlainPath, AfterValidator(_anchored)]
"""A file or folder of data. If it lies beside the scenario file the value is its absolute path, else as written."""


class By:
    """A mark in the annotation of a union of parts: the value of one field selects the member."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.members: dict[str, type[BaseModel]] = {}  # by name

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        self.members = {name: member for member in get_args(union) for name in self._names(member)}
        choices = {_tag(member): handler.generate_schema(member) for member in get_args(union)}
        union_schema = core_schema.tagged_union_schema(choices, self._tag)
        return core_schema.no_info_before_validator_function(self._checked, union_schema)

    def member(self, name: str) -> type[BaseModel] | None:
        """Return the member of this name, or None if there is none."""
        return self.members.get(name)

    def _names(self, member: Any) -> Iterable[str]:
        return get_args(member.model_fields[self.field].annotation)

    def _tag(self, value: Any) -> str:
        return _tag(self.members[value[self.field] if isinstance(value, dict) else getattr(value, self.field)])

    def _checked(self, value: Any) -> Any:
        """Return `value` if it is a member or its field names one. Raises PydanticCustomError."""
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


class ByKey(By):
    """A mark in the annotation of a union: each part has one field, whose name selects it; any other value is of the
    member that is no part, and which messages call `field`.
    """

    def _names(self, member: Any) -> Iterable[str]:
        return getattr(member, "model_fields", ())

    def _tag(self, value: Any) -> str:
        member = self.members[next(iter(value))] if isinstance(value, dict) else type(value)
        return _tag(member if issubclass(member, Frozen) else None)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, dict) and not (len(value) == 1 and next(iter(value)) in self.members):
            hint = near(next(iter(value)), self.members) if len(value) == 1 else ""
            allowed = f"{self.field} or one of {', '.join(self.members)}{hint}"
            raise complaint(f"got {shown(value)}, expected {allowed}")
        return value


def _tag(member: Any) -> str:
    """Return a member's tag. It looks like <this>, so that error paths can leave it out."""
    return f"<{member.__name__ if isinstance(member, type) else ''}>"


@cache
def documented(described: Any) -> Mapping[str, str]:
    """Return the text of each field of a class and its bases, `#: text` or the docstring below, if there is source."""
    texts: dict[str, str] = {}
    for part in reversed(described.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(part))
            (body,) = ast.parse(source).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        lines = source.splitlines()
        for field, below in pairwise([*getattr(body, "body", ()), None]):
            comment = "" if field is None else lines[field.end_lineno - 1].partition("  #: ")[2]
            match field, below:
                case (ast.AnnAssign(target=ast.Name(id=name)), _) if comment:
                    texts[name] = comment
                case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring)))):
                    texts[name] = inspect.cleandoc(docstring)
    return texts
