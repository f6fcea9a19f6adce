"""Several servers behind a router: what one of them does, that nothing is lost, and what the tables and numbers say."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import call, refused
from support.random_scenarios import any_scenario, checks_of

import cbsim
from cbsim.errors import DeadlockError, RunError
from cbsim.machine import simulate
from cbsim.machine.front import Blind
from cbsim.machine.separate import Separate
from cbsim.machine.simulate import Fleet, Simulation
from cbsim.policy import value
from cbsim.policy.request import RequestSpec
from cbsim.record import directory, invariants
from cbsim.record.record import STEP_COLUMNS, RequestRow
from cbsim.routers.base import RouterBase, RouterKind, View
from cbsim.routers.registry import OURS as ROUTERS
from cbsim.routers.simple import PlainSettings, RoundRobin
from cbsim.runs import assemble, reading, replan, running
from cbsim.runs.result import Result
from cbsim.scenario.scenario import Scenario, dump, parse
from cbsim.schedulers import registry
from cbsim.workload import generators
from cbsim.workload.requests import Workload

NAMES = pytest.mark.parametrize("name", registry.OURS)
SERVED = ("length", "stop", "aborted", "refused")
LOAD = {
    "kind": "synthetic",
    "requests": 40,
    "prompt_tokens": {"uniform": {"low": 100, "high": 900}},
    "output_tokens": {"uniform": {"low": 2, "high": 40}},
}


def of(fleet: Mapping[str, Any] | None = None, **fields: Any) -> Scenario:
    document: dict[str, Any] = {
        "name": "fleet",
        "question": "Who gets a request?",
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm",
        "workload": {**LOAD, "arrivals": {"kind": "poisson", "rate_per_s": 30}},
        "loop": {"mode": "async"},
        **fields,
    }
    return parse(document | ({"fleet": dict(fleet)} if fleet else {}), "fleet")


def run(scenario: Scenario) -> Result:
    made = cbsim.run(scenario)
    assert isinstance(made, Result)
    return made


def with_fleet(scenario: Scenario, router: str, *pools: Mapping[str, Any]) -> Scenario:
    fleet = {"pools": [*pools], "router": {"name": router}, "signals": {"metrics_s": 0.001}}
    return parse(scenario.model_dump(mode="json") | {"fleet": fleet}, "fleet")


# -- one server --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [20, 21])
@NAMES
def test_one_server_in_a_fleet_writes_the_tables_of_that_server_alone(name: str, seed: int, tmp_path: Path) -> None:
    """Byte for byte, whether it is simulated by itself or beside a router with books."""
    alone, runs = any_scenario(name, random.Random(f"{name} {seed}"), tmp_path), list[dict[str, bytes]]()
    routers = "round_robin", "least_in_flight"
    for scenario in (alone, *(with_fleet(alone, router, {"count": 1}) for router in routers)):
        try:
            path = run(scenario).save(tmp_path / str(len(runs)))
        except DeadlockError:
            runs.append({})
            continue
        tables = {file.name: file.read_bytes() for file in path.glob("*.parquet")}
        runs.append(tables | {"timeline": (path / "timeline.json.gz").read_bytes()})
    assert runs[0] == runs[1] == runs[2]


def test_servers_of_a_blind_router_are_simulated_one_by_one_with_the_same_tables() -> None:
    """As on one clock, where all stand behind one client; also in processes."""
    for router in ("round_robin", "random", "session_hash"):
        scenario = of({"pools": [{"count": 3}], "router": {"name": router}})
        alone, processes = (Simulation(scenario, "async", generators.build(scenario), jobs=n)._fleet for n in (1, 2))
        assert isinstance(alone, Separate)
        beside = Fleet(scenario.servers, generators.build(scenario), together=False)
        beside.front.choose = Blind(assemble.router(scenario.fleet.router, 3, scenario.seed)[0], 3)
        ran = [alone, beside, processes] if router == "random" else [alone, beside]
        for each in ran:
            each.run()
        for other in ran[1:]:
            assert each.now_ns == alone.now_ns
            (rows, steps), (its, own) = (directory.contents(each.record) for each in (alone, other))
            assert np.array_equal(steps.table, own.table)
            assert np.array_equal(steps.server, own.server)
            assert rows == its


def test_processes_write_the_same_tables(tmp_path: Path) -> None:
    """Of servers of several schedulers, whose clients leave at any moment."""
    drawn = (any_scenario("tgi", random.Random(seed), tmp_path) for seed in count())
    base = next(each for each in drawn if len(generators.build(each).cancels) > 9)
    scenario = with_fleet(base, "random", {"count": 2}, {"server": {"scheduler": {"name": "static"}}})
    runs = list[tuple[Any, ...]]()
    for jobs in (1, 2):
        made = Simulation(scenario, base.loop.mode, generators.build(scenario), jobs=jobs)
        made.run(lambda _: None)
        rows, steps = directory.contents(made.record)
        runs.append((list(rows), steps.table.tolist(), steps.server.tolist()))
    assert runs[0] == runs[1]
    assert "aborted" in {row.status for row in runs[0][0]}


# -- several -----------------------------------------------------------------------------------------------------------


def alone_again(scenario: Scenario, server: Scenario, rows: Sequence[RequestRow], loop: str) -> bytes:
    """The steps of a server that nothing is beside, with these requests at the times they came at."""
    load, specs = generators.build(scenario), dict[int, RequestSpec]()
    for row in rows:
        spec = load.find(row.index)
        assert spec is not None
        first = None if spec.sample_of is None else specs[spec.sample_of.index]
        specs[row.index] = replace(spec, arrival_ns=row.arrival_ns, sample_of=first)
    cancels = [(at_ns, specs[spec.index]) for at_ns, spec in load.cancels if spec.index in specs]
    machine = simulate.machine(server, loop, Workload([*specs.values()], len(specs), cancels))
    simulate.run(machine)
    return bytes(machine.record.steps)


def check_one_fleet(name: str, router: str, seed: int, folder: Path) -> None:
    dice = random.Random(f"fleet {name} {seed}")
    base = any_scenario(name, dice, folder)
    pools = [{"count": dice.choice([1, 2])}, {"count": dice.choice([1, 3]), "server": {"loop": {"streams": True}}}]
    scenario = with_fleet(base, router, *pools)
    made = list[Simulation]()

    def serve(scenario: Scenario, loop: str, workload: Any) -> Simulation:
        made.append(Simulation(scenario, loop, workload))
        return made[-1]

    results = list[Result]()
    for digests in (True, False):
        try:
            results.append(running.one_loop(scenario, base.loop.mode, serve, running.Terms("any", digests=digests)))
        except DeadlockError:
            return
    first, again = results
    differ = (first.step_numbers.table != again.step_numbers.table).any(axis=0)
    assert [name for name, differs in zip(STEP_COLUMNS, differ, strict=True) if differs] in ([], ["plan_hash"])
    assert not again.step_numbers["plan_hash"].any()
    assert first.request_rows == again.request_rows
    assert first.summary == again.summary
    servers = made[0]._fleet
    assert servers is not None
    for policy in servers.schedulers:
        for check in checks_of(policy):
            check()
        assert policy.pool.free == policy.pool.num_blocks
        assert not policy.requests
    total = generators.build(scenario).total
    assert [row.index for row in first.request_rows] == sorted({row.index for row in first.request_rows})
    assert len(first.request_rows) == total
    for row in first.request_rows:
        tokens = sum(row.token_runs[1::2])
        assert row.status in SERVED
        assert row.status == "aborted" or tokens <= row.output_tokens
        assert row.status != "stop" or tokens == row.output_tokens
    each = first.summary["per_server"]
    assert sum(server["requests"] for server in each) == total
    assert sum(server["output_tokens"] for server in each) == first.summary["output_tokens"]
    follows, any_refused = generators.build(scenario).follow, any(row.status == "refused" for row in first.request_rows)
    for number, (server, record) in enumerate(zip(scenario.servers, made[0].record.records, strict=True)):
        if not (follows and any_refused):  # what follows a refusal comes after the poll of the same time
            rows = [row for row in first.request_rows if row.server == number]
            assert alone_again(scenario, server, rows, base.loop.mode) == bytes(record.steps)
    path = first.save(folder / "run")
    reading.check_run(reading.load(path), base.loop.mode, fleet=True)
    assert replan.rederive(path).difference is None
    invariants.check_read(first.step_numbers, first.summary["total_blocks"])


@NAMES
def test_random_fleets_lose_nothing_and_can_be_read(name: str, tmp_path: Path) -> None:
    """Any router, tiny caches, clients that leave, requests that follow others: every token once, all blocks free at
    the end, the same tables again, and of each server those that it writes alone with its requests; plans that follow
    from its polls."""

    @given(router=st.sampled_from([*ROUTERS]), seed=st.integers(0, 1 << 32))
    @settings(max_examples=3)
    def check(router: str, seed: int) -> None:
        check_one_fleet(name, router, seed, Path(mkdtemp(dir=tmp_path)))

    check()


# -- what a router knows -----------------------------------------------------------------------------------------------


class Spy(RouterBase):
    """A router that sends all to server 0 and writes down what it sees of it, and what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.told: list[tuple[str, int, int]] = []

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        view = views[0]
        metrics = view.waiting, view.running, view.kv_use
        self.seen.append((now_ns, view.in_flight, view.sent, metrics, view.age_ns, view.cached_tokens(request)))
        return 0

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        self.told.append(("sent", request.index, now_ns))

    def answered(self, request: RequestSpec, server: int, now_ns: int) -> None:
        self.told.append(("answered", request.index, now_ns))

    def ended(self, request: RequestSpec, server: int, now_ns: int) -> None:
        self.told.append(("ended", request.index, now_ns))


