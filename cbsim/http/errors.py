"""Errors of the user who starts an endpoint, and of its clients."""

from __future__ import annotations

import json
from http import HTTPStatus

from cbsim.errors import UserError

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class EndpointError(UserError):
    """An error of settings with which an endpoint cannot start: host, keys, a tokenizer's folder."""


class ConversationError(ValueError):
    """An error raised for messages that a chat template refuses."""


class ApiError(Exception):
    """An error answered to a request, in the form that OpenAI's clients expect. `param` names the field."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_s = status, message, param, retry_s

    @property
    def body(self) -> bytes:
        kind = TYPES.get(self.status) or HTTPStatus(self.status).phrase
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        extra = [] if self.retry_s is None else [(b"retry-after", b"%d" % self.retry_s)]
        if self.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        return extra
