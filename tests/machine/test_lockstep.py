"""Data-parallel servers in step: waves, balancing, and that nobody waits for ever. Times are ns on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.machines import DEPTHS, LONGEST, check_tokens, load, spec, table, vllm_options

from cbsim.machine.device import Device, OneGpu, Timing
from cbsim.machine.driver import Machine
from cbsim.machine.front import Front
from cbsim.machine.graphs import Graphs, VllmBuckets, unpadded
from cbsim.machine.lockstep import Balance, Lockstep
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record import invariants
from cbsim.record.record import STEP_COLUMNS, Record
from cbsim.record.tables import Steps, requests_of
from cbsim.runs.inbox import Inbox
from cbsim.schedulers.vllm.scheduler import VllmScheduler

HASH = STEP_COLUMNS.index("plan_hash")  # of its requests, which differ
CAPTURED, EAGER = Graphs(unpadded, 0), Graphs(None, 0)


@dataclass(frozen=True)
class Waves:
    """A wave takes `base`, `token` a token of the longest step, `rank` a rank; the CPU a fixed time a phase and `row` a
    row, by which ranks drift apart between waves. `seen` are the tokens of the ranks of every wave."""

    base: int = 100
    token: int = 0
    rank: int = 0
    cpu: tuple[int, int, int, int] = (0, 0, 0, 0)
    kernels: int = 0
    row: int = 0
    seen: list[list[int]] = field(default_factory=list)

    def cpu_ns(self, plan: StepPlan | None) -> tuple[int, int, int, int]:
        schedule, prepare, launch, update = self.cpu
        return schedule, prepare + (self.row * plan.work.rows if plan else 0), launch, update

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        return 0, self.lockstep_ns([plan], [tokens]) if plan.work.rows else 0, 0

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: Sequence[int]) -> int:
        assert plans and all(plan.work.rows for plan in plans)
        assert all(plan.work.computed_tokens <= count for plan, count in zip(plans, tokens, strict=False))
        self.seen.append(list(tokens))
        return self.base + self.token * max(tokens) + self.rank * len(tokens)

    @property
    def launch_ns(self) -> int:
        return self.kernels


def serve(
    specs: Sequence[RequestSpec],
    cost: Any,
    ranks: int,
    *,
    depth: int = 1,
    options: Any = None,
    graphs: Graphs = CAPTURED,
    devices: Sequence[Device] | None = None,
    shares: tuple[float, float] = (0.0, 0.0),
) -> list[Machine]:
    """The servers after they have served `specs`, which their client balances, in step unless `devices` are given."""
    env, machines, inboxes = simpy.Environment(), list[Machine](), list[Inbox]()
    router = Front(env, load(*sorted(specs, key=lambda one: (one.arrival_ns, one.index))), inboxes)
    for device in devices or Lockstep(env, cost, ranks).ranks:
        device.cpu_share, device.gpu_share = shares
        policy = VllmScheduler(options or vllm_options())
        record = Record(policy.pool.num_blocks)
        inbox = Inbox(router, record)
        inbox.news = env.event()
        inboxes.append(inbox)
        machines.append(Machine(policy, cost, graphs, device, inbox, record, depth))
        env.process(machines[-1].run(env))
    router.choose = Balance("waiting first", inboxes, [machine.scheduler for machine in machines])
    env.run()
    return machines


def tables(machines: Sequence[Machine]) -> list[Steps]:
    return [table(machine.record) for machine in machines]


def served_by(machines: Sequence[Machine]) -> list[list[int]]:
    """Indices of the requests of each rank."""
    return [[row.index for row in requests_of(machine.record)] for machine in machines]


def busy(steps: Steps) -> list[tuple[int, int]]:
    """Start and end of the steps that ran on the device."""
    rows = steps["rows"] > 0
    return list(zip(steps["compute_start_ns"][rows].tolist(), steps["compute_end_ns"][rows].tolist(), strict=True))


# -- by hand ----------------------------------------------------------------------------------------------------------


@DEPTHS
def test_symmetrical_ranks_do_the_same_at_the_same_time(depth: int) -> None:
    """Pairs of equal requests: one of each goes to each rank, and the step tables are the same."""
    specs = [spec(2 * i + j, 5 + i, 4 + i, 70 * i) for i in range(4) for j in range(2)]
    machines = serve(specs, Waves(token=3, cpu=(10, 5, 3, 4)), 2, depth=depth)
    assert served_by(machines) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    one, other = (np.delete(steps.table, HASH, axis=1) for steps in tables(machines))
    assert np.array_equal(one, other)


def test_a_wave_takes_what_the_slowest_takes() -> None:
    """A prompt of 10 beside one of 2: both steps take 100 + 10 x 10, then both decode in 110 until one ends."""
    machines = serve([spec(0, 10, 2), spec(1, 2, 3)], Waves(token=10), 2)
    first, second = tables(machines)
    assert busy(first) == [(0, 200), (200, 310)]
    assert busy(second) == [(0, 200), (200, 310), (310, 420)]


def test_a_wave_that_all_launched_ahead_contends() -> None:
    """The first wave of both ranks finds idle GPUs; of the others all kernels are launched while the last ones run, and
    CPU phases begin then.
    """
    cost, specs = Waves(cpu=(4, 0, 0, 4)), [spec(0, 1, 5), spec(1, 1, 5)]
    first, _ = tables(serve(specs, cost, 2, depth=2, shares=(0.5, 0.25)))
    assert busy(first) == [(4, 104), (104, 229), (229, 354), (354, 479), (479, 604)]
    assert first.lane("schedule").tolist()[:5] == [4, 6, 6, 6, 6]
    alone = tables(serve(specs, cost, 2, shares=(0.5, 0.25)))[0]
    assert busy(alone) == [(108 * i + 4, 108 * i + 104) for i in range(5)]


def test_a_wave_starts_when_the_last_has_launched() -> None:
    """Rank 1's first request comes while rank 0 runs: its step waits for the next wave, and that for rank 0."""
    machines = serve([spec(0, 1, 3), spec(1, 1, 2, 40)], Waves(cpu=(10, 0, 0, 5)), 2)
    first, second = tables(machines)
    # rank 0 launches at 10, its wave ends at 110, it has applied and planned again at 125, and rank 1 since 50
    assert busy(first) == [(10, 110), (125, 225), (240, 340)]
    assert busy(second) == [(125, 225), (240, 340)]


