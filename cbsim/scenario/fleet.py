"""The `fleet` of a scenario: several servers behind a router, in pools of servers that are alike.

A server is the scenario itself with those fields that its pool gives. So each is checked as a scenario of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cbsim.policy.kind import Role
from cbsim.routers.simple import PlainSettings
from cbsim.scenario.fields import Frozen, Many, Real, Seconds, Text, Whole, complaint, known_only
from cbsim.scenario.schedulers import Router, Rule

SERVER = ("model", "hardware", "scheduler", "kv_cache", "loop", "cost", "speculation")
CHOSEN = {"scheduler": "name", "cost": "kind"}  # the field of a part that chooses its kind
MOST_SERVERS = 10_000
LOCAL = {"local_below_tokens": 0, "most_waiting_prefills": "null", "prefill_queue": "server"}  # without local prefills
LEAST_S = 0.001  # between two scrapes, or two calls of a rule
Replicas = Annotated[Whole, Field(ge=1, le=MOST_SERVERS)]


class Autoscale(Frozen):
    """When replicas of a pool are started, and when they go. A replica takes requests once it has started; one that is
    to go gets no new ones, and goes when those that it has have ended. Those that start are the first to go, then those
    that have been there for the shortest time.
    """

    rule: Rule  #: Who says how many there should be.
    least: Replicas = 1  #: Replicas that there are at least, draining ones not counted.
    most: Replicas  #: Replicas that there are at most, starting and draining ones included.
    start_s: Seconds = 60.0  #: Seconds until a replica that is started takes requests.
    drain_s: Seconds | None = None  #: Seconds until a draining replica is killed; null: it never is.
    interval_s: Annotated[Real, Field(ge=LEAST_S)] = 15.0  #: Seconds between two calls of the rule.


class Failure(Frozen):
    """The death of a server, with all that it has cached."""

    server: Annotated[Whole, Field(ge=0)]  #: Which, by its number in the fleet, where each pool has room for its most.
    at_s: Seconds  #: When; nothing happens if there is none by then.
    back_s: Seconds | None = None
    """Seconds until another takes its place; null: none does. A pool that is scaled starts one at once."""


class RandomFailures(Frozen):
    """Deaths at random: each server lives for a time that is drawn from an exponential distribution."""

    per_server_hour: Annotated[Real, Field(ge=1e-9)]  #: Deaths in an hour of a server.
    back_s: Seconds | None = None  #: As of a single failure.
    seed: Annotated[Whole, Field(ge=0)] = 0  #: Of these draws.


class Pool(Frozen):
    """Servers that are alike."""

    count: Replicas = 1  #: How many, at the start if the pool is scaled.
    role: Role = "both"
    """What they do of a request: its prefill, whose KV a server that decodes gets; its decoding; both."""
    name: Annotated[Text, Field(min_length=1, max_length=60)] | None = None  #: Names the pool; null: its number.
    server: Annotated[dict[str, Any], AfterValidator(partial(known_only, known=SERVER)), Field(default_factory=dict)]
    """Fields of the scenario that differ: of model, hardware, scheduler, kv_cache, loop, cost, speculation."""
    autoscale: Autoscale | None = None  #: When replicas start and go; null: there are always `count`.

    @property
    def room(self) -> int:
        """The most servers that it has at a time."""
        return self.autoscale.most if self.autoscale else self.count

    @model_validator(mode="after")
    def _in_bounds(self) -> Self:
        of = self.autoscale
        if of and of.least > of.most:
            raise complaint(f"got {of.least}, must be <= most ({of.most})", "autoscale.least")
        if of and not of.least <= self.count <= of.most:
            bound = f"must be autoscale.least to autoscale.most ({of.least} to {of.most})"
            raise complaint(f"got {self.count}, {bound}", "count")
        return self


class Signals(Frozen):
    """How old is what the router knows of the servers, besides its own books."""

    metrics_s: Annotated[Real, Field(ge=LEAST_S)] = 0.05  #: Seconds from one scrape of the metrics to the next.
    events_s: Seconds = 0.0  #: Seconds until the router knows that a block was cached or evicted.


class Link(Frozen):
    """What KV goes over from server to server: a NIC in each, which sends and receives at its rate at the same time. A
    transfer by itself takes latency_s + descriptors * descriptor_s + bytes / bandwidth.
    """

    bandwidth_gb_s: Annotated[Real, Field(ge=0.001)]
    """Rate of a server's NIC (of all its NICs together), GB/s in each direction."""
    latency_s: Annotated[Seconds, Field(le=60)] = 0.0  #: Seconds that each transfer takes besides.
    descriptor_s: Annotated[Seconds, Field(le=0.001)] = 0.0
    """Seconds for each descriptor, a piece of memory that is contiguous on both sides: of a block those of each layer,
    K and V apart, and of each share of heads where servers have different numbers of GPUs."""
    sharing: Literal["fair", "fifo"] = "fair"
    """fair: transfers of a NIC share its rate equally, each at the lower of its two shares; fifo: one at a time."""
    most_transfers: Annotated[Whole, Field(ge=1)] | None = None
    """Transfers of a NIC at a time, with fair; others wait, first come, first served. Null: any number."""

    @model_validator(mode="after")
    def _one_at_a_time(self) -> Self:
        if self.sharing == "fifo" and self.most_transfers not in (None, 1):
            raise complaint(f"got {self.most_transfers}, must be null or 1 with sharing fifo", "most_transfers")
        return self

    @property
    def most(self) -> float:
        """The most transfers of a NIC at a time."""
        return 1 if self.sharing == "fifo" else self.most_transfers or float("inf")


