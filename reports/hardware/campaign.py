"""Measurements on a GPU, in calls of minutes for a machine that is available for a quarter of an hour.

    python reports/hardware/campaign.py CALL|PART ... [--minutes 8] [--device cuda] [--out DIR]

    OUT/<gpu>/provenance.json    device, driver, versions, commit, and every command with its time and exit status
    OUT/<gpu>/<part>/log.txt     what the commands printed
    OUT/<gpu>/<part>/runs        run directories, without their timelines
    OUT/<gpu>/validation         the measurements of `predict`

A command that succeeded on the same commit is not run again; one that failed or ran out of time is. With `--archive
FILE` the results are in one .tgz, too, written after every command, and are taken from there where OUT has none: for a
machine of which only a few files come back. On the devices `process` and `modelled` the same parts are rehearsed on a
CPU with a tiny model, those that have commands there: their numbers are of no GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cbengine.errors import UsageError
from cbengine.measure import provenance
from cbsim.cli.arguments import Parser, within
from cbsim.errors import INTERRUPTED, USAGE, UserError
from cbsim.files import access, read_json, real
from cbsim.record.environment import code_version

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CALLS = {
    "first": ("right", "kernels", "peer", "speed", "tests"),
    "second": ("predict-reference", "predict-load", "predict-cpu"),
    "third": ("alone", "uneven", "predict-repeat", "predict-chunk", "predict-batch", "predict-prefix"),
    "fourth": ("speculation", "served", "moves", "predict-memory", "predict-loads"),
    "rest": ("wait", "graphs", "predict-1b"),
}
LIMIT_S = 570.0  # of a command, where there is no other
LEAST_S = 10.0  # no command is begun with less time than this
OUT_OF_TIME = 124
BAR_MISSED = 3  # exit status of `predict` and `replay` that have measured what they had to

Command = list[str]
TESTS = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", "default", "-o", "timeout=600"]
MARKED = [*TESTS, "-m", "gpu", "tests/cbengine/model", "tests/cbengine/device", "tests/cbengine/test_tokens.py"]
"""A CPU finds these tests and runs none."""
ALONE = "memory or step_table"  # of them, those that have the whole GPU to themselves
DECODING = [
    "workload={kind: synthetic, requests: 32, prompt_tokens: 64, output_tokens: 512}",
    "scheduler.max_num_seqs=32",
]


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands of parts, on a device whose results lie in `folder`. Where there is no GPU they are small."""

    device: str
    folder: Path

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    def script(self, name: str, *options: str) -> Command:
        return [str(HERE / name), *options]

    def speed(self, *names: str) -> Command:
        where = ["--device", "cuda" if self.gpu else "cpu", "--out", str(self.folder / "speed")]
        return self.script("speed.py", *names, "--quick", *where)

    def peer(self, loop: str) -> Command:
        where = ["--device", "cuda" if self.gpu else "cpu", "--out", str(self.folder / "peer")]
        return self.script("peer.py", "--loop", loop, *where)

    def predict(self, *cases: str) -> Command:
        rough = "--later" if self.gpu else "--quick"
        return ["-m", "cbengine", "predict", *cases, "--device", self.device, "--out", str(self.folder.parent), rough]

    def replay(self, part: str, *options: str, scenario: str = "8k_b32") -> Command:
        where = ["--device", self.device, "--out", str(self.folder / part / "runs"), "--quiet"]
        return ["-m", "cbengine", "replay", scenario if self.gpu else "tiny_cpu", *options, *where]

    def short(self, part: str, loop: str, *options: str) -> Command:
        tokens = f"workload.output_tokens={512 if self.gpu else 16}"
        return self.replay(part, *changed(tokens, f"loop.mode={loop}"), *options)

    def drafted(self, method: str, loop: str) -> Command:
        """The workload of cpu-0 with three drafts a row. Their acceptance is measured, whatever is stated."""
        speculation = f"speculation={{method: {method}, k: 3, acceptance: {{rate: 0.5}}}}"
        sizes = DECODING if self.gpu else ["workload.requests=4"]
        changes = changed(*sizes, speculation, f"loop.mode={loop}")
        return self.replay("speculation", *changes, scenario="validation")

    def moved(self, host: str) -> Command:
        """The workload of preemptions, with a host's tier."""
        slots, blocks = "max_num_seqs: 64", 1000
        if not self.gpu:
            slots, blocks = "max_num_seqs: 16, max_num_batched_tokens: 128", 40
        scheduler = f"scheduler={{name: vllm, {slots}, {host}}}"
        changes = changed(scheduler, f"kv_cache.num_blocks={blocks}", "loop.mode=async")
        return self.replay("moves", *changes, scenario="validation")

    def served(self) -> Command:
        scenario, budget = ["validation", *changed("scheduler.max_model_len=16384")], "seconds=40"
        if not self.gpu:
            scenario, budget = ["tiny_cpu", *changed("kv_cache.num_blocks=1024")], "users=4,tokens=10000"
        where = ["--device", self.device, "--out", str(self.folder / "served")]
        return self.script("served.py", *scenario, "--budget", budget, *where)


