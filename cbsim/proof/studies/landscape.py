"""All schedulers on one mixed workload and on one of agents who share prefixes, with the same memory for all.

Each has as many tokens of KV cache, at most as many requests at a time, and otherwise its defaults; a loop that its
original has: the asynchronous one where there are two. What is not the scheduler's is the same, so the numbers say what
rules do on this machine, and nothing of how fast the originals compute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import Bars, Chart, Panel, series
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.machine.simulation import Simulation
from cbsim.policy.schedulers import registry
from cbsim.scenario import scenario as scenarios
from cbsim.server import running
from cbsim.server.running import Terms

SEATS = 64


class Load(NamedTuple):
    """A workload: its scenario and what is changed of it, the tokens of KV cache for all, its longest sequence."""

    scenario: str
    changes: Sequence[str]
    kv_tokens: int
    longest: int
    about: str


MIXED, AGENTS = "mixed", "agents"
LOADS: Mapping[str, Load] = {
    MIXED: Load(
        "landscape",
        ("workload.arrivals={kind: poisson, rate_per_s: 24}",),
        32_768,
        6_144,
        "512 requests, 24 a second, prompts of 512 and outputs of 256 tokens in the mean; nothing is shared.",
    ),
    AGENTS: Load(
        "agents",
        (),
        131_072,
        16_384,
        "48 agents of six turns whose contexts grow; all share their tools, those of a group a repository.",
    ),
}


class Contender(NamedTuple):
    """A scheduler: what it is called here, which is its kind and what it is told, its settings that are not defaults
    (LONGEST stands for the longest sequence of the load), and its loop.
    """

    name: str
    settings: Mapping[str, Any]
    loop: str

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]


LONGEST = "longest"


def _sync(name: str, **settings: Any) -> Contender:
    return Contender(name, settings, "sync")


def _async(name: str, **settings: Any) -> Contender:
    return Contender(name, settings, "async")


CONTENDERS = (
    _sync("static", batch_size=SEATS),
    _sync("dynamic_padded", batch_size=SEATS),
    _sync("faster_transformer", max_num_seqs=SEATS, max_model_len=LONGEST),
    _sync("orca", max_num_seqs=SEATS, max_model_len=LONGEST),
    _sync("vllm_v0", max_num_seqs=SEATS, max_model_len=LONGEST),
    _sync("simple_chunking", max_num_seqs=SEATS, max_model_len=LONGEST),
    _sync("sarathi", max_num_seqs=SEATS, max_model_len=LONGEST),
    _sync("tgi", max_batch_size=SEATS, max_batch_prefill_tokens=LONGEST),
    _async("transformers_fifo", max_requests_per_batch=SEATS),
    _async("transformers_fifo 5.23", version="5.23", max_requests_per_batch=SEATS),
    _async("trtllm", max_batch_size=SEATS, max_num_tokens=LONGEST),
    _async(
        "trtllm MAX_UTILIZATION",
        capacity_scheduler_policy="MAX_UTILIZATION",
        max_batch_size=SEATS,
        max_num_tokens=LONGEST,
    ),
    _async("vllm", max_num_seqs=SEATS, max_model_len=LONGEST),
    _async("sglang", max_running_requests=SEATS),
    _async("sglang lpm", schedule_policy="lpm", max_running_requests=SEATS),
)


class Ran(NamedTuple):
    """A run of a contender, and what its summary says."""

    workload: str
    contender: str
    loop: str
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    stall: float  # the longest gap between two tokens of a request, s
    padding: float  # share of the tokens computed
    preemptions: int
    hits: float  # share of the prompt tokens that the cache had
    kv_used: float  # mean share of the cache
    unserved: int  # refused


COLUMNS = (
    "output tokens/s",
    "TTFT p50, s",
    "TTFT p99, s",
    "TPOT p99, ms",
    "worst stall, ms",
    "padding",
    "preempted",
    "prefix hits",
    "KV in use",
    "refused",
)


def study() -> Study:
    """A run of each contender on each load. They need no data."""
    ran = [run(workload, contender) for workload in LOADS for contender in CONTENDERS]
    return Study(
        title="The landscape: every scheduler on the same machine",
        question="What do the schedulers of the field make of the same load, with the same memory?",
        findings=_findings(ran),
        tables=[_table(workload, [r for r in ran if r.workload == workload]) for workload in LOADS],
        charts=[_chart(ran)],
        data={"runs": [r._asdict() for r in ran], "loads": {name: load._asdict() for name, load in LOADS.items()}},
    )


def asked(workload: str, contender: Contender, *changes: str) -> scenarios.Scenario:
    """The scenario of a contender, with the load's cache in blocks of its usual size."""
    load, size = LOADS[workload], registry.find(contender.kind).block_size
    settings = {name: load.longest if value == LONGEST else value for name, value in contender.settings.items()}
    scheduler = f"scheduler={json.dumps({'name': contender.kind, **settings})}"
    cache = f"kv_cache={{block_size: {size}, num_blocks: {load.kv_tokens // size}}}"
    return scenarios.load(load.scenario, [*load.changes, scheduler, cache, f"loop.mode={contender.loop}", *changes])


