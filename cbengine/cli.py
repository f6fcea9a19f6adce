"""`python -m cbengine`: arguments and exit codes only. Nothing heavy is imported before a command is known.

Exit codes: 0 ok, 1 error, 2 bad scenario, weights or arguments, 3 a check failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbsim.arguments import ERROR, USAGE, Parser, guarded, run_arguments, run_options

if TYPE_CHECKING:
    from cbengine.build import Setup

DEVICES = ("inline", "process", "modelled", "cuda")
PHASES = ("schedule", "prepare", "launch", "update")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    arguments = _parser().parse_args(argv)
    return guarded("cbengine", arguments.command, lambda: _dispatch(arguments), _status)


def _status(error: Exception) -> int | None:
    """Exit status of an error that a user can cause; None for one that only we can."""
    from cbengine.errors import UsageError
    from cbsim.checks import CheckError
    from cbsim.fields import ScenarioError
    from cbsim.runs import ServerError
    from cbsim.trace import RunError

    if isinstance(error, ScenarioError | CheckError | UsageError):
        return USAGE
    return ERROR if isinstance(error, RunError | ServerError) else None


def _dispatch(arguments: argparse.Namespace) -> int:
    try:
        import torch  # noqa: F401
    except ImportError:
        from cbengine.errors import MissingError

        raise MissingError("torch is not installed: pip install -e '.[engine]'") from None
    from cbengine import commands

    if arguments.command == "replay":
        options = replace(run_options(arguments), command=("cbengine", "replay"), extra=_own_words(arguments))
        setup = _setup(arguments)
        return commands.replay(options, setup, peer=arguments.engine == "transformers", profiled=arguments.profile)
    if arguments.command == "calibrate":
        setup = _setup(arguments)
        name, rows, longest = ("8k_b32", 64, 8192) if setup.device == "cuda" else ("tiny_cpu", 16, 160)
        wanted = commands.CalibrateOptions(
            scenario=arguments.scenario or name,
            overrides=arguments.set,
            out=arguments.out,
            rows=arguments.rows or rows,
            longest=arguments.longest or longest,
            quick=arguments.quick,
        )
        return commands.calibration(wanted, setup)
    if arguments.command == "bench":
        return commands.benchmark(arguments.device, arguments.out, quick=arguments.quick, as_json=arguments.json)
    if arguments.command == "validate":
        return commands.validation(arguments.device, arguments.out)
    return commands.generate(arguments.prompt, arguments.tokens, _setup(arguments))


def _setup(arguments: argparse.Namespace) -> Setup:
    from cbengine.build import Setup, default_device
    from cbengine.sampling import Sampling

    return Setup(
        device=arguments.device or default_device(),
        weights=arguments.weights,
        sampling=Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.sampling_seed),
        cuda_graphs=not getattr(arguments, "no_cuda_graphs", False),
        end_tokens=getattr(arguments, "stop_at_end_tokens", True),
        injected=tuple(getattr(arguments, "inject", ())),
        saves_tokens=getattr(arguments, "save_tokens", False),
    )


def _own_words(arguments: argparse.Namespace) -> list[str]:
    """The options that `cbsim run` does not have, as they were given."""
    words: list[str] = []
    named: dict[str, Any] = {
        "--engine": None if arguments.engine == "cbengine" else arguments.engine,
        "--device": arguments.device,
        "--weights": arguments.weights,
        "--temperature": arguments.temperature or None,
        "--top-k": arguments.top_k or None,
        "--top-p": None if arguments.top_p == 1 else arguments.top_p,
        "--sampling-seed": arguments.sampling_seed or None,
        "--profile": arguments.profile or None,
    }
    for option, value in named.items():
        words += [] if value is None else [option, str(value)]
    for phase, extra_ns in arguments.inject:
        words += ["--inject", f"{phase}={extra_ns / 1e6:g}"]
    words += ["--no-cuda-graphs"] * arguments.no_cuda_graphs
    words += ["--save-tokens"] * arguments.save_tokens
    words += ["--stop-at-end-tokens"] * arguments.stop_at_end_tokens
    return words


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cbengine",
        description="Run continuous batching for real, with the simulator's own policies.",
        epilog="Exit status: 0 ok, 1 error, 2 bad scenario, weights or arguments, 3 a check failed.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    replay = commands.add_parser("replay", help="run a scenario on a device and write a run directory a loop")
    run_arguments(replay)
    _device_arguments(replay)
    replay.add_argument(
        "--engine", choices=("cbengine", "transformers"), default="cbengine", help="ours, or transformers' own batching"
    )
    replay.add_argument(
        "--inject", action="append", default=[], type=_phase, metavar="PHASE=MS", help="extra CPU work a step"
    )
    replay.add_argument("--save-tokens", action="store_true", help="write prompts and outputs to tokens.parquet, too")
    replay.add_argument("--no-cuda-graphs", action="store_true", help="launch every step kernel by kernel")
    replay.add_argument("--stop-at-end-tokens", action="store_true", help="let the model end a request early, too")
    replay.add_argument(
        "--profile", type=_count, default=0, metavar="N", help="check GPU-active of N steps with torch.profiler"
    )
    _calibrate_arguments(commands.add_parser("calibrate", help="measure the coefficients that the simulator needs"))
    validate = commands.add_parser("validate", help="simulated against measured, on a CPU")
    validate.add_argument("--device", choices=("process", "modelled"), default="process", help="see replay (process)")
    validate.add_argument("--out", type=Path, default=Path("runs/validate"), metavar="DIR", help="where runs go")
    bench = commands.add_parser("bench", help="speed against what the device could do, and against transformers")
    bench.add_argument("--device", choices=("modelled", "cuda"), help="cuda if there is one, or the CPU's work alone")
    bench.add_argument("--quick", action="store_true", help="a minute instead of ten")
    bench.add_argument("--json", action="store_true", help="print a list of figures")
    bench.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="where runs go (runs/bench)")
    generate = commands.add_parser("generate", help="print what a model says, from a local Hugging Face folder")
    generate.add_argument("--prompt", required=True, help="the text to go on from")
    generate.add_argument("--tokens", type=_count, default=64, metavar="N", help="most tokens to generate (64)")
    _device_arguments(generate)
    return parser


def _calibrate_arguments(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument("scenario", nargs="?", help="whose model and scheduler (8k_b32 on a GPU, else tiny_cpu)")
    calibrate.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override any field")
    calibrate.add_argument("--out", type=Path, required=True, metavar="FILE", help="the coefficient file to write")
    calibrate.add_argument("--rows", type=_count, metavar="N", help="most requests in a step (64 on a GPU, else 16)")
    calibrate.add_argument(
        "--longest", type=_count, metavar="N", help="longest sequence, tokens (8192 on a GPU, else 160)"
    )
    calibrate.add_argument("--quick", action="store_true", help="shorter outputs, less precise")
    _device_arguments(calibrate)


def _device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=DEVICES, help="where steps are computed (cuda if there is one, or process)")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="a local Hugging Face folder; default: random")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest of mass P")
    parser.add_argument("--sampling-seed", type=int, default=0, metavar="SEED", help="seed of the sampling (0)")


def _phase(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        extra_ms = float(value)
    except ValueError:
        extra_ms = -1.0
    if name not in PHASES or not 0 <= extra_ms <= 10_000:
        known = ", ".join(PHASES)
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
