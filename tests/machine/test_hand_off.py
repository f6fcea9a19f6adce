"""Prefill and decode apart: what a hand-off takes, that nothing is lost, and that no block is handed out under one."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.random_scenarios import any_document, any_log, checks_of

import cbsim
from cbsim.errors import DeadlockError, UserError
from cbsim.machine.handoff import Apart, Side
from cbsim.machine.simulate import Simulation
from cbsim.policy import value
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import PREFILL, WHOLE
from cbsim.policy.transfers import Direction
from cbsim.record import invariants, optional_tables
from cbsim.record.tables import Ints, Steps
from cbsim.routers.registry import OURS as ROUTERS
from cbsim.runs import reading, replan, running
from cbsim.runs.result import Result
from cbsim.scenario.scenario import Scenario, load, parse
from cbsim.schedulers.vllm.transfers import Transfers
from cbsim.workload import generators

US = 1000
STEP_NS = 2_000 * US
CPU = {"schedule": 30, "prepare": 10, "launch": 20, "update": 7}  # us
POOLS = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]


def of(hand_off: Mapping[str, Any], *, cpu: bool = True, loop: str = "sync", **fields: Any) -> Scenario:
    """One request alone, 320 tokens in blocks of 16; steps and phases take what they take."""
    phases = {name: {"base_s": us / 1e6 * cpu} for name, us in CPU.items()}
    fleet = {"pools": POOLS, "router": {"name": "round_robin"}, "hand_off": {"link": {"bandwidth_gb_s": 8}, **hand_off}}
    document = {
        "question": "How long?",
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 320, "output_tokens": 3},
        "loop": {"mode": loop},
        "cost": {"kind": "constant", "step_s": STEP_NS / 1e9, "cpu": phases},
        "fleet": fleet | fields.pop("fleet", {}),
    }
    return parse(document | fields, "apart")


def run(scenario: Scenario, *, digests: bool = True) -> tuple[Result, Apart]:
    made = list[Simulation]()

    def serve(scenario: Scenario, loop: str, workload: Any) -> Simulation:
        made.append(Simulation(scenario, loop, workload))
        return made[-1]

    result = running.one_loop(scenario, scenario.loop.mode, serve, running.Terms("any", digests=digests))
    assert result.step_numbers["plan_hash"].any() == (digests and len(result.step_numbers) > 0)
    assert isinstance(made[0]._fleet, Apart)
    return result, made[0]._fleet


def ttft_ns(scenario: Scenario) -> int:
    return round(run(scenario)[0].summary["ttft_s"]["max"] * 1e9)


KV_NS = 320 * 131_072 // 8  # 8 bytes a nanosecond, 128 KiB of KV a token


# -- theory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["pull", "push"])
@pytest.mark.parametrize("latency_us", [0, 450])
def test_the_first_token_takes_a_prefill_the_link_and_the_step_of_the_last_token(
    transfer: str, latency_us: int
) -> None:
    """To the nanosecond; with what the CPUs do around three plans: the prefill, the transfer, the last token. With push
    the prefill waits for the plan of the transfer, and the transfer for that of the server that prefilled.
    """
    link = {"bandwidth_gb_s": 8, "latency_s": latency_us / 1e6}
    expected = 2 * STEP_NS + KV_NS + latency_us * US
    stated = {"transfer": transfer, "link": link}
    assert ttft_ns(of(stated, cpu=False)) == ttft_ns(of(stated, cpu=False, loop="async")) == expected
    plan, update = sum(CPU.values()) - CPU["update"], CPU["update"]
    assert ttft_ns(of(stated)) == expected + (3 * (plan + update) + plan * (transfer == "push")) * US


def test_sglangs_first_token_comes_with_the_kv() -> None:
    """There is no step for it: a prefill and the link; and a request of one output has no step there at all."""
    for outputs in (1, 3):
        workload = {"kind": "synthetic", "requests": 1, "prompt_tokens": 320, "output_tokens": outputs}
        scenario = of({"transfer": "push"}, cpu=False, workload=workload, scheduler={"name": "sglang"})
        result, _ = run(scenario)
        assert round(result.summary["ttft_s"]["max"] * 1e9) == STEP_NS + KV_NS
        [row] = [row for row in result.request_rows if row.status != "handed_off"]
        assert row.status == "length" and sum(row.token_runs[1::2]) == outputs


def test_descriptors_take_their_time_each() -> None:
    """A piece for K and one for V of each layer of each block: 20 blocks, 32 layers."""
    link = {"bandwidth_gb_s": 8, "descriptor_s": 1e-6}
    assert ttft_ns(of({"link": link}, cpu=False)) == 2 * STEP_NS + KV_NS + 20 * 32 * 2 * US
    pools = [POOLS[0], {**POOLS[1], "server": {"cost": {"kind": "roofline", "tensor_parallel": 2}}}]
    unequal, _ = run(of({"link": link}, fleet={"pools": pools}))
    assert unequal.summary["hand_off"]["transfer_p99_s"] * 1e9 == pytest.approx(KV_NS + 20 * 32 * 4 * US)


def test_windows_go_over_if_they_are_kept_as_all_other_layers() -> None:
    """vLLM's hand-off knows one group of layers: with windows that is `disable_hybrid_kv_cache_manager`."""
    rules = {"name": "vllm", "version": "0.33"}
    with pytest.raises(UserError, match="layers with windows, chunks or states"):
        of({}, model="gpt-oss-20b", scheduler=rules)
    kept = of({}, model="gpt-oss-20b", scheduler=rules | {"disable_hybrid_kv_cache_manager": True})
    assert run(kept)[0].summary["hand_off"]["bytes"] == 320 * kept.model.kv_token_bytes(1)


