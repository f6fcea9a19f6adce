"""Hugging Face transformers' own continuous batching against the engine: same requests, weights and prompts, greedy.

    python reports/hardware/peer.py [SCENARIO] [--set FIELD=VALUE] [--loop sync] [--device cuda] [--out DIR]

Both serve the requests of a scenario that all arrive at once (8k_b32 with 512 tokens an output). The result,
OUT/peer-<loop>.json, has seconds, output tokens a second, the ratio, and the number of equal texts; in bfloat16 near
ties may differ.

With a `flash_attn` package the library takes its fast paths: paged decode, CUDA graphs and asynchronous batches.
Without one it runs paged SDPA with a mask, synchronous only: an asynchronous comparison is skipped, with a reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.utils.import_utils import is_flash_attn_2_available

from cbengine import build
from cbengine.build import Setup
from cbengine.model.weights import Architecture
from cbengine.sequence import Prompts
from cbsim.policy.groups import FULL, Sight
from cbsim.record.environment import code_version
from cbsim.scenario import pretrained, rows
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

FLASH, SDPA = "paged|flash_attention_2", "paged|sdpa"
OPTIONS = ("max_requests_per_batch", "max_blocks_per_request")
SHORT = ["workload.output_tokens=512", "kv_cache.num_blocks=160"]  # masks of the library take memory, too
SMALL = ["workload.output_tokens=16", "scheduler={name: transformers_fifo, max_batch_tokens: 64}"]
LIMIT_S = 480.0  # the longest wait for an answer
Texts = dict[int, list[int]]  # by the request's index


def engine(scenario: Scenario, loop: str, setup: Setup) -> tuple[float, Texts]:
    """Seconds that the engine takes, and its texts."""
    served, _ = build.engine(scenario, loop, generators.build(scenario), setup)
    try:
        served.run()
    finally:
        served.close()
    return served.now_ns / 1e9, {spec.index: sequence.outputs for spec, sequence in served.sequences.items()}


def peer(scenario: Scenario, loop: str, setup: Setup, attention: str) -> tuple[float, Texts]:
    """Seconds that transformers takes, warm, and its texts."""
    specs = generators.build(scenario).specs()
    plan = build.executor_plan(scenario, loop, specs, setup)
    model: Any = to_transformers(plan.architecture, plan.tensors())
    model.set_attn_implementation(attention)
    prompts = Prompts(scenario.seed, plan.architecture.vocab)
    config = ContinuousBatchingConfig(
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_batch_tokens=plan.capacity.tokens,  # all that the requests need: a mask has as many rows
        use_async_batching=loop == "async",
        use_cuda_graph=attention == FLASH,
        **{name: value for name in OPTIONS if (value := getattr(scenario.scheduler, name, None)) is not None},
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    if model.device.type == "cpu":  # the library asks psutil, which few have, and takes no answer for no memory
        PagedAttentionMemoryHandler.get_available_memory = lambda _: rows.host_memory()
    manager.start()
    try:
        answers(manager, {"warm": ([1, 2, 3], 4)})
        requests = {str(spec.index): (prompts.of(spec).tolist(), spec.output_tokens) for spec in specs}
        began = time.perf_counter()
        texts = answers(manager, requests)
        return time.perf_counter() - began, {spec.index: texts[str(spec.index)] for spec in specs}
    finally:
        manager.stop(block=True)


def to_transformers(architecture: Architecture, tensors: dict[str, Tensor]) -> transformers.PreTrainedModel:
    """The model that transformers makes of these very tensors: nothing is copied. It generates for as long as it is
    asked to, because it is told of no token that ends a text.
    """
    a, scaling = architecture, architecture.rope_scaling
    rope: dict[str, Any] = {"rope_theta": a.rope_theta, "rope_type": "default"}
    if scaling is not None:
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor}
        rope |= {"high_freq_factor": scaling.high_freq_factor}
        rope |= {"original_max_position_embeddings": scaling.original_max_position}
    assert not (a.qk_norm and a.qkv_bias), "transformers has no such model"
    kind, model_kind = transformers.LlamaConfig, transformers.LlamaForCausalLM
    if a.qk_norm:
        kind, model_kind = transformers.Qwen3Config, transformers.Qwen3ForCausalLM
    if a.qkv_bias:
        kind, model_kind = transformers.Qwen2Config, transformers.Qwen2ForCausalLM
    windows = {}
    if not a.sees_all:
        if kind is transformers.LlamaConfig:
            kind, model_kind = transformers.MistralConfig, transformers.MistralForCausalLM
        windows = _windows(a)
    config = kind(
        hidden_size=a.hidden,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        intermediate_size=a.intermediate,
        vocab_size=a.vocab,
        tie_word_embeddings=a.tied_embeddings,
        max_position_embeddings=a.max_position,
        rms_norm_eps=a.norm_eps,
        rope_parameters=rope,
        **windows,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    weight = tensors["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = model_kind._from_config(config, dtype=weight.dtype, attn_implementation="sdpa")
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(weight.device)  # its buffers are no weights
    assert not any(part.is_meta for part in (*model.parameters(), *model.buffers())), "a tensor was left without data"
    return model.requires_grad_(False).eval()


def _windows(architecture: Architecture) -> dict[str, Any]:
    """What transformers' configuration says of layers that do not see all: they have one window."""
    a, seen = architecture, architecture.layer_attention
    (window,) = {one for one in seen if one != FULL}
    assert window.sight is Sight.SLIDING, "transformers has no such model"
    if a.qk_norm or a.qkv_bias:
        types = [pretrained.WHOLE if one == FULL else pretrained.SLIDING for one in seen]
        return {"use_sliding_window": True, "sliding_window": window.span, "layer_types": types}
    assert FULL not in seen, "transformers has no such model"
    return {"sliding_window": window.span}


