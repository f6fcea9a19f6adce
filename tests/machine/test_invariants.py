"""The simulated machine: invariants of every run, and that each of them can fail."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.machines import COSTS, DEPTHS, LONGEST, NAMES, Fixed, check_tokens, load, run, server, spec

from cbsim.cost.base import PHASES, Cost, CpuCost, PhaseCost
from cbsim.cost.fitted import ConstantCost, Curve, FittedCost
from cbsim.cost.roofline import Rates, RooflineCost, Weights
from cbsim.machine.driver import Machine
from cbsim.machine.graphs import Graphs, VllmBuckets, transformers_bucket, unpadded
from cbsim.policy.request import RequestSpec
from cbsim.record import invariants
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps, requests_of
from cbsim.workload.requests import Sessions, Users, Workload

# -- every run --------------------------------------------------------------------------------------------------------

coefficients = st.one_of(st.just(0.0), st.floats(0, 40))


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    """Any cost model, all its coefficients random; steps of some tens of ns, so that arrivals fall into them."""
    term = lambda: draw(coefficients)  # noqa: E731
    cpu = CpuCost({phase: PhaseCost(term(), term() / 4, term() / 8, term() / 8) for phase in PHASES})
    kind = draw(st.sampled_from(["constant", "fitted", "roofline", "fixed"]))
    if kind == "constant":
        return ConstantCost(cpu, term(), term(), term(), term())
    if kind == "fitted":
        terms = (
            "chunk",
            "prefill_token",
            "cached_token",
            "prefill_pair",
            "decode_row",
            "context_token",
            "uneven_token",
        )
        names = ("base", "unsplit_rows", *(f"per_{name}" for name in terms), "h2d", "d2h")
        curves = [Curve([0, 10], sorted((term(), term()))) for _ in range(2)]
        terms_of = {name: term() for name in names}
        launch_ns = draw(st.integers(0, 40))
        return FittedCost(cpu, query_tokens=curves[0], context_tokens=curves[1], launch_ns=launch_ns, **terms_of)
    if kind == "fixed":
        ns = st.integers(0, 40)
        return Fixed(draw(st.tuples(ns, ns, ns, ns)), draw(st.tuples(ns, ns, ns)), draw(ns))
    rates = Rates(*(draw(st.floats(1e8, 1e11)) for _ in Rates._fields))
    weights = Weights(*(draw(st.integers(1, 50)) for _ in Weights._fields))._replace(
        experts_share=draw(st.floats(0, 1))
    )
    return RooflineCost(cpu, rates, weights, term() / 1e9, term() / 1e9)


@st.composite
def graph_rules(draw: st.DrawFn) -> Graphs:
    rule: Any = draw(
        st.sampled_from([None, unpadded, partial(transformers_bucket, 6, 64, 64), VllmBuckets([1, 2, 4, 8])])
    )
    return Graphs(rule, draw(st.sampled_from([0, 100])))


@st.composite
def specs(draw: st.DrawFn, index: int) -> RequestSpec:
    """A small request; one in six has a prompt that nobody can serve; prompts may share their beginning."""
    fits = draw(st.integers(0, 5)) > 0
    prompt, most = draw(st.integers(1, 16)) if fits else 400, draw(st.integers(1, LONGEST - 16))
    outputs = draw(st.one_of(st.just(most), st.integers(1, most)))
    shared = draw(st.sampled_from([0, 0, 8]))
    keys = {"prefix": (7, 8), "prefix_block_tokens": 4, "prefix_tokens": min(shared, prompt)} if shared else {}
    return spec(index, prompt, outputs, draw(st.integers(0, 300)), max_tokens=most, **keys)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Open, closed loop or sessions; some of the first requests are given up."""
    asked = [draw(specs(index)) for index in range(draw(st.integers(1, 9)))]
    kind = draw(st.sampled_from(["open", "users", "sessions"]))
    first, later = asked, asked[len(asked) :]
    if kind != "open":
        cut = draw(st.integers(1, len(asked)))
        first, later = asked[:cut], asked[cut:]
    delay = draw(st.sampled_from([0, 30]))
    follow: Any = Users(later, delay) if kind == "users" else None
    if kind == "sessions":
        before = [first[-1], *later]
        follow = Sessions({a.index: (b, delay) for a, b in zip(before, later, strict=False)})
    gives_up = st.lists(st.tuples(st.integers(0, 900), st.sampled_from(first)), max_size=3, unique_by=lambda c: c[1])
    return load(*first, cancels=sorted(draw(gives_up), key=lambda c: c[0]), follow=follow)


def check_ends(machine: Machine, workload: Workload, steps: Steps) -> None:
    """Everybody who was asked for is in the record once and is over, with the tokens that the end implies."""
    rows = requests_of(machine.record)
    assert [row.index for row in rows] == list(range(workload.total))
    for row in rows:
        tokens = sum(row.token_runs[1::2])
        assert row.status in ("length", "stop", "aborted", "refused"), row
        assert row.status == "aborted" or tokens == (0 if row.status == "refused" else row.output_tokens)
        assert (row.reason != "") == (row.status == "refused")
        assert row.queued_ns >= row.arrival_ns
    over = sum(row.status in ("length", "stop") for row in rows)
    assert int(steps["finished"].sum()) == over
    assert machine.record.finished_count == len(rows)
    check_tokens(steps, [row.token_runs for row in rows])