def changed(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def parts(device: str, folder: Path) -> dict[str, list[Command]]:
    """The commands of every part, the most instructive ones first. `folder`: of the device."""
    of = Commands(device, folder)
    return lent_first(of) | lent_again(of)


def lent_first(of: Commands) -> dict[str, list[Command]]:
    """The parts of the first two calls, and the rest."""
    gpu = of.gpu
    at_4k = ("workload.prompt_tokens=4096", "workload.output_tokens=96", "scheduler.max_batch_tokens=8192")
    profiled = [*changed(*at_4k), "--profile", "32"] if gpu else []
    eager = ["--no-cuda-graphs"] if gpu else []
    spin = ["--wait", "spin"] if gpu else []
    beside = [*MARKED, "-n", "8", "--dist", "worksteal", "-k", f"not ({ALONE})"]
    return {
        "right": [[*TESTS, "-n", "0", "tests/gpu"]],
        "kernels": [of.replay("kernels", *profiled, *changed("loop.mode=async"), *more) for more in ([], eager)],
        "speed": [of.speed("copies", "gemms", "attention"), *([of.speed("tiles")] if gpu else [])],
        "tests": [beside, [*MARKED, "-k", ALONE]] if gpu else [[*MARKED, "--collect-only"]],
        "wait": [of.short("wait", "sync"), of.short("wait", "sync", *spin), of.short("wait", "async", *spin)],
        "graphs": [of.short("graphs", "async", *eager)],
        "predict-reference": [of.predict("8k_b32" if of.device != "process" else "long-b16")],
        "predict-load": [of.predict("load-85")],
        "predict-cpu": [of.predict(name) for name in (("cpu-0", "cpu-5", "cpu-2", "cpu-10") if gpu else ("cpu-0",))],
        "predict-1b": [of.predict("1b")] if of.device != "process" else [],
        "peer": [of.peer(loop) for loop in ("sync", "async")],
    }


def lent_again(of: Commands) -> dict[str, list[Command]]:
    """The parts of the third and the fourth call. A modelled device has neither tokens to verify nor clients."""
    tiny = of.device == "process"
    swap, tier = ("swap_space_gib: 4", 1 << 32) if of.gpu else ("swap_space_gib: 0.01", 1 << 22)
    drafts = [
        of.drafted("ngram", "both"),
        of.drafted(f"draft_model, drafter: {{model: {'llama-3.2-1b' if of.gpu else 'tiny'}}}", "both"),
        *([of.drafted("draft_model, drafter: {model: llama-3.1-8b}", "async")] if of.gpu else []),
    ]
    return {
        "alone": [[*MARKED, "-k", ALONE, *([] if of.gpu else ["--collect-only"])]],
        "uneven": [of.speed("uneven")] if of.gpu else [],  # elsewhere a test runs it, in Triton's interpreter
        "predict-repeat": [of.predict("cpu-0"), of.predict("cpu-5")],
        "predict-chunk": [of.predict("chunk-64" if tiny else "chunk")],
        "predict-batch": [of.predict("batch-2" if tiny else "batch")],
        "predict-prefix": [of.predict("prefix")],
        "speculation": drafts if of.device != "modelled" else [],
        "served": [of.served()] if of.device != "modelled" else [],
        "moves": [
            of.moved(f"preemption_mode: swap, {swap}"),
            of.moved(f"kv_connector: simple_cpu, cpu_bytes_to_use: {tier}"),
        ],
        "predict-memory": [of.predict("preemptions"), of.predict("soft-resets")],
        "predict-loads": [of.predict("load-60", *([] if tiny else ["load-100", "transformers-load-85"]))],
    }


class Ledger:
    """provenance.json: where and by what was measured, and how each command ended."""

    def __init__(self, path: Path, device: str) -> None:
        self._path, self._version = path, code_version()
        self._facts: dict[str, Any] = dict(provenance.facts(device))
        self._commands = recorded(path) if path.exists() else []
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


def recorded(path: Path) -> list[dict[str, Any]]:
    """The commands in a provenance.json. Raises UsageError."""
    commands = read_json(path, UsageError).get("commands")
    keys = {"command", "exit", "commit"}
    if not isinstance(commands, list) or not all(isinstance(c, dict) and keys <= c.keys() for c in commands):
        raise UsageError(f"{path}: commands: expected a list of objects with {', '.join(sorted(keys))}")
    return commands


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


def unpack(archive: Path, folder: Path) -> None:
    """Write the results in an archive to a folder. Raises UsageError."""
    try:
        with access(archive, UsageError), tarfile.open(archive) as file:
            file.getmembers()  # of a damaged archive nothing is taken
            file.extractall(folder, filter="data")
    except tarfile.TarError:
        raise UsageError(f"--archive {archive}: is not a whole .tgz of results") from None


def minutes(word: str) -> float:
    return within(word, real(word), 0 < real(word) < math.inf, "a number of minutes > 0")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if a command failed or was not begun, 2 for a mistake of the user's."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="PART")
    parser.add_argument("--device", choices=("cuda", "process", "modelled"), default="cuda")
    parser.add_argument("--minutes", type=minutes, default=60.0, help="end after so many (60)")
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="(reports/hardware)")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="keep it all in this .tgz, too, and go on from it")
    args = parser.parse_args(argv)
    try:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no CUDA device here")
        return 1 if measured(args) else 0
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED, f"{parser.prog}: interrupted\n")
    except UserError as error:
        parser.exit(USAGE, f"{parser.prog}: {error}\n")
    except OSError as error:
        parser.exit(USAGE, f"{parser.prog}: {error.filename}: {error.strerror}\n")


def named(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The parts of calls and parts, each once. Raises UsageError."""
    names = list(dict.fromkeys(part for name in words for part in CALLS.get(name, (name,))))
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"part {unknown[0]!r}: expected {', '.join(CALLS)}, {', '.join(known)}")
    return names


def measured(args: argparse.Namespace) -> int:
    """Run the parts; how many commands failed or were not begun. Raises UsageError and OSError."""
    until, folder = time.monotonic() + 60 * args.minutes, args.out.resolve() / provenance.slug(args.device)
    known, left = parts(args.device, folder), 0
    names = named(args.parts, known)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the command under way is ended, too
        signal.signal(number, lambda *_: sys.exit(1))
    if args.archive and args.archive.exists() and not folder.exists():
        unpack(args.archive, folder.parent)
    ledger = Ledger(folder / "provenance.json", args.device)
    if args.archive:
        pack(folder, args.archive)  # which shows that it can be written
    for name in (name for name in names if not known[name]):
        print(f"{name}: not on --device {args.device}", flush=True)
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
    return left


if __name__ == "__main__":
    sys.exit(main())
