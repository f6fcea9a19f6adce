"""Runs that a search for a capacity makes, keeps and finds again; the command, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.calls import call, refused
from support.holding import SLOW, base, slow

import cbsim
from cbsim.errors import CheckError, RunError, ScenarioError
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario
from cbsim.search import capacity
from cbsim.search import probe as terms
from cbsim.search.probe import RATE, Over, Prober
from cbsim.sweeps import identity
from cbsim.sweeps.store import Runs, Store
from cbsim.sweeps.work import Here, Made, Task, work

# -- runs -------------------------------------------------------------------------------------------------------------


WORDS_OF = ("--check", "e2e.mean<=250ms", "--replicates", "4", "--width", "50%", "--jobs", "1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(json.dumps(SLOW))
    return path


def here(store: Path) -> Runs:
    return Runs(Store(store), Here())


def test_runs_are_kept_and_found_again(tmp_path: Path) -> None:
    """The second search makes none and answers the same; so does one that was interrupted, with what was left."""
    scenario = slow()
    wanted = terms.terms(scenario, ["e2e.mean<=250ms"], None, replicates=4, width=0.2)
    first = here(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        capacity.search(scenario, RATE, wanted, first, _interrupt)
    again = here(tmp_path)
    found = capacity.search(scenario, RATE, wanted, again)
    assert first.made == 2  # one request alone, and the first load
    assert first.made + again.made == found.replicates + 1
    last = here(tmp_path)
    assert capacity.search(scenario, RATE, wanted, last).numbers() == found.numbers()
    assert last.made == 0
    assert found.holds is not None and found.fails is not None
    exact = 1 / (0.2 - 0.05 / 10.5)  # request k waits k (0.2 s - 1 / rate); the last 18 of 20 count
    assert found.holds <= exact <= found.fails


def test_a_fleet_holds_what_its_servers_hold_together(tmp_path: Path) -> None:
    """In turns with one that is twice as fast and never waits: the slow one's request k waits k (0.2 s - 2 / rate), and
    its last 9 of 10 count, beside as many that take 0.1 s."""
    fast = {"server": {"cost": {"step_s": 0.025}}}
    scenario = scenarios.parse({**SLOW, "fleet": {"pools": [{}, fast], "router": {"name": "round_robin"}}}, "slow")
    wanted = terms.terms(scenario, ["e2e.mean<=250ms"], None, replicates=4, width=0.1)
    found = capacity.search(scenario, RATE, wanted, here(tmp_path))
    assert found.holds is not None and found.fails is not None
    assert found.holds <= 12.5 <= found.fails  # 0.2 + 5 (0.2 - 2 / rate) and 0.1 have a mean of 0.25


@pytest.mark.parametrize(
    ("prefills", "slow", "exact"),
    [(1, "prefill", 1 / (0.2 - 0.05 / 10.5)), (2, "prefill", 2 / 0.19), (1, "decode", 1 / (0.2 - 0.05 / 10.5))],
)
def test_a_fleet_with_roles_holds_what_its_slower_pool_holds(
    prefills: int, slow: str, exact: float, tmp_path: Path
) -> None:
    """A request is 0.2 s at a server of that pool, in a step of the prefill or two of the decoding, and does not wait
    elsewhere: at one server request k waits k (0.2 s - 1 / rate), at two k // 2 times 0.2 s - 2 / rate; the last 18 of
    20 count. The other pool is twenty times as fast.
    """
    step_s = {"prefill": 0.2, "decode": 0.1}
    pools = [
        {"name": role, "role": role, "server": {"cost": {"step_s": took if role == slow else took / 20}}}
        for role, took in step_s.items()
    ]
    pools[0]["count"] = prefills
    turns = {"name": "round_robin"}
    fleet = {"pools": pools, "router": turns, "hand_off": {"router": turns, "link": {"bandwidth_gb_s": 1e4}}}
    scheduler = {"name": "vllm", "max_num_seqs": 1, "max_num_batched_tokens": 2048}
    load = {"prompt_tokens": 16, "output_tokens": 2, "requests": 20}
    fields = {**SLOW, "scheduler": scheduler, "fleet": fleet, "workload": {**SLOW["workload"], **load}}
    scenario = scenarios.parse(fields, "apart")
    alone = cbsim.run(scenarios.scenario_of(scenario, ["workload.requests=1"])).summary["e2e_s"]["mean"]
    wanted = terms.terms(scenario, [f"e2e.mean<={alone + 0.05}s"], None, replicates=4, width=0.05)
    found = capacity.search(scenario, RATE, wanted, here(tmp_path))
    assert found.holds is not None and found.fails is not None and found.binds is not None
    assert found.holds <= exact <= found.fails
    assert f"pool: {slow} is the fuller one" in found.binds.sentences[-1]


def _interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_the_first_requests_do_not_count(tmp_path: Path) -> None:
    """A quarter of 20 requests: latencies are of the 15 that arrive last, as `--window` from there on gives them; the
    run has a key of its own, and its files say how to make it."""
    scenario = base()
    made = work(Task("key", scenario, "summary", 0.25, limits=True))
    summary, facts = json.loads(made.files["summary.json"]), json.loads(made.files["env.json"])
    assert summary["ttft_s"]["n"] == 15
    window = cbsim.run(scenario, window_s=(summary["window_s"][0], math.inf))
    assert isinstance(window, cbsim.Result)
    assert dict(window.summary) == summary
    assert facts["command"].endswith(f"--window {summary['window_s'][0]!r}:")
    assert json.loads(made.files["binds.json"]) == cbsim.run(scenario).binding  # type: ignore[union-attr]
    assert identity.key(scenario, 0.25) != identity.key(scenario) == identity.key(scenario, 0.0)


def test_a_run_that_fails_ends_the_search_and_says_why(tmp_path: Path) -> None:
    class Broken(Here):
        def each(self, tasks: Any) -> Any:
            return (Made(task.key, {}, "out of memory") for task in tasks)

    runs = Runs(Store(tmp_path), Broken())
    with pytest.raises(RunError, match=r"^scenario: seed 0: out of memory$"):
        capacity.search(slow(), RATE, terms.terms(slow(), ["ttft.mean<=1s"], None), runs)


def test_from_python(tmp_path: Path) -> None:
    found = cbsim.capacity(slow(), ["e2e.mean<=250ms"], store=tmp_path, replicates=4, width=0.2)
    assert found.holds is not None and found.fails is not None
    assert found.terms.replicates == 4
    assert str(found).startswith(f"holds     {found.holds:g} requests/s")
    lines: list[str] = []
    again = cbsim.capacity(
        slow(), ["e2e.mean<=250ms"], store=tmp_path, width=0.2, progress=lambda probe: lines.append(str(probe))
    )
    assert len(lines) == len(again.probes) and lines[0].startswith("4 requests/s: holds after 1 runs, 200 ms")
    with pytest.raises(ScenarioError, match=r"^slo: got 'ttft.p99<=1s', expected a list of conditions"):
        cbsim.capacity(base(), "ttft.p99<=1s", store=tmp_path)
    with pytest.raises(CheckError, match="unknown metric"):
        cbsim.capacity(base(), ["tftt.p99<=1s"], store=tmp_path)


def trace(folder: Path, gaps_s: Sequence[float]) -> Scenario:
    """A CSV of requests of 0.2 s on one seat."""
    times = [sum(gaps_s[: at + 1]) for at in range(len(gaps_s))]
    rows = [f"{at:.4f},16,4" for at in times]
    (folder / "mine.csv").write_text("\n".join(["arrival_s,prefill_tokens,decode_tokens", *rows]))
    return scenarios.parse({**SLOW, "workload": {"kind": "csv", "path": str(folder / "mine.csv")}}, "mine")


def test_a_trace_is_searched_by_its_rate_and_each_load_is_run_once(tmp_path: Path) -> None:
    """Its times are divided: 41 requests in 20 s are 2.05 a second, and the answer is in requests a second. Its runs
    with other seeds would be the same.
    """
    scenario = trace(tmp_path, [0.0, *[0.5] * 40])
    assert Over(scenario, "rate_per_s").start == 2.05
    runs = here(tmp_path / "store")
    found = capacity.search(scenario, "rate_per_s", terms.terms(scenario, ["e2e.mean<=250ms"], None), runs)
    assert found.holds is not None and found.fails is not None and found.width is not None and found.width <= 0.05
    exact = 41 / 40 / (0.2 - 0.05 / 21.5)  # request k waits k (0.2 s - gap), the gap is 41 / 40 of the rate's inverse
    assert found.holds <= exact * 1.01 and found.fails >= exact * 0.99
    assert {each.replicates for each in found.probes} == {1}
    assert runs.made == found.replicates + 1, "and one request alone"
    assert found.unit == "requests/s" and "without an interval" in found.notices[0]


@pytest.mark.parametrize(
    ("workload", "field", "unit"),
    [
        ({}, RATE, "requests/s"),
        ({"arrivals": {"kind": "closed_loop", "users": 3}}, "workload.arrivals.users", "users"),
    ],
)
def test_the_load_is_the_rate_or_the_users(workload: dict[str, Any], field: str, unit: str) -> None:
    over = Over(base(**workload), "rate_per_s")
    assert (over.field, over.unit) == (field, unit)


def test_a_trace_that_comes_at_once_has_no_rate(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="--over rate_per_s: csv: all its requests arrive at once"):
        Over(trace(tmp_path, [0.0, 0.0]), "rate_per_s")


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_every_probe_and_the_interval(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in words, once as JSON, from the same runs."""
    monkeypatch.setattr("cbsim.cli.many_runs.executor", lambda _: Here())
    where = ("--store", tmp_path / "store")
    said = call("capacity", file, *WORDS_OF, *where)
    assert said.status == 0, said.err
    numbers = call("capacity", file, *WORDS_OF, *where, "--json")
    found = json.loads(numbers.out)
    for each in found["probes"]:
        assert f"{each['value']:g}" in said.out
    assert f"\nholds     {found['holds']:g} requests/s\n" in said.out
    assert f"\nfails     {found['fails']:g} requests/s: E2E mean exceeds 250 ms (" in said.out
    assert found["confidence"] is None and "without an interval" in found["notices"][0], (
        "arrivals and lengths are all given"
    )
    assert f"made      {found['replicates'] + 1} of the runs" in said.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "no condition, expected some such as ttft.p99<=2s, or a goodput"),
        (("--check", "tttf.p99<=1s"), "--check 'tttf.p99<=1s': unknown metric 'tttf.p99'; did you mean ttft.p99?"),
        (("--check", "ttft.p99<=1%"), "unit '%', ttft.p99 takes"),
        (("--check", "ttft.p99"), "expected METRIC<VALUE[UNIT]"),
        (("--goodput", "99"), "--goodput: got 99, must be > 0 and < 1, such as 99%"),
        (("--goodput", "99ms"), "--goodput: got 99ms, must be > 0 and < 1, such as 99%"),
        (("--goodput", "101%"), "--goodput: got 101%, must be > 0 and < 1, such as 99%"),
        (("--goodput", "9%", "--set", "slo.ttft_s=null"), "slo.attainment>=9%: the scenario base has no slo"),
        (("--over", "workload.arrivals.rate"), "workload.arrivals has no rate; did you mean rate_per_s?"),
        (
            ("--over", "workload.arrivals.kind"),
            "got 'constant', expected a number of the workload: rate_per_s, workload.requ",
        ),
        (("--over", "workload.shared_prefix_tokens"), "got 0, must be > 0"),
        (("--over", "scheduler.max_num_seqs"), "expected a number of the workload, such as workload.arrivals"),
        (("--set", "workload.arrivals={kind: at_once}"), "workload.arrivals has no rate_per_s; it has kind"),
        (("--set", "loop.mode=both"), "loop.mode: got both; a capacity is that of one loop, sync or async"),
        (("--set", "workload.requets=4"), "workload.requets: unknown field"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(
    file: Path, tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    condition = () if words[:1] in ((), ("--check",), ("--goodput",)) else ("--check", "ttft.mean<=1s")
    said = call("capacity", file, *words, *condition, "--store", tmp_path / "store", "--jobs", "1")
    refused(said, 2, text)


@pytest.mark.parametrize(
    ("option", "typed", "expected"),
    [
        ("--confidence", "95", "a share from 0.5 to 0.9999, such as 95%"),
        ("--width", "1000%", "a share from 0.001 to 1, such as 5%"),
        ("--width", "0", "a share from 0.001 to 1, such as 5%"),
        ("--replicates", "1", "a whole number from 2 to 10,000"),
        ("--warmup", "95%", "a share from 0 to 0.9, such as 5%"),
    ],
)
def test_a_precision_out_of_bounds_names_the_option_and_what_was_typed(option: str, typed: str, expected: str) -> None:
    said = call("capacity", "rates", "--check", "ttft.mean<=1s", option, typed)
    assert said.status == 2 and f"argument {option}: '{typed}': expected {expected}" in said.err


def test_a_metric_that_the_runs_lack_is_a_mistake(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one token have no time between tokens."""
    monkeypatch.setattr("cbsim.cli.many_runs.executor", lambda _: Here())
    words = ("--set", "workload.output_tokens=1", "--check", "tpot.p99<=50ms", "--store", tmp_path / "store", "--json")
    refused(call("capacity", file, *words), 2, "--check 'tpot.p99<=50ms': the runs have no tpot.p99")


def test_the_burst_at_the_start_of_a_closed_loop_does_not_count(tmp_path: Path) -> None:
    """All users begin at once, so the first request of each waits for those of the others, at any capacity: with more
    users than a tenth of the requests the share left out is larger, and each has five requests at least."""
    scenario = base(arrivals={"kind": "closed_loop", "users": 30, "think_s": 3600.0}, requests=60)
    over = Over(scenario, "rate_per_s")
    assert over.scenario(30, 0).workload.requests == 150  # type: ignore[union-attr]
    wanted = terms.terms(scenario, ["e2e.max<=250ms"], None, replicates=2)
    probe = Prober(over.scenario, over.unit, wanted, here(tmp_path)).pilot(30)
    assert probe.requests == 2 * (150 - 30)
