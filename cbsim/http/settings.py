"""The bounds, deadlines and API keys of an endpoint. Only digests of keys are kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from cbsim.files import read_text
from cbsim.http.errors import EndpointError


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are seconds of the event loop's clock. `keys` are SHA-256 digests; without any, no request needs one."""

    keys: tuple[bytes, ...] = ()
    insecure: bool = False  # no key, and yet open to other machines
    max_body_bytes: int = 4 << 20
    max_head_bytes: int = 64 << 10
    max_connections: int = 4096
    max_streams: int = 8192  # answers under way
    max_queued_requests: int = 8192  # of them, those that the server has not begun
    max_queued_tokens: int = 1 << 26  # of their prompts
    max_unread_tokens: int = 65_536  # of a stream, that its client has not taken
    max_unread_sum: int = 4 << 20  # of all streams
    max_prompts: int = 128  # in a request
    head_s: float = 10.0  # for a request's line and headers to arrive
    body_s: float = 30.0  # for its body
    idle_s: float = 60.0  # between two requests of a connection
    stall_s: float = 120.0  # for a client to read on, once its socket is full
    grace_s: float = 30.0  # for answers under way to end, once it is time to go
    retry_s: int = 1  # that a rejected client is to wait
    inline_characters: int = 16_384  # a longer text is encoded in a thread; threads end in any order
    request_metrics: bool = False  # every answer says what its request waited for; else where `include_metrics` asks


VARIABLE = "CBSIM_API_KEY"
OPEN_PATHS = frozenset({"/health", "/ping"})


def read_keys(file: Path | None = None, environment: Mapping[str, str] = os.environ) -> tuple[bytes, ...]:
    """Digests of the keys in a file, one a line, and of that in the environment. EndpointError if the file cannot be
    read or has no key, or a key cannot be sent: it says where the key is, not what it is.
    """
    keys = []
    if file is not None:
        lines = enumerate(read_text(file, EndpointError).splitlines(), 1)
        keys = [_checked(key, f"{file}:{number}", file, number) for number, line in lines for key in line.split()]
        if not keys:
            raise EndpointError(f"{file}: has no API key", file=file)
    if VARIABLE in environment:
        keys.append(_checked(environment[VARIABLE], f"the variable {VARIABLE}"))
    return tuple(sha256(key.encode()).digest() for key in keys)


def _checked(key: str, source: str, file: Path | None = None, line: int | None = None) -> str:
    if key and key.isascii() and key.isprintable() and " " not in key:
        return key
    bound = "printable ASCII without spaces, at least one character"
    message = f"{source}: an API key has to be {bound}"
    raise EndpointError(message, file=file, line=line, field="key", bound=bound)


def may_pass(keys: Sequence[bytes], path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the path is open to all, or the bearer has a key. Every key is compared, in constant time."""
    if not keys or path in OPEN_PATHS:
        return True
    value = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, token = value.partition(b" ")
    digest = sha256(token.strip()).digest()
    known = [compare_digest(digest, key) for key in keys]
    return scheme.lower() == b"bearer" and any(known)
