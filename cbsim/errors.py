"""The errors that a user can cause, and their exit statuses: 1 for a failed run, 2 for a mistake in the input, 130 for
an interruption.

Every command line maps errors to statuses by `UserError.exit_status` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

OK, ERROR, USAGE, CHECK_FAILED, INTERRUPTED = 0, 1, 2, 3, 130  # exit statuses of the commands


def entry(parser: str) -> int:
    """Import a command line and run it; returns the exit status, also of an interruption while it is imported."""
    try:
        return int(import_module(parser).main())
    except KeyboardInterrupt:
        return INTERRUPTED


def in_line(error: BaseException) -> str:
    """Return an exception of a user's own code as one line, whatever its text is."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class UserError(ValueError):
    """An error in something that a user wrote or named. The message is complete; the attributes hold its parts, each
    None where it is not known: `file` and `line`, the dotted `field`, the `value` in it, and the `bound`, a text of
    what would be allowed.
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
    """An error in a user's input. The message has its place, its value, and what would be allowed."""


@contextmanager
def beginning(prefix: Path | str, **parts: str) -> Iterator[None]:
    """Let the message of a ScenarioError begin with a file, field or option, and let the error have these parts."""
    try:
        yield
    except ScenarioError as error:
        error.args = (f"{prefix}: {error}",)
        vars(error).update(parts)
        raise


class CheckError(UserError):
    """An error in a condition; the message names the mistake."""


class RunError(UserError):
    """An error of a run, or in writing or reading one of its files; the message names file and reason."""

    exit_status = ERROR


class Interrupted(KeyboardInterrupt):
    """An interrupt by the user; the message is complete, and says where the work stands."""


class EndpointError(UserError):
    """An error of settings with which an endpoint cannot start: host, keys, a tokenizer's folder."""


class ServerError(UserError):
    """An error after which a server cannot continue; the record up to it is kept. The message has the reason."""

    exit_status = ERROR


class PolicyError(RunError):
    """An error of a scheduler that is not ours. The message has its name, the step and the reason."""


class DeadlockError(RunError):
    """An error of a scheduler whose requests get no further, for ever. The message says which, and what they lack."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"stuck: {reason.removeprefix('stuck: ')}")  # a process that waits for another makes it anew
