"""Data-parallel servers whose GPUs exchange tokens in every layer, so that they step together.

Every rank is a server of its own, with its queue, its cache and its loop. A wave is one step of all of them: it starts
when every rank that has something to run has launched it, takes as long as the slowest, and ends for all at once. A
rank without requests takes part with a dummy token; one that gets its first request after the others have planned their
step waits for the next wave. Where all steps have a CUDA graph, all ranks are padded to the largest, else none is; only
with `mixed` have steps with prompts such graphs.
Waves are numbered, so that all ranks can prefill in the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import simpy

from cbsim.machine.device import Device
from cbsim.machine.graphs import Shape
from cbsim.policy.captures import alike
from cbsim.policy.loop import Scheduler
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record.record import StepTimes
from cbsim.runs.inbox import Inbox

WAITING_WEIGHT = 4


class WaveCost(Protocol):
    """The time that a step of all ranks takes on the GPUs."""

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: Sequence[int]) -> int:
        """Return the kernels' ns: of the query tokens that each rank computes, those of `plans` first."""


class _Launched(NamedTuple):
    plan: StepPlan
    shape: Shape
    ready_ns: int
    times: StepTimes
    event: simpy.Event


class Lockstep:
    """A group of `ranks` GPUs that step together. Copies to and from the device take no time."""

    def __init__(self, env: simpy.Environment, cost: WaveCost, ranks: int, *, mixed: bool = True) -> None:
        self.env = env
        self._mixed = mixed
        self.ranks = [Rank(self) for _ in range(ranks)]
        self.waves = 0
        self._cost = cost
        self._free_ns = 0

    def advance(self) -> None:
        """Run every wave that can no longer change."""
        while any(rank.launched for rank in self.ranks):
            if not all(rank.launched or rank.resting for rank in self.ranks):
                return
            self._wave([rank.launched.popleft() for rank in self.ranks if rank.launched])

    def _wave(self, steps: Sequence[_Launched]) -> None:
        self.waves += 1
        start = max(self._free_ns, *(step.ready_ns for step in steps))
        took = self._cost.lockstep_ns([step.plan for step in steps], self._tokens(steps))
        end = start + self.ranks[0].contended_kernels_ns(max([step.times.launch_end_ns for step in steps]), took)
        self._free_ns = end = max(end, *(step.times.launch_end_ns for step in steps))  # the last kernel is launched
        for rank in self.ranks:
            rank.kernels_end_ns = end
        for step in steps:
            _fill(step.times, start, end)
            step.event.succeed()

    def _tokens(self, steps: Sequence[_Launched]) -> list[int]:
        """Return the query tokens that every rank computes, those of `steps` first."""
        tokens = [step.shape.tokens for step in steps] + [1] * (len(self.ranks) - len(steps))
        padded = all(not step.shape.eager and (self._mixed or alike(step.plan)) for step in steps)
        return [max(tokens)] * len(tokens) if padded else tokens


def _fill(times: StepTimes, start_ns: int, end_ns: int) -> None:
    times.h2d_start_ns = times.h2d_end_ns = times.compute_start_ns = start_ns
    times.compute_end_ns = times.d2h_start_ns = times.d2h_end_ns = end_ns


class Rank(Device):
    """A GPU of the group, as its server's device."""

    def __init__(self, group: Lockstep) -> None:
        super().__init__(None)
        self._group = group
        self.next_wave = 0  # after that of the last step with rows
        self.launched: deque[_Launched] = deque()  # not part of a wave yet
        self._rests = False
        self._until: simpy.Event | None = None
        self._pending: dict[int, simpy.Event | None] = {}  # by identity of the step's times; None: of an empty step
        self._completed_ns = 0

    def launch(self, plan: StepPlan, shape: Shape, times: StepTimes) -> None:
        self._rests = False
        if not plan.work.rows:  # nothing runs on the device: it is over with the step before it
            self._pending[id(times)] = None
            return
        self.next_wave = self._group.waves + len(self.launched) + 1
        event = self._pending[id(times)] = self._group.env.event()
        ready_ns = times.launch_start_ns if shape.eager else times.launch_end_ns
        self.launched.append(_Launched(plan, shape, ready_ns, times, event))
        self._group.advance()

    def completion(self, times: StepTimes) -> simpy.Event | None:
        event = self._pending[id(times)]
        if event is not None and not event.triggered:
            return event
        del self._pending[id(times)]
        if event is None:
            at_ns = max(times.launch_end_ns, self._completed_ns)
            _fill(times, at_ns, at_ns)
        self._completed_ns = times.d2h_end_ns
        return None

    def rest(self, until: simpy.Event | None) -> None:
        self._rests, self._until = True, until
        self._group.advance()

    @property
    def resting(self) -> bool:
        """Whether no request has arrived since the last one ended."""
        return self._rests and not (self._until and self._until.triggered)


