"""`cbsim capacity`: what a person sees of a search while it works, and the answer."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from cbsim.results import measures, terminal
from cbsim.scenario.scenario import Scenario
from cbsim.server.status import ERROR, OK
from cbsim.sweeps import identity, search
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.intervals import Interval
from cbsim.sweeps.over import Over
from cbsim.sweeps.probe import Probe
from cbsim.sweeps.runs import Runs
from cbsim.sweeps.store import Store
from cbsim.sweeps.terms import Terms

VERDICTS = {True: "holds", False: "fails", None: "undecided"}


class CapacityOptions(NamedTuple):
    """What `cbsim capacity` was told, parsed and resolved."""

    scenario: Scenario
    over: str
    terms: Terms
    store: Path
    as_json: bool


def run(options: CapacityOptions, executor: Executor) -> int:
    """Search, say each probe as it is made, then the answer. The exit status."""
    with closing(executor):
        over = Over(options.scenario, options.over)
        runs = Runs(Store(options.store, identity.code()), executor)
        rows = Rows(options.terms, over.field, silent=options.as_json)
        if not options.as_json:
            print(_question(options, runs))
        try:
            found = search.search(options.scenario, options.over, options.terms, runs, rows.say)
        except KeyboardInterrupt:
            print("cbsim: interrupted; the same command goes on where it stopped", file=sys.stderr)
            return ERROR
    if options.as_json:
        print(json.dumps(found.numbers(), indent=2, allow_nan=False))
    else:
        print(f"\n{found}\nmade      {runs.made:,} of the runs; the others were in {options.store}")
    return OK


def _question(options: CapacityOptions, runs: Runs) -> str:
    scenario, terms = options.scenario, options.terms
    said = " and ".join(check.text for check in terms.conditions)
    return f"{scenario.name}, {scenario.loop.mode}: {options.over} with {said}; {runs.about}\n"


class Rows:
    """A line a probe, as they are made."""

    def __init__(self, terms: Terms, field: str, *, silent: bool) -> None:
        self._terms, self._silent = terms, silent
        self._header = [field.rpartition(".")[2], "runs", "requests", "", *(check.metric for check in terms.conditions)]
        self._said = False

    def say(self, found: Probe) -> None:
        """To be called for every probe."""
        if self._silent:
            return
        if not self._said:
            print(_aligned(self._header))
            self._said = True
        checks = self._terms.conditions
        values = [shown(at, check.metric) for check, at in zip(checks, found.intervals, strict=False)]
        cells = values or [str(found.reason)]
        print(
            _aligned([f"{found.value:g}", f"{found.replicates}", f"{found.requests:,}", VERDICTS[found.holds], *cells]),
            flush=True,
        )


def _aligned(cells: list[str]) -> str:
    widths = (12, 5, 9)
    numbers = [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*numbers, cells[3].ljust(9), *(cell.ljust(32) for cell in cells[4:])]).rstrip()


def shown(at: Interval, metric: str) -> str:
    """A mean and its interval in the form that the metric wants."""
    unit = str(measures.unit(metric))
    form = {"s": "s", "share": "fine share"}.get(unit, "number")
    mean, low, high = (terminal.shown(value, form) for value in (at.mean, max(at.low, 0.0), at.high))
    return f"{mean} [{low}, {high}]"