MADE = list[Spy]()
KIND = RouterKind(name="spy", about="", settings=PlainSettings, make=lambda *_: MADE.append(Spy()) or MADE[-1])


def spied(monkeypatch: pytest.MonkeyPatch, **signals: float) -> tuple[Result, Spy]:
    """A run of which two thirds of each prompt are shared, and what the router saw of it."""
    monkeypatch.setitem(ROUTERS, "spy", KIND)
    fleet = {"pools": [{"count": 2}], "router": {"name": "spy"}, "signals": signals}
    load = {**LOAD, "prompt_tokens": 300, "shared_prefix_tokens": 200, "output_tokens": 30}
    load["arrivals"] = {"kind": "poisson", "rate_per_s": 80}
    return run(of(fleet, workload=load)), MADE[-1]


def test_a_routers_own_books_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of every first token and every end when they come, in order of time, and before the next choice."""
    result, spy = spied(monkeypatch)
    times = {row["index"]: row for row in result.requests.to_pylist()}
    assert [at for _, _, at in spy.told] == sorted(at for _, _, at in spy.told)
    for what, index, at_ns in spy.told:
        row = times[index]
        ends = {"sent": "arrival_ns", "answered": "first_token_ns", "ended": "last_token_ns"}
        assert at_ns == row[ends[what]]
    arrivals = [row["arrival_ns"] for row in times.values()]
    for sent, (now_ns, in_flight, ever, *_) in enumerate(spy.seen):
        open_ones = [row for row in times.values() if row["arrival_ns"] < now_ns < row["last_token_ns"]]
        assert now_ns == arrivals[sent]
        assert (in_flight, ever) == (len(open_ones), sent)


def test_metrics_are_as_old_as_the_last_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recounted from the tables: what ran after the last plan before the scrape."""
    result, spy = spied(monkeypatch, metrics_s=0.1)
    part, blocks = result.step_numbers.parts()[0], result.summary["per_server"][0]["total_blocks"]
    planned, applied = part["schedule_start_ns"], part["update_end_ns"]
    changed = 0
    for now_ns, _, _, (waiting, running_, kv_use), age_ns, _ in spy.seen:
        assert age_ns == now_ns % 100_000_000
        at_ns = now_ns - age_ns
        step = int(np.searchsorted(planned, at_ns, side="right")) - 1
        if step < 0 or applied[step] < at_ns:
            continue
        changed += 1
        assert (waiting, running_) == (part["waiting"][step], part["running"][step])
        assert kv_use == pytest.approx(part["used_blocks"][step] / blocks, abs=2 / blocks)
    assert changed > 5


