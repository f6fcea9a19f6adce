"""The replay of a run of a log: its requests served by simulated servers, with latencies as its client sees them.

The servers are behind a Kubernetes service; a request is sent to the server of its connection.

The service assigns a new connection to a random server and does not see requests. The client (openai's, on httpx)
keeps connections: a request takes the oldest idle one, or opens one if there is none. A connection that was idle for
KEPT_S is closed. So load is uneven for the lifetime of connections, not only of a request. The logs show it: at 2 to 3
short requests a second the recorded median TTFT is that of one server or that of two, never between, as it would be if
every request were routed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from cbsim.machine.lockstep import feed
from cbsim.measured.recorded.score import Feed, MetricScore, Replayed, Served, check_loop, fleet, scores
from cbsim.measured.request_logs.deployments import BUILT, CALIBRATED
from cbsim.measured.request_logs.log import Key, Log, Start, specs
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.scenario.scenario import Scenario

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
    measured = _measured(log)
    return Scored(
        log.key,
        len(log),
        servers,
        runs[0].total_blocks,
        fmean(run.cached_tokens for run in runs) / sum(log.prompt_tokens),
        fmean(each.preemptions for each in runs),
        _together([scores(_seen(each.served, log, deployment.front_s), measured) for each in runs]),
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


@dataclass(slots=True)
class _Connection:
    """A connection to `server`; `idle_ns` is when it became idle, None while a request uses it."""

    server: int
    idle_ns: int | None = None


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
        self._pool = [each for each in self._pool if each.idle_ns is None or now_ns - each.idle_ns < KEPT_S * NS]
        connection = next((each for each in self._pool if each.idle_ns is not None and each.idle_ns <= now_ns), None)
        if connection is None:
            connection = _Connection(int(self._random.integers(self._servers)))
            self._pool.append(connection)
        connection.idle_ns = None
        self._busy[spec.index] = connection
        return connection.server

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        self._busy.pop(spec.index).idle_ns = now_ns
        return []


def serve(scenario: Scenario, specs: Sequence[RequestSpec], servers: int, front_s: float, seed: int) -> Replayed:
    """Serve the requests by `servers` servers, each at its own pace; a request takes its connection at its launch,
    `front_s` before it arrives. Raises ScenarioError if one is rejected.
    """
    check_loop(scenario)
    client = Connections(servers, seed)
    process: Feed = lambda env, inboxes, _: feed(env, specs, inboxes, client.server, round(front_s * NS))  # noqa: E731
    return fleet(scenario, servers, client, process)
