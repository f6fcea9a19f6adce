"""A comparison of all schedulers on a mixed workload and on one of agents who share prefixes, with equal memory.

Each has equally many tokens of KV cache, at most as many requests at a time, and otherwise its defaults; its loop is
one that its original has: the asynchronous one if there are two. All else is equal, so the numbers show what rules do
on this machine, and nothing of how fast the originals compute.

The agents' trace is made here from a seed, so that no data is needed: all sessions begin with the same tools and system
prompt; those of a group share a repository, too; a task is each session's own. Every further turn adds a tool's answer
to the conversation so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.draw.chart import Bars, Chart, Panel, series
from cbsim.draw.report import Table
from cbsim.schedulers import registry
from reports import page

SEATS = 64
CONSTANT = "cost.compute_efficiency={}"  # shares of the data sheet whatever the size: decisions are compared here


class Load(NamedTuple):
    """A workload: its scenario and what is changed of it, the tokens of KV cache for all, its longest sequence."""

    scenario: str
    changes: Sequence[str]
    kv_tokens: int
    longest: int


MIXED, AGENTS = "mixed", "agents"
LOADS: Mapping[str, Load] = {
    MIXED: Load(
        "landscape",
        ("workload.arrivals={kind: poisson, rate_per_s: 24}",),
        32_768,
        6_144,
    ),
    AGENTS: Load(
        "agents",
        (),
        131_072,
        16_384,
    ),
}


class Contender(NamedTuple):
    """A scheduler: what it is called here, which begins with its kind, its settings that are not defaults
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


def run(workload: str, contender: Contender, *changes: str) -> Ran:
    """A contender on a load, with the load's cache in blocks of its usual size."""
    load, size = LOADS[workload], registry.find(contender.kind).block_size
    settings = {name: load.longest if value == LONGEST else value for name, value in contender.settings.items()}
    scheduler = f"scheduler={json.dumps({'name': contender.kind, **settings})}"
    cache = f"kv_cache={{block_size: {size}, num_blocks: {load.kv_tokens // size}}}"
    overrides = (*load.changes, scheduler, cache, f"loop.mode={contender.loop}", *changes)
    made: Any = cbsim.run(cbsim.load(load.scenario, *overrides, CONSTANT))
    summary = made.summary
    return Ran(
        workload,
        contender.name,
        contender.loop,
        summary["output_tokens_per_s"],
        summary["ttft_s"]["p50"],
        summary["ttft_s"]["p99"],
        summary["tpot_s"]["p99"],
        summary["itl_s"]["max"],
        summary["padding_share"],
        summary["preemptions"],
        summary["prefix_hit_rate"],
        summary["kv_utilisation"]["mean"],
        summary["requests_by_status"]["refused"],
    )


def table(runs: Sequence[Ran]) -> Table:
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
        for r in runs
    ]
    return Table("", ("scheduler", "loop", *COLUMNS), rows)


def chart(runs: Sequence[Ran]) -> Chart:
    panels = []
    for number, workload in enumerate(LOADS):
        of = [r for r in runs if r.workload == workload]
        heights = np.array([r.tokens_per_s for r in of])
        bars = Bars(workload, np.arange(len(of)), heights, series(number), [f"{h:,.0f}" for h in heights])
        top = 1.2 * float(heights.max())
        panels.append(Panel([bars], "", "output tokens/s", workload, (), [r.contender for r in of], y_range=(0, top)))
    return Chart("landscape", "The landscape", "", panels)


BLOCK = 512  # tokens that a hash id names
TOOLS, REPOSITORY = 4, 6  # blocks that all share, that a group shares
GROUPS, SESSIONS, TURNS = 8, 48, 6
GAP_MS, TOOL_MS = 400.0, 800.0  # between sessions, and until a tool has answered; means of exponentials


def agents(seed: int = 0) -> str:
    """scenarios/traces/agents.jsonl: one JSON object a turn, session by session in order of arrival."""
    rng = np.random.default_rng(seed)
    lines, fresh, arrival = [], 1_000_000, 0.0
    for session in range(SESSIONS):
        group = int(rng.integers(GROUPS))
        for turn in range(TURNS):
            own = int(np.clip(rng.lognormal(5.8, 0.7), 16, 3000))
            ids = [*range(TOOLS), *(1000 * (group + 1) + i for i in range(REPOSITORY))] if turn == 0 else []
            tokens = len(ids) * BLOCK + own
            ids += range(fresh, fresh + -(-own // BLOCK))
            fresh += -(-own // BLOCK)
            line = {
                "session_id": f"agent-{session}",
                "input_length": tokens,
                "output_length": int(np.clip(rng.lognormal(4.6, 0.7), 8, 600)),
                "hash_ids": ids,
            }
            line |= {"timestamp": round(arrival, 1), "group_id": group} if turn == 0 else {}
            line |= {"delay": round(float(rng.exponential(TOOL_MS)), 1)} if turn else {}
            lines.append(json.dumps(line))
        arrival += float(rng.exponential(GAP_MS))
    return "\n".join(lines) + "\n"


def main() -> None:
    (page.ROOT / "scenarios" / "traces" / "agents.jsonl").write_text(agents(), encoding="utf-8")
    runs = [run(workload, contender) for workload in LOADS for contender in CONTENDERS]
    tables = {workload: table([r for r in runs if r.workload == workload]) for workload in LOADS}
    page.write(__file__, tables, [chart(runs)], {"runs": [r._asdict() for r in runs]})


if __name__ == "__main__":
    main()
