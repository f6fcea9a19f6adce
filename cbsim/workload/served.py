"""The requests of a served session, line by line as they came: the log that its run directory keeps.

    {"index": 0, "id": "chatcmpl-1", "arrival_ns": 0, "prompt_tokens": 40, "output_tokens": 9, "max_tokens": 16,
     "priority": 0, "block_tokens": 16, "prefix": [[1, 2]]}
    {"cancel": 0, "at_ns": 81000000}

`prefix` are the ids of the content of its leading blocks of `block_tokens` (RequestSpec.prefix), as runs of
[first id, count]: content that nobody has sent before has ids that follow each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.policy.request import RequestSpec
from cbsim.scenario.fields import ScenarioError, shown
from cbsim.scenario.rows import bounded, text

FILE = "arrivals.jsonl"  # of a run directory
COUNTS = ("prompt_tokens", "output_tokens", "max_tokens", "block_tokens")
WHOLE, COUNT, RUNS = "a whole number", "a whole number >= 1", "pairs [first id, count], both whole numbers >= 1"
MOST = 1 << 62


class Session(NamedTuple):
    """Who came, in order of arrival, and who was given up when (ns). `torn`: the last line was not written to its end,
    and is left out.
    """

    specs: list[RequestSpec]
    cancels: list[tuple[int, RequestSpec]]
    torn: bool = False


def came(spec: RequestSpec) -> str:
    """The line of a request."""
    line = {
        "index": spec.index,
        "id": spec.id,
        "arrival_ns": spec.arrival_ns,
        "prompt_tokens": spec.prompt_tokens,
        "output_tokens": spec.output_tokens,
        "max_tokens": spec.max_tokens,
        "priority": spec.priority,
        "block_tokens": spec.prefix_block_tokens,
        "prefix": _runs(spec.prefix),
    }
    return json.dumps(line) + "\n"


def left(spec: RequestSpec, at_ns: int) -> str:
    """The line of a client that gave its request up."""
    return json.dumps({"cancel": spec.index, "at_ns": at_ns}) + "\n"


def read(path: Path, limit: int | None = None) -> Session:
    """The session of a log. Raises ScenarioError."""
    with text(path) as file:
        return parse(path, bounded(path, file), limit)


def parse(path: Path, lines: Iterable[str], limit: int | None = None) -> Session:
    """Likewise of its lines; `path` is what messages call it."""
    specs: list[RequestSpec] = []
    cancels: list[tuple[int, RequestSpec]] = []
    known: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.endswith("\n") and not line.endswith("}"):  # whoever wrote it was killed
            return Session(specs, cancels, torn=True)
        row = _Row(path, number, line)
        if "cancel" in row.values:
            index = row.whole("cancel", 0)
            if index >= len(specs):
                if limit is not None:
                    continue
                raise row.bad("cancel", f"the index of a request above, less than {len(specs)}")
            cancels.append((row.whole("at_ns", cancels[-1][0] if cancels else 0), specs[index]))
        elif limit is None or len(specs) < limit:
            specs.append(row.spec(specs))
            if specs[-1].id in known:
                raise row.bad("id", "an id that no line above has")
            known.add(specs[-1].id)
    return Session(specs, cancels)


class _Row:
    """One line, each of its fields checked when it is asked for."""

    def __init__(self, path: Path, number: int, line: str) -> None:
        self._path, self._number = path, number
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ScenarioError(f"{path}:{number}: not a JSON object", file=path, line=number)
        self.values: dict[str, Any] = values

    def bad(self, field: str, expected: str) -> ScenarioError:
        value = self.values.get(field)
        message = f"{self._path}:{self._number}: {field}: got {shown(value)}, expected {expected}"
        return ScenarioError(message, file=self._path, line=self._number, field=field, value=value, bound=expected)

    def whole(self, field: str, least: int = -MOST) -> int:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST:
            raise self.bad(field, WHOLE if least == -MOST else f"{WHOLE} >= {least}")
        return value

    def spec(self, before: Sequence[RequestSpec]) -> RequestSpec:
        """The request; lines are numbered and in order of time."""
        if self.whole("index") != len(before):
            raise self.bad("index", str(len(before)))
        prompt, output, most, block = (self.whole(name, 1) for name in COUNTS)
        if output > most:
            raise self.bad("output_tokens", f"at most max_tokens ({most})")
        name = self.values.get("id")
        if not isinstance(name, str) or not (name and name.isprintable()):
            raise self.bad("id", "a text that can be printed")
        prefix = tuple(self._ids())
        return RequestSpec(
            index=len(before),
            id=name,
            arrival_ns=self.whole("arrival_ns", before[-1].arrival_ns if before else 0),
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=most,
            priority=self.whole("priority"),
            prefix=prefix,
            prefix_block_tokens=block,
            prefix_tokens=len(prefix) * block,
        )

    def _ids(self) -> Iterator[int]:
        runs = self.values.get("prefix")
        if not isinstance(runs, list):
            raise self.bad("prefix", RUNS)
        for run in runs:
            whole = isinstance(run, list) and len(run) == 2 and all(type(n) is int and 1 <= n < MOST for n in run)
            if not whole or run[1] > self.values["prompt_tokens"] + self.values["max_tokens"]:
                raise self.bad("prefix", RUNS)
            yield from range(run[0], run[0] + run[1])


def _runs(ids: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in ids:
        if runs and sum(runs[-1]) == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
