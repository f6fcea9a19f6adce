"""What theory says of simple servers, against runs: queueing, padding, chunks, conservation, the worked example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines import table

from cbsim.machine import simulate
from cbsim.machine.driver import Machine
from cbsim.metrics.metrics import summarise
from cbsim.policy.request import RequestSpec
from cbsim.record.tables import Steps, requests_of
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

SECOND = 1_000_000_000


def scenario(scheduler: dict[str, Any], cost: dict[str, Any] | None = None, **more: Any) -> Scenario:
    """A server with 512 blocks of 16 tokens whose steps take a second, but for what is said otherwise."""
    data: dict[str, Any] = {
        "question": "What does theory say?",
        "model": "llama-3.1-8b",
        "hardware": "h200-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        "kv_cache": {"block_size": 16, "num_blocks": 512},
        "cost": {"kind": "constant", "step_s": 1.0} | (cost or {}),
        "loop": {"cuda_graphs": {"padding": "none"}},
    }
    return Scenario.model_validate(data | more | {"scheduler": scheduler}, context={"base": Path()})


def run(question: Scenario, loop: str, asked: list[RequestSpec]) -> tuple[Machine, Steps]:
    return ran(question, loop, Workload(asked, len(asked)))


def ran(question: Scenario, loop: str, workload: Workload) -> tuple[Machine, Steps]:
    server = simulate.machine(question, loop, workload)
    simulate.run(server)
    return server, table(server.record)


def spec(index: int, prompt: int, outputs: int, at: int = 0) -> RequestSpec:
    return RequestSpec(index, str(index), at, prompt, outputs, outputs)


VLLM = {"name": "vllm", "max_num_batched_tokens": 512, "max_num_seqs": 64}
FIFO = {"name": "transformers_fifo", "max_batch_tokens": 512}
STATIC = {"name": "static", "batch_size": 4}
CONTIGUOUS = {"name": "contiguous", "max_num_batched_tokens": 512, "max_num_seqs": 64}
TRTLLM = {"name": "trtllm", "max_num_tokens": 512, "max_batch_size": 64}
SARATHI = {"name": "sarathi", "chunk_size": 512, "max_num_seqs": 64}
V0 = {"name": "vllm_v0", "max_num_seqs": 64}
SCHEDULERS = pytest.mark.parametrize(
    "scheduler",
    [VLLM, FIFO, FIFO | {"name": "transformers_prefill_first"}, STATIC, CONTIGUOUS, SARATHI, V0, TRTLLM],
    ids=["vllm", "fifo", "prefill_first", "static", "contiguous", "sarathi", "vllm_v0", "trtllm"],
)


# -- queueing ---------------------------------------------------------------------------------------------------------


def waiting_times(arrivals: list[int], service: int) -> list[int]:
    """Lindley's recursion: who comes while n are ahead waits for them."""
    waits, free = [], 0
    for at in arrivals:
        start = max(at, free)
        waits.append(start - at)
        free = start + service
    return waits


@pytest.mark.parametrize(("load", "outputs"), [(0.5, 1), (0.8, 1), (0.8, 3)])
def test_one_seat_is_an_m_d_1_queue(load: float, outputs: int) -> None:
    """Poisson arrivals, one seat, `outputs` steps of a second for each: the mean wait is rho / (2 mu (1 - rho)).

    Steps add nothing to it: a server with one seat looks at its queue when a request ends, or when one arrives at an
    idle server, and starts the next one there and then. So every single wait equals Lindley's recursion, and the mean
    lies in the 99.9 % interval of 20 batch means (Student's t with 19 degrees of freedom: 3.883); the interval is
    narrow enough to tell M/D/1 from M/M/1, which waits twice as long."""
    count, service = 12_000, outputs * SECOND
    gaps = np.random.default_rng(2024).exponential(service / load, count)
    arrivals = np.rint(np.cumsum(gaps)).astype(np.int64).tolist()
    server, steps = run(
        scenario(VLLM | {"max_num_seqs": 1}), "sync", [spec(i, 1, outputs, at) for i, at in enumerate(arrivals)]
    )
    rows = requests_of(server.record)
    waits = [int(steps["schedule_start_ns"][row.first_step]) - row.arrival_ns for row in rows]
    assert waits == waiting_times(arrivals, service)
    expected = load / (2 * (1 - load)) * outputs
    means = (np.array(waits) / SECOND).reshape(20, -1).mean(axis=1)
    half = 3.883 * means.std(ddof=1) / np.sqrt(20)
    assert abs(means.mean() - expected) < half < expected / 2


