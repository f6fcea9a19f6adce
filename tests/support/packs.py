"""A tiny pack of profiles and workloads with a recorded case in it, written from closed forms.

Times of the tables are multilinear, so interpolating them is exact, and a test can compute a step's time by formula.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from cbsim.measured.recorded import case
from cbsim.measured.recorded.case import Case
from cbsim.measured.recorded.score import Replayed, replay
from cbsim.workload import vllm_bench

SENT = {"id": 0, "arrival_ns": 5.4, "input_toks": 50, "output_toks": 7, "prompt_block_runs": [[3, 1], [8, 2]]}
TIMES = {"queued_ts": 100.5, "scheduled_ts": 100.5, "first_token_ts": 101.0, "last_token_ts": 102.25}
SERVED: dict[str, Any] = {"request_id": "bench-0", "input_toks": 50, "output_toks": 7, **TIMES}
LAYERS, HIDDEN, BYTES = 2, 64, 2
EXPERTS, PER_TOKEN = 8, 2
BLOCK_BYTES = 16 * 2 * LAYERS * 2 * 16 * BYTES  # 16 tokens, keys and values, 2 heads of 16
GIB = 2**30
STARTED_S = 1000.0  # when the recorded engine's clock said so, its first request was queued
WIDTHS = {"hidden_size": HIDDEN, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512}
HEADS = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = {"model_type": "llama", "max_position_embeddings": 4096, "torch_dtype": "bfloat16", **WIDTHS, **HEADS}
MOE = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": 32}
SEQUENCE = {
    "prologue": ["embedding"],
    "pre_attn": ["layernorm", "qkv_proj", "attention"],
    "post_attn": ["o_proj", "layernorm"],
    "mlp_dense": ["gate_up_proj", "down_proj"],
    "mlp_moe": [],
    "head": ["final_layernorm", "lm_head", "sampler"],
}
DENSE_US = {  # layer: base, a token
    "embedding": (50.0, 0.5),
    "layernorm": (10.0, 0.25),
    "qkv_proj": (300.0, 2.0),
    "o_proj": (200.0, 1.0),
    "gate_up_proj": (500.0, 3.0),
    "down_proj": (400.0, 1.5),
    "final_layernorm": (20.0, 0.125),
}
HEAD_US = {"lm_head": (600.0, 4.0), "sampler": (100.0, 8.0)}  # layer: base, a row
TOKENS, ROWS = (1, 8, 64, 512), (1, 4, 16)
CHUNKS, CACHED, DECODES, CONTEXT = (0, 16, 64, 256), (0, 64, 256), (0, 1, 4, 16), (16, 64, 256)


def attention_us(prefill: float, cached: float, decodes: float, context: float) -> float:
    """Attention of one layer."""
    return 100 + 2 * prefill + prefill * cached / 64 + decodes * (3 + context / 16)


def moe_us(tokens: float, activated: float) -> float:
    """Experts of one layer on one GPU."""
    return 80 + 2 * tokens + 30 * activated


def table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def bundle(folder: Path, *, tensor: int = 1, moe: bool = False, skew: bool = False, share: float = 0.5) -> Path:
    """Tables in `folder`. With `skew`, rows wait for `share` of the way to a longest row of twice the mean context."""
    place = folder / f"tp{tensor}"
    order = SEQUENCE | ({"mlp_dense": [], "mlp_moe": ["moe"]} if moe else {})
    write(folder / "meta.yaml", {"architecture": "tiny", "skew_fit": {"enabled": skew}})
    write(folder / "arch" / "tiny.yaml", {"sequence": order})
    named = [(name, at, base + slope * at) for name, (base, slope) in DENSE_US.items() for at in TOKENS]
    table(place / "dense.csv", ("layer", "tokens", "time_us"), named)
    named = [(name, at, base + slope * at) for name, (base, slope) in HEAD_US.items() for at in ROWS]
    table(place / "per_sequence.csv", ("layer", "sequences", "time_us"), named)
    shots = [
        (chunk, cached if chunk else 0, decodes, context if decodes else 0)
        for chunk, cached, decodes, context in product(CHUNKS, CACHED, DECODES, CONTEXT)
        if chunk or decodes
    ]
    rows = [(*at, attention_us(*at)) for at in dict.fromkeys(shots)]
    table(place / "attention.csv", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"), rows)
    if moe:
        grid = product((1, 64, 512), (1, EXPERTS))
        table(place / "moe.csv", ("tokens", "activated_experts", "time_us"), [(*at, moe_us(*at)) for at in grid])
    if skew:
        header = ("n", "pc", "kp", "kv_big", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us")
        grid = product((2, 16), (64, 256))
        table(place / "skew.csv", header, [(n, 0, 0, big, big / 2, 100, 200, 100 + 100 * share) for n, big in grid])
    return folder


def write(path: Path, values: Any) -> None:
    """A JSON file; JSON is YAML, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1))


class Pack(NamedTuple):
    """A pack in `root`; what its case says lies in `folder`."""

    root: Path
    folder: Path

    @property
    def profile(self) -> Path:
        return self.root / "perf" / "RTX4090" / "me" / "Tiny" / "bf16"

    @property
    def workload(self) -> Path:
        return self.root / "workloads" / "tiny.lengths.jsonl"

    def edit(self, name: str, **changes: Any) -> None:
        """Fields, by dotted names with `__` for the dot, of a JSON file of the pack changed; None removes one."""
        path = self.root / name if (self.root / name).exists() else self.folder / name
        data = json.loads(path.read_text())
        for key, value in changes.items():
            *above, last = key.split("__")
            part = data
            for step in above:
                part = part[int(step)] if isinstance(part, list) else part.setdefault(step, {})
            if value is None:
                del part[last]
            else:
                part[last] = value
        write(path, data)

    def read(self, *overrides: str) -> Case:
        return case.read(self.folder, overrides=overrides)


