"""Random workloads of transformers, over all options that our rules have."""

from __future__ import annotations

from math import lcm
from random import Random

from cbsim.live.original import Line

FULL, SLIDING = "full_attention", "sliding_attention"
PATTERNS = (
    [SLIDING, FULL],
    [SLIDING, SLIDING, FULL],
    [SLIDING, SLIDING, FULL] * 2,
    [SLIDING],
    [SLIDING, SLIDING],
    [SLIDING] * 3 + [FULL] * 2,
    [SLIDING] * 5 + [FULL],
)


def draw(rng: Random, number: int) -> Line:
    """Return a workload: shared prefixes, samples, stop tokens, windows, a host, tiny caches, cancellations.

    On some inputs the original fails, and they are not drawn: a cancellation in flight with shared blocks in async
    mode, one beside samples that wait.
    """
    size, mode = rng.choice([4, 5, 8, 16]), rng.choice(["sync", "async"])
    model = _model(rng, size)
    requests = _requests(rng, size, rng.choice([512, 64, 8, 3]), samples=rng.choice([0.0, 0.0, 0.1, 0.6]))
    most = max(-(-(len(r["prompt"]) + r["max_new_tokens"] + 2) // size) for r in requests) + 1
    if model.get("layer_types") and FULL not in model["layer_types"]:
        most = min(most, -(-model["sliding_window"] // size) + 2)
    most *= len(model.get("layer_types", "1"))
    cb = {
        "block_size": size,
        "num_blocks": most + rng.choice([0, 1, 3, 12, most]),
        "max_batch_tokens": rng.choice([8, 16, 48, 200]),
        "scheduler_type": rng.choice(["fifo", "prefill_first"]),
        "allow_block_sharing": rng.random() < 0.7,
        "max_blocks_per_request": 0 if "layer_types" in model else rng.choice([0, 2, 64]),
    }
    if rng.random() < 0.4:
        cb["safety_margin"] = rng.choice([0.0, 0.1, 0.3, 0.6, 1.0])
    if rng.random() < 0.4:
        cb["max_requests_per_batch"] = rng.randint(1, 6)
    if rng.random() < 0.3:
        cb["cpu_offload_space"] = (rng.choice([1, 3, 10, 3 * most]) + 0.5) * _sector_bytes(model, size) / (1 << 30)
    workload = {"name": f"live{number}", "mode": mode, "model": model, "eos_token_id": 1, "cb": cb}
    if rng.random() < 0.3 and (mode == "sync" or not cb["allow_block_sharing"]):
        steps = sorted(rng.sample(range(1, 30), rng.randint(1, 4)))
        workload["cancels"] = [{"step": step, "id": rng.choice(requests)["id"]} for step in steps]
    return workload | {"requests": requests}


def _model(rng: Random, size: int) -> Line:
    """Return the model: usually of full attention, or so small that several blocks are a sector, or with windows."""
    kind = rng.choice(["full", "full", "small", "windows"])
    if kind == "small":
        return {"hidden_size": 4, "num_hidden_layers": rng.choice([1, 2, 3])}
    if kind == "windows":
        window = rng.choice([3, size, size + 3, 3 * size, 4 * size - 1, 6 * size])
        return {"layer_types": rng.choice(PATTERNS), "sliding_window": window}
    return {}


def _requests(rng: Random, size: int, vocab: int, samples: float) -> list[Line]:
    texts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 6 * size))] for _ in range(3)]
    step, requests = 0, []
    for i in range(rng.randint(2, 18)):
        begin = rng.choice(texts)[: rng.randint(1, 6 * size)] if rng.random() < 0.6 else []
        prompt = [*begin, *(rng.randrange(vocab) for _ in range(rng.randint(0, 3 * size)))]
        request: Line = {"id": f"r{i}", "prompt": prompt or [2], "max_new_tokens": rng.randint(1, 4 * size)}
        request["arrival_step"] = step
        if rng.random() < 0.3:
            request["eos_after"] = rng.randint(1, request["max_new_tokens"])
        if rng.random() < samples:
            request["num_children"] = rng.randint(1, 4)
        requests.append(request)
        step += rng.choice([0, 0, 1, 2, 6])
    return requests


def _sector_bytes(model: Line, size: int) -> int:
    """Return the bytes of a sector: whole blocks of every kind of layers, of float32 keys and values, in 128 bytes."""
    types = model.get("layer_types") or [FULL] * model.get("num_hidden_layers", 2)
    head = model.get("hidden_size", 32) // 2
    return lcm(*(types.count(kind) * 2 * head * 4 * size for kind in set(types)), 128)
