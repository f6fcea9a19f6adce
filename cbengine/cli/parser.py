"""The command line of `python -m cbengine`: commands, their arguments, exit statuses.

Exit status: 0 ok, 1 error, 2 bad scenario, weights or arguments, 3 a check failed. Nothing heavy is imported before a
command is known.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cbsim.cli.arguments import Parser, a_path, guarded, run_arguments
from cbsim.cli.sessions import door_arguments, session_arguments
from cbsim.policy.plan import WORKED

DEVICES = {
    "inline": "a step is computed while it is launched",
    "process": "a worker process computes",
    "modelled": "nothing is computed, a step takes the scenario's cost model",
    "cuda": "a GPU",
}
SERVE = ("starlette", "uvicorn", "httptools", "prometheus_client", "tokenizers")  # packages of the extra `serve`
PROJECT = ("cbengine", "cbsim", "analysis")
EXAMPLES = {
    "replay": "tiny_cpu --device process --loop both --set workload.requests=8",
    "calibrate": "tiny_cpu --device process --quick --out mine.fitted.yaml",
    "serve": "tiny_cpu --device process --port 8000",
    "predict": "cpu-0 cpu-5 --device process --quick --out runs/predicted",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    parts = list(sys.argv[1:] if argv is None else argv)
    arguments = command_line().parse_args(parts)
    arguments.line = shlex.join(["python", "-m", "cbengine", *parts])
    return guarded("cbengine", arguments.command, lambda: _dispatch(arguments))


def _dispatch(arguments: argparse.Namespace) -> int:
    try:
        from cbengine.cli import commands

        return commands.COMMANDS[arguments.command](arguments)
    except ModuleNotFoundError as error:
        from cbengine.errors import MissingError

        package = (error.name or "").partition(".")[0]
        if package in PROJECT:
            raise
        extra = "serve" if package in SERVE else "engine"
        raise MissingError(f"{package} is not installed: pip install -e '.[{extra}]'") from None


def command_line() -> argparse.ArgumentParser:
    """All commands."""
    parser = Parser(
        prog="python -m cbengine",
        description="Run continuous batching for real, with the simulator's own policies.",
        epilog="Exit status: 0 ok, 1 error, 2 bad scenario, weights or arguments, 3 a check failed.",
        example="python -m cbengine replay tiny_cpu --device inline",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> Parser:
        example = f"python -m cbengine {name} {EXAMPLES[name]}"
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", example=example)

    _replay_arguments(command("replay", "serve a scenario on a device and write a run directory for each loop"))
    _serve_arguments(command("serve", "a real engine for real clients: an OpenAI-compatible endpoint"))
    _calibrate_arguments(command("calibrate", "measure the coefficients of the simulator's fitted cost model"))
    _predict_arguments(
        command("predict", "calibrate on short probes, predict workloads never probed, run them, compare")
    )
    return parser


def _replay_arguments(replay: argparse.ArgumentParser) -> None:
    run_arguments(replay)
    _device_arguments(replay, *DEVICES)
    replay.add_argument(
        "--inject",
        action="append",
        default=[],
        type=_phase,
        metavar="PHASE=MS",
        help=f"milliseconds of extra CPU work in every step's {', '.join(WORKED[:-1])} or {WORKED[-1]} (repeatable)",
    )
    replay.add_argument(
        "--sampling",
        type=a_path,
        metavar="FILE",
        help="settings of single requests, JSON Lines: id and any of temperature, top_k, top_p, seed",
    )
    replay.add_argument("--save-tokens", action="store_true", help="write prompts and outputs to tokens.parquet, too")
    replay.add_argument("--no-cuda-graphs", action="store_true", help="GPU only: launch every step kernel by kernel")
    replay.add_argument(
        "--wait",
        choices=("block", "spin"),
        default="block",
        help="GPU only: how the CPU waits for a step: asleep (default), or busy, which wakes up sooner",
    )
    replay.add_argument(
        "--stop-at-end-tokens", action="store_true", help="let the end tokens of --weights end a request early"
    )
    replay.add_argument(
        "--profile",
        type=_count,
        default=0,
        metavar="N",
        help="GPU only: profile N steps with torch: their kernels go to kernels.csv, their GPU-active beside ours",
    )


def _serve_arguments(serve: argparse.ArgumentParser) -> None:
    session_arguments(serve)
    door_arguments(serve)
    _device_argument(serve, "inline", "process", "cuda")
    text = "a local Hugging Face folder, as --weights of replay, and its tokenizer (random weights, and our tokenizer)"
    serve.add_argument("--model", type=a_path, metavar="DIR", help=text)


def _calibrate_arguments(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument("scenario", nargs="?", help="whose model and scheduler (validation on a GPU, else tiny_cpu)")
    calibrate.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override any field (repeatable)"
    )
    calibrate.add_argument("--out", type=a_path, required=True, metavar="FILE", help="the coefficient file to write")
    calibrate.add_argument("--rows", type=_count, metavar="N", help="most requests in a step (256 on a GPU, else 32)")
    calibrate.add_argument(
        "--longest", type=_count, metavar="N", help="longest sequence, tokens (8192 on a GPU, else 320)"
    )
    calibrate.add_argument(
        "--tokens", type=_count, metavar="N", help="query tokens of a step (8192 on a GPU, else 128)"
    )
    calibrate.add_argument(
        "--context", type=_count, metavar="N", help="cached tokens of all requests (300000 on a GPU, else 5000)"
    )
    calibrate.add_argument("--quick", action="store_true", help="shorter outputs, less precise")
    _device_arguments(calibrate, "process", "modelled", "cuda")


def _predict_arguments(predict: argparse.ArgumentParser) -> None:
    predict.add_argument(
        "cases", nargs="*", metavar="CASE", help="workloads or groups (all): an unknown one lists them"
    )
    predict.add_argument(
        "--device",
        choices=("cuda", "process", "modelled"),
        help="cuda: a GPU; process: a tiny model in a worker process; modelled: a GPU's workloads, their kernels "
        "take what the cost model says (default: cuda if there is one, else process)",
    )
    predict.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of every case (repeatable)"
    )
    predict.add_argument("--repeat", type=_count, default=1, metavar="N", help="measure each loop N times (1)")
    predict.add_argument("--quick", action="store_true", help="calibrate with shorter outputs, less precise")
    predict.add_argument(
        "--again",
        type=a_path,
        metavar="DIR",
        help="measure nothing: fit and predict again what was measured into this folder",
    )
    predict.add_argument(
        "--out", type=a_path, default=Path("reports/hardware"), metavar="DIR", help="where all goes (reports/hardware)"
    )


def _device_arguments(parser: argparse.ArgumentParser, *devices: str) -> None:
    _device_argument(parser, *devices)
    kind = "a local Hugging Face folder of Llama 3, Qwen2.5 or Qwen3 (default: random weights of the scenario's shape)"
    parser.add_argument("--weights", type=a_path, metavar="DIR", help=kind)
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): the likeliest token; else sampled"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest; 0 (default): all"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest of mass P; 1 (default): all"
    )
    parser.add_argument("--sampling-seed", type=int, default=0, metavar="SEED", help="seed of the sampling (0)")


def _device_argument(parser: argparse.ArgumentParser, *devices: str) -> None:
    devices_text = "; ".join(f"{name}: {DEVICES[name]}" for name in devices)
    parser.add_argument(
        "--device", choices=devices, help=f"{devices_text} (default: cuda if there is one, else process)"
    )


def _phase(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        extra_ms = float(value)
    except ValueError:
        extra_ms = -1.0
    if name not in WORKED or not 0 <= extra_ms <= 10_000:
        known = ", ".join(WORKED)
        raise argparse.ArgumentTypeError(f"{text!r}: expected PHASE=MS with a phase of {known} and 0 to 10000 ms")
    return name, round(extra_ms * 1e6)


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number >= 1")
    return count
