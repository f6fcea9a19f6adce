"""The `fleet` of a scenario: servers by the fields that differ, each checked, and what is wrong with one in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbsim.errors import ScenarioError
from cbsim.routers.registry import OURS
from cbsim.runs import served
from cbsim.scenario import scenario as scenarios
from cbsim.scenario import shapes
from cbsim.scenario.scenario import Scenario, dump, load, parse

BASE: dict[str, Any] = {
    "question": "Who gets a request?",
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm",
    "workload": {"kind": "synthetic", "requests": 4, "prompt_tokens": 10, "output_tokens": 2},
    "scheduler": {"name": "vllm", "max_num_seqs": 32},
}
TURNS = {"name": "round_robin"}


def of(*pools: dict[str, Any], **fleet: Any) -> Scenario:
    return parse(BASE | {"fleet": {"pools": [*pools], "router": TURNS, **fleet}}, "fleet")


def test_a_server_is_the_scenario_with_the_fields_that_its_pool_gives() -> None:
    """Parts are merged, those of another kind replaced, and servers of a pool are one scenario."""
    scenario = of(
        {"count": 2},
        {"server": {"hardware": "b200", "cost": {"tensor_parallel": 2}, "scheduler": {"max_num_batched_tokens": 64}}},
        {"server": {"scheduler": {"name": "sglang"}}},
    )
    alone = parse(BASE, "alone")
    first, second, third, fourth = scenario.servers
    assert first is second
    assert first == alone
    changes = {"hardware": "b200", "cost": alone.cost.model_dump() | {"tensor_parallel": 2}}
    limited = {"name": "vllm", "max_num_seqs": 32, "max_num_batched_tokens": 64}
    assert third == parse(BASE | changes | {"scheduler": limited}, "third")
    assert fourth == parse(BASE | {"scheduler": {"name": "sglang"}}, "fourth")
    assert scenario.all_gpus == 5


def test_what_is_written_is_complete_and_gives_the_same_servers(tmp_path: Path) -> None:
    """A GPU's name becomes its fields, a part of another kind has all its defaults, other fields stay as they are."""
    scenario = of({"server": {"hardware": "b200", "scheduler": {"name": "sglang"}, "kv_cache": {"num_blocks": 99}}})
    (tmp_path / "again.yaml").write_text(dump(scenario))
    again = load(tmp_path / "again.yaml")
    assert again == scenario
    assert again.servers == scenario.servers
    assert scenario.fleet is not None
    server = scenario.fleet.pools[0].server
    assert server["hardware"] == shapes.hardware("b200").model_dump(mode="json")
    assert server["scheduler"] == scenarios.plain(scenario.servers[0].scheduler)
    assert server["kv_cache"] == {"num_blocks": 99}


def test_a_scenario_without_a_fleet_says_nothing_of_one() -> None:
    assert "fleet" not in dump(parse(BASE, "alone"))


def test_overrides_reach_pools_and_what_they_leave_open() -> None:
    scenario = of({"server": {"scheduler": {"max_num_batched_tokens": 64}}})
    document = BASE | {"fleet": {"pools": [{"count": 1}], "router": TURNS}}
    changed = parse(
        document, "fleet", ["fleet.pools.0.count=3", "scheduler.max_num_seqs=8", "fleet.router.name=random"]
    )
    assert [server.options("sync").limits.slots for server in changed.servers] == [8, 8, 8]
    again = scenarios.scenario_of(scenario, {"scheduler.max_num_seqs": 8}).servers[0]
    assert (again.options("sync").limits.slots, again.options("sync").limits.tokens) == (8, 64)


def test_another_kind_drops_the_settings_of_the_old_one() -> None:
    """As a scheduler's does: of the fleet's router, and of a part in a pool."""
    server = {"scheduler": {"max_num_batched_tokens": 64}, "cost": {"kind": "roofline", "tensor_parallel": 2}}
    router = {"name": "sglang_cache_aware", "cache_threshold": 0.5}
    document = BASE | {"fleet": {"pools": [{}, {"server": server}], "router": router}}
    changes = ["fleet.router.name=dynamo", "fleet.router.router_temperature=0.5"]
    changes += [
        f"fleet.pools.1.server.{each}" for each in ("scheduler.name=sglang", "cost.kind=constant", "cost.step_s=1")
    ]
    changed = parse(document, "fleet", changes)
    assert changed.fleet is not None
    assert changed.fleet.router == OURS["dynamo"].settings(name="dynamo", router_temperature=0.5)
    assert changed.servers[1].scheduler == parse(BASE | {"scheduler": {"name": "sglang"}}, "alone").scheduler
    assert changed.servers[1].cost.kind == "constant"
    assert changed.servers[0] == parse(BASE, "alone")


