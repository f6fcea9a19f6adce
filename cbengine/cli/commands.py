"""What the commands do. Arguments come in parsed; a number goes out, the exit status."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cbengine import build, servers
from cbengine.bench.figures import say
from cbengine.build import Setup
from cbengine.errors import MissingError, UsageError
from cbengine.first.pack_run import ended_politely
from cbengine.measure import calibrate, campaign, predict, provenance, scores
from cbengine.measure.probes import Reach
from cbsim.scenario import scenario as scenarios
from cbsim.scenario import shapes
from cbsim.server import run_command
from cbsim.server.run_command import RunOptions
from cbsim.server.status import CHECK_FAILED, ERROR, OK

FEW_TOKENS = 16  # of the largest step probed: a calibration up to fewer says next to nothing
FAR_OFF = 0.3  # of a step's kernels: idle machines have some 0.1


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """`calibrate`, parsed: what to probe with, how far, and where the coefficients go."""

    scenario: str
    overrides: Sequence[str]
    out: Path
    reach: Reach
    quick: bool


def replay(options: RunOptions, setup: Setup, *, peer: bool, profiled: int, stand_in: bool = False) -> int:
    """Run a scenario on a device under each of its loops, write the run directories, say what came out. The peer may
    have the stand-in for flash_attn.
    """
    if setup.spin and (peer or setup.device != "cuda"):
        raise UsageError("--wait spin: needs --device cuda and our own engine")
    if profiled and (peer or setup.device != "cuda"):
        raise UsageError("--profile: needs --device cuda and our own engine")
    if stand_in and not (peer and setup.device == "cuda"):
        raise UsageError("--flash-attn stand-in: needs --engine transformers and --device cuda")
    serve = servers.maker(setup, peer, stand_in, profiled)
    return run_command.run(options, serve, lambda scenario: build.adapted(scenario, setup))


def calibration(options: CalibrateOptions, setup: Setup) -> int:
    """Measure the coefficients of a model on a device and write them where the simulator can read them."""
    scenario = build.adapted(scenarios.load(options.scenario, options.overrides), setup)
    calibrate.check_writable(options.out)
    measured = calibrate.calibrate(scenario, setup, say, reach=options.reach, quick=options.quick)
    held = calibrate.write(options.out, measured, scenario, build.device_name(setup))
    if (most := held["calibrated"]["tokens"]) < FEW_TOKENS:
        say(f"warning: the largest step probed has {most} query tokens: what larger ones cost is a guess")
    if (off := measured.fits["kernels"].median_error) > FAR_OFF:
        say(f"warning: the kernels' times are {off:.0%} off at half of the steps or more: was the machine busy?")
    print(options.out.read_text(encoding="utf-8"))
    cost = f"cost={{kind: fitted, path: {json.dumps(str(options.out.resolve()), ensure_ascii=False)}}}"
    words = [word for override in (*options.overrides, cost) for word in ("--set", override)]
    print(f"use it    {shlex.join(['python', '-m', 'cbsim', 'run', options.scenario, *words])}")
    return OK


def predicted(names: Sequence[str], options: predict.PredictOptions) -> int:
    """Simulated against measured; 3 if a bar is missed."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no CUDA device here")
    # A shared CPU for a few seconds.
    rough = options.device == "process" or (options.quick and options.device != "cuda")
    return _say_scores(predict.predict(names, options, servers.maker, say), absurd_only=rough)


def predicted_again(names: Sequence[str], place: Path) -> int:
    """What was measured before, predicted again; 3 if a bar is missed."""
    shared_cores = place.resolve().name == provenance.slug("process")
    return _say_scores(predict.again(names, place, say), absurd_only=shared_cores)


def _say_scores(cases: Sequence[scores.ScoredCase], *, absurd_only: bool) -> int:
    print(scores.table(cases))
    failed = scores.failures(cases, absurd_only=absurd_only)
    for case, score in failed:
        print(f"missed: {case}, {score.loop}, {score.bar.label}: {score.shown()[-1]}", file=sys.stderr)
    return CHECK_FAILED if failed else OK


def measure_campaign(parts: Sequence[str], device: str | None, out: Path, until: float) -> int:
    """Measure a GPU, or rehearse it, to `until` on the monotonic clock; 1 if a command failed or was not begun. A
    request to end is an exception, so that the command under way is ended, too.
    """
    where = device or ("cuda" if build.default_device() == "cuda" else "process")
    with ended_politely((signal.SIGTERM, signal.SIGHUP)):
        left = campaign.campaign(parts, where, out, say, until)
    for command in left:
        print(f"failed or not begun: {command}", file=sys.stderr)
    return ERROR if left else OK


def speed(device: str | None, out: Path, parts: Sequence[str], model: str | None, *, quick: bool, as_json: bool) -> int:
    """Print how fast the engine is, or `parts` of what the device and its kernels do, size by size."""
    from cbengine.bench import engine_bench, kernels_bench

    where = device or ("cuda" if build.default_device() == "cuda" else "modelled")
    if (parts or model) and where != "cuda":
        raise UsageError("--only, --kernels, --model: need --device cuda")
    if model and not parts:
        raise UsageError("--model: needs --only or --kernels")
    if where == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no CUDA device here")
    if parts:
        shape = shapes.model(model) if model else scenarios.load("8k_b32").model
        return kernels_bench.bench(parts, shape, out, quick=quick, as_json=as_json)
    return engine_bench.bench(where, out, servers.maker, quick=quick, as_json=as_json)


def generate(prompt: str, tokens: int, setup: Setup) -> int:
    """Print what the model in a folder says after `prompt`, as it comes."""
    from cbengine import text

    text.generate(prompt, tokens, setup, sys.stdout)
    return OK
