"""Reasons not to trust a number: each is found where it is, with its figures, and not where it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.calls import simulated

from analysis.statistics import trust
from analysis.statistics.loading import LoadedRun, read
from cbsim.draw.report import Caveat
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps

CONSTANT = "cost={kind: constant, step_s: 0.01}"  # eight seats of ten steps: a capacity of about 80 requests a second
SMALL = ("model=tiny", "hardware=laptop-cpu", "scheduler={name: vllm, max_num_seqs: 8}", "loop.mode=sync", CONSTANT)
Serve = Callable[..., LoadedRun]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """A run of requests of ten tokens, in eight seats, with fields as given."""

    def run(*overrides: str) -> LoadedRun:
        fields = (*SMALL, "workload.output_tokens=10", "workload.prompt_tokens=16", "workload.requests=400", *overrides)
        (one,) = read(simulated(tmp_path_factory.mktemp("runs"), "tiny_cpu", *fields))
        return replace(one, environment={**one.environment, "git": {"commit": "c" * 40, "dirty": False}})

    return run


@pytest.fixture(scope="module")
def plain(serve: Serve) -> LoadedRun:
    return serve()


def _kinds(*runs: LoadedRun) -> list[str]:
    return [one.kind for one in trust.caveats(runs)]


def _text(kind: str, *runs: LoadedRun) -> str:
    (one,) = [one for one in trust.caveats(runs) if one.kind == kind]
    return one.reason


def _with(run: LoadedRun, **facts: Any) -> LoadedRun:
    return replace(run, environment={**run.environment, **facts})


def test_a_plain_run_has_no_caveat(plain: LoadedRun) -> None:
    """400 requests at once, a known commit, nothing assumed: nothing to be said."""
    assert trust.caveats([plain]) == []
    assert trust.caveats([]) == []


@pytest.mark.parametrize("kind", ["constant", "poisson"])
@pytest.mark.parametrize(("rate", "overloaded"), [(40, False), (72, False), (120, True), (400, True)])
def test_overload_is_more_arrivals_than_the_capacity(serve: Serve, kind: str, rate: int, overloaded: bool) -> None:
    """Theory: eight seats of ten steps of 10 ms serve 80 requests a second; above, the queue grows without end."""
    run = serve(f"workload.arrivals={{kind: {kind}, rate_per_s: {rate}}}")
    assert ("overload" in _kinds(run)) is overloaded
    if overloaded:
        came, ended = (float(rate) for rate in re.findall(r"([\d.]+) (?:and|a second)", _text("overload", run))[-2:])
        assert came == pytest.approx(rate, rel=0.25)
        assert ended == pytest.approx(80, rel=0.1)


@pytest.mark.parametrize("arrivals", ["{kind: at_once}", "{kind: closed_loop, users: 100}"])
def test_who_waits_for_the_server_cannot_overload_it(serve: Serve, arrivals: str) -> None:
    assert "overload" not in _kinds(serve(f"workload.arrivals={arrivals}"))


def test_warm_up_is_said_until_a_window_leaves_it_out(serve: Serve) -> None:
    """A request of 100 tokens stays a second: a second's arrivals find the server emptier than it usually is."""
    fields = (
        "scheduler.max_num_seqs=64",
        "kv_cache.num_blocks=1024",
        "workload.output_tokens=100",
        "workload.arrivals={kind: constant, rate_per_s: 50}",
    )
    run = serve(*fields)
    text = _text("warm-up", run)
    early = int(text.split()[0])
    assert 40 <= early <= 60
    assert f"{early} of 400" in text
    windowed = replace(run, summary={**run.summary, "window_s": [2.0, None]})
    assert "warm-up" not in _kinds(windowed)
    assert "warm-up" not in _kinds(serve("workload.arrivals={kind: at_once}"))


def test_too_few_requests_name_how_many_there_are_and_are_needed(serve: Serve) -> None:
    text = _text("few requests", serve("workload.requests=100"))
    assert "100 requests" in text
    assert "p99 needs 368" in text
    assert "p95" not in text
    assert "p95 needs 72" in _text("few requests", serve("workload.requests=71"))


def test_a_long_tail_is_said_with_its_share(serve: Serve, plain: LoadedRun) -> None:
    """A few requests of 1500 tokens outlive many of 10: the rates are mostly those of a server that idles."""
    lengths = f"workload.output_tokens={{empirical: {{values: [{', '.join(['10'] * 40 + ['1500'])}]}}}}"
    run = serve(lengths, "workload.requests=120")
    assert "of the span" in _text("tail", run)
    assert "tail" not in _kinds(plain)
    light = serve("workload.arrivals={kind: poisson, rate_per_s: 5}", "workload.requests=100")
    assert "tail" not in _kinds(light)  # few requests at a time are what was asked for