def test_the_price_is_that_of_all_gpus() -> None:
    scenario = of({"count": 2}, {"server": {"hardware": "h200-sxm", "cost": {"tensor_parallel": 4}}})
    h100, h200 = (shapes.hardware(name).price_usd_hour for name in ("h100-sxm", "h200-sxm"))
    assert scenario.price_usd_hour == pytest.approx(2 * h100 + 4 * h200)  # type: ignore[operator]
    unknown = of({}, {"server": {"hardware": {"price_usd_hour": None}}})
    assert unknown.price_usd_hour is None


@pytest.mark.parametrize(
    ("fleet", "problem"),
    [
        ({"pools": []}, "fleet.pools: got \\[\\], needs at least 1"),
        ({"pools": [{"count": 0}]}, "fleet.pools.0.count: got 0, must be >= 1"),
        ({"pools": [{}], "router": {"name": "fastest"}}, "fleet.router.name: got 'fastest', expected one of"),
        ({"pools": [{}], "router": {"name": "least_inflight"}}, "got 'least_inflight'.* did you mean least_in_flight"),
        (
            {"pools": [{}], "router": {"name": "sglang_cache_aware", "cache_threshold": -1}},
            "fleet.router.cache_threshold: got -1, must be >= 0",
        ),
        ({"pools": [{}], "router": {}}, "fleet.router.name: is required"),
        ({"pools": [{}], "router": {"name": "nowhere:AT_ALL"}}, "fleet.router.name: .*cannot be loaded"),
        ({"pools": [{}], "signals": {"metrics_s": 0}}, "fleet.signals.metrics_s: got 0, must be >= 0.001"),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, "fleet.pools: got the names a, a, must differ"),
        ({"pools": [{"name": "1"}, {}]}, "fleet.pools: got the names 1, 1, must differ"),
        ({"pools": [{"count": 6000}, {"count": 6000}]}, "fleet.pools: got 12,000 servers, must be <= 10,000 in all"),
        ({"pools": [{}, {"server": {"hardware": "x1"}}]}, "fleet.pools.1.server.hardware: unknown hardware 'x1'"),
        ({"pools": [{"server": {"slo": {}}}]}, "fleet.pools.0.server.slo: unknown field"),
        ({"pools": [{"server": {"cost": {"tensor_parallel": 7}}}]}, "fleet.pools.0.server.cost.tensor_parallel: got 7"),
        ({"pools": [{"server": {"scheduler": {"max_num_seqs": 0}}}]}, "fleet.pools.0.server.scheduler.max_num_seqs"),
        ({"pools": [{"server": {"model": "llama-3.1-70b"}}]}, "fleet.pools.0.server.model: .*leaves too little"),
        ({"pools": [{"server": {"loop": {"mode": "both"}}}]}, "fleet.pools.0.server.loop.mode: got 'both'"),
        (
            {"pools": [{"server": {"model": "qwen3-30b-a3b", "cost": {"data_parallel": 2}}}]},
            "fleet.pools.0.server.cost.data_parallel: got 2, must be 1",
        ),
    ],
)
def test_a_mistake_is_named_by_its_field(fleet: dict[str, Any], problem: str) -> None:
    with pytest.raises(ScenarioError, match=problem) as caught:
        parse(BASE | {"fleet": {"router": TURNS} | fleet}, "fleet")
    assert "\n" not in str(caught.value)


def test_a_session_is_served_by_one_server() -> None:
    with pytest.raises(ScenarioError, match="fleet: got 2 servers, must be null"):
        served.with_one_loop(of({"count": 2}))


def test_a_pool_may_do_without_the_speculation_of_the_others() -> None:
    """Beside a server that verifies drafts one that does not; written out and read again they are the same."""
    drafts = {"method": "ngram", "k": 2, "acceptance": {"rate": 0.5}}
    fleet = {"pools": [{}, {"server": {"speculation": None}}], "router": TURNS}
    scenario = parse(BASE | {"speculation": drafts, "fleet": fleet}, "fleet")
    assert [server.speculation is None for server in scenario.servers] == [False, True]
    again = Scenario.model_validate(scenario.model_dump(mode="json"))
    assert again == scenario
    assert [server.speculation is None for server in again.servers] == [False, True]


# -- roles -------------------------------------------------------------------------------------------------------------

APART = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
LINK = {"link": {"bandwidth_gb_s": 50}}