def test_a_resting_rank_holds_nobody_up() -> None:
    """One request on two ranks is served as on one, but for what a wave of two costs."""
    alone, beside = (serve([spec(0, 8, 6)], Waves(rank=7), ranks) for ranks in (1, 2))
    assert served_by(beside) == [[0], []]
    assert [end - start for start, end in busy(tables(alone)[0])] == [107] * 6
    assert busy(tables(beside)[0]) == [(114 * i, 114 * (i + 1)) for i in range(6)]
    assert len(tables(beside)[1]) == 0


def test_a_rank_that_woke_up_once_may_rest_again() -> None:
    """Rank 1 serves one short request in the middle; before and after it rank 0 steps alone. One that comes to two
    resting ranks long after goes to the first."""
    machines = serve([spec(0, 1, 6), spec(1, 1, 1, 150), spec(2, 1, 1, 9000)], Waves(), 2)
    assert served_by(machines) == [[0, 2], [1]]
    first, second = tables(machines)
    assert busy(first) == [(100 * i, 100 * (i + 1)) for i in range(6)] + [(9000, 9100)]
    assert busy(second) == [(200, 300)]


def test_requests_go_where_four_times_waiting_and_running_is_least() -> None:
    """Both ranks have one running at 150, although that of rank 1 will have ended at 200: a tie, so rank 0. At 250 it
    has none. Two at one moment: the first makes the second go elsewhere, for it waits there."""
    specs = [spec(0, 1, 9), spec(1, 1, 2), spec(2, 1, 9, 150), spec(3, 1, 9, 250), spec(4, 1, 1, 250)]
    assert served_by(serve(specs, Waves(), 2)) == [[0, 2, 4], [1, 3]]
    apart = [OneGpu(Waves(), Timing(1, overlap=True)) for _ in range(2)]  # type: ignore[arg-type]
    assert served_by(serve(specs, Waves(), 2, devices=apart)) == [[0, 2, 4], [1, 3]]


def test_a_poll_at_the_moment_of_an_arrival_takes_it() -> None:
    """As on a server of its own, although the poll at 200 was foreseen before the client had sent the one at 130."""
    machines = serve([spec(0, 1, 4), spec(1, 1, 1, 130), spec(2, 1, 1, 200)], Waves(), 1)
    assert [row.queued_ns for row in requests_of(machines[0].record)] == [0, 200, 200]


def test_kernels_launched_one_by_one_start_with_the_first() -> None:
    """Without a graph the wave starts when every rank has begun to launch; it ends after the last kernel's launch."""
    machines = serve([spec(0, 1, 1), spec(1, 1, 1)], Waves(base=30, cpu=(10, 0, 2, 0), kernels=50), 2, graphs=EAGER)
    assert busy(tables(machines)[0]) == [(10, 62)]
    machines = serve([spec(0, 1, 1), spec(1, 1, 1)], Waves(base=90, cpu=(10, 0, 2, 0), kernels=50), 2, graphs=EAGER)
    assert busy(tables(machines)[0]) == [(10, 100)]