def check_cancels(machine: Machine, steps: Steps, cancels: Sequence[tuple[int, RequestSpec]]) -> None:
    """Whoever gave up before its last step was planned did not get its last token."""
    rows = {row.index: row for row in requests_of(machine.record)}
    for at, asked in cancels:
        row = rows[asked.index]
        if row.status in ("length", "stop") and at >= asked.arrival_ns:
            last = sum(row.token_runs[-2:]) - 1
            assert steps["schedule_start_ns"][last] < at, (row, at)


@NAMES
@DEPTHS
def test_invariants_hold_in_every_run(name: str, depth: int) -> None:
    """The step table obeys the machine's rules and nobody is lost, for any cost model, graph rule, stream setting and
    traffic. Times are tens of ns so that arrivals and cancellations fall into every phase of a step."""

    @given(cost=costs(), graphs=graph_rules(), overlap=st.booleans(), workload=workloads())
    @examples(40)
    def check(cost: Cost, graphs: Graphs, overlap: bool, workload: Workload) -> None:
        cancels = list(workload.cancels)
        machine = server(workload, cost, name=name, depth=depth, overlap=overlap, graphs=graphs)
        steps = run(machine)
        invariants.check(steps, depth=depth, overlap=overlap, total_blocks=machine.record.total_blocks)
        check_ends(machine, workload, steps)
        check_cancels(machine, steps, cancels)
        assert machine.scheduler.pool.free == machine.scheduler.pool.num_blocks

    check()


# -- the invariants can fail ------------------------------------------------------------------------------------------


def good() -> Steps:
    """A table of eight steps, asynchronous: three requests, one of which waits for tokens in its step's budget."""
    machine = server(load(spec(0, 5, 4), spec(1, 12, 3), spec(2, 2, 6, at=60)), COSTS, depth=2)
    return run(machine)


def violated(steps: Steps, *, depth: int = 2, overlap: bool = True) -> str:
    with pytest.raises(AssertionError) as caught:
        invariants.check(steps, depth=depth, overlap=overlap, total_blocks=16)
    return str(caught.value)


@pytest.mark.parametrize(
    ("column", "row", "change", "rule"),
    [
        ("step", 3, 1, "steps are numbered 0, 1, 2 ...: row 3 has 4 against 3"),
        ("launch_end_ns", 2, -8, "launch ends at or after its start"),
        ("update_start_ns", 2, -1, "update follows await"),
        ("schedule_start_ns", 3, -1, "one thing at a time"),
        ("compute_end_ns", 3, 41, "compute: one thing at a time"),
        ("h2d_start_ns", 1, -8, "H2D copy waits for what it copies"),
        ("compute_start_ns", 0, -3, "compute waits for its inputs"),
        ("d2h_start_ns", 2, -1, "D2H copy waits for compute"),
        ("d2h_end_ns", 2, 1, "CPU waits for the outputs"),
        ("rows", 2, -3, "decoding rows are rows"),
        ("decode_rows", 2, -4, "decode_rows is not negative"),
        ("prefill_tokens", 0, -16, "any other row has a token"),
        ("prefill_tokens", 4, 1, "only such rows have prefill tokens"),
        ("tokens", 1, 1, "tokens = prefill_tokens + decode_rows"),
        ("padded_tokens", 0, -1, "padding is not negative"),
        ("sampled_rows", 4, -1, "every decoding row samples"),
        ("sampled_rows", 0, 2, "only rows sample"),
        ("running", 0, -1, "only running requests have rows"),
        ("finished", 0, 3, "only sampling ends a request"),
        ("wasted_rows", 0, 3, "only rows are wasted"),
        ("recomputed_tokens", 4, 1, "only tokens of such rows are recomputed"),
        ("used_blocks", 4, 30, "blocks in use and cached blocks exist"),
        ("cached_blocks", 4, 16, "blocks in use and cached blocks exist"),
        ("cached_blocks", 4, -1, "cached blocks are not negative"),
        ("new_blocks", 0, 30, "new blocks are in use"),
    ],
)
def test_each_invariant_can_fail(column: str, row: int, change: int, rule: str) -> None:
    """One number of a good table is changed; the rule that it breaks is named, with the two sides that disagree."""
    invariants.check(good(), depth=2, overlap=True, total_blocks=16)
    table = good().table.copy()
    table[row, STEP_COLUMNS.index(column)] += change
    message = violated(Steps(table))
    assert rule in message
    assert " against " in message


def test_a_table_is_checked_against_the_right_machine() -> None:
    """Two steps in flight are too many for a synchronous loop, and copies beside kernels too many for one stream."""
    assert "a buffer is written after its last outputs were copied" in violated(good(), depth=1)
    assert "h2d + compute + d2h: one thing at a time" in violated(good(), overlap=False)


def test_an_empty_table_is_fine() -> None:
    """A run that refused everything, or was stopped at once, has no steps: nothing is violated."""
    invariants.check(Steps(good().table[:0]), depth=2, overlap=True, total_blocks=1)
