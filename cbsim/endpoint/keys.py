"""API keys: where they come from, and who may pass. Only their digests are kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from cbsim.endpoint.errors import EndpointError

VARIABLE = "CBSIM_API_KEY"
OPEN_PATHS = frozenset({"/health", "/ping"})


def read_keys(
    given: Iterable[str] = (), file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[bytes, ...]:
    """Digests of the keys given, of those in a file, one a line, and of that in the environment. EndpointError if the
    file cannot be read or has no key, or a key cannot be sent: it says where the key is, not what it is.
    """
    keys = [_checked(key, "a key that was given") for key in given]
    if file is not None:
        keys += _of_file(file)
    if VARIABLE in environment:
        keys.append(_checked(environment[VARIABLE], f"the variable {VARIABLE}"))
    return tuple(sha256(key.encode()).digest() for key in keys)


def _checked(key: str, place: str, file: Path | None = None, line: int | None = None) -> str:
    if key and key.isascii() and key.isprintable() and " " not in key:
        return key
    bound = "printable ASCII without spaces, at least one character"
    words = f"{place}: an API key has to be {bound}"
    raise EndpointError(words, file=file, line=line, field="key", bound=bound)


def _of_file(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise EndpointError(f"{file}: API keys cannot be read: {reason}", file=file) from error
    keys = [
        _checked(key, f"{file}:{number}", file, number)
        for number, line in enumerate(text.splitlines(), 1)
        for key in line.split()
    ]
    if not keys:
        raise EndpointError(f"{file}: has no API key", file=file)
    return keys


def may_pass(keys: Sequence[bytes], path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Is it a path that is open to all, or does the bearer have a key? Every key is compared, in constant time."""
    if not keys or path in OPEN_PATHS:
        return True
    value = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, token = value.partition(b" ")
    digest = sha256(token.strip()).digest()
    known = [compare_digest(digest, key) for key in keys]
    return scheme.lower() == b"bearer" and any(known)
