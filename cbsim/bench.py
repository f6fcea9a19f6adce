"""Benchmarks of the simulator: seconds, steps, requests and peak memory a case, each in a fresh process.

A case is timed from its scenario to its run directory: reading or drawing the workload, simulating, computing every
metric, writing every table and the timeline. Only the picture and the interpreter's start are left out.
`million` takes minutes and is run only by its name, after the cases that it is compared with. `fleet` is requests over
64 servers behind a router that looks at none and behind one with books, and the cost of a step with 1, 8 and 64.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cbsim.collector import no_collections
from cbsim.errors import OK, RunError, ScenarioError
from cbsim.machine import simulate
from cbsim.metrics import metrics
from cbsim.policy.request import RequestSpec
from cbsim.policy.value import running
from cbsim.record import directory, timeline
from cbsim.record.directory import Pieces
from cbsim.record.tables import token_times
from cbsim.runs.running import counted, servers_of
from cbsim.scenario import catalog
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.fields import near
from cbsim.workload import generators

TRACE = "traces/speed/splitwise_conv_q6.45_n19366.csv"
DECODE_STEPS = 2000
LARGE, SMALL = 1024, 64
REPEATS = 7
PROGRAM = "import gc, json, os; gc.set_threshold(500_000); os.environ.setdefault('OPENBLAS_NUM_THREADS', '1'); "
PROGRAM += "from cbsim.bench import measure; print(json.dumps(measure({case!r}))); gc.freeze()"  # as cbsim/__main__.py

SERVER: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "a100-80gb",
    "kv_cache": {"block_size": 16, "num_blocks": 29697},  # 29,696 and vLLM's null block
    "loop": {"mode": "sync"},
    "cost": {"kind": "roofline", "compute_efficiency": {"prefill": 0.565}},
}


def chat() -> dict[str, Any]:
    """Return the case of 19,366 chat requests, Poisson 6.45 a second, on vLLM with 512 tokens and 512 slots."""
    settings = {"name": "vllm", "max_num_batched_tokens": 512, "max_num_seqs": 512}
    workload: dict[str, Any] = {"kind": "csv", "path": TRACE} if _has_trace() else chat_like()
    return {"name": "splitwise_conv", "question": "Speed.", **SERVER, "workload": workload, "scheduler": settings}


def _has_trace() -> bool:
    with suppress(ScenarioError):
        return bool(catalog.data(TRACE))
    return False


def chat_like(requests: int = 19366) -> dict[str, Any]:
    """Return a generated workload of the trace's rate and lengths; similar lengths where the trace is not available."""
    prompts: dict[str, Any] = {"lognormal": {"mean": 1155, "sigma": 1.0, "low": 3, "high": 8192}}
    outputs: dict[str, Any] = {"lognormal": {"mean": 211, "sigma": 0.9, "low": 1, "high": 1200}}
    if _has_trace():
        prompts, outputs = ({"empirical": {"path": TRACE, "column": f"{of}_tokens"}} for of in ("prefill", "decode"))
    return {
        "kind": "synthetic",
        "requests": requests,
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "arrivals": {"kind": "poisson", "rate_per_s": 6.45},
    }


