"""The loads of a measurement, whatever wrote it, and each of them again on a simulated server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cbsim.errors import ScenarioError
from cbsim.machine.repriced import REPRICED, Repriced
from cbsim.machine.simulate import Simulation
from cbsim.measured.own.measurement import Floats, Load, Measurement, read
from cbsim.policy.request import RequestSpec
from cbsim.record import directory
from cbsim.record.columns import NS
from cbsim.record.record import Record
from cbsim.record.tables import Ints, token_times
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Users, Workload

LOST, CACHED = 0.05, 0.05  # shares of failed requests, and of cached prompt tokens, from which on a load is not used
SAME = ("engine", "version", "model", "num_blocks", "block_size")


def measurement(paths: Sequence[Path], where: Mapping[str, str]) -> Measurement:
    """Read what was measured of one server: directories of `cbsim measure`, files of other clients, in any number;
    `where` chooses rows of CSV files. Raises ScenarioError or RunError, also if they are of several servers.
    """
    first, *more = parts = [read(path, where) for path in paths]
    for part, name in product(more, SAME):
        both = [getattr(each.facts, name) for each in (first, part)]
        if None not in both and both[0] != both[1]:
            message = f"{part.path}: {name}: got {both[1]}, that of {first.path} is {both[0]}: of another server"
            raise ScenarioError(message, file=part.path, field=name, value=both[1])
    loads = dict[str, Load]()
    for part in parts:
        for load in part.loads:
            name = load.name if load.name not in loads else f"{part.path.stem} {load.name}"
            loads[name] = replace(load, name=name, left_out=load.left_out or _unusable(load))
    incomplete = "; ".join(part.incomplete for part in parts if part.incomplete)
    made = replace(first, loads=tuple(loads.values()), incomplete=incomplete)
    if not made.usable:
        raise ScenarioError(f"{first.path}: no load of it can be used: all requests failed, or were left out")
    return made


def _unusable(load: Load) -> str:
    """Return why a load cannot be simulated as it was, "" if it can."""
    lost, cached = load.failed.mean(), load.cached_tokens.clip(0).sum() / max(1, load.prompt_tokens.sum())
    if lost > LOST:
        return f"{lost:.0%} of its requests failed"
    return f"{cached:.0%} of its prompt tokens were cached, which is not replayed" if cached > CACHED else ""


class Largest(NamedTuple):
    """The most of a step's rows, query tokens and context tokens."""

    rows: int = 0
    tokens: int = 0
    context_tokens: int = 0


class Played(NamedTuple):
    """A load as a simulated server serves it: with the times that its client sees, NaN where a request failed. `slopes`
    are how far mean TTFT and TPOT move with terms, or with the costs of other scenarios, [term, metric].
    """

    load: Load
    slopes: Floats
    largest: Largest


def play(scenario: Scenario, load: Load, front_s: float, priced: Sequence[Scenario] = ()) -> Played:
    """Serve a load, each of its repeats by an idle server, which gets a request `front_s` after the client sent it.
    Raises ScenarioError.
    """
    times, moved, largest = np.full((2, len(load)), np.nan), np.zeros((len(priced), 2)), Largest()
    for number in np.unique(load.repeat[~load.failed]):
        at = np.flatnonzero((load.repeat == number) & ~load.failed)
        start = load.start_s[at] - load.start_s[at].min()
        workload = _workload(start, load.prompt_tokens[at], load.output_tokens[at], load.users, front_s)
        times[:, at], more, most = _served(scenario, workload, priced)
        moved += more * len(at) / (~load.failed).sum()
        largest = Largest(*map(max, largest, most))
    several = int((load.output_tokens[~load.failed] > 1).sum())
    moved[:, 1] *= (~load.failed).sum() / max(several, 1)  # single tokens have no TPOT
    ttft_s, e2e_s = times + front_s
    return Played(replace(load, ttft_s=ttft_s, e2e_s=e2e_s), moved, largest)


def _workload(start_s: Floats, prompts: Ints, outputs: Ints, users: int | None, front_s: float) -> Workload:
    """Return requests that arrive as they were sent, or in a closed loop one after the other, each user's first one as
    it was sent.
    """
    arrivals = np.rint((start_s + front_s) * NS).astype(int).tolist()
    rows = enumerate(zip(arrivals, prompts.tolist(), outputs.tolist(), strict=True))
    specs = [RequestSpec(at, str(at), ns, prompt, output, output) for at, (ns, prompt, output) in rows]
    if users is None or users >= len(specs):
        return Workload(specs, len(specs))
    return Workload(specs[:users], len(specs), follow=Users(specs[users:], round(front_s * NS)))


def _served(scenario: Scenario, workload: Workload, priced: Sequence[Scenario]) -> tuple[Floats, Floats, Largest]:
    """Return TTFT and E2E by request, how other costs move mean TTFT and TPOT, and the largest step."""
    loop = scenario.loop.mode
    server = Repriced(scenario, loop, workload, priced) if priced else Simulation(scenario, loop, workload)
    server.run(lambda _: None)
    for record in [server.record] if isinstance(server.record, Record) else server.record.records:
        for spec, reason in getattr(record, "refusals", {}).items():
            raise ScenarioError(f"scheduler, kv_cache: request {spec.id} of the load cannot be served: {reason}")
    table, steps = directory.contents(server.record)
    requests = token_times(table, steps)
    first, last = requests.first_token_ns, requests.last_token_ns
    times = np.array([first - requests.arrival_ns, last - requests.arrival_ns]) / NS
    moved = np.zeros((0, 2))
    if priced:
        by = json.loads(server.files()[REPRICED])
        moved = np.array([by["ttft_s"], by["tpot_s"]]).T
    return times, moved, Largest(*(int(steps[name].max()) for name in Largest._fields))