def test_figures_of_several_servers_show_the_first(plain: LoadedRun) -> None:
    assert "servers" not in _kinds(plain)
    assert _text("servers", replace(plain, summary={**plain.summary, "servers": 3})).startswith("of 3 servers")


def test_requests_that_did_not_end_are_counted(plain: LoadedRun) -> None:
    by_status = {**plain.summary["requests_by_status"], "length": 390, "refused": 7, "aborted": 3}
    text = _text("not done", replace(plain, summary={**plain.summary, "requests_by_status": by_status}))
    assert "of 400 requests" in text
    assert "7 refused" in text
    assert "3 aborted" in text


def test_an_incomplete_run_comes_first(plain: LoadedRun) -> None:
    cut = _with(replace(plain, incomplete="interrupted, after 7 steps"), git={"commit": None, "dirty": None})
    found = trust.caveats([cut])
    assert [one.kind for one in found] == ["incomplete", "code"]
    assert "interrupted, after 7 steps" in found[0].reason


@pytest.mark.parametrize(
    ("facts", "kind", "says"),
    [
        ({"git": {"commit": "abcdef0123456789", "dirty": True}}, "code", "abcdef0123"),
        ({"git": {"commit": None, "dirty": None}}, "code", "not known"),
        ({"device": "modelled"}, "device", "nothing was computed"),
        ({"device": "cpu, worker process"}, "device", "cpu, worker process"),
        ({"device": "gpu", "injected_ms": {"prepare": 4.0, "update": 0.0}}, "injected", "4 ms to prepare"),
        (
            {"device": "gpu", "engine": "transformers 5.17", "notes": ["sdpa"]},
            "engine",
            "transformers 5.17 ran with: sdpa",
        ),
    ],
)
def test_what_the_environment_says(plain: LoadedRun, facts: dict[str, Any], kind: str, says: str) -> None:
    run = _with(plain, **facts)
    assert _kinds(run) == [kind]
    assert says in _text(kind, run)


def _on(run: LoadedRun, device: str, hardware: str) -> LoadedRun:
    return _with(replace(run, scenario={**run.scenario, "hardware": {"name": hardware}}), device=device)


@pytest.mark.parametrize(
    ("device", "hardware", "other"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200 SXM 141GB", True),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM 80GB", False),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM 80GB", False),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 SXM 80GB", True),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 24GB", False),
        ("NVIDIA L40S", "NVIDIA L40S 48GB", False),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 SXM 80GB", False),
        ("NVIDIA H100 80GB HBM3", "one core of a laptop", False),
    ],
)
def test_hardware_is_told_by_its_model(plain: LoadedRun, device: str, hardware: str, other: bool) -> None:
    """80 GB and HBM3 are no model: two different GPUs have them."""
    assert ("hardware" in _kinds(_on(plain, device, hardware))) is other
    assert "hardware" not in _kinds(_on(plain, "simulated", hardware))


def test_runs_on_different_devices_code_and_packages(plain: LoadedRun) -> None:
    one = _with(plain, device="gpu one", packages={"torch": "2.11", "numpy": "2.4"})
    other = _with(plain, device="gpu two", packages={"torch": "2.13", "numpy": "2.4", "simpy": "4"})
    other = _with(other, git={"commit": "d" * 40, "dirty": False})
    texts = [found.reason for found in trust.caveats([one, other])]
    assert len(texts) == 3
    assert "gpu one, gpu two" in texts[0]
    assert "cccccccccc, dddddddddd" in texts[1]
    assert texts[2] == "made with different versions: torch 2.11, 2.13."


def test_a_text_of_several_runs_is_said_once(plain: LoadedRun) -> None:
    runs = [replace(plain, label=label) for label in ("one", "two", "three")]
    modelled = [_with(run, device="modelled") for run in runs]
    assert [one.run for one in trust.caveats(modelled)] == [""]
    assert [one.run for one in trust.caveats([*modelled[:2], runs[2]])] == ["2 of 3 runs (one, two)"]
    assert [one.run for one in trust.caveats(modelled[:1])] == ["one"]
    assert all(isinstance(one, Caveat) for one in trust.caveats(modelled))


def test_a_roofline_is_an_assumption_with_figures(serve: Serve) -> None:
    run = serve("cost={kind: roofline}")
    text = _text("assumed", run)
    assert "60%" in text
    assert "85%" in text
    assert "assumed" not in _kinds(_with(run, device="gpu"))


