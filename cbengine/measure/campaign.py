"""What is to be measured on a GPU, in parts of under ten minutes, each begun and resumed on its own.

    OUT/<gpu>/provenance.json      device, driver, versions, commit, and every command with its time and exit status
    OUT/<gpu>/<part>/log.txt       what the commands printed
    OUT/<gpu>/<part>/runs          run directories, timelines left out
    OUT/<gpu>/validation           what `predict` measured

A command that ended well, by the same commit, is not run again; one that failed, or did not fit the time, is. Three
calls have the parts that teach most, in that order, for machines that are to be had for minutes. Reports are made
afterwards, on any machine. Parts for a CPU device, with a tiny model and reports, rehearse: their numbers are of no
GPU, and their folder says so.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from cbengine.errors import MissingError, UsageError
from cbengine.measure import provenance
from cbengine.measure.provenance import Ledger, ended_well
from cbsim.server.running import ServerError

TIMELINE, INCOMPLETE = "timeline.json.gz", "INCOMPLETE"
OUT_OF_TIME = 124
GPU_8K = "8k_b32"
SHORT = ("--set", "workload.output_tokens=2048")
SHORTER = ("--set", "workload.output_tokens=512")
AT_4K = (  # the context halfway through
    *("--set", "workload.prompt_tokens=4096", "--set", "workload.output_tokens=96"),
    *("--set", "scheduler.max_batch_tokens=8192", "--set", "loop.mode=async"),
)
SAID_LINES = 30  # of a failed command's log
LEAST_S = 10.0  # no command is begun with less time than this


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that belong together. `{runs}` and `{part}` in a word are the part's folders, `{device}` that of all
    parts and `{out}` the one above.
    """

    about: str
    commands: Sequence[Sequence[str]]
    minutes: float = 9.5


def parts(device: str) -> dict[str, Part]:
    """What is measured on a device, in the order in which it should be; elsewhere than on a GPU, a rehearsal of it."""
    return _on_gpu() if device == "cuda" else _rehearsal(device)


KERNEL_TESTS = ("model/test_kernels", "model/test_ops", "peer/test_standin_kernels")
CALLS: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "first": ("smoke", "async", "tiles"),
        "second": ("kernels", "gemms", "sync", "wait", "graphs", "sizes", "right"),
        "third": ("predict-1b", "peer-async", "predict-cpu", "peer-sync", "predict-load"),
    },
    "process": {"first": ("smoke", "loops"), "second": ("bench",), "third": ("predict-cpu", "peer-sync")},
    "modelled": {"first": ("smoke", "loops"), "second": ("bench",), "third": ("predict-cpu",)},
}
"""Parts of a device that one call runs, by the call's name."""


