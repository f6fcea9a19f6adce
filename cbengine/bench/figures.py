"""What a bench shows: findings, each a line as soon as it is known, in groups that fail one by one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cbengine.bench.timing import give_back


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit, and the bar it is held to, or None."""

    name: str
    value: float
    unit: str
    bar: str = ""
    holds: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "", True: "  ok", False: "  MISSED"}[self.holds]
        bar = f"  bar {self.bar}" if self.bar else ""
        return f"{self.name:<58} {self.value:>10,.4g} {self.unit:<8}{bar}{verdict}".rstrip()


class FindingGroup(NamedTuple):
    """Findings that are measured together: dataclasses, each printed as a line."""

    name: str
    measure: Callable[[], Iterable[Any]]


def shown(groups: Iterable[FindingGroup], *, as_json: bool, keep: Path | None = None) -> bool:
    """Measure and print group after group; did all of them end well? A failure is one line on stderr, and the next
    group follows. As JSON, all that was found is one list on stdout. `keep` is a folder for a file a group: JSON
    Lines, each written as it is found.
    """
    findings, well = [], True
    for group in groups:
        mine: list[dict[str, Any]] = []
        try:
            for finding in group.measure():
                mine.append(asdict(finding))
                print(finding, file=sys.stderr if as_json else sys.stdout, flush=True)
                if keep is not None:
                    _add(keep / f"{group.name}.jsonl", mine)
        except Exception as error:  # whatever a device or a library raises: the other groups are measured all the same
            first = next(iter(str(error).splitlines()), "")
            say(f"failed: {group.name}: {type(error).__name__}: {first}")
            well = False
        give_back()
        findings += mine
    if as_json:
        print(json.dumps(findings, indent=2))
    return well


def _add(path: Path, mine: list[dict[str, Any]]) -> None:
    """Append the last finding to the file; the first one creates it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if len(mine) == 1 else "a", encoding="utf-8") as file:
        file.write(json.dumps(mine[-1]) + "\n")


class Budget:
    """Seconds that a measurement may take."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + limit_s

    def left(self, points: Iterable[Any], name: str) -> Iterator[Any]:
        """The points that are begun in time; the names of the others are said."""
        late = []
        for point in points:
            if self._now() < self._end:
                yield point
            else:
                late.append(str(point))
        if late:
            say(f"{name}: no time left for {', '.join(late)}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
