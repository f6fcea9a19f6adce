"""Rate ladders of servers behind a router, as llm-d published them: read, and climbed again by simulated fleets.

docs/data.md describes the files; servers.yaml beside this has the servers and routers, and what of them is assumed.
As inference-perf does it: a stage has rate x duration requests, so many in each second as a Poisson draw says. It
begins `GAP_S` after the last answer of the stage before, and with the first prompt of a list shuffled once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cbsim.errors import ScenarioError
from cbsim.machine import simulate
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.record.tables import Steps, requests_of, token_times
from cbsim.scenario import documents, scenario
from cbsim.scenario.fields import near
from cbsim.scenario.fleet import with_fields
from cbsim.scenario.rows import CsvTable, open_text
from cbsim.workload.requests import Workload

SERVERS = Path(__file__).with_name("servers.yaml")
FILES = ("llm-d_ladder.csv", "llm-d_precise.csv")
STATISTICS = {"mean": "ttft_mean_s", "p50": "ttft_p50_s", "p90": "ttft_p90_s"}
COLUMNS = ("set", "arm", "router", "rate", "stage_s", "output_tok_s", *STATISTICS.values())
WARM_UP, PEAK, WARM_UP_S = "warm-up stage", "peak", (15.0, 50.0)  # requests/s and seconds before the ladder
GAP_S = 31.5  # 30 between stages, 1 before the first request; the client looks once a second whether all are over


class Stage(NamedTuple):
    """A stage of `rate` requests/s: output tokens/s from its first request to its last token, TTFT by statistic."""

    rate: float
    stage_s: float
    output_tok_s: float
    ttft_s: Mapping[str, float]
    hits: float = float("nan")  # share of prompt tokens found cached
    rounded_s: float = 0.0  # by how much a published TTFT may be rounded


@dataclass(frozen=True, slots=True)
class Arm:
    """The published stages of a set of servers behind one router, by number; 0 is the warm-up. `about`: of the set."""

    set: str
    arm: str
    stages: Mapping[int, Stage]
    about: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.set} {self.arm}"

    @property
    def own(self) -> Mapping[str, Any] | None:
        """What servers.yaml has of the arm itself, None if it cannot be built."""
        return self.about["arms"].get(self.arm) if self.about else None


def read(folder: Path, where: Mapping[str, str]) -> list[Arm]:
    """Read the arms with the values of `where`, in order of the files. Raises ScenarioError."""
    servers, cells = documents.read(SERVERS).data, dict[tuple[str, str], list[Any]]()
    for path in (folder / name for name in FILES if (folder / name).is_file()):
        with open_text(path) as file:
            table = CsvTable(path, file, COLUMNS)
            for group, arm, router, *numbers in table.rows(None):
                if numbers[0] == PEAK:
                    continue
                rate, stage_s, output = (table.number(at, cell) for at, cell in enumerate(numbers[:3], 3))
                known_s = {k: (at, s) for at, (k, s) in enumerate(zip(STATISTICS, numbers[3:], strict=True), 6) if s}
                ttft_s = {name: table.number(*cell) for name, cell in known_s.items()}
                digits = min((len(cell.partition(".")[2]) for _, cell in known_s.values()), default=0)
                stage = Stage(rate, stage_s, output, ttft_s, rounded_s=0.5 * 10**-digits)
                cells.setdefault((group, arm), []).append((router != WARM_UP, stage))
    arms = []
    for (group, arm), rows in cells.items():
        ladder = sorted((stage for counts, stage in rows if counts), key=lambda stage: stage.rate)
        first = [(0, stage) for counts, stage in rows if not counts]
        arms.append(Arm(group, arm, dict([*first[-1:], *enumerate(ladder, 1)]), servers.get(group, {})))
    for field, value in where.items():
        names = list(dict.fromkeys(str(getattr(each, field, "")) for each in arms))
        arms = [each for each in arms if getattr(each, field, "") == value]
        if not arms:
            bound = f"expected one of {', '.join(filter(None, names)) or 'set, arm'}{near(value, names)}"
            raise ScenarioError(f"--where: {field}: got {value!r}, {bound}", field=field, value=value, bound=bound)
    if all(each.own is None for each in arms):
        none = f"none of {', '.join(FILES)}" if not arms else f"no servers that are known: {', '.join(map(str, arms))}"
        raise ScenarioError(f"{folder}: holds {none}")
    return arms


class Stages:
    """What follows the end of requests: the next stage, when the last request of one has ended."""

    def __init__(self, stages: Sequence[Sequence[RequestSpec]]) -> None:
        self._left, self._coming, self._ended_ns = len(stages[0]), deque(stages[1:]), 0

    def after(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        del spec
        self._left, self._ended_ns = self._left - 1, max(self._ended_ns, now_ns)
        if self._left or not self._coming:
            return []
        start_ns = self._ended_ns + round(GAP_S * NS)
        stage = [replace(each, arrival_ns=start_ns + each.arrival_ns) for each in self._coming.popleft()]
        self._left = len(stage)
        return stage

    def drafts(self) -> Iterator[tuple[RequestSpec, int]]:
        return ((spec, round(GAP_S * NS)) for stage in self._coming for spec in stage)


def requests(arm: Arm, seed: int) -> list[list[RequestSpec]]:
    """Draw the requests of the warm-up and of each stage, whose arrivals count from its start."""
    random, of, drawn = np.random.default_rng(seed), arm.about["prompts"], list[list[RequestSpec]]()
    order, tokens, index = random.permutation(of["groups"] * of["each"]).tolist(), of["shared"] + of["own"], 0
    ladder = ((stage.rate, stage.stage_s) for number, stage in arm.stages.items() if number)
    for rate, stage_s in (WARM_UP_S, *ladder):
        times, second = list[float](), 0
        while len(times) < int(rate * stage_s):
            gaps = random.exponential(size=random.poisson(rate)).cumsum()
            times += (second + gaps / gaps[-1:]).tolist()
            second += 1
        drawn.append([])
        for at, arrival_s in enumerate(times[: int(rate * stage_s)]):
            prompt = order[at % len(order)]
            lengths, ids = (tokens, of["output"], of["output"], 0), (prompt // of["each"], len(order) + prompt)
            spec = RequestSpec(index, str(index), round(arrival_s * NS), *lengths, ids, of["shared"], tokens)
            drawn[-1].append(spec)
            index += 1
    return drawn


def climb(arm: Arm, seed: int, overrides: Sequence[str]) -> dict[int, Stage]:
    """Simulate the ladder up to its last published stage, and return the published ones. Raises ScenarioError."""
    about, own, drawn, name = arm.about, dict(arm.own or {}), requests(arm, seed), str(arm).replace(" ", "-")
    fleet, front_s = about["fleet"] | {"router": own.pop("router")}, own.pop("front_s", about["front_s"])
    count = sum(map(len, drawn))
    data = with_fields(about["scenario"], {key: value for key, value in own.items() if key != "chosen"})
    lengths = {"requests": count, "prompt_tokens": 1, "output_tokens": 1}  # in place of the requests drawn here
    data["workload"] = {"kind": "synthetic", "arrivals": {"kind": "poisson", "rate_per_s": 1.0}, **lengths}
    data |= {"name": name, "question": f"How near is {arm}?", "seed": seed, "fleet": fleet}
    follow: Any = Stages(drawn)
    servers = simulate.routed(scenario.parse(data, name, overrides), Workload(drawn[0], count, follow=follow))
    assert isinstance(servers, simulate.Fleet)
    servers.run()
    columns = np.zeros((4, count))
    for server in servers.machines:
        of = token_times(requests_of(server.record), Steps.of(server.record))
        times = (of.arrival_ns / NS, of.first_token_ns / NS, of.last_token_ns / NS)
        columns[:, of.rows.numbers("index")] = *times, of.rows.numbers("cached_tokens")
    parts = np.split(columns, np.cumsum([len(stage) for stage in drawn[:-1]]), axis=1)
    return {number: _seen(parts[number], stage, about, front_s) for number, stage in arm.stages.items()}


def _seen(columns: Any, stage: Stage, about: Mapping[str, Any], front_s: float) -> Stage:
    """Return a stage as its client sees it, `front_s` away."""
    (sent, first, last, cached), of = columns, about["prompts"]
    ttft = first - sent + front_s
    numbers = {"mean": ttft.mean(), "p50": np.percentile(ttft, 50), "p90": np.percentile(ttft, 90)}
    output_tok_s = len(sent) * of["output"] / (last.max() + front_s - sent.min())
    return Stage(stage.rate, stage.stage_s, output_tok_s, numbers, cached.mean() / (of["shared"] + of["own"]))