@pytest.mark.parametrize(("bandwidth_gb_s", "share"), [(100, 1 / 32), (1, 1 - 31 / 32 * STEP_NS / (8 * KV_NS))])
def test_layerwise_leaves_what_the_link_did_not_carry_during_the_prefill(bandwidth_gb_s: float, share: float) -> None:
    """At least a layer: the last one is written when it has been computed."""
    stated = {"transfer": "layerwise", "link": {"bandwidth_gb_s": bandwidth_gb_s}}
    bytes_left = round(320 * 131_072 * share)
    assert ttft_ns(of(stated, cpu=False)) == 2 * STEP_NS + round(bytes_left / bandwidth_gb_s)


def test_layers_that_go_over_during_a_prefill_share_the_link() -> None:
    """Two prefills at a time for one server: half of its rate each, before their ends and after; all bytes count."""
    pools, two = [{**POOLS[0], "count": 2}, POOLS[1]], {"kind": "synthetic", "requests": 2}
    load = two | {"prompt_tokens": 320, "output_tokens": 3}
    result, servers = run(of({"transfer": "layerwise"}, cpu=False, fleet={"pools": pools}, workload=load))
    during = STEP_NS * 31 // 32 * 8 // 2  # bytes of each
    expected = STEP_NS + 2 * round((8 * KV_NS - during) / 8)
    assert over_ns(servers) == [pytest.approx(expected, abs=2)] * 2
    assert result.summary["hand_off"]["bytes"] == 2 * 8 * KV_NS
    assert result.summary["hand_off"]["link_busy"] == pytest.approx(2 * KV_NS / (result.summary["makespan_s"] * 1e9))


@pytest.mark.parametrize("transfer", ["pull", "push", "layerwise"])
def test_waiting_for_kv_is_no_queue(transfer: str) -> None:
    """Blocks are there at once: the time until the KV has come counts to the prefill, and no cache is called full."""
    many = {"kind": "synthetic", "requests": 30, "prompt_tokens": 320, "output_tokens": 30}
    many["arrivals"] = {"kind": "constant", "rate_per_s": 400}
    result, _ = run(of({"transfer": transfer}, workload=many))
    assert result.summary["ttft_s"]["p95"] > 50 * result.summary["queue_s"]["p95"]
    assert not any(sentence.startswith(("cache", "seats", "tokens")) for sentence in result.binding)


