"""Runs of the peer for tests: a tiny model, prompts, scenarios, checked step tables, and what the model says alone.

A missing torch, or another transformers than 5.17, skips the module that imports this.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not transformers.__version__.startswith("5.17."):
    pytest.skip(f"transformers {transformers.__version__} is installed, the peer is 5.17", allow_module_level=True)

from cbengine.peer.transformers_server import TransformersServer
from cbsim.machine import simulate
from cbsim.policy.request import RequestSpec
from cbsim.policy.schedulers.registry import OURS
from cbsim.proof.conformance.defects import DefectiveTransformers
from cbsim.results.invariants import check
from cbsim.results.metrics import Steps
from cbsim.results.record import STEP_COLUMNS, Record, RequestRow
from cbsim.scenario.scenario import Scenario, depth, scheduler_options
from cbsim.workload import generators
from cbsim.workload.generators import Workload

LOOPS = ("sync", "async")
VOCAB = 128


@cache
def tiny(device: str = "cpu", dtype: str = "float32") -> Any:
    """A Llama of two layers with random weights so large that attention decides; it never ends a text by itself."""
    config = transformers.LlamaConfig(
        hidden_size=128 if device == "cuda" else 32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        initializer_range=0.1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device, getattr(torch, dtype)).eval()


def prompt(spec: RequestSpec) -> list[int]:
    """Tokens as the workload declares them: those of a shared prefix depend on it alone."""
    shared = min(spec.prefix_tokens, spec.prompt_tokens)
    head = np.random.default_rng(10_000).integers(0, VOCAB, spec.prefix_tokens)[:shared]
    own = np.random.default_rng(spec.index).integers(0, VOCAB, spec.prompt_tokens - shared)
    return [*head.tolist(), *own.tolist()]


def scenario(load: dict[str, Any] | None = None, **more: Any) -> Scenario:
    """Twelve requests that are all there at once, in a cache with room for them."""
    demand: dict[str, Any] = {
        "kind": "synthetic",
        "requests": 12,
        "prompt_tokens": {"uniform": {"low": 1, "high": 40}},
        "output_tokens": {"uniform": {"low": 1, "high": 14}},
    }
    data: dict[str, Any] = {
        "question": "What does the peer do?",
        "seed": 3,
        "model": "llama-3.2-1b",
        "hardware": "h100-sxm",
        "workload": demand | (load or {}),
        "scheduler": fifo(),
        "kv_cache": {"num_blocks": 80, "block_size": 8},
    }
    return Scenario.model_validate(data | more, context={"base": Path()})


def fifo(**more: Any) -> dict[str, Any]:
    """The library's scheduler as it is on a CPU: no paged decode."""
    own = {"max_batch_tokens": 48, "max_blocks_per_request": 0}
    return {"name": "transformers_fifo"} | own | more


def server(asked: Scenario, loop: str, load: Workload | None = None, **more: Any) -> TransformersServer:
    record = Record(scheduler_options(asked, depth(loop)).num_blocks)
    served = load or generators.build(asked)
    return TransformersServer(asked, loop, served, tiny(), prompt, record, cuda_graphs=True, **more)


def simulated(asked: Scenario, loop: str) -> Record:
    """What our policy plans if it shares the original's defects."""
    with mock.patch.dict(OURS, {asked.scheduler.name: replace(asked.kind, make=DefectiveTransformers)}):
        machine = simulate.machine(asked, loop, generators.build(asked))
    simulate.run(machine)
    return machine.record


def table(record: Record) -> Steps:
    return Steps(np.frombuffer(record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))


def served(asked: Scenario, loop: str, load: Workload | None = None) -> tuple[TransformersServer, Steps]:
    """A whole run, whose table has been checked."""
    one = server(asked, loop, load)
    one.run()
    return one, checked(one.record, loop)


def checked(record: Record, loop: str) -> Steps:
    """What holds of every server's step table holds of this one; no rule is left out."""
    steps = table(record)
    check(steps, depth=depth(loop), overlap=True, total_blocks=record.total_blocks)
    return steps


def alone(spec: RequestSpec) -> list[int]:
    """What the model says to a prompt when nothing is batched."""
    ids = torch.tensor([prompt(spec)])
    length = {"max_new_tokens": spec.output_tokens, "min_new_tokens": spec.output_tokens}
    out = tiny().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def regret(model: Any, spec: RequestSpec, tokens: list[int]) -> float:
    """How far the logit of any token of an answer falls short of the likeliest one's, at most, in standard deviations,
    by a float32 copy of the model that computes prompt and answer at once. Rounding: 0.01; values out of place: 1.
    """
    wide = deepcopy(model).float()
    ids = torch.tensor([[*prompt(spec), *tokens]], device=model.device)
    with torch.inference_mode():
        logits = wide(ids).logits[0, spec.prompt_tokens - 1 : -1]  # [tokens, vocab]
    said = logits.gather(1, ids[0, spec.prompt_tokens :, None]).squeeze(1)
    return float(((logits.amax(1) - said) / logits.std(1)).max())


def statuses(rows: list[RequestRow]) -> list[str]:
    return [row.status for row in rows]
