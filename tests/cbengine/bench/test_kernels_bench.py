"""Figures of device and kernels by size: right counts of bytes and operations, rows that attention takes, the parts."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engine's extra: pip install -e '.[engine]'")
import torch

from cbengine.bench import attention_bench, gemm_bench, kernels_bench, timing
from cbengine.bench.attention_bench import BATCH, BATCHES, CONTEXTS, PREFILLS, decode_case, prefill_case
from cbengine.bench.figures import Figure
from cbengine.bench.gemm_bench import Product, StepProducts
from cbengine.bench.timing import Ceilings
from cbengine.cli import parser
from cbengine.model.ops import TorchOps
from cbsim.scenario import shapes

MODEL = shapes.model("tiny")
BEST = Ceilings(bandwidth=100.0, rate=1000.0)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is computed once and takes a second."""
    monkeypatch.setattr(timing, "timed", lambda act, device="cuda": (act(), 1.0)[1])


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 16)] * 3, [(1, 40)] * 3, [(5, 5)], [(7, 28)], [(16, 32)], [(1, 3), (1, 70), (9, 50), (2, 2)]],
    ids=["decodes", "decodes across blocks", "prompt", "chunk", "whole blocks", "mixed"],
)
def test_rows_are_what_attention_takes(lengths: list[tuple[int, int]], block_tokens: int) -> None:
    """Positions go on where the cache ends, every query token has its own place, in the blocks of its row's table, and
    each block is named once.
    """
    rows, blocks = attention_bench.ragged(lengths, block_tokens, "cpu")
    assert rows.starts.tolist() == [0, *accumulate(tokens for tokens, _ in lengths)]
    assert rows.kv_tokens.tolist() == [cached for _, cached in lengths]
    assert rows.decodes == sum(tokens == 1 for tokens, _ in lengths)
    assert rows.longest == max((tokens for tokens, _ in lengths if tokens > 1), default=1)
    named = []
    for row, (tokens, cached) in enumerate(lengths):
        table, own = rows.tables[int(rows.slots[row])].tolist(), range(cached - tokens, cached)
        mine = slice(int(rows.starts[row]), int(rows.starts[row + 1]))
        assert rows.positions[mine].tolist() == list(own)
        assert rows.kv_places[mine].tolist() == [
            table[i // block_tokens] * block_tokens + i % block_tokens for i in own
        ]
        named += table[: -(-cached // block_tokens)]
    assert sorted(named) == list(range(blocks))


def test_operations_count_every_pair_once() -> None:
    """4 x heads x width FLOP a query-key pair: a chunk and the one before it have as many as the whole."""
    whole, first, second = (prefill_case(MODEL, *sizes, "cpu").flop for sizes in ((32, 0), (16, 0), (16, 16)))
    assert whole == first + second == 4 * MODEL.heads * MODEL.head_dim * 32 * 33 / 2


def test_a_decode_reads_keys_and_values_of_every_token() -> None:
    """Two bytes an element, whatever the blocks; copies of the cache fill the span."""
    case = decode_case(MODEL, 3, 40, "cpu", span=0)
    assert case.read_bytes == 2 * 3 * 40 * MODEL.kv_heads * MODEL.head_dim * 2
    assert case.answers(TorchOps()).shape == (3, MODEL.heads, MODEL.head_dim)
    assert len(case.cache) == 2
    assert len(decode_case(MODEL, 3, 40, "cpu", span=7 * case.read_bytes).cache) == 7
    assert case.seconds(TorchOps()) > 0


def test_attention_has_a_bar_where_there_is_enough_to_read() -> None:
    shares = [attention_bench.decode_share(context, 0.86).holds for context in (1024, 2048, 4096, 8192)]
    assert shares == [None, None, True, True]
    assert attention_bench.decode_share(8192, 0.84).holds is False


def test_figures_have_bars_where_the_sizes_are_those_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode at 32 requests with 4K and 8K, prefill at 8K; a cache that is too large is left out."""

    class Quick:
        read_bytes, flop = 90, 40.0

        def seconds(self, ops: TorchOps) -> float:
            return 1.0

    monkeypatch.setattr(attention_bench, "decode_case", lambda *_: Quick())
    monkeypatch.setattr(attention_bench, "prefill_case", lambda *_: Quick())
    monkeypatch.setattr(attention_bench, "MOST_BYTES", BATCH * 8192 * 2 * MODEL.kv_bytes_per_token // MODEL.layers)
    found = list(attention_bench.decodes(TorchOps(), MODEL, 100.0, BATCHES, CONTEXTS, "cpu"))
    assert [f.name.split(",")[1:3] for f in found if f.holds] == [[" 32 requests", " 4"], [" 32 requests", " 8"]]
    assert not any("256 requests, 8,192" in f.name or "128 requests, 32,768" in f.name for f in found)
    found = list(attention_bench.prefills(TorchOps(), MODEL, 100.0, PREFILLS, "cpu"))
    assert [(f.name.split(",")[1], f.holds) for f in found if f.bar] == [(" 8", False)]


# -- matrix products --------------------------------------------------------------------------------------------------


def test_the_matrices_are_those_that_the_model_multiplies_by() -> None:
    """Shapes and numbers, from a model made of weights; its head is the embedding where they are tied."""
    from cbengine.model.architecture import from_shape
    from cbengine.model.decoder import Model
    from cbengine.model.weights import expected

    architecture = from_shape(MODEL)
    model = Model(
        architecture, {name: torch.zeros(shape) for name, shape in expected(architecture).items()}, TorchOps(), 8
    )
    layer = model.layers[0]
    held = {name: tuple(getattr(layer, name).shape) for name in ("qkv", "o", "gate_up", "down")}
    held["head"] = tuple(model.head.shape)
    found = gemm_bench.matrices(MODEL)
    assert {matrix.name: (matrix.outputs, matrix.inputs) for matrix in found} == held
    assert [matrix.times for matrix in found] == [len(model.layers)] * 4 + [1]


def test_a_mixture_of_experts_is_refused() -> None:
    mixture = MODEL.model_copy(update={"experts": 4, "experts_per_token": 2})
    with pytest.raises(ValueError, match=r"model\.experts: got 4"):
        gemm_bench.matrices(mixture)


@pytest.mark.usefixtures("second")
def test_a_product_counts_weight_input_and_output_once() -> None:
    """Copies of a weight take turns, and the time is that of one."""
    matrix = gemm_bench.Matrix("o", outputs=8, inputs=4, times=2)
    found = gemm_bench.product(matrix, [torch.randn(8, 4).bfloat16() for _ in range(4)], 3, BEST)
    assert (found.bytes, found.flop, found.seconds) == (2 * (8 * 4 + 3 * 4 + 3 * 8), 2 * 3 * 8 * 4, 0.25)
    assert (found.of_copy, found.of_rate) == (found.bytes / 0.25 / 100, found.flop / 0.25 / 1000)


@pytest.mark.usefixtures("second")
def test_a_step_is_its_layers_and_one_output_layer() -> None:
    """Of a prefill one row is sampled: its output layer is that of one row."""
    found = list(gemm_bench.table(MODEL, BEST, "cpu", decodes=(1, 4), prefills=(8,), span=0))
    names = ["qkv", "o", "gate_up", "down", "head", "step"]
    said = [(one.rows, one.matrix if isinstance(one, Product) else "step") for one in found]
    assert said == [
        *((1, name) for name in names),
        *((4, name) for name in names),
        *((8, n) for n in names if n != "head"),
    ]
    one, four, prompt = (step for step in found if isinstance(step, StepProducts))
    assert (one.seconds, four.head_rows, prompt.head_rows) == ((4 * MODEL.layers + 1) / 2, 4, 1)
    products = {(p.rows, p.matrix): p for p in found if isinstance(p, Product)}
    layers = sum(products[8, name].bytes for name in names[:4]) * MODEL.layers
    assert prompt.bytes == layers + products[1, "head"].bytes
    assert prompt.of_copy == prompt.bytes / prompt.seconds / 100
    assert "GEMMs of a step" in str(prompt)
    assert "of the copy" in str(found[0])


def test_products_stop_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(gemm_bench.table(MODEL, BEST, "cpu", decodes=(1, 4), prefills=(8,), span=0, budget_s=0)) == []
    assert capsys.readouterr().err == "GEMMs, rows: no time left for 1, 4, 8\n"


# -- the parts --------------------------------------------------------------------------------------------------------


def test_host_copies_are_timed_both_ways() -> None:
    """Latency of a few bytes, bandwidth of many."""
    found = list(kernels_bench.host_copies("cpu", 1 << 16))
    assert [figure.unit for figure in found] == ["us", "GB/s", "us", "GB/s"]
    assert all(figure.value > 0 for figure in found)


def test_parts_come_in_their_order_and_ceilings_are_measured_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file a part. A part that fails leaves the others alone."""
    measured = []
    monkeypatch.setattr(timing, "ceilings", lambda device: measured.append(device) or BEST)
    monkeypatch.setattr(kernels_bench, "host_copies", lambda device: iter([Figure("host", 1.0, "us")]))
    monkeypatch.setattr(gemm_bench, "table", lambda model, best, device, **_: iter([Figure("gemm", best.rate, "x")]))
    monkeypatch.setattr(kernels_bench, "groups", lambda *given, real=kernels_bench.groups: real(*given, "cpu"))

    def broken(*_: object) -> None:
        raise RuntimeError("no kernels")

    monkeypatch.setattr(kernels_bench.build, "ops", broken)
    assert kernels_bench.bench(("attention", "gemms", "copies"), MODEL, tmp_path, quick=False, as_json=False) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["host", "device", "matrix", "gemm"]
    assert err == "failed: attention: RuntimeError: no kernels\n"
    assert measured == ["cpu"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copies.jsonl", "gemms.jsonl"]
    assert json.loads((tmp_path / "gemms.jsonl").read_text().splitlines()[0])["value"] == BEST.rate


@pytest.mark.parametrize("words", [["--kernels"], ["--only", "gemms"], ["--model", "tiny"]])
def test_without_a_gpu_it_says_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parser.main(["speed", *words, "--device", "modelled"]) == 2
    assert "--only, --kernels, --model: need --device cuda" in capsys.readouterr().err