def _on_gpu() -> dict[str, Part]:
    def run(*words: str) -> tuple[str, ...]:
        return ("cbengine", "replay", *words, "--device", "cuda", "--out", "{runs}", "--quiet")

    def short(loop: str, *words: str) -> tuple[str, ...]:
        return run(GPU_8K, *SHORTER, "--set", f"loop.mode={loop}", *words)

    def peer(loop: str) -> Part:
        theirs = short(loop, "--engine", "transformers", "--flash-attn", "stand-in")
        return Part(f"beside transformers' own batching, {loop}", [short(loop), theirs])

    # Versions differ from those of the checks: their warnings are no failures, and compiling kernels takes its time.
    tests = ("pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", "default", "-o", "timeout=600")
    return {
        "smoke": Part("everything once", [_smoke("cuda")], minutes=4.5),
        "async": Part("8k_b32, asynchronous", [run(GPU_8K, "--set", "loop.mode=async")]),
        "tiles": Part("attention's tiles, variant by variant", [(*_bench("cuda"), "--only", "tiles")]),
        "kernels": Part(
            "GPU-active by events and by torch's profiler, every kernel of a step",
            [run(GPU_8K, *AT_4K, "--profile", "32"), run(GPU_8K, *AT_4K, "--profile", "32", "--no-cuda-graphs")],
        ),
        "gemms": Part("every matrix product of the model, by rows", [(*_bench("cuda"), "--only", "gemms")]),
        "sync": Part("8k_b32, synchronous", [run(GPU_8K, "--set", "loop.mode=sync")]),
        "wait": Part(
            "waiting asleep and busy",
            [short("sync"), short("sync", "--wait", "spin"), short("async", "--wait", "spin")],
        ),
        "graphs": Part("8k_b32 launched kernel by kernel", [run(GPU_8K, *SHORT, "--no-cuda-graphs")]),
        "sizes": Part("host copies and attention, size by size", [(*_bench("cuda"), "--only", "copies", "attention")]),
        "right": Part(
            "kernels against float64; tokens, memory, times and errors of the device",
            [
                (*tests, *(f"tests/cbengine/{name}.py" for name in KERNEL_TESTS)),
                (*tests, "tests/cbengine", "-m", "gpu"),
            ],
        ),
        "bench": Part("device, kernels, engine and peer against what is possible", [_bench("cuda"), run("tiny_cpu")]),
        "peer-async": peer("async"),
        "peer-sync": peer("sync"),
        "prompts": Part("8k_prompt_b32: prefills of 8K tokens", [run("8k_prompt_b32")]),
        "predict-reference": Part("8k_b32, simulated and measured", [_predict("cuda", "reference")]),
        "predict-load": Part("arrivals below and at capacity", [_predict("cuda", "load")]),
        "predict-shapes": Part(
            "chunk sizes, small caches, shared prefixes, batch sizes",
            [_predict("cuda", "chunk", "memory", "prefix", "batch")],
        ),
        "predict-cpu": Part("async over injected CPU cost, 8B", [_predict("cuda", "cpu")]),
        "predict-1b": Part("the same and arrivals with a 1B model", [_predict("cuda", "1b")]),
    }


def _rehearsal(device: str) -> dict[str, Part]:
    def run(*words: str) -> tuple[str, ...]:
        return ("cbengine", "replay", "tiny_cpu", *words, "--device", device, "--out", "{runs}", "--quiet")

    rehearsed = {
        "smoke": Part("what a CPU can check", [_smoke("cpu")]),
        "bench": Part("the CPU's work a step", [_bench("modelled")]),
        "loops": Part("tiny_cpu, both loops", [run(), _report()]),
        "peer-sync": Part(
            "beside transformers' own batching",
            [run("--set", "loop.mode=sync"), (*run("--set", "loop.mode=sync"), "--engine", "transformers"), _report()],
        ),
        "predict-cpu": Part("simulated and measured", [(*_predict(device, "cpu-0", "cpu-5"), "--quick"), _scores()]),
    }
    if device == "modelled":  # the peer computes: it has no device that only takes time
        del rehearsed["peer-sync"]
    return rehearsed


def _smoke(device: str) -> tuple[str, ...]:
    return ("cbengine", "smoke", "--device", device, "--out", "{part}")


def _bench(device: str) -> tuple[str, ...]:
    return ("cbengine", "speed", "--device", device, "--out", "{runs}", *(() if device == "cuda" else ("--quick",)))


def _predict(device: str, *cases: str) -> tuple[str, ...]:
    return ("cbengine", "predict", *cases, "--device", device, "--out", "{out}")


def _scores() -> tuple[str, ...]:
    return ("analysis", "predictions", "{device}")


def _report() -> tuple[str, ...]:
    return ("analysis", "report", "{runs}/*", "--out", "{part}/report")


# -- running ----------------------------------------------------------------------------------------------------------


