"""Workloads for SGLang's scheduler, drawn over all options that our rules have."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import get_args, get_type_hints

from cbsim.conformance.sglang_traces import CONFIG
from cbsim.live.original import Line
from cbsim.schedulers.sglang.settings import SglangSettings
from cbsim.workload.scheduler_tests import STOP_TOKEN

LENGTHS = ("prompt", "output", "max_new_tokens")
PLAIN: Line = {field.name: field.default for field in fields(SglangSettings) if field.name in CONFIG}
PLAIN |= {"page_size": 1, "max_total_num_tokens": 4000, "context_length": 2000, "vocab_size": 1000}
PLAIN |= {"max_running_requests": 16, "max_prefill_tokens": 512, "prefill_decode_interval": None}
KINDS = get_type_hints(SglangSettings)
NEEDS_TREE = "shortest-prefill-first"
ORDERS, EVICTIONS = get_args(KINDS["schedule_policy"]), get_args(KINDS["radix_eviction_policy"])


def draw(rng: random.Random, number: int) -> Line:
    """Return workload `number`. On some inputs SGLang fails or waits for ever, and they are not drawn: decoding
    requests that leave no room for prompts in a mixed batch, a prompt that leaves no page, `ignore_eos` without the
    tree where an empty cache cuts outputs.
    """
    page, chunk, seats = rng.choice([1, 1, 1, 2, 4, 16]), rng.choice([None, 16, 32, 64, 128]), rng.choice([1, 3, 6, 40])
    tree = rng.random() < 0.85
    mixed, ranked, most = chunk is not None and seats < chunk // page, rng.random() < 0.3, rng.choice([64, 360, 1200])
    orders = ("fcfs", "lof") if ranked else ("fcfs", *[each for each in ORDERS if tree or each != NEEDS_TREE])
    drawn: Line = {
        "page_size": [page],
        "chunked_prefill_size": [chunk],
        "max_running_requests": [seats],
        "max_total_num_tokens": [(most + rng.randint(0, most)) // page * page],
        "max_prefill_tokens": [16, 64, 128, 512],
        "context_length": [2000, 2000, 2000, 300, 90],
        "schedule_policy": orders,
        "schedule_conservativeness": [0.01, 0.05, 0.3, 1.0, 1.4],
        "enable_mixed_chunk": [False, mixed],
        "disable_radix_cache": [not tree],
        "radix_eviction_policy": ["lru", "lru", "lru", *EVICTIONS],
        "enable_priority_scheduling": [ranked],
        "disable_priority_preemption": [False, False, True],
        "schedule_low_priority_values_first": [False, True],
        "priority_scheduling_preemption_threshold": [0, 5, 10, 10],
        "retraction_policy": ["length", "priority" if ranked else "length"],
        "prefill_max_requests": [None, None, None, 1, 2],
        "prefill_decode_interval": [None, None, None, 1, 3],
        "max_queued_requests": [None, None, None, 1, 4, 12],
    }
    config = PLAIN | {name: rng.choice(values) for name, values in drawn.items()}
    requests = _requests(rng, config)
    if not tree and config["max_total_num_tokens"] < config["context_length"] + 2 * page:
        requests = [{name: value for name, value in each.items() if name != "ignore_eos"} for each in requests]
    if not tree and rng.random() < 0.5:
        config["max_mamba_cache_size"] = seats + rng.randint(0, 2)
    return {"name": f"sg{number}", "config": config, "requests": requests}


def _requests(rng: random.Random, config: Line) -> list[Line]:
    """Return requests whose prompts share beginnings, go on with earlier ones and their outputs, or are new."""
    tokens, page = config["max_total_num_tokens"], config["page_size"]
    most, longest = tokens // 3, min(300, tokens - page - 1) if page > 1 else 300
    pace, gap = rng.choice([0, 1, 1, 6]), rng.choice([0, 0, 60])
    crowd, begin = rng.random() < 0.06, [_tokens(rng, rng.randint(10, 120)) for _ in range(4)]
    requests: list[Line] = []
    at = 0
    for i in range(rng.randint(135, 150) if crowd else rng.randint(6, 45)):
        prompt = rng.choice(begin)[: rng.randint(5, 120)] if rng.random() < 0.55 else []
        if requests and rng.random() < 0.2:
            earlier = rng.choice(requests)
            prompt = earlier["prompt"] + earlier["output"][: rng.randint(0, 40)]
        prompt = (prompt[:most] if rng.random() < 0.9 else prompt) + _tokens(rng, rng.choice([1, rng.randint(1, 80)]))
        new = rng.choice([1, 2, 12]) if crowd or rng.random() < 0.1 else rng.randint(1, 60)
        requests.append({"id": f"r{i:03}", "arrival_step": at, "prompt": prompt[:longest], "max_new_tokens": new})
        requests[-1]["output"] = _tokens(rng, new)
        _vary(rng, requests[-1], ranked=config["enable_priority_scheduling"] or rng.random() < 0.1)
        at += rng.randint(0, 2 * pace) + (gap if rng.random() < 0.05 else 0)
    return requests


def _vary(rng: random.Random, request: Line, *, ranked: bool) -> None:
    """Give a request an end before its limit, outputs to the limit, a cancellation, a priority, or none of them."""
    if rng.random() < 0.3:
        request["output"][-1] = STOP_TOKEN
        request["max_new_tokens"] += rng.randint(0, 60)
    elif rng.random() < 0.03:
        request["max_new_tokens"] = 0
    if rng.random() < 0.15:
        request["ignore_eos"] = True
    if rng.random() < 0.15:
        request["cancel_step"] = request["arrival_step"] + rng.choice([0, 1, 2, rng.randint(0, 80)])
    if ranked and rng.random() < 0.95:
        request["priority"] = rng.choice([0, 5, 12, 30])


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(STOP_TOKEN + 1, PLAIN["vocab_size"]) for _ in range(count)]
