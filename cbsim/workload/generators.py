"""Scenario and seed -> the requests of a run, and those that follow the end of others.

Every kind of random number has a generator of its own, spawned from the one seed: scenarios that differ in their
scheduler, or only in their arrivals, share the others' numbers exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbsim.policy.request import RequestSpec
from cbsim.scenario import catalog, demand, memory
from cbsim.scenario import lengths as length_tables
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.scenario import Scenario
from cbsim.workload import coarse_stamps, csv_columns, scheduler_tests, served, traces, vllm_bench
from cbsim.workload.clients import Sessions, Users
from cbsim.workload.drawn import Drawn

Ints = NDArray[np.int64]
LATEST_S = 4.6e9
"""No arrival is later. No run gets there: the machine's clock ends before."""
LONG_GAP_NS = 100_000_000_000
"""Few servers wait longer for a request, and a log in milliseconds of one request in 0.1 s has such gaps."""


class Streams(NamedTuple):
    """The random generators of a run."""

    arrivals: np.random.Generator
    prompts: np.random.Generator
    outputs: np.random.Generator
    priorities: np.random.Generator
    spread: np.random.Generator
    users: np.random.Generator  # spawns one for each user

    @classmethod
    def of(cls, seed: int) -> Streams:
        return cls(*map(np.random.default_rng, np.random.SeedSequence(seed).spawn(6)))


