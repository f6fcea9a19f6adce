"""The work of `cbsim conformance --live`: workloads recorded with the package that is installed, and compared."""

from __future__ import annotations

import gzip
import json
import logging
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cbsim.conformance.check import TraceResult, compare
from cbsim.conformance.reader import UnreadableError, content, parsed
from cbsim.errors import UserError
from cbsim.live.minimise import smallest
from cbsim.live.original import Line, Original, load, rules_for

OTHER_RULES = "its rules were not read: those of {} are compared"


@dataclass(frozen=True, slots=True)
class Session:
    """Comparisons with an installed package, whose traces and workloads are kept in `folder`."""

    package: str
    version: str
    original: Original
    folder: Path

    def compare(self, workload: Line, mode: str) -> TraceResult | str:
        """Record a workload and compare it. Return why there is no trace, if the original failed."""
        try:
            lines = self.original.record(workload, mode)
        except Exception as error:  # whatever the original raises is a finding about it, not about us
            return f"{type(error).__name__}: {error}"
        return compare(self._keep(workload, mode, lines), read_as=self._read_as)

    def _read_as(self, header: Line) -> Line:
        return self.original.read_as(header, rules_for(self.version, self.original.versions))

    def _keep(self, workload: Line, mode: str, lines: list[Line]) -> Path:
        """Write a workload and its trace where conformance reads them again; return the trace."""
        trace = self.folder / self.version / f"{workload['name']}{'.' * bool(mode)}{mode}.jsonl.gz"
        beside = self.folder / "workloads" / f"{workload['name']}.json"
        for path in (trace, beside):
            path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(workload, separators=(",", ":")))
        with gzip.open(trace, "wt", compresslevel=1) as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        return trace

    def minimised(self, workload: Line, mode: str) -> tuple[Line, TraceResult]:
        """Return the smallest workload found that still differs in this mode, and its comparison."""
        named = workload | {"name": f"{workload['name']}_smallest"}

        def differs(candidate: Line) -> bool:
            result = self.compare(candidate, mode)
            return isinstance(result, TraceResult) and result.difference is not None

        least = smallest(named, self.original, differs)
        result = self.compare(least, mode)
        assert isinstance(result, TraceResult), result
        return least, result


def run(
    package: str, *, count: int, seed: int, workload: Path | None, folder: Path | None, out: Callable[[str], None]
) -> int:
    """Compare `count` random workloads from number `seed` on, or one given workload, with the package installed. Return
    0 if every line matched, 1 after a difference, whose smallest workload is kept in `folder`.
    """
    logging.disable(logging.WARNING)  # what originals say of their own events
    original, version = load(package)
    read = original.versions
    out(f"{package} {version} is installed; our rules were read from {', '.join(read)}")
    if version not in read:
        out(OTHER_RULES.format(rules_for(version, read)))
    kept = folder or Path(tempfile.mkdtemp(prefix=f"conformance-{package}-"))
    session = Session(package, version, original, kept)
    drawn = [given(workload)] if workload else (_drawn(original, package, seed + i) for i in range(count))
    tally = Tally()
    for each in drawn:
        for mode in original.modes(each):
            result = session.compare(each, mode)
            if isinstance(result, str):
                tally.failed += 1
                out(f"{each['name']}  {mode}  no trace, {package} itself failed: {result[:160]}")
                continue
            tally.add(result)
            if result.difference is not None and tally.differ == 1:
                out(str(result))
                least, smaller = session.minimised(each, mode)
                out(f"the smallest workload that differs: {len(least['requests'])} requests, kept in {kept}\n{smaller}")
            elif result.difference is not None or result.skipped:
                out(str(result).splitlines()[0])
    out(str(tally) + (f"; traces in {kept}" if folder or tally.differ else ""))
    return 1 if tally.differ else 0 if tally.compared else 2


@dataclass
class Tally:
    """What came of the workloads."""

    compared: int = 0
    lines: int = 0
    matched: int = 0
    differ: int = 0
    skipped: int = 0
    failed: int = 0

    def add(self, result: TraceResult) -> None:
        if result.skipped is not None:
            self.skipped += 1
            return
        self.compared += 1
        self.lines += result.total
        self.matched += result.matched
        self.differ += result.difference is not None

    def __str__(self) -> str:
        parts = [f"{self.compared} traces, {self.matched} of {self.lines} lines matched, {self.differ} differ"]
        parts += [f"{self.skipped} not compared"] * bool(self.skipped)
        parts += [f"{self.failed} on which the original failed"] * bool(self.failed)
        return "; ".join(parts)


def _drawn(original: Original, package: str, number: int) -> Line:
    """Return random workload `number`, which depends on the number alone."""
    return original.draw(random.Random(f"{package} {number}"), number)


def given(path: Path) -> Line:
    """Read a workload of the user's."""
    try:
        workload = parsed(path, None, content(path))
    except UnreadableError as error:
        raise UserError(f"--workload {error}") from error
    if not workload.get("requests") or not isinstance(workload["requests"], list):
        raise UserError(f"--workload {path}: requests: expected a list with at least one request")
    return {"name": path.name.split(".")[0], **workload}
