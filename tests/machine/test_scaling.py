"""Fleets whose servers come and go: what happens when, that every request ends once, and what the numbers say."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import call, refused
from support.random_scenarios import any_scenario, checks_of

from cbsim.errors import DeadlockError
from cbsim.machine.scaling import Scaled
from cbsim.machine.simulate import Simulation
from cbsim.policy.request import RequestSpec
from cbsim.record import directory
from cbsim.routers.registry import OURS as ROUTERS
from cbsim.runs import reading, replan, running
from cbsim.runs.result import Result
from cbsim.scenario.scenario import Scenario, dump, parse
from cbsim.schedulers import registry
from cbsim.workload import generators
from cbsim.workload.requests import Workload

ENDS = ("length", "stop", "aborted", "refused", "failed")
FEW = {"hpa": {"name": "hpa", "metric": "in_flight", "target": 4, "down_window_s": 1}}
SCALED = {"rule": FEW["hpa"], "most": 4, "start_s": 0.5, "interval_s": 0.25}


def of(fleet: Mapping[str, Any], requests: int = 60, rate: float = 40, **fields: Any) -> Scenario:
    load = {
        "kind": "synthetic",
        "requests": requests,
        "prompt_tokens": {"uniform": {"low": 100, "high": 900}},
        "output_tokens": {"uniform": {"low": 2, "high": 120}},
        "arrivals": {"kind": "poisson", "rate_per_s": rate},
    }
    document = {"name": "fleet", "question": "How many?", "model": "llama-3.1-8b", "hardware": "h100-sxm"}
    whole = {**document, "workload": load, "loop": {"mode": "async"}, "fleet": {**ROUTED, **fleet}, **fields}
    return parse(whole, "fleet")


ROUTED = {"router": {"name": "least_in_flight"}}


def run(scenario: Scenario, *, digests: bool = True) -> tuple[Result, Scaled]:
    made = list[Simulation]()

    def serve(scenario: Scenario, loop: str, workload: Any) -> Simulation:
        made.append(Simulation(scenario, loop, workload))
        return made[-1]

    result = running.one_loop(scenario, scenario.loop.mode, serve, running.Terms("any", digests=digests))
    assert result.step_numbers["plan_hash"].any() == (digests and len(result.step_numbers) > 0)
    assert isinstance(made[0]._fleet, Scaled)
    return result, made[0]._fleet


def events(result: Result, *of: str) -> list[dict[str, Any]]:
    return [each for each in result.summary["scaling"]["events"] if each["event"] in of]


def orderly(result: Result) -> None:
    """Every replica starts, and goes from there: it is ready, then drains, and it is gone or dead once."""
    after = {"start": ("ready", "gone", "died"), "ready": ("drain", "died"), "drain": ("gone", "died")}
    now = dict[int, str]()
    for each in result.summary["scaling"]["events"]:
        assert each["event"] in after.get(now.get(each["slot"], ""), ("start",))
        now[each["slot"]] = each["event"]


def ends(result: Result, total: int) -> Counter[str]:
    """How requests ended. Each has one row with an end, and one of its own for every time that it was sent again."""
    last = dict[int, str]()
    for row in result.request_rows:
        assert row.status in (*ENDS, "retried")
        index, number = row.index % total, row.index // total
        assert last.get(index, "retried") == "retried", "it was sent again though it had ended"
        assert number == 0 or index in last
        last[index] = row.status
    assert len(last) == total
    assert "retried" not in last.values()
    return Counter(last.values())


# -- nothing is lost ---------------------------------------------------------------------------------------------------


def check_one(name: str, router: str, seed: int, folder: Path) -> None:
    dice = random.Random(f"scaling {name} {seed}")
    base = any_scenario(name, dice, folder)
    metric, target = dice.choice(["waiting", "in_flight", "running"]), dice.choice([0.1, 1, 3])
    scaled = {
        "rule": {"name": "hpa", "metric": metric, "target": target},
        "least": dice.choice([1, 2]),
        "most": dice.choice([2, 3]),
        "start_s": dice.choice([0, 0.01, 0.3]),
        "drain_s": dice.choice([None, 0, 0.05]),
        "interval_s": dice.choice([0.01, 0.1]),
    }
    scaled["rule"] |= {"down_window_s": dice.choice([0, 0.05]), "down_period_s": 0.01, "up_period_s": 0.01}
    pools = [{"count": 2, "autoscale": scaled}, {"count": dice.choice([1, 2])}]
    pools = dice.choice([pools, pools[:1], pools[1:]])
    room = sum(pool["autoscale"]["most"] if "autoscale" in pool else pool["count"] for pool in pools)
    deaths = [
        {"server": (server := dice.randrange(room)), "at_s": dice.choice([0, dice.random() / 10, dice.random()])}
        | ({} if "autoscale" in pools[0] else {"back_s": dice.choice([None, 0, 0.1])})
        for _ in range(dice.randrange(1, 6))
    ]
    del server
    at_random = {"per_server_hour": 20_000, "seed": seed, "back_s": dice.choice([None, 0.05])}
    fleet = {
        "pools": pools,
        "router": {"name": router},
        "signals": {"metrics_s": 0.01, "events_s": dice.choice([0, 0.02])},
        "failures": deaths,
        "random_failures": dice.choice([None, at_random]),
        "most_retries": dice.choice([0, 1, 3]),
    }
    scenario = parse(base.model_dump(mode="json") | {"fleet": fleet}, "fleet")
    try:
        (first, servers), (again, _) = run(scenario), run(scenario, digests=False)
    except DeadlockError:
        return
    assert (first.request_rows, first.summary) == (again.request_rows, again.summary)
    load = generators.build(scenario)
    ends(first, load.total)
    for machine in servers.machines:
        for check in checks_of(machine.scheduler):
            check()
        assert machine.scheduler.pool.free == machine.scheduler.pool.num_blocks
        assert not machine.scheduler.requests
    assert servers.record.finished_count == first.summary["requests"] == load.total  # of which progress speaks
    choice = servers._choices[0]
    assert not (servers._open or servers._unsent or servers._first or servers._due)
    orderly(first)
    choice.deliver(1 << 62)
    assert not (choice._server or choice._samples or choice._news)
    assert all(view.in_flight == 0 for view in choice.views)
    path = first.save(folder / "run")
    reading.check_run(reading.load(path), base.loop.mode, fleet=True)
    assert replan.rederive(path).difference is None


@pytest.mark.parametrize("name", registry.OURS)
def test_every_request_ends_once_whatever_comes_and_goes(name: str, tmp_path: Path) -> None:
    """Any router, any scheduler; replicas that start, drain and are killed, deaths at any moment, at random too:
    finished, cancelled, refused or failed, once; books and caches empty at the end; plans that follow from the polls.
    """

    @given(router=st.sampled_from([*ROUTERS]), seed=st.integers(0, 1 << 32))
    @settings(max_examples=3)
    def check(router: str, seed: int) -> None:
        check_one(name, router, seed, Path(mkdtemp(dir=tmp_path)))

    check()


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_sends_nothing_to_servers_that_start_drain_or_are_gone(router: str) -> None:
    """Recounted from tables and events; each server that is ready for long gets requests again after a death."""
    fleet = {"pools": [{"count": 2, "autoscale": SCALED}], "router": {"name": router}}
    result, servers = run(of({**fleet, "failures": [{"server": 1, "at_s": 0.4}, {"server": 0, "at_s": 0.9}]}))
    assert ends(result, 60) == {"length": 60}
    assert replan_of(result) is None
    assert len(servers.machines) > 3
    ready, closed = dict[int, float](), dict[int, float]()
    for each in events(result, "ready"):
        ready[each["server"]] = each["time_s"]
    for each in events(result, "drain", "died"):
        closed.setdefault(each["server"], each["time_s"])
    for row in result.request_rows:
        queued_s = row.queued_ns / 1e9
        assert queued_s >= ready[row.server]
        if row.status != "retried":
            sent_s = row.arrival_ns / 1e9
            assert row.server not in closed or sent_s <= closed[row.server]


def replan_of(result: Result) -> str | None:
    return replan.rederive(result.save(Path(mkdtemp()) / "run")).difference


# -- when --------------------------------------------------------------------------------------------------------------


def test_a_fleet_that_changes_is_the_same_once_it_was_written() -> None:
    scaled = of({"pools": [{"autoscale": SCALED}], "failures": [{"server": 3, "at_s": 1}]})
    assert parse(json.loads(json.dumps(scaled.model_dump(mode="json"))), "again") == scaled


def test_replicas_start_after_the_cold_start_and_go_when_they_have_drained() -> None:
    """Each start is `start_s` before its first request; a draining one goes with its last token."""
    fleet = {"pools": [{"count": 3, "autoscale": SCALED}], "failures": [{"server": 1, "at_s": 0.1}]}
    result, _ = run(of(fleet, rate=9))
    started = {(each["slot"], each["time_s"] + SCALED["start_s"]) for each in events(result, "start")}
    later = [each for each in events(result, "ready") if each["time_s"]]
    assert later
    assert {(each["slot"], each["time_s"]) for each in later} <= started
    rows = [row for row in result.requests.to_pylist() if row["status"] == "length"]
    drained = {each["server"]: each["time_s"] for each in events(result, "drain")}
    assert drained
    for each in [each for each in events(result, "gone") if each["server"] is not None]:  # else it had not started
        last_s = max((row["last_token_ns"] / 1e9 for row in rows if row["server"] == each["server"]), default=0.0)
        assert each["time_s"] == pytest.approx(max(last_s, drained[each["server"]]), abs=1e-9)
    assert max(each["ready"] for each in events(result, "ready")) <= SCALED["most"]


def test_a_replica_that_drains_too_long_is_killed_and_its_requests_are_sent_again() -> None:
    scaled = {**SCALED, "drain_s": 0.05}
    result, _ = run(of({"pools": [{"count": 4, "autoscale": scaled}]}, rate=9))
    scaling = result.summary["scaling"]
    assert scaling["deaths"]
    assert (
        result.summary["requests"] == 60 == len(result.request_rows) - result.summary["requests_by_status"]["retried"]
    )
    assert ends(result, 60) == {"length": 60}
    drained = {each["server"]: each["time_s"] for each in events(result, "drain")}
    for each in events(result, "died"):
        assert each["time_s"] == pytest.approx(drained[each["server"]] + 0.05)


def test_hours_and_price_are_those_of_the_servers_that_there_were() -> None:
    """Recounted from the events: from a start to the end of the server, or of the run."""
    fleet = {"pools": [{"autoscale": SCALED}], "failures": [{"server": 0, "at_s": 0.7}]}
    result, servers = run(of(fleet, requests=150))
    scaling, hours, since = result.summary["scaling"], 0.0, {0: 0.0}
    for each in scaling["events"]:
        if each["event"] == "start":
            since[each["slot"]] = each["time_s"]
        elif each["event"] in ("gone", "died"):
            hours += each["time_s"] - since.pop(each["slot"])
    hours += sum(servers.now_ns / 1e9 - each for each in since.values())
    assert scaling["server_hours"] * 3600 == pytest.approx(hours)
    price = result.scenario.hardware.price_usd_hour
    assert price is not None
    assert scaling["usd"] == pytest.approx(scaling["server_hours"] * price)  # of one GPU each
    spent = result.summary["cost"]["price_usd_hour"] * result.summary["makespan_s"] / 3600
    assert spent == pytest.approx(scaling["usd"])
    assert all(0 <= each["gpu_active"] <= 1 for each in result.summary["per_server"])


def test_requests_of_a_dead_server_fail_where_nothing_sends_them_again() -> None:
    result, _ = run(of({"pools": [{"count": 2}], "failures": [{"server": 0, "at_s": 0.5}], "most_retries": 0}))
    lost = [row for row in result.request_rows if row.status == "failed"]
    assert lost
    assert {(row.server, row.reason) for row in lost} == {(0, "server 0 died")}
    assert all(row.arrival_ns <= 0.5e9 for row in lost)
    assert ends(result, 60).total() == 60


def test_requests_fail_when_no_server_is_left_and_wait_while_one_comes_back() -> None:
    pools = {"pools": [{"count": 1}]}
    result, _ = run(of({**pools, "failures": [{"server": 0, "at_s": 0.5}]}))
    reasons = Counter(row.reason for row in result.request_rows if row.status == "failed")
    assert {"no server is left"} == {*reasons}
    result, _ = run(of({**pools, "failures": [{"server": 0, "at_s": 0.5, "back_s": 2}]}))
    assert ends(result, 60) == {"length": 60}
    first = min(row.queued_ns for row in result.request_rows if row.server == 1)
    assert first == 2_500_000_000
    assert result.requests.to_pylist()[-1]["ttft_s"] > 1  # from its arrival, not from when it was sent again


def test_a_client_that_leaves_is_heard_wherever_its_request_is() -> None:
    """Also while it waits for a server, and after it was sent again."""
    fleet = {"pools": [{"count": 1}], "failures": [{"server": 0, "at_s": 0.5, "back_s": 0.7}]}
    scenario = of(fleet)
    specs = [RequestSpec(at, str(at), at * 50_000_000, 400, 2000, 2000) for at in range(20)]
    leaves = [((400 + 100 * at) * 1_000_000, spec) for at, spec in enumerate(specs[:18])]
    simulation = Simulation(scenario, "async", Workload(specs, 20, leaves))
    simulation.run()
    rows, _ = directory.contents(simulation.record)
    last = {row.index % 20: row for row in sorted(rows, key=lambda row: row.index)}
    assert [last[at].status for at in range(20)] == ["aborted"] * 18 + ["length"] * 2
    assert last[5].queued_ns >= 1_200_000_000  # it had left by then
    late = [last[at] for at in range(10, 18)]
    assert all(row.server == 1 and row.first_step >= 0 for row in late)


def test_random_deaths_follow_from_the_seed() -> None:
    def dead(seed: int) -> list[float]:
        chance = {"per_server_hour": 2000, "seed": seed, "back_s": 0.1}
        result, _ = run(of({"pools": [{"count": 3}], "random_failures": chance}))
        assert ends(result, 60).total() == 60
        return [each["time_s"] for each in events(result, "died")]

    assert dead(1) == dead(1) != dead(2)
    assert len(dead(1)) > 1


def test_tune_and_capacity_take_fleets_that_change(tmp_path: Path) -> None:
    """A bound of the rule is a field like others, and what is minimised the hours of the servers that there were."""
    fleet = {"pools": [{"autoscale": {**SCALED, "least": 1}}], "failures": [{"server": 0, "at_s": 0.3}]}
    (tmp_path / "one.yaml").write_text(dump(of(fleet, requests=30)))
    rest = (tmp_path / "one.yaml", "--jobs", 1, "--json", "--store", tmp_path / "runs", "--replicates", 2)
    knob = ("--knob", "fleet.pools.0.autoscale.most=1,3", "--minimise", "scaling.server_hours")
    tuned = call("tune", *rest, *knob, "--check", "requests_by_status.failed<=0")
    assert tuned.status == 0, tuned.err
    assert '"fleet.pools.0.autoscale.most": 1' in json.dumps(json.loads(tuned.out))
    found = call("capacity", *rest, "--width", "90%", "--check", "ttft.p50<=0.2s")
    assert found.status == 0, found.err
    assert json.loads(found.out)["probes"]


# -- rules of a user, and mistakes -------------------------------------------------------------------------------------

MINE = (
    "from cbsim.routers.scaling import RuleKind\n"
    "from cbsim.routers.simple import PlainSettings\n"
    "class Mine:\n"
    "    calls = 0\n"
    "    def desired(self, ready, starting, wanted, now_ns):\n"
    "        self.calls += 1\n"
    "        return {}\n"
    "KIND = RuleKind(name='mine', about='', settings=PlainSettings, make=lambda *_: Mine())\n"
)


def mine(answer: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "scaler", raising=False)
    (folder / "scaler.py").write_text(MINE.format(answer))
    return {"pools": [{"autoscale": {**SCALED, "rule": {"name": "scaler:KIND"}}}]}


def flaps(result: Result) -> list[str]:
    return [line for line in result.notices if "flaps" in line]


def test_a_rule_that_flaps_is_steady_with_the_window_that_is_named() -> None:
    """And with one interval less it still flaps."""

    def run_with(window_s: float) -> list[str]:
        rule = {
            "name": "hpa",
            "metric": "in_flight",
            "down_window_s": window_s,
            "down_period_s": 0.1,
            "up_period_s": 0.1,
        }
        scaled = {"rule": rule, "most": 6, "start_s": 3, "interval_s": 0.25}
        return flaps(run(of({"pools": [{"autoscale": scaled}]}, requests=800, rate=12))[0])

    (line,) = run_with(0)
    named = re.search(r"hpa flaps: 30 times .* start_s \(3\); it takes a down_window_s of at least (\S+)$", line)
    assert named is not None
    assert run_with(float(named[1])) == []
    assert run_with(float(named[1]) - 0.25)


def bursts(output_tokens: int, **scaled: Any) -> Result:
    """Twenty bursts of thirty requests, one every 12 s."""
    rows = "".join(f"{12 * at + each / 100},400,{output_tokens}\n" for at in range(20) for each in range(30))
    rule = {**FEW["hpa"], "down_window_s": 0, "down_period_s": 1, "up_period_s": 1}
    scenario = of({"pools": [{"autoscale": {"rule": rule, "most": 4, "start_s": 7, **scaled}}]})
    terms = running.Terms("any", None, f"arrival_s,prefill_tokens,decode_tokens\n{rows}")
    return running.one_loop(scenario, "async", Simulation, terms)


def test_a_window_that_is_named_bridges_what_it_shortens() -> None:
    """Replicas go for 5 s or 10 s; with a window of 5 s the latter are gone for less than a start, too."""
    (line,) = flaps(bursts(600, interval_s=5))
    assert line.endswith("were started again within start_s (7); it takes a down_window_s of at least 10")


def test_starts_that_are_never_ready_are_named() -> None:
    (line,) = [line for line in bursts(100, interval_s=1).notices if "never ready" in line]
    begins = "fleet.pools.0.autoscale.start_s: got 7: 60 of 60 replicas"
    assert line == f"{begins} that were started and paid for were never ready"


def test_tokens_of_servers_that_died_are_not_delivered_and_requests_retried_count_once(tmp_path: Path) -> None:
    """Of requests that are sent again only the last answer counts, in the numbers of the fleet and of each server."""
    deaths = [{"server": 0, "at_s": at, "back_s": 0.01} for at in (0.3, 0.6, 0.9, 1.2)]
    scenario = of({"pools": [{"count": 1}], "failures": deaths, "most_retries": 9})
    result, _ = run(scenario)
    numbers = result.summary
    assert numbers["requests_by_status"]["retried"] > 60
    assert numbers["output_tokens"] == sum(row.output_tokens for row in result.request_rows if row.status == "length")
    assert numbers["output_tokens"] == sum(each["output_tokens"] for each in numbers["per_server"])
    (tmp_path / "one.yaml").write_text(dump(scenario))
    said = call("run", tmp_path / "one.yaml", "--out", tmp_path / "runs")
    again = len({row.index % 60 for row in result.request_rows if row.status == "retried"})
    assert f"{again} of 60 requests retried" in said.out
    assert said.status == 0


def test_a_fleet_that_loses_requests_ends_with_an_error(tmp_path: Path) -> None:
    """And of a server that died long before the last arrival no share of the run is over 100 %."""
    scenario = of({"pools": [{"count": 1}], "failures": [{"server": 0, "at_s": 0.5}]})
    (tmp_path / "one.yaml").write_text(dump(scenario))
    said = call("run", tmp_path / "one.yaml", "--out", tmp_path / "runs")
    assert said.status == 1
    assert "requests failed: no server is left" in said.err
    assert "lost: " in said.out
    result, _ = run(of({"pools": [{"count": 2}], "failures": [{"server": 0, "at_s": 0.5}]}, rate=10))
    (share,) = re.findall(r"the last arrives at (\d+)% of the run", str(result))
    assert int(share) <= 100


def test_a_rule_of_a_user_that_flaps_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number of its changes of direction; what is out of bounds is cut to them."""
    result, _ = run(of(mine("9 * (self.calls % 2)", tmp_path, monkeypatch)))
    (line,) = flaps(result)
    begins = "fleet.pools.0.autoscale.rule: scaler:KIND flaps: "
    assert re.fullmatch(begins + r"\d+ times replicas went and were started again within start_s \(0.5\)", line)
    assert {each["ready"] for each in events(result, "ready")} <= {1, 2, 3, 4}


