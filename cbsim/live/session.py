"""The work of `cbsim conformance --live`: workloads recorded with the package that is installed, and compared."""

from __future__ import annotations

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
from cbsim.live.minimise import smallest
from cbsim.live.original import Line, Original, load, rules_for


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
            least, smaller = self._minimised(workload, mode)
            self.out(f"{result}\nThe smallest workload that differs has {len(least['requests'])} requests:\n{smaller}")
        elif state != "match":
            self.out(str(result).splitlines()[0])

    def _minimised(self, workload: Line, mode: str) -> tuple[Line, TraceResult]:
        """Return the smallest workload that still differs in this mode, and its comparison."""
        named = workload | {"name": f"{workload['name']}_smallest"}
        least = smallest(named, self.original, lambda each: self.compare(each, mode).difference is not None)
        return least, self.compare(least, mode)

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
    for each in [read_workload(workload)] if workload else _drawn(original, package, range(seed, seed + count)):
        for mode in original.modes(each):
            session.judge(each, mode)
    out(session.summary())
    return 1 if session.tally["differ"] else 0 if session.tally["match"] else 2


def _drawn(original: Original, package: str, numbers: range) -> Iterator[Line]:
    """Yield random workloads, each of which depends on its number alone."""
    for number in numbers:
        yield original.draw(random.Random(f"{package} {number}"), number)


def read_workload(path: Path) -> Line:
    """Read a workload of the user's."""
    try:
        workload = parsed(path, None, content(path))
    except UnreadableError as error:
        raise UserError(f"--workload {error}") from error
    if not workload.get("requests") or not isinstance(workload["requests"], list):
        raise UserError(f"--workload {path}: requests: expected a list with at least one request")
    return {"name": path.name.split(".")[0], **workload}
