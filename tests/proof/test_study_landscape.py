"""The landscape: what papers claim of their schedulers holds as a direction, and the committed report is what runs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from cbsim.policy.schedulers import registry
from cbsim.proof.studies import agents, landscape
from cbsim.proof.studies.landscape import AGENTS, CONTENDERS, LOADS, MIXED, Ran

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "reports" / "fidelity" / "landscape" / "report.json"


@cache
def ran(load: str, name: str) -> Ran:
    (contender,) = (contender for contender in CONTENDERS if contender.name == name)
    return landscape.run(load, contender)


def test_every_scheduler_is_in_it() -> None:
    """But for searches and those that reserve one piece, which have studies of their own."""
    kinds = {contender.kind for contender in CONTENDERS}
    assert kinds == {*registry.OURS} - {"beam", "contiguous", "transformers_prefill_first"}


def test_the_agents_are_those_of_the_seed() -> None:
    assert (ROOT / "scenarios" / "traces" / "agents.jsonl").read_text() == agents.lines()


def test_orca_is_above_batches_that_end_together() -> None:
    """Iteration-level scheduling, with the same reservation for all."""
    assert ran(MIXED, "orca").tokens_per_s > 1.5 * ran(MIXED, "faster_transformer").tokens_per_s


def test_paged_blocks_are_above_reserved_sequences() -> None:
    assert ran(MIXED, "vllm_v0").tokens_per_s > 2 * ran(MIXED, "orca").tokens_per_s


def test_chunks_remove_stalls() -> None:
    """Prompts of thousands of tokens stop all who decode; in chunks they do not."""
    assert ran(AGENTS, "sarathi").stall < ran(AGENTS, "vllm_v0").stall / 20


def test_the_longest_prefix_first_finds_more() -> None:
    """On the tree of prefixes, four at a time, a quarter of the cache: whose prefix is there goes first, before it is
    evicted; those whose prefix is not there wait.
    """
    few = ("kv_cache.num_blocks=32768", "scheduler.max_running_requests=4")
    fcfs, lpm = (landscape.run(AGENTS, c, *few) for c in CONTENDERS if c.kind == "sglang")
    assert lpm.hits > fcfs.hits + 0.25
    assert lpm.tokens_per_s > fcfs.tokens_per_s
    assert lpm.ttft_p99 > 2 * fcfs.ttft_p99


def test_utilisation_costs_pauses() -> None:
    """More output from the same memory, for requests that are set back, and slower tokens for some."""
    most, safe = ran(MIXED, "trtllm MAX_UTILIZATION"), ran(MIXED, "trtllm")
    assert most.tokens_per_s > safe.tokens_per_s
    assert most.preemptions > safe.preemptions == 0
    assert most.tpot_p99 > safe.tpot_p99


def test_a_prefix_cache_is_what_agents_need() -> None:
    cached, plain = ran(AGENTS, "vllm"), ran(AGENTS, "trtllm")
    assert cached.hits > 0.9 and plain.hits == 0
    assert cached.tokens_per_s > 1.5 * plain.tokens_per_s


@pytest.mark.parametrize(("load", "name"), [(MIXED, "vllm"), (MIXED, "orca"), (AGENTS, "sarathi"), (AGENTS, "vllm")])
def test_the_report_is_what_is_run(load: str, name: str) -> None:
    """Runs are functions of scenario and seed, so the committed numbers are these, to the last digit."""
    runs = json.loads(REPORT.read_text())["data"]["runs"]
    (recorded,) = (entry for entry in runs if (entry["workload"], entry["contender"]) == (load, name))
    assert recorded == ran(load, name)._asdict()


def test_the_readme_has_the_report_s_numbers() -> None:
    """Five columns of it, scheduler by scheduler."""
    runs = json.loads(REPORT.read_text())["data"]["runs"]
    mine = {(entry["workload"], entry["contender"]): entry for entry in runs}
    text = (ROOT / "README.md").read_text()
    for name in ("static", "orca", "sarathi", "trtllm", "transformers_fifo", "vllm", "sglang"):
        mixed, tree = mine[MIXED, name], mine[AGENTS, name]
        cells = [
            f"`{name}`",
            f"{mixed['tokens_per_s']:,.0f}",
            f"{mixed['ttft_p99']:.1f}",
            f"{tree['tokens_per_s']:,.0f}",
            f"{1e3 * tree['stall']:,.0f}",
            f"{tree['hits']:.0%}",
        ]
        assert "| " + " | ".join(cells) + " |" in text, cells


def test_loads_name_what_they_are() -> None:
    assert LOADS.keys() == {MIXED, AGENTS}
