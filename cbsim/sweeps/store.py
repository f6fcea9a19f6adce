"""The store of the runs of sweeps: a folder that several sweeps may share, also at the same time.

    runs/<code>/<key>/        a run directory, identified by its scenario, code and data; complete or absent
    failed/<code>/<key>.json  why a run failed, until a run with that key succeeds
    <name>.parquet            the table of a sweep

A run is written under a temporary name and renamed once it is complete. Runs of another state of the code are kept but
not used.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cbsim.errors import Interrupted, RunError, UserError
from cbsim.files import access, read_json
from cbsim.record.directory import MARKER, write_whole
from cbsim.runs.progress import ProgressLine
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import identity
from cbsim.sweeps.work import BINDS, Executor, Made, Task

SUMMARY = "summary.json"
SEAL = "seal.json"  # digests of a run's files when they were stored, by name
PART = ".part-"
STALE_S = 24 * 3600.0  # older temporary directories were left by sweeps that were killed


class Store:
    """A folder of runs made by the code in state `code` (that of now). Raises UserError if it cannot be written."""

    def __init__(self, path: Path, code: str | None = None) -> None:
        self.path, self.code = path, code or identity.code()
        self._part = f"{PART}{token_hex(4)}-"
        self._runs, self._failed = path / "runs" / self.code, path / "failed" / self.code
        with access(f"--store {path}", UserError, "written"):
            for folder in (self._runs, self._failed):
                folder.mkdir(parents=True, exist_ok=True)
            self.tidy()

    def tidy(self) -> None:
        """Remove what processes left that were ended: those of this store, and of others that are stale."""
        for part in self._runs.glob(f"{PART}*"):
            with suppress(OSError):
                if part.name.startswith(self._part) or time.time() - part.stat().st_mtime > STALE_S:
                    shutil.rmtree(part)

    @property
    def other_states(self) -> dict[str, int]:
        states = [folder for folder in self._runs.parent.iterdir() if folder.is_dir() and folder.name != self.code]
        return {folder.name: sum(1 for _ in folder.iterdir()) for folder in sorted(states)}

    def run(self, key: str) -> Path:
        return self._runs / key

    def holds(self, key: str, files: Sequence[str]) -> bool:
        """Return whether a run has these files, each as it was stored."""
        with suppress(OSError, RunError):
            return bool(self.contents(key, files))
        return False

    def contents(self, key: str, files: Sequence[str]) -> list[bytes]:
        """Return these files of a run. Raises OSError if it lacks one, RunError if one is not as it was stored."""
        run = self.run(key)
        contents = [(run / name).read_bytes() for name in files]
        seal = read_json(run / SEAL, RunError)
        for name, content in zip(files, contents, strict=True):
            if seal.get(name) != _digest(key, name, content):
                raise RunError(f"{run / name}: was altered since it was stored")
        if (run / MARKER).exists():
            raise RunError(f"{run}: {MARKER} lies in it")
        return contents

    def keep(self, made: Made) -> None:
        """Store what is not stored yet of the outcome of a task: its run, or the reason why it failed."""
        if made.files:
            self.put(made.key, made.files)
        if made.reason is not None:
            with access(path := self._failed / f"{made.key}.json", RunError, "written"):
                write_whole(path, (json.dumps({"reason": made.reason}) + "\n").encode())

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Store a run. A stored one of the same key is equal, so only one without these files is replaced."""
        with (
            access(self.run(key), RunError, "written"),
            TemporaryDirectory(prefix=self._part, dir=self._runs, ignore_cleanup_errors=True) as folder,
        ):
            new, old = Path(folder) / "new", Path(folder) / "old"
            seal = {name: _digest(key, name, content) for name, content in files.items()}
            for name, content in {**files, SEAL: json.dumps(seal).encode()}.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(content)
            if not self.holds(key, list(files)):
                with suppress(FileNotFoundError):
                    self.run(key).replace(old)
            try:
                new.replace(self.run(key))
            except OSError:
                if not self.run(key).is_dir():
                    raise  # else another sweep stored this run first
            (self._failed / f"{key}.json").unlink(missing_ok=True)

    def outcome(self, key: str, files: Sequence[str] = (SUMMARY,)) -> tuple[dict[str, Any] | None, str | None]:
        """Return the summary of a run that has these files, the summary first, or else the reason why it failed."""
        with suppress(OSError, RunError):
            return dict(json.loads(self.contents(key, files)[0])), None
        with suppress(RunError, KeyError):
            return None, str(read_json(self._failed / f"{key}.json", RunError)["reason"])
        return None, None


