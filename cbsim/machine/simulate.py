"""A simulated run: a pure function from a scenario and a loop to a record; two runs share nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, cast

import simpy

from cbsim.collector import no_collections
from cbsim.cost.base import Cost, StagedCost
from cbsim.errors import ScenarioError
from cbsim.machine.adaptive import Adaptive
from cbsim.machine.device import Device, Mover, OneGpu, Pipeline, Timing
from cbsim.machine.driver import Machine
from cbsim.machine.front import Blind, Choice, Front
from cbsim.machine.graphs import Graphs, VllmBuckets, engine_bucket, transformers_bucket, unpadded
from cbsim.machine.lockstep import Balance, Gate, Lockstep, Rank, WaveCost
from cbsim.policy.captures import CAPTURED, captured_sizes, multiples, vllm_sizes
from cbsim.policy.loop import Limits, Scheduler, Waves
from cbsim.policy.plan import StepPlan
from cbsim.record.columns import NS
from cbsim.record.environment import SIMULATED
from cbsim.record.record import Record, Records
from cbsim.runs.assemble import acceptance, copies, cost_model, router, scheduler
from cbsim.runs.inbox import Inbox
from cbsim.scenario.scenario import Scenario, depth
from cbsim.scenario.speculation import row_tokens
from cbsim.workload.requests import Workload

if TYPE_CHECKING:
    from cbsim.machine.scaling import Scaled
    from cbsim.machine.separate import Separate

TRANSFORMERS_ROWS, UNBOUNDED = 1024, 1 << 30  # for schedulers that have no such limit, padded as transformers does
LATENCIES = ("gap_s", "launch_overlap_s", "wake_s")  # of a device's timing: fields of its cost
VLLM_LARGEST = 512  # for schedulers that have no such limit, padded as vLLM does


def machine(
    scenario: Scenario, loop: str, workload: Workload | Front, cost: Cost | None = None, device: Device | None = None
) -> Machine:
    """Build the simulated server, with an empty record. `cost` and `device`: in place of the scenario's."""
    policy, cost = scheduler(scenario, loop), cost or cost_model(scenario)
    record, steps = Record(policy.pool.num_blocks), depth(loop, scenario.stages)
    latencies_ns = [round(getattr(scenario.cost, name, 0.0) * NS) for name in LATENCIES]
    timing = Timing(steps, scenario.loop.streams, *latencies_ns)
    if device is None and scenario.stages > 1:
        assert isinstance(cost, StagedCost), cost
        device = Pipeline(cost, record.stages, timing)
    elif device is None:
        kind: Callable[..., Mover] = Mover
        if scenario.role:
            from cbsim.machine.handoff import Side

            kind = Side
        mover = partial(kind, copies(scenario, policy.pool.groups), record.transfers, policy.pool.block_size)
        device = OneGpu(cost, timing, mover)
    share = scenario.cost.contention
    device.cpu_share, device.gpu_share = share.cpu, share.gpu
    inbox = Inbox(workload, record, workload.arriving())
    made = Machine(policy, cost, graphs(scenario, policy), device, inbox, record, steps)
    made.acceptance = acceptance(scenario)
    if (drafts := scenario.speculation) and drafts.adaptive:
        rates, limits = drafts.acceptance.conditional_rates(drafts.k), policy.limits
        sizes = vllm_graphs(scenario, limits) if scenario.loop.cuda_graphs.enabled else []
        most = limits.tokens or policy.pool.num_blocks * policy.pool.block_size
        made.adaptive = Adaptive(cost, rates, sizes, most, limits.longest or scenario.model.max_position)
    return made


def run(server: Machine, on_step: Callable[[int], None] | None = None) -> None:
    """Run a server to the end of its workload. After an interrupt its record holds the run until then."""
    env = simpy.Environment()
    over = env.process(server.run(env, on_step, alone=True))
    with no_collections():
        env.run(over)


def graphs(scenario: Scenario, policy: Scheduler) -> Graphs:
    """Return the CUDA graphs of a fresh server with this scheduler."""
    settings, limits, pool = scenario.loop.cuda_graphs, policy.limits, policy.pool
    capture_ns = round(settings.capture_s * NS)
    if not settings.enabled:
        return Graphs(None, 0)
    if scenario.graph_padding == "vllm":
        only = settings.vllm_cudagraph_mode == "FULL_DECODE_ONLY"
        width = row_tokens(scenario.speculation) if only else 0
        return Graphs(VllmBuckets(vllm_graphs(scenario, limits), width), capture_ns)
    if scenario.graph_padding == "cbengine":
        sizes = captured_sizes(limits.slots or limits.rows or CAPTURED[-1])
        return Graphs(partial(engine_bucket, sizes, row_tokens(scenario.speculation)), capture_ns)
    if scenario.graph_padding == "transformers":
        rows, tokens = limits.rows or TRANSFORMERS_ROWS, limits.tokens or UNBOUNDED
        cache_tokens = pool.num_blocks * pool.block_size
        return Graphs(partial(transformers_bucket, min(rows, tokens), tokens, cache_tokens), capture_ns)
    return Graphs(unpadded, capture_ns)


def vllm_graphs(scenario: Scenario, limits: Limits) -> Sequence[int]:
    """Return the query tokens of vLLM's graphs. Those of rows with drafts hold whole rows, unless only some drafts are
    verified.
    """
    settings, drafts = scenario.loop.cuda_graphs, scenario.speculation
    sizes, width = settings.vllm_capture_sizes or vllm_sizes(limits.graphs or VLLM_LARGEST), row_tokens(drafts)
    if drafts and not drafts.adaptive:
        sizes = multiples(sizes, width)
    if settings.vllm_cudagraph_mode == "FULL_DECODE_ONLY" and limits.slots:  # of those sizes that the seats can fill
        sizes = [size for size in sizes if size <= limits.slots * width]
    return sizes


