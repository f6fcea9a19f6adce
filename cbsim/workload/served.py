"""The requests of a served session, line by line in order of arrival: the log in its run directory.

    {"index": 0, "id": "chatcmpl-1", "arrival_ns": 0, "prompt_tokens": 40, "output_tokens": 9, "max_tokens": 16,
     "priority": 0, "block_tokens": 16, "prefix": [[1, 2]]}
    {"cancel": 0, "at_ns": 81000000}

`prefix` are the ids of the content of its leading blocks of `block_tokens` (RequestSpec.prefix), as runs of
[first id, count]: content that is new to the session has consecutive ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from cbsim.policy.request import RequestSpec
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Count, Form, Natural, Pair, complaint, shown
from cbsim.scenario.rows import bounded, json_line, open_text
from cbsim.workload.requests import Workload

FILE = "arrivals.jsonl"  # of a run directory
SAME = ("index", "id", "arrival_ns", "prompt_tokens", "output_tokens", "max_tokens", "priority")
"""Fields of a line with the same names as those of RequestSpec."""
MOST = 1 << 62


def came(spec: RequestSpec) -> str:
    """Return the line of a request."""
    line = {name: getattr(spec, name) for name in SAME}
    return json.dumps(line | {"block_tokens": spec.prefix_block_tokens, "prefix": runs(spec.prefix)}) + "\n"


def left(spec: RequestSpec, at_ns: int) -> str:
    """Return the line of a cancelled request."""
    return json.dumps({"cancel": spec.index, "at_ns": at_ns}) + "\n"


def read(path: Path, limit: int | None = None) -> Workload:
    """Read the requests of a log. Raises ScenarioError."""
    with open_text(path) as file:
        return parse(path, bounded(path, file), limit)


def parse(path: Path, lines: Iterable[str], limit: int | None = None) -> Workload:
    """Return the requests in the lines of a log; `path` is its name in messages. Raises ScenarioError."""
    specs: list[RequestSpec] = []
    cancels: list[tuple[int, RequestSpec]] = []
    known: set[str] = set()
    notices: tuple[str, ...] = ()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.endswith(("\n", "}")):  # the writing process was killed
            notices = (f"{FILE}: the last line was not written to its end: it is left out",)
            break
        row = json_line(path, number, line)
        if "cancel" in row.data:
            _add_cancel(specs, cancels, row, limit is not None)
        elif limit is None or len(specs) < limit:
            _add_request(specs, row, known)
    return Workload(specs, len(specs), cancels=cancels, notices=notices)


def _add_cancel(specs: list[RequestSpec], cancels: list[tuple[int, RequestSpec]], row: Document, limited: bool) -> None:
    """Add a cancellation. Its request must be on a line above, unless only the first requests are read."""
    gone = row.checked(Left)
    if gone.cancel >= len(specs):
        if limited:
            return
        raise row.bad("cancel", f"the index of a request above, less than {len(specs)}")
    if cancels and gone.at_ns < cancels[-1][0]:
        raise row.bad("at_ns", f"a whole number >= {cancels[-1][0]}")
    cancels.append((gone.at_ns, specs[gone.cancel]))


def _add_request(specs: list[RequestSpec], row: Document, known: set[str]) -> None:
    request = row.checked(Came)
    if request.index != len(specs):
        raise row.bad("index", str(len(specs)))
    if specs and request.arrival_ns < specs[-1].arrival_ns:
        raise row.bad("arrival_ns", f"a whole number >= {specs[-1].arrival_ns}")
    if request.id in known:
        raise row.bad("id", "an id that no line above has")
    known.add(request.id)
    specs.append(request.spec())


def _printable(name: str) -> str:
    if not (name and name.isprintable()):
        raise complaint(f"got {shown(name)}, expected a text that can be printed")
    return name


class Came(Form):
    """The line of a request."""

    index: Natural
    id: Annotated[str, AfterValidator(_printable)]
    arrival_ns: Natural
    prompt_tokens: Count
    output_tokens: Count
    max_tokens: Count
    priority: Annotated[int, Field(gt=-MOST, lt=MOST)]
    block_tokens: Count
    prefix: list[Pair]

    @model_validator(mode="after")
    def _within_limits(self) -> Self:
        if self.output_tokens > self.max_tokens:
            bound = f"expected at most max_tokens ({self.max_tokens})"
            raise complaint(f"got {self.output_tokens}, {bound}", "output_tokens")
        for run in self.prefix:
            if not (min(run) >= 1 and run[1] <= self.prompt_tokens + self.max_tokens):
                bound = "expected [first id, count], both >= 1, of no more blocks than tokens"
                raise complaint(f"got {shown(list(run))}, {bound}", "prefix")
        return self

    def spec(self) -> RequestSpec:
        ids = tuple(block for first, count in self.prefix for block in range(first, first + count))
        return RequestSpec(
            **{name: getattr(self, name) for name in SAME},
            prefix=ids,
            prefix_block_tokens=self.block_tokens,
            prefix_tokens=len(ids) * self.block_tokens,
        )


class Left(Form):
    """The line of a cancelled request."""

    cancel: Natural
    at_ns: Natural


def runs(ids: Sequence[int]) -> list[list[int]]:
    """Return numbers as runs of consecutive ones, [first, count]."""
    made: list[list[int]] = []
    for number in ids:
        if made and sum(made[-1]) == number:
            made[-1][1] += 1
        else:
            made.append([number, 1])
    return made
