"""A run of a log served again, as its client saw it and as it would have seen ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from cbsim.proof.recorded.reenactment import Served
from cbsim.proof.recorded.score import MetricScore, scores
from cbsim.proof.request_logs import prompts, service
from cbsim.proof.request_logs.deployments import BUILT, CALIBRATED
from cbsim.proof.request_logs.log import Key, Log, Start

DRAWS = 5
"""Simulated runs of several servers, each with other connections to them."""


class Ranged(NamedTuple):
    """A number of the run; `score` has the mean of the draws, which lie from `low_s` to `high_s`."""

    score: MetricScore
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A run and its replays. `hits`: share of the prompts' tokens found in caches, the mean of the draws."""

    key: Key
    requests: int
    servers: int
    blocks: int
    hits: float
    preemptions: float
    numbers: Sequence[Ranged]

    @property
    def calibrated(self) -> str | None:
        """What was chosen by looking at it."""
        return CALIBRATED.get(self.key)

    def number(self, metric: str, statistic: str) -> Ranged:
        return next(each for each in self.numbers if each.score[:2] == (metric, statistic))

    def error(self, metric: str, statistic: str) -> float:
        return self.number(metric, statistic).score.error


def score(folder: Path, log: Log, starts: Sequence[Start], overrides: Sequence[str]) -> Scored:
    """Serve a run's requests by what is known of its servers. Raises ScenarioError."""
    deployment = BUILT[log.key.run]
    scenario, servers = deployment.scenario(folder, log.key, overrides), deployment.servers(log.key)
    requests = prompts.specs(log, starts, deployment.front_s)
    seeds = range(scenario.seed, scenario.seed + (DRAWS if servers > 1 else 1))
    runs = [service.serve(scenario, requests, servers, deployment.front_s, seed) for seed in seeds]
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
    """Nobody noted when a request left the queue."""
    launch, first = log.launch_s, log.launch_s + log.ttft_s
    unknown = np.full(len(log), np.nan)
    return Served(launch, unknown, first, first + log.generation_s, np.array(log.output_tokens))


def _seen(served: Served, log: Log, front_s: float) -> Served:
    """By the client: its first request comes to an idle server `front_s` after the launch."""
    start = log.launch_s[0] + front_s
    scheduled, first, last = (part + start for part in (served.scheduled_s, served.first_token_s, served.last_token_s))
    return Served(log.launch_s, scheduled, first, last, served.output_tokens)


def _together(draws: Sequence[Sequence[MetricScore]]) -> list[Ranged]:
    numbers = []
    for same in zip(*draws, strict=True):
        simulated = [each.simulated_s for each in same]
        numbers.append(Ranged(same[0]._replace(simulated_s=fmean(simulated)), min(simulated), max(simulated)))
    return numbers
