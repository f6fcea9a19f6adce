"""Servers of a scenario that step together and share experts: their run is a run like any other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import engine_folder
from support.engine_folder import gather_ms, gemm_ms, moe_ms
from support.machines import load, spec, vllm_options

import cbsim
from cbsim.cost.engine_tables import EngineTables, Share
from cbsim.errors import ScenarioError
from cbsim.machine.lockstep import Balance, Gate
from cbsim.machine.simulate import Fleet
from cbsim.record import columns, directory, invariants
from cbsim.record.record import Record
from cbsim.record.tables import Steps
from cbsim.runs import replan
from cbsim.runs.assemble import cost_model
from cbsim.runs.inbox import Inbox
from cbsim.runs.result import Result
from cbsim.scenario import scenario, shapes
from cbsim.scenario.scenario import Scenario
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.sweeps.work import Task, work
from cbsim.workload import generators

VLLM, SGLANG = {"name": "vllm"}, {"name": "sglang"}
TRTLLM = {"name": "trtllm", "max_batch_size": 32, "attention_dp_timeout_iters": 20}
ENDS = {"prompt_tokens": {"uniform": {"low": 100, "high": 900}}, "output_tokens": {"uniform": {"low": 2, "high": 40}}}


def of(
    ranks: int = 2, scheduler: Mapping[str, Any] = VLLM, requests: int = 24, users: int = 6, **cost: Any
) -> Scenario:
    fields = {
        "name": "ranks",
        "question": "What do servers that share experts do?",
        "model": "qwen3-30b-a3b",
        "hardware": "h200-sxm",
        "workload": {
            "kind": "synthetic",
            "requests": requests,
            **ENDS,
            "arrivals": {"kind": "closed_loop", "users": users},
        },
        "scheduler": dict(scheduler),
        "loop": {"mode": "async"},
        "cost": {"kind": "roofline", "data_parallel": ranks, **cost},
    }
    return scenario.parse(fields, "ranks")


def busy(steps: Steps) -> set[tuple[int, int]]:
    ran = steps["rows"] > 0
    return set(zip(steps["compute_start_ns"][ran].tolist(), steps["compute_end_ns"][ran].tolist(), strict=True))


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("scheduler", [VLLM, {**VLLM, "prefill_schedule_interval": 5}, SGLANG, TRTLLM])
def test_a_run_is_a_run_like_any_other(scheduler: Mapping[str, Any], loop: str, tmp_path: Path) -> None:
    """All are served, steps of a wave are at one time, the tables obey the rules, come back as they were written, and
    the plans of every server follow from its polls."""
    made = cbsim.run(of(3, scheduler), {"loop.mode": loop})
    assert isinstance(made, Result)
    assert made.summary["requests_by_status"]["length"] == 24
    steps = made.step_numbers
    invariants.check(steps, depth=2, overlap=False, total_blocks=made.summary["total_blocks"])
    spans = sorted(set().union(*(busy(part) for part in steps.parts())))
    assert len(steps.parts()) == 3
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    path = made.save(tmp_path / "run")
    again = cbsim.read(path)
    assert again.steps.equals(made.steps)
    assert again.requests.equals(made.requests)
    assert again.summary == made.summary
    assert again.steps["server"].to_pylist() == sorted(again.steps["server"].to_pylist())
    assert replan.rederive(path) == (len(steps), len(steps), None)


def test_metrics_are_of_all_servers() -> None:
    """Shares of the span are means over servers, KV in use is that of one cache, what waits waits anywhere."""
    made = cbsim.run(of(3))
    assert isinstance(made, Result)
    summary, steps = made.summary, made.step_numbers
    span_ns, compute = summary["makespan_s"] * 1e9, steps["compute_end_ns"] - steps["compute_start_ns"]
    assert summary["servers"] == 3
    assert summary["gpu_active"] == pytest.approx(compute.sum() / span_ns / 3)
    held = waiting = 0.0
    for part in steps.parts():
        starts, ends = part["schedule_start_ns"], part["update_end_ns"]
        lasted = np.minimum(np.append(starts[1:], ends[-1]), ends) - starts
        held += float(part["used_blocks"] @ lasted) / summary["total_blocks"] / span_ns / 3
        waiting += float(part["waiting"] @ lasted) / span_ns
    assert summary["kv_utilisation"]["mean"] == pytest.approx(held)
    assert summary["waiting"]["mean"] == pytest.approx(waiting)
    price = summary["cost"]["price_usd_hour"]
    assert price == pytest.approx(3 * shapes.hardware("h200-sxm").price_usd_hour)  # type: ignore[operator]


def test_one_server_among_several_is_the_server_alone() -> None:
    """A fleet of one whose devices are its own writes the tables that the machine alone writes, byte for byte."""
    one = of(1)
    alone = cbsim.run(one)
    assert isinstance(alone, Result)
    fleet = Fleet([one], generators.build(one), together=False)
    fleet.run()
    rows, steps = directory.contents(fleet.machines[0].record)
    assert np.array_equal(steps.table, alone.step_numbers.table)
    assert rows == alone.request_rows
    assert "server" not in alone.steps.column_names
    assert "server" not in alone.requests.column_names
    assert "servers" not in alone.summary


def test_equal_loads_of_equal_servers_step_alike() -> None:
    """Two users, one a server, with equal requests: both tables are the same but for whose requests they are."""
    equal = {"workload.prompt_tokens": 500, "workload.output_tokens": 30}
    made = cbsim.run(of(2, requests=8, users=2), equal)
    assert isinstance(made, Result)
    theirs = [at for at, column in enumerate(columns.STEPS) if column.name in ("step", "plan_hash")]
    one, other = (np.delete(part.table, theirs, axis=1) for part in made.step_numbers.parts())
    assert np.array_equal(one, other)


def test_prompts_of_all_are_computed_in_the_same_waves() -> None:
    """vLLM's cadence counts the steps of all: unless somebody's queue was left, waves that prefill are multiples."""
    made = cbsim.run(of(2, {**VLLM, "prefill_schedule_interval": 4}))
    assert isinstance(made, Result)
    steps = made.step_numbers
    started, ran = steps["compute_start_ns"], steps["rows"] > 0
    waves = np.searchsorted(np.unique(started[ran]), started)
    beside = (steps["prefill_tokens"] > 0) & (steps["decode_rows"] > 0)
    assert beside.any()
    assert set((waves[beside] % 4).tolist()) == {0}


def test_latencies_move_as_in_another_run() -> None:
    """Waves priced again, as steps of one server are."""
    base = of(2)
    other = base.model_copy(update={"cost": base.cost.model_copy(update={"step_overhead_s": 1e-4})})
    moved = json.loads(work(Task("a", base, "summary", others=(other,))).files["repriced.json"])
    before, after = (json.loads(work(Task("a", each, "summary")).files["summary.json"]) for each in (base, other))
    assert moved["tpot_s"][0] == pytest.approx(after["tpot_s"]["mean"] - before["tpot_s"]["mean"], rel=0.25)


# -- who gets a request, and when prompts wait -------------------------------------------------------------------------


def servers(*running: int) -> tuple[list[Inbox], list[VllmScheduler]]:
    """Servers with so many running requests each, and their inboxes."""
    schedulers = [VllmScheduler(vllm_options()) for _ in running]
    for number, (scheduler, count) in enumerate(zip(schedulers, running, strict=True)):
        for index in range(count):
            scheduler.add(spec(100 * number + index, 1 + number, 3))
        scheduler.schedule()
    return [Inbox(load(), Record(16)) for _ in running], schedulers


@pytest.mark.parametrize(
    ("rule", "running", "chosen"),
    [
        ("waiting first", (1, 0, 0), [1, 1, 1]),
        ("fewest by turns", (0, 0, 1), [0, 1, 0]),
        ("turns", (2, 0, 1), [0, 1, 2]),
        ("fewest tokens", (1, 1, 1), [0, 0, 0]),
        ("fewest tokens", (2, 2, 1), [2, 2, 2]),
    ],
)
def test_who_gets_a_request(rule: str, running: tuple[int, ...], chosen: list[int]) -> None:
    """Nobody takes what it is sent in the meantime. With equally many requests those of server 0 have fewest tokens."""
    inboxes, schedulers = servers(*running)
    choose = Balance(rule, inboxes, schedulers)
    assert [choose(spec(1000 + at, 1, 1), 0) for at in range(3)] == chosen


@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_a_lone_prompt_is_not_computed_by_all(name: str) -> None:
    """Only steps that decode are graphs there, and are padded to each other: prompts of all take longer than one."""
    long = {"workload.prompt_tokens": 4000, "workload.output_tokens": 1, "workload.arrivals": {"kind": "at_once"}}
    runs = [cbsim.run(of(4, {"name": name}), long | {"workload.requests": count}) for count in (1, 4)]
    one, four = (float(run.summary["makespan_s"]) for run in runs)
    assert one < 0.8 * four


def test_every_sample_is_sent_by_itself() -> None:
    """As vLLM and SGLang send them."""
    run = cbsim.run(of(4), {"workload.requests": 1, "workload.samples": 4, "workload.arrivals": {"kind": "at_once"}})
    assert sorted(run.requests["server"].to_pylist()) == [0, 1, 2, 3]


def test_prompts_wait_for_those_of_others() -> None:
    """Server 1 has no prompt: those of server 0 wait for 5 waves; then for 2 more waves once it has one; not at all if
    it generates nothing."""
    inboxes, schedulers = servers(1, 1)
    inboxes[0].put(spec(1000, 1, 1))
    gate = Gate(schedulers, inboxes, 5, 2)
    assert [gate(wave, True) for wave in (0, 0, 1, 2, 3, 4, 5)] == [*[False] * 5, True, False]
    inboxes[1].put(spec(1001, 1, 1))
    assert [gate(wave, True) for wave in range(6, 10)] == [False, False, True, False]
    assert [gate(10, generates) for generates in (True, False, True)] == [False, True, True]
    inboxes, schedulers = servers(1, 0)
    inboxes[0].put(spec(1000, 1, 1))
    assert Gate(schedulers, inboxes, 5, 2)(0, True)
    assert Gate(schedulers, inboxes, 0, 2)(0, True)


# -- cost --------------------------------------------------------------------------------------------------------------

MODEL = shapes.model("qwen3-30b-a3b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = engine_folder.make(tmp_path / "h200_sxm")
    engine_folder.make_deepep(made, "vllm_0.1.0")
    return made


@pytest.mark.parametrize("tokens", [(1, 1), (64, 3), (4096, 0)])
def test_ranks_share_experts_and_exchange_tokens(folder: Path, tokens: tuple[int, int]) -> None:
    """Two ranks in two groups of experts: an all-gather and a reduce-scatter of all tokens in each of 48 layers, or
    DeepEP's dispatch and combine of the rank with most; experts' times are of the tokens of both."""
    share = Share(1, 2, ranks=2)
    tables = EngineTables(folder, "vllm_0.1.0", MODEL, share)
    assert tables.exchanges == 2 * 48
    gathered = 3 * gather_ms(max(256, sum(tokens) * 2048))
    assert tables.exchange_ns(tokens, decode=True) == pytest.approx(48e6 * gathered, rel=1e-6)
    assert tables.experts_ns(sum(tokens)) == pytest.approx(48e6 * moe_ms(sum(tokens), 2), rel=1e-6)
    deepep = EngineTables(folder, "vllm_0.1.0", MODEL, share._replace(all_to_all="deepep"))
    most = max(tokens)
    assert deepep.exchange_ns(tokens, decode=True) == pytest.approx(48e3 * (30 + 2 * most))
    assert deepep.exchange_ns(tokens, decode=False) == pytest.approx(48e3 * (2 * (50 + most) + 10))


def test_a_wave_is_the_slowest_rank_with_the_experts_of_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recounted: the slowest rank's own kernels are those of a server alone without its experts."""
    monkeypatch.setenv("CBSIM_DATA", str(folder.parent))
    table = {"kind": "table", "path": str(folder), "engine": "vllm_0.1.0", "expert_parallel": 2}
    small = {"fastest": False, "step_s": 0, "layer_s": 0, "row_s": 0, "reduce_s": 1e-6, "elementwise": 0}
    cost: Any = cost_model(of(2, **table, **small))
    long, short = (plan_of(tokens) for tokens in (300, 20))
    wave = cost.lockstep_ns([long, short], [300, 20])
    tables = EngineTables(folder, "vllm_0.1.0", MODEL, Share(1, 2, ranks=2), fastest=False)
    own = tables.linear_ns(300) + tables.head_ns(1) + 48e6 * engine_folder.prompt_ms(300)
    shared = tables.experts_ns(320) + tables.exchange_ns([300, 20], decode=False) + 2 * 48 * 1e3
    assert wave == pytest.approx(own + shared, rel=1e-6)
    assert tables.linear_ns(300) > 48e6 * gemm_ms(300, 4096, 2048)
    assert wave == cost.lockstep_ns([short, long], [20, 300])
    assert wave < cost.lockstep_ns([long, long], [300, 300])


def plan_of(tokens: int) -> Any:
    sizes: Any = {"num_blocks": 200, "max_num_batched_tokens": 1000, "max_model_len": 1000}
    policy = VllmScheduler(replace(vllm_options(), **sizes))
    policy.add(spec(0, tokens, 2))
    return policy.schedule()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cost.data_parallel": 9}, "must be <= hardware.link_gpus"),
        ({"cost.data_parallel": 0}, "must be >= 1"),
        ({"cost.data_parallel": 5}, "equal parts of 128 experts, 768 wide"),
        ({"model": "llama-3.1-8b"}, "has no experts to share"),
        ({"scheduler.name": "static"}, "must be 1 with scheduler static"),
        ({"scheduler.preemption_mode": "swap"}, "must be 1 with KV on the host, by scheduler vllm"),
        ({"cost.compute_efficiency.prefill": 0.5}, "must be 1 with constant efficiencies"),
    ],
)
def test_what_cannot_step_together_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ScenarioError, match=f"cost.data_parallel.*{problem}"):
        cbsim.run(of(2), change)
