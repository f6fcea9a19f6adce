"""Coefficients for the simulator's `fitted` cost model, measured in minutes on short probes.

A probe is a scenario of its own, run by the engine with the synchronous loop. Its prompts and outputs have all lengths,
so that one run passes through many batch sizes, contexts and chunks. Every step gives one line: what it did
(`cost.fitted.work`) and how long its kernels, its copies and each CPU phase took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from cbengine import build
from cbengine.build import Setup
from cbengine.errors import UsageError
from cbengine.fit import Fit, fit
from cbsim import documents, environment, workload
from cbsim.cost.cpu import PHASES
from cbsim.cost.fitted import Work, work
from cbsim.metrics import Steps
from cbsim.policy.plan import StepPlan
from cbsim.record import STEP_COLUMNS
from cbsim.scenario import Scenario, ScenarioError, depth, scheduler_options

GPU_TERMS = (
    *("base_s", "per_chunk_s", "per_prefill_token_s", "per_prefill_attention_s"),
    *("per_decode_row_s", "per_context_token_s"),
)
CPU_TERMS = ("base_s", "per_request_s", "per_token_s", "per_block_s")
WARM_UP = 3  # first steps of a probe, which find caches cold
SHORTEST = 8  # tokens of the longest sequence, at least


class Probe(NamedTuple):
    """A short run: prompts and outputs uniform between 1 or more and so many tokens, `chunk` query tokens a step."""

    requests: int
    seats: int
    prompt: int
    output: int
    chunk: int


@dataclass(slots=True)
class Table:
    """A line for each step of all probes."""

    work: list[Work] = field(default_factory=list)
    size: list[tuple[int, int, int]] = field(default_factory=list)  # rows, query tokens, blocks in their tables
    times: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def add(self, plans: Sequence[StepPlan], steps: Steps) -> None:
        for plan, row in zip(plans[WARM_UP:], steps.table[WARM_UP:], strict=True):
            if plan.rows:
                self.work.append(work(plan))
                self.size.append((plan.rows, plan.tokens, plan.table_blocks))
                self.times.append(row)

    @property
    def steps(self) -> Steps:
        return Steps(np.stack(self.times))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured: the coefficients as the simulator reads them, and how well each group fits."""

    coefficients: dict[str, Any]
    fits: dict[str, Fit]
    covers: str