@pytest.mark.parametrize(
    ("pools", "hand_off", "fields", "said"),
    [
        (APART[:1], LINK, {}, "fleet.pools.0.role: got prefill: another pool must have role decode or both"),
        (APART[1:], LINK, {}, "fleet.pools.0.role: got decode: another pool must have role prefill or both"),
        (APART, None, {}, "fleet.hand_off: is required with pools.0.role prefill"),
        ([{}], LINK, {}, "fleet.hand_off: must be null if every pool has role both"),
        (APART, {}, {}, "fleet.hand_off.link: is required"),
        (APART, {"link": {"bandwidth_gb_s": 0}}, {}, "fleet.hand_off.link.bandwidth_gb_s: got 0, must be >= 0.001"),
        (APART, {"link": {"bandwidth_gb_s": 1e-300}}, {}, "link.bandwidth_gb_s: got 1e-300, must be >= 0.001"),
        (APART, {"link": LINK["link"] | {"latency_s": 1e20}}, {}, "hand_off.link.latency_s: got 1e+20, must be <= 60"),
        (APART, {"link": LINK["link"] | {"descriptor_s": 1}}, {}, "link.descriptor_s: got 1, must be <= 0.001"),
        (
            APART,
            LINK | {"local_below_tokens": 9},
            {"scheduler": {"name": "sglang"}},
            "fleet.hand_off.local_below_tokens: got 9, must be 0 with scheduler sglang, whose decoding servers compute",
        ),
        (
            APART,
            LINK | {"most_waiting_prefills": 0},
            {"scheduler": {"name": "sglang"}},
            "fleet.hand_off.most_waiting_prefills: got 0, must be null with scheduler sglang, whose decoding servers",
        ),
        (
            APART,
            LINK | {"prefill_queue": "global"},
            {"scheduler": {"name": "sglang"}, "router": {"name": "least_in_flight"}},
            "fleet.hand_off.prefill_queue: got global, must be server with scheduler sglang, whose decoding servers",
        ),
        (APART, LINK | {"most_waiting_prefills": -1}, {}, "hand_off.most_waiting_prefills: got -1, must be >= 0"),
        (
            [{}, *APART],
            LINK | {"prefill_queue": "global"},
            {},
            "fleet.hand_off.prefill_queue: got global, must be server if any pool has role both",
        ),
        (
            APART,
            LINK | {"prefill_queue": "global"},
            {},
            "fleet.router.name: got round_robin, must be least_in_flight with hand_off.prefill_queue global",
        ),
        (
            APART,
            LINK,
            {"cost": {"kind": "roofline", "pipeline_parallel": 2}},
            "fleet.pools.0.role: got prefill, must be both with a pipeline (cost.pipeline_parallel, 2)",
        ),
        (
            APART,
            {"link": LINK["link"] | {"sharing": "fifo", "most_transfers": 2}},
            {},
            "fleet.hand_off.link.most_transfers: got 2, must be null or 1 with sharing fifo",
        ),
        (
            APART,
            LINK | {"transfer": "pul"},
            {},
            "fleet.hand_off.transfer: got 'pul', expected one of pull, push, layerwise",
        ),
        (APART, LINK | {"lease_s": -1}, {}, "fleet.hand_off.lease_s: got -1, must be >= 0"),
        (
            APART,
            LINK,
            {"scheduler": {"name": "sarathi"}},
            "fleet.pools.0.role: got prefill, must be both with scheduler sarathi, which hands no requests over",
        ),
        (
            APART,
            LINK,
            {"speculation": {"method": "ngram", "k": 2, "acceptance": {"rate": 0.5}}},
            "fleet.pools.0.role: got prefill, must be both with speculation",
        ),
        (
            APART,
            LINK,
            {"model": "gpt-oss-20b"},
            "fleet.pools.0.role: got prefill, must be both with layers with windows, chunks or states",
        ),
        (
            APART,
            LINK,
            {"workload": {"samples": 2}},
            "fleet.pools.0.role: got prefill, must be both with several samples of a request (workload.samples, 2)",
        ),
        (
            [APART[0], APART[1] | {"server": {"model": "llama-3.2-1b"}}],
            LINK,
            {},
            "fleet.pools.1.server.model.name: got Llama-3.2-1B, must be that of pool 0 (Llama-3.1-8B)",
        ),
        (
            [APART[0], APART[1] | {"server": {"kv_cache": {"block_size": 32}}}],
            LINK,
            {},
            "fleet.pools.1.server.kv_cache.block_size: got 32, must be that of pool 0 (16)",
        ),
        (
            [APART[0], APART[1] | {"server": {"model": {"kv_dtype": "fp8"}}}],
            LINK,
            {},
            "fleet.pools.1.server.model: got 65536 bytes of KV a token, must be that of pool 0 (131072 bytes of KV a",
        ),
        (
            APART,
            LINK,
            {"scheduler": {"name": "vllm", "version": "0.19"}},
            "scheduler.version: got 0.19, must be 0.33 in a fleet whose pools have roles",
        ),
        (
            APART,
            LINK,
            {"scheduler": {"name": "vllm", "kv_connector": "simple_cpu"}},
            "scheduler.kv_connector: got simple_cpu, must be none in a fleet whose pools have roles",
        ),
    ],
)
def test_roles_that_cannot_be_are_refused_in_one_line(
    pools: Any, hand_off: Any, fields: dict[str, Any], said: str
) -> None:
    load = {"kind": "synthetic", "requests": 2, "prompt_tokens": 40, "output_tokens": 3} | fields.pop("workload", {})
    fleet = {"pools": pools, "router": fields.pop("router", TURNS), "hand_off": hand_off}
    document = {"question": "Who?", "model": "llama-3.1-8b", "hardware": "h100-sxm", "workload": load, "fleet": fleet}
    with pytest.raises(ScenarioError) as refused:
        parse(document | fields, "apart")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
