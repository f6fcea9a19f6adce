"""Random workloads of vLLM, over all options that our rules have."""

from __future__ import annotations

from random import Random

from cbsim.conformance.vllm_traces import grouping
from cbsim.kv.layer_groups import rules
from cbsim.live.original import Line
from cbsim.schedulers.vllm.settings import least_blocks
from cbsim.workload.scheduler_tests import STOP_TOKEN

TIMES = {
    "base_us": (3000, 5000),
    "per_token_us": (0, 5, 20),
    "per_kv_token_us": (0, 0, 1),
    "sched_us": (0, 700),
    "update_us": (0, 400),
    "empty_us": (1000,),
}
PLAIN: Line = {
    **dict.fromkeys(("block_size", "num_blocks", "kv_bytes", "max_model_len", "max_num_batched_tokens"), ...),
    "stop_when_done": ...,
    "max_num_seqs": 32,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "scheduler_reserve_full_isl": True,
    "policy": "fcfs",
    "timing": {name: times[0] for name, times in TIMES.items()},
}
KINDS = ("plain", "host", "hand_off", "samples", "layers", "states")
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")  # those that can hold pages of several sizes


def draw(rng: Random, number: int, *, old: bool) -> Line:
    """Return a workload: shared prefixes, tiny caches, stop tokens, cancellations at every moment, and in turn none, a
    connector to the host or another server, several samples, layer groups, states; of the `old` version none of these.
    """
    kind, longest = "plain" if old else KINDS[number % len(KINDS)], rng.choice([60, 200, 500])
    requests = rng.choice([_independent, _turns, _prefixes, _ladder])(rng, longest)
    most = max(len(r["prompt_token_ids"]) for r in requests) + 1
    most = max(most, longest + rng.choice([1, 1, 40]) if rng.random() < 0.9 else most)  # else some outputs are cut
    config = _config(rng, most, caches=kind == "host")
    if not old:
        options = {
            "watermark": rng.choice([0.02, 0.1, 0.3]),
            "prefill_schedule_interval": rng.choice([2, 3, 5]),
            "long_prefill_token_threshold_adaptive": True,
        }
        config |= {name: value for name, value in options.items() if rng.random() < 0.2}
    _cache(rng, config, kind)
    for i, request in enumerate(sorted(requests, key=lambda request: int(request["arrival_us"]))):
        request["id"] = f"r{i:02d}"
        _vary(rng, request, config)
        if kind == "samples" and rng.random() < 0.7:
            first = request.pop("output_token_ids")
            request["outputs"] = [first, *(_tokens(rng, len(first)) for _ in range(rng.randint(1, 5)))]
            for output in request["outputs"]:
                output[-1] = first[-1]  # perhaps a stop token
    if kind == "plain" and not old and rng.random() < 0.5:
        config["pipeline"] = rng.choice([2, 2, 3, 4])
    return {"name": f"{kind}{number}", "config": config, "requests": requests}


def _config(rng: Random, most: int, *, caches: bool) -> Line:
    """Return the options that every version has, for sequences of at most `most` tokens."""
    budget, chunks = rng.choice([16, 24, 64, 128, 512, 2048]), rng.random() < 0.9
    return {
        "block_size": rng.choice([4, 8, 16, 16, 32]),
        "max_model_len": most,
        "max_num_batched_tokens": budget if chunks else max(budget, most),
        "max_num_seqs": min(budget, rng.choice([1, 2, 5, 16, 64])),
        "enable_chunked_prefill": chunks,
        "enable_prefix_caching": caches or rng.random() < 0.8,
        "long_prefill_token_threshold": rng.choice([0, 0, 5, min(40, most)]),
        "scheduler_reserve_full_isl": rng.random() < 0.7,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "timing": {name: rng.choice(times) for name, times in TIMES.items()},
    }


