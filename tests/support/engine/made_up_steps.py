"""Steps that take what known coefficients say, to be calibrated from, and what the simulator makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cbengine.measure import calibrate
from cbengine.measure.probes import ProbeStep, ProbeTable
from cbsim.cost.base import PHASES
from cbsim.cost.fitted import Curve, uneven
from cbsim.policy.plan import Chunk, StepPlan
from cbsim.runs import assemble
from cbsim.scenario.scenario import Scenario
from support.engine.served import asked
from support.helpers import step_plan

KERNELS = {  # seconds
    "per_chunk_s": 3e-4,
    "per_cached_token_s": 2e-7,
    "per_prefill_attention_s": 4e-8,
    "per_decode_row_s": 5e-5,
    "per_uneven_token_s": 1e-6,
}
MATRICES = Curve([1, 64, 128], [2e-3, 2.5e-3, 6e-3])  # flat, then steep
READS = Curve([0, 512, 4096], [0.0, 1e-3, 2e-3])
CPU = {
    phase: {"base_s": 1e-4 * (i + 1), "per_request_s": 1e-6 * i, "per_chunk_s": 3e-5, "per_change_s": 2e-5}
    for i, phase in enumerate(PHASES)
}
LAYERS, EAGER_S = 2, 3e-4
UNSPLIT_ROWS = 12.0
H2D, D2H = 7e-6, 9e-6


def compute_s(tokens: int, chunks: int, cached: int, pairs: float, decodes: int, context: int, excess: float) -> float:
    """What the kernels of made-up steps take; `excess` of the longest part of a decoding row."""
    counts = (chunks, cached, pairs, decodes, excess)
    linear = sum(each * count for each, count in zip(KERNELS.values(), counts, strict=True))
    return linear + MATRICES(tokens) + READS(context)


def made_up(count: int, seed: int, noise: float) -> ProbeTable:
    """Steps that take what KERNELS, both curves and CPU say, give or take `noise`; those with chunks are eager."""
    rng = np.random.default_rng(seed)

    def ns(seconds: float) -> int:
        return round(seconds * 1e9 * (1 + noise * rng.standard_normal()))

    table = ProbeTable(unsplit_rows=UNSPLIT_ROWS)
    for _ in range(count):
        chunks, decodes = int(rng.integers(0, 3)), int(rng.integers(1, 17))
        prefill, cached = chunks * int(rng.integers(2, 64)), chunks * int(rng.integers(0, 90))
        pairs, context = prefill * float(rng.integers(1, 80)), decodes * int(rng.integers(8, 320))
        longest = min(context, int(context // decodes * max(1.0, rng.uniform(-2, 4))))  # half are alike
        excess = uneven(decodes, context, longest, UNSPLIT_ROWS)
        tokens, rows, blocks = prefill + decodes, chunks + decodes, context // 16 + 1
        changes = int(rng.integers(0, 3))
        counts = (1, rows, chunks, changes)
        phases = {name: float(np.dot(list(CPU[name].values()), counts)) for name in PHASES}
        phases["launch"] += EAGER_S * (chunks > 0)
        table.lines.append(
            ProbeStep(
                *(tokens, chunks, prefill, cached, pairs, decodes, context, longest),
                *(rows, tokens, blocks, changes, context),
                eager=chunks > 0,
                bound=False,
                **{name: ns(seconds) for name, seconds in phases.items()},
                h2d=ns(H2D),
                compute=ns(compute_s(tokens, chunks, cached, pairs, decodes, context, excess)),
                d2h=ns(D2H),
            )
        )
    return table


def plan(chunks: tuple[Chunk, ...], **counts: int) -> StepPlan:
    """A plan of these chunks and counts, and nothing else."""
    return step_plan(chunks, **counts)


def simulated(table: ProbeTable) -> Any:
    """The simulator's cost model with what a calibration makes of these steps."""
    found = calibrate.calibration(table, LAYERS)
    base = asked("vllm").model_dump(mode="json")
    return assemble.cost_model(Scenario.model_validate(base | {"cost": {"kind": "fitted", **found.coefficients}}))