def run(workload: str, contender: Contender, *changes: str) -> Ran:
    made = running.one_loop(asked(workload, contender, *changes), contender.loop, Simulation, Terms("")).summary
    return Ran(
        workload,
        contender.name,
        contender.loop,
        made["output_tokens_per_s"],
        made["ttft_s"]["p50"],
        made["ttft_s"]["p99"],
        made["tpot_s"]["p99"],
        made["itl_s"]["max"],
        made["padding_share"],
        made["preemptions"],
        made["prefix_hit_rate"],
        made["kv_utilisation"]["mean"],
        made["requests_by_status"]["refused"],
    )


def _table(workload: str, ran: Sequence[Ran]) -> Table:
    rows = [
        (
            r.contender,
            r.loop,
            f"{r.tokens_per_s:,.0f}",
            f"{r.ttft_p50:.2f}",
            f"{r.ttft_p99:.2f}",
            f"{1e3 * r.tpot_p99:.1f}",
            f"{1e3 * r.stall:,.0f}",
            f"{r.padding:.1%}",
            f"{r.preemptions:,}",
            f"{r.hits:.1%}",
            f"{r.kv_used:.1%}",
            f"{r.unserved:,}",
        )
        for r in ran
    ]
    load = LOADS[workload]
    says = f"{load.about} {load.kv_tokens:,} tokens of KV cache, {SEATS} requests at a time."
    return Table(workload, ("scheduler", "loop", *COLUMNS), rows, says)


def _chart(ran: Sequence[Ran]) -> Chart:
    panels = []
    for number, workload in enumerate(LOADS):
        mine = [r for r in ran if r.workload == workload]
        heights = np.array([r.tokens_per_s for r in mine])
        bars = Bars(workload, np.arange(len(mine)), heights, series(number), [f"{h:,.0f}" for h in heights])
        top = 1.2 * float(heights.max())
        panels.append(Panel([bars], "", "output tokens/s", workload, (), [r.contender for r in mine], y_range=(0, top)))
    says = f"Output tokens a second of every scheduler, {SEATS} requests at a time, with the same cache."
    return Chart("landscape", "The landscape", says, panels)


def _findings(ran: Sequence[Ran]) -> list[str]:
    said = []
    for workload in LOADS:
        mine = {r.contender: r for r in ran if r.workload == workload}
        best = max(mine.values(), key=lambda r: r.tokens_per_s)
        calm = min((r for r in mine.values() if r.tokens_per_s > 0.9 * best.tokens_per_s), key=lambda r: r.stall)
        said.append(
            f"{workload}: static batching gives {mine['static'].tokens_per_s:,.0f} output tokens/s, {best.contender} "
            f"{best.tokens_per_s:,.0f}; of those within 10 % of that, {calm.contender} has the shortest worst stall, "
            f"{1e3 * calm.stall:,.0f} ms."
        )
    return said
