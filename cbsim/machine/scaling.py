"""A fleet whose servers come and go: replicas that start, drain and die, and the requests of those that die.

Every start is a new server with an empty cache and tables of its own. It has a slot, the index by which the router
knows it; a pool has as many slots as it may have servers at a time. The loop of a server that has died runs on until it
has seen the end of its requests, so that its plans follow from its polls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from random import Random
from typing import Any

import simpy

from cbsim.collector import no_collections
from cbsim.machine.driver import Machine
from cbsim.machine.front import Alarm, Choice, Front, at
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.record.record import RETRIED, Records
from cbsim.routers.base import Router
from cbsim.routers.scaling import Rule
from cbsim.runs.assemble import rule
from cbsim.scenario.fleet import Autoscale
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

HOUR_NS = 3600 * NS


class State(Enum):
    """What a replica does: it takes requests if READY alone."""

    STARTING = "start"
    READY = "ready"
    DRAINING = "drain"
    GONE = "gone"
    DEAD = "died"


@dataclass(eq=False, slots=True)
class Replica:
    """A server of a pool, from its start on. Once it is ready it has a machine, and the number of its tables."""

    pool: int
    slot: int
    started_ns: int
    state: State = State.STARTING
    machine: Machine | None = None
    number: int | None = None
    ready_ns: int = 0
    over_ns: int | None = None
    deaths: list[Alarm] = field(default_factory=list)  # when it would die
    in_flight: int = 0  # requests that have not ended


class Scaled(Front):
    """The servers of a fleet that come and go, behind its router, and their client. `build` builds one.

    Requests wait while no server is ready; when none will ever be, they fail. A request that is sent again is another
    one to the servers, and the same to those that follow its end.
    """

    def __init__(
        self, scenario: Scenario, workload: Workload, build: Callable[[Scenario, Front], Machine], router: Router
    ) -> None:
        assert scenario.fleet is not None
        self.env = simpy.Environment()
        super().__init__(self.env, workload, [])
        self.cancels = []  # a server learns of one with the request
        self._leaves = {spec: at_ns for at_ns, spec in workload.cancels}
        self._fleet, self._scenarios, self._build = scenario.fleet, [each for _, each in scenario.pools], build
        self._unsent: list[RequestSpec] = []
        self._open: dict[RequestSpec, Replica] = {}  # the server of each request that was sent and has not ended
        self._first: dict[RequestSpec, RequestSpec] = {}  # of requests that were sent again
        self._sampled: set[RequestSpec] = set()  # requests of several samples
        self.machines, self._replicas = list[Machine](), list[Replica]()
        self._by_number: list[Replica] = []  # those that have machines
        self._events: list[dict[str, Any]] = []
        self._on_step: Callable[[int], None] | None = None
        self.record = Records([])
        self._slots: list[Replica | None] = [None] * self._fleet.room
        self._pool_of = [pool for pool, each in enumerate(self._fleet.pools) for _ in range(each.room)]
        self._desired = [pool.count for pool in self._fleet.pools]
        self._choices = self._routed(router)
        for number, pool in enumerate(self._fleet.pools):
            for slot in self._free(number)[: pool.count]:
                self._start(slot, 0)
            if scaled := pool.autoscale:
                period_ns = round(scaled.interval_s * NS)
                self.every(period_ns, partial(self._scale, number, scaled, rule(scaled)), period_ns)
        for failure in self._fleet.failures:
            at(self.env, round(failure.at_s * NS), partial(self._fail, failure.server, failure.back_s))

    def _routed(self, router: Router) -> Sequence[Choice]:
        """Return the choices that are made for a request: who serves it."""
        return (Choice(router, self, [None] * self._fleet.room, self._fleet.signals),)

    @property
    def now_ns(self) -> int:
        return max(machine.now_ns for machine in self.machines)

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Run all servers to the end of the workload. Raises DeadlockError."""
        self._on_step = on_step
        try:
            with no_collections():
                self.env.run()
                while self._unsent:  # nothing happens any more by which a server could be ready
                    self._fail_unsent()
                    self.env.run()
                self.close()  # for one that waits for requests that cannot help it
                self.env.run()
        finally:
            self._sum_up()

    def _served(self, machine: Machine) -> Generator[Any, Any, None]:
        yield from machine.run(self.env, self._on_step)

    # -- requests ------------------------------------------------------------------------------------------------------

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Go on after a request, unless its server has died and only now sees its end."""
        if (replica := self._open.pop(spec, None)) is not None:
            self._choices[0].ended(spec, now_ns)
            self._go_on(self._first.pop(spec, spec), now_ns)
            self._left_by(replica, now_ns)
        return []

    def _send(self, spec: RequestSpec, now_ns: int) -> None:
        if spec.sample_of is not None:
            self._sampled |= {spec, spec.sample_of}
        if not self._choices[0].ready:
            self._unsent.append(spec)
            return
        self._give(self._choose(self._choices[0], spec, now_ns), spec, spec)

    def _choose(self, choice: Choice, spec: RequestSpec, now_ns: int) -> Replica:
        replica = self._slots[choice(spec, now_ns)]
        assert replica is not None
        return replica

    def _give(self, replica: Replica, spec: RequestSpec, leg: RequestSpec) -> None:
        """Send a request, or a leg of it, to a server."""
        assert replica.machine is not None
        self._open[leg] = replica
        replica.in_flight += 1
        if (leaves_ns := self._leaves.get(self._first.get(spec, spec))) is not None:
            replica.machine.inbox.give_up(leaves_ns, leg)
        self._put(replica.machine.inbox, leg)

    def _cut(self, spec: RequestSpec, machine: Machine, reason: str, most_retries: int) -> None:
        """End a request of a server that dies: it is sent again, or fails."""
        self._cut_off(spec, machine, reason)
        self._lost(spec, spec, machine, most_retries)

    def _lost(self, spec: RequestSpec, leg: RequestSpec, machine: Machine, most_retries: int) -> None:
        """Send a request again whose leg was cut off, or let it fail."""
        if self._again(spec, most_retries):
            machine.record.goes_on(leg, RETRIED)
        else:
            self._go_on(self._first.pop(spec, spec), int(self.env.now))

    def _cut_off(self, leg: RequestSpec, machine: Machine, reason: str) -> None:
        machine.record.failures[leg] = reason
        machine.inbox.give_up(int(self.env.now), leg)

    def _again(self, spec: RequestSpec, most_retries: int) -> bool:
        """Send a request again, unless it has been as often as it may; return whether it is."""
        now_ns, tries = int(self.env.now), spec.index // self._client.total
        if spec in self._sampled or tries >= most_retries:
            return False
        first = self._first.pop(spec, spec)
        again = self._client.attempt(spec, tries + 1)
        self._first[again] = first
        self._due.put(again, now_ns)
        self._arm()
        return True

    def _fail_unsent(self) -> None:
        """End the requests that have waited for a server in vain; they are in the tables of the last one."""
        waiting, self._unsent, machine = self._unsent, [], self.machines[-1]
        for spec in waiting:
            self._put(machine.inbox, spec)
            self._cut(spec, machine, "no server is left", 0)

    # -- servers -------------------------------------------------------------------------------------------------------

    def _in(self, pool: int, *states: State) -> list[Replica]:
        return [each for each in self._slots if each and each.pool == pool and each.state in states]

    def _free(self, pool: int) -> list[int]:
        return [slot for slot, its in enumerate(self._pool_of) if its == pool and self._slots[slot] is None]

    def _scale(self, pool: int, scaled: Autoscale, rule: Rule, now_ns: int) -> None:
        """Do what the rule of a pool says, as far as the pool's bounds allow."""
        choice = next(each for each in self._choices if self._pool_of.index(pool) in each.slots)
        choice.deliver(now_ns)
        views = [choice.views[choice.slots.index(each.slot)] for each in self._in(pool, State.READY)]
        desired = rule.desired(views, len(self._in(pool, State.STARTING)), self._desired[pool], now_ns)
        self._desired[pool] = min(max(desired, scaled.least), scaled.most)
        self._reconcile(pool)

    def _reconcile(self, pool: int) -> None:
        """Start replicas of a pool that is scaled, or let some go, until there are as many as its rule says."""
        scaled, count = self._fleet.pools[pool].autoscale, self._desired[pool]
        if scaled is None:
            return
        alive = self._in(pool, State.STARTING, State.READY)
        for slot in self._free(pool)[: max(0, count - len(alive))]:
            self._start(slot, round(scaled.start_s * NS))
        alive.sort(key=lambda each: (each.state is State.STARTING, each.started_ns, each.slot))
        for replica in alive[count:]:
            if replica.state is State.STARTING:
                self._end(replica, State.GONE)
            elif replica.state is State.READY:
                self._drain(replica, scaled.drain_s)

    def _start(self, slot: int, delay_ns: int) -> None:
        now_ns = int(self.env.now)
        if not self.is_open():
            return
        self._slots[slot] = replica = Replica(self._pool_of[slot], slot, now_ns)
        self._replicas.append(replica)
        self._becomes(replica, State.STARTING)
        if delay_ns:
            at(self.env, now_ns + delay_ns, lambda _: self._ready(replica))
        else:
            self._ready(replica)

    def _ready(self, replica: Replica) -> None:
        """Let a replica take requests that has started, unless it was to go meanwhile."""
        if replica.state is not State.STARTING or not self.is_open():
            return
        now_ns, scenario = int(self.env.now), self._scenarios[replica.pool]
        replica.machine = machine = self._build(scenario, self)
        machine.inbox.news, machine.now_ns = self.env.event(), now_ns
        replica.number, replica.ready_ns = len(self.machines), now_ns
        self.machines.append(machine)
        self._by_number.append(replica)
        self.inboxes.append(machine.inbox)
        facts = {"gpus": scenario.own_gpus, "total_blocks": machine.record.total_blocks}
        self.record.add(machine.record, {"pool": self._fleet.labels[replica.pool], **facts})
        for choice in self._choices:
            choice.came(replica.slot, machine)
        self.env.process(self._served(machine))
        self._becomes(replica, State.READY)
        if chance := self._fleet.random_failures:
            life = Random(f"{chance.seed} {replica.number}").expovariate(chance.per_server_hour / HOUR_NS)
            self._dies_at(replica, now_ns + round(life), "died", chance.back_s)
        waiting, self._unsent = self._unsent, []
        for spec in waiting:
            self._send(spec, now_ns)

    def _drain(self, replica: Replica, drain_s: float | None) -> None:
        now_ns = int(self.env.now)
        self._becomes(replica, State.DRAINING)
        for choice in self._choices:
            choice.drains(replica.slot)
        self._let_go(replica, now_ns)
        if drain_s is not None:
            self._dies_at(replica, now_ns + round(drain_s * NS), f"drained for {drain_s:g} s")

    def _dies_at(self, replica: Replica, at_ns: int, reason: str, back_s: float | None = None) -> None:
        """Let a server die at a time, unless it has gone before."""
        replica.deaths.append(alarm := Alarm(self.env))
        alarm.set(at_ns, lambda _: self._end(replica, State.DEAD, reason, back_s))

    def _left_by(self, replica: Replica, now_ns: int) -> None:
        """Note that a server has one request less."""
        replica.in_flight -= 1
        self._let_go(replica, now_ns)

    def _let_go(self, replica: Replica, now_ns: int) -> None:
        """End a draining server once its requests have ended; its CPU may be ahead of the clock."""
        if replica.state is State.DRAINING and not replica.in_flight:
            at(self.env, max(now_ns, int(self.env.now)), lambda _: self._end(replica, State.GONE))

    def _fail(self, slot: int, back_s: float | None, _: simpy.Event) -> None:
        if (replica := self._slots[slot]) is not None:
            self._end(replica, State.DEAD, "died", back_s)

    def _end(self, replica: Replica, state: State, reason: str = "", back_s: float | None = None) -> None:
        """Take out a server with all that it has, unless it has gone; another may come in its place."""
        if replica.over_ns is not None or not self.is_open():
            return
        replica.over_ns = now_ns = int(self.env.now)
        for alarm in replica.deaths:
            alarm.stop()
        machine = replica.machine
        for choice in self._choices if machine is not None else ():
            choice.left(replica.slot, now_ns)
        self._slots[replica.slot] = None
        self._becomes(replica, state)
        for spec in [spec for spec, its in self._open.items() if its is replica]:
            assert machine is not None
            del self._open[spec]
            self._cut(spec, machine, f"server {replica.number} {reason}", self._fleet.most_retries)
        self._reconcile(replica.pool)
        if back_s is not None and self._fleet.pools[replica.pool].autoscale is None:
            at(self.env, now_ns + round(back_s * NS), lambda _: self._start(replica.slot, 0))

    def _becomes(self, replica: Replica, state: State) -> None:
        replica.state, pool = state, replica.pool
        event = {"time_s": self.env.now / NS, "pool": self._fleet.labels[pool], "event": state.value}
        numbers = {"ready": len(self._in(pool, State.READY)), "desired": self._desired[pool]}
        self._events.append({**event, "slot": replica.slot, "server": replica.number, **numbers})

    def _sum_up(self) -> None:
        """Leave in the record how long servers were there, and what became of them."""
        end_ns, hours, spent = self.now_ns, 0.0, 0.0
        for replica in self._replicas:
            over_ns = end_ns if replica.over_ns is None else replica.over_ns
            price = self._scenarios[replica.pool].price_usd_hour
            its_hours = max(0, over_ns - replica.started_ns) / HOUR_NS
            hours, spent = hours + its_hours, spent + its_hours * (math.nan if price is None else price)
            if replica.machine is not None and replica.number is not None:  # a step under way is still in its tables
                lived_ns = max(over_ns, replica.machine.now_ns) - replica.ready_ns
                self.record.fleet[replica.number]["lived_s"] = lived_ns / NS
        events = Counter(event["event"] for event in self._events)
        self.record.scaling = {
            "server_hours": hours,
            "usd": None if math.isnan(spent) else spent,
            "starts": events[State.STARTING.value] - self._fleet.count,
            "deaths": events[State.DEAD.value],
            "events": self._events,
        }
