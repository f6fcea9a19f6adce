"""`--profile`: GPU-active by events beside the profiler's, and a line for every kernel that it saw."""

from __future__ import annotations

import csv
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given
from hypothesis import strategies as st

from cbengine.device import profile
from cbengine.device.profile import SKIPPED, Profile, Span, by_kernel, kernels, shares
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps


def steps(count: int, **columns: Any) -> Steps:
    """Steps with the given columns; the others are 0."""
    values = np.zeros((count, len(STEP_COLUMNS)), dtype=np.int64)
    for column, value in columns.items():
        values[:, STEP_COLUMNS.index(column)] = value
    return Steps(values)


spans = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.integers(0, 9)).map(
        lambda p: Span(p[0], float(p[1]), float(p[1] + p[2]))
    ),
    min_size=1,
).map(lambda found: sorted(found, key=lambda span: span.start_us))


@given(spans)
def test_the_table_of_kernels_leaves_nothing_out(seen: list[Span]) -> None:
    """Every launch is counted in one line, longest first; gaps and covered time make up the whole span."""
    lines = by_kernel(seen)
    assert sum(line.launches for line in lines) == len(seen)
    assert sum(line.total_us for line in lines) == sum(span.end_us - span.start_us for span in seen)
    assert sum(line.share for line in lines) == pytest.approx(1 if any(line.total_us for line in lines) else 0)
    assert [line.total_us for line in lines] == sorted((line.total_us for line in lines), reverse=True)
    covered = {moment for _, start, end in seen for moment in range(int(start), int(end))}
    reach = max(span.end_us for span in seen) - seen[0].start_us
    assert sum(line.gap_us for line in lines) == reach - len(covered)
    told = list(csv.reader(profile.written(lines).decode().splitlines()))
    assert told[0] == ["name", "launches", "total_us", "share", "gap_us"]
    assert [row[0] for row in told[1:]] == [line.name for line in lines]


def event(name: str, start: float, end: float, kind: str = "CUDA", **more: Any) -> Any:
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=times, device_type=SimpleNamespace(name=kind), **more)


def test_kernels_are_what_runs_on_the_multiprocessors() -> None:
    seen = [
        event("_decode", 1, 2),
        event("cudaGraphLaunch", 0, 9, "CPU"),
        event("Memcpy HtoD (Pinned -> Device)", 2, 3),
        event("Memcpy DtoD (Device -> Device)", 3, 4),
        event("Memcpy DtoH (Device -> Pinned)", 4, 5),
        event("ProfilerStep#3", 0, 9, is_user_annotation=True),
        event("nvjet", 5, 6, is_user_annotation=False),
    ]
    assert kernels(seen) == [("_decode", 1, 2), ("Memcpy DtoD (Device -> Device)", 3, 4), ("nvjet", 5, 6)]


def test_both_figures_are_shown() -> None:
    window = steps(2, step=[7, 8], compute_start_ns=[0, 60], compute_end_ns=[50, 100])
    assert (
        shares(window, [Span("a", 0.0, 3.0), Span("b", 3.5, 4.0)])
        == "GPU active over steps 7 to 8: events 90.00%, profiler 87.50%"
    )
    assert shares(window, []).endswith("events 90.00%, the profiler saw no kernels")


class Recorded:
    """As much of a record as a profile reads."""

    def __init__(self) -> None:
        self.steps = bytearray()

    @property
    def step_count(self) -> int:
        return len(self.steps) // (8 * len(STEP_COLUMNS))

    def add(self) -> None:
        at = self.step_count
        self.steps += steps(1, step=at, compute_start_ns=10 * at, compute_end_ns=10 * at + 8).table.tobytes()


class Profiler:
    """Sees one kernel, a microsecond of four, for each step that is launched between its start and its stop."""

    def __init__(self, launched: list[int]) -> None:
        self._launched = launched
        self.first = self.end = -1

    def start(self) -> None:
        assert self.first < 0
        self.first = self._launched[0]

    def stop(self) -> None:
        assert self.end < 0
        self.end = self._launched[0]

    def events(self) -> list[Any]:
        return [event("_decode", 4 * i, 4 * i + 1) for i in range(self.end - self.first)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("ran", "last"), [(60, 10), (25, 5), (21, 1), (20, 0), (3, 0)])
def test_profiled_are_as_many_steps_as_were_asked_for(
    depth: int, ran: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the profiler sees is what the window shows: steps launched after it started, the step in flight at the end
    included. Told once a step, or more often while it waits; ended by the run or by its count, and only once.
    """
    made: list[Profiler] = []
    launched = [0]
    monkeypatch.setattr(profile.torch.profiler, "profile", lambda **_: made.append(Profiler(launched)) or made[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    record: Any = Recorded()
    one = Profile(record, 10, depth)
    one()
    for step in range(ran):
        launched[0] = min(step + depth, ran)
        record.add()
        one()
        one()
    one.stop()
    one.stop()
    assert len(made) == (ran >= SKIPPED)
    first, end = (made[0].first, made[0].end) if made else (0, 0)
    window = one.window
    assert window["step"].tolist() == list(range(first, end))
    assert len(window) == max(0, last - (depth - 1 if last < 10 else 0))
    assert ("too few" in one.verdict()) == (len(window) < 2)
    if len(window) >= 2:
        assert f"steps {first} to {end - 1}: " in one.verdict()
        assert one.files()["kernels.csv"].decode().splitlines()[1].startswith(f"_decode,{end - first},")
