"""The bounds, deadlines, address and API keys of an endpoint. Only digests of keys are kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from urllib.parse import urlsplit

from cbsim.errors import EndpointError, ScenarioError
from cbsim.files import read_text
from cbsim.scenario.fields import cut


@dataclass(frozen=True, slots=True)
class Settings:
    """An endpoint's settings; seconds of the loop's clock. `keys` are SHA-256 digests; empty: none is needed."""

    keys: tuple[bytes, ...] = ()
    insecure: bool = False  # whether to be open to other machines without a key
    max_body_bytes: int = 4 << 20
    max_head_bytes: int = 64 << 10
    max_connections: int = 4096
    max_streams: int = 8192  # answers under way
    max_queued_requests: int = 8192  # answers that the server has not begun
    max_queued_tokens: int = 1 << 26  # prompt tokens of queued requests
    max_unread_tokens: int = 65_536  # tokens of a stream that its client has not read
    max_unread_sum: int = 4 << 20  # unread tokens of all streams
    max_prompts: int = 128  # prompts in a request
    head_s: float = 10.0  # limit for a request's line and headers to arrive
    body_s: float = 30.0  # limit for a request's body to arrive
    idle_s: float = 60.0  # limit between two requests of a connection
    stall_s: float = 120.0  # limit for a client to read, once its socket is full
    grace_s: float = 30.0  # limit for answers under way to end, once the session is stopped
    retry_s: int = 1  # seconds that a rejected client should wait (Retry-After)
    inline_characters: int = 16_384  # a longer text is encoded in a thread


def address(url: str) -> str:
    """Return the root of a server's address, which may end with /v1. Raises ScenarioError."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isprintable() or {*"@?# "} & {*url}:
        raise ScenarioError(f"URL: got {cut(url)}, expected the address of a server, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


VARIABLE = "CBSIM_API_KEY"


def read_keys(file: Path | None = None, environment: Mapping[str, str] = os.environ) -> tuple[bytes, ...]:
    """Return digests of the keys that `plain_keys` returns."""
    return tuple(sha256(key.encode()).digest() for key in plain_keys(file, environment))


def plain_keys(file: Path | None = None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the keys in a file, one a line, and that in the environment. Raises EndpointError if the file cannot be
    read or has no key, or a key cannot be sent: the message has the key's place, not the key.
    """
    keys = []
    if file is not None:
        lines = enumerate(read_text(file, EndpointError).splitlines(), 1)
        keys = [_checked(key, f"{file}:{number}", file, number) for number, line in lines for key in line.split()]
        if not keys:
            raise EndpointError(f"{file}: has no API key", file=file)
    if VARIABLE in environment:
        keys.append(_checked(environment[VARIABLE], f"the variable {VARIABLE}"))
    return keys


def _checked(key: str, source: str, file: Path | None = None, line: int | None = None) -> str:
    if key and key.isascii() and key.isprintable() and " " not in key:
        return key
    bound = "printable ASCII without spaces, at least one character"
    message = f"{source}: an API key has to be {bound}"
    raise EndpointError(message, file=file, line=line, field="key", bound=bound)


def may_pass(keys: Sequence[bytes], path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if the path is open to all, or the bearer has a key. Every key is compared, in constant time."""
    if not keys or path in ("/health", "/ping"):
        return True
    value = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, token = value.partition(b" ")
    digest = sha256(token.strip()).digest()
    known = [compare_digest(digest, key) for key in keys]
    return scheme.lower() == b"bearer" and any(known)
