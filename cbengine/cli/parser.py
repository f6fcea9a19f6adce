"""The command line of `python -m cbengine`: commands, their arguments, exit statuses.

Exit status: 0 ok, 1 error, 2 bad scenario, weights or arguments, 3 a check failed. No heavy module is imported before a
command is known.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cbsim.cli.arguments import Parser, a_path, option, parser_of, run_arguments, run_verb, verb, whole, within
from cbsim.cli.sessions import door_arguments, session_arguments
from cbsim.files import real
from cbsim.policy.plan import WORKED

DEVICES = {
    "inline": "a step is computed while it is launched",
    "process": "a worker process computes",
    "modelled": "nothing is computed, a step takes the scenario's cost model",
    "cuda": "a GPU",
}
COUNT = whole(1, 10**18)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. A user's mistake is one message on stderr, never a traceback."""
    return run_verb("cbengine", command_line(), VERBS, argv)


DRAFTS = "a local Hugging Face folder of the model that drafts (random weights of speculation.drafter.model)"


def command_line() -> Parser:
    """Return the parser with all commands."""
    about = "Run continuous batching for real, with the simulator's own policies."
    status = "Exit status: 0 ok, 1 error, 2 bad scenario, weights or arguments, 3 a check failed, 130 interrupted."
    return parser_of("cbengine", about, status, VERBS)


@verb(
    "replay",
    "serve a scenario on a device and write a run directory for each loop",
    "tiny_cpu --device process --loop both --set workload.requests=8",
)
def _replay_arguments(replay: argparse.ArgumentParser) -> None:
    run_arguments(replay)
    _device_arguments(replay, *DEVICES)
    _ranks_argument(replay)
    about = f"milliseconds of extra CPU work in every step's {', '.join(WORKED[:-1])} or {WORKED[-1]} (repeatable)"
    replay.add_argument("--inject", action="append", default=[], type=_phase, metavar="PHASE=MS", help=about)
    about = "settings of single requests, JSON Lines: id and any of temperature, top_k, top_p, seed"
    replay.add_argument("--sampling", type=a_path, metavar="FILE", help=about)
    replay.add_argument("--save-tokens", action="store_true", help="write prompts and outputs to tokens.parquet, too")
    replay.add_argument("--no-cuda-graphs", action="store_true", help="GPU only: launch every step kernel by kernel")
    about = "GPU only: how the CPU waits for a step: asleep (default), or busy, which wakes up sooner"
    replay.add_argument("--wait", choices=("block", "spin"), default="block", help=about)
    about = "let the end tokens of --weights end a request early"
    replay.add_argument("--stop-at-end-tokens", action="store_true", help=about)
    replay.add_argument("--draft-weights", type=a_path, metavar="DIR", help=DRAFTS)
    about = "GPU only: profile N steps with torch: their kernels go to kernels.csv, their GPU-active beside ours"
    replay.add_argument("--profile", type=COUNT, default=0, metavar="N", help=about)


@verb("serve", "a real engine for real clients: an OpenAI-compatible endpoint", "tiny_cpu --device process --port 8000")
def _serve_arguments(serve: argparse.ArgumentParser) -> None:
    session_arguments(serve)
    door_arguments(serve)
    _device_argument(serve, "inline", "process", "cuda")
    _ranks_argument(serve)
    about = "a local Hugging Face folder, as --weights of replay, and its tokenizer (random weights, and our tokenizer)"
    serve.add_argument("--model", type=a_path, metavar="DIR", help=about)
    serve.add_argument("--draft-weights", type=a_path, metavar="DIR", help=DRAFTS)


