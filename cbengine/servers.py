"""The engine as the server of a run, behind the interface of `cbsim.runs`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from cbengine.build import Setup, engine
from cbengine.device import gpu
from cbengine.device.profile import Profile
from cbengine.settings import FILE as SETTINGS_FILE
from cbsim.policy.request import RequestSpec
from cbsim.record import columns, parquet
from cbsim.runs.running import Maker
from cbsim.scenario.scenario import Scenario, depth
from cbsim.workload.requests import Workload


class Measured:
    """An engine behind the server interface of `runs`."""

    measured = True

    def __init__(self, setup: Setup, profiled: int, scenario: Scenario, loop: str, workload: Workload) -> None:
        self._engine, device = engine(scenario, loop, workload, setup)
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
        def after_step(now_ns: int) -> None:
            on_step(now_ns)
            if self._profile:
                self._profile()

        try:
            self._engine.run(after_step)
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
            files[columns.TOKENS_FILE] = tokens_table(texts)
        if self._requests.by_id:
            files[SETTINGS_FILE] = self._requests.file()
        return files


def maker(setup: Setup, profiled: int = 0) -> Maker:
    """Return the maker of a run's server; `profiled` of its steps are profiled."""
    return partial(Measured, setup, profiled)


def tokens_table(texts: Iterable[tuple[RequestSpec, Sequence[int], Sequence[int]]]) -> bytes:
    """Encode (request, prompt, output) rows as a parquet table of columns.TOKENS, in order of index."""
    rows = sorted(texts, key=lambda row: row[0].index)
    return parquet.encoded(
        columns.TOKENS,
        {
            "index": [spec.index for spec, _, _ in rows],
            "id": [spec.id for spec, _, _ in rows],
            "prompt": [list(prompt) for _, prompt, _ in rows],
            "output": [list(output) for _, _, output in rows],
        },
    )