@dataclass
class Workload:
    """What is sent to the server. One object is good for one run: it remembers what has been sent.

    `open` holds the requests whose arrival does not depend on the server, by (arrival_ns, index). The others come out
    of `on_finish`; `total` counts both. `cancels` are (time in ns, request) in order of time.
    """

    open: Sequence[RequestSpec]
    total: int
    cancels: list[tuple[int, RequestSpec]] = field(default_factory=list)
    follow: Users | Sessions | None = None
    terms: str = ""  # how requests follow others, as far as their delays do not say it
    notices: tuple[str, ...] = ()  # what its user may not have meant, a line each

    def __post_init__(self) -> None:
        if not isinstance(self.open, Drawn):
            self.open = sorted(self.open, key=lambda spec: (spec.arrival_ns, spec.index))
        self._later = tuple(self.follow.drafts()) if self.follow else ()
        self._by_index: dict[int, RequestSpec] | None = None

    def arriving(self) -> Iterator[RequestSpec]:
        """The requests of `open` one by one, for a run that keeps none of them longer than it has to."""
        return self.open.once() if isinstance(self.open, Drawn) else iter(self.open)

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Requests that follow `spec`, which ended at `now_ns`. To be called once for every request that ends, for
        whatever reason: one that is refused is followed too.
        """
        return self.follow.after(spec, now_ns) if self.follow else []

    def find(self, index: int) -> RequestSpec | None:
        """The request of this number as it was before the run, None if there is none. A drawn one is made anew."""
        if isinstance(self.open, Drawn):
            return self.open.one(index) if 0 <= index < len(self.open) else None
        if self._by_index is None:
            self._by_index = {spec.index: spec for spec in self.specs()}
        return self._by_index.get(index)

    def specs(self) -> list[RequestSpec]:
        """All requests as they were before the run; those that follow others have no arrival time of their own yet."""
        return [*self.open, *(spec for spec, _ in self._later)]

    def fingerprint(self) -> str:
        """SHA-256 over all fields of all requests as they were before the run; equal workloads have equal ones."""
        digest = hashlib.sha256()
        for spec, delay_ns in chain(((spec, -1) for spec in self.arriving()), self._later):
            lengths = (spec.arrival_ns, spec.prompt_tokens, spec.output_tokens, spec.max_tokens, spec.priority)
            shared = (spec.prefix, spec.prefix_block_tokens, spec.prefix_tokens)
            of = f" of {spec.sample_of.index}" if spec.sample_of else ""
            digest.update(f"{spec.index} {spec.id!r} {lengths} {shared} {delay_ns}{of}\n".encode())
        digest.update(self.terms.encode())
        for at_ns, spec in self.cancels:
            digest.update(f"cancel {spec.index} {at_ns}\n".encode())
        return digest.hexdigest()


def build(scenario: Scenario, given: str | None = None) -> Workload:
    """The workload of a scenario; `given` is the text of a `csv` workload's file that is not written yet. Raises
    ScenarioError if a trace is missing or has a bad row.
    """
    if given is not None and isinstance(scenario.workload, demand.Served):
        return _session(served.parse(Path(served.FILE), given.splitlines()))
    if given is not None:
        return _timed(traces.plain_rows(Path("requests"), StringIO(given, newline="")), 1.0)
    wanted, streams = scenario.workload, Streams.of(scenario.seed)
    builders: dict[type, Callable[[Any, Streams], Workload]] = {
        demand.Synthetic: _synthetic,
        demand.Azure: _azure,
        demand.Mooncake: _mooncake,
        demand.Csv: _csv,
        demand.Lengths: _lengths,
        demand.Golden: _golden,
        demand.Agentic: _agentic,
        demand.VllmBench: _vllm_bench,
        demand.Served: _served,
    }
    if (texts := scenario.kind.samples(scenario.scheduler)) > 1:
        return _searched(wanted, streams, texts)
    return builders[type(wanted)](wanted, streams)


# -- synthetic --------------------------------------------------------------------------------------------------------


def draw(length: object, count: int, rng: np.random.Generator, name: str = "workload") -> Ints:
    """`count` lengths in tokens."""
    if isinstance(length, demand.Uniform):
        return rng.integers(length.uniform.low, length.uniform.high, count, endpoint=True)
    if isinstance(length, demand.LognormalLength):
        return _lognormal(length.lognormal, count, rng)
    if isinstance(length, demand.Empirical):
        return rng.choice(np.array(_sample(length.empirical, name), dtype=np.int64), count)
    assert isinstance(length, int)
    return np.full(count, length, dtype=np.int64)


def draw_pairs(name: str, count: int, streams: Streams, samples: int = 1) -> tuple[Ints, Ints]:
    """Prompts and outputs of a distribution that comes with the project: a prompt, then outputs, one for each of its
    samples, among those of prompts about as long.
    """
    table = length_tables.load(name)
    at, further = np.repeat(streams.prompts.random(count), samples), streams.outputs.random(count * samples)
    prompts, groups = _quantile(table.prompt_tokens, at), len(table.output_tokens)
    group = (at * groups).astype(np.int64)
    outputs = np.zeros(len(at), dtype=np.int64)
    for number, quantiles in enumerate(table.output_tokens):
        outputs[group == number] = _quantile(quantiles, further[group == number])
    return prompts, np.clip(outputs, 1, table.most_tokens - prompts)


def _quantile(quantiles: Sequence[int], at: NDArray[np.float64]) -> Ints:
    """The whole numbers nearest to the quantiles `at`, linear between those given."""
    return np.rint(np.interp(at, np.linspace(0, 1, len(quantiles)), quantiles)).astype(np.int64)


def _lognormal(shape: demand.Lognormal, count: int, rng: np.random.Generator) -> Ints:
    mu = np.log(shape.mean) - shape.sigma**2 / 2
    drawn = np.rint(rng.lognormal(mu, shape.sigma, count))
    return np.clip(drawn, shape.low, shape.high or 2**31).astype(np.int64)


def _sample(sample: demand.Sample, name: str) -> Sequence[int]:
    if sample.path is None or sample.column is None:
        return sample.values
    return traces.column(catalog.data(sample.path, f"{name}.empirical.path"), sample.column)


def arrival_times(arrivals: object, count: int, rng: np.random.Generator) -> list[int]:
    """Arrival times in ns of open-loop arrivals; all 0 for those that come at once or depend on the server."""
    return [int(at_ns) for at_ns in _arrival_ns(arrivals, count, rng)]


def _arrival_ns(arrivals: object, count: int, rng: np.random.Generator) -> Ints:
    if isinstance(arrivals, demand.Constant):
        times = np.arange(count) / arrivals.rate_per_s
    elif isinstance(arrivals, demand.Poisson):
        times = np.cumsum(rng.exponential(1 / arrivals.rate_per_s, count))
    elif isinstance(arrivals, demand.Gamma):
        scale = 1 / (arrivals.rate_per_s * arrivals.burstiness)
        times = np.cumsum(rng.gamma(arrivals.burstiness, scale, count))
    else:
        return np.zeros(count, dtype=np.int64)
    return np.rint(np.minimum(times, LATEST_S) * 1e9).astype(np.int64)


def _searched(wanted: object, streams: Streams, texts: int) -> Workload:
    """Requests of so many texts of equal length, for a scheduler that searches. Raises ScenarioError."""
    if not isinstance(wanted, demand.Synthetic) or wanted.samples > 1:
        raise ScenarioError(f"workload: a search of {texts} texts a request needs kind synthetic with samples 1")
    return _synthetic(wanted, streams, texts)


def _synthetic(wanted: demand.Synthetic, streams: Streams, texts: int = 1) -> Workload:
    """`texts` of each request have the same length, `samples` lengths of their own."""
    count, samples = wanted.requests, max(wanted.samples, texts)
    memory.check(count, samples)
    if wanted.lengths is not None:
        prompts, outputs = draw_pairs(wanted.lengths, count, streams, wanted.samples)
        prompts = np.repeat(prompts, texts)
    else:
        prompts = np.repeat(draw(wanted.prompt_tokens, count, streams.prompts, "workload.prompt_tokens"), samples)
        outputs = draw(wanted.output_tokens, count * wanted.samples, streams.outputs, "workload.output_tokens")
    outputs = np.repeat(outputs, texts)
    most = wanted.max_tokens or int(outputs.max())
    outputs = np.minimum(outputs, most)
    priorities = streams.priorities.choice(wanted.priorities, count) if wanted.priorities else np.zeros(count, np.int64)
    drawn = Drawn(
        arrival_ns=np.repeat(_arrival_ns(wanted.arrivals, count, streams.arrivals), samples),
        prompt_tokens=prompts,
        output_tokens=outputs,
        max_tokens=np.full(count * samples, most) if wanted.stop_early else outputs,
        priority=np.repeat(priorities, samples),
        shared_tokens=wanted.shared_prefix_tokens,
        samples=samples,
    )
    if isinstance(wanted.arrivals, demand.ClosedLoop):
        return _arriving(drawn.kept, wanted.arrivals, streams.users, samples)
    return Workload(drawn, len(drawn))


def _arriving(specs: list[RequestSpec], arrivals: object, rng: np.random.Generator, samples: int = 1) -> Workload:
    if not isinstance(arrivals, demand.ClosedLoop):
        return Workload(specs, len(specs))
    users = specs[: arrivals.users * samples]
    draws = rng.spawn(len(users) // samples) if arrivals.think == "exponential" else []
    until_ns = None if arrivals.duration_s is None else round(arrivals.duration_s * 1e9)
    follow = Users(specs[len(users) :], round(arrivals.think_s * 1e9), draws, until_ns, samples)
    terms = (f"exponential {rng.bit_generator.state}\n" if draws else "") + (f"until {until_ns}\n" if until_ns else "")
    return Workload(users, len(specs), follow=follow, terms=terms)


# -- traces -----------------------------------------------------------------------------------------------------------


def _spec(index: int, row: traces.Arrival) -> RequestSpec:
    return RequestSpec(
        index=index,
        id=row.id or str(index),
        arrival_ns=row.arrival_ns,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        max_tokens=row.output_tokens if row.max_tokens is None else row.max_tokens,
        priority=row.priority,
        prefix=row.hash_ids,
        prefix_block_tokens=traces.BLOCK_TOKENS if row.hash_ids else 1,
        prefix_tokens=row.prompt_tokens if row.hash_ids else 0,
    )


def _timed(rows: Iterable[traces.Arrival], scale: float) -> Workload:
    scaled = rows if scale == 1 else (row._replace(arrival_ns=round(row.arrival_ns * scale)) for row in rows)
    specs = [_spec(index, row) for index, row in enumerate(scaled)]
    return Workload(specs, len(specs))


def _azure(wanted: demand.Azure, streams: Streams) -> Workload:
    del streams
    return _timed(traces.azure(catalog.data(wanted.path), wanted.limit), wanted.time_scale)


def _csv(wanted: demand.Csv, streams: Streams) -> Workload:
    del streams
    path = catalog.data(wanted.path)
    workload = _timed(traces.plain(path, wanted.limit, wanted.columns), wanted.time_scale)
    columns = csv_columns.said(traces.plain_columns(path, wanted.columns))
    notices = (columns, _slow(workload.open))
    return replace(workload, notices=tuple(f"{path}: {notice}" for notice in notices if notice))


def _slow(specs: Sequence[RequestSpec]) -> str | None:
    """What to say of arrivals that are likely not in seconds."""
    gap_ns = float(np.median(np.diff([spec.arrival_ns for spec in specs]))) if len(specs) > 1 else 0.0
    if gap_ns <= LONG_GAP_NS:
        return None
    return (
        f"the median gap of arrivals is {gap_ns / 1e9:.6g} s; if they are milliseconds, set workload.time_scale=0.001"
    )


def _mooncake(wanted: demand.Mooncake, streams: Streams) -> Workload:
    rows = traces.mooncake(catalog.data(wanted.path), wanted.limit)
    return _timed(coarse_stamps.spread(rows, streams.spread) if wanted.spread else rows, wanted.time_scale)


def _lengths(wanted: demand.Lengths, streams: Streams) -> Workload:
    rows = traces.lengths(catalog.data(wanted.path), wanted.limit)
    times = arrival_times(wanted.arrivals, len(rows), streams.arrivals)
    specs = [_spec(i, traces.Arrival(times[i], prompt, output)) for i, (prompt, output) in enumerate(rows)]
    return _arriving(specs, wanted.arrivals, streams.users)


def _golden(wanted: demand.Golden, streams: Streams) -> Workload:
    del streams
    recorded = scheduler_tests.golden(catalog.data(wanted.path), wanted.step_s, wanted.limit)
    return Workload(recorded.specs, len(recorded.specs), cancels=recorded.cancels)


def _served(wanted: demand.Served, streams: Streams) -> Workload:
    del streams
    return _session(served.read(catalog.data(wanted.path), wanted.limit))


def _session(session: served.Session) -> Workload:
    torn = (f"{served.FILE}: the last line was not written to its end: it is left out",) if session.torn else ()
    return Workload(session.specs, len(session.specs), cancels=session.cancels, notices=torn)


def _vllm_bench(wanted: demand.VllmBench, streams: Streams) -> Workload:
    del streams
    rows = vllm_bench.requests(catalog.data(wanted.path), wanted.limit)
    if wanted.recorded is not None:
        taken = vllm_bench.recorded(catalog.data(wanted.recorded, "workload.recorded"), rows)
        rows = [row._replace(arrival_ns=times.queued_ns) for row, times in zip(rows, taken, strict=True)]
    specs = [
        RequestSpec(
            index=index,
            id=row.id,
            arrival_ns=round(row.arrival_ns * wanted.time_scale),
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            max_tokens=row.output_tokens,
            prefix=row.hash_ids,
            prefix_block_tokens=vllm_bench.BLOCK_TOKENS,
            prefix_tokens=len(row.hash_ids) * vllm_bench.BLOCK_TOKENS,
        )
        for index, row in enumerate(rows)
    ]
    return Workload(specs, len(specs))


def _agentic(wanted: demand.Agentic, streams: Streams) -> Workload:
    """Turns are numbered through, session by session; a session's turns share all of what was said before."""
    del streams
    sessions = traces.agentic(catalog.data(wanted.path), wanted.limit)
    own = 1 + max(max(turn.hash_ids) for session in sessions for turn in session.turns)
    first: list[RequestSpec] = []
    following: dict[int, tuple[RequestSpec, int]] = {}
    index = 0
    for session in sessions:
        specs = _turns(session, index, own, wanted.time_scale)
        first.append(specs[0])
        for before, spec, turn in zip(specs, specs[1:], session.turns[1:], strict=False):
            following[before.index] = (spec, round(turn.delay_ns * wanted.time_scale))
        index += len(specs)
        own += len(specs[-1].prefix)
    return Workload(first, index, follow=Sessions(following))


def _turns(session: traces.Conversation, index: int, own: int, scale: float) -> list[RequestSpec]:
    """Requests of one session. Its text only grows, so a block of 512 tokens has the same id in all turns: the
    trace's where the first turn fills the block, else one of the session's own, counted from `own`.
    """
    given = session.turns[0].hash_ids[: session.turns[0].new_tokens // traces.BLOCK_TOKENS]
    text = sum(turn.new_tokens + turn.output_tokens for turn in session.turns)
    ids = (*given, *range(own + len(given), own + -(-text // traces.BLOCK_TOKENS)))
    specs, said = [], 0
    for number, turn in enumerate(session.turns):
        prompt = said + turn.new_tokens
        said = prompt + turn.output_tokens
        specs.append(
            RequestSpec(
                index=index + number,
                id=f"{session.id}/{number}",
                arrival_ns=round(session.arrival_ns * scale),
                prompt_tokens=prompt,
                output_tokens=turn.output_tokens,
                max_tokens=turn.output_tokens,
                prefix=ids[: -(-said // traces.BLOCK_TOKENS)],
                prefix_block_tokens=traces.BLOCK_TOKENS,
                prefix_tokens=said,
            )
        )
    return specs