@verb(
    "calibrate",
    "measure the coefficients of the simulator's fitted cost model",
    "tiny_cpu --device process --quick --out mine.fitted.yaml",
)
def _calibrate_arguments(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument("scenario", nargs="?", help="whose model and scheduler (validation on a GPU, else tiny_cpu)")
    option(calibrate, "--set")
    calibrate.add_argument("--out", type=a_path, required=True, metavar="FILE", help="the coefficient file to write")
    for name, about in (
        ("--rows", "most requests in a step (256 on a GPU, else 32)"),
        ("--longest", "longest sequence, tokens (8192 on a GPU, else 320)"),
        ("--tokens", "query tokens of a step (8192 on a GPU, else 128)"),
        ("--context", "cached tokens of all requests (300000 on a GPU, else 5000)"),
    ):
        calibrate.add_argument(name, type=COUNT, metavar="N", help=about)
    calibrate.add_argument("--quick", action="store_true", help="shorter outputs, less precise")
    _device_arguments(calibrate, "process", "modelled", "cuda")


@verb(
    "predict",
    "calibrate on short probes, predict workloads never probed, run them, compare",
    "cpu-0 cpu-5 --device process --quick --out runs/predicted",
)
def _predict_arguments(predict: argparse.ArgumentParser) -> None:
    about = "workloads or groups (all): an unknown one lists them"
    predict.add_argument("cases", nargs="*", metavar="CASE", help=about)
    about = (
        "cuda: a GPU; process: a tiny model in a worker process; modelled: a GPU's workloads, their kernels "
        "take what the cost model says (default: cuda if there is one, else process)"
    )
    predict.add_argument("--device", choices=("cuda", "process", "modelled"), help=about)
    option(predict, "--set", help="override a field of every case (repeatable)")
    predict.add_argument("--repeat", type=COUNT, default=1, metavar="N", help="measure each loop N times (1)")
    predict.add_argument("--quick", action="store_true", help="calibrate with shorter outputs, less precise")
    about = "measure only, where a GPU is rented by the minute: --again predicts, on any machine"
    predict.add_argument("--later", action="store_true", help=about)
    about = "measure nothing: fit and predict again what was measured into this folder"
    predict.add_argument("--again", type=a_path, metavar="DIR", help=about)
    out = Path("reports/hardware")
    predict.add_argument("--out", type=a_path, default=out, metavar="DIR", help=f"where all goes ({out})")


def _device_arguments(parser: argparse.ArgumentParser, *devices: str) -> None:
    _device_argument(parser, *devices)
    kind = "a local Hugging Face folder of Llama 3, Qwen2.5 or Qwen3 (default: random weights of the scenario's shape)"
    parser.add_argument("--weights", type=a_path, metavar="DIR", help=kind)
    for name, default, metavar, about in (
        ("--temperature", 0.0, "T", "0 (default): the likeliest token; else sampled"),
        ("--top-k", 0, "K", "sample from the K likeliest; 0 (default): all"),
        ("--top-p", 1.0, "P", "sample from the likeliest of mass P; 1 (default): all"),
        ("--sampling-seed", 0, "SEED", "seed of the sampling (0)"),
    ):
        parser.add_argument(name, type=type(default), default=default, metavar=metavar, help=about)


def _device_argument(parser: argparse.ArgumentParser, *devices: str) -> None:
    choices = "; ".join(f"{name}: {DEVICES[name]}" for name in devices)
    parser.add_argument("--device", choices=devices, help=f"{choices} (default: cuda if there is one, else process)")


def _ranks_argument(parser: argparse.ArgumentParser) -> None:
    about = "ranks that share every layer, worker processes or GPUs (the scenario's cost.tensor_parallel)"
    parser.add_argument("--tensor-parallel", type=COUNT, metavar="N", help=about)


def _phase(injected: str) -> tuple[str, int]:
    name, _, value = injected.partition("=")
    bound = f"PHASE=MS with a phase of {', '.join(WORKED)} and 0 to 10000 ms"
    extra_ms = within(injected, real(value), name in WORKED and 0 <= real(value) <= 10_000, bound)
    return name, round(extra_ms * 1e6)


VERBS = (_replay_arguments, _serve_arguments, _calibrate_arguments, _predict_arguments)