class HandOff(Frozen):
    """How a request gets from the server that prefills to the one that decodes, which is chosen when it arrives."""

    router: Router = PlainSettings(name="least_in_flight")  #: Who decodes.
    transfer: Literal["pull", "push", "layerwise"] = "pull"
    """pull: after the prefill the decoding server takes blocks and reads. push: it takes blocks first, then the prefill
    begins, and writes at its end. layerwise: as push, but layers are written while the prefill goes on."""
    local_below_tokens: Annotated[Whole, Field(ge=0)] = 0
    """The decoding server prefills a prompt itself that has fewer tokens than this which it has not cached."""
    most_waiting_prefills: Annotated[Whole, Field(ge=0)] | None = None
    """The decoding server prefills a prompt itself that arrives while as many hand-offs wait for their prefill: it is
    not over, or with prefill_queue global no server has it yet. Null: any number waits."""
    prefill_queue: Literal["server", "global"] = "server"
    """server: a prompt waits at the server that is chosen when it arrives. global: a server that prefills gets one
    prompt at a time; others wait in one queue until one is idle. fleet.router must be least_in_flight, no role both."""
    lease_s: Seconds | None = 30.0
    """Seconds that one side's blocks wait for those of the other: a prefill's for the decoding server, or with push
    those of the decoding server for the end of the prefill. Then it computes the prompt itself. Null: for ever."""
    link: Link  #: What KV goes over.


class Fleet(Frozen):
    """Several servers behind a router."""

    pools: Annotated[Many[Pool], Field(min_length=1)]  #: The servers, numbered from 0 in this order.
    router: Router  #: Who gets a request; where pools have roles, who prefills it.
    hand_off: HandOff | None = None  #: From prefill to decode; null if every pool has role both.
    signals: Signals = Signals.model_construct()  #: How old is what the router knows.
    failures: Many[Failure] = ()  #: Servers that die, and when.
    random_failures: RandomFailures | None = None  #: Further deaths, at random; null: none.
    most_retries: Annotated[Whole, Field(ge=0, le=1000)] = 3
    """How often the client sends a request of a dead server again before it fails. One of several samples fails."""

    @model_validator(mode="after")
    def _pools_agree(self) -> Self:
        if len(set(self.labels)) < len(self.labels):
            bound = "must differ (a pool without a name has its number, from 0)"
            raise complaint(f"got the names {', '.join(self.labels)}, {bound}", "pools")
        if self.room > MOST_SERVERS:
            raise complaint(f"got {self.room:,} servers, must be <= {MOST_SERVERS:,} in all", "pools")
        rooms = [pool for pool in self.pools for _ in range(pool.room)]
        for at, each in enumerate(self.failures):
            if each.server >= len(rooms):
                raise complaint(f"got {each.server}, must be <= {len(rooms) - 1}", f"failures.{at}.server")
            if each.back_s is not None and rooms[each.server].autoscale:
                bound = "must be null in a pool that is scaled, which starts another at once"
                raise complaint(f"got {each.back_s:g}, {bound}", f"failures.{at}.back_s")
        return self

    @model_validator(mode="after")
    def _roles_have_partners(self) -> Self:
        roles = {pool.role for pool in self.pools}
        named = next((at for at, pool in enumerate(self.pools) if pool.role != "both"), None)
        if named is None:
            if self.hand_off is not None:
                raise complaint("must be null if every pool has role both", "hand_off")
            return self
        for role in ("prefill", "decode"):
            if not roles & {role, "both"}:
                got, bound = self.pools[named].role, f"another pool must have role {role} or both"
                raise complaint(f"got {got}: {bound}", f"pools.{named}.role")
        if self.hand_off is None:
            raise complaint(f"is required with pools.{named}.role {self.pools[named].role}", "hand_off")
        if self.hand_off.prefill_queue == "global" and "both" in roles:
            raise complaint("got global, must be server if any pool has role both", "hand_off.prefill_queue")
        if self.hand_off.prefill_queue == "global" and self.router.name != "least_in_flight":
            bound = "must be least_in_flight with hand_off.prefill_queue global"
            raise complaint(f"got {self.router.name}, {bound}", "router.name")
        return self

    @property
    def changes(self) -> str | None:
        """The first field by which servers come or go."""
        fields: dict[str, object] = {f"pools.{at}.autoscale": pool.autoscale for at, pool in enumerate(self.pools)}
        fields |= {"failures": self.failures, "random_failures": self.random_failures}
        return next((name for name, value in fields.items() if value), None)

    @property
    def room(self) -> int:
        """The most servers that it has at a time."""
        return sum(pool.room for pool in self.pools)

    def slots(self, part: Role) -> list[int]:
        """Return the servers that may do a part of a request, by number, where each pool has room for its most."""
        roles = [pool.role for pool in self.pools for _ in range(pool.room)]
        return [slot for slot, role in enumerate(roles) if role in (part, "both")]

    @property
    def count(self) -> int:
        return sum(pool.count for pool in self.pools)

    @property
    def pool_names(self) -> list[str]:
        """The name of the pool of each server."""
        return [name for name, pool in zip(self.labels, self.pools, strict=True) for _ in range(pool.count)]

    @property
    def labels(self) -> list[str]:
        """The name of each pool."""
        return [str(at) if pool.name is None else pool.name for at, pool in enumerate(self.pools)]


