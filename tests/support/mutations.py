"""Files broken at random, the same ones in every run, and what a command that reads them must do all the same.

Whatever a file holds, a command ends in seconds: with an exit status that is documented, a short message, no traceback.
A number that was changed leads to no number that cannot be, or the file is refused.
"""

from __future__ import annotations

import copy
import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.calls import Said

SEED = 20261122
CASE_S = 5
PIECES = ("&a ", "*a", "!!int ", "[", "}", ": ", "- ", "\n", "\t", "#", "\0", "é", '"', "'", "|", "? ", "<<", "%", "-1")
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e-30, 1e30, 10**20, float("nan"), float("inf"), "", "x" * 3000, "a\nb", [], {}, [[1]], {"a": 1},
    "sync", "../x", "**", "2026-01-01",
)  # fmt: skip
CELLS = (
    *("", "-1", "0", "1e300", "nan", "inf", "9" * 400, "0x1", "1_0", "²", '"', "a,b", "\0", "2023-11-16 18:17:03"),
    " 7 ",
)
WHOLES = (-(2**63), -1, 0, 1, 2**31, 2**62, 2**63 - 1)
Change = Callable[[str, random.Random], str]


# -- changes of a text ------------------------------------------------------------------------------------------------


def edited(text: str, rng: random.Random) -> str:
    """A few characters replaced, doubled or cut out."""
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(text)), rng.randint(0, 12)
        middle = rng.choice([rng.choice(PIECES), text[at : at + length] * 2, ""])
        text = text[:at] + middle + text[at + length :]
    return text


def shuffled(text: str, rng: random.Random) -> str:
    """A line moved, doubled or left out."""
    lines = text.splitlines(keepends=True)
    line = lines.pop(rng.randrange(len(lines)))
    for _ in range(rng.randint(0, 2)):
        lines.insert(rng.randint(0, len(lines)), line)
    return "".join(lines)


def with_a_cell(text: str, rng: random.Random) -> str:
    """A cell of a CSV file replaced."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    cells = lines[at].split(",")
    cells[rng.randrange(len(cells))] = rng.choice(CELLS)
    lines[at] = ",".join(cells)
    return "\n".join(lines) + "\n"


def with_a_value(data: Any, rng: random.Random) -> Any:
    """A tree of dicts and lists with one value somewhere replaced, removed, or put under another key."""
    place: Any = data
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], dict | list) and place[key]) or rng.random() < 0.3:
            break
        place = place[key]
    value = place.pop(key)
    other = rng.choice([*VALUES, copy.deepcopy(data), value, *_scaled(value, rng)])
    if isinstance(place, list):
        place.insert(key, other)
    elif rng.random() < 0.9:
        place[key if rng.random() < 0.8 else f"{key}s"] = other
    return data


def _scaled(value: Any, rng: random.Random) -> list[Any]:
    return [value * rng.choice((-1, 2, 1000))] * 5 if isinstance(value, int | float) else []


def as_json(text: str, rng: random.Random) -> str:
    """A value of a JSON document changed."""
    return json.dumps(with_a_value(json.loads(text), rng))


def as_json_lines(text: str, rng: random.Random) -> str:
    """A value of one of the lines changed."""
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = as_json(lines[at], rng)
    return "\n".join(lines) + "\n"


# -- changes of a file ------------------------------------------------------------------------------------------------


def damaged(path: Path, rng: random.Random) -> None:
    """Some bytes changed, or the end cut off."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 4)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)


def rewritten(change: Change) -> Callable[[Path, random.Random], None]:
    """The change of a text as one of a file."""

    def write(path: Path, rng: random.Random) -> None:
        path.write_text(change(path.read_text(encoding="utf-8"), rng), encoding="utf-8", errors="surrogateescape")

    write.__qualname__ = change.__name__
    return write


def table_changed(path: Path, rng: random.Random) -> None:
    """A table of Arrow with another number in a column, another column, or other rows."""
    table = pq.read_table(path)
    at = rng.randrange(table.num_columns)
    name, values = table.column_names[at], table.column(at).to_pylist()
    kind = rng.choice(("number", "number", "number", "number", "column", "rows"))
    if kind == "number" and table.schema.field(at).type == pa.int64():
        values[rng.randrange(len(values))] = rng.choice([*WHOLES, values[0], values[-1], None])
        table = table.set_column(at, name, pa.array(values, pa.int64()))
    elif kind == "column":
        table = table.drop_columns([name]) if rng.random() < 0.5 else table.append_column(name, table.column(at))
    else:
        order = rng.choices(range(len(table)), k=rng.randint(0, len(table) + 2))
        table = table.take(order if rng.random() < 0.5 else order[:1])
    pq.write_table(table, path)


# -- what must hold ---------------------------------------------------------------------------------------------------


class HangError(BaseException):
    """A case that takes too long. No command may catch it."""


@contextmanager
def limited(seconds: int = CASE_S) -> Iterator[None]:
    """Raises HangError in the middle of what computes for longer; what only waits ends with pytest's own limit."""

    def ring(*_: object) -> None:
        raise HangError(f"longer than {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def until(seconds: float, most: int) -> Iterator[tuple[int, random.Random]]:
    """Cases, each with a random source of its own, `most` or as many as fit so much CPU time."""
    begun = time.process_time()
    for case in range(most):
        if time.process_time() - begun > seconds:
            return
        yield case, random.Random(f"{SEED}/{case}")


NONSENSE = re.compile(r"(?<![\w.])(nan|-?inf)(?![\w.])|(makespan|steps|TTFT p50|TPOT p50|E2E p50)\s+-\d", re.IGNORECASE)


def survived(about: str, statuses: Sequence[int], act: Callable[[], Said], *, path: Path) -> int:
    """The exit status of a command that does what it must, whatever was done to the files it reads."""
    try:
        with limited():
            said = act()
    except (Exception, HangError) as error:
        raise AssertionError(about) from error
    lines = said.err.splitlines()
    assert said.status in statuses, f"{about}: {said}"
    assert all(len(line) < 700 + 3 * len(str(path)) for line in lines) and len(lines) <= 21, f"{about}: {said.err}"
    assert said.err or said.out or not said.status, about
    assert not NONSENSE.search(said.out), f"{about}: {said.out}"
    return said.status