def probes(rows: int, longest: int, *, quick: bool) -> list[Probe]:
    """Up to `rows` requests at a time, sequences of up to `longest` tokens: what the calibration then covers."""
    longest = max(longest, SHORTEST)
    output = min(longest // 2, 48 if quick else 256)
    prompt, few = longest - output, max(2, rows // 4)
    short = max(4, prompt // 4)
    return [
        Probe(rows, rows, prompt, output, max(prompt, rows)),  # whole prompts, then a batch that shrinks
        Probe(rows, rows, prompt, output, max(prompt // 4, 2 * rows)),  # chunks beside decodes
        Probe(2 * few, few, short, min(2 * output, longest - short), max(short, few)),  # small batches, short contexts
        Probe(3, 1, prompt, output, max(prompt // 3, 8)),  # one request alone
    ]


def measure(base: Scenario, setup: Setup, runs: Sequence[Probe], say: Callable[[str], None]) -> Table:
    """Run all probes on the device of `setup`, with the model and the scheduler of `base`."""
    table = Table()
    for number, probe in enumerate(runs, start=1):
        say(f"probe {number} of {len(runs)}: {probe.requests} requests, up to {probe.prompt} + {probe.output} tokens")
        plans: list[StepPlan] = []
        scenario = build.adapted(_scenario(base, probe), setup)
        engine, _ = build.engine(scenario, "sync", workload.build(scenario), setup, on_plan=plans.append)
        try:
            engine.run()
        finally:
            engine.close()
        steps = np.frombuffer(engine.record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS))
        table.add(plans, Steps(steps))
    return table


def _scenario(base: Scenario, probe: Probe) -> Scenario:
    """The probe on the model, the device and the kind of scheduler of `base`, with a cache that always suffices. Raises
    UsageError for a probe beyond what a scenario may be.
    """
    size = base.block_size
    blocks = probe.seats * (-(-(probe.prompt + probe.output) // size) + 2) + 2
    tokens = {"vllm": "max_num_batched_tokens", "static": None}.get(base.scheduler.name, "max_batch_tokens")
    seats = {"vllm": "max_num_seqs", "static": "batch_size"}.get(base.scheduler.name, "max_requests_per_batch")
    changes: dict[str, Any] = {seats: probe.seats}
    if tokens:
        changes[tokens] = max(probe.chunk, probe.seats)
    if base.scheduler.name == "vllm":
        changes |= {"max_model_len": None, "enable_prefix_caching": False, "enable_chunked_prefill": True}
    data = base.model_dump(mode="json")
    data["scheduler"] |= changes
    data["kv_cache"] |= {"num_blocks": blocks, "block_size": size}
    data["workload"] = {
        "kind": "synthetic",
        "requests": probe.requests,
        "prompt_tokens": {"uniform": {"low": max(1, probe.prompt // 8), "high": probe.prompt}},
        "output_tokens": {"uniform": {"low": max(1, probe.output // 8), "high": probe.output}},
    }
    try:
        ready = Scenario.model_validate(data)
        scheduler_options(ready, depth("sync"))
    except (ScenarioError, ValidationError) as error:
        reason = build.first_complaint(error) if isinstance(error, ValidationError) else error
        raise UsageError(f"calibrate: --rows or --longest is too large: {reason}") from None
    return ready


def calibration(table: Table) -> Calibration:
    """Fit everything. Raises UsageError if the probes were too short for it."""
    if len(table.work) < 4 * len(GPU_TERMS):
        text = f"{len(table.work)} steps are too few to fit {len(GPU_TERMS)} terms, {4 * len(GPU_TERMS)} would do"
        raise UsageError(f"calibrate: {text}: give a larger --rows or --longest")
    steps = table.steps
    ones = np.ones((len(table.work), 1))
    kernels = fit(np.hstack((ones, np.array(table.work, dtype=float))), steps.lane("compute").astype(float))
    coefficients: dict[str, Any] = _seconds(GPU_TERMS, kernels)
    coefficients |= {f"{lane}_s": float(np.median(steps.lane(lane))) / 1e9 for lane in ("h2d", "d2h")}
    coefficients["launch_s_per_layer"] = 0.0  # launching is part of the launch phase, which is measured
    fits, cpu = {"kernels": kernels}, {}
    for phase in PHASES:
        sized = np.hstack((ones, np.array(table.size, dtype=float)))
        fits[phase] = fit(sized, steps.lane(phase).astype(float))
        cpu[phase] = _seconds(CPU_TERMS, fits[phase])
    rows, tokens, _ = (max(size[i] for size in table.size) for i in range(3))
    context = max(one.context // one.decodes for one in table.work if one.decodes)
    covers = f"steps of up to {rows} requests, {tokens} query tokens, and {context} tokens of context a request"
    return Calibration(coefficients | {"cpu": cpu}, fits, covers)


def _seconds(names: Sequence[str], found: Fit) -> dict[str, float]:
    return {name: float(f"{value / 1e9:.6g}") for name, value in zip(names, found.coefficients, strict=True)}


def write(path: Path, found: Calibration, base: Scenario, device: str) -> None:
    """Write the coefficient file, its provenance on top. Raises UsageError if it cannot be written."""
    commit = environment.git_state()["commit"] or "unknown"
    lines = [
        f"Measured with `python -m cbengine calibrate` on {device}, commit {commit[:12]}.",
        f"Model {base.model.name}, {base.model.dtype}; scheduler {base.scheduler.name}; synchronous loop.",
        f"Covers {found.covers}.",
        *(f"{name}: {one}" for name, one in found.fits.items()),
    ]
    text = "".join(f"# {line}\n" for line in lines) + documents.write(found.coefficients)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def check_writable(path: Path) -> None:
    """Make the folder of a file that is to be written when all is measured. Raises UsageError if it could not be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path}: cannot be written: {error.strerror or error}")


def calibrate(
    base: Scenario, setup: Setup, say: Callable[[str], None], *, rows: int, longest: int, quick: bool
) -> Calibration:
    """Probe and fit: up to `rows` requests at a time, sequences of up to `longest` tokens. Raises UsageError."""
    if longest > base.model.max_position:
        raise UsageError(f"--longest: got {longest}, must be <= {base.model.max_position}, model.max_position")
    return calibration(measure(base, setup, probes(rows, longest, quick=quick), say))
