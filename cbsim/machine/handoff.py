"""Prefill and decode apart: requests in two legs at two servers, and their KV on its way from one to the other.

A leg is the request as a server gets it (`policy.request.leg`). The scheduler of the server that prefilled orders a job
that keeps the blocks, that of the server which decodes one for the blocks that it has taken. The transfer starts when
both are ordered; when it is over, or cannot be made any more, both servers hear of it with their next result. So no
block is handed out while a transfer reads or writes it, whatever becomes of the request or of a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import simpy

from cbsim.cost.base import Copies, Lane
from cbsim.errors import DeadlockError
from cbsim.machine.device import Mover
from cbsim.machine.driver import Machine
from cbsim.machine.front import Choice, Front, at
from cbsim.machine.scaling import Replica, Scaled, State
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import DECODE, PREFILL, RequestSpec, leg
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from cbsim.record.columns import NS
from cbsim.record.optional_tables import BROKEN, ENDED, FETCHED, LEASE_OVER, UNDER_WAY
from cbsim.record.record import TransferLog
from cbsim.routers.base import Router
from cbsim.runs.inbox import NEVER_NS
from cbsim.scenario.fleet import Link
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

NONE_YET = -1
ANY = 1 << 60  # number of retries


class Side(Mover):
    """The KV transfers of a server with a role. One with a job is a side of a hand-off: `on_order` hears of it when its
    plan is launched, and `end` is called when it is over.
    """

    def __init__(self, copies: Copies, log: TransferLog, block_size: int, kv_in: Lane, kv_out: Lane) -> None:
        super().__init__(copies, log, block_size, kv_in, kv_out)
        self.env: simpy.Environment | None = None
        self.on_order: Callable[[Transfer], None] | None = None
        self._missing: dict[int, tuple[int, ...]] = {}  # blocks of finished jobs that were not filled

    def before(self, plan: StepPlan, at_ns: int) -> int:
        self._underway.planned(plan)
        for index, transfer in enumerate(plan.transfers):
            if transfer.job == IN_ORDER:
                at_ns = self._book(plan, index, at_ns)
                continue
            assert self.on_order is not None
            self.ends[transfer.job] = NEVER_NS
            self._log.moved(plan.step, transfer, at_ns, at_ns)
            self.on_order(transfer)
        return at_ns

    def after(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """Book nothing: the blocks of a hand-off were computed by steps whose results are back."""

    def end(self, transfer: Transfer, start_ns: int, end_ns: int, *, broken: bool) -> None:
        """Let the next result say that a job is over; a transfer that was not made has no length."""
        assert self.env is not None
        self.ends[transfer.job] = end_ns
        self._log.timed(transfer.job, end_ns if start_ns == NONE_YET else start_ns, end_ns)
        if broken and transfer.direction is Direction.IN:
            self._missing[transfer.job] = transfer.targets
        news, self.news = self.news, self.env.event()
        if news is not None:
            news.succeed()

    def broken(self, jobs: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([block for job in jobs for block in self._missing.pop(job, ())])


@dataclass(eq=False, slots=True)
class OneHandOff:
    """The hand-off of a request, sent as `spec`, from its source, which prefills, to its target, which decodes."""

    spec: RequestSpec
    prefill: RequestSpec
    decode: RequestSpec
    source: Replica
    target: Replica
    out: Transfer | None = None  # of the source's blocks, until the source is told that it is over
    into: Transfer | None = None  # of the target's
    fate: int = UNDER_WAY
    began_ns: int = NONE_YET  # start of the first kernels of its prefill, where that matters
    left: float = 1.0  # share of the KV that goes over after the prefill
    prefilled_ns: int = NONE_YET
    taken_ns: int = NONE_YET
    start_ns: int = NONE_YET
    end_ns: int = NONE_YET
    blocks: int = 0
    size: int = 0  # bytes that go over after the prefill
    fixed_ns: int = 0  # of the transfer, before its bytes


@dataclass(slots=True)
class Flow:
    """The bytes of a transfer that were left at a time, the rate since then in bytes a nanosecond, and its end."""

    left: float
    since_ns: int
    rate: float = 0.0
    end_ns: int = NEVER_NS


class Wire:
    """The NICs of all servers, each sending and receiving at a rate. `over` is called when a transfer has ended."""

    def __init__(self, env: simpy.Environment, link: Link, over: Callable[[OneHandOff], None]) -> None:
        self._env, self._over = env, over
        self._rate, self._most = link.bandwidth_gb_s, link.most  # GB/s are bytes a nanosecond
        self._waiting: list[OneHandOff] = []
        self._active: dict[OneHandOff, Flow | None] = {}  # no flow before its bytes
        self._changes = 0

    def carry(self, one: OneHandOff) -> None:
        """Start a transfer as soon as both NICs have room, and no earlier one waits for either."""
        self._waiting.append(one)
        self._start()

    def drop(self, one: OneHandOff) -> None:
        """Break off a transfer, if it has not ended."""
        if one in self._waiting:
            self._waiting.remove(one)
        elif one in self._active:
            del self._active[one]
            self._share()
        self._start()

    def _start(self) -> None:
        busy = Counter(nic for one in self._active for nic in _nics(one))
        for one in list(self._waiting):
            nics = _nics(one)
            if max(busy[nic] for nic in nics) < self._most:
                self._waiting.remove(one)
                self._active[one], one.start_ns = None, int(self._env.now)
                at(self._env, one.start_ns + one.fixed_ns, partial(self._flows, one))
            busy.update(nics)

    def _flows(self, one: OneHandOff, _: simpy.Event) -> None:
        if one in self._active:
            self._active[one] = Flow(one.size, int(self._env.now))
            self._share()

    def _share(self) -> None:
        """Give each transfer its rate: the lower one of its shares of two NICs."""
        now_ns, flows = int(self._env.now), {one: flow for one, flow in self._active.items() if flow is not None}
        sharing = Counter(nic for one in flows for nic in _nics(one))
        for one, flow in flows.items():
            rate = self._rate / max(sharing[nic] for nic in _nics(one))
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (now_ns - flow.since_ns))
                flow.since_ns, flow.rate = now_ns, rate
                flow.end_ns = now_ns + round(flow.left / rate)
        self._changes += 1
        if flows:
            at(self._env, min(flow.end_ns for flow in flows.values()), partial(self._ends, self._changes))

    def _ends(self, change: int, _: simpy.Event) -> None:
        if change != self._changes:  # rates have changed since
            return
        now_ns = int(self._env.now)
        ended = [one for one, flow in self._active.items() if flow is not None and flow.end_ns <= now_ns]
        for one in ended:
            del self._active[one]
        self._share()
        self._start()
        for one in ended:
            self._over(one)


def _nics(one: OneHandOff) -> Sequence[tuple[str, int]]:
    return ("sends", id(one.source)), ("receives", id(one.target))


class Apart(Scaled):
    """The servers of a fleet with roles, behind two routers: who prefills a request, and who decodes it."""

    def __init__(
        self,
        scenario: Scenario,
        workload: Workload,
        build: Callable[[Scenario, Front], Machine],
        router: Router,
        decodes: Router,
    ) -> None:
        assert scenario.fleet is not None
        assert scenario.fleet.hand_off is not None
        self._terms, self._decodes = scenario.fleet.hand_off, decodes
        self._of: dict[RequestSpec, OneHandOff] = {}  # by leg, of prefills until their KV is free
        super().__init__(scenario, workload, build, router)
        self._wire = Wire(self.env, self._terms.link, partial(self._end_hand_off, fate=FETCHED))

    def _routed(self, router: Router) -> Sequence[Choice]:
        choices = []
        for each, slots in ((router, self._fleet.slots("prefill")), (self._decodes, self._fleet.slots("decode"))):
            choices.append(Choice(each, self, [None] * len(slots), self._fleet.signals, slots))
        return choices

    @property
    def _pulls(self) -> bool:
        return self._terms.transfer == "pull"

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        super().run(on_step)
        if self.is_open():
            raise DeadlockError(f"servers wait for room at each other, in {len(self._under_way())} hand-offs")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _send(self, spec: RequestSpec, now_ns: int) -> None:
        prefills, decodes = self._choices
        if not (prefills.ready and decodes.ready):
            self._unsent.append(spec)
            return
        target, least = self._choose(decodes, spec, now_ns), self._terms.local_below_tokens
        if least and spec.prompt_tokens - decodes.seen(target.slot).cached_tokens(spec) < least:
            self._give(target, spec, spec)
            return
        source = self._choose(prefills, spec, now_ns)
        if source is target:
            self._give(target, spec, spec)
            return
        one = OneHandOff(spec, leg(spec, PREFILL), leg(spec, DECODE), source, target)
        self._of[one.prefill] = self._of[one.decode] = one
        if self._pulls:
            self._give(source, spec, prefills.goes_as(one.prefill, spec))
        else:
            self._give(target, spec, decodes.goes_as(one.decode, spec))

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Go on after a leg, or a request that has no legs."""
        if (replica := self._open.pop(spec, None)) is None:
            return []
        one = self._of.get(spec)
        if one is not None and spec is one.prefill:
            self._prefilled(one, replica, now_ns)
            return []
        self._left_by(replica, now_ns)
        if one is not None:
            del self._of[spec]
            self._later(now_ns, lambda: self._decoded(one))
        self._over(spec if one is None else one.spec, now_ns)
        return []

    def _over(self, spec: RequestSpec, now_ns: int) -> None:
        """Go on after a request, in the books of both routers."""
        for choice in self._choices:
            choice.ended(spec, now_ns)
        self._go_on(self._first.pop(spec, spec), now_ns)

    def _prefilled(self, one: OneHandOff, source: Replica, now_ns: int) -> None:
        """Go on after a prefill, whose blocks its server keeps until they are fetched."""
        assert source.machine is not None
        self._choices[0].ended(one.spec, now_ns)
        record = source.machine.record
        if one.prefill in record.refusals or one.prefill in record.cancels:  # it has no KV
            del self._of[one.prefill]
            self._left_by(source, now_ns)
            if self._pulls:
                del self._of[one.decode]
                self._over(one.spec, now_ns)
            else:
                record.handed_off += 1
                self._later(now_ns, lambda: self._end_hand_off(one, fate=BROKEN))
            return
        record.handed_off += 1
        one.prefilled_ns = now_ns
        if one.began_ns != NONE_YET:
            one.left = self._unsent_share(one, source.machine.completion.compute_end_ns - one.began_ns)
        if self._pulls:
            self._later(now_ns, lambda: self._decode(one))

    def _decode(self, one: OneHandOff) -> None:
        """Send the leg that decodes; if its server has gone, the request is sent again."""
        if one.target.state is State.READY:
            self._give(one.target, one.spec, self._choices[1].goes_as(one.decode, one.spec))
            return
        del self._of[one.decode]
        self._choices[1].ended(one.spec, int(self.env.now))
        self._end_hand_off(one, fate=BROKEN)
        self._again(one.spec, ANY)

    def _decoded(self, one: OneHandOff) -> None:
        """Go on after the leg that decodes: KV that it has not fetched is not needed any more."""
        if one.start_ns == NONE_YET:
            self._end_hand_off(one, fate=ENDED)

    def _later(self, at_ns: int, act: Callable[[], None]) -> None:
        """Act at a time of a server, whose CPU may be ahead of the clock."""
        at(self.env, max(at_ns, int(self.env.now)), lambda _: act())

    # -- hand-offs -----------------------------------------------------------------------------------------------------

    def _ordered(self, replica: Replica, transfer: Transfer) -> None:
        """Note a job as soon as its plan is launched."""
        assert replica.machine is not None
        assert transfer.spec is not None
        one = self._of.get(transfer.spec)
        if one is None:  # its server died or its request ended before
            side(replica).end(transfer, NONE_YET, replica.machine.now_ns, broken=True)
        else:
            self._later(replica.machine.now_ns, partial(self._taken, one, transfer))

    def _taken(self, one: OneHandOff, transfer: Transfer) -> None:
        """Note that a side has the blocks of a job, and start the transfer if both have."""
        now_ns, lease_s = int(self.env.now), self._terms.lease_s
        if transfer.direction is Direction.OUT:
            one.out = transfer
        else:
            one.into, one.taken_ns, one.blocks = transfer, now_ns, len(transfer.targets)
        if lease_s is not None and (one.out is None or one.into is None):
            at(self.env, now_ns + round(lease_s * NS), lambda _: self._lease_ends(one))
        if one.fate != UNDER_WAY:
            self._tell(one)
        elif one.out is not None and one.into is not None:
            alone_ns, size = self._alone(one)
            one.fixed_ns, one.size = round(alone_ns * one.left), round(size * one.left)
            one.fixed_ns += round(self._terms.link.latency_s * NS)
            self._wire.carry(one)
        elif not self._pulls and one.into is transfer:
            self._prefill(one)

    def _prefill(self, one: OneHandOff) -> None:
        """Begin a prefill whose target has taken blocks; without its server the target computes the prompt."""
        if one.source.state is not State.READY or one.source.machine is None:
            self._choices[0].ended(one.spec, int(self.env.now))
            self._end_hand_off(one, fate=BROKEN)
            return
        one.source.machine.record.prefills.add(one.prefill)
        self._give(one.source, one.spec, self._choices[0].goes_as(one.prefill, one.spec))

    def _alone(self, one: OneHandOff) -> tuple[float, int]:
        """Return the time of a transfer's descriptors, ns, and its bytes."""
        source, target = (self._scenarios[each.pool] for each in (one.source, one.target))
        model, shares = target.model, sorted((source.gpus, target.gpus))
        pieces = one.blocks * model.layers * (1 if model.latent else 2) * shares[1] / shares[0]
        size = one.blocks * target.block_size * model.kv_token_bytes(target.gpus) * target.gpus
        return pieces * self._terms.link.descriptor_s * NS, size

    def _unsent_share(self, one: OneHandOff, prefill_ns: int) -> float:
        """Return the share of the KV that goes over after a prefill which took so long, if each layer goes as soon as
        it is computed and nothing else is on the link: all but what the link carried meanwhile, at least one layer.
        """
        layers = self._scenarios[one.target.pool].model.layers
        descriptors_ns, size = self._alone(one)
        alone_ns = descriptors_ns + size / self._terms.link.bandwidth_gb_s
        return max(1 / layers, 1 - prefill_ns * (1 - 1 / layers) / alone_ns)

    def _lease_ends(self, one: OneHandOff) -> None:
        """End a hand-off one side of which has had blocks for so long that the other has not."""
        if one.out is None or one.into is None:
            self._give_up_prefill(one)
            self._end_hand_off(one, fate=LEASE_OVER)

    def _give_up_prefill(self, one: OneHandOff) -> None:
        """End a prefill that nobody needs any more, if it has been sent and is not over."""
        if (source := self._open.get(one.prefill)) is not None and source.machine is not None:
            source.machine.inbox.give_up(int(self.env.now), one.prefill)

    def _end_hand_off(self, one: OneHandOff, *, fate: int) -> None:
        """End a hand-off, if it has not ended."""
        if one.fate != UNDER_WAY:
            return
        one.fate, one.end_ns = fate, int(self.env.now)
        if fate != FETCHED:
            self._wire.drop(one)
        if one.prefilled_ns == NONE_YET and one.prefill not in self._open:  # it will not be computed
            self._of.pop(one.prefill, None)
        self._note(one)
        self._tell(one)

    def _tell(self, one: OneHandOff) -> None:
        """Let the sides that have blocks hear that a hand-off is over."""
        now_ns = int(self.env.now)
        if one.out is not None:
            transfer, one.out = one.out, None
            side(one.source).end(transfer, one.start_ns, now_ns, broken=False)
            del self._of[one.prefill]
            self._left_by(one.source, now_ns)
        if one.into is not None:
            transfer, one.into = one.into, None
            side(one.target).end(transfer, one.start_ns, now_ns, broken=one.fate != FETCHED)

    def _note(self, one: OneHandOff) -> None:
        numbers = [NONE_YET if each.number is None else each.number for each in (one.source, one.target)]
        times = one.prefilled_ns, one.taken_ns, one.start_ns, one.end_ns
        self.record.hand_offs.extend((one.spec.index, *numbers, *times, one.blocks, one.size, one.fate))

    def _under_way(self) -> list[OneHandOff]:
        return [one for one in dict.fromkeys(self._of.values()) if one.fate == UNDER_WAY]

    # -- servers -------------------------------------------------------------------------------------------------------

    def _ready(self, replica: Replica) -> None:
        super()._ready(replica)
        if (machine := replica.machine) is not None:
            its = side(replica)
            its.env, its.news, its.on_order = self.env, self.env.event(), partial(self._ordered, replica)
            if self._terms.transfer == "layerwise":
                machine.on_plan = partial(self._planned, machine)

    def _planned(self, machine: Machine, plan: StepPlan) -> None:
        """Note when the kernels of a prefill begin."""
        for chunk in plan.work.chunks:
            if chunk.admitted and chunk.spec.fetched_later and (one := self._of.get(chunk.spec)) is not None:
                one.began_ns = machine.times.compute_start_ns

    def _cut(self, spec: RequestSpec, machine: Machine, reason: str, most_retries: int) -> None:
        """End a leg of a server that dies. A prefill that another server waits for is computed there."""
        if (one := self._of.pop(spec, None)) is None:
            super()._cut(spec, machine, reason, most_retries)
            return
        self._cut_off(spec, machine, reason)
        if spec is one.prefill and not self._pulls:
            machine.record.handed_off += 1
            self._end_hand_off(one, fate=BROKEN)
            return
        if spec is one.prefill:
            del self._of[one.decode]
        else:
            self._give_up_prefill(one)
        for choice in self._choices:
            choice.ended(one.spec, int(self.env.now))
        self._lost(one.spec, spec, machine, most_retries)

    def _end(self, replica: Replica, state: State, reason: str = "", back_s: float | None = None) -> None:
        super()._end(replica, state, reason, back_s)
        for one in self._under_way() if replica.over_ns is not None else ():
            if replica in (one.source, one.target):
                self._end_hand_off(one, fate=BROKEN)

    def _sum_up(self) -> None:
        for one in self._under_way():
            self._note(one)
        if self._fleet.changes:
            super()._sum_up()


def side(replica: Replica) -> Side:
    """Return what a server knows of hand-offs."""
    assert replica.machine is not None
    mover = replica.machine.mover
    assert isinstance(mover, Side)
    return mover
