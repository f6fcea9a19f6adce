"""The replay of a run of a log: its requests served by simulated servers, with latencies as its client sees them.

The known servers behind runs of llm-d-benchmark are scenarios, servers.yaml beside this file; of the others it is said
there why too little is known. The runs of 2025-05 used vLLM 0.8.5: prefix caching, chunked prefill, no asynchronous
loop, and for a server on a GPU of 70 GiB or more, A100s included, 8,192 query tokens a step and 1,024 requests (vLLM
pull requests 17073 and 17885). Sizes of the KV cache follow from the memory.

Terms and fronts are costs that no table holds. `elementwise` and `row_s` were calibrated on other servers, those of
scenarios/terms/vllm-experts.yaml, and rounded; that file has been made again since. Each other one is calibrated on the
runs named in `calibrated`, and on no other. The runs determine only the sum of `layer_s` and `reduce_s`, which is all
given to `layer_s` of the A100.

The servers are behind a Kubernetes service (`kubernetes_service` of cbsim/routers/simple.py), the client is openai's,
on httpx. The logs show that load is uneven for the lifetime of connections, not only of a request: at 2 to 3 short
requests a second the recorded median TTFT is that of one server or that of two, never between, as it would be if every
request were routed anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from cbsim.machine.front import Choice
from cbsim.machine.simulate import Fleet
from cbsim.measured.points.build import NOTHING_ADDED
from cbsim.measured.recorded.case import CPU
from cbsim.measured.recorded.score import MetricScore, Replayed, Served, check_loop, run_fleet, scores
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.routers.simple import KubernetesService, ServiceSettings
from cbsim.scenario import documents, scenario
from cbsim.scenario.fields import Frozen, Many, Real, Whole
from cbsim.scenario.fleet import Signals
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload
from reports.fidelity.request_logs.log import REQUESTS, Key, Log, Start, specs

SCENARIOS = ("sharegpt", "short_input")


class Deployment(Frozen):
    """A deployment of servers, by the fields of a scenario of one of them, and the runs that were made on it."""

    runs: Many[str]
    server: dict[str, Any]
    terms: dict[str, Real]
    front_s: Real
    replicas: Whole = 1
    alone_above: Real | None = None

    def servers(self, key: Key) -> int:
        alone = self.alone_above is not None and key.scenario == "sharegpt" and key.qps > self.alone_above
        return 1 if alone else self.replicas

    def scenario(self, folder: Path, key: Key, overrides: Sequence[str]) -> Scenario:
        """Return the scenario of one of its servers. Raises ScenarioError."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{key.run.rpartition('/')[2]}-{key.scenario}-{key.qps:g}")
        question = f"How near does the simulator come to the requests of {key}?"
        workload = {"kind": "csv", "path": str((folder / REQUESTS).resolve())}
        cost = {**self.server["cost"], "cpu": CPU, **(NOTHING_ADDED | self.terms if self.terms else {})}
        data = {**self.server, "name": name, "question": question, "workload": workload, "cost": cost}
        return scenario.parse(data, name, overrides)


class _Chosen(Frozen):
    run: str
    scenario: str
    qps: Many[Real]
    chosen: str


class _Benchmark(Frozen):
    """The content of servers.yaml."""

    deployments: Many[Deployment]
    not_built: dict[str, str]
    calibrated: Many[_Chosen]


_KNOWN = documents.read(Path(__file__).with_name("servers.yaml")).checked(_Benchmark)
BUILT = {run: each for each in _KNOWN.deployments for run in each.runs}
CALIBRATED = {Key(each.run, each.scenario, qps): each.chosen for each in _KNOWN.calibrated for qps in each.qps}
"""The values that were chosen by means of a run, whose errors are therefore no predictions."""


def missing(key: Key, requests: int, prompts: int) -> str | None:
    """Return why a run of `requests` requests cannot be built, None if it can. `prompts` counts those of `sharegpt`."""
    if key.run not in BUILT:
        return next(reason for pattern, reason in _KNOWN.not_built.items() if fnmatch(key.run, pattern))
    if key.scenario not in SCENARIOS:
        return f"what prompts of {key.scenario} share is not known"
    if key.scenario == "sharegpt" and requests != prompts:
        return f"{requests} of {prompts} requests are recorded"
    return None


DRAWS = 5  # simulated runs of several servers, each with other random connections


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


def serve(scenario: Scenario, specs: Sequence[RequestSpec], servers: int, front_s: float, seed: int) -> Replayed:
    """Serve requests, which take a connection `front_s` before they arrive. Raises ScenarioError if one is rejected."""
    check_loop(scenario)
    fleet, draws = Fleet([scenario] * servers, Workload(specs, len(specs)), together=False), np.random.default_rng(seed)
    settings, draw = ServiceSettings(name="kubernetes_service"), lambda: int(draws.integers(servers))
    router = KubernetesService(draw, settings, round(front_s * NS))
    Choice(router, fleet.front, fleet.machines, Signals(metrics_s=60))  # it reads no metrics
    return run_fleet(fleet)