@SCHEDULERS
def test_littles_law_on_the_sample_path(scheduler: dict[str, Any]) -> None:
    """Mean number present = throughput x mean time present, exactly: the step table's running + waiting, integrated
    over the steps, is the sum over requests of the time from being taken in to the last token. The two sides come from
    different tables. Synchronous, so that a request counts from the plan that sees it to the update that ends it."""
    rng = np.random.default_rng(7)
    at = np.cumsum(rng.integers(0, SECOND, 60)).tolist()
    asked = [spec(i, int(rng.integers(1, 80)), int(rng.integers(1, 30)), at[i]) for i in range(60)]
    server, steps = run(scenario(scheduler, {"cpu": {"schedule": {"base_s": 0.1}}}), "sync", asked)
    present = steps["running"] + steps["waiting"]
    integral = int((present * (steps["update_end_ns"] - steps["schedule_start_ns"])).sum())
    ends = [int(steps["update_end_ns"][sum(row.token_runs[-2:]) - 1]) for row in requests_of(server.record)]
    assert integral == sum(end - row.queued_ns for end, row in zip(ends, requests_of(server.record), strict=True))


@SCHEDULERS
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_tokens_are_conserved(scheduler: dict[str, Any], loop: str) -> None:
    """Tokens asked for come out, no more and no fewer; every prompt token is computed once where nothing is shared or
    preempted (the cache is large), by rows that are listed."""
    rng = np.random.default_rng(11)
    asked = [spec(i, int(rng.integers(1, 200)), int(rng.integers(1, 40)), i * SECOND // 3) for i in range(40)]
    server, steps = run(scenario(scheduler), loop, asked)
    summary = summarise(requests_of(server.record), steps, total_blocks=server.record.total_blocks)
    wanted = sum(s.output_tokens for s in asked)
    assert summary["output_tokens"] == wanted
    assert int(steps["sampled_rows"].sum()) - summary["wasted_rows"] == wanted
    assert summary["input_tokens"] == sum(s.prompt_tokens for s in asked)
    assert int(steps["prefill_tokens"].sum()) >= summary["input_tokens"]
    assert summary["preemptions"] == summary["recomputed_tokens"] == summary["prefix_hit_tokens"] == 0


# -- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_padding_of_a_static_batch_by_hand(loop: str) -> None:
    """Prompts of 2, 5 and 3 tokens, outputs of 4, 1 and 2. The first step computes 3 x 5 tokens, 10 of them asked for.
    Three more steps follow, until the longest output is complete, always three rows: 1, then 2 and 2 of them have
    ended. Every row reads as many positions as the longest: 5, 6, 7 before its own token. Padding is paid for like
    any token: 10 ms each."""
    asked = [spec(0, 2, 4), spec(1, 5, 1), spec(2, 3, 2)]
    server, steps = run(scenario(STATIC, {"step_s": 0.0, "per_token_s": 0.01}), loop, asked)
    assert steps["tokens"].tolist() == [10, 2, 1, 1]
    assert steps["padded_tokens"].tolist() == [15, 3, 3, 3]
    assert steps["context_tokens"].tolist() == [0, 15, 18, 21]
    assert (steps.lane("compute") // 1_000_000).tolist() == [150, 30, 30, 30]
    summary = summarise(requests_of(server.record), steps, total_blocks=server.record.total_blocks)
    assert summary["padding_tokens"] == 5 + 1 + 2 + 2
    assert summary["padding_share"] == pytest.approx(10 / 24)


# -- memory and chunks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vllm", "transformers_fifo", "transformers_prefill_first"])
@given(prompt=st.integers(1, 700), budget=st.integers(1, 300))
@settings(max_examples=40)
def test_a_prompt_takes_ceil_n_over_m_chunks(name: str, prompt: int, budget: int) -> None:
    """A prompt of n tokens in steps of at most m is read in ceil(n/m) chunks; only the last one samples."""
    own = {"max_num_batched_tokens": budget, "max_num_seqs": 1} if name == "vllm" else {"max_batch_tokens": budget}
    _, steps = run(scenario({"name": name} | own), "sync", [spec(0, prompt, 1)])
    chunks = steps["prefill_tokens"][steps["rows"] > 0]
    assert len(chunks) == -(-prompt // budget)
    assert (chunks[:-1] == budget).all()
    assert steps["sampled_rows"][steps["rows"] > 0].tolist() == [0] * (len(chunks) - 1) + [1]


# -- the worked example -----------------------------------------------------------------------------------------------
