"""Our policy, and our sizes of a cache, against the transformers that is installed: workloads that no trace has
recorded, and layers with windows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest

from cbsim.conformance.check import compare
from cbsim.conformance.transformers_traces import TOKEN_BYTES, Line
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.transformers.settings import FIFO, GIB, VERSIONS, TransformersSettings, layer_groups, resolve


def installed() -> str:
    """The version of transformers, if its rules are ours; skips the test with the reason otherwise."""
    for package in ("transformers", "torch"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    version: str = import_module("transformers").__version__
    if version.rpartition(".")[0] not in VERSIONS:
        pytest.skip(f"transformers {version} is installed, our rules are those of {', '.join(VERSIONS)}")
    return version


def workload(seed: int) -> Line:
    """A small random workload: shared prefixes, chunks, stop tokens, pressure or cancellations.

    The original breaks on some inputs; they are not drawn. A request that needs all blocks fails everything; a
    cancellation in flight fails with block sharing in async mode, and can block admission for ever after a soft reset.
    """
    rng = random.Random(seed)
    size, mode = rng.choice([4, 8, 16]), rng.choice(["sync", "async"])
    cancels, vocab = seed % 4 == 3, rng.choice([512, 8, 3])
    bases = [[rng.randrange(vocab) for _ in range(size * rng.randint(1, 3))] for _ in range(2)]
    step, requests = 0, []
    for i in range(rng.randint(4, 14)):
        requests.append(_request(rng, i, step, size, vocab, bases))
        step += rng.choice([0, 0, 1, rng.randint(0, 12)])
    most = max((len(r["prompt"]) + r["max_new_tokens"] + 1) // size + 2 for r in requests)
    cb = {
        "block_size": size,
        "num_blocks": most * (len(requests) + 1) if cancels else most + rng.randint(0, most),
        "max_batch_tokens": rng.choice([size, 2 * size + 1, 64]),
        "scheduler_type": rng.choice(["fifo", "prefill_first"]),
        "allow_block_sharing": rng.random() < 0.7 and not (cancels and mode == "async"),
        "max_blocks_per_request": rng.choice([0, 2, 32]),
        "safety_margin": rng.choice([0.0, 0.1, 0.3]),
        "max_requests_per_batch": rng.choice([2, 4, 64]),
    }
    drawn = {"name": f"live{seed}", "mode": mode, "model": {"vocab_size": vocab}, "cb": cb, "requests": requests}
    steps = sorted(rng.sample(range(1, 30), 4)) if cancels else []
    drawn["cancels"] = [{"step": at, "id": rng.choice(requests)["id"]} for at in steps]
    return drawn | {"eos_token_id": 1}


def further(seed: int) -> Line:
    """As `workload`, with further samples of some requests, and perhaps a host of a few blocks. Nobody is cancelled."""
    drawn, rng = workload(4 * seed), random.Random(f"further {seed}")
    for request in drawn["requests"]:
        request["num_children"] = rng.choice([0, 0, 1, 3])
    blocks, cb = rng.choice([0, 3, 10, 200]), drawn["cb"]
    cb["cpu_offload_space"] = blocks * cb["block_size"] * TOKEN_BYTES / GIB
    return drawn | {"name": f"further{seed}"}


def tiny(seed: int) -> Line:
    """As `further`, of a model so small that several blocks are a sector: 16 bytes a token of KV."""
    drawn, rng = further(seed), random.Random(f"tiny {seed}")
    drawn["model"] |= {"layers": 1, "head_dim": 2}
    drawn["cb"]["cpu_offload_space"] /= TOKEN_BYTES // 16
    drawn["cb"]["block_size"] += rng.choice([0, 1, 2, 3])
    return drawn | {"name": f"tiny{seed}"}


def _request(rng: random.Random, index: int, step: int, size: int, vocab: int, bases: list[list[int]]) -> Line:
    tail = [rng.randrange(vocab) for _ in range(rng.choice([0, 0, 1, rng.randint(0, 2 * size)]))]
    prompt = [*rng.choice([*bases, []]), *tail] or [0]
    new = rng.randint(1, 3 * size)
    request = {"id": f"r{index}", "prompt": prompt, "max_new_tokens": new, "arrival_step": step}
    return request | ({"eos_after": rng.randint(1, new)} if rng.random() < 0.3 else {})


@pytest.mark.parametrize(
    "drawn",
    [*map(workload, range(40)), *map(further, range(40)), *map(tiny, range(40))],
    ids=lambda drawn: drawn["name"],
)
def test_the_real_scheduler_decides_the_same(
    drawn: Line, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every pass of the installed scheduler, its events, free lists and tables, equals ours."""
    version = installed()
    record_property("transformers", version)
    print(f"transformers {version}")
    recorder = "live_transformers_523" if version.startswith("5.23.") else "live_transformers"
    record = import_module(f"support.{recorder}").record
    trace = tmp_path / f"{drawn['name']}.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in record(drawn)))
    (tmp_path / f"{drawn['name']}.json").write_text(json.dumps(drawn))
    result = compare(trace, invariants=True)
    assert (result.scheduler, result.version) == ("transformers", version)
    assert result.skipped is None
    assert str(result).endswith("ok"), f"{result}"
    assert result.matched == result.total > 4


