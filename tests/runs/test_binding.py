"""A run says what limits it. Each case is built so that one thing does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cbsim
from cbsim.runs import result as result_of

BASE: dict[str, Any] = {
    "question": "What binds?",
    "model": "llama-3.1-8b",
    "hardware": "h200-sxm",
    "workload": {"kind": "synthetic", "requests": 40, "prompt_tokens": 100, "output_tokens": 50},
    "cost": {"kind": "constant", "step_s": 0.01},
    "loop": {"mode": "sync"},
}
STEADY = {"arrivals": {"kind": "constant", "rate_per_s": 0.5}}


def binds(*overrides: str, **parts: Any) -> list[str]:
    scenario = cbsim.load(BASE | parts, *overrides)
    result = cbsim.run(scenario)
    assert isinstance(result, cbsim.Result)
    assert "\nbinds   sync" in str(result) or "\nbinds   async" in str(result)
    return result.binding


LAST = {"empirical": {"values": [2, 2, 2, 200]}}
BUDGET = "scheduler={name: vllm, max_num_batched_tokens: 64, max_num_seqs: 64}"


@pytest.mark.parametrize(
    ("override", "outputs", "text"),
    [
        ("scheduler.max_num_seqs=4", 50, "seats: requests wait 90% of the time, 90% because all 4 slots are taken"),
        ("kv_cache.num_blocks=21", 50, "cache: "),
        ("scheduler={name: transformers_fifo, max_requests_per_batch: 4}", 50, "seats: "),
        ("scheduler={name: static, batch_size: 20}", LAST, "batch: "),
        (BUDGET, 1, "tokens: requests wait 95% of the time, 95% because a step's 64 tokens are used up"),
    ],
)
def test_why_requests_wait(override: str, outputs: Any, text: str) -> None:
    """Seats of a static batch are free long before its last request ends, and nobody may take them. With a token each
    prefill alone fills the steps.
    """
    (said, _) = binds(override, workload=BASE["workload"] | {"output_tokens": outputs})
    assert said.startswith(text)


def test_tokens_of_less_than_a_block_of_states_are_used_up() -> None:
    """A prompt's rows end where blocks of states do: of 8,192 tokens 8 prompts of 1,000 leave too few for a block."""
    work = BASE["workload"] | {"prompt_tokens": 1000, "output_tokens": 1}
    (said, _) = binds("model=kimi-linear-48b-a3b", workload=work)
    assert said.startswith("tokens: ")
    assert said.endswith("a step's 8,192 tokens are used up; a larger token budget would admit them")


def test_arrivals_bind_a_server_that_keeps_up() -> None:
    said = binds(workload=BASE["workload"] | STEADY)
    assert said[0].startswith("arrivals: requests wait 0% of the time")
    assert said[1].startswith("GPU"), "time without requests is nobody's waiting"


def test_a_load_above_the_capacity_is_said_as_the_report_says_it() -> None:
    """Four slots and 50 steps of 10 ms a request serve 8 requests a second: of 20 a second the queue grows, of 5 it
    does not. With slots for all, the batch grows at first, not the queue: requests that have not ended yet are no
    overload. A closed load cannot be one."""
    slow = BASE["workload"] | {"requests": 200, "arrivals": {"kind": "constant", "rate_per_s": 20}}
    for changes, overloaded in (
        (["scheduler.max_num_seqs=4"], True),
        (["scheduler.max_num_seqs=4", "workload.arrivals.rate_per_s=5"], False),
        (["workload.output_tokens=1000"], False),
        (["scheduler.max_num_seqs=4", "workload.arrivals={kind: closed_loop, users: 50}"], False),
    ):
        result = cbsim.run(cbsim.load(BASE | {"workload": slow}, *changes))
        assert isinstance(result, cbsim.Result)
        assert ("\nload    sync   in the second half of the arrivals" in str(result)) is overloaded, changes
        assert not overloaded or "(20.1 and 8.04 a second)" in str(result.overload)


def test_the_most_of_the_cache_that_was_used_is_printed() -> None:
    """40 requests of 149 tokens in the cache at their end: 400 blocks, 6,400 tokens of 131,072 bytes. Blocks of layers
    with windows are of one group of layers each, so that they are no number of tokens."""
    result = cbsim.run(BASE)
    assert "at most 400 of 55,024 blocks in use at once: 6,400 tokens, 0.839 GB" in str(result)
    assert "KV used, max" in str(result)
    shared = BASE | {"model": "deepseek-v3", "cost": {"kind": "roofline", "tensor_parallel": 8}}
    assert "6,400 tokens, 3.6 GB" in str(cbsim.run(shared)), "a latent of 70,272 bytes is on each of 8 GPUs"
    windows = str(cbsim.run(BASE | {"model": "gemma-3-12b"}))
    assert "blocks in use at once\n" in windows
    assert "blocks of 16 tokens (each is of one of 6 layer groups; at most 131,072 tokens a request): 0.9 of" in windows


