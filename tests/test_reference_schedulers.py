"""The scenarios that compare schedulers or show what one of its own does, each against a count of our own, and what the
papers of Orca, vLLM and Sarathi say of themselves."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.reference import Ran, ran

from cbsim.scenario import catalog

# -- landscape ---------------------------------------------------------------------------------------------------------

SEATS = {
    "static": "scheduler.batch_size=64",
    "transformers_fifo": "scheduler.max_requests_per_batch=64",
    "transformers_prefill_first": "scheduler.max_requests_per_batch=64",
    "vllm": "scheduler.max_num_seqs=64",
}
CONTINUOUS = [name for name in SEATS if name != "static"]


def landscape(name: str, loop: str) -> Ran:
    return ran("landscape", loop, f"scheduler.name={name}", SEATS[name])


@pytest.mark.parametrize("name", CONTINUOUS)
def test_landscape_static_then_continuous_then_async(name: str) -> None:
    """The comparison of every introduction, with 64 seats for all: continuous batching beats static batching several
    times over on mixed lengths, and asynchronous continuous batching beats synchronous; the same tokens are delivered.
    """
    static, sync, asynchronous = landscape("static", "sync"), landscape(name, "sync"), landscape(name, "async")
    rates = [done.summary["output_tokens_per_s"] for done in (static, sync, asynchronous)]
    assert rates[0] * 2 < rates[1] < rates[2]
    assert len({done.summary["output_tokens"] for done in (static, sync, asynchronous)}) == 1
    assert asynchronous.summary["gpu_active"] > sync.summary["gpu_active"]


def test_landscape_is_one_workload() -> None:
    """All schedulers and both loops serve the same requests: one fingerprint."""
    prints = {landscape(name, loop).fingerprint for name in CONTINUOUS for loop in ("sync", "async")}
    assert len(prints | {landscape("static", "sync").fingerprint}) == 1
    assert ran("landscape", "sync", "seed=1").fingerprint not in prints


def test_landscape_static_pays_for_padding() -> None:
    """A static batch computes rows that have ended until its longest is done, and its prompts padded to the longest:
    by our own count from the drawn lengths, batches of 64 in order of arrival. Continuous batching has next to none."""
    done = landscape("static", "sync")
    computed = useful = steps = 0
    for first in range(0, 512, 64):
        batch = done.rows[first : first + 64]
        longest = max(row.output_tokens for row in batch)
        computed += 64 * (max(row.prompt_tokens for row in batch) + longest - 1)
        useful += sum(row.prompt_tokens + row.output_tokens - 1 for row in batch)
        steps += longest
    assert done.summary["steps"] == steps
    assert done.summary["computed_tokens"] == computed
    assert done.summary["padding_tokens"] == computed - useful
    assert landscape("vllm", "sync").summary["padding_share"] < 0.05


# -- agents -----------------------------------------------------------------------------------------------------------


def test_agents_read_what_their_turns_and_groups_have_written() -> None:
    """Counted from the file alone. A turn finds the whole blocks of 16 tokens of all that its session has computed,
    which is all but its last output token; a session's first turn finds the pieces of 512 tokens, from the first on,
    that a session before it began with. The cache is large enough to keep them all."""
    found, context, known = 0, dict[str, int](), set[int]()
    trace = catalog.scenario("agents").parent / "traces" / "agents.jsonl"
    for line in trace.read_text(encoding="utf-8").splitlines():
        turn = json.loads(line)
        session, pieces = turn["session_id"], turn["hash_ids"]
        if session in context:
            found += (context[session] - 1) // 16 * 16
        else:
            found += 512 * next(i for i, piece in enumerate([*pieces, -1]) if piece not in known)
            known.update(pieces)
        context[session] = context.get(session, 0) + turn["input_length"] + turn["output_length"]
    summary = ran("agents", "async").summary
    assert summary["prefix_hit_tokens"] == found > 0
    assert summary["requests"] == 48 * 6
    assert summary["output_tokens"] + summary["input_tokens"] > sum(context.values())  # turns send their context again


# -- padded_inserts ---------------------------------------------------------------------------------------------------


def test_padded_inserts_are_rectangles() -> None:
    """A step is as wide as the longest prompt that joins in it, and one token if nobody does. A prompt that joins
    seven rows that decode by itself therefore costs seven times its length less one."""
    done = ran("padded_inserts", "sync")
    joins: dict[int, list[int]] = {}
    for row in done.rows:
        joins.setdefault(row.first_step, []).append(row.prompt_tokens)
    rows, tokens, computed = (done.steps[name] for name in ("rows", "tokens", "padded_tokens"))
    widths = np.array([max(joins.get(step, [1])) for step in range(len(rows))])
    assert (computed == rows * widths).all()
    alone = [step for step in joins if len(joins[step]) == 1 and rows[step] == 8]
    assert len(alone) > 20
    assert [computed[step] - tokens[step] for step in alone] == [7 * (joins[step][0] - 1) for step in alone]


def test_padded_inserts_cost_more_than_rows_without_padding_and_less_than_waiting() -> None:
    """What the file shows beside it: with the same eight seats a batch of packed rows ends first, though it stops for
    prompts; and what pads its prompts still beats the batch that waits for its longest request."""
    others = ("scheduler={name: tgi, max_batch_size: 8}", "scheduler={name: static, batch_size: 8}")
    tgi, padded, static = (ran("padded_inserts", "sync", *more).summary for more in ((others[0],), (), (others[1],)))
    assert tgi["makespan_s"] < padded["makespan_s"] < static["makespan_s"]
    assert tgi["padding_tokens"] == 0 < padded["padding_tokens"]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_turns_prompts_have_their_steps_for_themselves() -> None:
    """A step with a prompt has no row but those of the requests that begin in it; and the more readily the batch
    stops, the sooner a first token comes and the later the others."""
    rules = (
        ("scheduler.waiting_served_ratio=0",),
        (),
        ("scheduler.waiting_served_ratio=1.2", "scheduler.max_waiting_tokens=1000"),
    )
    runs = [ran("turns", "sync", *more) for more in rules]
    for done in runs:
        begun = np.bincount([row.first_step for row in done.rows], minlength=len(done.steps["rows"]))
        prompts = done.steps["tokens"] > done.steps["rows"]
        assert (done.steps["rows"][prompts] == begun[prompts]).all()
        assert begun[prompts].sum() == 200
    first, between = ([done.summary[metric]["mean"] for done in runs] for metric in ("ttft_s", "itl_s"))
    assert first == sorted(first)
    assert between == sorted(between, reverse=True)


# -- pauses -----------------------------------------------------------------------------------------------------------


def test_pauses_are_paid_only_where_more_is_let_in_than_fits() -> None:
    """Who is let in by what it may need at most is never paused. MAX_UTILIZATION looks at what it needs now: limits do
    not matter to it, more requests run, and some of their tokens are computed again."""
    kinds = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")
    known, unknown = (
        [ran("pauses", "sync", f"scheduler.capacity_scheduler_policy={kind}", *more).summary for kind in kinds]
        for more in ((), ("workload.stop_early=true",))
    )
    assert [summary["preemptions"] > 0 for summary in (*known, *unknown)] == [False, True, False] * 2
    assert [summary["recomputed_tokens"] > 0 for summary in known] == [False, True, False]
    assert known[1]["makespan_s"] < known[0]["makespan_s"] < known[2]["makespan_s"]
    assert known[1]["makespan_s"] == unknown[1]["makespan_s"]
    assert known[0]["makespan_s"] < unknown[0]["makespan_s"]
    assert len({summary["output_tokens"] for summary in (*known, *unknown)}) == 1


# -- stalls: what the papers say, and the table of docs/policies.md ----------------------------------------------------

POLICIES = catalog.ROOT / "docs" / "policies.md"
BATCHES = (
    "workload.requests=512",
    "workload.arrivals={kind: at_once}",
    "workload.prompt_tokens={lognormal: {mean: 160, sigma: 1.0, low: 4, high: 1024}}",
    "workload.output_tokens={lognormal: {mean: 340, sigma: 0.8, low: 1, high: 2048}}",
    "scheduler.max_num_seqs=256",
)


def stalls(name: str, *overrides: str) -> dict[str, Any]:
    """The summary of a run in which every request ends."""
    done = ran("stalls", "sync", f"scheduler.name={name}", *overrides)
    assert {row.status for row in done.rows} == {"length"}
    return done.summary


def documented(*cells: str) -> bool:
    """Is a row of the table with these last cells?"""
    return f"| {' | '.join(cells)} |\n" in POLICIES.read_text()


def test_orca_serves_more_tokens_than_batches_that_end_together() -> None:
    static, orca = (stalls(name, *BATCHES)["output_tokens_per_s"] for name in ("faster_transformer", "orca"))
    assert orca > 2 * static
    assert documented(f"`faster_transformer` {static:,.0f}", f"`orca` {orca:,.0f}")


def test_paged_blocks_hold_larger_batches_than_whole_sequences() -> None:
    orca, paged = (stalls(name, *BATCHES)["rows_per_step"] for name in ("orca", "vllm_v0"))
    assert paged > 1.5 * orca
    assert documented(f"`orca` {orca:.1f}", f"`vllm_v0` {paged:.1f}")


def test_chunks_remove_the_stalls_of_those_who_decode() -> None:
    first, chunked = (stalls(name) for name in ("vllm_v0", "sarathi"))
    for measure, times in (("max", 40), ("p99", 5)):
        stalled, smooth = (1000 * summary["itl_s"][measure] for summary in (first, chunked))
        assert stalled > times * smooth
        assert documented(f"`vllm_v0` {stalled:,.0f}", f"`sarathi` {smooth:,.0f}")
    paid, spared = (1000 * summary["ttft_s"]["p50"] for summary in (chunked, first))
    assert paid > spared
    assert f"{paid:.0f} ms in place of {spared:.0f} ms" in " ".join(POLICIES.read_text().split())
