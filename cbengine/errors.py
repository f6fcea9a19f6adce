"""The error that a user can cause, defined where the code that turns them into an exit status finds them."""

from __future__ import annotations

from cbsim.errors import UserError


class UsageError(UserError):
    """A request for something impossible: the message names the cause and a remedy."""
