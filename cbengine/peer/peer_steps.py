"""What transformers' batch processor does, step by step, seen from outside.

The library's code runs as it is; the clock is read where one of its methods begins or returns:

    schedule   prepare_next_batch until a batch has been chosen, victims of a full cache included
    prepare    the rest of it: building the tensors; on a GPU the synchronous loop copies them there
    launch     _generation_step, until it blocks (sync) or returns (async); on a CPU that is the computation
    await      until the tokens are a list
    update     the rest of update_batch
    compute    between two marks round the model runner's compute_batch, on a GPU events on its stream

Bookkeeping of ours lies between the phases, where it can while the GPU computes. Copies are not timed: they show as
moments at the edges of compute. The table obeys every rule of `cbsim.results.invariants` at depth 1 and 2; on a CPU the
second step in flight is one whose result has not been looked at yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.requests import RequestStatus

from cbengine.device.faults import STUCK_S, Watchdog
from cbengine.peer.peer_device import CudaClock, HostClock, PeerError
from cbsim.policy.plan import Chunk, Outcome, Preempted, StepChanges, StepCounts, StepPlan, StepWork
from cbsim.policy.request import Finish, RequestSpec
from cbsim.results.record import StepTimes


class PeerRequest:
    """Progress of a request: those fields of a policy's Request that a Record reads, and no more, because a row of it
    is noted in every step.
    """

    __slots__ = (
        "_span",
        "_spans",
        "cached",
        "decoding",
        "finish",
        "fresh",
        "high_water",
        "order",
        "preemptions",
        "spec",
    )

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.order = -1
        self.fresh = True  # it has had no row since it was queued or preempted
        self.decoding = False  # a row planned since then samples
        self.cached: int | None = None
        self.preemptions = self.high_water = 0
        self.finish: Finish | None = None
        self._span = [-1, -1]  # the last of `_spans`, [first step, step after the last]
        self._spans: list[list[int]] = []

    @property
    def seen(self) -> int:
        return sum(stop - first for first, stop in self._spans)

    def delivered(self) -> list[list[int]]:
        """[first step, steps] of the tokens received."""
        return [[first, stop - first] for first, stop in self._spans]

    def row(self, future: Any, start: int, order: int) -> Chunk:
        """A row that does not merely go on decoding; `order` is its own from now on if it is the first."""
        first, self.fresh = self.fresh, False
        self.decoding, tokens = future.has_new_token, future.query_length
        if first:
            self.order = order
            self.cached = start if self.cached is None else self.cached
        return Chunk(
            self.spec,
            self.order,
            start,
            tokens,
            (),
            outputs=int(self.decoding),
            admitted=first,
            resumed=first and self.preemptions > 0,
            cached=start if first else 0,
            recomputed=max(0, min(self.high_water, start + tokens) - start),
        )

    def receive(self, step: int) -> None:
        if self._span[1] != step:
            self._span = [step, step]
            self._spans.append(self._span)
        self._span[1] = step + 1

    def requeue(self, computed: int) -> None:
        """It lost its blocks, `computed` tokens with them."""
        self.high_water = max(self.high_water, computed)
        self.fresh, self.decoding = True, False
        self.preemptions += 1

    def end(self) -> Finish:
        """Its declared last token has come."""
        self.finish = Finish.LENGTH if self.spec.output_tokens == self.spec.max_tokens else Finish.STOP
        return self.finish


class Flight(NamedTuple):
    """A step whose result has not been applied: the library's rows with ours, marks before and after its kernels."""

    plan: StepPlan
    times: StepTimes
    rows: list[tuple[Any, PeerRequest]]
    before: Any
    after: Any


