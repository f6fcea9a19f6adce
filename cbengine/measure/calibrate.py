"""A calibration of the simulator's `fitted` cost model: coefficients measured in minutes on short probes."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbengine.build import Setup
from cbengine.errors import UsageError
from cbengine.measure import probes, provenance
from cbengine.measure.probes import EqualStepTimes, ProbeTable, Reach
from cbsim.cost.base import PHASES, PhaseCost
from cbsim.cost.fitted import uneven
from cbsim.errors import ScenarioError
from cbsim.files import access
from cbsim.record import environment
from cbsim.record.tables import Floats, Mask
from cbsim.scenario import documents
from cbsim.scenario.costs import Coefficients, FitErrors, read_whole, sealed
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.terms import short

GPU_TERMS = ("per_chunk_s", "per_cached_token_s", "per_prefill_attention_s", "per_decode_row_s", "per_uneven_token_s")
COUNTED = ("chunks", "cached", "pairs", "decodes")  # columns of the kernels' terms
SIZED = ("requests", "query_tokens", "blocks", "chunks", "changes")  # columns of the CPU's terms, as Size has them
CPU_TERMS = tuple(f"{term}_s" for term in PhaseCost._fields if term != "per_draft")  # which no probe has
RANGE = {"rows": "requests", "tokens": "query_tokens", "context_tokens": "read"}  # largest sizes measured, by column
SIZES = (1, 2, 4, *range(8, 128, 8), *range(128, 256, 32), *(size << i for i in range(7) for size in (256, 384)))
CONTEXTS = tuple(size << i for i in range(18) for size in (256, 384))
"""The points that a curve may have: dense where captured batch sizes lie, then two to an octave."""
FEW = 8  # the least number of steps between two points of a curve
ENOUGH = 24  # the least number of steps in all
OUTLIER = 6.0  # times the median error of a fit
LATE = 0.1  # share of the kernels' time
SYSTEMATIC = 0.15  # share of a step's time
ROUNDS = 5  # of a fit


class Calibration(NamedTuple):
    """A measurement's coefficients as the simulator reads them, and how well each group fits."""

    coefficients: dict[str, Any]
    fits: dict[str, Fit]
    table: ProbeTable


def calibrate(
    base: Scenario, setup: Setup, progress: Callable[[str], None], *, reach: Reach, quick: bool
) -> Calibration:
    """Probe and fit, up to `reach`. Raises UsageError."""
    if base.speculation is not None:
        raise UsageError("speculation: must be null: the probes of calibrate verify no drafts")
    if base.gpus > 1:
        raise UsageError(f"cost.tensor_parallel: got {base.gpus}, must be 1: coefficients are of one device")
    for option, tokens in (("--longest", reach.longest), ("--tokens", reach.tokens)):
        if tokens < probes.SHORTEST:
            raise UsageError(f"{option}: got {tokens}, must be >= {probes.SHORTEST}: shorter steps all cost the same")
    if reach.longest > base.model.max_position:
        raise UsageError(f"--longest: got {reach.longest}, must be <= {base.model.max_position}, model.max_position")
    whole = int(0.9 * base.options("sync").num_blocks)  # blocks, less what partly filled ones may waste
    room = max(probes.SHORTEST, whole * base.block_size)
    if setup.device != "cuda" and room < reach.longest:
        short = f"holds {room:,} tokens, less than the longest sequence probed, {reach.longest:,}"
        progress(f"warning: the scenario's cache {short}: the probes have caches of their own")
    if setup.device == "cuda" and room < reach.context:
        progress(f"the cache holds {room:,} tokens: probing up to that instead of {reach.context:,}")
        reach = reach._replace(context=room, longest=min(reach.longest, room))
    table = probes.measure(base, setup, probes.probes(reach, quick=quick), progress)
    return calibration(table, base.model.layers)


