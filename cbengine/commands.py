"""What the commands do. Arguments come in parsed; a number goes out, the exit status."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cbengine import build, calibrate, campaign, gpu, provenance, scores, settings, tokens, validate, weights
from cbengine.build import Setup
from cbengine.content import Prompts
from cbengine.errors import MissingError, UsageError
from cbengine.figures import say
from cbengine.pack_run import ended_politely
from cbengine.probes import Reach
from cbengine.profile import Profile
from cbsim import runs, scenario, shapes
from cbsim.runs import Maker, RunOptions
from cbsim.scenario import Scenario, depth
from cbsim.workload import Workload


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """`calibrate`, parsed: what to probe with, how far, and where the coefficients go."""

    scenario: str
    overrides: Sequence[str]
    out: Path
    reach: Reach
    quick: bool


class Measured:
    """The engine, as `runs` wants a server."""

    measured = True

    def __init__(self, setup: Setup, profiled: int, asked: Scenario, loop: str, workload: Workload) -> None:
        self._engine, device = build.engine(asked, loop, workload, setup)
        self._saves, self._requests = setup.saves_tokens, setup.requests
        self._profile = Profile(self._engine.record, profiled, depth(loop)) if profiled else None
        self.record = self._engine.record
        self._on_gpu = setup.device == "cuda"
        self.facts: dict[str, Any] = {
            **device.facts,
            **({"gpu_before": gpu.state()} if self._on_gpu else {}),
            "engine": "cbengine",
            "weights": str(setup.weights) if setup.weights else "random",
            "dtype": asked.model.dtype,
            "sampling": {**asdict(setup.sampling), **setup.requests.facts},
            "injected_ms": {phase: extra / 1e6 for phase, extra in setup.injected},
        }

    @property
    def now_ns(self) -> int:
        return self._engine.now_ns

    def run(self, on_step: Callable[[int], None]) -> None:
        def tell(now_ns: int) -> None:
            on_step(now_ns)
            if self._profile:
                self._profile()

        try:
            self._engine.run(tell)
            self._engine.check_returned()
        finally:
            if self._on_gpu:
                self.facts["gpu_after"] = gpu.state()
            if self._profile:
                self._profile.stop()
            self._engine.close()
        if self._profile:
            print(self._profile.verdict(), file=sys.stderr)

    def files(self) -> Mapping[str, bytes]:
        found = self._profile.files() if self._profile else {}
        if self._saves:
            texts = ((s.spec, s.prompt.tolist(), s.outputs) for s in self._engine.sequences.values())
            found[tokens.FILE] = tokens.table(texts)
        if self._requests.by_id:
            found[settings.FILE] = self._requests.file()
        return found


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
    serve = partial(_peer, setup, stand_in=stand_in) if peer else partial(Measured, setup, profiled)
    return runs.run(options, serve, lambda asked: build.adapted(asked, setup))


def calibration(options: CalibrateOptions, setup: Setup) -> int:
    """Measure the coefficients of a model on a device and write them where the simulator can read them."""
    asked = build.adapted(scenario.load(options.scenario, options.overrides), setup)
    calibrate.check_writable(options.out)
    found = calibrate.calibrate(asked, setup, say, reach=options.reach, quick=options.quick)
    calibrate.write(options.out, found, asked, build.device_name(setup))
    print(options.out.read_text(encoding="utf-8"))
    cost = f"cost={{kind: fitted, path: {json.dumps(str(options.out.resolve()), ensure_ascii=False)}}}"
    words = [word for override in (*options.overrides, cost) for word in ("--set", override)]
    print(f"use it    {shlex.join(['python', '-m', 'cbsim', 'run', options.scenario, *words])}")
    return runs.OK


def validation(names: Sequence[str], asked: validate.Asked) -> int:
    """Simulated against measured; 3 if a bar is missed."""
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no CUDA device here")
    return _told(validate.validate(names, asked, maker, say), absurd_only=asked.device == "process")


def prediction(names: Sequence[str], place: Path) -> int:
    """What was measured before, predicted again; 3 if a bar is missed."""
    shared_cores = place.resolve().name == provenance.slug("process")
    return _told(validate.again(names, place, say), absurd_only=shared_cores)


def _told(found: Sequence[scores.Scored], *, absurd_only: bool) -> int:
    print(scores.table(found))
    failed = scores.failures(found, absurd_only=absurd_only)
    for case, score in failed:
        print(f"missed: {case}, {score.loop}, {score.bar.label}: {score.shown()[-1]}", file=sys.stderr)
    return runs.CHECK_FAILED if failed else runs.OK


def hardware(parts: Sequence[str], device: str | None, out: Path, until: float) -> int:
    """Measure a GPU, or rehearse it, to `until` on the monotonic clock; 1 if a command failed or was not begun. A
    request to end is an exception, so that the command under way is ended, too.
    """
    where = device or ("cuda" if build.default_device() == "cuda" else "process")
    with ended_politely((signal.SIGTERM, signal.SIGHUP)):
        left = campaign.campaign(parts, where, out, say, until)
    for command in left:
        print(f"failed or not begun: {command}", file=sys.stderr)
    return runs.ERROR if left else runs.OK


def benchmark(
    device: str | None, out: Path, parts: Sequence[str], model: str | None, *, quick: bool, as_json: bool
) -> int:
    """Print how fast the engine is, or `parts` of what the device and its kernels do, size by size."""
    from cbengine import bench, kernels_bench

    where = device or ("cuda" if build.default_device() == "cuda" else "modelled")
    if (parts or model) and where != "cuda":
        raise UsageError("--only, --kernels, --model: need --device cuda")
    if model and not parts:
        raise UsageError("--model: needs --only or --kernels")
    if where == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no CUDA device here")
    if parts:
        shape = shapes.model(model) if model else scenario.load("8k_b32").model
        return kernels_bench.bench(parts, shape, out, quick=quick, as_json=as_json)
    return bench.bench(where, out, maker, quick=quick, as_json=as_json)


def maker(setup: Setup, peer: bool = False, stand_in: bool = False) -> Maker:
    """What makes servers of a setup: ours, or the peer's, which may have the stand-in for flash_attn."""
    return partial(_peer, setup, stand_in=stand_in) if peer else partial(Measured, setup, 0)


