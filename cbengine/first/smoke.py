"""First contact with a device: every check on its own, nothing stops the rest, each line is written as it happens.

    OUT/smoke.jsonl     a line a check: its name, how it ended, seconds, what was found
    OUT/smoke.log       what the checks' processes wrote to stderr: stacks of those that hung or crashed
    OUT/*.json, *.csv   tables that a check made

Checks run one after the other in a process of their own. One that hangs, crashes or leaves the GPU's context broken
costs that process, and another one goes on with the next check: at most PROCESSES of them, and LIMIT_S in all. This
module needs the standard library only, so it can say that anything else is missing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROCESSES = 4
LIMIT_S = 240.0
POLL_S = 0.1
BROKEN = 75  # exit status of a process whose GPU context can no longer be used
OK, FAILED, NOT_CHECKED = "ok", "failed", "not checked"
Found = dict[str, Any]


class NotHereError(Exception):
    """The check needs what this machine does not have: the message says what."""


@dataclass(frozen=True, slots=True)
class CheckPlace:
    """Where a check runs, and where its tables go."""

    device: str  # cuda, or cpu
    out: Path

    def only_on_gpu(self) -> None:
        if self.device != "cuda":
            raise NotHereError("needs a CUDA device")


@dataclass(frozen=True, slots=True)
class SmokeCheck:
    """What is looked at, the longest it may take, and the look itself: returns what was found, raises what is wrong."""

    name: str
    limit_s: float
    look: Callable[[CheckPlace], Found]


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """How a check ended."""

    check: str
    ended: str
    seconds: float
    found: Found
    error: str = ""

    def __str__(self) -> str:
        findings = "; ".join(f"{name} {_short(value)}" for name, value in self.found.items())
        return f"{self.ended:<11} {self.seconds:6.1f} s  {self.check}: {self.error or findings}"

    def json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields, default=str)


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


# -- the process that watches -----------------------------------------------------------------------------------------


def smoke(
    out: Path, checks: Sequence[SmokeCheck], worker: Sequence[str], say: Callable[[str], None], limit_s: float = LIMIT_S
) -> bool:
    """Run all checks; has none failed? A check that was not reached is a failed one. `worker` is the command of a
    process that calls `work`: the number of its first check is added. Raises OSError where `out` cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    book, until, begun = out / "smoke.jsonl", time.monotonic() + limit_s, 0
    book.write_text("", encoding="utf-8")
    (out / "smoke.log").write_text("", encoding="utf-8")
    for _ in range(PROCESSES):
        if begun < len(checks) and time.monotonic() < until:
            begun = _process(out, checks, begun, worker, until, say)
    for check in checks[begun:]:
        _add(book, CheckOutcome(check.name, FAILED, 0.0, {}, "not reached: no process or no time was left"), say)
    lines = [json.loads(text) for text in book.read_text(encoding="utf-8").splitlines()]
    ended = [line["ended"] for line in lines]
    say(f"{ended.count(OK)} ok, {ended.count(FAILED)} failed, {ended.count(NOT_CHECKED)} not checked: {book}")
    return FAILED not in ended


def _process(
    out: Path, checks: Sequence[SmokeCheck], begun: int, worker: Sequence[str], until: float, say: Callable[[str], None]
) -> int:
    """Let a process run checks from number `begun` on; returns the number of the first that it left undone."""
    book, shown, since = out / "smoke.jsonl", begun, time.monotonic()
    with (out / "smoke.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen([*worker, str(begun)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    code = None
    try:
        while code is None:
            code = process.poll()
            lines = book.read_text(encoding="utf-8").split("\n")[:-1]  # the last piece may still be being written
            for text in lines[shown:]:
                say(str(CheckOutcome(**json.loads(text))))
                since = time.monotonic()
            shown = len(lines)
            if code is None and time.monotonic() > until:
                process.kill()
            time.sleep(POLL_S if code is None else 0)
    finally:  # also where this one is asked to end
        process.kill()
        process.wait()
    if shown == len(checks) or code == BROKEN:
        return shown
    took = time.monotonic() - since
    how = f"had not ended after {took:.0f} s" if code == -signal.SIGKILL or took > checks[shown].limit_s else "died"
    text = f"its process {how}, exit status {code}: {_last(out / 'smoke.log')}"
    _add(book, CheckOutcome(checks[shown].name, FAILED, round(took, 3), {}, text), say)
    return shown + 1


def _last(log: Path) -> str:
    """What a process said last, on one line: the top of its stack if it hung, else its last lines."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    tops = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    return " | ".join(lines[tops[-1] + 1 :][:3] if tops else lines[-3:]) or "it has said nothing"


def _add(book: Path, line: CheckOutcome, say: Callable[[str], None]) -> None:
    with book.open("a", encoding="utf-8") as file:
        file.write(line.json() + "\n")
    say(str(line))


# -- the process that checks ------------------------------------------------------------------------------------------


def work(place: CheckPlace, checks: Sequence[SmokeCheck]) -> int:
    """Run checks in this process, a line for each. Returns 0; ends the process with BROKEN after a check that broke the
    GPU's context, at once: giving memory back would crash it.
    """
    for check in checks:
        faulthandler.dump_traceback_later(check.limit_s, exit=True)
        line = looked(check, place)
        broken = line.ended == FAILED and ("CUDA error" in line.error or _context_is_broken(place))
        faulthandler.cancel_dump_traceback_later()
        with (place.out / "smoke.jsonl").open("a", encoding="utf-8") as file:
            file.write(line.json() + "\n")
        if broken:
            sys.stderr.flush()
            os._exit(BROKEN)
    return 0


def looked(check: SmokeCheck, place: CheckPlace) -> CheckOutcome:
    """One check, whatever it raises."""
    begun = time.perf_counter()
    try:
        findings, ended, error = check.look(place), OK, ""
    except NotHereError as reason:
        findings, ended, error = {}, NOT_CHECKED, str(reason)
    except (Exception, SystemExit) as failure:
        traceback.print_exc()
        sys.stderr.flush()
        where = traceback.extract_tb(failure.__traceback__)[-1]
        spot = f"{Path(where.filename).name}:{where.lineno}"
        findings, ended, error = {}, FAILED, f"{type(failure).__name__} at {spot}: {str(failure)[:1500]}"
    return CheckOutcome(check.name, ended, round(time.perf_counter() - begun, 3), findings, error)


def _context_is_broken(place: CheckPlace) -> bool:
    """An illegal access breaks everything that comes after it in the same process."""
    if place.device != "cuda" or "torch" not in sys.modules:
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:  # where there is no GPU at all, nothing is broken
        return torch.cuda.is_available()
    return False