def calibration(table: ProbeTable, layers: int) -> Calibration:
    """Fit all coefficients. Raises UsageError if the probes were too short for it."""
    if len(table.lines) < ENOUGH:
        few = f"{len(table.lines)} steps are too few, {ENOUGH} would do"
        raise UsageError(f"calibrate: {few}: give a larger --rows or --longest")
    contention = table.contention()
    coefficients, kernels = _kernels(table, contention)
    alone = table.alone()
    replayed = alone.column("eager") == 0
    begins_ns = float(np.median(alone.column("h2d")[replayed if replayed.any() else ~replayed]))
    coefficients |= {"launch_overlap_s": _rounded(max(0.0, -begins_ns)), "h2d_s": _rounded(max(0.0, begins_ns))}
    coefficients["wake_s"] = _rounded(float(np.median(alone.column("d2h"))))
    coefficients |= {"gap_s": short(table.gap_s, 6), "contention": {"gpu": contention}}
    coefficients["unsplit_rows"] = short(table.unsplit_rows, 6)
    eager, fits = alone.column("eager"), {"kernels": kernels}
    cpu: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        columns = [np.ones(len(alone.lines)), *(alone.column(name) for name in SIZED)]
        if phase == "launch":
            columns.append(eager)
        fits[phase] = fit(np.column_stack(columns), alone.column(phase))
        cpu[phase] = dict(zip(CPU_TERMS, map(_rounded, fits[phase].coefficients), strict=False))
    coefficients["launch_s_per_layer"] = _rounded(fits["launch"].coefficients[-1] / layers)
    return Calibration(coefficients | {"cpu": cpu}, fits, table)


def _kernels(table: ProbeTable, contention: float) -> tuple[dict[str, Any], Fit]:
    """Fit the kernels' time; those launched ahead are longer by `contention`. Steps whose kernels waited for their
    launches are left out, and eager ones whose launch the system disturbed, so that kernels waited in between: it took
    longer than usual, the lower quartile, by LATE. The wait of a step replayed with none before it is subtracted: it is
    the time by which equal steps launched ahead are shorter. That of steps launched kernel by kernel with none before
    them is fitted beside the terms, where others were launched ahead.
    """
    tokens, context = table.column("tokens"), table.column("context")
    sizes, contexts = points(tokens, SIZES), points(context, CONTEXTS)
    curves = [*hats(tokens, sizes), *hats(context, [0, *contexts])[1:]]  # without context, nothing is read
    reads = zip(table.column("decodes"), context, table.column("longest"), strict=True)
    excess = np.array([uneven(*step, table.unsplit_rows) for step in reads])
    columns = np.column_stack([*curves, *(table.column(name) for name in COUNTED), excess])
    eager, idle, launch = table.column("eager"), 1 - table.column("ahead"), table.column("launch")
    usual = np.quantile(launch[eager > 0], 0.25) if eager.any() else 0.0
    free = (table.column("bound") == 0) & ((eager == 0) | (launch - usual < LATE * table.column("compute")))
    waited, part = 0.0, contention / (1 + contention)
    if table.equal:
        waited = 1e9 * max(0.0, table.equal.difference_s + part * table.equal.async_s)
    if (eager > idle).any():
        columns = np.column_stack([columns, eager * idle])
    alone = (1 - eager) * idle
    compute = np.maximum(table.column("compute") * (1 - part * table.column("ahead")) - waited * alone, 1.0)
    if np.median(compute[free]) <= 1:
        short = f"kernels of {np.median(table.column('compute')[free]) / 1e3:,.1f} us"
        reason = f"{short} cannot be told from the {waited / 1e3:,.1f} us that they wait for their launch"
        raise UsageError(f"calibrate: {reason}: give a larger --rows or --tokens, on a machine that does nothing else")
    gpu_fit = fit(columns[free], compute[free], kinds(tokens, context, table.column("chunks"))[free])
    values = iter(map(_rounded, gpu_fit.coefficients))
    coefficients: dict[str, Any] = {"query_tokens": [{"tokens": size, "s": next(values)} for size in sizes]}
    read = [{"tokens": size, "s": next(values)} for size in contexts]
    coefficients["context_tokens"] = [{"tokens": 0, "s": 0.0}, *read]
    return coefficients | {name: next(values) for name in GPU_TERMS}, gpu_fit


