"""Golden traces of TensorRT-LLM's Python schedulers: the replayed lines for the same workload, on the same clock.

The format, and the executor loop with its virtual clock, are described beside the traces: one step in flight, times are
integer microseconds. The classes that were recorded are rewritten from the text of the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbsim.conformance.reader import Case, Line, Reader, Replay, by_arrival, due, header_fields, not_modelled
from cbsim.policy.loop import Applied, Await, Completed, Launch, Poll, Polled
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Row, StepPlan, StepResult
from cbsim.policy.request import Request, Status
from cbsim.schedulers.trtllm.scheduler import TrtllmScheduler
from cbsim.schedulers.trtllm.settings import TrtllmOptions

SIZES = ("block_size", "num_blocks", "max_num_requests", "max_batch_size", "max_num_tokens")
CONFIG = frozenset([*SIZES, "policy", "max_active", "chunking", "two_step_lookahead", "timing"])
POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")
CHUNKING = ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")


def unsupported(config: Line) -> str | None:
    """Return why the policy does not model a configuration, None if it does."""
    if config["policy"] not in POLICIES:
        return f"policy {config['policy']} is not modelled"
    if config["chunking"] and config["chunking"][0] not in CHUNKING:
        return f"chunking {config['chunking'][0]} is not modelled"
    return None


def options(config: Line) -> TrtllmOptions:
    """Return the scheduler options of a workload's `config`."""
    chunking: Any
    chunking, unit = config["chunking"] or ("FIRST_COME_FIRST_SERVED", 1)
    return TrtllmOptions(
        capacity_scheduler_policy=config["policy"],
        **{name: config[name] for name in SIZES},
        max_active_requests=config["max_active"],
        max_seq_len=config["num_blocks"] * config["block_size"],
        enable_chunked_prefill=config["chunking"] is not None,
        context_chunking_policy=chunking,
        chunk_unit_size=unit,
        two_step_lookahead=config.get("two_step_lookahead", False) and config["policy"] == "MAX_UTILIZATION",
    )


class Fitting(Observer):
    """An observer of the requests that fit in the cache."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def fitting(self, requests: Sequence[Request]) -> None:
        self.ids = [int(request.spec.id) for request in requests]


class TrtllmReplay(Replay):
    """The replay of one workload; the last line is the summary."""

    scheduler: TrtllmScheduler

    def __init__(self, config: Line, workload: Line) -> None:
        self._heard = Fitting()
        super().__init__(TrtllmScheduler(options(config), self._heard))
        self._timing = config["timing"]
        self._coming = by_arrival(workload)[::-1]
        self._taken: set[int] = set()  # requests taken from the queue
        self._rows: list[Row] = []

    def _end(self) -> None:
        self._written.append({"ev": "summary", "steps": self._steps, "end_us": self._now})

    def _poll(self, effect: Poll) -> Polled:
        if effect.wait and self._coming:
            self._now = max(self._now, self._coming[-1].arrival_ns)
        return Polled(due(self._coming, self._now, lambda spec: spec.arrival_ns), closed=not self._coming)

    def _launch(self, effect: Launch) -> int:
        self._written += [*self._paused(effect.plan), self._schedule(effect.plan)]
        end: int = self._now + self._timing["base_us"] + self._timing["per_token_us"] * effect.plan.work.tokens
        return end

    def _await(self, effect: Await) -> Completed:
        self._now = effect.ticket
        return Completed(StepResult())

    def _paused(self, plan: StepPlan) -> list[Line]:
        lines = []
        for spec, cached, blocks in plan.changes.preempted:
            request = self.scheduler.requests[spec]
            lost = {"ev": "pause", "step": plan.step + 1, "id": int(spec.id), "cached": cached, "blocks": blocks}
            lines.append(lost | {"prompt": request.known, "left": request.limit - request.seen})
        return lines

    def _schedule(self, plan: StepPlan) -> Line:
        self._steps += 1
        self._rows = self._batch.rows(plan)
        scheduler, queue = self.scheduler, {*self.scheduler.queue}
        active = [int(request.spec.id) for request in scheduler.requests.values() if request not in queue]
        added = [one for one in active if one not in self._taken]
        self._taken.update(added)
        return {
            "ev": "schedule",
            "step": plan.step + 1,
            "t": self._now,
            "added": added,
            "fitting": self._heard.ids,
            "paused": [int(paused.spec.id) for paused in plan.changes.preempted],
            "total": plan.work.tokens,
            "reqs": [self._row(row, i < plan.work.lead) for i, row in enumerate(self._rows)],
            "active": active,
            "waiting": [int(request.spec.id) for request in scheduler.queue],
            "free": plan.counts.free_blocks,
        }

    def _row(self, row: Row, reads: bool) -> Line:
        request = self.scheduler.requests[row.spec]
        line = {"id": int(row.spec.id), "kind": "generation", "n": row.tokens, "pos": row.start}
        if reads:
            line |= {"kind": "context", "last": request.status is Status.DECODE}
        return line | {"held": self.scheduler.pool.allocated(request)}

    def _applied(self, effect: Applied) -> None:
        line = {"ev": "update", "step": effect.plan.step + 1, "t": self._now}
        line["tokens"] = [int(row.spec.id) for row in self._rows if row.chunk is None or row.chunk.outputs]
        line["finished"] = [int(spec.id) for spec, _ in effect.outcome.finished]
        self._written.append(line | {"free": self.scheduler.pool.free})


def case(trace: Path, header: Line) -> Case:
    commit, config = header_fields(trace, header, tensorrt_llm_commit=str, config=dict)
    skipped, version = not_modelled(config, CONFIG) or unsupported(config), f"{commit[:7]} restated"
    return Case("trtllm", version, "sync", skipped, lambda recorded: TrtllmReplay(config, recorded))


READER = Reader(lambda header: "tensorrt_llm_commit" in header, case)