def test_ranks_are_padded_to_each_other_where_all_have_a_graph() -> None:
    """Graphs up to 8 tokens. A prompt of 10 runs without one, and so do the 3 tokens beside it, padded to their own
    graph; then both decode, padded to 1; then rank 0 alone, beside a token of nobody."""
    cost, graphs = Waves(), Graphs(VllmBuckets([1, 2, 4, 8]), 0)
    serve([spec(0, 10, 3), spec(1, 3, 2)], cost, 2, graphs=graphs)
    assert cost.seen == [[10, 4], [1, 1], [1, 1]]
    cost = Waves()
    serve([spec(0, 5, 1), spec(1, 3, 1)], cost, 2, graphs=graphs)
    assert cost.seen == [[8, 8]]
    cost = Waves()
    serve([spec(0, 10, 1)], cost, 3, graphs=graphs)
    assert cost.seen == [[10, 1, 1]]


# -- any workload -----------------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> list[RequestSpec]:
    """Small requests, some at once, some long after everybody else; one in eight cannot be served."""
    specs, at = [], 0
    for index in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0, 0, 1, 7, 50, 100, 400, 5000]))
        prompt = 400 if draw(st.integers(0, 7)) == 0 else draw(st.integers(1, 16))
        specs.append(spec(index, prompt, draw(st.integers(1, LONGEST - 16)), at))
    return specs


@st.composite
def costs(draw: st.DrawFn) -> Waves:
    ns = st.integers(0, 60)
    cpu = draw(st.tuples(ns, ns, ns, ns))
    return Waves(draw(ns), draw(st.integers(0, 5)), draw(ns), cpu, draw(ns), draw(st.sampled_from([0, 0, 15])))


def check_waves(steps: Sequence[Steps]) -> None:
    """Steps of two ranks are the same wave or do not overlap."""
    spans = sorted({span for one in steps for span in busy(one)})
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start, spans


def check_served(machines: Sequence[Machine], specs: Sequence[RequestSpec]) -> None:
    """Each request once, by one rank, to its end; what cannot be served is refused; everything is free again."""
    rows = [row for machine in machines for row in requests_of(machine.record)]
    assert sorted(row.index for row in rows) == [one.index for one in specs]
    for row in rows:
        fits = row.prompt_tokens < 400
        assert row.status == ("length" if fits else "refused")
        assert sum(row.token_runs[1::2]) == (row.output_tokens if fits else 0)
        assert row.queued_ns >= row.arrival_ns
    for machine in machines:
        assert machine.scheduler.pool.free == machine.scheduler.pool.num_blocks  # type: ignore[attr-defined]
        check_tokens(table(machine.record), [row.token_runs for row in requests_of(machine.record)])


@pytest.mark.parametrize("version", ["0.19", "0.33"])
@DEPTHS
def test_everybody_is_served_whenever_they_come(version: str, depth: int) -> None:
    """No rank waits for one that has nothing to launch, whatever the times: had one, its requests would not have ended.
    The step tables obey the machine's rules, and a second run is the same."""
    options = replace(vllm_options(), version=version)

    @given(specs=requests(), cost=costs(), ranks=st.integers(1, 3), graphs=st.sampled_from([CAPTURED, EAGER]))
    @examples(100)
    def check(specs: list[RequestSpec], cost: Waves, ranks: int, graphs: Graphs) -> None:
        machines = serve(specs, cost, ranks, depth=depth, options=options, graphs=graphs)
        check_served(machines, specs)
        steps = tables(machines)
        check_waves(steps)
        for one in steps:
            invariants.check(one, depth=depth, overlap=True, total_blocks=16)
            invariants.check(one, depth=depth, overlap=False, total_blocks=16)
        again = tables(serve(specs, cost, ranks, depth=depth, options=options, graphs=graphs))
        assert all((one.table == other.table).all() for one, other in zip(steps, again, strict=True))

    check()


@DEPTHS
@given(specs=requests(), cost=costs(), graphs=st.sampled_from([CAPTURED, EAGER]))
def test_one_rank_is_one_gpu(depth: int, specs: list[RequestSpec], cost: Waves, graphs: Graphs) -> None:
    """A group of one steps like a GPU whose copies take no time, and like a server whose client needs no balancing."""
    (rank,) = serve(specs, cost, 1, depth=depth, graphs=graphs)
    gpu = OneGpu(cost, Timing(depth, overlap=False))
    (fed,) = serve(specs, cost, 1, depth=depth, graphs=graphs, devices=[gpu])
    policy = VllmScheduler(vllm_options())
    record = Record(policy.pool.num_blocks)
    gpu = OneGpu(cost, Timing(depth, overlap=False))
    own = Machine(policy, cost, graphs, gpu, Inbox(load(*specs), record), record, depth)
    env = simpy.Environment()
    env.process(own.run(env))
    env.run()
    first, *others = (table(machine.record).table for machine in (own, rank, fed))
    for other in others:
        assert np.array_equal(first, other)
