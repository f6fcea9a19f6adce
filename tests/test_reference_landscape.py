"""The scenario that compares the schedulers: who is faster than whom, and what padding costs."""

from __future__ import annotations

import numpy as np
import pytest
from support.reference import Ran, ran

from cbsim.scenario import demand, scenario

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
    by our own count from the drawn lengths, batches of 64 in order of arrival. Continuous batching has next to none.
    """
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


def test_landscape_lengths_are_mixed() -> None:
    """Log-normal lengths with the means that the file gives (512 and 256 tokens, clipped), within a tenth."""
    rows = landscape("vllm", "sync").rows
    asked = scenario.load("landscape").workload
    assert isinstance(asked, demand.Synthetic)
    for drawn, wanted in (
        ([row.prompt_tokens for row in rows], asked.prompt_tokens),
        ([row.output_tokens for row in rows], asked.output_tokens),
    ):
        assert isinstance(wanted, demand.LognormalLength)
        assert np.mean(drawn) == pytest.approx(wanted.lognormal.mean, rel=0.1)
        assert wanted.lognormal.low <= min(drawn) < max(drawn) <= (wanted.lognormal.high or 0)
        assert np.std(drawn) / np.mean(drawn) > 0.5
