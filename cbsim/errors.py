"""The errors that a user can cause, and the exit status each stands for: 1 a run failed, 2 a mistake in what was asked.

Every command line maps errors to statuses by `UserError.exit_status` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

OK, ERROR, USAGE, CHECK_FAILED = 0, 1, 2, 3  # exit statuses of the commands


class UserError(ValueError):
    """Something that a user wrote or named cannot be used. The message says all; the attributes say the same apart,
    each None where it is not known: `file` and `line`, the dotted `field`, the `value` in it, and the `bound`, a text
    that says what would be allowed.
    """

    exit_status = USAGE

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


class ScenarioError(UserError):
    """Something a user wrote cannot be used. Its text says where it is, what it is, and what would be allowed."""


class CheckError(UserError):
    """A condition that cannot be understood; the message says what is wrong with it."""


class RunError(UserError):
    """A run that failed, or a file of one that cannot be written or read; the message names file and reason."""

    exit_status = ERROR


class Interrupted(KeyboardInterrupt):
    """An interrupt; the message says what becomes of the work."""


class ServerError(UserError):
    """A server cannot go on: what happened until then is kept. The message says why."""

    exit_status = ERROR


class DeadlockError(Exception):
    """The scheduler holds requests, can plan nothing, and nothing is in flight that could change that."""
