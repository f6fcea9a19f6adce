"""The engine's commands: each takes parsed arguments and returns an exit status."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace

import torch

from cbengine import build
from cbengine.build import Setup
from cbengine.errors import UsageError
from cbengine.measure import calibrate as calibrating
from cbengine.measure import predict as predicting
from cbengine.measure import provenance
from cbengine.measure.probes import CPU_REACH, GPU_REACH, Reach
from cbengine.sampling import Sampling, SamplingSettings
from cbengine.serving import fleet
from cbsim.cli.arguments import run_options
from cbsim.cli.sessions import options_of
from cbsim.errors import CHECK_FAILED, OK
from cbsim.runs import run_command
from cbsim.runs.served import with_one_loop
from cbsim.scenario import scenario as scenarios

SAMPLING = {"temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p", "seed": "--sampling-seed"}


def progress(line: str) -> None:
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def replay(arguments: argparse.Namespace) -> int:
    """Run a scenario on a device under each of its loops and write the run directories."""
    arguments.set = [*arguments.set, *_ranks(arguments)]
    setup = _setup(arguments)
    for option, used in (("--wait spin", setup.spin), ("--profile", arguments.profile)):
        if used and setup.device != "cuda":
            raise UsageError(f"{option}: needs --device cuda")
    if arguments.profile and scenarios.load(arguments.scenario, arguments.set).gpus > 1:
        raise UsageError("--profile: needs cost.tensor_parallel 1: kernels of other processes are not seen")
    options = run_options(arguments, *([] if arguments.device else ["--device", setup.device]))
    serve = fleet.maker(setup, arguments.profile)
    return run_command.run(options, serve, lambda scenario: fleet.adapted(scenario, setup))


def serve(arguments: argparse.Namespace) -> int:
    """Serve clients with a real engine."""
    from cbengine.serving import backend

    device = arguments.device or build.default_device()
    folders = {"weights": arguments.model, "draft_weights": arguments.draft_weights}
    setup = Setup(device=device, **folders, sampling=Sampling(temperature=1.0))
    line = arguments.line if arguments.device else f"{arguments.line} --device {device}"
    names = (arguments.served_model_name, arguments.tokenizer)
    asked = scenarios.load(arguments.scenario, [*arguments.set, *_ranks(arguments)])
    scenario = with_one_loop(asked, several=True)
    return backend.serve(scenario, setup, options_of(arguments), line, *names)


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure the coefficients of a model on a device and write the file that the simulator reads."""
    setup = _setup(arguments)
    name, usual = ("validation", GPU_REACH) if setup.device in ("cuda", "modelled") else ("tiny_cpu", CPU_REACH)
    name = arguments.scenario or name
    sizes = (arguments.rows, arguments.longest, arguments.tokens, arguments.context)
    reach = Reach(*(size or default for size, default in zip(sizes, usual, strict=True)))
    scenario = build.adapted(scenarios.load(name, arguments.set), setup)
    calibrating.check_writable(arguments.out)
    measured = calibrating.calibrate(scenario, setup, progress, reach=reach, quick=arguments.quick)
    content = calibrating.write(arguments.out, measured, scenario, build.device_name(setup))
    if (most := content["calibrated"]["tokens"]) < 16:  # says next to nothing
        progress(f"warning: the largest step probed has {most} query tokens: what larger ones cost is a guess")
    if (error := measured.fits["kernels"].errors.median) > 0.3:  # on an idle machine it is about 0.1
        progress(f"warning: the kernels' times are {error:.0%} off at half of the steps or more: was the machine busy?")
    print(arguments.out.read_text(encoding="utf-8"))
    cost = f"cost={{kind: fitted, path: {json.dumps(str(arguments.out.resolve()), ensure_ascii=False)}}}"
    overrides = [part for override in (*arguments.set, cost) for part in ("--set", override)]
    print(f"use it    {shlex.join(['python', '-m', 'cbsim', 'run', name, *overrides])}")
    return OK


def predict(arguments: argparse.Namespace) -> int:
    """Compare simulated and measured runs; return 3 if a bar is missed. With --again nothing is measured."""
    if arguments.again is not None:
        if arguments.set or arguments.repeat > 1 or arguments.device or arguments.quick or arguments.later:
            raise UsageError("--again: measures nothing, and takes no --set, --repeat, --device, --quick or --later")
        shared_cores = arguments.again.resolve().name == provenance.slug("process")
        cases = predicting.again(arguments.cases, arguments.again, progress)
        return _print_scores(cases, absurd_only=shared_cores)
    device = arguments.device or build.default_device()
    options = arguments.out, arguments.set, arguments.repeat, arguments.quick, progress, arguments.later
    session = predicting.Session(device, *options)
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here")
    # A shared CPU for a few seconds is too noisy for the bars.
    rough = device == "process" or (arguments.quick and device != "cuda")
    scored = session.predict(arguments.cases)
    if arguments.later:
        print(f"predict   {shlex.join(['python', '-m', 'cbengine', 'predict', '--again', str(session.folder)])}")
        return OK
    return _print_scores(scored, absurd_only=rough)


def _print_scores(cases: predicting.Scores, *, absurd_only: bool) -> int:
    print(predicting.table(cases))
    failed = predicting.failures(cases, absurd_only=absurd_only)
    for case, score in failed:
        print(f"missed: {case}, {score.loop}, {score.bar.label}: {score.shown()[-1]}", file=sys.stderr)
    return CHECK_FAILED if failed else OK


def _ranks(arguments: argparse.Namespace) -> list[str]:
    """Return the override that --tensor-parallel stands for."""
    return [] if arguments.tensor_parallel is None else [f"cost.tensor_parallel={arguments.tensor_parallel}"]


def _setup(arguments: argparse.Namespace) -> Setup:
    """Return the device, weights and sampling of `replay` and `calibrate`. Raises UsageError."""
    try:
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.sampling_seed)
    except UsageError as error:
        field, _, message = str(error).removeprefix("sampling.").partition(":")
        raise UsageError(f"{SAMPLING[field]}:{message}") from None
    setup = Setup(device=arguments.device or build.default_device(), weights=arguments.weights, sampling=sampling)
    if arguments.command == "calibrate":
        return setup
    return replace(
        setup,
        requests=SamplingSettings.read(arguments.sampling, sampling) if arguments.sampling else SamplingSettings(),
        cuda_graphs=not arguments.no_cuda_graphs,
        end_tokens=arguments.stop_at_end_tokens,
        injected=tuple(arguments.inject),
        saves_tokens=arguments.save_tokens,
        spin=arguments.wait == "spin",
        draft_weights=arguments.draft_weights,
    )
