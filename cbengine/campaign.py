"""What is to be measured on a GPU, in parts of under ten minutes, each begun and resumed on its own.

    OUT/<gpu>/provenance.json      device, driver, versions, commit, and every command with its time and exit status
    OUT/<gpu>/<part>/log.txt       what the commands printed
    OUT/<gpu>/<part>/runs          run directories, timelines left out
    OUT/<gpu>/<part>/report        their report

A command that ended well, by the same commit, is not run again; one that failed, or did not fit the time, is. The same
parts run on a CPU device, with a tiny model, to rehearse: their numbers are of no GPU, and their folder says so.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cbengine import provenance
from cbengine.errors import MissingError, UsageError
from cbengine.provenance import ENDED, Ledger
from cbsim.runs import ServerError

TIMELINE = "timeline.json.gz"
GPU_8K = "8k_b32"
SHORT = ("--set", "workload.output_tokens=2048")
SHORTER = ("--set", "workload.output_tokens=512")


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


def _on_gpu() -> dict[str, Part]:
    def run(*words: str) -> tuple[str, ...]:
        return ("cbengine", "replay", *words, "--device", "cuda", "--out", "{runs}", "--quiet")

    def peer(loop: str) -> tuple[tuple[str, ...], ...]:
        ours = run(GPU_8K, *SHORT, "--set", f"loop.mode={loop}")
        return ours, (*ours, "--engine", "transformers")

    tests = ("pytest", "-q", "-rs", "-p", "no:cacheprovider")
    return {
        "kernels": Part(
            "kernels against float64", [(*tests, *(f"tests/cbengine/test_{name}.py" for name in ("kernels", "ops")))]
        ),
        "right": Part("tokens, memory, times and errors of the device", [(*tests, "tests/cbengine", "-m", "gpu")]),
        "sizes": Part("host copies and attention, size by size", [(*_bench("cuda"), "--kernels")]),
        "bench": Part("device, kernels, engine and peer against what is possible", [_bench("cuda"), run("tiny_cpu")]),
        "async": Part("8k_b32, asynchronous", [run(GPU_8K, "--set", "loop.mode=async"), _report()]),
        "sync": Part("8k_b32, synchronous", [run(GPU_8K, "--set", "loop.mode=sync"), _report()]),
        "graphs": Part("8k_b32 launched kernel by kernel", [run(GPU_8K, *SHORT, "--no-cuda-graphs"), _report()]),
        "profile": Part(
            "GPU-active by events and by torch's profiler",
            [run(GPU_8K, *SHORTER, "--profile", "50"), run(GPU_8K, *SHORTER, "--profile", "50", "--no-cuda-graphs")],
        ),
        "peer-sync": Part("beside transformers' own batching, synchronous", [*peer("sync"), _report()]),
        "peer-async": Part("beside transformers' own batching, asynchronous", [*peer("async"), _report()]),
        "prompts": Part("8k_prompt_b32: prefills of 8K tokens", [run("8k_prompt_b32"), _report()]),
        "predict-reference": Part("8k_b32, simulated and measured", [_predict("cuda", "reference"), _scores()]),
        "predict-load": Part("arrivals below and at capacity", [_predict("cuda", "load"), _scores()]),
        "predict-shapes": Part(
            "chunk sizes, small caches, shared prefixes, batch sizes",
            [_predict("cuda", "chunk", "memory", "prefix", "batch"), _scores()],
        ),
        "predict-cpu": Part("async over injected CPU cost, 8B", [_predict("cuda", "cpu"), _scores()]),
        "predict-1b": Part("the same and arrivals with a 1B model", [_predict("cuda", "1b"), _scores()]),
    }


def _rehearsal(device: str) -> dict[str, Part]:
    def run(*words: str) -> tuple[str, ...]:
        return ("cbengine", "replay", "tiny_cpu", *words, "--device", device, "--out", "{runs}", "--quiet")

    found = {
        "bench": Part("the CPU's work a step", [_bench("modelled")]),
        "loops": Part("tiny_cpu, both loops", [run(), _report()]),
        "peer-sync": Part(
            "beside transformers' own batching",
            [run("--set", "loop.mode=sync"), (*run("--set", "loop.mode=sync"), "--engine", "transformers"), _report()],
        ),
        "predict-cpu": Part("simulated and measured", [(*_predict(device, "cpu-0", "cpu-5"), "--quick"), _scores()]),
    }
    if device == "modelled":  # the peer computes: it has no device that only takes time
        del found["peer-sync"]
    return found


def _bench(device: str) -> tuple[str, ...]:
    return ("cbengine", "bench", "--device", device, "--out", "{runs}", *(() if device == "cuda" else ("--quick",)))


def _predict(device: str, *cases: str) -> tuple[str, ...]:
    return ("cbengine", "validate", *cases, "--device", device, "--out", "{out}")


def _scores() -> tuple[str, ...]:
    return ("analysis", "hardware", "{device}")


def _report() -> tuple[str, ...]:
    return ("analysis", "report", "{runs}/*", "--out", "{part}/report")


# -- running ----------------------------------------------------------------------------------------------------------


def campaign(names: Sequence[str], device: str, out: Path, say: Callable[[str], None]) -> list[str]:
    """Run the parts of these names (all, if none is named), as far as they are not done. Returns the commands that
    failed. Raises UsageError for an unknown name, MissingError without the device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no CUDA device here")
    known = parts(device)
    for name in names:
        if name not in known:
            raise UsageError(f"part {name!r}: expected one of {', '.join(known)}")
    place = out / provenance.slug(device)
    ledger = Ledger(place / "provenance.json", device)
    failed = []
    for name in names or known:
        say(f"{name}: {known[name].about}")
        failed += _part(known[name], place / name, ledger, say)
    return failed


def _part(part: Part, place: Path, ledger: Ledger, say: Callable[[str], None]) -> list[str]:
    left_s, failed = part.minutes * 60, []
    for command in part.commands:
        words = _filled(command, place)
        told = shlex.join(["python", "-m", *words])
        if ledger.done(told):
            say(f"  done before: {told}")
            continue
        say(f"  {told}")
        code, seconds = _run(_expanded(words), place / "log.txt", left_s)
        left_s -= seconds
        ledger.add(told, code, seconds)
        if code not in ENDED:
            failed.append(told)
            say(f"  exit status {code}: {place / 'log.txt'}")
    for timeline in place.rglob(TIMELINE):
        timeline.unlink()
    return failed


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
    found = [sys.executable, "-m"]
    for word in words:
        found += sorted(map(str, Path(word[:-1]).iterdir())) if word.endswith("/*") else [word]
    return found


def _run(words: Sequence[str], log: Path, limit_s: float) -> tuple[int, float]:
    """(exit status, seconds). What it prints goes to the log; 124 is a command that did not fit the time."""
    start = time.perf_counter()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(words[1:])}\n")
            file.flush()
            code = subprocess.run(
                words, stdout=file, stderr=subprocess.STDOUT, timeout=max(1.0, limit_s), check=False
            ).returncode
    except subprocess.TimeoutExpired:
        code = 124
    except OSError as error:
        raise ServerError(f"{log}: cannot be written: {error.strerror or error}") from error
    return code, time.perf_counter() - start
