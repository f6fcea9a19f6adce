"""Our policy against the transformers that is installed, on workloads that no trace has recorded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from cbsim.conformance.check import compare
from cbsim.conformance.transformers_traces import TOKEN_BYTES, Line
from cbsim.schedulers.transformers.settings import GIB, VERSIONS


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
