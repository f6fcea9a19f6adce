"""The errors that a user can cause, found here by whoever turns them into an exit status."""

from __future__ import annotations

from cbsim.errors import UserError


class UsageError(UserError):
    """Something asked for that cannot be: the message names what, and what would do."""


class MissingError(UsageError):
    """A package or a device that is not here."""
