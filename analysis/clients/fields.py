"""Fields of a client's file, each checked when it is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from cbsim.results.directory import RunError
from cbsim.scenario.fields import shown

MOST_BYTES = 1_000_000_000
MOST = 1e19  # of any number: more than nanoseconds since 1970 will be
NUMBER = f"a number from 0 to {MOST:g}"
UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}


class Fields:
    """An object of a file. `place` says where in it: "", or a line, or the fields above."""

    def __init__(self, path: Path, place: str, values: Mapping[str, Any]) -> None:
        self.path, self.place, self.values = path, place, values

    def bad(self, field: str, value: object, expected: str) -> NoReturn:
        """Raises RunError naming file, field, value and what is allowed."""
        raise RunError(f"{self.path}: {self.place}{field}: got {shown(value)}, expected {expected}", file=self.path)

    def object(self, field: str) -> Fields:
        value = self.values.get(field)
        if not isinstance(value, dict):
            self.bad(field, value, "an object")
        return Fields(self.path, f"{self.place}{field}.", value)

    def entries(self, field: str) -> list[Any]:
        value = self.values.get(field)
        if not isinstance(value, list):
            self.bad(field, value, "a list")
        return value

    def objects(self, field: str) -> Iterator[Fields]:
        """The objects of a list."""
        for index, value in enumerate(self.entries(field)):
            if not isinstance(value, dict):
                self.bad(f"{field}[{index}]", value, "an object")
            yield Fields(self.path, f"{self.place}{field}[{index}].", value)

    def numbers(self, field: str, count: int) -> list[float]:
        """A list of so many numbers."""
        values = self.entries(field)
        if len(values) != count:
            self.bad(field, values, f"a list of {count:,} numbers")
        return [self._checked(f"{field}[{index}]", value) for index, value in enumerate(values)]

    def number(self, field: str) -> float:
        return self._checked(field, self.values.get(field))

    def whole(self, field: str) -> int:
        number = self.number(field)
        if number != int(number):
            self.bad(field, number, "a whole number")
        return int(number)

    def maybe(self, field: str) -> float:
        """A number; NaN if there is none."""
        return math.nan if self.values.get(field) is None else self.number(field)

    def text(self, field: str) -> str:
        """A text; "" if there is none."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, str):
            self.bad(field, value, "a text")
        return value or ""

    def _checked(self, field: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= MOST:  # NaN is neither
            self.bad(field, value, NUMBER)
        return float(value)


def read(path: Path) -> str:
    """The text of a file. Raises RunError."""
    if path.exists() and not path.is_file():
        raise RunError(f"{path}: cannot be read: it is no file", file=path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RunError(f"{path}: is too large, must be <= {MOST_BYTES:,} bytes", file=path)
        return content.decode("utf-8-sig")
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}", file=path) from None
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: is no text in UTF-8: {error}", file=path) from None


def parsed(text: str) -> Any:
    """The JSON value that a text is; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