def kinds(tokens: Floats, context: Floats, chunks: Floats) -> Floats:
    """Return weights that make each kind of step count alike: octaves of tokens and context, chunks or none."""
    cells = np.column_stack([np.log2(tokens + 1).round(), np.log2(context + 1).round(), chunks > 0])
    _, which, counts = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    weights: Floats = 1.0 / counts[which.ravel()]
    return weights


def points(counted: Floats, allowed: Sequence[int]) -> list[int]:
    """Return those of `allowed` up to which FEW more steps lie, and the largest size that was measured."""
    largest, chosen, below = int(counted.max()), [], 0.0
    for size in allowed:
        if size < largest and np.count_nonzero((counted > below) & (counted <= size)) >= FEW:
            chosen.append(size)
            below = size
    if chosen and np.count_nonzero(counted > below) < FEW:
        chosen.pop()
    return [*chosen, max(largest, 1)]


def hats(counted: Floats, at: Sequence[int]) -> list[Floats]:
    """Return each point's weights in linear interpolation: 1 at the point, 0 at its neighbours, 1 beyond the ends."""
    return [np.interp(counted, at, unit_vector) for unit_vector in np.eye(len(at))]


def _rounded(nanoseconds: float) -> float:
    """Convert nanoseconds to seconds with six digits."""
    return short(nanoseconds / 1e9, 6)


def write(path: Path, measured: Calibration, base: Scenario, device: str) -> dict[str, Any]:
    """Write the coefficient file, and beside it the steps fitted to; return its content. Raises UsageError."""
    git, equal = environment.git_state(), measured.table.equal
    origin = {
        "device": device,
        "model": base.model.name,
        "dtype": base.model.dtype,
        "scheduler": base.scheduler.name,
        "commit": f"{(git['commit'] or 'unknown')[:12]}{'+' if git['dirty'] else ''}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "settings": settings(base, device),
        "capture_s": round(measured.table.capture_s, 6),
        "equal_steps": equal and equal._asdict() | {name: short(getattr(equal, name), 6) for name in equal._fields[1:]},
    }
    raw = io.BytesIO()
    pq.write_table(measured.table.arrow(), raw, compression="zstd", compression_level=19)
    provenance.write(steps_of(path), raw.getvalue())
    return _written(path, origin, measured)


def refit(path: Path, layers: int) -> dict[str, Any]:
    """Derive a coefficient file again from the steps beside it; return its content. Raises UsageError."""
    try:
        steps = ProbeTable.of(pq.read_table(steps_of(path)))
        coefficients = read_whole(path).checked(Coefficients)
        if len(steps.lines) < ENOUGH or all(line.ahead or line.bound for line in steps.lines):
            raise ValueError(f"expected {ENOUGH} steps or more, and some that waited for nothing")
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}, {steps_of(path).name}: not a calibration: {error}") from None
    if (origin := coefficients.calibrated) is None:
        raise UsageError(f"{path}: not a calibration: calibrated: is required")
    steps.gap_s, steps.unsplit_rows = float(coefficients.gap_s), float(coefficients.unsplit_rows)
    if origin.equal_steps:
        steps.equal = EqualStepTimes(**origin.equal_steps.model_dump())
    return _written(path, origin.model_dump(exclude={*RANGE, "fits"}), calibration(steps, layers))


def settings(base: Scenario, device: str) -> str:
    """Return a fingerprint of what coefficients depend on but names: shape, block size, graphs, modelled kernels."""
    cost = base.cost.model_dump(mode="json") if "modelled" in device else None
    shape = base.model.model_dump(mode="json")
    if not base.model.qkv_bias:
        del shape["qkv_bias"]  # a file from before this field existed keeps its fingerprint
    parts = [shape, base.block_size, base.graph_padding, cost]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def check_settings(path: Path, base: Scenario, device: str) -> None:
    """Raise UsageError if a coefficient file was probed with other settings than these."""
    try:
        known = documents.read(path).data["calibrated"].get("settings", "")
    except (ScenarioError, KeyError, TypeError, AttributeError):
        return  # reading it as a calibration reports that it is none
    if known and known != settings(base, device):
        other = "another model, block size or cost than this call's"
        raise UsageError(f"{path}: was probed with {other}: name another --out")