def test_a_slow_first_step_is_told_from_a_large_one(plain: LoadedRun) -> None:
    """Only steps of about as many tokens are compared: a long prompt is not a slow start."""
    run = _with(plain, device="gpu")
    assert "slow start" not in _kinds(run)
    table = run.table.table.copy()
    end = STEP_COLUMNS.index("update_end_ns")
    table[3, end] += 90_000_000  # a step of eight decodes, ten times as long as the others
    assert "step 3" in _text("slow start", replace(run, table=Steps(table)))
    assert "slow start" not in _kinds(replace(plain, table=Steps(table)))
    table[3, STEP_COLUMNS.index("tokens")] = 4000
    assert "slow start" not in _kinds(replace(run, table=Steps(table)))


def test_a_run_of_nothing_has_caveats_not_errors(plain: LoadedRun, tmp_path: Path) -> None:
    empty = replace(
        plain,
        requests=plain.requests.iloc[:0],
        table=Steps(plain.table.table[:0]),
        summary={**plain.summary, "ttft_s": {"n": 0}},
        environment={},
        scenario={},
    )
    assert "0 requests" in _text("few requests", empty)


def test_a_wait_that_makes_ttft_is_said(serve: Serve) -> None:
    """Near capacity the queue need not grow for certain, but it is what TTFT measures; far below nobody waits, and of
    a server that is overloaded that is said instead.
    """
    for rate, kind in ((20, None), (76, "near capacity"), (400, "overload")):
        run = serve(f"workload.arrivals={{kind: poisson, rate_per_s: {rate}}}")
        told = {"near capacity", "overload"} & set(_kinds(run))
        assert told == ({kind} if kind else set()), rate


def test_a_window_says_whose_latencies_they_are(serve: Serve) -> None:
    run = serve("workload.arrivals={kind: constant, rate_per_s: 40}")
    text = _text("window", replace(run, summary={**run.summary, "window_s": [2.0, None]}))
    assert "320 of 400 requests" in text  # one every 25 ms: the first 80 come before 2 s
    assert "2:" in text
    assert "window" not in _kinds(run)


def test_throughput_below_capacity_is_the_traffic_s(serve: Serve) -> None:
    """Not of a server that cannot keep up, and not where all requests are there at once."""
    for arrivals, limited in (
        ("{kind: constant, rate_per_s: 40}", True),
        ("{kind: constant, rate_per_s: 400}", False),
        ("{kind: at_once}", False),
    ):
        assert ("arrival-limited" in _kinds(serve(f"workload.arrivals={arrivals}"))) is limited


def test_many_runs_are_no_flood(serve: Serve) -> None:
    """A line a kind: how many runs, and the first one's figures."""
    runs = [serve(f"workload.requests={count}") for count in range(11, 17)]
    runs = [replace(run, label=f"run {i}") for i, run in enumerate(runs)]
    told = [one for one in trust.caveats(runs) if one.kind == "few requests"]
    assert [(one.run, one.reason.split(" requests, too")[0]) for one in told] == [
        ("all 6 runs", "few requests, e.g. run 0: latencies are of 11")
    ]
    modelled = [_with(run, device="modelled") for run in runs[:2]]
    told = [one for one in trust.caveats([*modelled, *runs[2:]]) if one.kind == "device"]
    assert [one.run for one in told] == ["2 of 6 runs (run 0, run 1)"]


def test_why_requests_were_refused(serve: Serve) -> None:
    assert "Most often: prompt of 9000 tokens" in _text("not done", serve("workload.prompt_tokens=9000"))


def test_a_derived_capacity_that_binds_is_told(serve: Serve) -> None:
    """Blocks that were worked out from the memory are worth a word when nearly all are in use, and only then: not if
    the scenario states their number, and not if most are free."""
    derived = ("kv_cache.num_blocks=null", "kv_cache.memory_fraction=1.0", "workload.prompt_tokens=200")
    full = serve(*derived, "hardware.memory_bytes=618000000", "scheduler.max_num_batched_tokens=64")
    total = full.summary["total_blocks"]
    assert f"of {total:,} blocks, which are derived" in _text("capacity", full)
    stated = serve(
        "workload.prompt_tokens=200", f"kv_cache.num_blocks={total + 1}", "scheduler.max_num_batched_tokens=64"
    )
    assert stated.table["used_blocks"].max() == full.table["used_blocks"].max()
    assert "capacity" not in _kinds(stated)
    assert "capacity" not in _kinds(
        serve(*derived, "hardware.memory_bytes=700000000", "scheduler.max_num_batched_tokens=64")
    )
