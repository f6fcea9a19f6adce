"""The fields of a JSON object in a file, each asked for by what it must be."""

from __future__ import annotations

import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbsim.scenario.errors import UserError
from cbsim.scenario.fields import ScenarioError, shown


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of a JSON object in a file; each is asked for by what it must be. Null is absent."""

    where: Path | str
    fields: dict[str, Any]
    error: type[UserError] = ScenarioError

    def refuse(self, field: str, expected: str) -> UserError:
        given = shown(self.fields[field]) if field in self.fields else "nothing"
        text = f"{self.where}: {field}: got {given}, expected {expected}"
        return self.error(text, field=field, value=self.fields.get(field), bound=f"expected {expected}")

    def whole(self, field: str, default: int | None = None, least: int = 1) -> int:
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refuse(field, f"a whole number >= {least}")
        return value

    def real(self, field: str, default: float | None = None) -> float:
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refuse(field, "a number > 0")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.fields.get(field)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(field, "true or false")
        return value

    def part(self, field: str) -> Config | None:
        value = self.fields.get(field)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(field, "an object")
        return Config(f"{self.where}: {field}", value, self.error) if value else None


def read_json(path: Path, error: type[UserError] = ScenarioError, most_bytes: int | None = None) -> dict[str, Any]:
    """The JSON object in a regular file. Raises `error`."""
    try:
        file = path.stat()
        if not stat.S_ISREG(file.st_mode):
            raise error(f"{path}: cannot be read: is not a regular file", file=path)
        if most_bytes is not None and file.st_size > most_bytes:
            raise error(f"{path}: got {file.st_size:,} bytes, must be <= {most_bytes:,}", file=path)
        data = json.loads(path.read_bytes())
    except OSError as failed:
        raise error(f"{path}: cannot be read: {failed.strerror}", file=path) from None
    except (ValueError, RecursionError) as failed:
        if isinstance(failed, UserError):
            raise
        raise error(f"{path}: is not JSON: {failed}", file=path) from None
    if not isinstance(data, dict):
        raise error(f"{path}: got {shown(data)}, expected an object", file=path)
    return data
