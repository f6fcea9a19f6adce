"""The additional fields of traces of vLLM with speculation: drafts in rows, those verified, and those proposed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cbsim.conformance.reader import Line
from cbsim.policy.kind import Speculation
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.workload.acceptance import Acceptance

BY_ROWS = "num_speculative_tokens_per_batch_size"


def unsupported(config: Line) -> str | None:
    """Return why the policy does not model a workload's `spec`, None if it does."""
    return "speculation with a connector is not modelled" if {"spec", "connector"} <= config.keys() else None


def options(config: Line, *, skips: bool) -> Line:
    """Return the scheduler options of a workload's `spec`, by name."""
    if "spec" not in config:
        return {}
    spec = config["spec"]
    by_rows = tuple((most, drafts) for _, most, drafts in spec.get(BY_ROWS) or ())
    return {"speculation": Speculation(spec["method"], spec["k"], by_rows, skips)}


class DraftLines:
    """The fields of a scheduler that speculates, and the recording's executor: a verification, which no row of an
    admission is, accepts the next of a request's declared numbers, a proposal has the next declared length.
    """

    def __init__(self, scheduler: VllmScheduler, workload: Line, requests: Iterable[RequestSpec]) -> None:
        self._scheduler, self._async = scheduler, scheduler.options.async_scheduling
        self._declared = {r["id"]: r for r in workload["requests"]}
        accept = {spec.index: self._declared[spec.id]["accept"] for spec in requests}
        self._acceptance = Acceptance(0, lambda _: (), accept)
        self._proposed: dict[str, int] = {}
        self.took: dict[RequestSpec, int] = {}  # tokens of the rows with drafts of the newest result
        self._accepted: dict[int, list[list[Any]]] = {}  # by step: [id, drafts, accepted]

    def effective(self) -> Line:
        speculation = self._scheduler.options.speculation
        assert speculation is not None
        ahead, hashed = speculation.ahead, self._scheduler.pool.hashed_ahead
        line = {"method": speculation.method, "k": speculation.k, "lookahead": ahead, "draft_slots": speculation.slots}
        drops = speculation.hashed_ahead > hashed  # the last block of a hit, which without a cache there is not
        line |= {"hash_lookahead": hashed, "eagle_block_drop": drops, "prefill_lookahead": speculation.hashed_ahead}
        return line | {"can_skip_drafts": speculation.skips and bool(ahead)}

    def row(self, row: Row) -> Line:
        drafts = row.chunk.outputs - 1 if row.chunk else 0
        return {"draft": drafts} if drafts > 0 else {}

    def planned(self) -> Line:
        speculation, drafting = self._scheduler.options.speculation, self._scheduler.drafting
        assert speculation is not None
        skipped = speculation.skips and speculation.ahead > 0 and not drafting
        return {"k": self._scheduler.drafts, "skip_drafts": skipped}

    def launched(self, plan: StepPlan) -> None:
        """Verify the drafts of a step."""
        accepted = self._accepted[plan.step] = []
        for chunk in plan.work.chunks:
            if (drafts := chunk.outputs - 1) > 0:
                true = 0 if chunk.admitted else self._acceptance.row(chunk.spec, 0, drafts)
                accepted.append([chunk.spec.id, drafts, true])

    def accepted(self, plan: StepPlan) -> tuple[tuple[RequestSpec, int], ...]:
        """Return how many drafts of each row came true. `took` has its tokens, up to the last one of its request."""
        true = {name: count for name, _, count in self._accepted[plan.step]}
        requests = self._scheduler.requests
        rows = [(requests[c.spec], true[c.spec.id]) for c in plan.work.chunks if c.outputs > 1 and c.spec in requests]
        self.took = {request.spec: min(1 + count, request.last - request.seen) for request, count in rows}
        return tuple([(request.spec, count) for request, count in rows])

    def drafted(self, plan: StepPlan) -> tuple[tuple[RequestSpec, int], ...]:
        """Return the drafts that a step proposes, where they are declared."""
        counts = []
        for chunk in plan.work.chunks:
            declared = self._declared[chunk.spec.id].get("drafts")
            if chunk.outputs and declared and self._scheduler.drafts:
                at = self._proposed[chunk.spec.id] = self._proposed.get(chunk.spec.id, -1) + 1
                counts.append((chunk.spec, min(declared[at % len(declared)], self._scheduler.drafts)))
        return tuple(counts)

    def updated(self, plan: StepPlan) -> Line:
        alive = [self._scheduler.requests[c.spec] for c in plan.work.chunks if c.spec in self._scheduler.requests]
        progress = [[r.spec.id, r.computed, *([r.scheduled - r.seen] if self._async else [])] for r in alive]
        return {"verified": self._accepted.pop(plan.step), "computed": progress}

    def proposed(self, plan: StepPlan) -> Line | None:
        """Return the line on the drafts that wait to be verified, which only a synchronous engine hands over."""
        if self._async or not plan.work.rows:
            return None
        waiting = [[r.spec.id, r.drafts] for r in self._scheduler.running if r.drafts]
        return {"ev": "drafts", "step": plan.step + 1, "spec": waiting}