def _cache(rng: Random, config: Line, kind: str) -> None:
    """Add a cache that is tiny or not, and what is beside it."""
    needed = -(-config["max_model_len"] // config["block_size"]) + 1
    if kind in ("layers", "states"):
        needed = _layers(rng, config) if kind == "layers" else _states(rng, config)
    blocks = config["num_blocks"] = needed + rng.choice([0, 1, 3, 10, needed])
    if kind in ("layers", "states") and rng.random() < 0.2:
        size = grouping(config).block_bytes
        config["kv_bytes"] = config.pop("num_blocks") * size + rng.choice([0, size - 1])
    if kind == "host" or (kind == "samples" and config["enable_prefix_caching"] and rng.random() < 0.3):
        config["connector"] = _host(rng, blocks)
        config["stop_when_done"] = config["connector"].get("lazy", False) or rng.random() < 0.2
    if kind == "hand_off":
        role = rng.choice(["kv_consumer", "kv_consumer", "kv_producer", "kv_both"])
        config["connector"] = {"kind": "pd", "role": role}


def _host(rng: Random, blocks: int) -> Line:
    """Return a connector that keeps KV on the host, in a tier from tiny to larger than the cache."""
    lasts = {"load_steps": rng.choice([0, 1, 3, 6]), "store_steps": rng.choice([0, 2, 7])}
    size = rng.choice([2, 8, blocks, 8 * blocks])
    if rng.random() < 0.5:
        return {"kind": "simple_cpu", "cpu_blocks": size, "lazy": rng.random() < 0.4, **lasts}
    chunks = {
        "cpu_chunks": size,
        "blocks_per_chunk": rng.choice([1, 1, 2]),
        "eviction_policy": rng.choice(["lru", "arc"]),
    }
    return {"kind": "offloading", **chunks, "extra": {"offload_prompt_only": rng.random() < 0.5}, **lasts}


def _layers(rng: Random, config: Line) -> int:
    """Add layers to a configuration, and what is said of them. Return the blocks that a server needs to start."""
    size, layout = config["block_size"], rng.choice(["", "", *LAYOUTS])
    layers = _pattern(rng, size)
    kinds = {layer["kind"] for layer in layers}
    if rng.random() < 0.3 and (layout.startswith("B") or "chunked" not in kinds):
        layers, size = _two_sizes(rng, layers, several=layout.startswith("B") and rng.random() < 0.5), 2 * size
    config["layers"] = [dict(layer) for layer in layers]
    config |= {"layout": layout} if layout else {}
    if rng.random() < 0.4 and "sliding" in kinds:
        config["retention"] = rng.choice([None, size, 2 * size, 4 * size])
    elif rng.random() < 0.2 and "full" in kinds and len({str(layer) for layer in layers}) < 3:
        config["disable_hybrid"] = True
    return least_blocks(grouping(config).groups, 2 * config["max_num_batched_tokens"], config["max_model_len"]) + 1


def _states(rng: Random, config: Line) -> int:
    """Add layers of which some keep a state. Return the blocks that one request has at most, and the null block."""
    size = config["block_size"]
    full, near = {"kind": "full"}, {"kind": "sliding", "window": rng.choice([1, size + 3, 4 * size])}
    state, other = ({"kind": "linear", "state_bytes": rng.choice([64, 128, 128 * size])} for _ in range(2))
    alike = [[state, state, state, full], [full, state] * 3, [state] * 5 + [full] * 4, [state, full, full, state]]
    mixed = [[state, full, near], [state] * 3 + [full, near] * 2, [near, state], [state, other, full]]
    layers = rng.choice([*alike, *mixed, [state], [state] * 3])
    config["enable_chunked_prefill"] |= config["enable_prefix_caching"]
    exports = rng.random() < 0.4
    if near in layers and full in layers and not exports:
        config |= {"layout": layout} if (layout := rng.choice(["", "", *LAYOUTS])) else {}
        layers, size = _two_sizes(rng, layers, several=layout.startswith("B") and rng.random() < 0.5), 2 * size
    if config["enable_prefix_caching"]:
        config |= {"state_checkpoints": True} if exports else {}
        config["retention"] = rng.choice([0, 0, 0, None, size, 2 * size, 4 * size])
    config["layers"] = [dict(layer) for layer in layers]
    groups, in_flight, longest = grouping(config).groups, 2 * config["max_num_batched_tokens"], config["max_model_len"]
    bounds = rules(groups, retention=0, in_flight=in_flight, longest=longest)
    most = sum(rule.capped(longest) for rule in bounds)
    return max(most, least_blocks(groups, in_flight, longest)) + 1


def _pattern(rng: Random, size: int) -> list[Line]:
    """Return layers of one or several kinds, in blocks of `size` tokens."""
    full: Line = {"kind": "full"}
    near, far = ({"kind": "sliding", "window": rng.choice([1, size, size + 3, 4 * size - 1, 100])} for _ in range(2))
    chunked = {"kind": "chunked", "chunk": size * rng.choice([2, 4, 6])}
    alike = [[near], [full, near], [full, near, near], [near, near, near, full] * 2, [full] * 3 + [near]]
    return rng.choice(
        [*alike, [near] * 5 + [full] * 4, [full, near, far], [far, near], [full, chunked], [full, chunked, near]]
    )


def _two_sizes(rng: Random, layers: list[Line], *, several: bool) -> list[Line]:
    """Return the layers with pages of two sizes: those of one kind are half as large, or `several` within a kind."""
    if several:
        return [layer | {"kv_heads": 2 + layers[:i].count(layer) % 2 * 2} for i, layer in enumerate(layers)]
    halved = rng.choice(["full", "sliding"])
    return [layer | ({"kv_heads": 2} if layer["kind"] == halved else {}) for layer in layers]


def _vary(rng: Random, request: Line, config: Line) -> None:
    """Give a request a priority, a stop token or a cancellation, a transfer."""
    outputs, kind = request["output_token_ids"], config.get("connector", {}).get("role")
    if config["policy"] == "priority":
        request["priority"] = rng.randint(0, 2)
    chance = rng.random()
    if chance < 0.12:
        request |= {"stop": True, "max_tokens": len(outputs) + rng.randint(1, 20)}
        outputs[-1] = STOP_TOKEN
    elif chance < 0.22:
        request["abort_us"] = max(0, request["arrival_us"] + rng.choice([-3000, 0, 1, 4000, 20000, 60000, 200000]))
    if kind in ("kv_consumer", "kv_both") and rng.random() < 0.6:
        request |= {"kv": {"do_remote_prefill": True}, "recv_us": rng.randint(0, 80000)}
        if rng.random() < 0.15:
            request["fail_blocks"] = [rng.randint(0, 4)]
    elif kind in ("kv_producer", "kv_both") and rng.random() < 0.85:
        request |= {"kv": {"do_remote_decode": True}, "send_us": rng.randint(0, 120000)}


Texts = list[Line]


def _tokens(rng: Random, most: int) -> list[int]:
    return [rng.randrange(3, 9999) for _ in range(rng.randint(1, max(1, most)))]


def _request(arrival: float, prompt: list[int], output: list[int]) -> Line:
    return {"arrival_us": int(arrival), "prompt_token_ids": prompt, "output_token_ids": output}


def _independent(rng: Random, longest: int) -> Texts:
    gap, arrival, texts = rng.choice([0, 2000, 20000]), 0.0, []
    for _ in range(rng.randint(1, 20)):
        texts.append(_request(arrival, _tokens(rng, longest // 2), _tokens(rng, longest // 3)))
        arrival += rng.expovariate(1) * gap
    return texts


def _turns(rng: Random, longest: int) -> Texts:
    """Return sessions that begin alike; every turn extends the one before and its answer."""
    begin, texts = _tokens(rng, longest // 4), []
    for session in range(rng.randint(2, 7)):
        prompt, arrival = begin, session * rng.choice([1000, 60000])
        while len(prompt) < 3 * longest // 4 and rng.random() < 0.8:
            prompt, output = prompt + _tokens(rng, longest // 8), _tokens(rng, longest // 8)
            texts.append(_request(arrival, prompt, output))
            prompt, arrival = prompt + output, arrival + 8000 * len(output) + rng.choice([0, 20000])
    return texts or _independent(rng, longest)


def _prefixes(rng: Random, longest: int) -> Texts:
    """Return requests that begin with a part of one of two texts."""
    bases = [_tokens(rng, longest // 2) for _ in range(2)]
    return [
        _request(
            rng.randint(0, 200000),
            rng.choice(bases)[: rng.randint(1, longest // 2)] + _tokens(rng, longest // 6),
            _tokens(rng, longest // 4),
        )
        for _ in range(rng.randint(4, 20))
    ]


def _ladder(rng: Random, longest: int) -> Texts:
    """Return one text cut at many lengths, sometimes with another last token."""
    text, gap, texts = [*_tokens(rng, longest // 2), *_tokens(rng, longest // 4)], rng.choice([2000, 30000]), []
    for i in range(rng.randint(4, 18)):
        cut = text[: rng.randint(1, len(text))]
        texts.append(_request(i * gap, cut[:-1] + _tokens(rng, 1) if rng.random() < 0.4 else cut, _tokens(rng, 8)))
    return texts