def _digest(key: str, name: str, content: bytes) -> str:
    return sha256(f"{key}/{name}\n".encode() + content).hexdigest()


def first_of(labels: Iterable[str]) -> str:
    """Return the first of labels, and how many others there are; equal ones count once."""
    first, *others = dict.fromkeys(labels)
    return f"{first} and {len(others):,} more" if others else first


class Progress:
    """A progress line on stderr for the runs that a store lacked: points done and failed, points a second, the time
    left; before the first of them the line `about`. Nothing is printed if `silent`, nor of quick runs if `brief`.
    """

    def __init__(self, *, silent: bool = False, brief: bool = False, about: str = "") -> None:
        self._silent, self._brief, self._about = silent, brief, "" if silent or not about else f"{about}\n"

    def begin(self, total: int) -> None:
        sys.stderr.write(self._about)
        self._about = ""
        self._total, self._done, self._failed, self._written = total, 0, 0, 0
        self._line = ProgressLine(5.0)

    def __call__(self, made: Made) -> None:
        """Count a run that was made and stored, and refresh the line when it is due."""
        self._done += 1
        self._failed += made.reason is not None
        if self._line.due:
            self._write()

    def end(self) -> None:
        """Write the last line, after all runs or an interruption."""
        if self._done != self._written and not (self._brief and not self._written):
            self._write(last=True)

    def _write(self, *, last: bool = False) -> None:
        if self._silent:
            return
        self._written = self._done
        message = f"{self._done:,} of {self._total:,} points, {self._done / max(self._line.spent_s, 1e-9):.3g} a second"
        message += f", {self._failed:,} failed" if self._failed else ""
        self._line.write(message, self._done, self._total, last=last)


class Run(NamedTuple):
    """The summary of a run, and sentences that state what limits it."""

    summary: Mapping[str, Any]
    limits: Sequence[str]


class Runs:
    """The runs of a store, and the executor that makes the missing ones. `made` counts the runs made."""

    def __init__(self, store: Store, executor: Executor, progress: Progress | None = None) -> None:
        self.store, self.executor, self._progress = store, executor, progress or Progress(silent=True)
        self.made = 0

    def make(
        self, tasks: Iterable[Task], files: Sequence[str] = (SUMMARY,), hear: Callable[[Made], object] = lambda _: None
    ) -> None:
        """Make the runs of which the store lacks any of `files`, and store each, or the reason why it failed; stderr
        says if stored ones are damaged. `hear` is called with each outcome; an exception that it raises ends the work.
        Raises RunError, Interrupted.
        """
        lacking, damaged = dict[str, Task](), list[str]()
        for task in tasks:
            try:
                self.store.contents(task.key, files)
            except (OSError, RunError) as error:
                lacking[task.key] = task
                damaged += [str(error)] if isinstance(error, RunError) else []
        if damaged:
            print(f"damaged   {first_of(damaged)}: simulated again", file=sys.stderr)
        self._progress.begin(len(lacking))
        try:
            for made in self.executor.each(task._replace(store=self.store.put) for task in lacking.values()):
                self.store.keep(made)
                self.made += 1
                self._progress(made)
                hear(made)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on where it stopped") from None
        finally:
            self._progress.end()

    def outcome(self, key: str) -> dict[str, Any] | str:
        """Return the summary of a run, or why there is none."""
        summary, reason = self.store.outcome(key)
        return summary or reason or "it was not made"

    def of(self, scenarios: Sequence[Scenario], warmup: float) -> list[Run]:
        """Return the runs of these scenarios in order; `warmup` is that of Task. Raises RunError if one fails."""
        tasks = [Task(identity.key(each, warmup), each, "summary", warmup, limits=True) for each in scenarios]
        seeds = {task.key: task.scenario.seed for task in tasks}

        def check(made: Made) -> None:
            if made.reason is not None:
                raise RunError(f"{scenarios[0].name}: seed {seeds[made.key]}: {made.reason}")

        self.make(tasks, (SUMMARY, BINDS), check)
        with access(self.store.path, RunError):
            made = [self.store.contents(task.key, (SUMMARY, BINDS)) for task in tasks]
        return [Run(*map(json.loads, each)) for each in made]
