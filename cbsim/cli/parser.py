"""`python -m cbsim`: arguments and exit codes only. Nothing heavy is imported before a command is known.

Exit codes: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from cbsim.cli import choosing, published, serving
from cbsim.cli.arguments import (
    STUDIES,
    Parser,
    a_path,
    guarded,
    renamed,
    run_arguments,
    run_options,
)
from cbsim.cli.capacity import capacity, capacity_arguments
from cbsim.cli.many_runs import a_shard, store_arguments
from cbsim.cli.where import where_argument
from cbsim.server.status import ERROR, USAGE

RENAMED = {"replay": "replan", "validate": "score"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    if renamed("cbsim", RENAMED, argv):
        return USAGE
    arguments = _parser().parse_args(argv)
    return guarded("cbsim", arguments.command, lambda: _dispatch(arguments), _status)


def _status(error: Exception) -> int | None:
    """Exit status of an error that a user can cause; None for one that only we can."""
    from cbsim.results.checks import CheckError
    from cbsim.results.directory import RunError
    from cbsim.scenario.errors import UserError

    if isinstance(error, UserError | CheckError) and not isinstance(error, RunError):
        return USAGE
    return ERROR if isinstance(error, RunError) else None


def _dispatch(arguments: argparse.Namespace) -> int:
    from cbsim.cli import commands

    acts: dict[str, Callable[[], int]] = {
        "run": lambda: commands.run(run_options(arguments)),
        "sweep": lambda: commands.sweep(arguments),
        "capacity": lambda: capacity(arguments),
        "contrast": lambda: choosing.contrast(arguments),
        "pareto": lambda: choosing.pareto(arguments),
        "tune": lambda: choosing.tune(arguments),
        "conformance": lambda: commands.conformance(arguments.paths),
        "replan": lambda: commands.replan(arguments.runs),
        "occupancy": lambda: commands.occupancy(arguments.runs, as_json=arguments.json),
        "score": lambda: commands.score(arguments),
        "score-points": lambda: published.score_points(arguments),
        "calibrate-terms": lambda: published.calibrate_terms(arguments),
        "study": lambda: commands.study(arguments.name, arguments.out, as_json=arguments.json),
        "cache-curve": lambda: commands.cache_curve(
            str(arguments.trace), arguments.capacities, arguments.block_tokens, arguments.json
        ),
        "schema": lambda: commands.schema(arguments.out),
        "list": commands.catalogue,
        "bench": lambda: _endpoint(lambda: _bench(arguments)),
        "serve": lambda: _endpoint(lambda: serving.serve(arguments)),
        "drive": lambda: _endpoint(lambda: serving.drive(arguments)),
    }
    return acts[arguments.command]()


def _endpoint(act: Callable[[], int]) -> int:
    """What needs the libraries of the endpoint."""
    try:
        return act()
    except ModuleNotFoundError as error:
        from cbsim.scenario.fields import ScenarioError

        if (error.name or "").partition(".")[0] in ("cbsim", "cbengine"):
            raise
        raise ScenarioError(f"{error.name} is not installed: pip install -e '.[serve]'") from None


def _bench(arguments: argparse.Namespace) -> int:
    from cbsim.proof import bench

    if arguments.cases == ["endpoint"]:
        from cbsim.serving import bench as tokens

        tokens.bench(as_json=arguments.json)
        return 0
    if arguments.peers:
        from cbsim.proof import peers
        from cbsim.scenario.fields import ScenarioError

        if arguments.cases:
            raise ScenarioError(f"bench --peers has one case of its own, got {', '.join(arguments.cases)}")
        peers.bench(as_json=arguments.json)
        return 0
    return bench.bench(arguments.cases, as_json=arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cbsim",
        description="Simulate continuous batching of LLM requests: scheduling, KV blocks, CPU and GPU in overlap.",
        epilog="Exit status: 0 ok, 1 error, 2 bad scenario or arguments, 3 a check failed.",
        example="python -m cbsim run 8k_b32",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, example: str) -> Parser:
        return commands.add_parser(name, help=text, example=f"python -m cbsim {name} {example}".rstrip())

    about = "simulate a scenario and write a run directory a loop"
    run_arguments(command("run", about, "8k_b32 --loop async --set workload.requests=16 --check 'gpu_active>=99%'"))
    _of_many_runs(command)
    about = "compare the policies with traces of the real schedulers"
    conformance = command("conformance", about, "tests/golden/transformers")
    conformance.add_argument("paths", nargs="+", type=a_path, metavar="PATH", help="a trace, or a folder of traces")
    about = "derive the plans of recorded runs again: identical, or the difference"
    replan = command("replan", about, "runs/20261122T120000Z-8k_b32-async-92a9494b")
    replan.add_argument("runs", nargs="+", type=a_path, metavar="RUN", help="a run directory")
    about = "what the KV cache of recorded runs held: used, reserved for later, never used, scattered, free"
    held = command("occupancy", about, "runs/20261122T120000Z-fragmentation-sync-92a9494b --json")
    held.add_argument("runs", nargs="+", type=a_path, metavar="RUN", help="a run directory")
    held.add_argument("--json", action="store_true", help="print one object: run -> steps -> shares")
    schema = command("schema", "write the JSON schemas of scenario files, for editors", "--out schemas")
    schema.add_argument("--out", type=a_path, default=Path("schemas"), metavar="DIR", help="folder (schemas)")
    command("list", "schedulers, cost models, hardware, models, scenarios", "")
    _cache_curve_arguments(
        command(
            "cache-curve",
            "prefix-cache hit rate of a Mooncake trace by cache capacity",
            "conversation_trace.jsonl --capacities 1e5,1e6 --json",
        )
    )
    _score_arguments(
        command(
            "score",
            "replay a recorded vLLM run and print how far the simulator is off",
            "cases/RTX4090__Llama-3.1-8B --data . --json",
        )
    )
    about = "predict published measurements of whole servers, and print how far off that is"
    published.points_arguments(command("score-points", about, "--where system=h200_sxm,backend=vllm --json"))
    about = "calibrate the terms that kernel tables leave out on published measurements"
    published.terms_arguments(command("calibrate-terms", about, "vllm-dense"))
    about = "a simulated server for real clients: an OpenAI-compatible endpoint"
    serving.serve_arguments(command("serve", about, "8k_b32 --clock scale=10 --port 8000"))
    about = "run an asyncio client against a simulated server in virtual time"
    serving.drive_arguments(command("drive", about, "8k_b32 -- my_client:main"))
    about = "answer a question by many runs, or against published numbers"
    _study_arguments(command("study", about, "schedulers --out reports/fidelity/schedulers"))
    about = "measure the simulator: seconds, steps, requests, peak memory a case"
    _bench_arguments(command("bench", about, "decode_64 --json"))
    return parser


def _study_arguments(study: argparse.ArgumentParser) -> None:
    study.add_argument("name", choices=STUDIES, metavar="NAME", help=f"one of {', '.join(STUDIES)}")
    study.add_argument("--out", type=a_path, metavar="DIR", help="also write report.md and figures to this folder")
    study.add_argument("--json", action="store_true", help="print the numbers as one object instead of tables")


def _bench_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="cases to run (all but million); steps: what a step costs; endpoint: a token",
    )
    bench.add_argument("--peers", action="store_true", help="beside other simulators that are installed, in turn")
    bench.add_argument("--json", action="store_true", help="print one JSON object, a case a key")


def _of_many_runs(command: Callable[[str, str, str], Parser]) -> None:
    """The commands that make many runs, or read what a sweep made of them."""
    _sweep_arguments(command("sweep", "run a scenario many times over axes of its fields", "sweep.yaml --jobs 4"))
    about = "how much load a server holds within conditions: an interval, and what binds"
    capacity_arguments(command("capacity", about, "rates --loop async --slo 'ttft.p99<=2s' --slo 'tpot.p99<=50ms'"))
    about = "what a field of a sweep changes, by paired replicates"
    choosing.contrast_arguments(command("contrast", about, "sweeps/sweep.parquet --by loop --metric goodput"))
    about = "which points of a sweep nobody beats in two metrics at once"
    choosing.pareto_arguments(command("pareto", about, "sweeps/sweep.parquet --where 'ttft.p99<=2s'"))
    about = "find the best settings of a scenario, and how sure that is"
    example = "rates --knob scheduler.max_num_seqs=16..128 --maximise goodput --slo 'ttft.p99<=2s'"
    choosing.tune_arguments(command("tune", about, example))


def _sweep_arguments(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument("file", type=a_path, metavar="FILE", help="a sweep file: a scenario and the axes of its fields")
    store_arguments(sweep)
    sweep.add_argument(
        "--shard", type=a_shard, default=(1, 1), metavar="I/N", help="only every N-th point, from the I-th on"
    )
    sweep.add_argument("--json", action="store_true", help="print one object: the points with all their metrics")
    sweep.add_argument("--quiet", action="store_true", help="print nothing but the path of the table")


def _cache_curve_arguments(curve: argparse.ArgumentParser) -> None:
    curve.add_argument(
        "trace", type=a_path, metavar="TRACE", help="a Mooncake trace: a path, or its name in the data folder"
    )
    curve.add_argument("--capacities", metavar="N,N", help="rising, in tokens, such as 1e4,1e5 (those of the paper)")
    curve.add_argument("--block-tokens", type=int, default=512, metavar="N", help="of a cached block (512)")
    curve.add_argument("--json", action="store_true", help="print one object; capacity null is the infinite cache")


def _score_arguments(score: argparse.ArgumentParser) -> None:
    score.add_argument("case", type=a_path, metavar="CASE", help="folder: config.json, ...; or requests.csv.gz")
    score.add_argument("--data", type=a_path, metavar="DIR", help="pack of workloads and profiles (CASE/../..)")
    score.add_argument("--hardware", metavar="NAME", help="data sheet of the case's GPU: a name or a file")
    about = "of a folder with requests.csv.gz: which runs, such as run=vllm-70b,scenario=sharegpt,qps=0.5 (all)"
    where_argument(score, about)
    score.add_argument("--ablate", action="store_true", help="repeat it without one part of the model at a time")
    score.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override any field of the case's scenario"
    )
    score.add_argument(
        "--out", type=a_path, metavar="DIR", help="report.md and figures (runs/score/<CASE>; none with --json)"
    )
    score.add_argument("--json", action="store_true", help="print the numbers as one object instead of tables")
