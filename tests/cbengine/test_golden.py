"""The engine executes what real schedulers decided: the recorded traces of vLLM and transformers, batched and computed.

While a trace is replayed through our policies and compared line by line (`cbsim conformance`), every plan that is made
is also turned into arrays, checked row by row against the plan, and computed by a tiny model; its tokens come back
when the replay's results do. Prompts are the recorded ones, mapped onto the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.oracle import Checked
from support.engine.served import INLINE, VOCAB, asked

from cbengine import build
from cbengine.batch import Batcher, Capacity, Load, Sent
from cbengine.device.base import EngineDevice, Inline
from cbengine.sampling import Sampling
from cbengine.sequence import Sequence
from cbsim.conformance import check, vllm_traces
from cbsim.conformance.reader import Case, Reader, Replay
from cbsim.policy.plan import Outcome, StepPlan, StepResult
from cbsim.policy.request import RequestSpec

GOLDEN = Path(__file__).parent.parent / "golden"
TRACES = (
    "vllm/0.33.0/p043.async",  # priorities, preemption, prefix cache
    "vllm/0.33.0/p055.sync",  # ... and requests given up
    "vllm/0.33.0/r059.async",
    "vllm/0.33.0/r136.async",
    "vllm/0.33.0/x004.async",
    "vllm/0.33.0/w26_stop_token.async",
    "vllm/0.19.0/p007.async",
    "vllm/0.19.0/r075.sync",
    "transformers/5.17.0/w11_cancel_fifo_bs16",
    "transformers/5.17.0/x0003_tinyshare_fifo_async_share_bs8",  # soft resets, merged blocks
    "transformers/5.17.0/x0028_kvbudget_fifo_sync_share_bs4",
    "transformers/5.17.0/x0076_fastpath_prefill_first_async_noshare_bs16",
    "transformers/5.17.0/x0082_tinycancel_prefill_first_async_share_bs8",
    "transformers/5.17.0/x0101_evict_prefill_first_async_share_bs8",
    "transformers/5.17.0/x0113_tinyshare_prefill_first_sync_share_bs4",
)
Made = Callable[[Any, Capacity, int], EngineDevice]


def inline(options: Any, sizes: Capacity, depth: int) -> EngineDevice:
    """The tiny model on this CPU."""
    plan = build.executor_plan(asked("vllm"), "sync", [], INLINE)
    positions = sizes.width * options.block_size
    sized = replace(plan, num_blocks=options.num_blocks, block_size=options.block_size, positions=positions)
    return Inline(replace(sized, capacity=sizes)(), sizes, depth)


def capacity(options: Any, specs: list[RequestSpec]) -> Capacity:
    """What `build` would allocate for a scenario with these options."""
    return Load.of(specs).capacity(options)


class Executed:
    """A scheduler's plans, built and computed as they are made; results are taken when it takes its own."""

    def __init__(self, scheduler: Any, depth: int, prompts: dict[RequestSpec, list[int]], made: Made) -> None:
        self._plan, self._update = scheduler.schedule, scheduler.update
        scheduler.schedule, scheduler.update = self.schedule, self.update
        texts = {
            one: Sequence(one, np.array(prompt, dtype=np.int32) % VOCAB, Sampling()) for one, prompt in prompts.items()
        }
        sizes = capacity(scheduler.options, list(prompts))
        self.device = Checked(made(scheduler.options, sizes, depth), sizes)
        self.device.texts = texts
        self._batcher = Batcher(sizes, padded=False)
        self._batcher.sequences.update(texts)
        self._depth = depth
        self._sent: dict[int, Sent] = {}

    def schedule(self) -> StepPlan | None:
        plan: StepPlan | None = self._plan()
        if plan is not None:
            slot = plan.step % self._depth
            self._sent[plan.step] = self._batcher.build(plan, self.device.staging[slot], self.device.bucket)
            self.device.launch(slot, self._sent[plan.step].header, plan, self._sent[plan.step].excess)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        tokens, (header, readers, _) = self.device.wait(plan.step % self._depth)[0].tolist(), self._sent.pop(plan.step)
        del tokens[header.live : header.decodes]  # of rows that fill a captured size up
        for text, token in zip(readers, tokens, strict=True):
            if not text.over:
                text.outputs.append(token)
        outcome: Outcome = self._update(plan, result)
        for one, _ in outcome.finished:
            self.device.texts[one].over = True
        return outcome


def prompts(replay: Any, workload: dict[str, Any]) -> dict[RequestSpec, list[int]]:
    """The recorded prompt of every request of a replay."""
    if isinstance(replay, vllm_traces.VllmReplay):
        specs, field = [one for one, _ in replay._coming], "prompt_token_ids"
    else:
        specs, field = [one for arriving in replay._arriving.values() for one in arriving], "prompt"
    recorded = {request["id"]: request[field] for request in workload["requests"]}
    return {one: recorded[one.id] for one in specs}


def executed(trace: Path, monkeypatch: pytest.MonkeyPatch, made: Made) -> tuple[check.TraceResult, Executed]:
    """Compare a trace while its plans are executed."""
    done: list[Executed] = []
    known = check.reader_of

    def reader_of(header: dict[str, Any]) -> Reader:
        reader = known(header)
        assert reader is not None

        def case(trace: Path, header: dict[str, Any]) -> Case:
            read = reader.case(trace, header)

            def replay(recorded: dict[str, Any]) -> Replay:
                replayed = read.replay(recorded)
                given = prompts(replayed, recorded)
                done.append(Executed(replayed.scheduler, 1 + (read.mode == "async"), given, made))
                return replayed

            return replace(read, replay=replay)

        return replace(reader, case=case)

    monkeypatch.setattr(check, "reader_of", reader_of)
    return check.compare(trace, invariants=True), done[0]


@pytest.mark.parametrize("name", TRACES)
def test_golden_plans_are_executed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is still the recorded one, every array said what its plan says, and every token of every row came
    back to its request.
    """
    result, run = executed(GOLDEN / f"{name}.jsonl.gz", monkeypatch, inline)
    assert str(result).endswith("ok"), f"{result}"
    assert result.matched == result.total
    assert run.device.steps > 5
    run.device.check_delivered()
    tokens = [token for text in run.device.texts.values() for token in text.outputs]
    assert all(0 <= token < VOCAB for token in tokens)
    assert len(set(tokens)) > 5
