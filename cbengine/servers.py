"""The engine as the server of a run, behind the interface of `cbsim.runs`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any

from cbengine.build import ACCEPTED, Setup
from cbengine.build import engine as built
from cbengine.device import gpu
from cbengine.device.base import EngineDevice
from cbengine.device.profile import Profile
from cbengine.driver import Engine
from cbengine.sampling import FILE
from cbengine.sequence import Sequence
from cbsim.record import columns, parquet
from cbsim.record.tables import requests_of
from cbsim.runs.running import Maker
from cbsim.scenario.scenario import Scenario, depth
from cbsim.workload.requests import Workload


class Measured:
    """An engine behind the server interface of `runs`. `facts` are entries of env.json beside those of the device."""

    measured = True
    start_ns: int | None = None  # of the engine's clock: times count from here, or from the call of `run`

    def __init__(
        self,
        engine: Engine,
        device: EngineDevice,
        setup: Setup,
        scenario: Scenario,
        facts: Mapping[str, Any],
        profile: Profile | None = None,
    ) -> None:
        self.engine, self.record = engine, engine.record
        self.device, self._setup, self._profile = device, setup, profile
        self._on_gpu, self._speculates = setup.device == "cuda", scenario.speculation is not None
        drafts_by_model = scenario.speculation is not None and scenario.speculation.method == "draft_model"
        self.facts: dict[str, Any] = {
            **device.facts,
            **({"gpu_before": gpu.state()} if self._on_gpu else {}),
            "engine": "cbengine",
            "weights": str(setup.weights or "random"),
            **({"draft_weights": str(setup.draft_weights or "random")} if drafts_by_model else {}),
            "dtype": scenario.model.dtype,
            **facts,
        }

    @property
    def now_ns(self) -> int:
        return self.engine.now_ns

    def run(self, on_step: Callable[[int], None]) -> None:
        """Serve to the end of the workload. Raises what `Engine.run` does. All cache blocks are free after it."""

        def after_step(now_ns: int) -> None:
            on_step(now_ns)
            if self._profile:
                self._profile()

        over = threading.Event()
        if self._on_gpu:
            states = self.facts["gpu_during"] = []
            threading.Thread(target=gpu.watch, args=(states, over.wait), daemon=True).start()
        try:
            self.engine.run(after_step, self.start_ns)
            self.engine.check_returned()
        finally:
            over.set()
            if self._on_gpu:
                self.facts["gpu_after"] = gpu.state()
            if self._profile:
                self._profile.stop()
            self.engine.close()
            self.facts |= self.device.facts  # a device adds to them when it is closed
        if self._profile:
            print(self._profile.verdict(), file=sys.stderr)

    def files(self) -> Mapping[str, bytes]:
        files = dict(self._profile.files()) if self._profile else {}
        if self._speculates:
            requests = self.engine.accepted[::2]
            never = {row.index for row in requests_of(self.record)} - {*requests}
            pairs = chain(zip(requests, self.engine.accepted[1::2], strict=True), ((one, 0) for one in sorted(never)))
            lines = "".join(f"{request},{accepted}\n" for request, accepted in pairs)
            files[ACCEPTED] = f"request,accepted\n{lines}".encode()
        return files | texts_files(self._setup, self.engine.sequences.values())


def texts_files(setup: Setup, texts: Iterable[Sequence]) -> dict[str, bytes]:
    """Return the files of a run directory with texts and the settings of single requests, as far as there are any."""
    files = {FILE: setup.requests.file()} if setup.requests.by_id else {}
    if setup.saves_tokens:
        texts = sorted(texts, key=lambda text: text.spec.index)
        table = {
            "index": [text.spec.index for text in texts],
            "id": [text.spec.id for text in texts],
            "prompt": [text.prompt.tolist() for text in texts],
            "output": [text.outputs for text in texts],
        }
        files[columns.TOKENS_FILE] = parquet.encoded(columns.TOKENS, table)
    return files


def option_facts(setup: Setup) -> dict[str, Any]:
    """Return the entries of env.json that follow from the options of a run."""
    injected_ms = {phase: extra / 1e6 for phase, extra in setup.injected}
    return {"sampling": {**asdict(setup.sampling), **setup.requests.facts}, "injected_ms": injected_ms}


def maker(setup: Setup, profiled: int = 0) -> Maker:
    """Return the maker of a run's server; `profiled` of its steps are profiled."""

    def measured(scenario: Scenario, loop: str, workload: Workload) -> Measured:
        engine, device = built(scenario, loop, workload, setup)
        profile = Profile(engine.record, profiled, depth(loop)) if profiled else None
        return Measured(engine, device, setup, scenario, option_facts(setup), profile)

    return measured