def test_events_of_the_cache_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared prefix is cached by the first request's first step; the router knows so after the delay."""
    for delay_s in (0.0, 0.2):
        result, spy = spied(monkeypatch, events_s=delay_s)
        part = result.step_numbers.parts()[0]
        known_ns = int(part["schedule_start_ns"][0]) + round(delay_s * 1e9)
        for now_ns, *_, cached in spy.seen:
            assert cached == (192 if now_ns > known_ns else 0)


def test_tables_name_the_server_even_if_the_first_gets_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also those that were written and read again."""
    result, _ = spied(monkeypatch)
    for each in (result, cbsim.read(result.save(tmp_path / "run"))):
        assert {*each.requests["server"].to_pylist()} == {*each.steps["server"].to_pylist()} == {0}


@pytest.mark.skipif(value.running() == "compiled", reason="compiled code has no lines that can be counted")
def test_a_step_beside_many_servers_does_what_it_does_beside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of Python a step, of servers with the same requests each: no loop over servers in a step or a request, but
    those of routers that look at all."""
    turns = RouterKind(name="turns", about="", settings=PlainSettings, make=lambda *_: RoundRobin())
    monkeypatch.setitem(ROUTERS, "turns", turns)

    def lines_a_step(servers: int) -> float:
        load = {**LOAD, "requests": 3 * servers, "prompt_tokens": 300, "output_tokens": 9}
        fleet = {"pools": [{"count": servers}], "router": {"name": "turns"}}
        scenario, count = of(fleet, workload=load), 0
        several = Simulation(scenario, "async", generators.build(scenario))

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            several.run()
        finally:
            sys.settrace(None)
        return count / several.record.step_count

    assert lines_a_step(250) < 1.1 * lines_a_step(1)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_numbers_of_each_server_and_of_all() -> None:
    """A pool's replicas and a server with two GPUs: sums, means over GPUs, the largest over the mean."""
    pools = [{"count": 2, "name": "small"}, {"name": "large", "server": {"cost": {"tensor_parallel": 2}}}]
    result = run(of({"pools": pools, "router": {"name": "round_robin"}}))
    summary, each = result.summary, result.summary["per_server"]
    assert [(server["pool"], server["gpus"]) for server in each] == [("small", 1), ("small", 1), ("large", 2)]
    for name in ("requests", "steps", "input_tokens", "output_tokens", "preemptions"):
        assert sum(server[name] for server in each) == summary[name]
    tables = result.step_numbers.parts()
    span_ns = summary["makespan_s"] * 1e9
    shares = [int(part.lane("compute").sum()) / span_ns for part in tables]
    assert [server["gpu_active"] for server in each] == pytest.approx(shares)
    assert summary["gpu_active"] == pytest.approx((shares[0] + shares[1] + 2 * shares[2]) / 4)
    tokens = [server["input_tokens"] + server["output_tokens"] for server in each]
    assert summary["imbalance"]["tokens"] == pytest.approx(max(tokens) * 3 / sum(tokens))
    ttft = [row["ttft_s"] for row in result.requests.to_pylist() if row["server"] == 2]
    assert each[2]["ttft_s"]["mean"] == pytest.approx(np.mean(ttft))
    assert summary["servers"] == 3
    assert "large" in str(result)
    assert summary["cost"]["price_usd_hour"] == pytest.approx(result.scenario.price_usd_hour)