def campaign(
    names: Sequence[str], device: str, out: Path, say: Callable[[str], None], until: float = math.inf
) -> list[str]:
    """Run the parts of these names (all, if none is named), as far as they are not done and end before `until`, a
    moment of the monotonic clock. Returns the commands that failed or were not begun. Raises UsageError for an unknown
    name, MissingError without the device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no CUDA device here")
    known = parts(device)
    wanted = _wanted(names, known, CALLS[device])
    place = out / provenance.slug(device)
    ledger = Ledger(place / "provenance.json", device)
    left = []
    for name in wanted:
        say(f"{name}: {known[name].about}")
        left += _part(known[name], place / name, ledger, say, until)
    return left


def _wanted(names: Sequence[str], known: Mapping[str, Part], calls: Mapping[str, Sequence[str]]) -> list[str]:
    """Parts in the order in which they are named, each once."""
    wanted: dict[str, None] = {}
    for name in names:
        if name not in known and name not in calls:
            raise UsageError(f"part {name!r}: expected one of {', '.join(calls)}, {', '.join(known)}")
        wanted |= dict.fromkeys(calls.get(name, (name,)))
    return list(wanted or known)


def _part(part: Part, place: Path, ledger: Ledger, say: Callable[[str], None], until: float) -> list[str]:
    """Returns the commands that failed or were not begun before `until`. Commands are told apart with OUT for the
    folder of all, which may lie elsewhere on the next machine.
    """
    log, left = place / "log.txt", []
    until = min(until, time.monotonic() + part.minutes * 60)
    for command in part.commands:
        words = _filled(command, place)
        command_line = shlex.join(["python", "-m", *(word.replace(str(place.parents[1]), "OUT") for word in words)])
        if ledger.done(command_line):
            say(f"  done before: {command_line}")
            continue
        if (rest_s := until - time.monotonic()) < LEAST_S:
            say(f"  not begun, no time is left: {command_line}")
            left.append(command_line)
            continue
        say(f"  {command_line}")
        ledger.begin()
        code, seconds, printed = _run(_expanded(words), log, rest_s)
        ledger.add(command_line, code, seconds)
        if not ended_well(command_line, code):
            left.append(command_line)
            why = "ran out of time" if code == OUT_OF_TIME else f"ended with exit status {code}"
            say(f"  {why} after {seconds:.0f} s; the last lines of {log}:")
            for line in printed:
                say(f"    {line}")
    for timeline in place.rglob(TIMELINE):
        timeline.unlink()
    return left


def _filled(command: Sequence[str], place: Path) -> list[str]:
    """The command with the part's folders in it."""
    folders = {"{runs}": place / "runs", "{part}": place, "{device}": place.parent, "{out}": place.parent.parent}
    return [_replaced(word, folders) for word in command]


def _replaced(word: str, folders: Mapping[str, Path]) -> str:
    for name, folder in folders.items():
        word = word.replace(name, str(folder))
    return word


def _expanded(words: Sequence[str]) -> list[str]:
    """The command as it is run: by this Python, with what a trailing * stands for."""
    command = [sys.executable, "-m"]
    for word in words:
        command += whole_runs(Path(word[:-1])) if word.endswith("/*") else [word]
    return command


def whole_runs(folder: Path) -> list[str]:
    """Run directories, but for those that were cut short; none, if there is no folder."""
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    return [str(path) for path in folders if not (path / INCOMPLETE).exists()]


def _run(words: Sequence[str], log: Path, limit_s: float) -> tuple[int, float, list[str]]:
    """(exit status, seconds, last lines). What it prints goes to the log; 124 is a command that did not fit the time:
    it is ended with every process that it started.
    """
    start = time.perf_counter()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(words[1:])}\n")
            file.flush()
            begun = log.stat().st_size
            code = _ended(words, file, limit_s)
        with log.open("rb") as file:
            file.seek(begun)
            printed = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        raise ServerError(f"{log}: cannot be written: {error.strerror or error}") from error
    return code, time.perf_counter() - start, printed[-SAID_LINES:]


def _ended(words: Sequence[str], file: IO[str], limit_s: float) -> int:
    """The exit status of a command in a group of processes of its own."""
    with subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