def pack(
    root: Path, *, tensor: int = 1, ranks: int = 1, moe: bool = False, skew: bool = False, blocks: int | None = 120
) -> Pack:
    """A pack with a case of 40 requests, whose recorded times are placeholders. Without `blocks`, the size of the cache
    follows from a memory in which 120 fit.
    """
    made = Pack(root, root / "cases" / "tiny")
    bundle(made.profile, tensor=tensor, moe=moe, skew=skew)
    write(root / "model_config" / "Tiny.json", MODEL | (MOE if moe else {}))
    instance = {"model_name": "me/Tiny", "hardware": "RTX4090", "tp_size": tensor, "npu_mem": {"mem_util": 0.9}}
    config = {"link_bw": 16, "link_latency": 20000, "nodes": [{"instances": [instance] * ranks}]}
    write(made.folder / "config.json", config)
    engine = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "data_parallel_size": ranks}
    meta: dict[str, Any] = {"vllm_version": "0.19.0", "dataset_path": "workloads/tiny.jsonl", "engine_kwargs": engine}
    if moe:
        engine["enable_expert_parallel"] = True
    if blocks is not None:
        meta["kv_cache"] = {"num_gpu_blocks": blocks}
    write(made.folder / "meta.json", meta)
    if blocks is None:
        memory_for(made, 120)
    _requests(made, Random(5), 40)
    rows = [(f"{second}.0", 1, 0, 10.0) for second in range(1, 4)]
    table(made.folder / "timeseries.csv", ("t", "running", "waiting", "kv_cache_pct"), rows)
    return made


def memory_for(made: Pack, blocks: int) -> None:
    """Give the case's GPUs the memory in which that many blocks fit beside the weights, by the rule of the README."""
    config = json.loads((made.folder / "config.json").read_text())
    instances = config["nodes"][0]["instances"]
    tensor, ranks = instances[0]["tp_size"], len(instances)
    shape = json.loads((made.root / "model_config" / "Tiny.json").read_text())
    experts = shape.get("num_experts", 0)
    attention = 2 * HIDDEN * 16 * (4 + 2)
    one = 3 * HIDDEN * (shape["moe_intermediate_size"] if experts else shape["intermediate_size"])
    norms = 2 * HIDDEN + (2 * 16 if experts else 0)  # Qwen3's queries and keys have some, too
    shared = LAYERS * (attention + (HIDDEN * experts if experts else one) + norms) + HIDDEN + 2 * 512 * HIDDEN
    weights = (shared // tensor + LAYERS * one * experts // (tensor * ranks)) * BYTES
    needed = weights + (blocks + 0.5) * BLOCK_BYTES / tensor
    for instance in instances:
        instance["npu_mem"]["mem_size"] = needed / 0.9 / GIB
    write(made.folder / "config.json", config)


def _requests(made: Pack, random: Random, count: int) -> None:
    """Arrivals over two seconds; every third prompt begins as the one before it."""
    asked, taken, at_ns, fresh = [], [], 0, 0
    shared: list[list[int]] = []
    for i in range(count):
        prompt, outputs = random.randint(17, 120), random.randint(1, 40)
        full = prompt // 16
        runs = [[shared[0][0], 1]] if i % 3 == 2 and shared[0][1] else []
        rest = full - sum(length for _, length in runs)
        shared = [*runs, [fresh, rest]] if rest else runs
        fresh += rest
        asked.append(
            {"id": i, "arrival_ns": at_ns, "input_toks": prompt, "output_toks": outputs, "prompt_block_runs": shared}
        )
        queued = STARTED_S + at_ns / 1e9
        times = {"queued_ts": queued, "scheduled_ts": queued, "first_token_ts": queued + 1, "last_token_ts": queued + 2}
        taken.append({"request_id": f"bench-{i}", "input_toks": prompt, "output_toks": outputs, **times})
        at_ns += random.randint(0, 100_000_000)
    lines(made.workload, asked)
    lines(made.folder / "requests.jsonl", taken)


def lines(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(made: Pack) -> Replayed:
    """Let the simulator be the recorded engine: what it does of the case becomes the case's record.

    An engine takes a request in when it polls. Until those times are the arrivals, it does so again.
    """
    for _ in range(5):
        found = made.read()
        done = replay(found, found.scenario())
        _record(made, found, done)
        if [one.queued_ns for one in found.taken] == [round(at * 1e9) for at in done.served.queued_s]:
            return done
    raise AssertionError("the times at which requests are taken in do not settle")


def _record(made: Pack, found: Case, done: Replayed) -> None:
    served = done.served
    times = np.stack([served.queued_s, served.queued_s, served.first_token_s, served.last_token_s], axis=1) + STARTED_S
    lengths = [{"input_toks": row.prompt_tokens, "output_toks": row.output_tokens} for row in found.arrivals]
    rows = [dict(zip(vllm_bench.TIMES, row, strict=True)) for row in times.tolist()]
    named = zip(lengths, rows, strict=True)
    lines(made.folder / "requests.jsonl", [{"request_id": f"bench-{i}", **a, **b} for i, (a, b) in enumerate(named)])
    at = np.arange(1, 5, dtype=float)
    use = done.at(at, "used_blocks") * 100 / (done.total_blocks * len(done.steps))
    seconds = zip(at.tolist(), *(done.at(at, name).tolist() for name in ("running", "waiting")), use, strict=True)
    table(made.folder / "timeseries.csv", vllm_bench.SERIES, seconds)