def test_a_prompt_with_few_uncached_tokens_is_prefilled_where_it_is_decoded() -> None:
    result, _ = run(of({"local_below_tokens": 321}, cpu=False))
    assert result.summary["ttft_s"]["max"] == STEP_NS / 1e9
    assert result.summary["hand_off"]["local_prefills"] == 1
    assert run(of({"local_below_tokens": 320}))[0].summary["hand_off"]["local_prefills"] == 0


ONE_EACH = {"router": {"name": "least_in_flight"}}  # what a global queue demands of fleet.router


def prefilled_ns(servers: Apart) -> dict[int, int]:
    """Return by request that was handed over when its prefill had ended."""
    rows = optional_tables.values_of(optional_tables.HAND_OFFS, servers.record.hand_offs)
    return dict(zip(rows["request"].tolist(), rows["prefilled_ns"].tolist(), strict=True))


@pytest.mark.parametrize("transfer", ["pull", "push", "layerwise"])
def test_with_a_global_queue_a_server_prefills_one_prompt_at_a_time(transfer: str) -> None:
    """Five at once: a step each, one after the other. Else one step has all."""
    alone, stated = {"workload": FIVE, "cpu": False}, {"transfer": transfer}
    result, servers = run(of(stated | {"prefill_queue": "global"}, fleet=ONE_EACH, **alone))
    assert prefilled_ns(servers) == {index: (index + 1) * STEP_NS for index in range(5)}
    assert result.summary["hand_off"]["transfers"] == 5
    assert prefilled_ns(run(of(stated, fleet=ONE_EACH, **alone))[1]) == dict.fromkeys(range(5), STEP_NS)


@pytest.mark.parametrize(
    ("queue", "most", "steps"),
    [
        ("server", 0, {}),
        ("server", 2, {0: 1, 1: 1}),
        ("server", 5, dict.fromkeys(range(5), 1)),
        ("global", 0, {}),
        ("global", 2, {0: 1, 1: 2, 2: 3}),
        ("global", 4, {index: index + 1 for index in range(5)}),
    ],
)
def test_prompts_are_prefilled_where_they_decode_while_as_many_wait_as_may(
    queue: str, most: int, steps: dict[int, int]
) -> None:
    """A global queue does not count the one whose prefill is under way; all others of five at once are computed by one
    step of the server that decodes them, from their arrival."""
    stated = {"most_waiting_prefills": most, "prefill_queue": queue}
    result, servers = run(of(stated, workload=FIVE, cpu=False, fleet=ONE_EACH))
    assert prefilled_ns(servers) == {index: count * STEP_NS for index, count in steps.items()}
    local = [row for row in result.request_rows if row.leg == WHOLE]
    assert [row.index for row in local] == [index for index in range(5) if index not in steps]
    assert result.summary["hand_off"]["local_prefills"] == len(local)
    if local:
        assert result.summary["ttft_s"]["min"] == STEP_NS / 1e9


@pytest.mark.parametrize(("back_s", "ends"), [(None, {4: 6, 5: 8}), (0, {4: 5, 5: 6})])
def test_a_queued_prompt_goes_to_the_next_server_that_is_idle(back_s: float | None, ends: dict[int, int]) -> None:
    """Two servers with steps of 2 ms, the first of which dies after 3: what it was prefilling is computed where it
    decodes; the other server takes those that wait, or one that has come in its place."""
    pools, six = [{**POOLS[0], "count": 2}, POOLS[1]], FIVE | {"requests": 6}
    dies = ONE_EACH | {"pools": pools, "failures": [{"server": 0, "at_s": 0.003, "back_s": back_s}]}
    stated = {"prefill_queue": "global", "link": {"bandwidth_gb_s": 800}}
    result, servers = run(of(stated, workload=six, cpu=False, fleet=dies))
    expected = {0: 2, 1: 2, 3: 4, **ends}
    assert prefilled_ns(servers) == {2: -1} | {index: ms * 1000 * US for index, ms in expected.items()}
    assert result.summary["hand_off"]["transfers"] == 5 and result.summary["requests"] == 6