class Fleet:
    """Several servers on one clock, and the client that shares its requests among them: `together`, in lockstep, or
    each at its own pace. Their load decides who gets a request, unless the front has another choice.
    """

    def __init__(
        self, servers: Sequence[Scenario], client: Workload, *, together: bool = True, cost: Cost | None = None
    ) -> None:
        self.env, scenario = simpy.Environment(), servers[0]
        cost = cost or (cost_model(scenario) if together else None)
        ranks: list[Rank] = []
        if together and not hasattr(cost, "lockstep_ns"):
            raise ScenarioError(f"cost.kind: got {scenario.cost.kind!r}, expected table: the servers share experts")
        if together:
            mixed = scenario.graph_padding == "vllm"
            ranks = Lockstep(self.env, cast("WaveCost", cost), len(servers), mixed=mixed).ranks
        inboxes = list[Inbox]()
        self.front = Front(self.env, client, inboxes)
        self.machines = _machines(servers, self.front, cost, ranks)
        for server in self.machines:
            server.inbox.news = self.env.event()
            inboxes.append(server.inbox)
        self.schedulers = schedulers = [server.scheduler for server in self.machines]
        waits = [getattr(scenario.scheduler, f"attention_dp_{name}_iters", 0) for name in ("timeout", "batching_wait")]
        gate = Gate(schedulers, inboxes, *waits)
        for rank, server in zip(ranks, self.machines, strict=False):
            if hasattr(server.scheduler, "waves"):
                server.scheduler.waves = waves = Waves(gate)
                server.on_plan = partial(_number_next, waves, rank)
        rule = scenario.kind.balance(scenario.scheduler) or "waiting first"
        self.front.choose = Balance(rule, inboxes, schedulers)
        self.record = Records([server.record for server in self.machines])

    @property
    def now_ns(self) -> int:
        return max(server.now_ns for server in self.machines)

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Run all servers to the end of the workload. Raises DeadlockError."""
        for server in self.machines:
            self.env.process(server.run(self.env, on_step))
        with no_collections():
            self.env.run()
            self.front.close()  # for a server that waits for requests that cannot help it
            self.env.run()


def alone(scenario: Scenario, workload: Workload | Front, costs: dict[int, Cost]) -> Machine:
    """Build a server that no other one is beside; `costs` are the cost models that there are, by scenario."""
    if id(scenario) not in costs:
        costs[id(scenario)] = cost_model(scenario)
    return machine(scenario, scenario.loop.mode, workload, costs[id(scenario)])


def _machines(servers: Sequence[Scenario], front: Front, cost: Cost | None, ranks: Sequence[Rank]) -> list[Machine]:
    """Build a server of each scenario, with a cost model for each different one or the one that is given."""
    costs = {key: cost or cost_model(each) for key, each in {id(each): each for each in servers}.items()}
    on = zip_longest(servers, ranks)  # without ranks each has a device of its own
    return [machine(each, each.loop.mode, front, costs[id(each)], rank) for each, rank in on]


def routed(scenario: Scenario, workload: Workload, jobs: int = 1) -> Fleet | Separate | Scaled:
    """Build the servers of a scenario's fleet behind its router: to be simulated one by one, or in `jobs` processes, if
    the router is blind and no request follows the end of another.
    """
    fleet = scenario.fleet
    assert fleet is not None
    servers = scenario.servers
    prefills, decodes = fleet.slots("prefill"), fleet.slots("decode")
    made, blind = router(fleet.router, len(prefills), scenario.seed)
    if fleet.hand_off is not None:
        from cbsim.machine.handoff import Apart

        decoding, _ = router(fleet.hand_off.router, len(decodes), scenario.seed)
        return Apart(scenario, workload, partial(alone, costs={}), made, decoding)
    if fleet.changes:
        from cbsim.machine.scaling import Scaled

        return Scaled(scenario, workload, partial(alone, costs={}), made)
    if blind and workload.follow is None:
        from cbsim.machine.separate import Separate

        return Separate(servers, workload, Blind(made, len(servers)), alone, run, jobs)
    several = Fleet(servers, workload, together=False)
    Choice(made, several.front, several.machines, fleet.signals)
    return several


def _number_next(waves: Waves, rank: Rank, plan: StepPlan) -> None:
    """Set the number of the wave that the next step of a rank will be part of, after each of its plans."""
    del plan
    waves.next = rank.next_wave


class Simulation:
    """A server whose clock is simulated, or several: that step together, or behind a router."""

    measured = False

    def __init__(
        self, scenario: Scenario, loop: str, workload: Workload, cost: Cost | None = None, jobs: int = 1
    ) -> None:
        self._fleet: Fleet | Separate | Scaled | None = None
        if scenario.fleet is not None:
            self._fleet = routed(scenario, workload, jobs)
        elif scenario.ranks > 1:
            self._fleet = Fleet([scenario] * scenario.ranks, workload, cost=cost)
        self._machine = None if self._fleet else machine(scenario, loop, workload, cost)
        self.record: Record | Records = self._fleet.record if self._fleet else self.machine.record
        self.facts: Mapping[str, object] = {"device": SIMULATED}

    @property
    def machine(self) -> Machine:
        """The server, or the first of several on one clock."""
        machines: Sequence[Machine] = getattr(self._fleet, "machines", ())
        if machines:
            return machines[0]
        assert self._machine is not None
        return self._machine

    @property
    def now_ns(self) -> int:
        return self._fleet.now_ns if self._fleet else self.machine.now_ns

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        if self._fleet:
            self._fleet.run(on_step)
        else:
            run(self.machine, on_step)

    def files(self) -> Mapping[str, bytes]:
        return {}
