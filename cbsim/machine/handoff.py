"""Prefill and decode apart, simulated: the link between servers, and the transfers that their plans order.

A leg is the request as a server gets it (`policy.request.leg`). The scheduler of the server that prefilled orders a job
that keeps the blocks, that of the server which decodes one for the blocks that it has taken. The rules
(`runs.hand_offs`) say when the transfer starts, or that there will be none; when it is over, both servers hear of it
with their next result. So no block is handed out while a transfer reads or writes it, whatever becomes of the request
or of a server.
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
from cbsim.machine.front import Alarm, Choice, Front, at
from cbsim.machine.scaling import Replica, Scaled, State
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import DECODE, PREFILL, WHOLE, RequestSpec, leg
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from cbsim.record.columns import NS
from cbsim.record.optional_tables import UNDER_WAY
from cbsim.record.record import HANDED_OFF, TransferLog
from cbsim.routers.base import Router
from cbsim.runs.hand_offs import NONE_YET, HandOffs, RoutedRequest
from cbsim.runs.inbox import NEVER_NS
from cbsim.scenario.fleet import Link
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

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
class Crossing:
    """KV on its way: `left` are the bytes left at a time, `rate` bytes a nanosecond from then on."""

    index: int
    source: Replica
    target: Replica
    fixed_ns: int  # before its bytes
    left: float
    start_ns: int = NONE_YET
    flows: bool = False  # its bytes have begun
    since_ns: int = 0
    rate: float = 0.0
    end_ns: int = NEVER_NS

    @property
    def nics(self) -> Sequence[tuple[str, int]]:
        return ("sends", id(self.source)), ("receives", id(self.target))

    def pace(self, rate: float, now_ns: int) -> None:
        """Go on at another rate."""
        self.left = max(0.0, self.left - self.rate * (now_ns - self.since_ns))
        self.since_ns, self.rate = now_ns, rate
        self.end_ns = now_ns + round(self.left / rate) if rate else NEVER_NS


class Wire:
    """The NICs of all servers, each sending and receiving at a rate. `over` is called when a transfer has ended."""

    def __init__(self, env: simpy.Environment, link: Link, over: Callable[[Crossing], None]) -> None:
        self._env, self._over = env, over
        self._rate, self._most = link.bandwidth_gb_s, link.most  # GB/s are bytes a nanosecond
        self._waiting: list[Crossing] = []
        self._active: dict[Crossing, None] = {}
        self._next = Alarm(env)

    def carry(self, one: Crossing) -> None:
        """Start a transfer as soon as both NICs have room, and no earlier one waits for either."""
        self._waiting.append(one)
        self._start()

    def drop(self, one: Crossing) -> float:
        """Break off a transfer, if it has not ended; return the bytes that it has left."""
        if one in self._waiting:
            self._waiting.remove(one)
        elif one in self._active:
            del self._active[one]
            one.pace(0.0, int(self._env.now))
            self._share()
        self._start()
        return one.left

    def _start(self) -> None:
        busy = Counter(nic for one in self._active for nic in one.nics)
        for one in list(self._waiting):
            if max(busy[nic] for nic in one.nics) < self._most:
                self._waiting.remove(one)
                self._active[one], one.start_ns = None, int(self._env.now)
                at(self._env, one.start_ns + one.fixed_ns, partial(self._flows, one))
            busy.update(one.nics)

    def _flows(self, one: Crossing, _: simpy.Event) -> None:
        if one in self._active:
            one.flows, one.since_ns = True, int(self._env.now)
            self._share()

    def _share(self) -> None:
        """Give each transfer its rate: the lower one of its shares of two NICs."""
        now_ns, flows = int(self._env.now), [one for one in self._active if one.flows]
        sharing = Counter(nic for one in flows for nic in one.nics)
        for one in flows:
            rate = self._rate / max(sharing[nic] for nic in one.nics)
            if rate != one.rate:
                one.pace(rate, now_ns)
        self._next.set(min([one.end_ns for one in flows], default=NEVER_NS), self._ends)

    def _ends(self, _: simpy.Event) -> None:
        now_ns = int(self._env.now)
        ended = [one for one in self._active if one.end_ns <= now_ns]
        for one in ended:
            del self._active[one]
            one.left = 0.0
        self._share()
        self._start()
        for one in ended:
            self._over(one)


class Apart(Scaled):
    """The servers of a fleet with roles, behind two routers: who prefills a request, and who decodes it. It does what
    the rules ask for (`runs.hand_offs.Servers`).
    """

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
        self._computes = not any(its.kind.brings_first for its in scenario.servers)  # prompts, where they decode
        self._orders: dict[tuple[int, Direction], Transfer] = {}  # by request, until its server knows of the end
        self._crossing: dict[int, Crossing] = {}  # by request: layers during its prefill, or all that is left
        super().__init__(scenario, workload, build, router)
        self.rules = HandOffs(self, self._terms, self.record.hand_offs)
        self._wire, self._leases = Wire(self.env, self._terms.link, self._carried), Alarm(self.env)

    def _routed(self, router: Router) -> Sequence[Choice]:
        choices = []
        for each, slots in ((router, self._fleet.slots("prefill")), (self._decodes, self._fleet.slots("decode"))):
            choices.append(Choice(each, self, [None] * len(slots), self._fleet.signals, slots))
        return choices

    def _router_of(self, which: int) -> Choice:
        return self._choices[which != PREFILL]

    @property
    def _now_ns(self) -> int:
        return int(self.env.now)

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        super().run(on_step)
        if self.is_open():
            fates = self.record.hand_offs[9::10]
            raise DeadlockError(f"servers wait for room at each other, in {fates.count(UNDER_WAY)} hand-offs")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _send(self, spec: RequestSpec, now_ns: int) -> None:
        """Send a request's first leg. It waits for a server that decodes, and for one that prefills if it needs it."""
        able = self._computes or self._router_of(PREFILL).ready
        if not (able and self.rules.arrived(spec, now_ns)):
            self._unsent.append(spec)

    def route(self, spec: RequestSpec, which: int) -> int | None:
        choice = self._router_of(which)
        return self._choose(choice, spec, self._now_ns).number if choice.ready else None

    def prefilling(self) -> list[int]:
        (choice := self._router_of(PREFILL)).deliver(self._now_ns)
        return [view.in_flight for view in choice.views if view.ready]

    def cached_tokens(self, server: int, spec: RequestSpec) -> int:
        return self._router_of(DECODE).seen(self._by_number[server].slot).cached_tokens(spec)

    def give(self, server: int, spec: RequestSpec, form: int) -> None:
        replica, legs = self._by_number[server], leg(spec, form)
        if form == PREFILL and self._terms.transfer != "pull":
            self.machines[server].record.goes_on(legs, HANDED_OFF)
        self._give(replica, spec, legs if form == WHOLE else self._router_of(form).goes_as(legs, spec))

    def cancel(self, server: int, spec: RequestSpec) -> None:
        self.machines[server].inbox.give_up(self._now_ns, self._router_of(PREFILL).known_as(spec))

    def release(self, spec: RequestSpec, which: int) -> None:
        self._router_of(which).ended(spec, self._now_ns)

    def unserved(self, spec: RequestSpec) -> None:
        self._again(spec, ANY)

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Go on after a leg, or a request that has no legs, at a time of its server, whose CPU may be ahead."""
        if (replica := self._open.pop(spec, None)) is not None:
            assert replica.machine is not None
            record = replica.machine.record
            keeps_kv = spec.fetched_later and spec not in record.refusals and spec not in record.cancels
            self._later(now_ns, partial(self._leg_over, spec, replica, keeps_kv))
        return []

    def _leg_over(self, spec: RequestSpec, replica: Replica, keeps_kv: bool) -> None:
        now_ns, over = self._now_ns, True
        whole = self.rules.requests[spec.index].spec
        if not keeps_kv:  # else its server keeps the blocks until they are fetched
            self._left_by(replica, now_ns)
        if spec.fetched_later:
            over = self.rules.prefilled(spec.index, now_ns, keeps_kv=keeps_kv)
        else:
            self.rules.decoded(spec.index, now_ns)
        if over:
            self._go_on(self._first.pop(whole, whole), now_ns)

    def _later(self, at_ns: int, act: Callable[[], None]) -> None:
        """Act at a time of a server, whose CPU may be ahead of the clock."""
        at(self.env, max(at_ns, self._now_ns), lambda _: act())

    # -- hand-offs -----------------------------------------------------------------------------------------------------

    def _ordered(self, server: int, transfer: Transfer) -> None:
        """Note a job as soon as its plan is launched."""
        assert transfer.spec is not None
        index, way = transfer.spec.index, transfer.direction
        mine = transfer.sources if way is Direction.OUT else transfer.targets
        self._orders[index, way] = transfer

        def ordered() -> None:
            self.rules.ordered(server, index, way, len(mine), self._now_ns)

        self._later(self.machines[server].now_ns, ordered)

    def _side(self, server: int) -> Side:
        mover = self.machines[server].mover
        assert isinstance(mover, Side)
        return mover

    def _tell(self, server: int, index: int, direction: Direction, start_ns: int, *, broken: bool) -> None:
        """Let a server hear that the job of a hand-off is over."""
        replica, transfer = self._by_number[server], self._orders.pop((index, direction))
        self._side(server).end(transfer, start_ns, self._now_ns, broken=broken)
        if direction is Direction.OUT:
            self._left_by(replica, self._now_ns)

    def drop(self, server: int, index: int, direction: Direction) -> None:
        if direction is Direction.IN and (early := self._crossing.pop(index, None)) is not None:
            self._wire.drop(early)
        self._tell(server, index, direction, NONE_YET, broken=True)

    def lease(self, until_ns: int) -> None:
        self._leases.set(until_ns, lambda _: self.rules.lease_over(self._now_ns))

    def begin(self, routed: RoutedRequest) -> int:
        descriptors_ns, size = self._alone(routed)
        left, early = 1.0, self._crossing.pop(routed.spec.index, None)
        if early is not None:
            left = self._wire.drop(early) / size + 1 / self._layers(routed)
        fixed_ns = round(descriptors_ns * left) + round(self._terms.link.latency_s * NS)
        self._carry(routed, fixed_ns, round(size * left))
        return size

    def _carry(self, routed: RoutedRequest, fixed_ns: int, size: float) -> None:
        source, target = (self._by_number[number] for number in routed.sides.values())
        self._crossing[routed.spec.index] = one = Crossing(routed.spec.index, source, target, fixed_ns, size)
        self._wire.carry(one)

    def _alone(self, routed: RoutedRequest) -> tuple[float, int]:
        """Return the time of the descriptors of a request's KV, ns, and its bytes."""
        source, target = (self._scenarios[self._by_number[number].pool] for number in routed.sides.values())
        model, shares, blocks = target.model, sorted((source.gpus, target.gpus)), routed.blocks[Direction.IN]
        pieces = blocks * model.layers * (1 if model.latent else 2) * shares[1] / shares[0]
        size = blocks * target.block_size * model.kv_token_bytes(target.gpus) * target.gpus
        return pieces * self._terms.link.descriptor_s * NS, size

    def _layers(self, routed: RoutedRequest) -> int:
        return self._scenarios[self._by_number[routed.target].pool].model.layers

    def _planned(self, machine: Machine, plan: StepPlan) -> None:
        """Let the layers of a prompt go over from when the first one is computed, all but the last one."""
        for chunk in plan.work.chunks:
            routed = self.rules.requests.get(chunk.spec.index)
            if chunk.admitted and chunk.spec.fetched_later and routed is not None:
                start_ns, end_ns = machine.times.compute_start_ns, machine.times.compute_end_ns
                first_ns = start_ns + (end_ns - start_ns) // self._layers(routed)
                self._later(first_ns, partial(self._begin_early, routed))

    def _begin_early(self, routed: RoutedRequest) -> None:
        if routed.handing and not routed.begun and routed.spec.index not in self._crossing:
            (descriptors_ns, size), early = self._alone(routed), 1 - 1 / self._layers(routed)
            self._carry(routed, round(descriptors_ns * early), size * early)

    def _carried(self, one: Crossing) -> None:
        """End a transfer, unless it was of the layers before the last."""
        if self.rules.requests[one.index].begun:
            self._end_transfer(one, broken=False)

    def _end_transfer(self, one: Crossing, *, broken: bool) -> None:
        del self._crossing[one.index]
        for direction, server in self.rules.requests[one.index].sides.items():
            self._tell(server, one.index, direction, one.start_ns, broken=broken)
        self.rules.transferred(one.index, one.start_ns, self._now_ns, broken=broken)

    def cut(self, routed: RoutedRequest) -> None:
        self._wire.drop(one := self._crossing[routed.spec.index])
        self._end_transfer(one, broken=True)

    # -- servers -------------------------------------------------------------------------------------------------------

    def _ready(self, replica: Replica) -> None:
        super()._ready(replica)
        if (machine := replica.machine) is not None and replica.number is not None:
            side = self._side(replica.number)
            side.env, side.news, side.on_order = self.env, self.env.event(), partial(self._ordered, replica.number)
            if self._terms.transfer == "layerwise":
                machine.on_plan = partial(self._planned, machine)
            self._later(self._now_ns, lambda: self.rules.prefill_next(self._now_ns))

    def _cut(self, spec: RequestSpec, machine: Machine, reason: str, most_retries: int) -> None:
        """End a leg of a server that dies. A prompt whose prefill was cut off is computed where it decodes."""
        if (routed := self.rules.requests.get(spec.index)) is None:
            super()._cut(spec, machine, reason, most_retries)
            return
        self._cut_off(spec, machine, reason)
        if spec.fetched_later:
            machine.record.goes_on(spec, HANDED_OFF)
            self.rules.prefilled(spec.index, self._now_ns, keeps_kv=False, died=True)
        else:
            self.rules.decoded(spec.index, self._now_ns, died=True)
            self._lost(routed.spec, spec, machine, most_retries)

    def _end(self, replica: Replica, state: State, reason: str = "", back_s: float | None = None) -> None:
        if replica.over_ns is None and replica.number is not None and self.is_open():
            self.rules.gone(replica.number, self._now_ns)
        super()._end(replica, state, reason, back_s)

    def _sum_up(self) -> None:
        self.rules.close()
        if self._fleet.changes:
            super()._sum_up()