def check_roles(fleet: Fleet, servers: Sequence[Any]) -> None:
    """Raise a complaint unless the server of each pool, a Scenario, can have its role, and what one has cached another
    can read.
    """
    local = next((name for name, none in LOCAL.items() if getattr(fleet.hand_off, name) not in (none, None)), None)
    first, named = servers[0], next(at for at, pool in enumerate(fleet.pools) if pool.role != "both")
    for at, (pool, server) in enumerate(zip(fleet.pools, servers, strict=True)):
        apart = {"both": named}.get(pool.role, at)
        samples = getattr(server.workload, "samples", 1)
        whole = server.model.sees_all or getattr(server.scheduler, "disable_hybrid_kv_cache_manager", False)
        for holds, what in (
            (server.kind.hands_off, f"scheduler {server.scheduler.name}, which hands no requests over"),
            (server.stages == 1, f"a pipeline (cost.pipeline_parallel, {server.stages})"),
            (server.speculation is None, "speculation"),
            (whole, "layers with windows, chunks or states (model.attention)"),
            (samples == 1, f"several samples of a request (workload.samples, {samples})"),
        ):
            if not holds:
                got = f"got {fleet.pools[apart].role}, must be both with {what}"
                raise complaint(got, f"fleet.pools.{apart}.role")
        if local and server.kind.brings_first:
            bound = f"{LOCAL[local]} with scheduler {server.scheduler.name}, whose decoding servers compute no prompts"
            raise complaint(f"got {getattr(fleet.hand_off, local)}, must be {bound}", f"fleet.hand_off.{local}")
        for name, ours, theirs in (
            ("model.name", server.model.name, first.model.name),
            ("kv_cache.block_size", server.block_size, first.block_size),
            ("model", server.model.kv_bytes_per_token, first.model.kv_bytes_per_token),
        ):
            if ours != theirs:
                unit = " bytes of KV a token" if name == "model" else ""
                bound = f"must be that of pool 0 ({theirs}{unit}): one reads what the other has cached"
                raise complaint(f"got {ours}{unit}, {bound}", f"fleet.pools.{at}.server.{name}")


def with_fields(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain fields with others in their place; a part of another kind replaces the whole part."""
    data = copy.deepcopy(dict(base))
    for name, value in given.items():
        if _replaces(data.get(name), value, CHOSEN.get(name)):
            data[name] = copy.deepcopy(value)
        else:
            data[name] = with_fields(data[name], value)
    return data


def resolved(base: Mapping[str, Any], given: Mapping[str, Any], checked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `given` as they are once `checked`: parts that replace others with all their defaults."""
    return {
        name: checked.get(name)
        if _replaces(base.get(name), value, CHOSEN.get(name)) or not isinstance(checked.get(name), dict)
        else resolved(base[name], value, checked[name])
        for name, value in given.items()
    }


def _replaces(old: Any, new: Any, chosen: str | None) -> bool:
    parts = isinstance(old, dict) and isinstance(new, dict)
    return not parts or (chosen is not None and new.get(chosen, old.get(chosen)) != old.get(chosen))
