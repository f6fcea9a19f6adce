"""The workloads on which simulated and measured runs are compared. No probe of the calibration contains them.

A case is a list of changes to its device's base scenario. The same kinds of workload exist for a GPU, with real models,
and for a CPU with a tiny one; the modelled device uses the GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbengine.errors import UsageError


@dataclass(frozen=True, slots=True)
class SuiteCase:
    """A workload. `injected_ms` of CPU work are added to the phase `prepare` of every step. `load`: requests arrive at
    random, at this share of the synchronous loop's capacity. `curve`: the case is a point on the curve of the
    asynchronous loop's gain over the injected work.
    """

    name: str
    group: str
    about: str
    overrides: tuple[str, ...] = ()
    injected_ms: float = 0.0
    load: float | None = None
    curve: str | None = None


SLOTS = "scheduler.max_num_seqs={}".format
CHUNK = "scheduler.max_num_batched_tokens={}".format
BLOCKS = "kv_cache.num_blocks={}".format
REQUESTS = "workload.requests={}".format
FIFO = "scheduler={{name: transformers_fifo, max_requests_per_batch: {}, max_batch_tokens: {}}}".format
SMALL = "model=llama-3.2-1b"
PREDICTED_MS = (0.5, 1, 1.5, 3, 4, 6, 7, 8, 9)  # simulated only: a curve may turn between measured points


def _load(share: float, *overrides: str, prefix: str = "", group: str = "load") -> SuiteCase:
    about = f"mixed lengths, random arrivals at {share:.0%} of the synchronous capacity"
    return SuiteCase(f"{prefix}load-{share * 100:.0f}", group, about, overrides, load=share)


def _cpu(curve: str, *overrides: str, prefix: str = "", group: str = "cpu") -> list[SuiteCase]:
    return [
        SuiteCase(f"{prefix}cpu-{ms}", group, f"{curve}, {ms} ms of CPU work a step", overrides, ms, curve=curve)
        for ms in (0, 2, 5, 10)
    ]


def _workload(requests: int, prompt: str, output: str, more: str = "") -> str:
    return f"workload={{kind: synthetic, requests: {requests}, prompt_tokens: {prompt}, output_tokens: {output}{more}}}"


def _uniform(low: int, high: int) -> str:
    return f"{{uniform: {{low: {low}, high: {high}}}}}"


def _gpu() -> list[SuiteCase]:
    published = "scheduler={name: transformers_fifo, max_blocks_per_request: 34, max_batch_tokens: 8192}"
    decoding, short, seats = _workload(32, "16", "8192"), _workload(32, "64", "512"), SLOTS(32)
    long = _workload(48, _uniform(1024, 8000), _uniform(16, 128))
    prefix = _workload(96, _uniform(2176, 4096), _uniform(16, 128), ", shared_prefix_tokens: 2048")
    few, many = (_workload(32, _uniform(64, 1024), _uniform(32, 256)), _workload(384, _uniform(16, 512), "256"))
    return [
        SuiteCase("8k_b32", "reference", "the published comparison: batch 32, 8K tokens", (decoding, published)),
        *(_load(share) for share in (0.6, 0.85, 1.0)),
        _load(0.85, FIFO(64, 2048), prefix="transformers-"),
        *(
            SuiteCase(f"chunk-{size}", "chunk", f"prompts of 1K to 8K in chunks of {size}", (long, seats, CHUNK(size)))
            for size in (512, 2048, 8192)
        ),
        SuiteCase("preemptions", "memory", "a cache for a third of the seats: vLLM preempts", (BLOCKS(1000),)),
        SuiteCase("soft-resets", "memory", "the same for transformers, which resets", (FIFO(64, 2048), BLOCKS(64))),
        SuiteCase("prefix-shared", "prefix", "2,048 tokens of every prompt are the same", (prefix,)),
        SuiteCase("batch-8", "batch", "8 seats", (few, SLOTS(8))),
        SuiteCase("batch-256", "batch", "256 seats", (many, SLOTS(256))),
        *_cpu("8B, batch 32", short, seats),
        *_cpu("1B, batch 32", short, seats, SMALL, prefix="1b-", group="1b"),
        _load(0.85, SMALL, prefix="1b-", group="1b"),
    ]


def _tiny() -> list[SuiteCase]:
    mixed, room, fifo = REQUESTS(64), BLOCKS(512), FIFO(16, 128)
    long, short = _workload(32, _uniform(48, 240), _uniform(8, 32)), _workload(16, "8", "96")
    prefix = _workload(48, _uniform(96, 160), _uniform(8, 32), ", shared_prefix_tokens: 80")
    return [
        SuiteCase("long-b16", "reference", "a batch of 16 that only decodes", (_workload(16, "8", "256"), room)),
        *(_load(share, mixed) for share in (0.6, 0.85, 1.0)),
        _load(0.85, mixed, fifo, prefix="transformers-"),
        *(
            SuiteCase(f"chunk-{size}", "chunk", f"prompts of 48 to 240 in chunks of {size}", (long, room, CHUNK(size)))
            for size in (32, 64, 128)
        ),
        SuiteCase("preemptions", "memory", "a cache for a third of the seats: vLLM preempts", (mixed, BLOCKS(40))),
        SuiteCase("soft-resets", "memory", "the same for transformers, which resets", (mixed, fifo, BLOCKS(40))),
        SuiteCase("prefix-shared", "prefix", "80 tokens of every prompt are the same", (prefix, room)),
        SuiteCase("batch-2", "batch", "2 seats", (REQUESTS(16), SLOTS(2))),
        SuiteCase("batch-32", "batch", "32 seats", (mixed, SLOTS(32), room)),
        *_cpu("tiny, batch 16", short, room),
    ]


def base(device: str) -> str:
    """Return the scenario that a device's cases change."""
    return "tiny_cpu" if device == "process" else "validation"


def cases(device: str) -> dict[str, SuiteCase]:
    """Return a device's workloads by name, in the order in which they are run."""
    return {case.name: case for case in (_tiny() if device == "process" else _gpu())}


def chosen(names: Sequence[str], device: str) -> list[SuiteCase]:
    """Return the cases of these names and groups, by default all. Raises UsageError for a name that is neither."""
    known = cases(device)
    groups = dict.fromkeys(case.group for case in known.values())
    for name in names:
        if name not in known and name not in groups:
            known_names = f"a group ({', '.join(groups)}) or a workload of --device {device} ({', '.join(known)})"
            raise UsageError(f"case {name!r}: expected {known_names}")
    return [case for case in known.values() if not names or {case.name, case.group} & set(names)]