@pytest.mark.parametrize(("answer", "problem"), [("None", "got None, expected 0 or more"), ("1 // 0", "ZeroDivision")])
def test_a_rule_of_a_user_that_fails_is_one_line(
    answer: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = mine(answer, tmp_path, monkeypatch) | ROUTED
    (tmp_path / "one.yaml").write_text(dump(of({"pools": [{}]})))
    printed = call("run", tmp_path / "one.yaml", "--set", f"fleet={json.dumps(fleet)}", "--out", tmp_path / "runs")
    refused(printed, 1, f"rule scaler:KIND, desired: {problem}")


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        ({"pools": [{"autoscale": {**SCALED, "least": 5}}]}, ("fleet.pools.0.autoscale.least: got 5", "<= most (4)")),
        ({"pools": [{"count": 9, "autoscale": SCALED}]}, ("fleet.pools.0.count: got 9", "(1 to 4)")),
        ({"pools": [{}], "failures": [{"server": 1, "at_s": 0}]}, ("fleet.failures.0.server: got 1", "<= 0")),
        (
            {"pools": [{"autoscale": SCALED}], "failures": [{"server": 1, "at_s": 0, "back_s": 1}]},
            ("fleet.failures.0.back_s: got 1", "must be null"),
        ),
        (
            {"pools": [{"autoscale": {**SCALED, "rule": {"name": "hpaa"}}}]},
            ("fleet.pools.0.autoscale.rule.name", "hpa"),
        ),
        (
            {"pools": [{"autoscale": {**SCALED, "rule": {"name": "hpa", "target": 0}}}]},
            ("fleet.pools.0.autoscale.rule.target",),
        ),
        (
            {"pools": [{"autoscale": {**SCALED, "interval_s": 0}}]},
            ("fleet.pools.0.autoscale.interval_s: got 0", "0.001"),
        ),
        ({"pools": [{}], "most_retries": -1}, ("fleet.most_retries: got -1", ">= 0")),
        (
            {"pools": [{}], "random_failures": {"per_server_hour": 1e-300}},
            ("fleet.random_failures.per_server_hour: got 1e-300",),
        ),
        (
            {"pools": [{"autoscale": SCALED, "server": {"cost": {"data_parallel": 2}}}]},
            ("fleet.pools.0.server.cost.data_parallel",),
        ),
        (
            {"pools": [{}], "router": {"name": "cbsim.routers.scaling:HPA"}},
            ("fleet.router.name", "is a RuleKind, expected a RouterKind"),
        ),
    ],
)
def test_what_cannot_be_is_refused(fleet: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(dump(of({"pools": [{}]})))
    changed = json.dumps({**ROUTED, **fleet})
    refused(call("run", tmp_path / "one.yaml", "--set", f"fleet={changed}", "--out", tmp_path / "runs"), 2, *words)


def test_a_report_has_the_servers_over_time(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the report needs pandas")
    from analysis.page import report
    from analysis.statistics import loading

    result, _ = run(of({"pools": [{"autoscale": SCALED}], "failures": [{"server": 0, "at_s": 0.7}]}))
    made = report.build(loading.read([result.save(tmp_path / "run")]), "command")
    (chart,) = [chart for chart in made.charts if chart.key == "replicas"]
    line, died = chart.panels[0].marks
    (table,) = [table for table in made.tables if table.title.startswith("Servers")]
    assert table.note == "Shares are of the time that a server was there."
    assert line.y.max() == max(each["ready"] for each in result.summary["scaling"]["events"])
    assert len(died.x) == 1
