"""A short campaign of loads against a running server: unloaded prompts, decode at several concurrencies, mixed loads.

Every load is repeated, and one repeat of all comes before the next of any: the spread of its repeats is a load's noise,
the server's drift included. A repeat that something touched (a pause, another client, a warm prefix cache, a slow
client) belongs to a load of its own, all requests of which count as failed, and is made once more.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import numpy as np
import openai

from cbsim.draw import folder
from cbsim.errors import ERROR, OK, Interrupted, RunError, ScenarioError
from cbsim.files import access
from cbsim.http.settings import address, plain_keys
from cbsim.measured.own import measurement
from cbsim.measured.own.clients import Measured
from cbsim.measured.own.measurement import Facts, Load, by_load, load_of
from cbsim.measured.own.server import Server, connected
from cbsim.metrics.terminal import aligned, shown
from cbsim.record.environment import environment
from cbsim.runs.progress import ProgressLine, roughly

T = TypeVar("T")
CONTEXT, LONGEST = 4096, 8200  # tokens: assumed of a model that does not say its context; most that are used of any
REPEATS, WARM_UP = (2, 5), (32, 32)
PLANNED_SHARE = 0.8  # of the budget, as estimates are rough
TICK_S, READ_TICKS = 0.01, 100
ROUNDING_S = 0.001  # timers of an event loop are up to 1 ms late of themselves
LATE_SHARES = (0.1, 0.5)  # of TTFT, and of TPOT: most that the client is late
FAILED_SHARE = 0.1
PAUSE_S, PAUSE_TIMES = 0.25, (10, 3)  # a pause is longer than this, than so many TPOT, and TTFT
PRESENT = ("num_requests_running", "num_requests_waiting", "num_running_reqs", "num_queue_reqs")  # vLLM's, SGLang's
HITS = ("prefix_cache_hits", "gpu_prefix_cache_hits", "cached_tokens")  # of the versions of vLLM, of SGLang
SHARE = 0.02  # of our tokens: most that are cached, or another client's
RATE_SHARE = 0.7  # of the throughput of the closed mixed load: the rate of the open one


class Budget(NamedTuple):
    """What a campaign may take of the server; it is never exceeded."""

    seconds: float
    tokens: float
    users: float


class Planned(NamedTuple):
    """A load of requests, prompt and output in tokens; `users` is None where they arrive at a rate."""

    name: str
    users: int | None
    requests: Sequence[tuple[int, int]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.requests))

    def seconds(self, probes: Sequence[Measured]) -> float:
        """Return about how long it takes, by a short and a long probe: prompts one by one, decode together."""
        short, long = probes
        prompt_token_s = max(long.ttft_s - short.ttft_s, 0) / (long.prompt_tokens - short.prompt_tokens)
        token_s = (long.e2e_s - long.ttft_s) / max(long.output_tokens - 1, 1)
        users = min(self.users or 8, len(self.requests))
        each_s = [short.ttft_s + p * prompt_token_s + n * token_s * (1 / users + 1 / 32) for p, n in self.requests]
        return sum(each_s) / (1 if self.users else RATE_SHARE)


def loads(context: int, users: int) -> list[Planned]:
    """Return the loads that fit context and concurrency; their lengths are the same in every campaign."""
    context = min(context, LONGEST)
    unloaded = [Planned(f"unloaded-{n}", 1, [(n, 8)] * 2) for n in (32, 256, 1024, 4096, 8192) if n + 8 <= context]
    counts = sorted({min(count, users) for count in (1, 4, 16, 64, 256)})
    decode = [Planned(f"decode-{n}", n, [(32, min(128, context // 2))] * n) for n in counts]
    several = min(16, users)
    long = (min(2048, context // 2), min(64, context // 4))
    decode.append(Planned(f"decode-{several}-long", several, [long] * several))
    medians = [[math.log(context / 16)], [math.log(64)]]
    drawn = np.exp(np.random.default_rng(0).normal(medians, 0.8, (2, 4 * several)))
    lengths = np.clip(drawn, 4, [[context // 2], [min(512, context // 4)]]).astype(int)
    mixed = [(prompt, output) for prompt, output in lengths.T.tolist()]
    return [*unloaded, *decode, Planned(f"mixed-{several}", several, mixed), Planned("mixed-open", None, mixed)]


def fitting(every: Sequence[Planned], probes: Sequence[Measured], left: Budget) -> tuple[list[Planned], int]:
    """Return the loads that fit the budget, and their repeats; the dearest go first. Raises ScenarioError."""

    def share(*loads: Planned) -> float:
        seconds, tokens = sum(load.seconds(probes) for load in loads), sum(load.tokens for load in loads)
        return max(seconds / left.seconds, tokens / left.tokens)

    affordable = sorted(every, key=share)
    while affordable:
        if (repeats := int(min(PLANNED_SHARE / share(*affordable), REPEATS[1]))) >= REPEATS[0]:
            return [load for load in every if load in affordable], repeats
        least = affordable.pop()
    needed = f"{REPEATS[0]} times {least.name} take about {roughly(REPEATS[0] * least.seconds(probes))}"
    raise ScenarioError(f"--budget: too small: {needed} and {REPEATS[0] * least.tokens:,} tokens")


def cells(request: Measured, users: int | None) -> list[Any]:
    """Return a row of requests.csv: nothing for what is not known."""
    numbers = [getattr(request, name) for name in (*measurement.TIMES, *measurement.TOKENS)]
    known = ["" if math.isnan(each) else f"{each:.9f}" if isinstance(each, float) else each for each in numbers]
    return [request.load, users or "", request.repeat, *known, request.failed]


@dataclass
class Watch:
    """What is seen in one repeat of a load. Readings of /metrics are from before the requests to after them."""

    users: int | None
    rows: list[Measured] = field(default_factory=list)
    readings: list[dict[str, float]] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # of the client's event loop
    others: float = 0.0  # most requests at the server beyond those that could be ours

    def grown(self, *names: str) -> float:
        """Return by how much the first of these counters that the server has grew; 0 if it has none."""
        known = [[reading[name] for reading in self.readings if name in reading] for name in names]
        return next((values[-1] - values[0] for values in known if values), 0.0)

    def troubles(self) -> Iterator[str]:
        """Yield why the repeat cannot be used, a reason each."""
        failed = [row.failed for row in self.rows if row.failed]
        if len(failed) > FAILED_SHARE * len(self.rows):
            yield f"{len(failed)} of {len(self.rows)} requests failed: {failed[0]}"
        if len(failed) < len(self.rows):
            good = load_of("", self.users, [row for row in self.rows if not row.failed])
            yield from self._late(good)
            yield from self._shared(good)

    def _late(self, good: Load) -> Iterator[str]:
        """Yield reasons that the times of these requests show."""
        several, alone = good.output_tokens > 1, self.users == 1
        ttft_s = float(np.median(good.ttft_s))
        tpot_s = float(np.median(good.tpot_s[several])) if several.any() else ttft_s
        late_s = float(np.mean(self.late_s or [0.0]))
        if late_s > min(LATE_SHARES[0] * ttft_s, LATE_SHARES[1] * tpot_s):
            yield f"the client is the bottleneck: {shown(late_s, 's')} late at a TTFT of {shown(ttft_s, 's')}"
        usual_s = max(PAUSE_S, PAUSE_TIMES[0] * tpot_s, PAUSE_TIMES[1] * float(good.ttft_s.min() if alone else ttft_s))
        pause_s = max(*(gap_s for row in self.rows for gap_s in row.gaps_s), good.ttft_s.max() if alone else 0.0)
        if pause_s > usual_s:
            yield f"a pause: no token for {shown(pause_s, 's')}"

    def _shared(self, good: Load) -> Iterator[str]:
        """Yield reasons that /metrics shows beside these requests."""
        ours = np.array([good.prompt_tokens.sum(), good.output_tokens.sum()])
        known = (good.cached_tokens >= 0).all()  # else those of all clients
        hits = good.cached_tokens.sum() if known else self.grown(*HITS)
        if hits > SHARE * ours[0]:
            yield f"a warm prefix cache: {hits:,.0f} of {ours[0]:,} prompt tokens were in it"
        more = [self.grown(name) for name in ("prompt_tokens", "generation_tokens")] - ours
        if self.others > 0 or (len(good) == len(self.rows) and (more > SHARE * ours + 1).any()):
            yield f"another client: {self.others:.0f} requests, {more.clip(0).sum():,.0f} tokens beyond ours"


@dataclass
class Campaign:
    """A campaign against one server, and the folder that it writes. `say` is called with what is being done, how many
    steps are done, and of how many. `incomplete` is why loads are missing, "" if none is.
    """

    server: Server
    out: Path
    budget: Budget
    say: Callable[[str, int, int], None]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    loads: Sequence[Planned] = ()
    repeats: int = 0
    measured: list[Measured] = field(default_factory=list)
    incomplete: str = "it was killed"
    _rate: float = 0.0
    _probed_s: float = 0.0

    async def plan(self, model: str, log: Path | None) -> str:
        """Learn about the server, and plan; return what the campaign will take. Raises ScenarioError."""
        server, users = self.server, int(self.budget.users)
        self.facts = await server.facts(model, log)
        await server.check()
        context = self.facts.max_model_len or CONTEXT
        lengths = (16, min(1024, context // 2))
        probes = [await server.send(server.prompt(length), 16) for length in lengths * 2][2:]
        if failed := [probe.failed for probe in probes if probe.failed]:
            raise ScenarioError(f"{server.url}: {failed[0]}")
        self._probed_s = server.now_s
        tokens = self.budget.tokens - server.tokens - users * sum(WARM_UP)
        left = Budget(self.budget.seconds - self._probed_s, max(tokens, 1), users)
        self.loads, self.repeats = fitting(loads(context, users), probes, left)
        seconds = self.repeats * sum(load.seconds(probes) for load in self.loads)
        tokens = self.repeats * sum(load.tokens for load in self.loads) + users * sum(WARM_UP)
        requests = self.repeats * sum(len(load.requests) for load in self.loads)
        cost = f"about {roughly(seconds)} and {tokens:,} tokens: {requests:,} requests, at most {users} at once"
        return f"{len(self.loads)} loads, {self.repeats} times each, will take {cost}"

    async def run(self) -> None:
        """Run the loads within the budget; what there is, is written in any case."""
        self.server.start_ns = time.perf_counter_ns()
        try:
            self._write()
            self._append_rows([measurement.COLUMNS])
            async with asyncio.timeout(self.budget.seconds - self._probed_s):
                await self._all()
            self.incomplete = ""
        except TimeoutError:
            self.incomplete = f"--budget: {self.budget.seconds:g} s are over"
        except RunError as error:
            self.incomplete = str(error)
        except BaseException:
            self.incomplete = "it was interrupted"
            raise
        finally:
            self._write()

    async def _all(self) -> None:
        users = int(self.budget.users)
        await self._requests(Planned("warm-up", users, [WARM_UP] * users), Watch(users))  # opens connections
        again = {load.name for load in self.loads}
        steps = [(repeat, load) for repeat in range(self.repeats) for load in self.loads]
        for done, (repeat, load) in enumerate(steps):
            self.say(f"{load.name}, repeat {repeat + 1} of {self.repeats}", done, len(steps))
            if await self._once(load, repeat) and load.name in again:
                again.remove(load.name)
                await self._once(load, repeat)

    async def _once(self, load: Planned, repeat: int) -> bool:
        """Run a repeat, and write it; return whether something touched it. Raises RunError if no other one can."""
        if self.server.tokens + load.tokens > self.budget.tokens:
            raise RunError(f"--budget: {self.server.tokens:,} tokens are spent, {load.name} does not fit")
        watch, reason, began_s = Watch(load.users), "it was cut short", self.server.now_s
        await self._read(watch)
        beside = asyncio.create_task(self._beside(watch))
        try:
            await self._requests(load, watch)
            await self._read(watch)
            reason = "; ".join(watch.troubles())
        finally:
            beside.cancel()
            self._keep(load, repeat, watch, reason)
        if all(row.failed for row in watch.rows):
            raise RunError(f"the server does not answer any more: {watch.rows[0].failed}")
        if not self._rate and load.name.startswith("mixed"):
            self._rate = RATE_SHARE * len(load.requests) / (self.server.now_s - began_s)
        return bool(reason)

    def _keep(self, load: Planned, repeat: int, watch: Watch, reason: str) -> None:
        """Write the requests of a repeat; with a reason against it all of them count as failed."""
        name = load.name
        if reason:
            self.say(f"{name}, repeat {repeat + 1}: {reason}", -1, 0)
            name += " left out"
        rows = [replace(row, load=name, repeat=repeat, failed=reason or row.failed) for row in watch.rows]
        self.measured += rows
        self._append_rows(cells(row, load.users) for row in rows)
        with self._appended(measurement.METRICS) as file:
            file.writelines(json.dumps({"load": name, **each}) + "\n" for each in watch.readings)

    async def _requests(self, load: Planned, watch: Watch) -> None:
        """Send the requests of a load: whenever a user is free, or at random times, within the users of the budget."""
        slots = asyncio.Semaphore(load.users or int(self.budget.users))
        gaps_s = np.random.default_rng(1).exponential(1 / (self._rate or 1.0), len(load.requests))
        starts_s = np.cumsum(gaps_s * (load.users is None)).tolist()
        prompts = [self.server.prompt(prompt) for prompt, _ in load.requests]

        async def send(prompt: Any, output: int, at_s: float) -> None:
            await asyncio.sleep(at_s)
            async with slots:
                watch.rows.append(await self.server.send(prompt, output))

        async with asyncio.TaskGroup() as group:
            for prompt, (_, output), at_s in zip(prompts, load.requests, starts_s, strict=True):
                group.create_task(send(prompt, output, at_s))

    async def _beside(self, watch: Watch) -> None:
        """Note how late this event loop is, and read /metrics, until it is cancelled."""
        for tick in count(1):
            before_s = self.server.now_s
            await asyncio.sleep(TICK_S)
            watch.late_s.append(max(self.server.now_s - before_s - TICK_S - ROUNDING_S, 0.0))
            if tick % READ_TICKS == 0:
                await self._read(watch)

    async def _read(self, watch: Watch) -> None:
        with suppress(ScenarioError):  # one reading less
            reading = await self.server.reading()
            watch.readings.append(reading)
            present = sum(reading.get(name, 0.0) for name in PRESENT)
            watch.others = max(watch.others, present - self.budget.users)  # a gauge may be one of an earlier load

    def _write(self) -> None:
        value = {"schema_version": measurement.SCHEMA, "tool": "cbsim measure", "facts": self.facts.model_dump()}
        value |= {"provenance": {**self.provenance, "tokens": self.server.tokens}, "incomplete": self.incomplete}
        folder.write(self.out, {measurement.MEASUREMENT: json.dumps(value, indent=2).encode()})

    def _append_rows(self, rows: Iterable[Sequence[Any]]) -> None:
        with self._appended(measurement.REQUESTS) as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    @contextmanager
    def _appended(self, name: str) -> Iterator[TextIO]:
        path = self.out / name
        with access(path, RunError, "written"), path.open("a", encoding="utf-8", newline="") as file:
            yield file


def measure(arguments: argparse.Namespace) -> int:
    """Measure a server once its user has agreed to the plan. Raises ScenarioError, RunError, Interrupted."""
    out, url, seed = arguments.out, address(arguments.url), secrets.randbits(62)  # its cache may have earlier prompts
    folder.check(out)
    key, budget, progress = next(iter(plain_keys(arguments.api_key_file)), "none"), arguments.budget, ProgressLine(5.0)

    def say(message: str, done: int, total: int) -> None:
        if progress.due or done < 0:
            progress.write(message, done, total, last=done < 0)

    async def connecting(step: Awaitable[T]) -> T:
        async with campaign.server.client, asyncio.timeout(campaign.budget.seconds):
            return await step

    provenance = environment(arguments.line, "", seed) | {"openai": openai.__version__, "url": url, "budget": budget}
    campaign = Campaign(Server(url, connected(url, key), seed), out, Budget(**budget), say, provenance)
    try:
        plan = asyncio.run(connecting(campaign.plan(arguments.model, arguments.log)))
        print(*campaign.facts.lines(), sep="\n")
        if not arguments.yes and not _agreed(plan):
            return ERROR
        campaign.server.client = connected(url, key)  # for another event loop
        asyncio.run(connecting(campaign.run()))
    except TimeoutError:
        raise ScenarioError(f"--budget: {budget['seconds']:g} s were over before the first load") from None
    except KeyboardInterrupt:
        there = f"; {out} has what was measured" if (out / measurement.MEASUREMENT).exists() else ""
        raise Interrupted(f"interrupted{there}") from None
    print(table(campaign.measured), f"measured      {out}", sep="\n")
    if campaign.incomplete:
        raise RunError(f"{out}: incomplete: {campaign.incomplete}")
    return OK


def _agreed(plan: str) -> bool:
    try:
        return input(f"{plan}. Go on? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        raise ScenarioError("--yes: is needed where there is no terminal to answer from") from None


def table(measured: Sequence[Measured]) -> str:
    """Return what was measured as a table, and a line for each load that is left out or has a note."""
    rows: list[tuple[str, ...]] = [("load", "requests", "failed", "TTFT", "+-", "TPOT", "+-")]
    loads = [load_of(name, None, of) for name, of in by_load(measured).items()]
    for load in loads:
        estimates = [value_s for each in (load.ttft_s, load.tpot_s) for value_s in load.estimate(each)]
        cells = ["-" if math.isnan(value_s) else shown(value_s, "s") for value_s in estimates]
        rows.append((load.name, str(len(load)), str(load.failed.sum()), *cells))
    notes = [f"{load.name}: {note}" for load in loads for note in (load.left_out, *load.notes) if note]
    return "\n".join([aligned(rows), *notes])
