"""A fleet whose servers come and go: replicas that start, drain and die, and the requests of those that die.

Every start is a new server with an empty cache and tables of its own. It has a slot, the index by which the router
knows it; a pool has as many slots as it may have servers at a time. The loop of a server that has died runs on until it
has seen the end of its requests, so that its plans follow from its polls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from heapq import heappush
from random import Random
from typing import Any

import simpy

from cbsim.cost.base import Cost
from cbsim.machine.driver import Machine
from cbsim.machine.front import Choice, Front, at
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.record.record import Records
from cbsim.routers.base import Router
from cbsim.routers.scaling import Rule
from cbsim.runs.inbox import Inbox, no_collections
from cbsim.scenario.fleet import Fleet
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

HOUR_NS = 3600 * NS
Build = Callable[[Scenario, Front, dict[int, Cost]], Machine]


class State(Enum):
    """What a replica does: it takes requests if READY alone."""

    STARTING = "start"
    READY = "ready"
    DRAINING = "drain"
    GONE = "gone"
    DEAD = "died"


@dataclass(eq=False, slots=True)
class Replica:
    """A server of a pool, from its start on. `number` is that of its tables, once it is ready."""

    pool: int
    slot: int
    started_ns: int
    state: State = State.STARTING
    number: int = -1
    ready_ns: int = 0
    over_ns: int | None = None


class ChangingFront(Front):
    """The client of servers that come and go. Requests wait while no server is ready; when none will ever be, they
    fail. A request that is sent again is another one to the servers, and the same to those that follow its end.
    """

    def __init__(self, env: simpy.Environment, client: Workload, machines: Sequence[Machine], fleet: Fleet) -> None:
        self.open_on = Counter[int]()  # requests of each server that have not ended
        self.retries = 0
        self.hopeless = False  # whether no server will be ready any more
        self.drained: Callable[[int, int], None] = lambda *_: None
        self.number_at: Callable[[int], int] = lambda slot: slot  # the server that has a slot
        self._fleet, self._machines = fleet, machines
        self._unsent: list[RequestSpec] = []
        self._open: dict[RequestSpec, int] = {}  # the server of each request that was sent and has not ended
        self._lost: set[RequestSpec] = set()  # of a dead server, which has not seen their end
        self._first: dict[RequestSpec, RequestSpec] = {}  # of requests that were sent again
        self._sampled: set[RequestSpec] = set()  # requests of several samples
        self._leaves = {spec: at_ns for at_ns, spec in client.cancels}
        self._all = list[Inbox]()
        super().__init__(env, client, self._all)

    def add(self, inbox: Inbox) -> None:
        """Add the inbox of a server that is ready."""
        self._all.append(inbox)

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        if spec in self._lost:
            self._lost.remove(spec)
            return []
        number = self._open.pop(spec)
        self.open_on[number] -= 1
        assert self.ended is not None
        self.ended(spec, now_ns)
        self._go_on(self._first.pop(spec, spec), now_ns)
        if not self.open_on[number]:
            self.drained(number, now_ns)
        return []

    def send_waiting(self, now_ns: int) -> None:
        """Send the requests that have waited for a server, or let them fail."""
        waiting, self._unsent = self._unsent, []
        for spec in waiting:
            self._send(spec, now_ns)

    def _send(self, spec: RequestSpec, now_ns: int) -> None:
        if spec.sample_of is not None:
            self._sampled.add(spec.sample_of)
        assert isinstance(self.choose, Choice)
        if self.hopeless:
            number = len(self._machines) - 1
            self._lose(spec, number, "no server is left", now_ns)
            self._put(self.inboxes[number], spec)
            self._go_on(self._first.pop(spec, spec), now_ns)
            return
        if not self.choose.any_ready:
            self._unsent.append(spec)
            return
        number = self.number_at(self.choose(spec, now_ns))
        self._open[spec] = number
        self.open_on[number] += 1
        if (leaves_ns := self._leaves.get(self._first.get(spec, spec))) is not None and now_ns > spec.arrival_ns:
            self.inboxes[number].give_up(leaves_ns, spec)
        self._put(self.inboxes[number], spec)

    def cut(self, number: int, reason: str, now_ns: int) -> None:
        """End the requests of a server that dies: each is sent again, or fails."""
        del self.open_on[number]
        for spec in [spec for spec, its in self._open.items() if its == number]:
            del self._open[spec]
            self._lose(spec, number, reason, now_ns)
            first, tries = self._first.pop(spec, spec), spec.index // self._client.total
            sampled = spec.sample_of is not None or spec in self._sampled
            if sampled or self._fleet.on_failure == "fail" or tries >= self._fleet.most_retries:
                self._go_on(first, now_ns)
                continue
            self.retries += 1
            self._machines[number].record.retried.add(spec)
            again = self._client.attempt(spec, tries + 1)
            self._first[again] = first
            heappush(self._due, (now_ns, again.index, again))
        self._arm()

    def _lose(self, spec: RequestSpec, number: int, reason: str, now_ns: int) -> None:
        self._machines[number].record.failures[spec] = reason
        self._lost.add(spec)
        self.inboxes[number].give_up(now_ns, spec)


class Scaled:
    """The servers of a fleet that come and go, behind its router. `build` builds one; `rules` are those of its pools,
    None for a pool that is not scaled.
    """

    def __init__(
        self, scenario: Scenario, workload: Workload, build: Build, router: Router, rules: Sequence[Rule | None]
    ) -> None:
        assert scenario.fleet is not None
        self._fleet, self._scenarios, self._rules = scenario.fleet, [each for _, each in scenario.pools], rules
        self._build, self._costs = build, dict[int, Cost]()
        self.env, self.machines, self.replicas = simpy.Environment(), list[Machine](), list[Replica]()
        self._numbered = list[Replica]()  # those that have tables
        self._processes = list[simpy.Process]()
        self.front = ChangingFront(self.env, workload, self.machines, self._fleet)
        self.front.drained, self.front.number_at = self._drained, lambda slot: self._at(slot).number
        pools = self._fleet.pools
        self._slots: list[Replica | None] = [None] * self._fleet.room
        self._pool_of = [pool for pool, each in enumerate(pools) for _ in range(each.room)]
        self._wanted = [pool.count for pool in pools]
        self._turns, self._direction = [0] * len(pools), [0] * len(pools)
        self._returning = 0  # servers that have died and come back
        self._events: list[dict[str, Any]] = []
        self._on_step: Callable[[int], None] | None = None
        self.record = Records([], grows=True)
        self._choice = Choice(router, self.front, [None] * len(self._slots), self._fleet.signals)
        for pool in range(len(pools)):
            self._reconcile(pool, 0, start_ns=0)
        for pool, rule in enumerate(rules):
            if (scaled := pools[pool].autoscale) and rule is not None:
                period_ns = round(scaled.interval_s * NS)
                self.front.every(period_ns, partial(self._ask, pool, rule), period_ns)
        for failure in self._fleet.failures:
            at(self.env, round(failure.at_s * NS), partial(self._fail, failure.server, failure.back_s))

    @property
    def schedulers(self) -> list[Any]:
        return [machine.scheduler for machine in self.machines]

    @property
    def now_ns(self) -> int:
        return max(machine.now_ns for machine in self.machines)

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Run all servers to the end of the workload. Raises DeadlockError."""
        self._on_step = on_step
        try:
            with no_collections():
                self.env.run()
                if any(each.is_alive for each in self._processes):  # one waits for requests that cannot help it
                    self.front.close()
                    self.env.run()
        finally:
            self._sum_up()

    def _served(self, machine: Machine) -> Generator[Any, Any, None]:
        yield from machine.run(self.env, self._on_step)

    def _at(self, slot: int) -> Replica:
        replica = self._slots[slot]
        assert replica is not None
        return replica

    def _in(self, pool: int, *states: State) -> list[Replica]:
        return [each for each in self._slots if each and each.pool == pool and each.state in states]

    def _becomes(self, replica: Replica, state: State, now_ns: int) -> None:
        replica.state = state
        event = {"time_s": now_ns / NS, "pool": self._fleet.labels[replica.pool], "event": state.value}
        server = replica.number if replica.number >= 0 else None
        ready = len(self._in(replica.pool, State.READY))
        self._events.append({**event, "slot": replica.slot, "server": server, "ready": ready})

    def _ask(self, pool: int, rule: Rule, now_ns: int) -> None:
        """Ask the rule of a pool, and do what it says as far as the pool's bounds allow."""
        scaled, wanted = self._fleet.pools[pool].autoscale, self._wanted[pool]
        assert scaled is not None
        self._choice.deliver(now_ns)
        views = [self._choice.views[each.slot] for each in self._in(pool, State.READY)]
        desired = rule.desired(views, len(self._in(pool, State.STARTING)), wanted, now_ns)
        self._wanted[pool] = desired = min(max(desired, scaled.least), scaled.most)
        if direction := (desired > wanted) - (desired < wanted):
            self._turns[pool] += direction == -self._direction[pool]
            self._direction[pool] = direction
        self._reconcile(pool, now_ns, round(scaled.start_s * NS))

    def _reconcile(self, pool: int, now_ns: int, start_ns: int) -> None:
        """Start replicas of a pool, or let some go, until there are as many as are wanted."""
        alive, wanted = self._in(pool, State.STARTING, State.READY), self._wanted[pool]
        free = [slot for slot, its in enumerate(self._pool_of) if its == pool and self._slots[slot] is None]
        for slot in free[: max(0, wanted - len(alive))]:
            self._start(slot, start_ns, now_ns)
        alive.sort(key=lambda each: (each.state is State.STARTING, each.started_ns, each.slot))
        for replica in alive[wanted:]:
            self._drain(replica, now_ns)

    def _start(self, slot: int, start_ns: int, now_ns: int) -> None:
        self._slots[slot] = replica = Replica(self._pool_of[slot], slot, now_ns)
        self.replicas.append(replica)
        if start_ns or now_ns:
            self._becomes(replica, State.STARTING, now_ns)
        if start_ns:
            at(self.env, now_ns + start_ns, lambda _: self._ready(replica))
        else:
            self._ready(replica)

    def _ready(self, replica: Replica) -> None:
        if replica.state is not State.STARTING or not self.front.is_open():
            return
        now_ns, scenario = int(self.env.now), self._scenarios[replica.pool]
        machine = self._build(scenario, self.front, self._costs)
        machine.inbox.news, machine.now_ns = self.env.event(), now_ns
        replica.number, replica.ready_ns = len(self.machines), now_ns
        self.machines.append(machine)
        self._numbered.append(replica)
        self.front.add(machine.inbox)
        blocks = machine.record.total_blocks
        self.record.fleet.append(
            {"pool": self._fleet.labels[replica.pool], "gpus": scenario.gpus, "total_blocks": blocks}
        )
        self.record.add(machine.record)
        self._choice.put(replica.slot, machine)
        self._processes.append(self.env.process(self._served(machine)))
        self._becomes(replica, State.READY, now_ns)
        if chance := self._fleet.random_failures:
            life = Random(f"{chance.seed} {replica.number}").expovariate(chance.per_server_hour / HOUR_NS)
            at(self.env, now_ns + round(life), lambda _: self._die(replica, "died", chance.back_s))
        self.front.send_waiting(now_ns)

    def _drain(self, replica: Replica, now_ns: int) -> None:
        scaled = self._fleet.pools[replica.pool].autoscale
        assert scaled is not None
        if replica.state is State.STARTING:
            self._over(replica, State.GONE, now_ns)
            return
        self._becomes(replica, State.DRAINING, now_ns)
        self._choice.views[replica.slot].ready = False
        self._drained(replica.number, now_ns)
        if scaled.drain_s is not None:
            reason = f"drained for {scaled.drain_s:g} s"
            at(self.env, now_ns + round(scaled.drain_s * NS), lambda _: self._die(replica, reason, None))

    def _drained(self, number: int, now_ns: int) -> None:
        """Let a draining server go once its requests have ended; its CPU may be ahead of the clock."""
        replica = self._numbered[number]
        if replica.state is State.DRAINING and not self.front.open_on[number]:
            at(self.env, max(now_ns, int(self.env.now)), lambda _: self._go(replica))

    def _go(self, replica: Replica) -> None:
        if replica.state is State.DRAINING:
            self._over(replica, State.GONE, int(self.env.now))

    def _fail(self, slot: int, back_s: float | None, _: simpy.Event) -> None:
        replica = self._slots[slot]
        if replica is not None:
            self._die(replica, "died", back_s)

    def _die(self, replica: Replica, reason: str, back_s: float | None) -> None:
        """End a server with all that it has, unless it has gone."""
        if replica.over_ns is not None or not self.front.is_open():
            return
        now_ns = int(self.env.now)
        back = back_s is not None and self._rules[replica.pool] is None
        self._returning += back
        self._over(replica, State.DEAD, now_ns, f"server {replica.number} {reason}")
        if back:
            at(self.env, now_ns + round((back_s or 0) * NS), partial(self._back, replica.slot))
        scaled = any(rule is not None for rule in self._rules)
        self.front.hopeless = not (self._returning or scaled or any(self._slots))
        if self.front.hopeless:
            self.front.send_waiting(now_ns)

    def _back(self, slot: int, _: simpy.Event) -> None:
        self._returning -= 1
        if self.front.is_open():
            self._start(slot, 0, int(self.env.now))

    def _over(self, replica: Replica, state: State, now_ns: int, reason: str = "") -> None:
        """Free the slot of a replica, and start another if one is wanted."""
        if replica.number >= 0:
            self._choice.left(replica.slot, now_ns)
        self._slots[replica.slot], replica.over_ns = None, now_ns
        self._becomes(replica, state, now_ns)
        if replica.number >= 0:
            self.front.cut(replica.number, reason, now_ns)
        if scaled := self._fleet.pools[replica.pool].autoscale:
            self._reconcile(replica.pool, now_ns, round(scaled.start_s * NS))

    def _sum_up(self) -> None:
        """Leave in the record how long servers were there, and what became of them."""
        end_ns = self.now_ns
        hours = list[tuple[Scenario, float]]()
        for replica in self.replicas:
            over_ns = end_ns if replica.over_ns is None else replica.over_ns
            hours.append((self._scenarios[replica.pool], max(0, over_ns - replica.started_ns) / HOUR_NS))
            if replica.number >= 0:  # a step under way is still in its tables
                over_ns = max(over_ns, self.machines[replica.number].now_ns)
                self.record.fleet[replica.number]["lived_s"] = (over_ns - replica.ready_ns) / NS
        prices = [(each.hardware.price_usd_hour, each.gpus * time) for each, time in hours]
        events = Counter(event["event"] for event in self._events)
        lived_s = sum(float(str(each["lived_s"])) for each in self.record.fleet)
        self.record.scaling = {
            "server_hours": sum(time for _, time in hours),
            "gpu_hours": sum(gpu_hours for _, gpu_hours in prices),
            "usd": None if None in dict(prices) else sum((price or 0) * time for price, time in prices),
            "mean": lived_s * NS / end_ns if end_ns else 0.0,
            "starts": events[State.STARTING.value],
            "deaths": events[State.DEAD.value],
            "retries": self.front.retries,
            "turns": dict(zip(self._fleet.labels, self._turns, strict=True)),
            "events": self._events,
        }
