"""The work of `cbsim conformance --live`: workloads recorded with the package that is installed, and compared; of a
difference the smallest workload that still shows it: fewer requests, shorter texts, plain options.
"""

from __future__ import annotations

import copy
import gzip
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cbsim.conformance.check import TraceResult, compare
from cbsim.conformance.reader import UnreadableError, content, parsed
from cbsim.errors import UserError
from cbsim.live.original import Line, Original, load, rules_for

TRIES = 400  # the most candidates that are recorded


@dataclass(frozen=True, slots=True)
class Session:
    """Comparisons with an installed package, whose workloads and traces are written to `folder`."""

    package: str
    version: str
    original: Original
    folder: Path
    out: Callable[[str], None]
    tally: Counter[str] = field(default_factory=Counter)

    def compare(self, workload: Line, mode: str) -> TraceResult:
        """Record a workload and compare it. The result says that the original failed, if it did."""
        name = workload["name"]
        try:
            lines = self.original.record(workload, mode)
        except Exception as error:  # whatever the original raises is a finding about it, not about us
            reason = f"no trace, {self.package} itself failed: {type(error).__name__}: {error}"
            return TraceResult(name, self.package, self.version, mode, 0, skipped=reason[:200])
        trace = self._write(workload, mode, lines)
        rules = rules_for(self.version, self.original.versions)
        return compare(trace, read_as=lambda header: self.original.read_as(header, rules))

    def _write(self, workload: Line, mode: str, lines: list[Line]) -> Path:
        """Write a workload and its trace where conformance reads them again. Return the path of the trace."""
        trace = self.folder / self.version / f"{workload['name']}{'.' * bool(mode)}{mode}.jsonl.gz"
        beside = self.folder / "workloads" / f"{workload['name']}.json"
        for path in (trace, beside):
            path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(workload, separators=(",", ":")))
        with gzip.open(trace, "wt", compresslevel=1) as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        return trace

    def judge(self, workload: Line, mode: str) -> None:
        """Compare a workload and count the result. The first difference is minimised, and printed with both sides."""
        result = self.compare(workload, mode)
        differs = result.difference is not None
        state = "differ" if differs else "match" if result.skipped is None else "skipped"
        self.tally.update({state: 1, "lines": result.total, "matched": result.matched})
        if differs and self.tally["differ"] == 1:
            named = workload | {"name": f"{workload['name']}_smallest"}
            least = smallest(named, self.original, lambda each: self.compare(each, mode).difference is not None)
            smaller = self.compare(least, mode)
            self.out(f"{result}\nThe smallest workload that differs has {len(least['requests'])} requests:\n{smaller}")
        elif state != "match":
            self.out(str(result).splitlines()[0])

    def summary(self) -> str:
        tally = self.tally
        compared = tally["match"] + tally["differ"]
        lines = f"{tally['matched']} of {tally['lines']} lines matched"
        left_out = f"; {tally['skipped']} not compared" * bool(tally["skipped"])
        where = f"workloads and traces are in {self.folder}"
        return f"{compared} traces compared, {lines}, {tally['differ']} differ{left_out}; {where}"


def run(
    package: str, *, count: int, seed: int, workload: Path | None, folder: Path | None, out: Callable[[str], None]
) -> int:
    """Compare `count` random workloads from number `seed` on, or those of a user's file, with the package installed.
    Return 0 if every line matched, 1 after a difference, 2 if nothing was compared.
    """
    logging.disable(logging.WARNING)  # what originals say of their own events
    original, version = load(package)
    read = original.versions
    out(f"{package} {version} is installed; our rules were read from {', '.join(read)}")
    if version not in read:
        out(f"of {version} no rules were read: those of {rules_for(version, read)} are compared")
    session = Session(package, version, original, folder or Path(tempfile.mkdtemp(prefix=f"{package}-")), out)
    numbers = range(seed, seed + count)  # a random workload depends on its number alone
    drawn = (original.draw(random.Random(f"{package} {number}"), number) for number in numbers)
    for each in [read_workload(workload)] if workload else drawn:
        for mode in original.modes(each):
            session.judge(each, mode)
    out(session.summary())
    return 1 if session.tally["differ"] else 0 if session.tally["match"] else 2


def read_workload(path: Path) -> Line:
    """Read a workload of the user's."""
    try:
        workload = parsed(path, None, content(path))
    except UnreadableError as error:
        raise UserError(f"--workload {error}") from error
    if not workload.get("requests") or not isinstance(workload["requests"], list):
        raise UserError(f"--workload {path}: requests: expected a list with at least one request")
    return {"name": path.name.split(".")[0], **workload}


def smallest(workload: Line, original: Original, differs: Callable[[Line], bool]) -> Line:
    """Return the workload cut for as long as it still `differs`, trying at most `TRIES` cuts."""
    left, cuts = TRIES, _cuts(workload, original)
    while left and (candidate := next(cuts, None)) is not None:
        left -= 1
        if differs(candidate):
            workload, cuts = candidate, _cuts(candidate, original)
    return workload


def _cuts(workload: Line, original: Original) -> Iterator[Line]:
    """Yield the workload with less in it, the largest cuts first."""
    requests = workload["requests"]
    count = len(requests) // 2
    while count:
        for start in range(0, len(requests), count):
            left = [*requests[:start], *requests[start + count :]]
            if left:
                yield _with_requests(workload, left)
        count //= 2
    options = workload[original.options]
    for name in options:
        if name not in original.plain:
            yield workload | {original.options: {key: value for key, value in options.items() if key != name}}
        elif original.plain[name] not in (..., options[name]):
            yield workload | {original.options: options | {name: original.plain[name]}}
    for i, request in enumerate(requests):
        for shorter in _shorter(request, original):
            yield _with_requests(workload, [*requests[:i], shorter, *requests[i + 1 :]])


def _with_requests(workload: Line, requests: list[Line]) -> Line:
    """Return the workload with these requests, and with the cancellations of those that are left."""
    made = workload | {"requests": copy.deepcopy(requests)}
    if "cancels" in workload:
        ids = {request["id"] for request in requests}
        made["cancels"] = [cancel for cancel in workload["cancels"] if cancel["id"] in ids]
    return made


def _shorter(request: Line, original: Original) -> Iterator[Line]:
    """Yield the request with half of each length or one less, and without what it may lack."""
    for name in original.lengths:
        value = request.get(name)
        length = len(value) if isinstance(value, list) else value or 0
        for less in dict.fromkeys((length // 2, length - 1)):
            if 0 < less < length:
                yield request | {name: value[:less] if isinstance(value, list) else less}
    for name in request:
        if name not in ("id", *original.lengths):
            if isinstance(request[name], int) and request[name]:
                yield request | {name: 0}
            elif not isinstance(request[name], int):
                yield {key: value for key, value in request.items() if key != name}
