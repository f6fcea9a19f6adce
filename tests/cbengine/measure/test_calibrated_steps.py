"""What calibration takes from the steps of a run: its lines, which of them count, and what both loops share."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.made_up_steps import LAYERS, made_up, plan
from support.engine.served import spec

from cbengine.measure import calibrate, probes
from cbengine.measure.probes import EqualStepTimes, ProbeTable, equal_steps
from cbsim.policy.plan import Chunk
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps


def steps_of(**edges: list[int]) -> Steps:
    """A step table with these columns, 0 in all others."""
    rows = np.zeros((len(next(iter(edges.values()))), len(STEP_COLUMNS)), dtype=np.int64)
    for name, values in edges.items():
        rows[:, list(STEP_COLUMNS).index(name)] = values
    return Steps(rows)


def test_a_line_counts_from_launch_to_kernels_and_from_kernels_to_the_cpu() -> None:
    """Kernels begin 5 after the launch and end at 40; the CPU has the result at 47. Padding counts as decoding rows."""
    steps = steps_of(
        padded_tokens=[8], launch_start_ns=[10], launch_end_ns=[15], compute_start_ns=[20], compute_end_ns=[40],
        await_end_ns=[47], context_tokens=[99],
    )  # fmt: skip
    at = {name: int(steps.table[0][i]) for i, name in enumerate(STEP_COLUMNS)}
    line = probes._line(plan((), decodes=5, decode_context=94), at, [8, 16])
    assert (line.launch, line.h2d, line.compute, line.d2h, line.read) == (5, 5, 20, 7, 99)
    assert (line.tokens, line.decodes, line.query_tokens, line.eager) == (8, 8, 5, False)


@pytest.mark.parametrize(("end", "bound"), [(1010, True), (1400, False)])
def test_kernels_that_end_with_their_launch_were_bound_by_it(end: int, bound: bool) -> None:
    steps = steps_of(padded_tokens=[20], launch_end_ns=[1000], compute_start_ns=[0], compute_end_ns=[end])
    at = {name: int(steps.table[0][i]) for i, name in enumerate(STEP_COLUMNS)}
    line = probes._line(plan((Chunk(spec(0, 90, 4), 0, 0, 20, (), 0),)), at, [8, 16])
    assert (line.eager, line.bound, line.h2d) == (True, bound, 0)
    assert not probes._line(plan((Chunk(spec(0, 90, 4), 0, 0, 20, (), 0),)), at, []).eager, "launched in one go"


def test_the_gap_is_that_of_steps_which_waited() -> None:
    """Steps 1 and 2 were launched while the one before ran and began 3 and 5 later; step 3 was late itself."""
    steps = steps_of(
        launch_end_ns=[0, 12, 112, 400], compute_start_ns=[10, 103, 205, 450], compute_end_ns=[100, 200, 300, 500]
    )
    assert probes._gaps(steps).tolist() == [3, 5]
    assert len(probes._gaps(steps_of(launch_end_ns=[5]))) == 0


def test_of_the_asynchronous_loop_count_kernels_that_did_not_wait() -> None:
    """Steps that were launched in one go while the one before ran: not the late one, not the eager one. What the CPU
    took in that loop is not used.
    """
    table, n = ProbeTable(), 7
    plans = [plan((), decodes=4, decode_context=400)] * (n - 1)
    plans.append(plan((Chunk(spec(0, 90, 4), 0, 0, 20, (), 0),)))
    start = np.arange(n) * 100
    launched = start - 50
    launched[5] = 499  # after the kernels of step 4 had ended
    times = {"launch_end_ns": launched, "compute_start_ns": start, "compute_end_ns": start + 80}
    table.add_ahead(plans, steps_of(rows=[4] * n, padded_tokens=[8] * 6 + [20], **times), [8, 16])
    assert [(line.tokens, line.compute, line.ahead) for line in table.lines] == [(8, 80, True)] * 2
    assert table.alone().lines == []


def test_equal_steps_of_both_loops_are_compared() -> None:
    """By what they computed. Kernels that waited for their launch are longer, and only synchronous ones may wait: of
    the asynchronous loop only steps that were launched ahead count.
    """
    n = 12
    start = np.arange(n) * 1000
    context = np.arange(n) // 2 * 16
    same = {"rows": [4] * n, "padded_tokens": [8] * n, "context_tokens": context, "compute_start_ns": start}
    alone = steps_of(**same, launch_end_ns=start + 20, compute_end_ns=start + 530)
    ahead = steps_of(**same, launch_end_ns=start - 600, compute_end_ns=start + 500)
    found = equal_steps([(alone, ahead)])
    assert found is not None
    assert (found.steps, found.sync_s, found.async_s) == pytest.approx((5, 530e-9, 500e-9))
    assert found.difference_s == pytest.approx(30e-9)
    assert str(found) == (
        "kernels of 5 equal steps: 0.5 us synchronous, 0.5 us asynchronous, difference +0.0 us (+6.00%)"
    )
    assert equal_steps([(alone, alone)]) is None, "nothing was launched ahead"
    assert equal_steps([]) is None


def test_waiting_for_a_launch_is_no_work_of_the_kernels() -> None:
    """Replayed steps of the synchronous loop are told as longer by what they wait; the fit takes that off, and leaves
    eager steps and those that were launched ahead as they are.
    """
    clean, waited_ns = made_up(600, 1, 0.0), 40_000
    late = [
        line._replace(compute=line.compute + waited_ns * (not line.eager and i % 2 == 0), ahead=i % 2 == 1)
        for i, line in enumerate(clean.lines)
        if i % 2 == 0 or not line.eager
    ]
    table = ProbeTable(late, equal=EqualStepTimes(9, 1e-3, 9.6e-4, waited_ns / 1e9))
    same = ProbeTable(
        [line._replace(compute=line.compute - waited_ns * (not line.eager and not line.ahead)) for line in late]
    )
    found, right = (calibrate.calibration(one, LAYERS).coefficients for one in (table, same))
    assert found["query_tokens"] == right["query_tokens"]
    assert found["context_tokens"] == right["context_tokens"]


@pytest.mark.parametrize("missing", [(), ("ahead",)])
def test_steps_of_older_files_are_those_of_the_synchronous_loop(missing: tuple[str, ...]) -> None:
    made = made_up(30, 1, 0.0)
    assert ProbeTable.of(made.arrow().drop_columns(list(missing))).lines == made.lines
