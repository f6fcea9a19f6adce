"""A scenario run under each of its loops, by whatever serves it: one run directory a loop, a table, a picture.

The simulator and the engine share all of it: the options, what is written and what a person sees.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cbsim.draw import figures
from cbsim.policy.loop import StuckError
from cbsim.results import checks, coverage, directory, environment, metrics, terminal, timeline
from cbsim.results.metrics import Steps
from cbsim.scenario import scenario
from cbsim.scenario.scenario import Scenario
from cbsim.server.guard import PolicyError
from cbsim.workload import generators
from cbsim.workload.generators import Workload

OK, ERROR, USAGE, CHECK_FAILED = 0, 1, 2, 3


class ServerError(RuntimeError):
    """The server cannot go on: what happened until then is kept. The message says why."""


class Server(terminal.Server, Protocol):
    """A server made for one run."""

    measured: bool  # on a real clock?

    @property
    def facts(self) -> Mapping[str, Any]:
        """What env.json says of the device, and of anything that the scenario does not say. Asked for before the run,
        and again after it.
        """

    def files(self) -> Mapping[str, bytes]:
        """Further files of the run directory, by name. Asked for when the run has ended or was cut short."""


Maker = Callable[[Scenario, str, Workload], Server]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What `cbsim run` and `cbengine replay` have in common, parsed."""

    scenario: str
    overrides: Sequence[str]
    out: Path
    window: tuple[int, int]  # steps of the timeline
    span_s: tuple[float, float] | None  # requests that count, by arrival
    conditions: Sequence[checks.Check]
    as_json: bool
    quiet: bool
    command: Sequence[str] = ("cbsim", "run")
    extra: Sequence[str] = ()  # options of the command's own, to be repeated as they are


@dataclass(frozen=True, slots=True)
class Finished:
    """One run that was written."""

    loop: str
    path: Path
    summary: dict[str, Any]
    steps: Steps
    measured: bool


def run(options: RunOptions, serve: Maker, adapt: Callable[[Scenario], Scenario] = lambda asked: asked) -> int:
    """Serve a scenario under each of its loops, write the run directories, say what came out. The exit status.

    `adapt` makes of what was asked what this server can run; that is what is recorded.
    """
    asked = adapt(scenario.load(options.scenario, options.overrides))
    finished = [one_loop(asked, loop, options, serve) for loop in scenario.loops(asked)]
    if len(finished) == 2:
        _draw_both(finished)
    _warn(asked, finished)
    summaries = {one.loop: one.summary for one in finished}
    if options.as_json:
        print(json.dumps(summaries, indent=2))
    elif not options.quiet:
        print(f"{asked.name}: {asked.question}\n\n{terminal.table(summaries)}\n")
        _say_where(finished, options)
    return _judge(options.conditions, summaries, sys.stderr if options.as_json else sys.stdout)


def _warn(asked: Scenario, finished: Sequence[Finished]) -> None:
    """Where simulated runs leave what their cost model was calibrated on."""
    for one in finished:
        for text in coverage.warnings(asked.model_dump(mode="json"), one.steps) if not one.measured else ():
            print(f"warning: {one.loop}: beyond the calibration: {text}", file=sys.stderr)


def one_loop(asked: Scenario, loop: str, options: RunOptions, serve: Maker) -> Finished:
    """One scenario under one loop: one directory. Raises RunError if it could not be finished or written."""
    resolved = asked.model_copy(update={"loop": asked.loop.model_copy(update={"mode": loop})})
    text = scenario.dump(resolved)
    load = generators.build(resolved)
    server = serve(resolved, loop, load)
    writer = directory.RunWriter(options.out, f"{asked.name}-{loop}", hashlib.sha256(text.encode()).hexdigest())
    writer.scenario(text)
    facts = environment.environment(command_line(options), load.fingerprint(), asked.seed) | dict(server.facts)
    writer.environment(facts)
    quiet = options.quiet or options.as_json
    progress = terminal.Progress(loop, server, load.total, measured=server.measured, quiet=quiet)
    try:
        with _interrupted_between_steps(progress):
            server.run(progress)
    except (KeyboardInterrupt, StuckError, ServerError, PolicyError) as stop:
        reason = "interrupted" if isinstance(stop, KeyboardInterrupt) else str(stop)
        reason = f"stuck: {stop}" if isinstance(stop, StuckError) else reason
        writer.note(f"{reason}, after {server.record.step_count} steps")
        writer.environment(facts | dict(server.facts))
        _write_results(writer, resolved, loop, server, options, complete=False)
        verb = "measured" if server.measured else "simulated"
        raise directory.RunError(f"{reason}: what was {verb} until then is in {writer.path}") from None
    progress.done(server.now_ns)
    try:
        writer.environment(facts | dict(server.facts))
        done = _write_results(writer, resolved, loop, server, options, complete=True)
    except directory.RunError as error:
        writer.note(str(error))
        raise
    writer.complete()
    return done


