"""The common part of `cbsim run` and `cbengine replay`: write run directories, print tables, evaluate checks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cbsim.draw import folder, render
from cbsim.errors import CHECK_FAILED, ERROR, OK, DeadlockError, Interrupted, PolicyError, RunError, ServerError
from cbsim.metrics import checks
from cbsim.record import directory, timeline
from cbsim.record.directory import RunWriter
from cbsim.record.record import FAILED, HANDED_OFF, RETRIED
from cbsim.runs import running
from cbsim.runs.progress import Progress
from cbsim.runs.result import BOTH, LOST, Result, Results
from cbsim.runs.running import Maker, OnStep, Session, Terms
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario

MOST_OF_NAME = 80  # letters of a folder's name for the values of --set


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The parsed options that `cbsim run` and `cbengine replay` have in common."""

    scenario: str
    overrides: Sequence[str]
    out: Path
    window: tuple[int, int] = (0, 2000)  # steps of the timeline
    span_s: tuple[float, float] | None = None  # requests that count, by arrival
    conditions: Sequence[checks.Check] = ()
    as_json: bool = False
    quiet: bool = False
    line: str = ""  # the command as a shell line, recorded and printed: it makes the run again


def run(options: RunOptions, serve: Maker, adapt: Callable[[Scenario], Scenario] = lambda scenario: scenario) -> int:
    """Serve a scenario under each of its loops, write the run directories, print the results. Returns the exit status.

    `adapt` changes the scenario to one that this server can run; that one is recorded.
    """
    variants = scenarios.variants(options.scenario)
    scenario = variants(options.overrides)
    with variants.placing(options.overrides):
        scenario = adapt(scenario)
        folder.check(options.out, shared=True)
        results = Results(one_loop(scenario, loop, options, serve) for loop in scenarios.loops(scenario))
    results.draw(list(results.values())[-1].folder)
    _print_notices(results, options)
    if options.as_json:
        print(json.dumps({loop: result.summary for loop, result in results.items()}, indent=2))
    elif options.quiet:
        for result in results.values():
            print(result.path)
    else:
        print(f"{results}\n")
        _print_paths(list(results.values()), options)
    judged = _judge(options.conditions, results, sys.stderr if options.as_json else sys.stdout)
    for loop, result in results.items():
        for lost in result.lost:  # also with --quiet and --json
            print(f"{loop}: {lost}; see {result.folder / 'requests.parquet'}", file=sys.stderr)
    failed = any(result.summary["requests_by_status"].get(FAILED) for result in results.values())
    return ERROR if failed else judged


def one_loop(scenario: Scenario, loop: str, options: RunOptions, serve: Maker) -> Result:
    """Run one scenario under one loop, to one directory. Raises RunError if it could not be finished or written."""
    recorder = _Recorder(options)
    try:
        result = running.one_loop(scenario, loop, serve, Terms(options.line, options.span_s), recorder)
        return recorder.write(result)
    except Interrupted:
        raise  # while it ran: what it had until then is written
    except KeyboardInterrupt:
        recorder.note("interrupted while its files were written")
        raise


class _Recorder:
    """A watch that makes the run directory before a run, so that it exists if the run dies, and writes the results."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._writer: RunWriter | None = None

    @contextmanager
    def __call__(self, session: Session) -> Iterator[OnStep]:
        """Raises RunError or Interrupted if the run was cut short: what happened until then is in the directory."""
        words, early = settings(self._options.overrides), partial(self._early, session)
        writer = self._writer = session.open(self._options.out, words, early)
        progress = Progress(session, quiet=self._options.quiet or self._options.as_json)
        try:
            with progress.interruptible():
                yield progress
        except (KeyboardInterrupt, DeadlockError, ServerError, PolicyError) as stop:
            kind = Interrupted if isinstance(stop, KeyboardInterrupt) else RunError
            reason = "interrupted" if kind is Interrupted else str(stop)
            steps = session.server.record.step_count
            self.write(session.result(f"{reason}, after {steps} steps"))
            verb = "measured" if session.server.measured else "simulated"
            raise kind(f"{reason}: what was {verb} until then is in {writer.path}") from None
        except Exception as error:
            self.note(str(error) or type(error).__name__)
            raise
        progress.done(session.server.now_ns)

    def _early(self, session: Session, steps: int) -> None:
        """The timeline of a long run is there as soon as its steps are."""
        (low, high), writer = self._options.window, self._writer
        assert writer is not None
        if high <= steps < high + writer.group:
            title, steps_by_now = f"{session.scenario.name} {session.loop}", directory.steps_so_far(writer.path)
            writer.file("timeline.json.gz", timeline.chrome_trace([steps_by_now], (low, high), title))

    def write(self, result: Result) -> Result:
        assert self._writer is not None
        render.import_matplotlib()
        return result.write(self._writer, self._options.window)

    def note(self, reason: str) -> None:
        """Note why the directory is incomplete, if it exists and there is space for it."""
        if self._writer is not None:
            with suppress(RunError):
                self._writer.note(reason)


def settings(overrides: Sequence[str]) -> str:
    """Return the values of `--set` as part of a folder's name: fields by their last word, at most MOST_OF_NAME long."""
    last = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    label = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in last.items())
    return re.sub(r"[^A-Za-z0-9._]+", "-", re.sub(r"\bname\W+", "", label))[:MOST_OF_NAME].strip("-.")


def _print_notices(results: Results, options: RunOptions) -> None:
    for notice in dict.fromkeys(notice for result in results.values() for notice in result.notices):
        print(f"notice: {notice}", file=sys.stderr)
    for loop, result in results.items():
        if options.span_s and result.request_rows and not result.summary["e2e_s"]["n"]:
            print(f"notice: {loop}: no latency: no request that ended arrived in the --window", file=sys.stderr)
        for warning in result.warnings:
            print(f"warning: {loop}: beyond the calibration: {warning}", file=sys.stderr)


def _print_paths(results: Sequence[Result], options: RunOptions) -> None:
    for result in results:
        print(f"{result.loop:<6} {result.path}")
        rows, requests = result.request_rows, result.summary["requests"]
        again = rows.is_in((RETRIED,)) & (rows.numbers("index") < requests)  # each once, however often
        for status, count in (result.summary["requests_by_status"] | {RETRIED: int(again.sum())}).items():
            if count and status not in ("length", "stop", HANDED_OFF, *LOST):
                print(f"       {count} of {requests} requests {status}; see requests.parquet")
    last = results[-1].folder
    figure = last / (BOTH if len(results) == 2 else "figures/timeline.png")
    print(f"\npicture   {figure}" if figure.exists() else "\nnothing ran: no picture")
    print(f"timeline  {last / 'timeline.json.gz'} (open it in ui.perfetto.dev)")
    print(f"again     {options.line}")


def _judge(conditions: Sequence[checks.Check], results: Results, out: Any) -> int:
    failed = False
    for loop, result in results.items():
        for condition in conditions:
            verdict = condition.verdict(result.summary)
            failed |= not verdict
            print(f"{loop:<6} {verdict}", file=out)
    return CHECK_FAILED if failed else OK