def test_blocks_that_wait_longer_than_the_lease_are_filled_where_they_are() -> None:
    """With push, those taken for a prefill that takes longer: the prompt is computed from then on."""
    result, _ = run(of({"transfer": "push", "lease_s": 0.001}, cpu=False))
    assert result.summary["hand_off"]["leases_ended"] == 1
    assert result.summary["ttft_s"]["max"] == pytest.approx(0.001 + STEP_NS / 1e9)


@pytest.mark.parametrize(("sharing", "ends"), [("fifo", [1, 2, 3]), ("fair", [3, 3, 3])])
def test_transfers_of_a_nic_share_it_or_queue(sharing: str, ends: list[int]) -> None:
    """Three of the same size, ready at the same time, from three servers to one."""
    pools = [{**POOLS[0], "count": 3}, POOLS[1]]
    many = {"kind": "synthetic", "requests": 3, "prompt_tokens": 320, "output_tokens": 3}
    stated = {"link": {"bandwidth_gb_s": 8, "sharing": sharing}}
    result, servers = run(of(stated, cpu=False, fleet={"pools": pools}, workload=many))
    assert sorted(over_ns(servers)) == [STEP_NS + KV_NS * times for times in ends]
    assert result.summary["hand_off"]["link_busy"] == pytest.approx(3 * KV_NS / (result.summary["makespan_s"] * 1e9))


def over_ns(servers: Apart) -> list[int]:
    return servers.record.hand_offs.tolist()[6::10]


def test_rates_change_when_a_transfer_starts_and_ends() -> None:
    """Processor sharing: the second begins when a quarter of the first is over, which ends after 1 3/4 of its time."""
    gap_ns = KV_NS // 4
    pools = [{**POOLS[0], "count": 2}, POOLS[1]]
    apart = {"kind": "constant", "rate_per_s": 1e9 / gap_ns}
    two = {"kind": "synthetic", "requests": 2, "prompt_tokens": 320, "output_tokens": 3, "arrivals": apart}
    _, servers = run(of({"transfer": "push"}, cpu=False, fleet={"pools": pools}, workload=two))
    first, second = over_ns(servers)
    began = servers.record.hand_offs.tolist()[5::10]
    assert first - began[0] == KV_NS + (KV_NS - gap_ns)
    assert second - began[1] == 2 * KV_NS - gap_ns


# -- nothing is lost ---------------------------------------------------------------------------------------------------


FIVE = {"kind": "synthetic", "requests": 5, "prompt_tokens": 320, "output_tokens": 3}


@pytest.mark.parametrize("transfer", ["pull", "push"])
@pytest.mark.parametrize("at_s", [0, 0.003, 0.006])
def test_without_a_server_that_prefills_prompts_are_computed_where_they_decode(transfer: str, at_s: float) -> None:
    """Those that it was prefilling, too: nothing is sent again, and no request fails."""
    dies = {"failures": [{"server": 0, "at_s": at_s}], "most_retries": 0}
    result, servers = run(of({"transfer": transfer}, workload=FIVE, fleet=dies))
    assert ends(result, 5) == {"length": 5}
    assert {row.server for row in result.request_rows if row.status == "length"} == {1}
    assert not servers.rules.requests


@pytest.mark.parametrize("at_s", [0, 0.003])
def test_without_a_server_that_prefills_sglangs_requests_fail(at_s: float) -> None:
    """A server that decodes cannot compute their prompts, and refuses those that it gets. No prompt is wrong, though:
    as where no server is left at all, the request has failed, which is the status of the command, too.
    """
    dies = {"failures": [{"server": 0, "at_s": at_s}], "most_retries": 0}
    load = {**FIVE, "arrivals": {"kind": "poisson", "rate_per_s": 1000}}
    result, _ = run(of({"transfer": "push"}, workload=load, fleet=dies, scheduler={"name": "sglang"}))
    assert ends(result, 5) == {"failed": 5}
    assert {row.reason for row in result.request_rows} <= {"no server is left", "server 0 died"}


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_a_run_does_not_go_on_for_a_lease_that_nobody_waits_for(transfer: str) -> None:
    """Requests for which no server will come fail when that is known, not after 30 s."""
    dies = {"failures": [{"server": 1, "at_s": 0.006}], "most_retries": 2}
    result, servers = run(of({"transfer": transfer, "lease_s": 30}, workload=FIVE, fleet=dies))
    assert ends(result, 5)["failed"] > 0
    assert result.summary["makespan_s"] < 1 and servers.env.now < 1e9


