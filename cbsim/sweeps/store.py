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
        self._runs, self._failed = path / "runs" / self.code, path / "failed" / self.code
        with access(f"--store {path}", UserError, "written"):
            for folder in (self._runs, self._failed):
                folder.mkdir(parents=True, exist_ok=True)
            for part in self._runs.glob(f"{PART}*"):
                with suppress(OSError):
                    if time.time() - part.stat().st_mtime > STALE_S:
                        shutil.rmtree(part)

    @property
    def other_states(self) -> dict[str, int]:
        states = [folder for folder in self._runs.parent.iterdir() if folder.is_dir() and folder.name != self.code]
        return {folder.name: sum(1 for _ in folder.iterdir()) for folder in sorted(states)}

    def keys(self) -> set[str]:
        return {folder.name for folder in self._runs.iterdir() if not folder.name.startswith(".")}

    def run(self, key: str) -> Path:
        return self._runs / key

    def holds(self, key: str, files: tuple[str, ...]) -> bool:
        return all((self.run(key) / name).is_file() for name in (*files, SEAL))

    def keep(self, made: Made) -> None:
        """Store what is not stored yet of the outcome of a task: its run, or the reason why it failed."""
        if made.files:
            self.put(made.key, made.files)
        if made.reason is not None:
            with access(self.path, RunError, "written"):
                write_whole(self._failed / f"{made.key}.json", (json.dumps({"reason": made.reason}) + "\n").encode())

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Store a run. A stored one of the same key is equal, so only one that lacks some of the files is replaced."""
        with (
            access(self.path, RunError, "written"),
            TemporaryDirectory(prefix=PART, dir=self._runs, ignore_cleanup_errors=True) as folder,
        ):
            part = Path(folder)
            seal = {name: _digest(key, name, content) for name, content in files.items()}
            for name, content in {**files, SEAL: json.dumps(seal).encode()}.items():
                (part / name).parent.mkdir(exist_ok=True)
                (part / name).write_bytes(content)
            part.chmod(0o755)
            old = part.with_name(f"{part.name}-old")
            if self.run(key).exists() and not self.holds(key, tuple(files)):
                self.run(key).replace(old)
            try:
                part.replace(self.run(key))
            except OSError:
                if not self.run(key).is_dir():
                    raise  # else another sweep stored this run first
            shutil.rmtree(old, ignore_errors=True)
            (self._failed / f"{key}.json").unlink(missing_ok=True)

    def reason(self, key: str) -> str | None:
        with suppress(OSError, ValueError, KeyError):
            return str(json.loads((self._failed / f"{key}.json").read_text(encoding="utf-8"))["reason"])
        return None

    def summary(self, key: str) -> dict[str, Any]:
        """Return the summary of a stored run. Raises RunError if it cannot be read."""
        return dict(self.read(key, SUMMARY))

    def read(self, key: str, name: str) -> Any:
        """Return the content of a JSON file of a stored run. Raises RunError if it is not as it was stored."""
        path = self.run(key) / name
        try:
            content = path.read_bytes()
            if read_json(path.parent / SEAL, RunError)[name] != _digest(key, name, content):
                raise ValueError("it was altered since it was stored")
            if (path.parent / MARKER).exists():
                raise ValueError(f"{MARKER} lies beside it")
            return json.loads(content)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RunError(f"{path}: cannot be read: {error}; remove {path.parent} to make it again") from error


def _digest(key: str, name: str, content: bytes) -> str:
    return sha256(f"{key}/{name}\n".encode() + content).hexdigest()


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
        self,
        tasks: Iterable[Task],
        files: tuple[str, ...] = (SUMMARY,),
        hear: Callable[[Made], object] = lambda _: None,
    ) -> None:
        """Make the runs of which the store lacks any of `files`, and store each, or the reason why it failed. `hear` is
        called with each outcome; an exception that it raises ends the work. Raises RunError, Interrupted.
        """
        lacking = {task.key: task for task in tasks if not self.store.holds(task.key, files)}
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

    def of(self, scenarios: Sequence[Scenario], warmup: float) -> list[Run]:
        """Return the runs of these scenarios in order; `warmup` is that of Task. Raises RunError if one fails."""
        tasks = [Task(identity.key(each, warmup), each, "summary", warmup, limits=True) for each in scenarios]
        seeds = {task.key: task.scenario.seed for task in tasks}

        def check(made: Made) -> None:
            if made.reason is not None:
                raise RunError(f"{scenarios[0].name}: seed {seeds[made.key]}: {made.reason}")

        self.make(tasks, (SUMMARY, BINDS), check)
        return [Run(self.store.summary(task.key), self.store.read(task.key, BINDS)) for task in tasks]
