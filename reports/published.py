"""Compare runs with the numbers that README.md and docs/analysis.md publish, which published.yaml lists.

    python reports/published.py reports/published.yaml RUN [RUN ...]

Exits 3 if a number has drifted. A number whose run is missing counts as drifted, since it was not compared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cbsim
from cbsim.metrics.terminal import lookup
from cbsim.scenario import documents


def field(scenario: Mapping[str, Any], name: str) -> Any:
    """A field of a resolved scenario by its dotted name, None if it has none."""
    value: Any = scenario
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def lines(numbers: Sequence[Mapping[str, Any]], runs: Sequence[cbsim.Result]) -> list[str]:
    """A line a number and run; one that has drifted begins with DRIFTED."""
    scenarios = [documents.parse(run.resolved, "scenario.resolved.yaml", lines=False) for run in runs]
    made = []
    for entry in numbers:
        where = entry["where"]
        own = [
            run
            for run, scenario in zip(runs, scenarios, strict=True)
            if all(field(scenario, name) == value for name, value in where.items())
        ]
        title = ", ".join(map(str, where.values()))
        for metric, number in entry["expect"].items():
            for value in [lookup(run.summary, metric) for run in own] or [None]:
                holds = value is not None and abs(value - number["value"]) <= number["within"]
                actual = "is not there: no such run, or no such value in it" if value is None else f"is {value:.6g}"
                published = f"published {number['value']:.6g} within {number['within']:.3g}"
                made.append(f"{'ok     ' if holds else 'DRIFTED'}  {title}: {metric} {actual}, {published}")
    return made


def main(file: Path, paths: Sequence[str]) -> int:
    """Print a line a number; 3 if one has drifted."""
    numbers = documents.parse(file.read_text(encoding="utf-8"), str(file), lines=False)["numbers"]
    made = lines(numbers, [cbsim.read(path) for path in paths])
    drifted = sum(line.startswith("DRIFTED") for line in made)
    print(*made, f"{len(made) - drifted} of {len(made)} published numbers hold", sep="\n")
    return 3 if drifted or not made else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
