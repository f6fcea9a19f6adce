"""A card's folder of engine tables, made up: every kernel takes a time in closed form."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

SIZES = (1, 16, 256, 4096)
WINDOW = 128
HEADS = ((32, 8), (32, 4), (16, 4), (16, 2), (8, 2), (4, 2))  # query heads, heads of keys and values


def gemm_ms(m: float, n: float, k: float) -> float:
    return 1e-3 + 1e-9 * m * n * k / 100


def decode_ms(rows: float, tokens: float, heads: float) -> float:
    return 2e-3 + 1e-8 * rows * tokens * heads


def prompt_ms(tokens: float) -> float:
    return 3e-3 + 1e-9 * tokens * (tokens + 1) / 2


def latent_ms(rows: float, tokens: float, heads: float) -> float:
    return 6e-3 + 1e-8 * rows * tokens * heads


def moe_ms(tokens: float, ranks: int) -> float:
    return 5e-3 + 1e-4 * tokens / ranks


def reduce_ms(elements: float, gpus: int, graph: bool) -> float:
    return (4e-3 if graph else 20e-3) + 1e-9 * elements * gpus


def gather_ms(elements: float) -> float:
    return 1e-2 + 1e-9 * elements


def conv_ms(tokens: float, heads: float) -> float:
    return 1e-3 + 1e-6 * tokens * heads


def state_ms(tokens: float, heads: float) -> float:
    return 2e-3 + 1e-5 * tokens * heads


def make_states(folder: Path, engine: str, slower: float = 1.0, rule: bool = True) -> None:
    """The kernels of a state with as many values as keys or four to a key, on GPUs with 4 and 8 heads of values."""
    columns = "kernel_source,phase,batch_size,seq_len,num_k_heads,head_k_dim,num_v_heads,head_v_dim,latency_ms"
    rows: list[Sequence[object]] = []
    for values, heads, n in product((1, 4), (4, 8), (1, 16, 256)):
        keys = heads // values
        one = ("generation", n, 1, keys, 128, heads, 128)
        rows.append(("causal_conv1d_update", *one, slower * conv_ms(n, heads)))
        rows += [("recurrent", *one, state_ms(n, heads)), ("slow", *one, 9.0)] if rule else []
        for length in (1, 64, 1024):
            many = ("context", n, length, keys, 128, heads, 128)
            rows.append(("causal_conv1d_fn", *many, slower * conv_ms(n * length, heads)))
            rows += [("chunk", *many, 3 * state_ms(n * length, heads))] if rule else []
    write(folder / f"gdn__{engine}.csv.gz", columns, rows)


def write(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    text = "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def make(folder: Path, engine: str = "vllm_0.1.0", slower: float = 1.0, launched_ms: float = 0.0) -> Path:
    """The folder, with the tables of one engine. Its products are so many times slower than gemm_ms; those of fp8_block
    take `launched_ms` at least.
    """
    folder.mkdir(parents=True, exist_ok=True)
    grid = product(("bfloat16", "fp8", "fp8_block"), SIZES, (64, 1024, 8192, 65536), (64, 1024, 8192, 65536))
    rows = (
        (dtype, m, n, k, max(slower * gemm_ms(m, n, k), launched_ms if dtype == "fp8_block" else 0.0))
        for dtype, m, n, k in grid
    )
    write(folder / f"gemm__{engine}.csv.gz", "gemm_dtype,m,n,k,latency_ms", rows)
    header = "batch_size,isl,num_heads,num_key_value_heads,attn_dtype,kv_cache_dtype,step,latency_ms"
    cells = list(product(HEADS, ("bfloat16", "fp8")))
    decodes = (
        (b, 1, q, kv, "bfloat16", dtype, s, decode_ms(b, 1 + s, q))
        for ((q, kv), dtype) in cells
        for b in (1, 64, 512)
        for s in (0, 1023, 16383)
    )
    write(folder / f"generation_attention__{engine}.csv.gz", header, decodes)
    prompts = (
        (b, n, q, kv, "bfloat16", dtype, 0, b * prompt_ms(n))
        for ((q, kv), dtype) in cells
        for b in (1, 4)
        for n in (1, 1024, 16384)
    )
    write(folder / f"context_attention__{engine}.csv.gz", header, prompts)
    heads(folder, engine)
    latents = [(q, 64 * ranks // q, dtype) for q, ranks, dtype in product((16, 32, 64), (1, 2), ("bfloat16", "fp8"))]
    header = "mla_dtype,kv_cache_dtype,num_heads,tp_size,batch_size,isl,step,latency_ms"
    for operation, work in (
        ("generation", product((1, 64), (1,), (0, 1023))),
        ("context", product((1,), (1, 4096), (0,))),
    ):
        points = list(work)
        rows = (
            ("bfloat16", dtype, q, tp, b, n, s, slower * latent_ms(b, n + s, q))
            for (q, tp, dtype), (b, n, s) in product(latents, points)
        )
        write(folder / f"{operation}_mla__{engine}.csv.gz", header, rows)
    header = (
        "moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,distribution,latency_ms"
    )
    shapes = product(("bfloat16", "fp8_block"), (1, 64, 8192), ((1, 1), (2, 1), (1, 2)), ("balanced", "power_law_1.01"))
    experts = ((d, n, 2048, 768, 8, 128, tp, ep, how, moe_ms(n, tp * ep)) for d, n, (tp, ep), how in shapes)
    write(folder / f"moe__{engine}.csv.gz", header, experts)
    reduces = (
        ("bfloat16", gpus, size, reduce_ms(size, gpus, way == "graph"), f"{engine.partition('_')[0]}_{way}")
        for gpus, size, way in product((2, 4), (128, 2**20, 2**26), ("graph", "eager"))
    )
    write(
        folder / f"custom_allreduce__{engine}.csv.gz",
        "allreduce_dtype,num_gpus,message_size,latency_ms,backend",
        reduces,
    )
    gathers = [("all_gather", "half", gpus, size, gather_ms(size)) for gpus, size in product((2, 4), (256, 2**27))]
    gathers += [("reduce_scatter", "half", gpus, size, 2 * ms) for _, _, gpus, size, ms in gathers]
    write(folder / "nccl__nccl_2.0.csv.gz", "op_name,nccl_dtype,num_gpus,message_size,latency_ms", gathers)
    return folder


def make_deepep(folder: Path, engine: str) -> None:
    """The exchange of tokens by DeepEP among the GPUs of a node, in microseconds."""
    start = (1, 2048), (8, 128)
    low = ((*start[0], n, *start[1], 10 + n, 20 + n) for n in (1, 128))
    header = "node_num,hidden_size,num_token,num_topk,num_experts"
    write(folder / f"wideep_deepep_ll__{engine}.csv.gz", f"{header},combine_avg_t_us,dispatch_avg_t_us", low)
    parts = "dispatch_sms,dispatch_transmit_us,dispatch_notify_us,combine_sms,combine_transmit_us,combine_notify_us"
    most = (
        (*start[0], n, *start[1], sms, 1000 / sms + n, 5, sms, 1000 / sms + n, 5) for n in (1, 8192) for sms in (8, 20)
    )
    write(folder / f"wideep_deepep_normal__{engine}.csv.gz", f"{header},{parts}", most)


def heads(folder: Path, engine: str, *, longest: int = 16384, slower: float = 1.0) -> None:
    """An engine's attention of heads of 64 with and without a window, up to sequences of so many tokens."""
    header = (
        "batch_size,isl,num_heads,num_key_value_heads,head_dim,window_size,attn_dtype,kv_cache_dtype,step,latency_ms"
    )
    kinds = [(64, window, q, kv, dtype) for window, (q, kv), dtype in product((0, WINDOW), HEADS, ("bfloat16", "fp8"))]
    lengths = [tokens for tokens in (1, 64, 1024, 16384) if tokens <= longest]
    decodes = (
        (b, 1, q, kv, width, window, "bfloat16", dtype, n - 1, slower * decode_ms(b, min(n, window or n), q))
        for (width, window, q, kv, dtype), b, n in product(kinds, (1, 64), lengths)
    )
    write(folder / f"generation_attention_heads__{engine}.csv.gz", header, decodes)
    prompts = (
        (1, n, q, kv, width, window, "bfloat16", dtype, 0, slower * windowed_ms(n, window))
        for (width, window, q, kv, dtype), n in product(kinds, lengths)
    )
    write(folder / f"context_attention_heads__{engine}.csv.gz", header, prompts)


def windowed_ms(tokens: int, window: int) -> float:
    pairs = sum(min(at, window or at) for at in range(1, tokens + 1))
    return 3e-3 + 1e-9 * pairs
