"""A simulated run: a pure function from a scenario and a loop to a record; two runs share nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import simpy

from cbsim.cost.base import Cost
from cbsim.machine.device import Mover, OneGpu
from cbsim.machine.driver import Machine
from cbsim.machine.graphs import Graphs, engine_bucket, transformers_bucket, unpadded, vllm_bucket
from cbsim.policy.captures import CAPTURED, captured_sizes, vllm_sizes
from cbsim.policy.loop import Scheduler
from cbsim.record.columns import NS
from cbsim.record.record import Record
from cbsim.runs.assemble import copies, cost_model, scheduler
from cbsim.runs.inbox import NEVER_NS, Inbox, no_collections
from cbsim.runs.result import SIMULATED
from cbsim.scenario.scenario import Scenario, depth
from cbsim.workload.requests import Workload

TRANSFORMERS_ROWS, UNBOUNDED = 1024, 1 << 30  # for schedulers that have no such limit, padded as transformers does
VLLM_LARGEST = 512  # for schedulers that have no such limit, padded as vLLM does


def machine(scenario: Scenario, loop: str, workload: Workload, cost: Cost | None = None) -> Machine:
    """Build the simulated server, with an empty record. `cost`: in place of the scenario's."""
    policy, cost = scheduler(scenario, loop), cost or cost_model(scenario)
    record, steps = Record(policy.pool.num_blocks), depth(loop)
    gap_ns = round(getattr(scenario.cost, "gap_s", 0.0) * NS)
    mover = partial(Mover, copies(scenario, policy.pool.groups), record.transfers, policy.pool.block_size)
    device = OneGpu(cost, depth=steps, overlap=scenario.loop.streams, gap_ns=gap_ns, mover=mover)
    inbox = Inbox(workload, record, workload.arriving())
    return Machine(policy, cost, graphs(scenario, policy), device, inbox, record, steps)


def run(server: Machine, on_step: Callable[[int], None] | None = None) -> None:
    """Run a server to the end of its workload. After an interrupt its record holds the run until then."""
    env = simpy.Environment()
    over = env.process(server.run(env, on_step))
    env.timeout(NEVER_NS)  # so that there is always a next event: peeking at an empty list costs an exception
    with no_collections():
        env.run(over)


def graphs(scenario: Scenario, policy: Scheduler) -> Graphs:
    """Return the CUDA graphs of a fresh server with this scheduler."""
    settings, limits, pool = scenario.loop.cuda_graphs, policy.limits, policy.pool
    capture_ns = round(settings.capture_s * NS)
    if not settings.enabled:
        return Graphs(None, 0)
    if scenario.graph_padding == "vllm":
        sizes = settings.vllm_capture_sizes or vllm_sizes(limits.graphs or VLLM_LARGEST)
        if decodes := settings.vllm_cudagraph_mode == "FULL_DECODE_ONLY":  # of those sizes that the seats can fill
            sizes = [size for size in sizes if size <= (limits.slots or sizes[-1])]
        return Graphs(partial(vllm_bucket, sizes, decodes=decodes), capture_ns)
    if scenario.graph_padding == "cbengine":
        sizes = captured_sizes(limits.slots or limits.rows or CAPTURED[-1])
        return Graphs(partial(engine_bucket, sizes), capture_ns)
    if scenario.graph_padding == "transformers":
        rows, tokens = limits.rows or TRANSFORMERS_ROWS, limits.tokens or UNBOUNDED
        cache_tokens = pool.num_blocks * pool.block_size
        return Graphs(partial(transformers_bucket, min(rows, tokens), tokens, cache_tokens), capture_ns)
    return Graphs(unpadded, capture_ns)


class Simulation:
    """A server whose clock is simulated."""

    measured = False

    def __init__(self, scenario: Scenario, loop: str, workload: Workload, cost: Cost | None = None) -> None:
        self.machine = machine(scenario, loop, workload, cost)
        self.record = self.machine.record
        self.facts: Mapping[str, object] = {"device": SIMULATED}

    @property
    def now_ns(self) -> int:
        return self.machine.now_ns

    def run(self, on_step: Callable[[int], None]) -> None:
        run(self.machine, on_step)

    def files(self) -> Mapping[str, bytes]:
        return {}
