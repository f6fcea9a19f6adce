"""What MAX_UTILIZATION gains over GUARANTEED_NO_EVICT and what its pauses cost: the table of docs/policies.md."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import cbsim

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
MARKED = re.compile(r"(?<=<!-- pauses -->\n).*?(?=\n<!-- /pauses -->)", re.DOTALL)
NO_EVICT, MAX_UTILIZATION, STATIC = POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")


@cache
def served(policy: str, known: bool) -> dict[str, Any]:
    """The summary of the scenario `pauses`, asynchronous; `known`: the limits of requests are their outputs."""
    rules = f"scheduler.capacity_scheduler_policy={policy}"
    early = f"workload.stop_early={'false' if known else 'true'}"
    return dict(cbsim.run(cbsim.load("pauses", rules, early, "loop.mode=async")).summary)


def table() -> str:
    head = ("limit of a request", "policy", "output tokens/s", "TTFT p50, s", "TPOT p99, ms", "pauses", "recomputed")
    lines = ["| " + " | ".join(head) + " |", "|---|---|--:|--:|--:|--:|--:|"]
    for known in (True, False):
        for policy in POLICIES:
            found = served(policy, known)
            ttft, tpot = found["ttft_s"]["p50"], found["tpot_s"]["p99"] * 1e3
            numbers = f"{found['output_tokens_per_s']:,.0f} | {ttft:.2f} | {tpot:.1f}"
            lost = f"{found['preemptions']} | {found['recomputed_tokens']:,}"
            limit = "its output" if known else "the longest output"
            lines.append(f"| {limit} | `{policy}` | {numbers} | {lost} |")
    return "\n".join(lines)


def test_the_table_is_what_is_simulated() -> None:
    found = MARKED.search(PAGE.read_text())
    assert found
    assert found[0] == table(), "run `python tests/runs/test_pauses.py`"


def test_pauses_buy_throughput() -> None:
    """More tokens a second and an earlier first token, for slower tokens and some computed twice; nobody is paused
    otherwise. The less is known of the outputs, the more it buys; and a limit that nobody reaches costs it nothing.
    """
    gains = []
    for known in (True, False):
        kept, packed, static = (served(policy, known) for policy in POLICIES)
        assert kept["preemptions"] == static["preemptions"] == 0 < packed["preemptions"]
        assert packed["recomputed_tokens"] > 0
        assert packed["ttft_s"]["p50"] < kept["ttft_s"]["p50"] < static["ttft_s"]["p50"]
        assert packed["tpot_s"]["p99"] > kept["tpot_s"]["p99"] > static["tpot_s"]["p99"]
        assert kept["output_tokens_per_s"] > 2 * static["output_tokens_per_s"]
        gains.append(packed["output_tokens_per_s"] / kept["output_tokens_per_s"])
    assert 1.1 < gains[0] < gains[1]
    both = [served(MAX_UTILIZATION, known)["output_tokens_per_s"] for known in (True, False)]
    assert abs(both[0] / both[1] - 1) < 0.01


if __name__ == "__main__":
    PAGE.write_text(MARKED.sub(lambda _: table(), PAGE.read_text()))
