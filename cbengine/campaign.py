"""What is to be measured on a GPU, in parts of under ten minutes, each begun and resumed on its own.

    OUT/<gpu>/provenance.json      device, driver, versions, commit, and every command with its time and exit status
    OUT/<gpu>/<part>/log.txt       what the commands printed
    OUT/<gpu>/<part>/runs          run directories, timelines left out
    OUT/<gpu>/<part>/report        their report

A command that ended well, by the same commit, is not run again; one that failed, or did not fit the time, is. The same
parts run on a CPU device, with a tiny model, to rehearse: their numbers are of no GPU, and their folder says so.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cbengine.errors import MissingError, UsageError
from cbsim.environment import git_state, packages
from cbsim.runs import ServerError

TIMELINE = "timeline.json.gz"
GPU_8K = "8k_b32"
SHORT = ("--set", "workload.output_tokens=2048")
SHORTER = ("--set", "workload.output_tokens=512")


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that belong together. `{runs}` and `{part}` in a word are the part's folders."""

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
        "calibrate": Part("coefficients for the simulator", [_calibrate("cuda")]),
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
        "calibrate": Part("coefficients for the simulator", [_calibrate("process")]),
    }
    if device == "modelled":  # the peer computes: it has no device that only takes time
        del found["peer-sync"]
    return found


def _bench(device: str) -> tuple[str, ...]:
    return ("cbengine", "bench", "--device", device, "--out", "{runs}", *(() if device == "cuda" else ("--quick",)))


def _calibrate(device: str) -> tuple[str, ...]:
    quick = () if device == "cuda" else ("--quick",)
    return ("cbengine", "calibrate", "--device", device, *quick, "--out", "{part}/coefficients.fitted.yaml")


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
    place = out / _slug(device)
    ledger = _Ledger(place / "provenance.json", device)
    failed = []
    for name in names or known:
        say(f"{name}: {known[name].about}")
        failed += _part(known[name], place / name, ledger, say)
    return failed


def _part(part: Part, place: Path, ledger: _Ledger, say: Callable[[str], None]) -> list[str]:
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
        if code:
            failed.append(told)
            say(f"  exit status {code}: {place / 'log.txt'}")
    for timeline in place.rglob(TIMELINE):
        timeline.unlink()
    return failed


def _filled(command: Sequence[str], place: Path) -> list[str]:
    """The command with the part's folders in it."""
    return [word.replace("{runs}", str(place / "runs")).replace("{part}", str(place)) for word in command]


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


class _Ledger:
    """provenance.json: where and by what, and each command's end."""

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._commands: list[dict[str, Any]] = _read(path).get("commands", [])
        self._facts = facts(device)

    def done(self, command: str) -> bool:
        """Has this commit run it well?"""
        commit = self._facts["git"]["commit"]
        wanted = (command, 0, commit)
        return any((c["command"], c["exit"], c["commit"]) == wanted for c in self._commands)

    def add(self, command: str, code: int, seconds: float) -> None:
        entry = {"command": command, "exit": code, "seconds": round(seconds, 1), "commit": self._facts["git"]["commit"]}
        self._commands.append(entry)
        text = json.dumps({**self._facts, "commands": self._commands}, indent=2) + "\n"
        try:
            self._path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ServerError(f"{self._path}: cannot be written: {error.strerror or error}") from error


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"commands": [dict(one) for one in found["commands"]]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not the record of an earlier call: {error}") from None


def facts(device: str) -> Mapping[str, Any]:
    """Device, driver, versions and commit."""
    return {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else f"CPU ({device}): no GPU was measured",
        "cuda": torch.version.cuda if device == "cuda" else None,
        "driver": _driver() if device == "cuda" else None,
        "python": platform.python_version(),
        "packages": packages(),
        "git": git_state(),
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def _slug(device: str) -> str:
    """The folder of a device: `h100-80gb-hbm3`, or `cpu-process`."""
    if device != "cuda":
        return f"cpu-{device}"
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(0).lower())
    return "-".join(word for word in words if word != "nvidia")
