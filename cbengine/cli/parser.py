"""`python -m cbengine`: from arguments to calls, and exit codes. Nothing heavy is imported before a command is known.

Exit codes: 0 ok, 1 error, 2 bad scenario, weights or arguments, 3 a check failed.
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbengine.bench import BENCH_PARTS
from cbengine.cli.arguments import RENAMED, command_line
from cbsim.cli.arguments import guarded, renamed, run_options
from cbsim.server.status import ERROR, USAGE

if TYPE_CHECKING:
    from cbengine.build import Setup
    from cbengine.measure.predict import PredictOptions

BEGUN_S = time.monotonic()  # before anything heavy is imported
SERVE = ("starlette", "uvicorn", "httptools", "prometheus_client", "tokenizers")  # of the extra `serve`
OURS = ("cbengine", "cbsim", "analysis")
SAMPLING = {"temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p", "seed": "--sampling-seed"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    if renamed("cbengine", RENAMED, argv):
        return USAGE
    arguments = command_line().parse_args(argv)
    return guarded("cbengine", arguments.command, lambda: _dispatch(arguments), _status)


def _status(error: Exception) -> int | None:
    """Exit status of an error that a user can cause; None for one that only we can."""
    from cbsim.results.checks import CheckError
    from cbsim.results.directory import RunError
    from cbsim.scenario.errors import UserError
    from cbsim.server.running import ServerError

    if isinstance(error, RunError | ServerError):
        return ERROR
    return USAGE if isinstance(error, UserError | CheckError) else None


def _dispatch(arguments: argparse.Namespace) -> int:
    try:
        return ACTIONS[arguments.command](arguments)
    except ModuleNotFoundError as error:
        from cbengine.errors import MissingError

        package = (error.name or "").partition(".")[0]
        if package in OURS:
            raise
        extra = "serve" if package in SERVE else "engine"
        raise MissingError(f"{package} is not installed: pip install -e '.[{extra}]'") from None


def _replay(arguments: argparse.Namespace) -> int:
    from cbengine.cli import commands

    setup = _setup(arguments)
    own = _own_words(arguments, setup)
    options = replace(run_options(arguments), command=("cbengine", "replay"), extra=own)
    stand_in = arguments.flash_attn == "stand-in"
    return commands.replay(
        options, setup, peer=arguments.engine == "transformers", profiled=arguments.profile, stand_in=stand_in
    )


def _serve(arguments: argparse.Namespace) -> int:
    from cbengine.build import Setup, default_device
    from cbengine.sampling import Sampling
    from cbengine.serving import command
    from cbsim.cli.sessions import options_of, scenario_of

    device = arguments.device or default_device()
    setup = Setup(device=device, weights=arguments.model, sampling=Sampling(temperature=1.0))
    told = command.EngineOptions(_serve_words(arguments, device), arguments.served_model_name, arguments.tokenizer)
    return command.serve(scenario_of(arguments), setup, told, options_of(arguments))


def _serve_words(arguments: argparse.Namespace, device: str) -> str:
    """The command that opens such a session again."""
    words = ["python", "-m", "cbengine", "serve", arguments.scenario]
    for override in arguments.set:
        words += ["--set", override]
    named = {
        "--seed": arguments.seed,
        "--loop": arguments.loop,
        "--device": device,
        "--model": arguments.model,
        "--tokenizer": arguments.tokenizer,
        "--served-model-name": arguments.served_model_name,
    }
    for option, value in named.items():
        words += [] if value is None else [option, str(value)]
    return shlex.join(words)


def _calibrate(arguments: argparse.Namespace) -> int:
    from cbengine.cli import commands
    from cbengine.measure.probes import CPU_REACH, GPU_REACH, Reach

    setup = _setup(arguments)
    name, usual = ("validation", GPU_REACH) if setup.device in ("cuda", "modelled") else ("tiny_cpu", CPU_REACH)
    given = (arguments.rows, arguments.longest, arguments.tokens, arguments.context)
    wanted = commands.CalibrateOptions(
        scenario=arguments.scenario or name,
        overrides=arguments.set,
        out=arguments.out,
        reach=Reach(*(number or default for number, default in zip(given, usual, strict=True))),
        quick=arguments.quick,
    )
    return commands.calibration(wanted, setup)


def _campaign(arguments: argparse.Namespace) -> int:
    from cbengine.cli import commands

    until = BEGUN_S + arguments.minutes * 60 if arguments.minutes else math.inf
    return commands.measure_campaign(arguments.parts, arguments.device, arguments.out, until)


def _pack(arguments: argparse.Namespace) -> int:
    from cbengine.bench.figures import say
    from cbengine.first import pack

    options = pack.PackOptions(
        out=arguments.out,
        max_mb=arguments.max_mb,
        part_minutes=arguments.part_minutes,
        max_result_mb=arguments.max_result_mb,
        python=arguments.python,
        triton_cache=arguments.triton_cache,
    )
    pack.pack(options, say)
    return 0


def _speed(arguments: argparse.Namespace) -> int:
    from cbengine.cli import commands

    parts = BENCH_PARTS if arguments.kernels else arguments.only
    return commands.speed(
        arguments.device, arguments.out, parts, arguments.model, quick=arguments.quick, as_json=arguments.json
    )


def _predict(arguments: argparse.Namespace) -> int:
    from cbengine.cli import commands
    from cbengine.errors import UsageError

    if arguments.again is None:
        return commands.predicted(arguments.cases, _predict_options(arguments))
    if arguments.set or arguments.repeat > 1 or arguments.device or arguments.quick:
        raise UsageError("--again: measures nothing, and takes no --set, --repeat, --device or --quick")
    return commands.predicted_again(arguments.cases, arguments.again)


def _generate(arguments: argparse.Namespace) -> int:
    from cbengine.cli import commands

    return commands.generate(arguments.prompt, arguments.tokens, _setup(arguments))


def _smoke(arguments: argparse.Namespace) -> int:
    """Needs no more than the standard library until a check does."""
    from cbengine.first import smoke
    from cbengine.first.pack_run import ended_politely
    from cbengine.first.smoke_checks import checks

    device = arguments.device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    if arguments.worker is not None:
        return smoke.work(smoke.CheckPlace(device, arguments.out), checks()[arguments.worker :])
    worker = (sys.executable, "-m", "cbengine", "smoke", "--device", device, "--out", str(arguments.out), "--from")
    try:
        with ended_politely((signal.SIGTERM, signal.SIGHUP)):
            ended_well = smoke.smoke(arguments.out, checks(), worker, lambda line: print(line, flush=True))
    except OSError as error:
        from cbengine.errors import UsageError

        raise UsageError(f"--out: {error.filename or arguments.out}: {error.strerror or error}") from None
    return 0 if ended_well else ERROR


ACTIONS = {
    "replay": _replay,
    "serve": _serve,
    "calibrate": _calibrate,
    "generate": _generate,
    "predict": _predict,
    "smoke": _smoke,
    "campaign": _campaign,
    "pack": _pack,
    "speed": _speed,
}


def _predict_options(arguments: argparse.Namespace) -> PredictOptions:
    from cbengine.build import default_device
    from cbengine.measure.predict import PredictOptions

    return PredictOptions(
        device=arguments.device or default_device(),
        out=arguments.out,
        overrides=arguments.set,
        repeat=arguments.repeat,
        quick=arguments.quick,
    )


def _setup(arguments: argparse.Namespace) -> Setup:
    from cbengine.build import Setup, default_device
    from cbengine.errors import UsageError
    from cbengine.sampling import Sampling
    from cbengine.settings import SamplingSettings, read

    try:
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.sampling_seed)
    except UsageError as error:
        field, _, text = str(error).removeprefix("sampling.").partition(":")
        raise UsageError(f"{SAMPLING[field]}:{text}") from None
    apart = getattr(arguments, "sampling", None)
    return Setup(
        device=arguments.device or default_device(),
        weights=arguments.weights,
        sampling=sampling,
        requests=read(apart, sampling) if apart else SamplingSettings(),
        cuda_graphs=not getattr(arguments, "no_cuda_graphs", False),
        end_tokens=getattr(arguments, "stop_at_end_tokens", arguments.command == "generate"),
        injected=tuple(getattr(arguments, "inject", ())),
        saves_tokens=getattr(arguments, "save_tokens", False),
        spin=getattr(arguments, "wait", "block") == "spin",
    )


def _own_words(arguments: argparse.Namespace, setup: Setup) -> list[str]:
    """The options that `cbsim run` does not have: as they were given, and the device, which depends on the machine."""
    words: list[str] = []
    named: dict[str, Any] = {
        "--engine": None if arguments.engine == "cbengine" else arguments.engine,
        "--flash-attn": None if arguments.flash_attn == "package" else arguments.flash_attn,
        "--device": setup.device,
        "--weights": arguments.weights,
        "--temperature": arguments.temperature or None,
        "--top-k": arguments.top_k or None,
        "--top-p": None if arguments.top_p == 1 else arguments.top_p,
        "--sampling-seed": arguments.sampling_seed or None,
        "--sampling": arguments.sampling,
        "--profile": arguments.profile or None,
    }
    for option, value in named.items():
        words += [] if value is None else [option, str(value)]
    for phase, extra_ns in arguments.inject:
        words += ["--inject", f"{phase}={extra_ns / 1e6:.15g}"]
    words += ["--no-cuda-graphs"] * arguments.no_cuda_graphs
    words += ["--wait", "spin"] * setup.spin
    words += ["--save-tokens"] * arguments.save_tokens
    words += ["--stop-at-end-tokens"] * arguments.stop_at_end_tokens
    return words
