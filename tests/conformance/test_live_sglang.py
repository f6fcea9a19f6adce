"""The recorder of SGLang: what it draws, and, where SGLang is installed, that its decisions are ours."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases import with_states

from cbsim.cli.parser import main
from cbsim.conformance.sglang_traces import CONFIG, options
from cbsim.live import sglang_workloads
from cbsim.live.original import load
from cbsim.live.session import Session
from cbsim.schedulers.sglang.settings import SglangSettings, resolve
from cbsim.workload.scheduler_tests import STOP_TOKEN

DRAWN = [sglang_workloads.draw(random.Random(number), number) for number in range(300)]
needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")


def test_workloads_have_every_option_within_what_the_server_allows() -> None:
    """The same number draws the same; each value is one that SGLang's server and our rules take, and each order and
    eviction policy occurs."""
    assert sglang_workloads.draw(random.Random(7), 7) == DRAWN[7]
    for workload in DRAWN:
        config = workload["config"]
        assert config.keys() == CONFIG == sglang_workloads.PLAIN.keys()
        made = options(config)
        SglangSettings(**{name: getattr(made, name) for name in SglangSettings.__dataclass_fields__ if name != "name"})
        assert not (config["chunked_prefill_size"] or 0) % config["page_size"]
    for name in ("schedule_policy", "radix_eviction_policy"):
        choices = sglang_workloads.KINDS[name].__args__
        assert {workload["config"][name] for workload in DRAWN} == {*choices}, name


def test_outputs_reach_the_limit_or_a_stop_token() -> None:
    for request in (request for workload in DRAWN for request in workload["requests"]):
        output, most = request["output"], request["max_new_tokens"]
        assert len(output) >= most or output[-1] == STOP_TOKEN, request["id"]
        assert request.get("cancel_step", request["arrival_step"]) >= request["arrival_step"]


@needs_sglang
def test_the_real_scheduler_decides_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every pass of both of SGLang's event loops equals ours."""
    status = main(["conformance", "--live", "sglang", "--count", "20", "--out", str(tmp_path)])
    assert status == 0, capsys.readouterr().out


@needs_sglang
def test_the_real_servers_with_a_role_decide_the_same(tmp_path: Path) -> None:
    """Every pass of a server that prefills or decodes for others, in both loops."""
    sglang, _ = load("sglang")
    from support import sglang_apart

    made = SimpleNamespace(record=sglang_apart.record, versions=sglang.versions, read_as=sglang.read_as)
    session = Session("sglang", sglang.versions[-1], made, tmp_path, print)
    for number in range(12):
        for mode in ("normal", "overlap"):
            session.judge(sglang_apart.draw(number), mode)
    assert session.tally["match"] > 12
    assert not session.tally["differ"]


@needs_sglang
def test_a_workload_leaves_no_trace_in_the_next() -> None:
    """A recording depends on its workload alone."""
    original, version = load("sglang")
    first, other = original.draw(random.Random(1), 1), original.draw(random.Random(2), 2)
    lines = original.record(first, "overlap")
    original.record(other, "normal")
    assert original.record(first, "overlap") == lines
    assert original.read_as(lines[0], "1.0") == lines[0] | {"sglang": "1.0"} != lines[0]
    assert version == lines[0]["sglang"]


@needs_sglang
@pytest.mark.parametrize("seats", [None, 1, 100])
@pytest.mark.parametrize("states", [None, 40])
@pytest.mark.parametrize("ratio", [0.1, 0.9, 3.0])
def test_states_take_what_the_real_server_gives_them(seats: int | None, states: int | None, ratio: float) -> None:
    """States, tokens and places in the memory beside the weights, by SGLang's own code."""
    load("sglang")
    from sglang.srt.managers.scheduler import get_context
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator as Configurator

    site = with_states(block_size=1)
    left, layers = site.blocks(4096, seats or 256, 1, 1), [*range(6)]
    params = SimpleNamespace(layers=layers, mamba_cache_per_req=len(layers) * site.state_bytes)
    made: Any = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        model_config=SimpleNamespace(context_len=site.max_position),
        fused_entry_bytes=lambda _: None,
        _calculate_mamba_ratio=lambda: Configurator._calculate_mamba_ratio(made),
        pp_size=1,
        attn_dp_size=1,
        extra_mamba_cache_bytes_per_req=0,
    )
    given = {"max_running_requests": seats, "max_mamba_cache_size": states, "mamba_full_memory_ratio": ratio}
    with get_context().override_server_args(device="cpu", disable_radix_cache=True, **given):
        tokens = int(Configurator._handle_max_mamba_cache(made, left / (1 << 30)) * (1 << 30)) // site.block_bytes
        places = Configurator.resolve_max_num_reqs(made, tokens)
        kept = get_context().config_bag("schedule").max_mamba_cache_size
    ours = resolve(SglangSettings(disable_radix_cache=True, chunked_prefill_size=4096, **given), site)
    assert (ours.num_blocks, ours.max_running_requests, ours.max_mamba_cache_size) == (tokens, places, kept)