def test_what_was_prefilled_for_a_server_that_dies_goes_to_another() -> None:
    """With pull, if it had not asked for it: no prompt is computed twice."""
    pools, two = [POOLS[0], {**POOLS[1], "count": 2}], {"kind": "synthetic", "requests": 2}
    load = two | {"prompt_tokens": 320, "output_tokens": 3}
    dies = {"pools": pools, "failures": [{"server": 1, "at_s": 0.001}]}
    result, servers = run(of({}, workload=load, fleet=dies))
    assert ends(result, 2) == {"length": 2} and not result.summary["requests_by_status"].get("retried")
    assert servers.record.hand_offs[2::10].tolist() == [2, 2]


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_queued_prompts_are_computed_where_they_decode_when_no_server_prefills_any_more(transfer: str) -> None:
    """The last one dies with its second prompt, three wait; with a lease that ends they have ended before."""
    dies = ONE_EACH | {"failures": [{"server": 0, "at_s": 0.003}]}
    for lease_s in (None, 0.001):
        stated = {"transfer": transfer, "prefill_queue": "global", "lease_s": lease_s}
        stated["link"] = {"bandwidth_gb_s": 800}
        result, servers = run(of(stated, workload=FIVE, fleet=dies, cpu=False))
        assert ends(result, 5) == {"length": 5} and not servers.rules.requests
        rows = optional_tables.values_of(optional_tables.HAND_OFFS, servers.record.hand_offs)
        over = transfer == "push" and lease_s is not None
        fates = [optional_tables.LEASE_OVER] * 5 if over else [optional_tables.FETCHED, *[optional_tables.BROKEN] * 4]
        assert sorted(rows["fate"].tolist()) == sorted(fates)
        assert sorted(rows["source"].tolist()) == ([-1] * 4 + [0] if over else [-1] * 3 + [0, 0])


def any_apart(dice: random.Random, router: str, folder: Path, kind: str) -> Scenario:
    """Servers with roles and tiny caches, clients that leave, shared prefixes, deaths, leases that end."""
    least = {"version": "0.33", "enable_prefix_caching": True, "kv_connector": "none"}
    while True:
        document, longest = any_document(kind, dice)
        document.pop("speculation", None)
        if kind == "vllm":
            document["scheduler"] |= least | {"preemption_mode": "recompute", "reserve_output": False}
        else:
            document["scheduler"]["num_reserved_decode_tokens"] = dice.choice([0, 3])
        document["model"] = "tiny"
        document["workload"].pop("samples", None)
        mixed = [["prefill", "both"], ["both", "decode"], ["both", "prefill"]] if kind == "vllm" else []
        roles = dice.choice([["prefill", "decode"], *mixed])
        pools: list[dict[str, Any]] = [{"role": role, "count": dice.choice([1, 1, 2, 3])} for role in roles]
        blocks = document["kv_cache"]["num_blocks"]
        pools[0]["server"] = {"kv_cache": {"num_blocks": max(4, blocks + dice.choice([0, -2, 7]))}}
        servers = sum(pool["count"] for pool in pools)
        moments = [0, dice.random() * 1e-4, dice.random() * 1e-5]
        deaths = [
            {"server": dice.randrange(servers), "at_s": dice.choice(moments), "back_s": dice.choice([None, 0, 1e-5])}
            for _ in range(dice.choice([0, 0, 1, 3]))
        ]
        if dice.random() < 0.25:
            rule = {"name": "hpa", "metric": "in_flight", "target": 1, "down_window_s": 1e-5, "down_period_s": 1e-5}
            scaled = {"rule": rule, "most": pools[1]["count"] + 2, "start_s": 1e-6, "interval_s": 0.001}
            pools[1]["autoscale"] = scaled | {"drain_s": dice.choice([None, 0, 1e-6])}
            deaths = [death | {"back_s": None} for death in deaths]
        link = {
            "bandwidth_gb_s": dice.choice([0.05, 1, 100]),
            "latency_s": dice.choice([0, 1e-6, 1e-5]),
            "descriptor_s": dice.choice([0, 1e-7]),
            "sharing": dice.choice(["fair", "fifo"]),
        }
        if link["sharing"] == "fair":
            link["most_transfers"] = dice.choice([None, 1, 2])
        document["fleet"] = {
            "pools": pools,
            "router": {"name": router},
            "signals": {"metrics_s": 0.001},
            "failures": deaths,
            "most_retries": dice.choice([0, 1, 3]),
            "hand_off": {
                "router": {"name": dice.choice([*ROUTERS])},
                "transfer": dice.choice(["pull", "push", "layerwise"]),
                "local_below_tokens": dice.choice([0, 0, 10]) if kind == "vllm" else 0,
                "lease_s": dice.choice([0, 1e-6, 1e-5, 1e-3]),
                "link": link,
            },
        }
        if kind == "vllm":
            document["fleet"]["hand_off"]["most_waiting_prefills"] = dice.choice([None, None, 0, 1, 3])
        if kind == "vllm" and "both" not in roles and dice.random() < 0.7:
            document["fleet"] |= ONE_EACH
            document["fleet"]["hand_off"]["prefill_queue"] = "global"
        (folder / "log.jsonl").write_text(any_log(dice, longest))
        (folder / "any.yaml").write_text(json.dumps(document))
        try:
            scenario = load(folder / "any.yaml")
            generators.build(scenario)
        except UserError:
            continue
        return scenario


