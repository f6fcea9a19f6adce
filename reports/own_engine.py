"""The engine behind its endpoint as a user's own server: measured, fitted, and unseen loads predicted.

    python -m reports.own_engine --seconds 600

`cbengine serve` computes a tiny model on the CPU, in a worker process; `cbsim measure` has the seconds to measure it,
`cbsim fit` fits the terms of a scenario of the same model and flags. Then lengths, rates and concurrency that were not
measured are measured REPEATS times: predictions are compared with these, beside the noise of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import expm1
from pathlib import Path
from typing import Any

import numpy as np

from cbsim.draw import report as reports
from cbsim.draw.report import Report, Table
from cbsim.errors import USAGE
from cbsim.measured.own.campaign import Budget, Campaign, Planned
from cbsim.measured.own.fit import Compared, Simulated, compare, natural, priors
from cbsim.measured.own.measurement import Load, read
from cbsim.measured.own.server import Server, connected
from cbsim.measured.own.study import Study, study
from cbsim.runs.progress import handled
from cbsim.scenario import scenario as scenarios

OUT = Path("reports/fidelity/own-engine")
USERS, REPEATS = 16, 4
BARS = {"TPOT": 0.10, "TTFT": 0.20}  # of the mean error, where the noise of the repeats is less
SERVER: dict[str, Any] = {
    "name": "own",
    "question": "What are the terms of the engine on this machine?",
    "model": "tiny",
    "hardware": {
        "name": "a CPU",
        "memory_bytes": 2e9,
        "memory_bandwidth_bytes_s": 2e10,
        "flops": dict.fromkeys(("bfloat16", "float16", "float32"), 1e11),
        "pcie_bytes_s": 1e10,
        "source": "assumed: efficiencies are of these",
    },
    "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
    "scheduler": {"name": "vllm", "max_num_seqs": USERS, "max_num_batched_tokens": 256, "max_model_len": 2048},
    "kv_cache": {"block_size": 16, "num_blocks": 1024},
    "loop": {"mode": "async", "cuda_graphs": {"padding": "none"}},
    "cost": {"kind": "roofline", "compute_efficiency": {}, "memory_efficiency": {}},
}
MIXED = [(int(prompt), int(output)) for prompt, output in np.random.default_rng(7).integers(24, (700, 100), (24, 2))]
UNSEEN = (
    *(Planned(f"prompts-of-{tokens}", 1, [(tokens, 12)] * 4) for tokens in (100, 600)),
    *(Planned(f"{users}-decoding", users, [(48, 96)] * users) for users in (2, 7, 12)),
    Planned("mixed-6", 6, MIXED),
    Planned("mixed-random", None, MIXED),
)


@contextmanager
def serving(scenario: str, out: Path, *options: str) -> Iterator[str]:
    """Serve the scenario by the engine; yield its address. SIGTERM and SIGHUP are what Ctrl-C is, which the engine and
    its clients ignore until they listen to it: they are ended here. Raises SystemExit if the engine ends badly, without
    a message if it has named a mistake of the user's.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = ("-m", "cbengine", "serve", scenario, *options, "--port", str(port), "--out", str(out))
    url = f"http://127.0.0.1:{port}"
    with handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP):
        server = started(line, stdout=subprocess.DEVNULL)
        try:
            while not _answers(url) and server.poll() is None:
                time.sleep(0.5)
            if server.returncode is None:
                yield url
        finally:
            server.terminate()
            server.wait()
    if server.returncode:
        known = server.returncode == USAGE
        raise SystemExit(USAGE if known else f"cbengine serve ended with status {server.returncode}")


def started(line: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start Python, deaf to the Ctrl-C that a terminal sends to all of its processes."""
    with handled(signal.SIG_IGN, signal.SIGINT):
        return subprocess.Popen([sys.executable, *line], **options)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def measured(url: str, out: Path) -> None:
    """Measure the unseen loads."""
    async with connected(url, "none") as client:
        server = Server(url, client, 2)
        facts = await server.facts("", None)
        campaign = Campaign(server, out, Budget(900, 2_000_000, USERS), lambda line, *_: _say(line), facts=facts)
        await server.check()
        campaign.loads, campaign.repeats = UNSEEN, REPEATS
        await campaign.run()


def errors_table(compared: Sequence[Compared]) -> tuple[Table, list[str]]:
    """Return errors of each unseen load beside the noise of its repeats, and how many are within the bars."""
    rows, lines = list[tuple[str, ...]](), list[str]()
    for at, (metric, name) in enumerate((("TTFT", "ttft_s"), ("TPOT", "tpot_s"))):
        errors, known = list[float](), 0
        for each in compared:
            noise, error = repeats_noise(each.load, name), expm1(each.errors[at])
            steady = noise < BARS[metric]
            known += steady
            errors += [abs(error)] if steady else []
            times = f"{1e3 * each.measured[at]:.2f}", f"{1e3 * each.predicted[at]:.2f}"
            rows.append((f"{metric}, {each.load.name}", *times, f"{error:+.1%}", f"{noise:.1%}"))
        within = sum(error <= BARS[metric] for error in errors)
        mean = f"mean error {np.mean(errors):.1%}" if errors else "none is steady"
        lines.append(f"{metric} of unseen loads: {within} of {known} within {BARS[metric]:.0%}, {mean}.")
    note = f"Means; noise is the standard error of {REPEATS} repeats, as a share of their mean."
    return Table("Unseen loads", ("load", "measured, ms", "predicted, ms", "error", "noise"), rows, note), lines


def repeats_noise(load: Load, name: str) -> float:
    mean, error = load.estimate(getattr(load, name))
    return error / mean


def report_of(made: Study, server: Path, unseen: Path, seconds: float) -> Report:
    base = scenarios.load(server)
    known = priors(base)
    terms = {name: of.value for name, of in made.terms.terms.items()}
    predict = Simulated(base, known)
    compared = [compare(load, predict, natural(terms), slopes=False) for load in read(unseen).usable]
    table, lines = errors_table(compared)
    of = made.report
    return replace(
        of,
        title="The engine on a CPU as one's own server",
        question="Do ten minutes of measuring predict other lengths, rates and concurrency?",
        findings=[*lines, f"Measured for {seconds:.0f} s at most.", *of.findings],
        tables=[table, *of.tables],
        command=f"python -m reports.own_engine --seconds {seconds:.0f}",
        kind="simulated against the engine, measured by its clients",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=600.0, help="that measuring may take (600)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the report ({OUT})")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/own-engine"), help="what is measured there is used again"
    )
    arguments = parser.parse_args()
    folder = arguments.work
    server, first, unseen = folder / "server.yaml", folder / "measured", folder / "unseen"
    if not folder.exists():
        folder.mkdir(parents=True)
        server.write_text(json.dumps(SERVER))
        budget = f"seconds={arguments.seconds:.0f},users={USERS}"
        with serving(str(server), folder / "runs", "--device", "process") as url:
            line = ("-m", "cbsim", "measure", url, "--yes", "--out", str(first), "--budget", budget)
            subprocess.run([sys.executable, *line], check=False)  # what it leaves of too small a budget is used
            asyncio.run(measured(url, unseen))
    made = study([first], server, [], name="own", where={}, report=_say)
    report = report_of(made, server, unseen, arguments.seconds)
    shutil.rmtree(arguments.out, ignore_errors=True)
    reports.write(report, arguments.out)
    print(reports.terminal(report))


if __name__ == "__main__":
    main()
