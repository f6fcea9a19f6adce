"""The `fleet` of a scenario: several servers behind a router, in pools of servers that are alike.

A server is the scenario itself with those fields that its pool gives. So each is checked as a scenario of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from cbsim.scenario.fields import Frozen, Many, Real, Seconds, Text, Whole, complaint, near
from cbsim.scenario.schedulers import Router

SERVER = ("model", "hardware", "scheduler", "kv_cache", "loop", "cost")
CHOSEN = {"scheduler": "name", "cost": "kind"}  # the field of a part that chooses its kind
MOST_SERVERS = 10_000
LEAST_S = 0.001  # between two scrapes


def _of_a_server(fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in SERVER:
            hint = near(name, SERVER) or f"; allowed: {', '.join(SERVER)}"
            raise complaint(f"unknown field{hint}", str(name))
    return fields


class Pool(Frozen):
    """Servers that are alike."""

    count: Annotated[Whole, Field(ge=1, le=MOST_SERVERS)] = 1  #: How many.
    name: Annotated[Text, Field(min_length=1, max_length=60)] | None = None  #: Names the pool; null: its number.
    server: Annotated[dict[str, Any], AfterValidator(_of_a_server), Field(default_factory=dict)]
    """Fields of the scenario that differ: of model, hardware, scheduler, kv_cache, loop, cost."""


class Signals(Frozen):
    """How old is what the router knows of the servers, besides its own books."""

    metrics_s: Annotated[Real, Field(ge=LEAST_S)] = 0.05  #: Seconds from one scrape of the metrics to the next.
    events_s: Seconds = 0.0  #: Seconds until the router knows that a block was cached or evicted.


class Fleet(Frozen):
    """Several servers behind a router."""

    pools: Annotated[Many[Pool], Field(min_length=1)]  #: The servers, numbered from 0 in this order.
    router: Router  #: Who gets a request.
    signals: Signals = Signals()  #: How old is what the router knows.

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
        name: checked[name]
        if _replaces(base.get(name), value, CHOSEN.get(name)) or not isinstance(checked[name], dict)
        else resolved(base[name], value, checked[name])
        for name, value in given.items()
    }


def _replaces(old: Any, new: Any, chosen: str | None) -> bool:
    parts = isinstance(old, dict) and isinstance(new, dict)
    return not parts or (chosen is not None and new.get(chosen, old.get(chosen)) != old.get(chosen))