class Watch:
    """Wraps a batch processor. `served` gives the request of a name, `outputs` gets the tokens of those that end;
    `now_ns` is the run's clock, which began at `epoch_ns`. `poll` is called before every batch, `launched` and
    `applied` for every step.
    """

    def __init__(
        self,
        processor: Any,
        served: Mapping[str, PeerRequest],
        outputs: dict[RequestSpec, list[int]],
        now_ns: Callable[[], int],
        *,
        poll: Callable[[], None],
        launched: Callable[[StepPlan], None],
        applied: Callable[[StepPlan, Outcome, StepTimes], None],
    ) -> None:
        self.stalled = False  # requests are there, and no batch could be made of them
        self.epoch_ns = 0
        self._processor, self._served, self._outputs, self._now_ns = processor, served, outputs, now_ns
        self._poll, self._launched, self._applied = poll, launched, applied
        self._ahead: bool = processor.use_async_batching
        self._flights: deque[Flight] = deque()
        self._times = StepTimes(0)
        self._steps = self._orders = self._scheduled_ns = self._new_blocks = 0
        self._fast = False
        self._preempted: list[Preempted] = []
        self._before = self._after = None
        cuda = processor.model_device.type == "cuda"
        self._clock: Any = CudaClock(processor.inputs_and_outputs.compute_stream) if cuda else HostClock()
        self._guard: Any = Watchdog(STUCK_S) if cuda else nullcontext()
        self._wrap()

    def close(self) -> None:
        self._flights.clear()
        if isinstance(self._guard, Watchdog):
            self._guard.close()

    def _wrap(self) -> None:
        """In the order in which the library calls them."""
        p = self._processor
        for owner, name, around in (
            (p, "prepare_next_batch", self._prepare),
            (p.cache, "allocate_blocks", self._allocate),
            (p.scheduler, "schedule_batch", self._schedule),
            (p.offloading_manager, "offload_requests", self._offload),
            (p.model_runner, "compute_batch", self._compute),
            (p.model_runner, "_capture_graph", self._capture),
            (p.inputs_and_outputs, "retrieve_device_outputs", self._retrieve),
            (p, "update_batch", self._update),
            (p.inputs_and_outputs, "prepare_batch_update", self._await),
        ):
            setattr(owner, name, partial(around, getattr(owner, name)))

    def _prepare(self, original: Callable[[], bool]) -> bool:
        self._poll()
        self._new_blocks, self._preempted = 0, []
        self._times = times = StepTimes(self._now_ns())
        ready = original()
        self.stalled = not ready and self._processor.has_pending_requests()
        if ready:
            times.schedule_end_ns = times.prepare_start_ns = self._scheduled_ns
            times.prepare_end_ns = times.launch_start_ns = self._now_ns()
        return ready

    def _allocate(self, original: Callable[..., int | None], *given: Any) -> int | None:
        allocated = original(*given)
        self._new_blocks += allocated or 0
        return allocated

    def _schedule(self, original: Callable[..., Any], *budgets: int) -> Any:
        answer = original(*budgets)
        self._fast, self._scheduled_ns = bool(answer[1]), self._now_ns()
        return answer

    def _offload(self, original: Callable[[], int]) -> int:
        """Its victims are among the requests that starved; a new object takes each one's place in the queue."""
        starved = [state for state, _ in self._processor.scheduler.starved_requests]
        victims = original()
        for state in starved:
            if state.status is RequestStatus.FINISHED:
                served = self._served[state.request_id]
                served.requeue(state.position_offset)
                self._preempted.append(Preempted(served.spec, state.position_offset, state.allocated_blocks))
        self._scheduled_ns = self._now_ns()
        return victims

    def _compute(self, original: Callable[..., None], *given: Any) -> None:
        self._before, self._after = self._clock.mark(), None
        original(*given)
        self._after = self._after or self._clock.mark()

    def _capture(self, original: Callable[..., None], forward: Callable[..., None], *given: Any) -> None:
        """A shape that has no graph yet is run before it is captured: capturing is no computing."""

        def run(*inputs: Any) -> None:
            forward(*inputs)
            if not torch.cuda.is_current_stream_capturing():
                self._after = self._clock.mark()

        original(run, *given)

    def _retrieve(self, original: Callable[[], None]) -> None:
        """The kernels are on their way: noting the plan costs the GPU nothing here."""
        ios, times = self._processor.inputs_and_outputs, self._times
        if self._ahead:
            host = ios.io_pairs[ios.current_pair].host_io  # `original` goes over to the other pair
            original()
            times.launch_end_ns = self._now_ns()
            self._launch(host)
        else:
            times.launch_end_ns = self._now_ns()
            self._launch(ios)
            times.await_start_ns = self._now_ns()
            with self._guard:
                original()

    def _update(self, original: Callable[[], None]) -> None:
        if not self._flights:  # the asynchronous loop asks for a last result, even if no batch ever ran
            original()
            return
        flight = self._flights[0]
        live = [row for row in flight.rows if _worth(*row)] if self._ahead else flight.rows
        original()
        flight.times.update_end_ns = self._now_ns()
        self._flights.popleft()
        step = flight.plan.step
        for future, served in live:
            if future.has_new_token:
                served.receive(step)
        self._time_kernels(flight)
        self._applied(flight.plan, Outcome((), self._finished(), len(flight.rows) - len(live)), flight.times)

    def _finished(self) -> tuple[tuple[RequestSpec, Finish], ...]:
        """The requests whose last token the library has just handed out."""
        results, finished = self._processor.output_router.output_queue, []
        while not results.empty():
            result = results.get_nowait()
            served = self._served[result.request_id]
            if result.error is not None:
                raise PeerError(f"request {served.spec.id}: {result.error}")
            if served.finish is None:  # a cancelled one may be finished behind its client's back
                self._outputs[served.spec] = result.generated_tokens
                finished.append((served.spec, served.end()))
        return tuple(finished)

    def _await(self, original: Callable[[], Any]) -> Any:
        if not self._flights:
            return original()
        times = self._flights[0].times
        if self._ahead:
            times.await_start_ns = self._now_ns()
        with self._guard:
            answer = original()
        times.await_end_ns = times.update_start_ns = self._now_ns()
        return answer

    def _time_kernels(self, flight: Flight) -> None:
        times, epoch_ns = flight.times, self.epoch_ns
        start, end = self._clock.interval(flight.before, flight.after, times.await_end_ns + epoch_ns)
        times.h2d_start_ns = times.h2d_end_ns = times.compute_start_ns = start - epoch_ns
        times.compute_end_ns = times.d2h_start_ns = times.d2h_end_ns = end - epoch_ns

    def _launch(self, host: Any) -> None:
        """Note the batch that `host`, the library's inputs, holds. Its plan says what a record counts; no executor
        could follow it, because it names no blocks and does not say who decodes.
        """
        p, rows, chunks = self._processor, [], []
        decodes = context = blocks = lead = 0
        for future in host.requests_in_batch:
            state = future.state
            served, start = self._served[state.request_id], state.position_offset - future.query_length
            rows.append((future, served))
            blocks += state.allocated_blocks
            if served.decoding:
                decodes += 1
                context += start
            else:
                lead += not decodes
                chunks.append(served.row(future, start, self._orders))
                self._orders += chunks[-1].admitted
        work = StepWork(
            chunks=tuple(chunks),
            lead=lead,
            decodes=decodes,
            decode_context=context,
            prefill_tokens=sum([chunk.tokens for chunk in chunks]),
            fast_decode=self._fast,
        )
        counts = StepCounts(
            table_blocks=blocks,
            new_blocks=self._new_blocks,
            running=len(p.scheduler.active_requests),
            waiting=len(p.scheduler.waiting_requests),
            free_blocks=p.cache.get_num_free_blocks(),
            cached_blocks=len(p.cache._block_manager._init_block_ids),
        )
        plan = StepPlan(self._steps, work, StepChanges(preempted=tuple(self._preempted)), counts)
        self._steps += 1
        self._times.padded_tokens = host.num_q_tokens
        self._launched(plan)
        self._flights.append(Flight(plan, self._times, rows, self._before, self._after))


def _worth(future: Any, served: PeerRequest) -> bool:
    """Has its request neither ended nor lost its blocks since the row was planned?"""
    return served.finish is None and future.state.status is not RequestStatus.FINISHED
