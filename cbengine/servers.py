"""The engine, and transformers' own continuous batching, as the servers that a run wants."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from cbengine import build, settings, tokens
from cbengine.build import Setup
from cbengine.content import Prompts
from cbengine.device import gpu
from cbengine.device.profile import Profile
from cbengine.errors import UsageError
from cbengine.model import weights
from cbsim.scenario.scenario import Scenario, depth
from cbsim.server.running import Maker
from cbsim.workload.generators import Workload


class Measured:
    """The engine, as `runs` wants a server."""

    measured = True

    def __init__(self, setup: Setup, profiled: int, scenario: Scenario, loop: str, workload: Workload) -> None:
        self._engine, device = build.engine(scenario, loop, workload, setup)
        self._device_facts = device.facts  # a device adds to them when it is closed
        self._saves, self._requests = setup.saves_tokens, setup.requests
        self._profile = Profile(self._engine.record, profiled, depth(loop)) if profiled else None
        self.record = self._engine.record
        self._on_gpu = setup.device == "cuda"
        self.facts: dict[str, Any] = {
            **device.facts,
            **({"gpu_before": gpu.state()} if self._on_gpu else {}),
            "engine": "cbengine",
            "weights": str(setup.weights) if setup.weights else "random",
            "dtype": scenario.model.dtype,
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
            self.facts |= self._device_facts
        if self._profile:
            print(self._profile.verdict(), file=sys.stderr)

    def files(self) -> Mapping[str, bytes]:
        files = self._profile.files() if self._profile else {}
        if self._saves:
            texts = ((s.spec, s.prompt.tolist(), s.outputs) for s in self._engine.sequences.values())
            files[tokens.FILE] = tokens.table(texts)
        if self._requests.by_id:
            files[settings.FILE] = self._requests.file()
        return files


def maker(setup: Setup, peer: bool = False, stand_in: bool = False, profiled: int = 0) -> Maker:
    """What makes servers of a setup: ours, or the peer's, which may have the stand-in for flash_attn."""
    return partial(peer_server, setup, stand_in=stand_in) if peer else partial(Measured, setup, profiled)


def peer_server(setup: Setup, scenario: Scenario, loop: str, workload: Workload, *, stand_in: bool = False) -> Any:
    """Hugging Face's own continuous batching on the same scenario and weights. Raises UsageError for what it cannot do
    as asked.
    """
    from cbengine.peer.transformers_server import TransformersServer
    from cbsim.results.record import Record
    from cbsim.scenario.scenario import scheduler_options

    _check_peer(setup, scenario)
    torch.set_num_threads(1)  # on a CPU, as our own devices
    plan = build.executor_plan(scenario, loop, workload.specs(), setup)
    plan.check()
    model = weights.to_transformers(plan.architecture, plan.tensors())
    prompts = Prompts(scenario.seed, plan.architecture.vocab)
    record = Record(scheduler_options(scenario, depth(loop)).num_blocks)
    return TransformersServer(
        scenario,
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


def _check_peer(setup: Setup, scenario: Scenario) -> None:
    ours_alone = {
        "--device modelled": setup.device == "modelled",
        "--temperature": not setup.sampling.greedy,
        "--sampling": bool(setup.requests.by_id),
        "--inject": any(extra for _, extra in setup.injected),
        "--stop-at-end-tokens": setup.end_tokens,
    }
    if any(ours_alone.values()):
        given = ", ".join(option for option, wanted in ours_alone.items() if wanted)
        raise UsageError(f"--engine transformers: takes no {given}: it computes greedily, as long as it is asked to")
    heads, hidden = scenario.model.heads, scenario.model.hidden
    if hidden % heads and not (scenario.model.qk_norm or scenario.model.qkv_bias):
        text = f"model.hidden: got {hidden}, must be a multiple of model.heads ({heads})"
        raise UsageError(f"--engine transformers: {text} for its Llama")
