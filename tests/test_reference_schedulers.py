"""The scenarios that show what a scheduler of its own does, each against a count of our own."""

from __future__ import annotations

import json

import numpy as np
from support.reference import ran

from cbsim.scenario import catalog

# -- agents -----------------------------------------------------------------------------------------------------------


def test_agents_read_what_their_turns_and_groups_have_written() -> None:
    """Counted from the file alone. A turn finds the whole blocks of 16 tokens of all that its session has computed,
    which is all but its last output token; a session's first turn finds the pieces of 512 tokens, from the first on,
    that a session before it began with. The cache is large enough to keep them all.
    """
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
    seven rows that decode by itself therefore costs seven times its length less one.
    """
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
    prompts; and what pads its prompts still beats the batch that waits for its longest request.
    """
    others = ("scheduler={name: tgi, max_batch_size: 8}", "scheduler={name: static, batch_size: 8}")
    tgi, padded, static = (ran("padded_inserts", "sync", *more).summary for more in ((others[0],), (), (others[1],)))
    assert tgi["makespan_s"] < padded["makespan_s"] < static["makespan_s"]
    assert tgi["padding_tokens"] == 0 < padded["padding_tokens"]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_turns_prompts_have_their_steps_for_themselves() -> None:
    """A step with a prompt has no row but those of the requests that begin in it; and the more readily the batch
    stops, the sooner a first token comes and the later the others.
    """
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
    not matter to it, more requests run, and some of their tokens are computed again.
    """
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