def decode(running: int) -> dict[str, Any]:
    workload = {"kind": "synthetic", "requests": running, "prompt_tokens": 16, "output_tokens": DECODE_STEPS}
    cache = {"block_size": 16, "num_blocks": 1 + running * (2 + DECODE_STEPS // 16)}
    settings = {"name": "vllm", "max_num_batched_tokens": 32768, "max_num_seqs": running}
    about = {"name": f"decode_{running}", "question": "Cost of a decode step."}
    return {**about, **SERVER, "kv_cache": cache, "workload": workload, "scheduler": settings}


def fleet(case: str, servers: int, requests: int, seed: int = 0) -> dict[str, Any]:
    """Return a fleet of servers of `chat` with its rate each, behind the router of a case."""
    workload, router = chat_like(requests), {"name": ROUTERS[case]}
    workload["arrivals"]["rate_per_s"] *= servers
    several = {"pools": [{"count": servers}], "router": router}
    return {**chat(), "name": case, "seed": seed, "workload": workload, "fleet": several}


Cases = dict[str, Callable[[], dict[str, Any]]]
LONG, LIKE, SHORT, SPEC = "million", "splitwise_like", "splitwise_conv", f"decode_{LARGE}_spec"
OTHER, PAGES = "splitwise_sglang", {"block_size": 1, "num_blocks": 29696 * 16}
DRAFTS = {"method": "eagle", "k": 3, "acceptance": {"rate": 0.7}}
CASES: Cases = {SHORT: chat, f"decode_{SMALL}": lambda: decode(SMALL), f"decode_{LARGE}": lambda: decode(LARGE)}
SGLANG = {"name": "sglang", "chunked_prefill_size": 512, "max_running_requests": 512}
EXTRA: Cases = {  # rows that verify drafts; as SHORT where its trace is not available; 43 hours of arrivals likewise
    OTHER: lambda: {**chat(), "name": OTHER, "kv_cache": PAGES, "scheduler": SGLANG},  # with its pages of one token
    SPEC: lambda: {**decode(LARGE), "name": SPEC, "speculation": DRAFTS},
    LIKE: lambda: {**chat(), "name": LIKE, "workload": chat_like()},
    LONG: lambda: {**chat(), "name": LONG, "workload": chat_like(1_000_000)},
}
FLEET, SERVERS, EACH = "fleet", (1, 8, 64), 100  # requests of each server where the cost of a step is measured
ROUTERS = {"fleet_blind": "round_robin", "fleet_books": "least_in_flight"}
FLEETS: Cases = {name: partial(fleet, name, SERVERS[-1], 10_000) for name in ROUTERS}
FLEETS |= {f"{name}_{LONG}": partial(fleet, name, SERVERS[-1], 1_000_000) for name in ROUTERS}
ALL = {**CASES, **EXTRA, **FLEETS}
MOST_TIMES, MOST_MB = 55, 1000  # goals of the long case: times the seconds of SHORT, peak memory


def bench(arguments: argparse.Namespace) -> int:
    names = arguments.cases
    known = (*ALL, FLEET)
    for name in names:
        if name not in known:
            raise ScenarioError(f"unknown case {name!r}{near(name, known)} (known: {', '.join(known)})")
    results = {}
    chosen = [case for name in names for case in (ROUTERS if name == FLEET else [name])] or CASES
    before = [SHORT, LIKE] if LONG in chosen else [SHORT] if OTHER in chosen else []  # what these are compared with
    for name in dict.fromkeys((*before, *chosen)):
        results[name] = _in_fresh_process(name)
        if not arguments.json:
            print(_line(name, results[name]), flush=True)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        _compare(results)
    return OK


def _compare(results: Mapping[str, Mapping[str, Any]]) -> None:
    if {f"decode_{SMALL}", f"decode_{LARGE}"} <= results.keys():
        small, large = (results[f"decode_{n}"]["us_per_step"] for n in (SMALL, LARGE))
        print(f"a decode step with {LARGE} running requests costs {large / small:.2f}x one with {SMALL}")
    if {SPEC, f"decode_{LARGE}"} <= results.keys():
        drafted, plain = (results[name]["us_per_step"] for name in (SPEC, f"decode_{LARGE}"))
        print(f"a step of {LARGE} rows with drafts, each planned by itself, costs {drafted / plain:.0f}x one without")
    if OTHER in results:
        whole, step = (results[OTHER][of] / results[SHORT][of] for of in ("cpu_seconds", "us_per_step"))
        print(f"SGLang's rules take {whole:.2f} times the CPU time of {SHORT}, a step {step:.2f} times as long")
    if LONG in results:
        like, short = (results[LONG]["seconds"] / results[name]["seconds"] for name in (LIKE, SHORT))
        took = f"{short:.1f} times as long as {SHORT} (goal {MOST_TIMES}), {like:.1f} times as long as {LIKE}"
        print(f"{LONG} takes {took}; peak {results[LONG]['peak_mb']:,.0f} MB (goal {MOST_MB:,})")
    for name, result in results.items():
        if costs := result.get("servers"):
            (_, one), *more = costs["us_per_step"].items()
            ratios = ", ".join(f"{us / one:.2f}x with {servers}" for servers, us in more)
            print(
                f"{name}: a step costs {one:.1f} us with 1 server, {ratios}; the router {costs['us_per_choice']:.1f} us"
            )


def _in_fresh_process(name: str) -> Any:
    return json.loads(printed(python(PROGRAM.format(case=name)), f"bench case {name}"))


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def printed(command: Sequence[str], what: str) -> str:
    """Return the output of a command. Raises RunError with the last line of its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{what} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.stdout


@no_collections()
def measure(name: str) -> dict[str, Any]:
    """Run one case in this process. Short ones are simulated REPEATS times, and their best time a step is taken."""
    fields = ALL[name]()
    scenario = scenarios.Scenario.model_validate(fields)
    warm_up = [_simulate(scenario)[1] for _ in range(REPEATS - 1)] if name.startswith("decode") else []
    with tempfile.TemporaryDirectory() as folder:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        writer = directory.RunWriter.new(Path(folder), scenario.name, "0" * 8)
        writer.scenario(scenarios.dump(scenario))
        server, simulated = _simulate(scenario, pieces := Pieces(writer, {}))
        simulated = min(simulated, *warm_up) if warm_up else simulated
        rows, steps = pieces.tables(server.record)
        with writer.writing(steps, lambda: token_times(rows, steps)):
            writer.file("timeline.json.gz", timeline.chrome_trace(steps.parts(), (0, 2000), name))
            record = server.record
            of = counted(scenario, record.total_blocks, None, servers_of(scenario, record))
            summary = metrics.summarise(rows, steps, **of)
        writer.json("summary.json", summary)
        writer.drop_pieces()
        writer.complete()
        seconds, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_s,
        "steps": len(steps),
        "requests": len(rows),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "steps_per_s": len(steps) / seconds,
        "requests_per_s": len(rows) / seconds,
        "us_per_step": simulated / len(steps) * 1e6,
        "workload": fields["workload"]["kind"],
        "core": running(),
        **({"servers": step_costs(name)} if name in ROUTERS else {}),
    }


def _simulate(scenario: scenarios.Scenario, pieces: Pieces | None = None) -> tuple[simulate.Simulation, float]:
    """A server that has run, and the seconds that running took."""
    server = simulate.Simulation(scenario, "sync", generators.build(scenario))
    if pieces:
        server.record.hand_to(pieces.take, directory.PIECE)
    begun = time.perf_counter()
    server.run()
    return server, time.perf_counter() - begun


def step_costs(case: str) -> dict[str, Any]:
    """Return us of CPU a step with each number of servers, of the same load each and as many simulated of each number;
    and us a request that the router of the most takes beside the steps, 0 for one that chooses before them.
    """
    costs, choosing = dict[int, float](), list[float]()
    for servers in SERVERS:
        steps, ran_s = 0, 0.0
        for seed in range(SERVERS[-1] // servers):
            scenario = scenarios.Scenario.model_validate(fleet(case, servers, EACH * servers, seed))
            several, choosing = simulate.routed(scenario, generators.build(scenario)), []
            if isinstance(several, simulate.Fleet):
                several.front.choose = partial(_timed, several.front.choose, choosing)
            begun = time.process_time()
            several.run()
            ran_s += time.process_time() - begun - sum(choosing)
            steps += several.record.step_count
        costs[servers] = ran_s / steps * 1e6
    return {"us_per_step": costs, "us_per_choice": sum(choosing) / (EACH * SERVERS[-1]) * 1e6}


def _timed(choose: Any, took_s: list[float], spec: RequestSpec, now_ns: int) -> int:
    begun = time.process_time()
    server: int = choose(spec, now_ns)
    took_s.append(time.process_time() - begun)
    return server


def _line(name: str, result: dict[str, Any]) -> str:
    counts = f"{result['requests']:,} requests, {result['steps']:,} steps"
    rates = f"{result['steps_per_s']:,.0f} steps/s, {result['requests_per_s']:,.0f} requests/s"
    room = f"peak {result['peak_mb']:.0f} MB; {result['core']} core"
    return f"{name:<15} {result['seconds']:6.2f} s  {counts}; {rates}; {room}"
