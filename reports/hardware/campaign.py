"""Measurements on a GPU, in two calls of minutes for a machine that is available for a quarter of an hour.

    python reports/hardware/campaign.py first|second|rest|PART ... [--minutes 8] [--device cuda] [--out DIR]

    OUT/<gpu>/provenance.json    device, driver, versions, commit, and every command with its time and exit status
    OUT/<gpu>/<part>/log.txt     what the commands printed
    OUT/<gpu>/<part>/runs        run directories, without their timelines
    OUT/<gpu>/validation         the measurements of `predict`

A command that succeeded on the same commit is not run again; one that failed or ran out of time is. With `--archive
FILE` the results are in one .tgz, too, written after every command, and are taken from there where OUT has none: for a
machine of which only a few files come back. On the devices `process` and `modelled` the same parts are rehearsed on a
CPU with a tiny model: their numbers are of no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cbengine.measure import provenance
from cbsim.record.environment import code_version

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CALLS = {
    "first": ("right", "kernels", "peer", "speed", "tests"),
    "second": ("predict-reference", "predict-load", "predict-cpu"),
    "rest": ("wait", "graphs", "predict-1b"),
}
LIMIT_S = 570.0  # of a command, where there is no other
LEAST_S = 10.0  # no command is begun with less time than this
OUT_OF_TIME = 124
BAR_MISSED = 3  # exit status of `predict` and `replay` that have measured what they had to

Command = list[str]


def parts(device: str, folder: Path) -> dict[str, list[Command]]:
    """The commands of every part, the most instructive parts first. `folder`: of the device."""
    gpu = device == "cuda"

    def script(name: str, *options: str) -> Command:
        return [str(HERE / name), *options]

    def replay(part: str, *options: str) -> Command:
        scenario = ["8k_b32"] if gpu else ["tiny_cpu"]
        where = ["--device", device, "--out", str(folder / part / "runs"), "--quiet"]
        return ["-m", "cbengine", "replay", *scenario, *options, *where]

    def short(part: str, loop: str, *options: str) -> Command:
        return replay(
            part, "--set", f"workload.output_tokens={512 if gpu else 16}", "--set", f"loop.mode={loop}", *options
        )

    def predict(*cases: str) -> Command:
        return ["-m", "cbengine", "predict", *cases, "--device", device, "--out", str(folder.parent), *rough]

    rough = ["--later"] if gpu else ["--quick"]
    tests = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", "default", "-o", "timeout=600"]
    at_4k = ["workload.prompt_tokens=4096", "workload.output_tokens=96", "scheduler.max_batch_tokens=8192"]
    profiled = [word for change in at_4k for word in ("--set", change)] + ["--profile", "32"] if gpu else []
    eager = ["--no-cuda-graphs"] if gpu else []
    spin = ["--wait", "spin"] if gpu else []
    folders = ["tests/cbengine/model", "tests/cbengine/device", "tests/cbengine/test_tokens.py"]
    marked = [*tests, "-m", "gpu", *folders]  # a CPU finds them all, and runs none
    alone = "memory or step_table"  # those have the whole GPU to themselves
    beside = [*marked, "-n", "8", "--dist", "worksteal", "-k", f"not ({alone})"]
    where = "cuda" if gpu else "cpu"
    return {
        "right": [[*tests, "-n", "0", "tests/gpu"]],
        "kernels": [
            replay("kernels", *profiled, "--set", "loop.mode=async"),
            replay("kernels", *profiled, "--set", "loop.mode=async", *eager),
        ],
        "speed": [
            script("speed.py", *names, "--quick", "--device", where, "--out", str(folder / "speed"))
            for names in (SPEED if gpu else SPEED[:1])
        ],
        "tests": [beside, [*marked, "-k", alone]] if gpu else [[*marked, "--collect-only"]],
        "wait": [short("wait", "sync"), short("wait", "sync", *spin), short("wait", "async", *spin)],
        "graphs": [short("graphs", "async", *eager)],
        "predict-reference": [predict("8k_b32" if device != "process" else "long-b16")],
        "predict-load": [predict("load-85")],
        "predict-cpu": [predict(name) for name in (("cpu-0", "cpu-5", "cpu-2", "cpu-10") if gpu else ("cpu-0",))],
        "predict-1b": [predict("1b")] if device != "process" else [],
        "peer": [
            script("peer.py", "--loop", loop, "--device", where, "--out", str(folder / "peer"))
            for loop in ("sync", "async")
        ],
        "predict-shapes": [predict("load", "chunk", "memory", "prefix", "batch")] if gpu else [],
    }


SPEED = (("copies", "gemms", "attention"), ("tiles",))


class Ledger:
    """provenance.json: where and by what was measured, and how each command ended."""

    def __init__(self, path: Path, device: str) -> None:
        self._path, self._version = path, code_version()
        self._facts: dict[str, Any] = dict(provenance.facts(device))
        self._commands = json.loads(path.read_text(encoding="utf-8"))["commands"] if path.exists() else []
        self._write()

    def done(self, command: str) -> bool:
        """Has this commit run the command to its end? Of an unknown commit nothing is known to be done."""
        same = (c for c in self._commands if (c["command"], c["commit"]) == (command, self._version))
        return self._version is not None and any(ended_well(command, c["exit"]) for c in same)

    def add(self, command: str, code: int, seconds: float) -> None:
        entry = {"command": command, "exit": code, "seconds": round(seconds, 1), "commit": self._version}
        self._commands.append(entry)
        self._write()

    def _write(self) -> None:
        provenance.write_json(self._path, {**self._facts, "commands": self._commands})


def ended_well(command: str, code: int) -> bool:
    """Has a command measured what it had to? A missed bar is a result, but of pytest 3 is an error."""
    return code == 0 or (code == BAR_MISSED and "pytest" not in command)


def run(command: Command, log: Path, limit_s: float) -> int:
    """The exit status, 124 if the time was over: then the command is ended with every process that it started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ python {shlex.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def pack(folder: Path, archive: Path) -> None:
    """Write the results as one file, whole at any time, without timelines, which are drawn again from the tables."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    half = archive.with_name(f"{archive.name}.part")
    with tarfile.open(half, "w:gz") as file:
        file.add(folder, folder.name, filter=lambda one: None if one.name.endswith("timeline.json.gz") else one)
    half.replace(archive)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if a command failed or was not begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="PART")
    parser.add_argument("--device", choices=("cuda", "process", "modelled"), default="cuda")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after so many (60)")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="(reports/hardware)")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="keep it all in this .tgz, too, and go on from it")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    until, folder = time.monotonic() + 60 * args.minutes, args.out.resolve() / provenance.slug(args.device)
    known, left = parts(args.device, folder), 0
    names = list(dict.fromkeys(part for name in args.parts for part in CALLS.get(name, (name,))))
    if unknown := [name for name in names if name not in known]:
        parser.error(f"part {unknown[0]!r}: expected {', '.join(CALLS)}, {', '.join(known)}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # the command under way is ended, too
        signal.signal(number, lambda *_: sys.exit(1))
    if args.archive and args.archive.exists() and not folder.exists():
        with tarfile.open(args.archive) as archive:
            archive.extractall(folder.parent, filter="data")
    ledger = Ledger(folder / "provenance.json", args.device)
    for name in names:
        for command in known[name]:
            line = f"python {shlex.join(command)}".replace(str(args.out.resolve()), "OUT").replace(f"{ROOT}/", "")
            rest_s = min(until - time.monotonic(), LIMIT_S)
            if ledger.done(line):
                print(f"{name}: done before: {line}", flush=True)
            elif rest_s < LEAST_S:
                print(f"{name}: no time is left: {line}", flush=True)
                left += 1
            else:
                print(f"{name}: {line}", flush=True)
                begun = time.monotonic()
                code = run(command, folder / name / "log.txt", rest_s)
                ledger.add(line, code, time.monotonic() - begun)
                if args.archive:
                    pack(folder, args.archive)
                if not ended_well(line, code):
                    print(f"  exit status {code}; see {folder / name / 'log.txt'}", flush=True)
                    left += 1
        for timeline in (folder / name).rglob("timeline.json.gz"):
            timeline.unlink()
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
