"""Times that events tell: of a clock that drifts, of any events at all, and of a run that nothing disturbs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from cbengine.device.base import Lanes
from cbengine.device.cuda import Timeline
from cbsim.record import invariants
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps


class Durations(NamedTuple):
    """What one step of a made-up run takes, in nanoseconds."""

    schedule: int
    prepare: int
    launch: int  # from the launch's beginning to that of the H2D copy
    h2d: int
    compute: int
    d2h: int
    wake: int  # from the end of the D2H copy until the host knows
    update: int


durations = st.builds(
    Durations,
    *(st.integers(0, 2_000_000), st.integers(0, 300_000), st.integers(1_000, 100_000), st.integers(0, 20_000)),
    *(st.integers(1_000, 30_000_000), st.integers(0, 20_000), st.integers(0, 80_000), st.integers(0, 200_000)),
)


@dataclass
class Flight:
    """A launched step of a made-up run: phases on the CPU and lanes, in true time."""

    phases: dict[str, tuple[int, int]]
    launched: int
    lanes: Lanes
    awaited: int = 0


def played(given_steps: list[Durations], depth: int, overlap: bool) -> list[Flight]:
    """A run as it truly was: in-order lanes, the CPU as far ahead as `depth` lets it."""
    now = 1_000
    free = {"h2d": 0, "compute": 0, "d2h": 0}
    flights: list[Flight] = []

    def wait(flight: Flight, took: Durations) -> int:
        start = now
        flight.awaited = max(start, flight.lanes.d2h_end_ns + took.wake)
        flight.phases["await"] = start, flight.awaited
        flight.phases["update"] = flight.awaited, flight.awaited + took.update
        return flight.awaited + took.update

    for i, took in enumerate(given_steps):
        launched = now + took.schedule + took.prepare
        phases = {"schedule": (now, now + took.schedule), "prepare": (now + took.schedule, launched)}
        copied = max(launched + took.launch, free["h2d"] if overlap else free["d2h"])
        start = max(copied + took.h2d, free["compute"])
        end = start + took.compute
        out = max(end, free["d2h"])
        lanes = Lanes(copied, copied + took.h2d, start, end, out, out + took.d2h)
        free = {"h2d": lanes.h2d_end_ns, "compute": end, "d2h": lanes.d2h_end_ns}
        now = launched + took.launch
        flights.append(Flight(phases | {"launch": (launched, now)}, launched, lanes))
        if i - depth + 1 >= 0:
            now = wait(flights[i - depth + 1], given_steps[i - depth + 1])
    for flight, took in list(zip(flights, given_steps, strict=True))[len(flights) - depth + 1 :]:
        now = wait(flight, took)
    return flights


def measured(flights: list[Flight], overlap: bool, rate: float, quantum: int) -> list[Lanes]:
    """The same as events of a GPU tell it, whose clock runs `rate` as fast and ticks every `quantum` nanoseconds."""

    def told(ns: int) -> int:
        return int(ns * rate) // quantum * quantum

    timeline, anchor, found = Timeline(0, overlap=overlap), told(0), []
    for flight in flights:
        lanes = flight.lanes
        marks = (lanes.h2d_start_ns, lanes.h2d_end_ns, lanes.compute_start_ns, lanes.compute_end_ns, lanes.d2h_end_ns)
        edges = [round(float(np.float32((told(mark) - anchor) / 1e6)) * 1e6) for mark in marks]
        assert min(edges) >= 0
        anchor = told(lanes.h2d_start_ns)
        found.append(timeline.aligned(edges, flight.launched, flight.awaited))
    return found


def recorded(flights: list[Flight], found: list[Lanes]) -> Steps:
    """The step table of a run of one request that decodes, with the lanes that were measured."""
    columns = ("rows", "decode_rows", "tokens", "padded_tokens", "sampled_rows", "running")
    table = np.zeros((len(flights), len(STEP_COLUMNS)), dtype=np.int64)
    for i, (flight, lanes) in enumerate(zip(flights, found, strict=True)):
        row = dict.fromkeys(columns, 1) | {"step": i}
        pieces = flight.phases | {"h2d": lanes[:2], "compute": lanes[2:4], "d2h": lanes[4:]}
        for name, (start, end) in pieces.items():
            row |= {f"{name}_start_ns": start, f"{name}_end_ns": end}
        for column, value in row.items():
            table[i, STEP_COLUMNS.index(column)] = value
    return Steps(table)


@given(
    steps=st.lists(durations, min_size=12, max_size=30),
    depth=st.sampled_from((1, 2)),
    overlap=st.booleans(),
    drift=st.sampled_from((0.0, 5e-5, -2e-3, 2e-3)),
    quantum=st.sampled_from((1, 32, 500, 1000)),
)
@settings(max_examples=100)
def test_times_of_a_gpu_whose_clock_drifts(
    steps: list[Durations], depth: int, overlap: bool, drift: float, quantum: int
) -> None:
    """Whatever the clocks do, the step table obeys every rule of a machine's. No time is further from the truth than
    what lay between a launch and its first copy and between a last copy and the host's knowing of it, in this step or
    any before, but for the drift since. The GPU's busy time is right likewise.
    """
    flights = played(steps, depth, overlap)
    found = measured(flights, overlap, 1 + drift, quantum)
    invariants.check(recorded(flights, found), depth=depth, overlap=overlap, total_blocks=0)

    begun, known, most = 0, [math.inf], 0
    for flight, mine in zip(flights, found, strict=True):
        true, span = flight.lanes, flight.awaited - begun
        begun, slack = true.h2d_start_ns, flight.awaited - flight.launched - (true.d2h_end_ns - true.h2d_start_ns)
        noise = 2 * abs(drift) * span + 3 * quantum + 2e-7 * span + 10
        known.append(min(known[-1], slack) + noise)
        most = max(most, slack)
        bound = max(known[-1], known[-2] + noise) if len(known) > 2 else known[-1]
        assert max(abs(a - b) for a, b in zip(mine, true, strict=True)) <= bound
    busy = sum(lanes.compute_end_ns - lanes.compute_start_ns for lanes in found)
    truly = sum(flight.lanes.compute_end_ns - flight.lanes.compute_start_ns for flight in flights)
    noise = (3 * abs(drift) + 2e-7) * flights[-1].awaited + len(steps) * (2 * quantum + 2)
    assert abs(busy - truly) <= most + noise


@given(
    told=st.lists(
        st.tuples(st.integers(0, 9000), st.integers(0, 9000), st.lists(st.integers(0, 30_000), min_size=5, max_size=5)),
        min_size=1,
        max_size=12,
    ),
    overlap=st.booleans(),
)
def test_times_obey_the_rules_whatever_events_say(told: list[tuple[int, int, list[int]]], overlap: bool) -> None:
    """Also of clocks that no GPU has: between launch and await, each lane in order, kernels after their inputs."""
    timeline, launched, awaited, last = Timeline(0, overlap=overlap), 0, 0, Lanes(*[0] * 6)
    for pause, lasted, edges in told:
        launched += pause
        awaited = max(awaited, launched) + lasted
        mine = timeline.aligned(sorted(edges), launched, awaited)
        assert launched <= mine.h2d_start_ns
        assert list(mine) == sorted(mine)
        assert mine.d2h_end_ns <= awaited
        assert mine.h2d_start_ns >= (last.h2d_end_ns if overlap else last.d2h_end_ns)
        assert mine.compute_start_ns >= last.compute_end_ns
        assert mine.d2h_start_ns >= last.d2h_end_ns
        last = mine


def test_an_undisturbed_run_is_told_exactly() -> None:
    """Clocks that agree, to the nanosecond: nothing is moved or clipped."""
    took = [Durations(5_000, 9_000, 8_000, 3_000, 40_000 + i, 2_000, 6_000, 7_000) for i in range(30)]
    flights = played(took, 2, True)
    assert measured(flights, True, 1.0, 1) == [flight.lanes for flight in flights]
