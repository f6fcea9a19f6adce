"""The replay of a run of a log: its requests served by simulated servers, with latencies as its client sees them.

The servers are behind a Kubernetes service; a request is sent to the server of its connection.

The service assigns a new connection to a random server and does not see requests. The client (openai's, on httpx)
keeps connections: a request takes the oldest idle one, or opens one if there is none. A connection that was idle for
KEPT_S is closed. So load is uneven for the lifetime of connections, not only of a request. The logs show it: at 2 to 3
short requests a second the recorded median TTFT is that of one server or that of two, never between, as it would be if
every request were routed anew.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import simpy

from cbsim.errors import ScenarioError
from cbsim.machine.device import OneGpu
from cbsim.machine.lockstep import wake
from cbsim.measured.recorded.reenactment import Replayed, Served, fed, replayed
from cbsim.measured.recorded.score import MetricScore, scores
from cbsim.measured.request_logs.deployments import BUILT, CALIBRATED
from cbsim.measured.request_logs.log import Key, Log, Start, specs
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.runs import assemble
from cbsim.runs.inbox import Inbox
from cbsim.scenario.scenario import Scenario, depth

DRAWS = 5
"""The number of simulated runs of several servers, each with other random connections."""


class Ranged(NamedTuple):
    """A statistic of the run; `score` has the mean of the draws, which lie from `low_s` to `high_s`."""

    score: MetricScore
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A run and its replays. `hits` is the mean over the draws of the share of prompt tokens found in prefix caches."""

    key: Key
    requests: int
    servers: int
    blocks: int
    hits: float
    preemptions: float
    numbers: Sequence[Ranged]

    @property
    def calibrated(self) -> str | None:
        """The values that were chosen by means of this run; None if there are none."""
        return CALIBRATED.get(self.key)

    def number(self, metric: str, statistic: str) -> Ranged:
        return next(each for each in self.numbers if each.score[:2] == (metric, statistic))

    def error(self, metric: str, statistic: str) -> float:
        return self.number(metric, statistic).score.error


def score(folder: Path, log: Log, starts: Sequence[Start], overrides: Sequence[str]) -> Scored:
    """Serve a run's requests by the known deployment of its servers. Raises ScenarioError."""
    deployment = BUILT[log.key.run]
    scenario, servers = deployment.scenario(folder, log.key, overrides), deployment.servers(log.key)
    requests = specs(log, starts, deployment.front_s)
    seeds = range(scenario.seed, scenario.seed + (DRAWS if servers > 1 else 1))
    runs = [serve(scenario, requests, servers, deployment.front_s, seed) for seed in seeds]
    replays, measured = [run.replayed for run in runs], _measured(log)
    return Scored(
        log.key,
        len(log),
        servers,
        replays[0].total_blocks,
        fmean(run.found_tokens for run in runs) / sum(log.prompt_tokens),
        fmean(each.preemptions for each in replays),
        _together([scores(_seen(each.served, log, deployment.front_s), measured) for each in replays]),
    )


def _measured(log: Log) -> Served:
    """Return the times in a log; `scheduled_s` is NaN, as no log records when a request left the queue."""
    launch, first = log.launch_s, log.launch_s + log.ttft_s
    unknown = np.full(len(log), np.nan)
    return Served(launch, unknown, first, first + log.generation_s, np.array(log.output_tokens))


def _seen(served: Served, log: Log, front_s: float) -> Served:
    """Return the times as the client sees them: its first request reaches an idle server `front_s` after its launch."""
    start = log.launch_s[0] + front_s
    scheduled, first, last = (part + start for part in (served.scheduled_s, served.first_token_s, served.last_token_s))
    return Served(log.launch_s, scheduled, first, last, served.output_tokens)


def _together(draws: Sequence[Sequence[MetricScore]]) -> list[Ranged]:
    numbers = []
    for same in zip(*draws, strict=True):
        simulated = [each.simulated_s for each in same]
        numbers.append(Ranged(same[0]._replace(simulated_s=fmean(simulated)), min(simulated), max(simulated)))
    return numbers


KEPT_S = 5.0
"""Seconds after which an idle connection is closed: httpx's keepalive_expiry, and vLLM's timeout_keep_alive."""


class _Connection:
    """A connection to `server`; `idle_ns` is when it became idle, None while a request uses it."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.idle_ns: int | None = None

    def open(self, now_ns: int) -> bool:
        return self.idle_ns is None or now_ns - self.idle_ns < KEPT_S * NS

    def idle(self, now_ns: int) -> bool:
        return self.idle_ns is not None and self.idle_ns <= now_ns


class Connections:
    """The client of all servers. It sends no follow-up requests and cancels none."""

    open: Sequence[RequestSpec] = ()

    def __init__(self, servers: int, seed: int) -> None:
        self.cancels: list[tuple[int, RequestSpec]] = []
        self._servers, self._random = servers, np.random.default_rng(seed)
        self._pool: list[_Connection] = []  # oldest first
        self._busy: dict[int, _Connection] = {}  # index of the request -> its connection

    def server(self, spec: RequestSpec, now_ns: int) -> int:
        """Return the index of the server that receives a request sent now."""
        self._pool = [each for each in self._pool if each.open(now_ns)]
        connection = next((each for each in self._pool if each.idle(now_ns)), None)
        if connection is None:
            connection = _Connection(int(self._random.integers(self._servers)))
            self._pool.append(connection)
        connection.idle_ns = None
        self._busy[spec.index] = connection
        return connection.server

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        self._busy.pop(spec.index).idle_ns = now_ns
        return []


class Service(NamedTuple):
    """The servers' outcome, and the prompt tokens found in their caches when requests were first admitted."""

    replayed: Replayed
    found_tokens: int


def serve(scenario: Scenario, specs: Sequence[RequestSpec], servers: int, front_s: float, seed: int) -> Service:
    """Serve the requests by `servers` servers, each at its own pace. Raises ScenarioError if one is rejected."""
    if scenario.loop.mode == "both":
        raise ScenarioError("loop.mode: got 'both', expected sync or async: a recorded run has one loop")
    env, cost, client = simpy.Environment(), assemble.cost_model(scenario), Connections(servers, seed)
    devices = [OneGpu(cost, depth=depth(scenario.loop.mode), overlap=scenario.loop.streams) for _ in range(servers)]
    fleet = [fed(env, scenario, cost, device, client) for device in devices]
    env.process(_send(env, specs, client, [inbox for _, inbox in fleet], round(front_s * NS)))
    env.run()
    records = [machine.record for machine, _ in fleet]
    hit_tokens = sum(row.cached_tokens for record in records for row in record.requests())
    return Service(replayed(records), hit_tokens)


def _send(
    env: simpy.Environment, specs: Sequence[RequestSpec], client: Connections, inboxes: Sequence[Inbox], front_ns: int
) -> Generator[Any, Any, None]:
    """Run the client as a SimPy process: a request takes its connection at its launch."""
    launches = [env.timeout(spec.arrival_ns - front_ns) for spec in specs]
    for spec, launch in zip(specs, launches, strict=True):
        yield launch
        inbox = inboxes[client.server(spec, int(env.now))]
        inbox.put(spec)
        wake(env, inbox)
    for inbox in inboxes:
        news, inbox.news = inbox.news, None
        news.succeed()