def answers(manager: Any, requests: dict[str, tuple[list[int], int]]) -> dict[str, list[int]]:
    """The tokens of every answer. Raises RuntimeError if the library's loop has died or is silent."""
    for name, (prompt, count) in requests.items():
        manager.add_request(prompt, request_id=name, max_new_tokens=count, eos_token_id=-1)
    texts: dict[str, list[int]] = {}
    until = time.monotonic() + LIMIT_S
    while len(texts) < len(requests):
        answer = manager.get_result(timeout=1.0)
        if answer is not None and answer.is_finished():
            texts[answer.request_id] = list(answer.generated_tokens)
        elif answer is not None and answer.error:
            raise RuntimeError(f"transformers: {answer.error}")
        elif answer is None and (not manager.is_running() or time.monotonic() > until):
            raise RuntimeError(f"transformers has answered {len(texts)} of {len(requests)} requests and no more")
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="?")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--loop", choices=("sync", "async"), default="sync")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/peer"), metavar="DIR")
    args = parser.parse_args(argv)
    gpu = args.device == "cuda"
    if gpu and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    attention = FLASH if gpu and is_flash_attn_2_available() else SDPA
    if args.loop == "async" and attention != FLASH:
        print("skipped: transformers batches asynchronously on a GPU with a flash_attn package only")
        return 0
    torch.set_num_threads(1)  # on a CPU, as the engine's own devices
    short = SHORT if gpu else SMALL
    short = [] if args.scenario else short
    name = args.scenario or ("8k_b32" if gpu else "tiny_cpu")
    setup = Setup(device="cuda" if gpu else "inline")
    scenario = build.adapted(scenarios.load(name, [*short, *args.set]), setup)
    specs = generators.build(scenario).specs()
    if any(spec.arrival_ns for spec in specs):
        parser.error(f"{name}: its requests must all arrive at once")
    tokens = sum(spec.output_tokens for spec in specs)
    ours_s, ours = engine(scenario, args.loop, setup)
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    theirs_s, theirs = peer(scenario, args.loop, setup, attention)
    result = {
        "scenario": scenario.name,
        "loop": args.loop,
        "device": build.device_name(setup),
        "commit": code_version(),
        "transformers": transformers.__version__,
        "attention": attention,
        "requests": len(specs),
        "output_tokens": tokens,
        "cbengine_s": ours_s,
        "transformers_s": theirs_s,
        "cbengine_tokens_per_s": tokens / ours_s,
        "transformers_tokens_per_s": tokens / theirs_s,
        "ratio": theirs_s / ours_s,
        "same_texts": sum(ours[index] == theirs[index] for index in ours),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"peer-{args.loop}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