def _peer(setup: Setup, asked: Scenario, loop: str, workload: Workload, *, stand_in: bool = False) -> Any:
    """Hugging Face's own continuous batching on the same scenario and weights. Raises UsageError for what it cannot do
    as asked.
    """
    from cbengine.peer import TransformersServer
    from cbsim.record import Record
    from cbsim.scenario import scheduler_options

    _check_peer(setup, asked)
    torch.set_num_threads(1)  # on a CPU, as our own devices
    plan = build.executor_plan(asked, loop, workload.specs(), setup)
    plan.check()
    model = weights.to_transformers(plan.architecture, plan.tensors())
    prompts = Prompts(asked.seed, plan.architecture.vocab)
    record = Record(scheduler_options(asked, depth(loop)).num_blocks)
    return TransformersServer(
        asked,
        loop,
        workload,
        model,
        lambda spec: prompts.of(spec).tolist(),
        record,
        cuda_graphs=setup.cuda_graphs,
        stand_in=stand_in,
        said=prompts.said,
        saves_tokens=setup.saves_tokens,
    )


def _check_peer(setup: Setup, asked: Scenario) -> None:
    ours_alone = {
        "--device modelled": setup.device == "modelled",
        "--temperature": not setup.sampling.greedy,
        "--sampling": bool(setup.requests.by_id),
        "--inject": any(extra for _, extra in setup.injected),
        "--stop-at-end-tokens": setup.end_tokens,
    }
    if any(ours_alone.values()):
        given = ", ".join(option for option, asked_for in ours_alone.items() if asked_for)
        raise UsageError(f"--engine transformers: takes no {given}: it computes greedily, as long as it is asked to")
    heads, hidden = asked.model.heads, asked.model.hidden
    if hidden % heads and not (asked.model.qk_norm or asked.model.qkv_bias):
        text = f"model.hidden: got {hidden}, must be a multiple of model.heads ({heads})"
        raise UsageError(f"--engine transformers: {text} for its Llama")


def generate(prompt: str, tokens: int, setup: Setup) -> int:
    """Print what the model in a folder says after `prompt`, as it comes."""
    from cbengine import text

    text.generate(prompt, tokens, setup, sys.stdout)
    return runs.OK
