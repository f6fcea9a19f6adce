"""Figures of device and kernels by size: right counts of bytes and operations, and rows that attention takes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the engine's extra: pip install -e '.[engine]'")
import torch

from cbengine import cli, kernels_bench
from cbengine.ops import TorchOps
from cbsim import shapes

MODEL = shapes.model("tiny")


@pytest.mark.parametrize(("tokens", "cached"), [(5, 0), (7, 21), (16, 16)])
def test_a_chunk_is_what_attention_takes(tokens: int, cached: int) -> None:
    """Positions go on where the cache ends, every query token has its own place, in the blocks of the table."""
    table = torch.randperm(-(-(tokens + cached) // 16))
    rows = kernels_bench.chunk(table, tokens, cached)
    assert rows.positions.tolist() == list(range(cached, cached + tokens))
    assert int(rows.kv_tokens[0]) == tokens + cached
    assert (rows.decodes, rows.longest, rows.starts.tolist()) == (0, tokens, [0, tokens])
    assert rows.kv_places.tolist() == [int(table[at // 16]) * 16 + at % 16 for at in range(cached, cached + tokens)]


def test_operations_count_every_pair_once() -> None:
    """4 x heads x width FLOP a query-key pair: a chunk and the one before it have as many as the whole."""
    whole, seconds = kernels_bench.prefill_attention(TorchOps(), MODEL, 32, 0, "cpu")
    first, _ = kernels_bench.prefill_attention(TorchOps(), MODEL, 16, 0, "cpu")
    second, _ = kernels_bench.prefill_attention(TorchOps(), MODEL, 16, 16, "cpu")
    assert whole == first + second == 4 * MODEL.heads * MODEL.head_dim * 32 * 33 / 2
    assert seconds > 0


def test_figures_have_bars_where_the_sizes_are_those_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode at 32 requests with 4K and 8K, prefill at 8K; a cache that is too large is left out."""
    monkeypatch.setattr(kernels_bench.bench, "decode_attention", lambda *_: (90, 1.0))
    monkeypatch.setattr(kernels_bench, "prefill_attention", lambda *_: (40.0, 1.0))
    monkeypatch.setattr(kernels_bench, "MOST_BYTES", 32 * 8192 * 2 * MODEL.kv_bytes_per_token // MODEL.layers)
    grid = (kernels_bench.BATCHES, kernels_bench.CONTEXTS)
    found = list(kernels_bench.decodes(TorchOps(), MODEL, 100.0, *grid, "cpu"))
    assert [f.name.split(",")[1:3] for f in found if f.holds] == [[" 32 requests", " 4"], [" 32 requests", " 8"]]
    assert not any("256 requests, 8,192" in f.name or "128 requests, 32,768" in f.name for f in found)
    found = list(kernels_bench.prefills(TorchOps(), MODEL, 100.0, kernels_bench.PREFILLS, "cpu"))
    assert [(f.name.split(",")[1], f.holds) for f in found if f.bar] == [(" 8", False)]


def test_host_copies_are_timed_both_ways() -> None:
    """Latency of a few bytes, bandwidth of many."""
    found = list(kernels_bench.host_copies("cpu", 1 << 16))
    assert [figure.unit for figure in found] == ["us", "GB/s", "us", "GB/s"]
    assert all(figure.value > 0 for figure in found)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--kernels", "--device", "modelled"]) == 2
    assert "--kernels: needs --device cuda" in capsys.readouterr().err
