"""`cbsim sweep`: what a person sees of a sweep while it works, and when it is done."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cbsim.server.progress import SOON_S, roughly
from cbsim.server.status import ERROR, OK
from cbsim.sweeps import sweep_file, table
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.sweep import Shard, Sweep, Swept
from cbsim.sweeps.work import Made

MOST_REASONS = 10


class SweepOptions(NamedTuple):
    """What `cbsim sweep` was told, parsed."""

    file: Path
    store: Path
    shard: Shard
    as_json: bool
    quiet: bool


def run(options: SweepOptions, executor: Executor) -> int:
    """Do what is missing of a sweep, say what came out. The exit status: 1 if a point failed or none was made."""
    file, base = sweep_file.read(options.file)
    sweep = Sweep(file, base, options.store, options.shard)
    silent = options.quiet or options.as_json
    if not silent:
        _say_begun(sweep, options, executor)
    progress = Progress(len(sweep.missing), silent=silent)
    try:
        swept = sweep.run(executor, progress)
    except KeyboardInterrupt:
        progress.end()
        print("cbsim: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return ERROR
    progress.end()
    if options.as_json:
        print(json.dumps(_numbers(swept), indent=2, allow_nan=False))
    elif options.quiet:
        print(swept.path)
    else:
        _say(swept)
    _say_failed(swept)
    return ERROR if swept.failed else OK


def _say_begun(sweep: Sweep, options: SweepOptions, executor: Executor) -> None:
    shard = f", shard {options.shard.number} of {options.shard.of}" if options.shard.of > 1 else ""
    print(f"{sweep.file.name}: {len(sweep.points):,} points, {len(sweep.missing):,} to be run{shard}; {executor.about}")
    for state, runs in sweep.store.others.items():
        print(f"{sweep.store.path}: {runs:,} runs of another state of the code ({state}) stay apart")


class Progress:
    """A line on stderr: points done and failed, points a second, the time left."""

    def __init__(self, total: int, *, silent: bool) -> None:
        self._total, self._silent, self._live = total, silent, sys.stderr.isatty()
        self._done = self._failed = self._written = 0
        self._start = self._last = time.monotonic()

    def __call__(self, made: Made) -> None:
        """To be called for every point."""
        self._done += 1
        self._failed += made.reason is not None
        if not self._silent and time.monotonic() - self._last > (0.1 if self._live else 5.0):
            self._last = time.monotonic()
            self._write("" if self._live else "\n")

    def end(self) -> None:
        if not self._silent and self._done != self._written:
            self._write("\n")

    def _write(self, end: str) -> None:
        spent, self._written = time.monotonic() - self._start, self._done
        text = f"{self._done:,} of {self._total:,} points, {self._done / max(spent, 1e-9):.3g} a second"
        text += f", {self._failed:,} failed" if self._failed else ""
        if spent > SOON_S and self._done < self._total:
            text += f", {roughly(spent * (self._total - self._done) / self._done)} left"
        sys.stderr.write(f"\r{text}\x1b[K{end}" if self._live else f"{text}{end}")
        sys.stderr.flush()


def _say(swept: Swept) -> None:
    counts = {status: swept.count(status) for status in (table.DONE, table.FAILED, table.MISSING)}
    print(", ".join(f"{count:,} {status}" for status, count in counts.items() if count or status == table.DONE))
    print(f"table     {swept.path}")
    print(f"read it   pandas.read_parquet({str(swept.path)!r})")


def _say_failed(swept: Swept) -> None:
    for reason, points in list(swept.failed.items())[:MOST_REASONS]:
        where = ", ".join(f"{name}={value}" for name, value in points[0].settings.items()) or points[0].scenario.name
        more = f" and {len(points) - 1} more" if len(points) > 1 else ""
        print(f"failed    {where}{more}: {reason}", file=sys.stderr)


def _numbers(swept: Swept) -> dict[str, object]:
    rows: Sequence[dict[str, object]] = swept.table.to_pylist()
    return {"name": swept.name, "table": str(swept.path), "points": rows}
