"""Small machines and loads as tests run them: every scheduler of ours, and costs that are the same in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import simpy

from cbsim.cost.base import Copies, Cost
from cbsim.machine.device import Mover, OneGpu, Timing
from cbsim.machine.driver import Machine
from cbsim.machine.graphs import Graphs, unpadded
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record.record import STEP_COLUMNS, Record
from cbsim.record.tables import Steps, requests_of
from cbsim.runs.inbox import Inbox
from cbsim.schedulers.registry import OURS
from cbsim.schedulers.sarathi.settings import ServeOptions
from cbsim.schedulers.simple.settings import ContiguousOptions, PaddedOptions, TgiOptions
from cbsim.schedulers.transformers.settings import TransformersOptions
from cbsim.schedulers.trtllm.settings import TrtllmOptions
from cbsim.schedulers.vllm.settings import VllmOptions
from cbsim.workload.requests import Workload

LONGEST = 24  # tokens of a request that every scheduler below can serve


def transformers_options(kind: Any, version: Any = "5.17") -> TransformersOptions:
    return TransformersOptions(
        name=f"transformers_{kind}",
        version=version,
        block_size=4,
        num_blocks=16,
        max_batch_tokens=16,
        max_requests_per_batch=6,
        max_blocks_per_request=4,
        safety_margin=0.0,
    )


def vllm_options(*, max_model_len: int = 2 * LONGEST, num_blocks: int = 17) -> VllmOptions:
    sizes = {"block_size": 4, "num_blocks": num_blocks, "max_model_len": max_model_len}
    return VllmOptions(**sizes, max_num_seqs=6, max_num_batched_tokens=16)


def serve_options(name: str, **given: Any) -> ServeOptions[Any]:
    return ServeOptions(OURS[name].settings(**given), block_size=4, num_blocks=24, max_model_len=2 * LONGEST)


OPTIONS: dict[str, Any] = {
    "contiguous": ContiguousOptions(
        placement="best_fit",
        block_size=4,
        num_blocks=16,
        max_model_len=2 * LONGEST,
        max_num_seqs=6,
        max_num_batched_tokens=16,
    ),
    "faster_transformer": serve_options("faster_transformer", max_num_seqs=3),
    "orca": serve_options("orca", max_num_seqs=3),
    "sarathi": serve_options("sarathi", max_num_seqs=6, chunk_size=10),
    "simple_chunking": serve_options("simple_chunking", max_num_seqs=6, chunk_size=16),
    "vllm_v0": serve_options("vllm_v0", max_num_seqs=6, max_batched_tokens=2 * LONGEST),
    "dynamic_padded": PaddedOptions(name="dynamic_padded", filled=True, batch_size=3, block_size=4, num_blocks=16),
    "static": PaddedOptions(name="static", batch_size=3, block_size=4, num_blocks=48),
    "tgi": TgiOptions(
        block_size=4, num_blocks=16, max_batch_size=6, max_batch_prefill_tokens=LONGEST, max_batch_total_tokens=64
    ),
    "transformers_fifo": transformers_options("fifo"),
    "transformers_fifo 5.23": transformers_options("fifo", "5.23"),
    "transformers_prefill_first": transformers_options("prefill_first"),
    "trtllm": TrtllmOptions(
        capacity_scheduler_policy="MAX_UTILIZATION",
        enable_chunked_prefill=True,
        chunk_unit_size=4,
        block_size=4,
        num_blocks=16,
        max_seq_len=2 * LONGEST,
        max_batch_size=6,
        max_num_requests=6,
        max_active_requests=8,
        max_num_tokens=16,
    ),
    "vllm": vllm_options(),
}
NAMES = pytest.mark.parametrize("name", OPTIONS)
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


def server(
    workload: Workload,
    cost: Cost,
    *,
    name: str = "vllm",
    options: Any = None,
    depth: int = 1,
    overlap: bool = True,
    graphs: Graphs | None = None,
    copies: Copies | None = None,
    **latencies: int,
) -> Machine:
    """A server that has not run yet; graphs without padding or capture cost unless given; with `copies`, KV moves.
    `latencies`: of the device.
    """
    policy = OURS[name.partition(" ")[0]].make(options or OPTIONS[name])
    record = Record(policy.pool.num_blocks)
    graphs = graphs or Graphs(unpadded, 0)
    mover = partial(Mover, copies, record.transfers, policy.pool.block_size) if copies else None
    device = OneGpu(cost, Timing(depth, overlap, **latencies), mover)
    return Machine(policy, cost, graphs, device, Inbox(workload, record), record, depth)


def run(machine: Machine, on_step: Callable[[int], None] | None = None) -> Steps:
    """Run to the end; the step table."""
    env = simpy.Environment()
    env.process(machine.run(env, on_step))
    env.run()
    return table(machine.record)


def table(record: Record) -> Steps:
    return Steps(np.frombuffer(bytes(record.steps), dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))


def spec(index: int, prompt: int = 1, outputs: int = 1, at: int = 0, **more: Any) -> RequestSpec:
    asked = {"max_tokens": outputs} | more
    return RequestSpec(index, str(index), at, prompt, outputs, **asked)


def load(*specs: RequestSpec, cancels: Sequence[tuple[int, RequestSpec]] = (), follow: Any = None) -> Workload:
    later = len(list(follow.drafts())) if follow else 0
    return Workload(list(specs), len(specs) + later, cancels=list(cancels), follow=follow)


@dataclass(frozen=True)
class Fixed:
    """Every step costs the same, in ns: (schedule, prepare, launch, update), (h2d, compute, d2h), kernel launches."""

    cpu: tuple[int, int, int, int] = (0, 0, 0, 0)
    gpu: tuple[int, int, int] = (0, 0, 0)
    kernels: int = 0

    def cpu_ns(self, plan: StepPlan | None) -> tuple[int, int, int, int]:
        return self.cpu

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        return self.gpu if tokens else (0, 0, 0)

    @property
    def launch_ns(self) -> int:
        return self.kernels


COSTS = Fixed(cpu=(3, 5, 7, 11), gpu=(2, 40, 4))
STEP = Fixed(gpu=(0, 10, 0))


def check_tokens(steps: Steps, runs: Sequence[Sequence[int]]) -> None:
    """A step delivers the tokens that it sampled, but for those of wasted rows, of which not all sampled."""
    delivered = np.zeros(len(steps), dtype=np.int64)
    for first, count in (run for row in runs for run in zip(row[::2], row[1::2], strict=True)):
        delivered[first : first + count] += 1
    sampled, wasted = steps["sampled_rows"], steps["wasted_rows"]
    assert (sampled - wasted <= delivered).all()
    assert (delivered <= np.minimum(sampled, steps["rows"] - wasted)).all()


def statuses(machine: Machine) -> dict[str, str]:
    return {row.id: row.status for row in requests_of(machine.record)}