@contextmanager
def _interrupted_between_steps(progress: terminal.Progress) -> Iterator[None]:
    """Ctrl-C, or a request to end, ends a run where its state is whole: after a step."""
    before = {number: signal.signal(number, progress.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_results(
    writer: directory.RunWriter, resolved: Scenario, loop: str, server: Server, options: RunOptions, *, complete: bool
) -> Finished:
    """Tables, summary, timeline and figure of a run that has ended, or as much of it as there is."""
    rows, steps = writer.tables(server.record)
    limits = resolved.slo.model_dump(exclude={"preset"}, exclude_none=True)
    numbers = metrics.summarise(
        rows,
        steps,
        total_blocks=server.record.total_blocks,
        slo=limits,
        price_usd_hour=resolved.hardware.price_usd_hour,
        window_s=options.span_s,
    )
    about = {"name": resolved.name, "question": resolved.question, "loop": loop, "seed": resolved.seed}
    summary = {"schema_version": directory.SCHEMA_VERSION, "complete": complete, **about, **numbers}
    writer.summary(summary)
    for name, content in server.files().items():
        writer.file(name, content)
    writer.file("timeline.json.gz", timeline.chrome_trace(steps, options.window, f"{resolved.name} {loop}"))
    if complete and len(steps):
        writer.file("figures/timeline.png", figures.lanes_png([(loop, steps, numbers["gpu_active"])]))
    return Finished(loop, writer.path, summary, steps, server.measured)


def _draw_both(finished: Sequence[Finished]) -> None:
    """Both loops on one time axis, beside the second run's own figure."""
    runs = [(one.loop, one.steps, one.summary["gpu_active"]) for one in finished if len(one.steps)]
    if len(runs) == 2:
        picture = figures.lanes_png(runs)
        try:
            (finished[-1].path / "figures" / "sync_above_async.png").write_bytes(picture)
        except OSError as error:
            raise directory.RunError(f"{finished[-1].path}: figure cannot be written: {error.strerror}") from error


def _say_where(finished: Sequence[Finished], options: RunOptions) -> None:
    for one in finished:
        print(f"{one.loop:<6} {one.path}")
        for status, count in one.summary["requests_by_status"].items():
            if count and status not in ("length", "stop"):
                print(f"       {count} of {one.summary['requests']} requests {status}; see requests.parquet")
    figure = finished[-1].path / "figures" / ("sync_above_async.png" if len(finished) == 2 else "timeline.png")
    print(f"\npicture   {figure}" if figure.exists() else "\nnothing ran: no picture")
    print(f"timeline  {finished[-1].path / 'timeline.json.gz'} (open it in ui.perfetto.dev)")
    print(f"again     {command_line(options)}")


def _judge(conditions: Sequence[checks.Check], summaries: Mapping[str, Mapping[str, Any]], out: Any) -> int:
    failed = False
    for loop, summary in summaries.items():
        for condition in conditions:
            holds, line = condition.verdict(summary)
            failed |= not holds
            print(f"{loop:<6} {line}", file=out)
    return CHECK_FAILED if failed else OK


def command_line(options: RunOptions) -> str:
    """The command that computes this run again; where it is written and what its timeline shows is left out."""
    words = ["python", "-m", *options.command, options.scenario]
    for override in options.overrides:
        words += ["--set", override]
    for condition in options.conditions:
        words += ["--check", condition.text]
    if options.span_s is not None:
        words += ["--window", ":".join(str(edge) for edge in options.span_s)]
    return shlex.join([*words, *options.extra])