def _written(path: Path, origin: dict[str, Any], measured: Calibration) -> dict[str, Any]:
    calibrated = {
        **origin,
        **{name: int(measured.table.column(column).max()) for name, column in RANGE.items()},
        "fits": {
            name: {of: round(value, 5) for of, value in fitted.errors.model_dump().items()}
            for name, fitted in measured.fits.items()
        },
    }
    content = {"calibrated": calibrated, **measured.coefficients}
    comment = "# Measured with `python -m cbengine calibrate`. Errors are shares of a step's time.\n"
    provenance.write(path, (comment + sealed(documents.write(content))).encode())
    return content


def steps_of(path: Path) -> Path:
    """Return the path of a coefficient file's measured steps."""
    return path.with_name(f"{path.name.removesuffix('.yaml').removesuffix('.fitted')}.probes.parquet")


def check_writable(path: Path) -> None:
    """Make the folder of a file to be written after all measurements. Raises UsageError if the file is not writable."""
    with access(path, UsageError, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()


class Fit(NamedTuple):
    """A linear form through steps, and how far off it is."""

    coefficients: tuple[float, ...]
    errors: FitErrors


def fit(features: Floats, measured: Floats, weights: Floats | None = None) -> Fit:
    """Return coefficients c >= 0 such that features @ c is about `measured`. Shapes: features [steps, terms], measured
    [steps] > 0, weights [steps]: the weight of a step's squared error, 1 by default. A step's error is relative to what
    the previous fit predicts, so that short steps matter as much as long ones and the sum over many is unbiased
    (relative to the measured times, it would come out too small). A step that the operating system disturbed is an
    outlier and left out: its error exceeds OUTLIER times the median error, and SYSTEMATIC, below which the form itself
    may be at fault and the error is kept.
    """
    assert len(features) == len(measured)
    root = np.ones(len(measured)) if weights is None else np.sqrt(weights)
    keep = np.ones(len(measured), dtype=bool)
    scale = np.full(len(measured), max(float(np.median(measured)), 1.0))
    for _ in range(ROUNDS):
        shares = root[keep] / scale[keep]
        coefficients = non_negative(features[keep] * shares[:, None], measured[keep] * shares)
        predicted = features @ coefficients
        scale = np.maximum(predicted, 0.01 * max(float(np.median(measured)), 1.0))
        error = np.abs(predicted - measured) / scale
        keep = error <= max(OUTLIER * float(np.median(error)), SYSTEMATIC)
    share = np.abs(predicted - measured) / np.maximum(measured, 1.0)
    median, p95 = float(np.median(share)), float(np.quantile(share, 0.95))
    total = float(predicted[keep].sum() / measured[keep].sum() - 1)
    errors = FitErrors(steps=len(measured), used=int(keep.sum()), median=median, p95=p95, total=total)
    return Fit(tuple(coefficients.tolist()), errors)


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Solve least squares with x >= 0 (Lawson and Hanson's active set, 1974), columns scaled to one length."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    x, passive = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        gradient = a.T @ (target - a @ x)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-10 * max(float(np.linalg.norm(target)), 1e-300):
            break
        passive[int(gradient.argmax())] = True
        x = _inside(a, target, x, passive)
    result: Floats = x / scale
    return result


def _inside(a: Floats, target: Floats, x: Floats, passive: Mask) -> Floats:
    """Move from `x` towards the unconstrained optimum of the passive set until a coordinate would become negative."""
    while True:
        trial = np.zeros_like(x)
        trial[passive] = np.linalg.lstsq(a[:, passive], target, rcond=None)[0]
        below = passive & (trial <= 0)
        if not below.any():
            return trial
        step = np.min(x[below] / np.maximum(x[below] - trial[below], 1e-300))
        x = x + step * (trial - x)
        passive &= ~(below & (x <= 1e-15))
        x[~passive] = 0.0