def test_nobody_waits_and_all_are_there() -> None:
    """Then only a step's own time is left to name."""
    assert len(binds()) == 1


def test_the_cpu_binds_where_the_gpu_waits_for_it() -> None:
    """Half of each step is the CPU's: the asynchronous loop hides it, unless it is longer than the GPU's part."""
    cpu = ["cost.cpu.prepare.base_s=0.01"]
    assert "waits 50% of the time for it; loop.mode: async would hide it" in binds(*cpu)[0]
    assert binds(*cpu, "loop.mode=async")[0].startswith("GPU")
    assert "its work is longer than the GPU's" in binds("cost.cpu.prepare.base_s=0.02", "loop.mode=async")[0]


def test_bandwidth_until_tokens_take_longer_to_compute_than_weights_and_kv_to_read() -> None:
    """989.4e12 FLOP/s x 2 bytes / (2 FLOP x 4.8e12 bytes/s) = 206 tokens, without KV."""
    assert binds()[0].startswith("GPU bandwidth: ")
    long = BASE["workload"] | {"prompt_tokens": 6000, "output_tokens": 1}
    (_, said) = binds(workload=long)
    assert said.startswith("GPU arithmetic: 100% of the GPU's time is in steps that are compute-bound")
    short = BASE["workload"] | {"prompt_tokens": 6000, "output_tokens": 400, "requests": 2}
    (said,) = binds(workload=short)
    assert said.startswith("GPU bandwidth: ")
    assert said.endswith("(32 tokens a step on average, padding included)"), said
    assert "of what they read is KV" in binds(workload=short | {"prompt_tokens": 30000, "requests": 12})[-1]


@pytest.mark.parametrize(
    ("model", "weights", "tokens"),
    [
        ("llama-3.1-8b", None, 206),  # 989.4e12 x 2 / (2 x 4.8e12)
        ("llama-3.1-8b", "fp8", 233),  # twice the rate of float8, half the bytes, but for embedding and head
        ("qwen3-30b-a3b", None, 1880),  # all experts are read, 8 of 128 computed
    ],
)
def test_a_step_is_bound_by_what_its_tokens_pass_and_reach(model: str, weights: str | None, tokens: int) -> None:
    """The tokens from which on arithmetic takes longer, found by bisection."""
    scenario = cbsim.load(BASE | {"model": model}, *([f"model.weights_dtype={weights}"] * bool(weights)))
    low, high = 1, 100_000
    while high - low > 1:
        middle = (low + high) // 2
        steps = {"padded_tokens": np.array([middle]), "context_tokens": np.array([0])}
        computes, reads, _ = result_of._at_peak(scenario, steps)  # type: ignore[arg-type]
        low, high = (middle, high) if computes[0] < reads[0] else (low, middle)
    assert high == pytest.approx(tokens, rel=0.01)


def test_blocks_in_use_are_those_of_the_steps_in_which_requests_wait() -> None:
    """50 blocks hold two requests of 19 blocks and wait for the third; the last one is alone for most of the run."""
    parts = {"prompt_tokens": {"empirical": {"values": [300]}}, "output_tokens": LAST, "requests": 12}
    result = cbsim.run(cbsim.load(BASE | {"workload": BASE["workload"] | parts}, "kv_cache.num_blocks=50"))
    assert isinstance(result, cbsim.Result)
    waits = result.step_numbers["waiting"] > 0
    held = result.step_numbers["used_blocks"]
    (said, _) = result.binding
    used = int(said.partition("because ")[2].partition(" of 50 KV blocks")[0])
    assert held[waits].min() <= used <= held[waits].max() and used > held.mean() * 1.1


def test_requests_that_were_refused_are_named_first_with_the_reason() -> None:
    """Nobody waits for them, so it is not said that no queue limits the load."""
    lengths = {"prompt_tokens": {"empirical": {"values": [100, 140_000]}}, "output_tokens": 50}
    said = binds(workload=BASE["workload"] | STEADY | lengths)
    assert (
        said[0].startswith("lost: ") and "of 40 requests refused: " in said[0] and "140000" in said[0].replace(",", "")
    )
    assert not any("no queue" in sentence for sentence in said)
