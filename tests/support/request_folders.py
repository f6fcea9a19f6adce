"""Request logs as tests make them, and kernel tables for the servers behind them."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path

from reports.fidelity.request_logs import log

Row = Sequence[object]
RUN = "openshift/exp-0/vllm-70b"
PAIR = "openshift/exp-2/vllm-70b-2replicas"
PRODUCTS = ((5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336), (64128, 8192))  # of Llama-3.1-70B on two GPUs
HEADS = "batch_size,isl,num_heads,num_key_value_heads,attn_dtype,kv_cache_dtype,step,latency_ms"
ATTENTION = "32,4,bfloat16,bfloat16"


def tables(data: Path) -> None:
    """Tables of a made-up A100: 40 us a product and 10 ns a token, next to nothing else."""
    folder = data / "public_measured" / "aiconfigurator" / "a100_sxm"
    folder.mkdir(parents=True)
    products = [f"bfloat16,{m},{n},{k},{0.04 + m * 1e-5}" for n, k in PRODUCTS for m in (1, 8192)]
    _table(folder, "gemm__vllm_0.14.0", "gemm_dtype,m,n,k,latency_ms", products)
    prompts = [f"1,{isl},{ATTENTION},0,{isl * 1e-6}" for isl in (1, 8192)]
    _table(folder, "context_attention__vllm_0.14.0", HEADS, prompts)
    rows = [f"{batch},{isl},{ATTENTION},1,{batch * isl * 1e-8}" for batch in (1, 64) for isl in (1, 8192)]
    _table(folder, "generation_attention__vllm_0.14.0", HEADS, rows)
    _table(
        folder, "custom_allreduce__vllm_0.14.0", "num_gpus,message_size,latency_ms", ["2,8192,0.004", "2,4194304,0.04"]
    )
    gathers = [f"all_gather,half,2,{size},{size * 1e-9}" for size in (1024, 1 << 24)]
    _table(folder, "nccl__nccl_2.27.3", "op_name,nccl_dtype,num_gpus,message_size,latency_ms", gathers)


def _table(folder: Path, name: str, header: str, rows: Iterable[str]) -> None:
    with gzip.open(folder / f"{name}.csv.gz", "wt") as file:
        file.write("\n".join([header, *rows]) + "\n")


def folder(place: Path, rows: Iterable[Row], starts: Iterable[Row] = ()) -> Path:
    """A folder of logs. `rows` have the columns of requests.csv.gz, `starts` those of sharegpt_prefix.csv."""
    place.mkdir(parents=True, exist_ok=True)
    with gzip.open(place / log.REQUESTS, "wt") as file:
        file.write(lines(log.COLUMNS, rows))
    (place / log.PREFIXES).write_text(lines(log.PREFIX_COLUMNS, starts))
    return place


def lines(header: Sequence[str], rows: Iterable[Row]) -> str:
    return "".join(",".join(map(str, row)) + "\n" for row in (header, *rows))