def test_what_came_of_the_drafts_of_each_server() -> None:
    """Their sums are those of all; a server without speculation has none. They stay when a window counts anew."""
    drafts = {"method": "ngram", "k": 2, "acceptance": {"rate": 0.5}}
    pools = [{"count": 2}, {"server": {"speculation": None}}]
    scenario = of({"pools": pools, "router": {"name": "round_robin"}}, speculation=drafts)
    for terms in (running.Terms("test"), running.Terms("test", warmup=0.1)):
        result = running.one_loop(scenario, scenario.loop.mode, Simulation, terms)
        summary = result.summary
        each = [server.get("drafts") for server in summary["per_server"]]
        assert each[2] is None
        for name in ("verified_tokens", "accepted_tokens", "rejected_tokens", "verifications"):
            assert each[0][name] + each[1][name] == summary["drafts"][name]
    assert "tokens a verification" in str(result).split("server", 1)[1]


def test_lanes_and_timeline_show_several_servers(tmp_path: Path) -> None:
    """The lanes of the first four at one time; a process of the timeline for each of the first eight."""
    result = run(of({"pools": [{"count": 9}], "router": {"name": "round_robin"}}))
    chart = result.figure().chart
    assert [panel.title.partition(":")[0] for panel in chart.panels] == [f"server {at}" for at in range(4)]
    path = result.save(tmp_path / "run")
    events = json.loads(gzip.decompress((path / "timeline.json.gz").read_bytes()))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"fleet async server {at}" for at in range(8)]