# -- sizes -------------------------------------------------------------------------------------------------------------

PATTERNS = [
    ("full",),
    ("sliding 4096",),
    ("sliding 1024", "full"),
    ("full", "sliding 500", "sliding 500"),
    (*["sliding 512"] * 5, "full"),
]


@pytest.mark.parametrize("seed", range(60))
def test_caches_are_sized_alike(seed: int) -> None:
    """5.17: query tokens and blocks follow from free memory, groups of layers, and what the user has given."""
    if not installed().startswith("5.17."):
        pytest.skip("the equation is that of 5.17")
    rng = random.Random(seed)
    attention = rng.choice(PATTERNS)
    given = {"max_batch_tokens": rng.choice([None, None, 512, 4096]), "num_blocks": rng.choice([None, None, 700])}
    block, depth, fast = rng.choice([16, 32, 256]), rng.choice([1, 2]), rng.choice([0, 8, 32])
    model = shapes.model("llama-3.1-8b").model_copy(
        update={
            "attention": attention,
            "layers": len(attention) * rng.randint(1, 6),
            "heads": rng.choice([8, 32]),
            "kv_heads": rng.choice([1, 2, 8]),
            "vocab": rng.choice([512, 32_000, 128_256]),
        }
    )
    hardware = shapes.hardware("h100-sxm")
    free = hardware.memory_bytes - model.weight_bytes
    place = Place(model, hardware, depth, block, 0.9, given["num_blocks"])
    settings = TransformersSettings(name=FIFO, max_batch_tokens=given["max_batch_tokens"], max_blocks_per_request=fast)
    ours = resolve(settings, place)

    made = layer_groups(place, "5.17")
    library = import_module("transformers")
    config = library.LlamaConfig(
        hidden_size=model.hidden,
        head_dim=model.head_dim,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        vocab_size=model.vocab,
        num_hidden_layers=model.layers,
    )
    config._attn_implementation = "paged|flash_attention_2"
    batching = library.ContinuousBatchingConfig(
        block_size=block, use_async_batching=depth > 1, max_memory_percent=0.9, **given
    )
    batching.max_blocks_per_request = 0 if made.groups else fast
    cache = import_module("transformers.generation.continuous_batching.cache")
    kinds = ["sliding_attention" if group.ring else "full_attention" for group in made.groups] or ["full_attention"]
    handler = cache.PagedAttentionMemoryHandler
    with patch.object(handler, "get_available_memory", lambda _: int(free * 0.9)):
        solver = handler(config, batching, import_module("torch").bfloat16, kinds, made.layers)
        theirs = solver.infer_max_batch_tokens_and_num_blocks()
    assert (ours.max_batch_tokens, ours.num_blocks) == tuple(theirs), (seed, attention)


@pytest.mark.parametrize("attention", PATTERNS)
def test_layers_are_grouped_alike(attention: tuple[str, ...]) -> None:
    """5.17: groups of equal size, a kind's layers in their order."""
    if not installed().startswith("5.17."):
        pytest.skip("groups of one size are those of 5.17")
    model = shapes.model("llama-3.1-8b").model_copy(update={"attention": attention, "layers": 3 * len(attention)})
    made = layer_groups(Place(model, shapes.hardware("h100-sxm"), 1, 16, 0.9, None), "5.17")
    names = {"full": "full_attention", "sliding": "sliding_attention"}
    config = import_module("transformers").LlamaConfig(num_hidden_layers=model.layers)
    config.layer_types = [names[seen.split()[0]] for seen in attention] * 3
    cache = import_module("transformers.generation.continuous_batching.cache")
    theirs, _ = cache.group_layers_by_attn_type(config)
    groups = [list(group.layers) for group in made.groups] or [list(range(model.layers))]
    assert groups == theirs
