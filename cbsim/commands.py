"""What the commands do. Arguments come in parsed; a number goes out, the exit status."""

from __future__ import annotations

import hashlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbsim import checks, environment, figures, metrics, scenario, simulate, terminal, timeline, trace, workload
from cbsim.metrics import Steps
from cbsim.policy.loop import StuckError
from cbsim.scenario import Scenario

OK, ERROR, USAGE, CHECK_FAILED = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`cbsim run`, parsed."""

    scenario: str
    overrides: Sequence[str]
    out: Path
    window: tuple[int, int]  # steps of the timeline
    span_s: tuple[float, float] | None  # requests that count, by arrival
    conditions: Sequence[checks.Check]
    as_json: bool
    quiet: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """One run that was written."""

    loop: str
    path: Path
    summary: dict[str, Any]
    steps: Steps


def run(options: RunOptions) -> int:
    """Simulate a scenario under each of its loops, write the run directories, say what came out."""
    asked = scenario.load(options.scenario, options.overrides)
    finished = [_one_loop(asked, loop, options) for loop in scenario.loops(asked)]
    if len(finished) == 2:
        _draw_both(finished)
    summaries = {one.loop: one.summary for one in finished}
    if options.as_json:
        print(json.dumps(summaries, indent=2))
    elif not options.quiet:
        print(f"{asked.name}: {asked.question}\n\n{terminal.table(summaries)}\n")
        _say_where(finished, options)
    return _judge(options.conditions, summaries, sys.stderr if options.as_json else sys.stdout)


def _one_loop(asked: Scenario, loop: str, options: RunOptions) -> Finished:
    """One scenario under one loop: one directory."""
    resolved = asked.model_copy(update={"loop": asked.loop.model_copy(update={"mode": loop})})
    text = scenario.dump(resolved)
    load = workload.build(resolved)
    server = simulate.machine(resolved, loop, load)
    writer = trace.RunWriter(options.out, f"{asked.name}-{loop}", hashlib.sha256(text.encode()).hexdigest())
    writer.scenario(text)
    writer.environment(environment.environment(command_line(options), load.fingerprint(), asked.seed))
    progress = terminal.Progress(loop, server, load.total, quiet=options.quiet or options.as_json)
    try:
        with _interrupted_between_steps(progress):
            simulate.run(server, progress)
    except (KeyboardInterrupt, StuckError) as stop:
        reason = "interrupted" if isinstance(stop, KeyboardInterrupt) else f"stuck: {stop}"
        writer.note(f"{reason}, after {server.record.step_count} steps")
        _write_results(writer, resolved, loop, server, options, complete=False)
        raise trace.RunError(f"{reason}: what was simulated until then is in {writer.path}") from None
    progress.done(server.now_ns)
    try:
        done = _write_results(writer, resolved, loop, server, options, complete=True)
    except trace.RunError as error:
        writer.note(str(error))
        raise
    writer.complete()
    return done


@contextmanager
def _interrupted_between_steps(progress: terminal.Progress) -> Iterator[None]:
    """Ctrl-C ends a run where its state is whole: after a step."""
    before = signal.signal(signal.SIGINT, progress.interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _write_results(
    writer: trace.RunWriter, resolved: Scenario, loop: str, server: Any, options: RunOptions, *, complete: bool
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
    summary = {"schema_version": trace.SCHEMA_VERSION, "complete": complete, **about, **numbers}
    writer.summary(summary)
    writer.file("timeline.json.gz", timeline.chrome_trace(steps, options.window, f"{resolved.name} {loop}"))
    if complete and len(steps):
        writer.file("figures/timeline.png", figures.lanes_png([(loop, steps, numbers["gpu_active"])]))
    return Finished(loop, writer.path, summary, steps)


def _draw_both(finished: Sequence[Finished]) -> None:
    """Both loops on one time axis, beside the second run's own figure."""
    runs = [(one.loop, one.steps, one.summary["gpu_active"]) for one in finished if len(one.steps)]
    if len(runs) == 2:
        picture = figures.lanes_png(runs)
        try:
            (finished[-1].path / "figures" / "sync_above_async.png").write_bytes(picture)
        except OSError as error:
            raise trace.RunError(f"{finished[-1].path}: figure cannot be written: {error.strerror}") from error


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
    words = ["python", "-m", "cbsim", "run", options.scenario]
    for override in options.overrides:
        words += ["--set", override]
    for condition in options.conditions:
        words += ["--check", condition.text]
    if options.span_s is not None:
        words += ["--window", ":".join(str(edge) for edge in options.span_s)]
    return shlex.join(words)


def conformance(paths: Sequence[Path]) -> int:
    """Compare our policies with recorded traces of the originals."""
    from cbsim.conformance import check

    return check.run(paths, print)


def replay(paths: Sequence[Path]) -> int:
    """Derive recorded plans again; 1 if one differs."""
    from cbsim.replay import rederive

    status = OK
    for path in paths:
        verdict = rederive(path)
        if verdict.difference is None:
            print(f"{path}: {verdict.matched} of {verdict.steps} plans identical")
        else:
            print(f"{path}: {verdict.matched} of {verdict.steps} plans identical, then {verdict.difference}")
            status = ERROR
    return status


def schema(folder: Path) -> int:
    """Write the JSON schemas that editors use."""
    try:
        written = scenario.write_schemas(folder)
    except OSError as error:
        raise trace.RunError(f"{folder}: cannot be written: {error.strerror or error}") from error
    for path in written:
        print(path)
    return OK


def catalogue() -> int:
    """Everything that can be named in a scenario."""
    from cbsim import catalog, documents
    from cbsim.policy.schedulers.registry import SCHEDULERS

    _section("schedulers", {name: about for name, (_, about) in SCHEDULERS.items()})
    _section("cost models", COST_MODELS)
    for folder, title in (("hardware", "hardware"), ("models", "models")):
        _section(title, {name: _about(folder, name) for name in catalog.names(folder)})
    questions = {}
    for name in catalog.names():
        questions[name] = str(documents.read(catalog.scenario(name)).data.get("question", ""))
    _section("scenarios", questions)
    return OK


COST_MODELS = {
    "constant": "a fixed time a step plus linear terms",
    "roofline": "FLOPs and bytes of the model's shape against the GPU's data sheet",
    "fitted": "coefficients calibrated on an engine's own run, from a YAML file",
}


def _about(folder: str, name: str) -> str:
    from cbsim import shapes

    if folder == "models":
        model = shapes.model(name)
        return f"{model.parameters / 1e9:.2f} B parameters, {model.kv_bytes_per_token / 1024:g} KiB of KV a token"
    gpu = shapes.hardware(name)
    return f"{gpu.memory_bytes / 1e9:.0f} GB at {gpu.memory_bandwidth_bytes_s / 1e12:.2f} TB/s"


def _section(title: str, entries: Mapping[str, str]) -> None:
    print(f"{title}:")
    width = max((len(name) for name in entries), default=0)
    for name, about in entries.items():
        print(f"  {name:<{width}}  {about}")
    print()
