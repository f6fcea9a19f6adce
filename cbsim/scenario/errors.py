"""What every error of a user carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Something that a user wrote or named cannot be used. The message says all; the attributes say the same apart,
    each None where it is not known: `file` and `line`, the dotted `field`, the `value` in it, and the `bound`, a text
    that says what would be allowed.
    """

    def __init__(
        self,
        message: str,
        *,
        file: Path | str | None = None,
        line: int | None = None,
        field: str | None = None,
        value: Any = None,
        bound: str | None = None,
    ) -> None:
        super().__init__(message)
        self.file = None if file is None else str(file)
        self.line, self.field, self.value, self.bound = line, field, value, bound
