"""What traces of vLLM's prefill and decode side say: what comes and goes, and when, by the clock of the recording."""

from __future__ import annotations

from typing import Any

from cbsim.policy.moves import Underway, Way
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.policy.schedulers.vllm_hand_off import HandOff
from cbsim.policy.schedulers.vllm_transfers import Transfers

Line = dict[str, Any]
LATENCY = {Way.IN: "recv_us", Way.OUT: "send_us"}


class Wire:
    """Transfers take as long as their requests say, from the start of the step that ordered them; the first step that
    ends then, or that one itself, reports them. Of some blocks that are to come, nothing does.
    """

    def __init__(self, block_size: int, workload: Line) -> None:
        self._underway = Underway(block_size)
        self._requests = {request["id"]: request for request in workload["requests"]}
        self._due: dict[int, int] = {}  # job -> time
        self._bad: dict[int, tuple[int, ...]] = {}  # job -> blocks
        self._reports: dict[int, tuple[int, ...]] = {}  # step -> jobs
        self.broken: tuple[int, ...] = ()  # as reported last

    def planned(self, plan: StepPlan) -> None:
        self._underway.planned(plan)

    def lasts(self, plan: StepPlan, start: int, end: int) -> None:
        for move in plan.moves:
            assert move.spec is not None
            request = self._requests[move.spec.id]
            self._due[move.job] = start + int(request.get(LATENCY[move.way], 0))
            if move.way is Way.IN:
                bad = request.get("fail_blocks", ())
                self._bad[move.job] = tuple(block for i, block in enumerate(move.targets) if i in bad)
        over = sorted([job for job, at in self._due.items() if at <= end], key=lambda job: (self._due[job], job))
        self._reports[plan.step] = tuple(over)
        for job in over:
            del self._due[job]

    def over(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The jobs that the result of a step names, and the blocks that were broken."""
        jobs = self._reports.pop(step)
        self._underway.landed(jobs)
        self.broken = tuple(block for job in jobs for block in self._bad.pop(job, ()))
        return jobs, self.broken


class HandOffLines:
    """What schedule and update lines say of the transfers of either side."""

    def __init__(self, transfers: Transfers, block_size: int, workload: Line) -> None:
        assert isinstance(transfers.connector, HandOff)
        self.workers = Wire(block_size, workload)
        self._transfers, self._connector = transfers, transfers.connector
        self._sending: dict[int, str] = {}  # job -> id

    def jobs(self, plan: StepPlan) -> Line:
        said: Line = {"recv": [], "send": []}
        for move in plan.moves:
            assert move.spec is not None
            if move.way is Way.IN:
                said["recv"].append([move.spec.id, list(move.targets)])
            else:
                said["send"].append([move.spec.id, len(move.sources)])
                self._sending[move.job] = move.spec.id
        return said

    def done(self, step: int, jobs: tuple[int, ...]) -> Line:
        del step
        dead = [request for request, load in self._transfers.loads.items() if load.dead]
        kept = sorted([request.spec for request in [*self._connector.kept, *dead]], key=_arrival)
        return {
            "sent": [self._sending.pop(job) for job in jobs if job in self._sending],
            "bad": sorted(self.workers.broken),
            "kept": [spec.id for spec in kept],
        }

    def tier(self) -> Line:
        return {}


def _arrival(spec: RequestSpec) -> tuple[int, int]:
    return spec.arrival_ns, spec.index