def ends(result: Result, total: int) -> Counter[str]:
    """How requests ended: each once, in the row of the server that had it last."""
    statuses = dict[int, list[str]]()
    for row in result.request_rows:
        statuses.setdefault(row.index % total, []).append(row.status)
    assert len(statuses) == total
    last = [[each for each in its if each not in ("retried", "handed_off")] for its in statuses.values()]
    assert all(len(each) == 1 for each in last), statuses
    return Counter(each[0] for each in last)


def check_one(router: str, seed: int, folder: Path, kind: str = "vllm") -> None:
    scenario = any_apart(random.Random(f"apart {seed}"), router, folder, kind)
    (first, servers), (again, _) = run(scenario), run(scenario, digests=False)
    assert (first.request_rows, first.summary) == (again.request_rows, again.summary)
    total = generators.build(scenario).total
    assert not [row for row in first.request_rows if row.leg == PREFILL and row.status == "retried"]
    assert ends(first, total).keys() <= {"length", "stop", "aborted", "refused", "failed"}
    for machine in servers.machines:
        for check in checks_of(machine.scheduler):
            check()
        assert machine.scheduler.pool.free == machine.scheduler.pool.num_blocks
        assert not machine.scheduler.requests
        assert machine.mover is not None
        assert not machine.mover.ends
    assert not (servers._open or servers._unsent or servers._first or servers._due or servers.rules.requests)
    assert not (servers._wire._active or servers._wire._waiting or servers._orders or servers._crossing)
    assert servers.record.finished_count == first.summary["requests"] == total
    for choice in servers._choices:
        choice.deliver(1 << 62)
        assert not (choice._server or choice._samples or choice._news or choice._legs or choice._of_leg)
        assert all(view.in_flight == 0 for view in choice.views)
    path = first.save(folder / "run")
    reading.check_run(reading.load(path), scenario.loop.mode, fleet=True)
    assert replan.rederive(path).difference is None


@examples(12)
@given(router=st.sampled_from([*ROUTERS]), seed=st.integers(0, 1 << 32))
def test_every_request_ends_once_and_all_blocks_are_free_whatever_dies(router: str, seed: int) -> None:
    """Caches that are too small, prefix hits, clients that leave, leases that end, servers of either role that die."""
    check_one(router, seed, Path(mkdtemp()))


