"""Runs that a search for a capacity makes, keeps and finds again; the command, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.calls import call, refused
from support.holding import SLOW, base, slow

import cbsim
from cbsim.errors import CheckError, RunError, ScenarioError
from cbsim.search import capacity
from cbsim.search import probe as terms
from cbsim.search.probe import RATE
from cbsim.sweeps import identity
from cbsim.sweeps.store import Runs, Store
from cbsim.sweeps.work import Here, Made, Task, work

# -- runs -------------------------------------------------------------------------------------------------------------


WORDS_OF = ("--slo", "e2e.mean<=250ms", "--replicates", "4", "--width", "50%", "--jobs", "1")


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
    assert first.made == 4
    assert first.made + again.made == found.replicates
    last = here(tmp_path)
    assert capacity.search(scenario, RATE, wanted, last).numbers() == found.numbers()
    assert last.made == 0
    assert found.holds is not None and found.fails is not None
    exact = 1 / (0.2 - 0.05 / 10.5)  # request k waits k (0.2 s - 1 / rate); the last 18 of 20 count
    assert found.holds <= exact <= found.fails


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
    assert str(found).startswith(f"holds     {found.holds:g}")
    with pytest.raises(ScenarioError, match=r"^slo: got 'ttft.p99<=1s', expected a list of conditions"):
        cbsim.capacity(base(), "ttft.p99<=1s", store=tmp_path)
    with pytest.raises(CheckError, match="unknown metric"):
        cbsim.capacity(base(), ["tftt.p99<=1s"], store=tmp_path)


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
    assert f"\nholds     {found['holds']:g} " in said.out
    assert f"\nfails     {found['fails']:g} e2e.mean<=250ms (" in said.out
    assert f"made      {found['replicates']} of the runs" in said.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "no condition, expected --slo or --goodput"),
        (("--slo", "tttf.p99<=1s"), "--slo 'tttf.p99<=1s': unknown metric 'tttf.p99'; did you mean ttft.p99?"),
        (("--slo", "ttft.p99<=1%"), "unit '%', ttft_s.p99 takes"),
        (("--slo", "ttft.p99"), "expected METRIC<VALUE[UNIT]"),
        (("--goodput", "99"), "--goodput 99: got 99, must be > 0 and < 1, such as 99%"),
        (("--goodput", "99ms"), "--goodput 'slo.attainment>=99ms': unit 'ms'"),
        (("--goodput", "9%", "--set", "slo.ttft_s=null"), "slo.attainment>=9%: the scenario base has no slo"),
        (("--over", "workload.arrivals.rate"), "workload.arrivals has no rate; did you mean rate_per_s?"),
        (("--over", "workload.arrivals.kind"), "got 'constant', expected a number"),
        (("--over", "workload.shared_prefix_tokens"), "got 0, must be > 0"),
        (("--over", "scheduler.max_num_seqs"), "expected a number of the workload, such as workload.arrivals"),
        (("--set", "workload.arrivals={kind: at_once}"), "workload.arrivals has no rate_per_s; it has kind"),
        (("--set", "loop.mode=both"), "loop.mode: got both; a capacity is that of one loop, sync or async"),
        (("--confidence", "100%"), "confidence: got 1, must be from 0.5 to 0.9999"),
        (("--width", "0"), "width: got 0, must be from 0.001 to 1"),
        (("--replicates", "1"), "replicates: got 1, must be from 2 to 10000"),
        (("--warmup", "95%"), "warmup: got 0.95, must be from 0 to 0.9"),
        (("--set", "workload.requets=4"), "workload.requets: unknown field"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(
    file: Path, tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    condition = () if words[:1] in ((), ("--slo",), ("--goodput",)) else ("--slo", "ttft.mean<=1s")
    said = call("capacity", file, *words, *condition, "--store", tmp_path / "store", "--jobs", "1")
    refused(said, 2, text)


def test_a_metric_that_the_runs_lack_is_a_mistake(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one token have no time between tokens."""
    monkeypatch.setattr("cbsim.cli.many_runs.executor", lambda _: Here())
    words = ("--set", "workload.output_tokens=1", "--slo", "tpot.p99<=50ms", "--store", tmp_path / "store", "--json")
    refused(call("capacity", file, *words), 2, "--slo 'tpot.p99<=50ms': the runs have no tpot_s.p99")
