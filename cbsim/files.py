"""Readers of files that a user names, with one wording of their errors. Standard library only."""

from __future__ import annotations

import gzip
import json
import math
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from cbsim.errors import ScenarioError, UserError

Reader = TypeVar("Reader", bound=Callable[..., Any])
PATH_BOUND = "a path has at most 1,000 characters, each name in it at most 255 bytes"


def real(word: str) -> float:
    """Return a word as a number, NaN if it is none; unlike float without underscores and digits of other scripts."""
    try:
        return float(word) if word.isascii() and "_" not in word else math.nan
    except ValueError:
        return math.nan


def share(word: str) -> float:
    """Return a share such as `5%` or 0.05 as a number, NaN if it is none."""
    return real(word.removesuffix("%")) / (100 if word.endswith("%") else 1)


def too_long(path: str) -> bool:
    """True if the path is longer than a system can look up."""
    return len(path) > 1000 or any(len(name.encode("utf-8", "replace")) > 255 for name in path.split("/"))


@contextmanager
def access(path: Path | str, error: type[UserError] = ScenarioError, done: str = "read") -> Iterator[None]:
    """Turn an error of the system into `error`, which names the file, the operation and the reason."""
    try:
        yield
    except UnicodeDecodeError:
        raise error(f"{path}: is not UTF-8 text", file=path) from None
    except (OSError, EOFError, zlib.error) as failed:
        reason = getattr(failed, "strerror", None) or failed
        raise error(f"{path}: cannot be {done}: {reason}", file=path) from None


def read_text(path: Path, error: type[UserError] = ScenarioError, most_bytes: int | None = None) -> str:
    """Read the text of a regular file in UTF-8. Raises `error`, also if it has more than `most_bytes`."""
    with access(path, error):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe may wait for ever
            raise error(f"{path}: cannot be read: it is not a regular file", file=path)
        with path.open("rb") as file:
            content = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(content) > most_bytes:
        raise error(f"{path}: is too large, must be <= {most_bytes:,} bytes", file=path)
    with access(path, error):
        return content.decode("utf-8-sig")


def parsed_json(content: str | bytes, source: Path | str, error: type[UserError] = ScenarioError) -> Any:
    """Return the JSON value in `content`; `source` is its name in messages. Raises `error`."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as failed:
        raise error(f"{source}: not valid JSON: {failed}", file=source) from None


def read_json(path: Path, error: type[UserError] = ScenarioError, most_bytes: int | None = None) -> dict[str, Any]:
    """Read the JSON object in a file. Raises `error`."""
    data = parsed_json(read_text(path, error, most_bytes), path, error)
    if not isinstance(data, dict):
        raise error(f"{path}: got {repr(data)[:60]}, expected a JSON object", file=path)
    return data


def until_changed(read: Reader) -> Reader:
    """Let a reader of a file return the same object again until the file is another one or written anew, which its
    inode, its times and its size tell. Further arguments are hashable, and nobody changes the object. Raises OSError if
    there is no file.
    """

    @lru_cache(maxsize=4096)
    def known(_state: tuple[int, ...], *arguments: Any) -> Any:
        return read(*arguments)

    @wraps(read)
    def current(path: Path, *further: Any) -> Any:
        state = path.stat()
        return known((state.st_ino, state.st_mtime_ns, state.st_ctime_ns, state.st_size), path, *further)

    return cast("Reader", current)


@contextmanager
def lines_of(path: Path, error: type[UserError] = ScenarioError) -> Iterator[IO[str]]:
    """Open a text file, perhaps gzipped, to be read line by line. Raises `error`."""
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    with access(path, error), opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield file