class Balance:
    """The choice of a server for each request and sample, by the load of all when it arrives. It is part of a server,
    and no router: it knows the schedulers themselves.

    waiting first     least 4 x waiting + running (vLLM 0.19)
    fewest by turns   fewest requests, of which waiting ones count up to four times beside a cache that is more than
                      half full; looked for from another server on each time (vLLM 0.33)
    turns             one after the other (SGLang's round_robin, its default)
    fewest tokens     least tokens of prompts and outputs, of servers that have fewer requests than the one with most,
                      or of all if they have equally many (TensorRT-LLM)

    vLLM's clients know counts that are up to 0.1 s old; here they are current.
    """

    def __init__(self, rule: str, inboxes: Sequence[Inbox], servers: Sequence[Scheduler]) -> None:
        self._rule, self._servers = rule, list(zip(servers, inboxes, strict=True))
        self._turn = 0

    def __call__(self, spec: RequestSpec, now_ns: int) -> int:
        """Return the index of the server of a request that arrives now."""
        del spec, now_ns
        count, first = len(self._servers), self._turn if self._rule in ("turns", "fewest by turns") else 0
        self._turn = (self._turn + 1) % count
        order = [(first + i) % count for i in range(count)]
        return first if self._rule == "turns" else min(order, key=self._loads().__getitem__)

    def _loads(self) -> list[tuple[float, ...]]:
        waiting = [len(server.waiting) + len(inbox) for server, inbox in self._servers]
        present = [count + len(server.running) for count, (server, _) in zip(waiting, self._servers, strict=True)]
        loads: list[tuple[float, ...]] = []
        for wait, count, (server, _) in zip(waiting, present, self._servers, strict=True):
            if self._rule == "waiting first":
                loads.append((count + (WAITING_WEIGHT - 1) * wait,))
            elif self._rule == "fewest by turns":
                loads.append((count + 6 * wait * max(0.0, 0.5 - server.pool.free / server.pool.num_blocks),))
            else:
                tokens = sum([each.spec.prompt_tokens + each.scheduled for each in server.requests.values()])
                loads.append((min(present) < max(present) == count, tokens, count))
        return loads


class Gate:
    """Whether servers prefill in a wave, by TensorRT-LLM's balance of attention DP: if all have prompts to compute, or
    one generates nothing, or after `most` waves; if all have some, after `more` waves. Always if `most` is 0. Its ranks
    tell each other before each step. Here the first server that plans a wave with a prompt decides for all, by what the
    others have by then.
    """

    def __init__(self, servers: Sequence[Scheduler], inboxes: Sequence[Inbox], most: int, more: int) -> None:
        self._servers, self._most, self._more = list(zip(servers, inboxes, strict=True)), most, more
        self._ready = 0  # waves in which all have had prompts since the last that was waited for
        self._since = self._decided = -1  # the last wave in which prompts need not wait, and the last decided on
        self._opens = True

    def __call__(self, wave: int, generates: bool) -> bool:
        if wave > self._decided or not generates:
            self._decided = wave
            ready = all(len(server.waiting) + len(inbox) for server, inbox in self._servers)
            generating = generates and all(len(server.running) for server, _ in self._servers)
            patient = self._ready < self._more if ready else wave - self._since < self._most
            self._opens = not (self._most and generating and patient)
            if ready and generating:
                self._ready = 0 if self._opens else self._ready + 1
            if self._opens or ready:
                self._since = wave
        return self._opens
