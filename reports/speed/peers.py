"""A comparison of the simulator's speed with another installable simulator's.

`python -m reports.speed.peers [--json]` prints the table of docs/speed.md: the case `splitwise_conv` of `cbsim bench`
(19,366 chat requests, 512 slots, 512 tokens a step, 29,696 blocks of 16 tokens), whole processes in turn, best of
ROUNDS.

- DynoSim (`pip install ai-dynamo==1.4.2`, Rust): its own rules and its own cost model; a fresh hash for every 512
  prompt tokens, so no prefix is shared. It writes a summary and no tables.
- Ours, as Python and, where it is compiled, compiled: every metric, both tables and the timeline are written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.bench import CASES, PROGRAM, SHORT, printed, python
from cbsim.policy.request import RequestSpec
from cbsim.policy.value import running
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

ROUNDS, HASHED = 3, 512  # times that each runs; tokens of a hash
DYNOSIM = "DynoSim"
ENGINE = {"block_size": 16, "num_gpu_blocks": 29696, "max_num_seqs": 512, "max_num_batched_tokens": 512}
SOURCES_ONLY = """
import sys
from importlib.machinery import FileFinder, PathFinder, SOURCE_SUFFIXES, SourceFileLoader
class Sources(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        places = [place for place in path or () if name.startswith("cbsim.")]
        specs = (FileFinder(place, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name) for place in places)
        return next(filter(None, specs), None)
sys.meta_path.insert(0, Sources)
"""
"""Before anything of ours is imported: modules of cbsim come from their sources, compiled or not."""


class Peer(NamedTuple):
    """A simulator as a command of its own. `simulated` reads the seconds of its simulation in what it prints."""

    name: str
    command: Sequence[str]
    simulated: Callable[[str], float]


def compare_peers(*, as_json: bool) -> None:
    """Run all in turn and print them; ratios are against the first. Raises RunError if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        peers = _peers(Path(folder))
        times: dict[str, list[Mapping[str, float]]] = {peer.name: [] for peer in peers}
        for _ in range(ROUNDS):
            for peer in peers:
                times[peer.name].append(_timed(peer))
    best = {name: {key: min(run[key] for run in runs) for key in runs[0]} for name, runs in times.items()}
    if as_json:
        print(json.dumps(best, indent=2))
        return
    if peers[0].name != DYNOSIM:
        print("DynoSim is not installed here: pip install ai-dynamo==1.4.2", file=sys.stderr)
    first = best[peers[0].name]
    print(f"{SHORT}, best of {ROUNDS}: seconds (times those of {peers[0].name})")
    for name, run in best.items():
        cells = [f"{what} {run[what]:.2f} ({run[what] / first[what]:.2f})" for what in run]
        print(f"{name:<16} {', '.join(cells)}")


def _peers(folder: Path) -> list[Peer]:
    ours = PROGRAM.format(case=SHORT)
    kinds = {"python": SOURCES_ONLY + ours} | ({"compiled": ours} if running() == "compiled" else {})
    peers = [Peer(f"cbsim, {name}", python(program), _ours) for name, program in kinds.items()]
    if find_spec("dynamo") is None:
        return peers
    trace = folder / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in _mooncake()))
    options = ["--replay-mode", "offline", "--trace-block-size", str(HASHED), "--num-workers", "1"]
    options += ["--extra-engine-args", json.dumps(ENGINE), "--report-json", str(folder / "dynosim.json")]
    return [Peer(DYNOSIM, [sys.executable, "-m", "dynamo.replay", str(trace), *options], _dynosims), *peers]


def _ours(printed: str) -> float:
    result = json.loads(printed)
    return float(result["us_per_step"] * result["steps"] / 1e6)


def _dynosims(printed: str) -> float:
    """Seconds of its replay, without the reading of the trace."""
    return float(re.findall(r"Wall Time \(ms\): ([0-9.,]+)", printed)[0].replace(",", "")) / 1e3


def _mooncake() -> list[dict[str, Any]]:
    """The case's requests in Mooncake's form; no two share a hash."""
    fresh = 0
    lines = []
    for spec in _requests():
        hashes = -(-spec.prompt_tokens // HASHED)
        line = {"input_length": spec.prompt_tokens, "output_length": spec.output_tokens}
        lines.append({"timestamp": spec.arrival_ns / 1e6, **line, "hash_ids": [*range(fresh, fresh + hashes)]})
        fresh += hashes
    return lines


def _requests() -> Sequence[RequestSpec]:
    return generators.build(Scenario.model_validate(CASES[SHORT]())).open


def _timed(peer: Peer) -> Mapping[str, float]:
    begun = time.perf_counter()
    output = printed(peer.command, peer.name)
    return {"whole process": time.perf_counter() - begun, "simulation": peer.simulated(output)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    compare_peers(as_json=parser.parse_args().json)