@examples(8)
@given(router=st.sampled_from([*ROUTERS]), seed=st.integers(0, 1 << 32))
def test_sglangs_servers_end_every_request_too(router: str, seed: int) -> None:
    check_one(router, seed, Path(mkdtemp()), "sglang")


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> tuple[Steps, dict[str, Ints], dict[str, Ints]]:
    """Steps, moves and hand-offs of a run in which one server prefills for another."""
    many = {"kind": "synthetic", "requests": 6, "prompt_tokens": 320, "output_tokens": 3}
    result, servers = run(of({}, workload=many))
    rows = optional_tables.values_of(optional_tables.HAND_OFFS, servers.record.hand_offs)
    return result.step_numbers, dict(result.transfers), rows


@pytest.mark.parametrize(
    ("table", "column", "by", "rule"),
    [
        (1, "reported_step", -1, "blocks are kept until a transfer is over"),
        (1, "start_ns", -(1 << 40), "a transfer begins when both servers have blocks"),
        (1, "request", 1, "each hand-off is one move out of a server, and one into another"),
        (2, "end_ns", -1, "each hand-off is one move out of a server, and one into another"),
        (2, "source", 1, "each hand-off is one move out of a server, and one into another"),
    ],
)
def test_tables_that_no_servers_can_have_made_are_refused(
    tables: Any, table: int, column: str, by: int, rule: str
) -> None:
    def check(steps: Steps, transfers: dict[str, Ints], hand_offs: dict[str, Ints]) -> None:
        invariants.check_hand_offs(steps, transfers, hand_offs)
        invariants.check_transfers(steps, transfers)

    check(*tables)
    damaged = [*tables]
    damaged[table] = tables[table] | {column: tables[table][column] + by}
    with pytest.raises(AssertionError, match=rule):
        check(*damaged)


PLANTED = pytest.mark.skipif(value.running() == "compiled", reason="a compiled class takes no other methods")


@PLANTED
def test_a_server_that_frees_blocks_under_a_transfer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the server that prefills takes its transfers for over as soon as they are ordered."""

    def early(self: Side, plan: StepPlan, at_ns: int) -> int:
        begun = before(self, plan, at_ns)
        self.ends |= {transfer.job: 0 for transfer in plan.transfers if transfer.direction is Direction.OUT}
        return begun

    before = Side.before
    monkeypatch.setattr(Side, "before", early)
    result, servers = run(of({}, cpu=False))
    rows = optional_tables.values_of(optional_tables.HAND_OFFS, servers.record.hand_offs)
    with pytest.raises(AssertionError, match="each hand-off is one move"):
        invariants.check_hand_offs(result.step_numbers, result.transfers, rows)


@PLANTED
def test_blocks_that_are_handed_out_under_a_transfer_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A planted fault: a policy that keeps no blocks of an ended request for the server that is to read them. The
    simulated machine notices it, and replan of a run in which they were kept.
    """
    many = {"kind": "synthetic", "requests": 40, "prompt_tokens": 320, "output_tokens": 3}
    tight, kept = of({}, workload=many, kv_cache={"num_blocks": 60}), Transfers.ended
    path = run(tight)[0].save(tmp_path / "run")
    monkeypatch.setattr(Transfers, "ended", lambda self, request, reason: bool(kept(self, request, reason)) and False)
    with pytest.raises(AssertionError, match="handed out under a transfer"):
        run(tight)
    assert replan.rederive(path).difference


def test_servers_that_wait_for_each_other_are_said_with_their_hand_offs() -> None:
    """Each of two servers that do both has taken blocks for what the other has no room to prefill, and no lease ends:
    the run is stuck, and its message counts the hand-offs that wait."""
    both = {"role": "both", "count": 2, "server": {"kv_cache": {"num_blocks": 1200}}}
    pushed = {"fleet.pools": [both, {"role": "prefill"}], "fleet.hand_off.transfer": "push"}
    with pytest.raises(DeadlockError, match="room at each other, in 20 hand-offs"):
        cbsim.run("prefill_decode", pushed | {"fleet.hand_off.lease_s": None, "workload.requests": 60})