WORDS = [("7", "got 7, expected 0 to 1"), ("True", "got True, expected 0 to 1"), ("1 // 0", "ZeroDivisionError")]


@pytest.mark.parametrize(("answer", "problem"), WORDS)
@pytest.mark.parametrize("blind", [True, False])
def test_a_users_router_that_fails_is_one_line(
    answer: str, problem: str, blind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1, as of a user's scheduler; whether its servers are simulated together or not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    (tmp_path / "failing.py").write_text(
        "from cbsim.routers.base import RouterBase, RouterKind\n"
        "from cbsim.routers.simple import PlainSettings\n"
        f"class First(RouterBase):\n    choose = lambda *_: {answer}\n"
        f"KIND = RouterKind(name='f', about='', settings=PlainSettings, make=lambda *_: First(), blind={blind})\n"
    )
    fleet = json.dumps({"pools": [{"count": 2}], "router": {"name": "failing:KIND"}})
    (tmp_path / "fleet.yaml").write_text(dump(of()))
    told = call("run", tmp_path / "fleet.yaml", "--set", f"fleet={fleet}", "--out", tmp_path / "runs")
    refused(told, 1, f"router failing:KIND, choose, request 0: {problem}")


def test_signals_older_than_the_run_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = spied(monkeypatch, metrics_s=90, events_s=0.01)
    (line,) = [line for line in result.notices if line.startswith("fleet.signals")]
    assert line.startswith("fleet.signals.metrics_s: got 90, the run took")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda numbers: numbers["per_server"].pop(),
            "steps.parquet: server: must be a column of the runs",
        ),
        (lambda numbers: numbers.pop("per_server"), "per_server: must be there if the scenario has a fleet"),
        (lambda numbers: numbers["per_server"][1].update(gpu_active=7.0), "per_server.1.gpu_active is 7.0, that of"),
        (lambda numbers: numbers["per_server"][0].update(requests="x"), "per_server.0.requests is 'x', that of"),
    ],
)
def test_numbers_of_a_server_that_are_not_of_the_tables_are_refused(
    damage: Callable[[dict[str, Any]], object], expected: str, tmp_path: Path
) -> None:
    """A summary is read only if the tables beside it say the same of every server."""
    path = run(of({"pools": [{"count": 2}], "router": {"name": "round_robin"}})).save(tmp_path / "run")
    assert cbsim.read(path).summary["servers"] == 2
    numbers = json.loads((path / "summary.json").read_text())
    damage(numbers)
    (path / "summary.json").write_text(json.dumps(numbers))
    with pytest.raises(RunError, match=expected):
        cbsim.read(path)


def test_plans_of_another_number_of_servers_are_not_derived(tmp_path: Path) -> None:
    """Those of the servers that the scenario lacks would be left out."""
    path = run(of({"pools": [{"count": 3}], "router": {"name": "round_robin"}})).save(tmp_path / "run")
    file = path / "scenario.resolved.yaml"
    file.write_text(file.read_text().replace("count: 3", "count: 2"))
    refused(call("replan", path), 2, "steps.parquet: server: row", "got 2, expected", "to 1")
