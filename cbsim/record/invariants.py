"""Invariants of every step table, simulated or measured, finished or cut short. Callable: `check(steps, ...)`.

A failure is an AssertionError that names the rule and the step and prints both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from cbsim.policy.transfers import Direction
from cbsim.record.optional_tables import FETCHED
from cbsim.record.record import LANES, PHASES
from cbsim.record.tables import Ints, Mask, Steps

AT_ONCE = 1 << 18  # steps
NEVER_NS = (1 << 63) - 1


def check(steps: Steps, *, depth: int, overlap: bool, total_blocks: int) -> None:
    """Raise AssertionError unless the table can be that of a server with `depth` steps in flight, as many I/O buffers,
    and copies that run beside kernels only with `overlap`.
    """
    check_read(steps, total_blocks)
    for part in steps.parts():
        for names in [[lane] for lane in LANES] if overlap else [LANES]:  # without overlap one lane
            _lane(part, names)
        _dependencies(part)
        _flight(part, depth)


def check_read(steps: Steps, total_blocks: int) -> None:
    """Raise AssertionError unless the table can be that of any server, simulated or on a real clock, finished or not:
    steps and phases in order, one thing at a time on the CPU, rows, tokens and blocks that add up. The times of a
    device are not checked: its clock has errors of its own.
    """
    _order(steps)
    if steps.server is not None:
        _at_most("servers are in order", steps.server[:-1], steps.server[1:])
    for part in steps.parts():
        check_cpu(part)
    _rows(steps)
    _blocks(steps, total_blocks)


def check_hand_offs(
    steps: Steps, transfers: Mapping[str, Ints], hand_offs: Mapping[str, Ints], *, timed: bool = True
) -> None:
    """Raise AssertionError unless the KV of each hand-off that was fetched left one server and came to the other as the
    table says; at the same time, when both had blocks for it, if they were `timed` by one clock.
    """
    transfers = _of_steps(transfers, steps, transfers["reported_step"] >= 0)
    times = ("start_ns", "end_ns") if timed else ()
    if timed:
        launched_ns = steps["launch_end_ns"][transfers["step"]]
        _at_most("a transfer begins when both servers have blocks", launched_ns, transfers["start_ns"])
    server = np.zeros_like(transfers["step"]) if steps.server is None else steps.server[transfers["step"]]
    blocks = np.where(transfers["way"] == Direction.IN, transfers["blocks"], 0)
    columns = (transfers["way"], transfers["request"], server, *(transfers[name] for name in times), blocks)
    made = Counter(zip(*(values.tolist() for values in columns), strict=True))
    fetched = {name: values[hand_offs["fate"] == FETCHED] for name, values in hand_offs.items()}
    for direction, side in ((Direction.OUT, "source"), (Direction.IN, "target")):
        named = [fetched[name].tolist() for name in ("request", side, *times)]
        named.append((fetched["blocks"] * (direction is Direction.IN)).tolist())  # a source may keep more
        matches = np.array([made[(direction, *each)] for each in zip(*named, strict=True)], dtype=np.int64)
        _equal("each hand-off is one move out of a server, and one into another", matches, 1)


def check_transfers(steps: Steps, transfers: Mapping[str, Ints]) -> None:
    """Raise AssertionError unless each transfer begins after it was planned, and is over when a result says so."""
    transfers = _of_steps(transfers, steps, transfers["step"] >= 0)
    planned_ns = steps["schedule_end_ns"][transfers["step"]]
    _at_most("a transfer begins after it was planned", planned_ns, transfers["start_ns"])
    _at_most("a transfer ends at or after its start", transfers["start_ns"], transfers["end_ns"])
    transfers = _of_steps(transfers, steps, transfers["reported_step"] >= 0)
    reported_ns = steps["await_end_ns"][transfers["reported_step"]]
    _at_most("blocks are kept until a transfer is over", transfers["end_ns"], reported_ns)


def _of_steps(transfers: Mapping[str, Ints], steps: Steps, chosen: Mask) -> dict[str, Ints]:
    """Return the chosen transfers whose steps are there: a run that was cut short has others."""
    there = (transfers["step"] < len(steps)) & (transfers["reported_step"] < len(steps))
    return {name: values[chosen & there] for name, values in transfers.items()}


def check_stages(steps: Steps, times: Mapping[str, Ints], stages: Ints) -> None:
    """Raise AssertionError unless each step that ran was on all `stages` of its server's pipeline, one after the other,
    and had its kernels' times on the last. Servers with one stage have no rows.
    """
    times = {name: values[times["step"] < len(steps)] for name, values in times.items()}
    count = np.where((steps["rows"] > 0) & (stages > 1), stages, 0)
    step, most = np.repeat(np.arange(len(steps)), count), np.repeat(count, count)
    stage = np.arange(len(step)) - np.repeat(np.cumsum(count) - count, count)
    _equal("each step has a row for each stage", np.array([len(times["step"])]), len(step))
    _equal("steps are in order", times["step"], step)
    _equal("stages are in order", times["stage"], stage)
    _at_most("a stage ends at or after its start", times["start_ns"], times["end_ns"])
    later, last = np.flatnonzero(stage > 0), stage == most - 1
    _at_most("a stage waits for the one before", times["end_ns"][later - 1], times["start_ns"][later])
    for edge in ("start_ns", "end_ns"):
        _equal("the last stage has the kernels' times", times[edge][last], steps[f"compute_{edge}"][step[last]])


def _require(rule: str, left: Ints, right: Ints | int, holds: Mask) -> None:
    """Raise AssertionError unless the rule `holds` for all steps; it shows both sides of the first violation."""
    if not holds.all():
        at = int(np.flatnonzero(~holds)[0])
        sides = int(left[at]), int(np.broadcast_to(right, left.shape)[at])
        raise AssertionError(f"{rule}: row {at} has {sides[0]} against {sides[1]}")


def _at_most(rule: str, left: Ints, right: Ints | int) -> None:
    _require(rule, left, right, left <= right)


def _equal(rule: str, left: Ints, right: Ints | int) -> None:
    _require(rule, left, right, left == right)


def _order(steps: Steps) -> None:
    """Check that steps are in order, and that nothing ends before it starts."""
    _equal("steps are numbered 0, 1, 2 ...", steps["step"], np.arange(len(steps), dtype=np.int64))
    _at_most("steps begin at or after the run", np.zeros_like(steps["step"]), steps["schedule_start_ns"])
    for name in (*PHASES, *LANES):
        _at_most(f"{name} ends at or after its start", steps[f"{name}_start_ns"], steps[f"{name}_end_ns"])
    for before, after in pairwise(PHASES):
        _at_most(f"{after} follows {before}", steps[f"{before}_end_ns"], steps[f"{after}_start_ns"])


def check_cpu(steps: Steps) -> None:
    """Raise AssertionError unless the CPU, one lane for all phases, does one thing at a time."""
    _lane(steps, PHASES)


def _lane(steps: Steps, names: Sequence[str]) -> None:
    """Check a lane in blocks of steps: intervals that start before all later blocks are in order and can be checked."""
    rule = f"{' + '.join(names)}: one thing at a time, in order of start"
    lows = np.arange(0, len(steps), AT_ONCE)
    starts = ends = np.empty(0, dtype=np.int64)
    for low, following in zip(lows, _following(steps, names, lows), strict=True):
        block = steps.window(int(low), int(low) + AT_ONCE)
        starts = np.concatenate([starts, *(block[f"{name}_start_ns"] for name in names)])
        ends = np.concatenate([ends, *(block[f"{name}_end_ns"] for name in names)])
        order = np.lexsort((ends, starts))
        starts, ends = starts[order], ends[order]
        known = int(np.searchsorted(starts, following))  # to check: these, and the first one after them
        _at_most(rule, ends[: min(known, len(ends) - 1)], starts[1 : known + 1])
        starts, ends = starts[max(known - 1, 0) :], ends[max(known - 1, 0) :]


def _following(steps: Steps, names: Sequence[str], lows: Ints) -> Ints:
    """Return for each block of steps, by its first step, the earliest start of all intervals after the block."""
    if not len(lows):
        return lows
    firsts = np.min([np.minimum.reduceat(steps[f"{name}_start_ns"], lows) for name in names], axis=0)
    earliest: Ints = np.minimum.accumulate(firsts[::-1])[::-1]
    return np.append(earliest[1:], NEVER_NS)


def _dependencies(steps: Steps) -> None:
    compute_start, compute_end = steps["compute_start_ns"], steps["compute_end_ns"]
    _at_most("the H2D copy waits for what it copies", steps["prepare_end_ns"], steps["h2d_start_ns"])
    _at_most("compute waits for its inputs", steps["h2d_end_ns"], compute_start)
    _at_most("compute waits for the step before", compute_end[:-1], compute_start[1:])
    _at_most("the D2H copy waits for compute", compute_end, steps["d2h_start_ns"])
    _at_most("the CPU waits for the outputs", steps["d2h_end_ns"], steps["await_end_ns"])


def _flight(steps: Steps, depth: int) -> None:
    """Check that at most `depth` steps are in flight, so that a buffer is reused only after the CPU has read it."""
    later, earlier = slice(depth, None), slice(None, max(len(steps) - depth, 0))
    copied = "a buffer is written after its last outputs were copied"
    _at_most(copied, steps["d2h_end_ns"][earlier], steps["h2d_start_ns"][later])
    _at_most(f"{depth} steps in flight at most", steps["update_end_ns"][earlier], steps["schedule_start_ns"][later])


def _rows(steps: Steps) -> None:
    rows, decodes, prefill, drafts = (steps[name] for name in ("rows", "decode_rows", "prefill_tokens", "draft_tokens"))
    for name in (
        "decode_rows",
        "prefill_tokens",
        "draft_tokens",
        "accepted_tokens",
        "context_tokens",
        "waiting",
        "preempted",
        "cached_tokens",
    ):
        _at_most(f"{name} is not negative", np.zeros_like(rows), steps[name])
    others = rows - decodes
    _at_most("decoding rows are rows", decodes, rows)
    _at_most("any other row has a token", others, prefill)
    _require("only such rows have prefill tokens", prefill, others, (prefill > 0) == (others > 0))
    _require("only decoding rows have drafts", drafts, decodes, (drafts == 0) | (decodes > 0))
    _at_most("only drafts come true", steps["accepted_tokens"], drafts)
    _equal("tokens = prefill_tokens + decode_rows + draft_tokens", steps["tokens"], prefill + decodes + drafts)
    _at_most("padding is not negative", steps["tokens"], steps["padded_tokens"])
    _at_most("every decoding row samples", decodes, steps["sampled_rows"])
    _at_most("only rows sample", steps["sampled_rows"], rows)
    _at_most("only running requests have rows", rows, steps["running"])
    _at_most("only sampling ends a request", steps["finished"], steps["sampled_rows"])
    _at_most("only rows are wasted", steps["wasted_rows"], rows)
    _at_most("only tokens of such rows are recomputed", steps["recomputed_tokens"], prefill)


def _blocks(steps: Steps, total: int) -> None:
    """Check that the use of blocks is possible in a cache of `total` blocks."""
    used, new, cached = steps["used_blocks"], steps["new_blocks"], steps["cached_blocks"]
    _at_most("blocks in use are not negative", np.zeros_like(used), used)
    _at_most("cached blocks are not negative", np.zeros_like(used), cached)
    _at_most("blocks in use and cached blocks exist", used + cached, total)
    _at_most("new blocks are in use", new, used)
