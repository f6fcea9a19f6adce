"""Tables of engines: a step is the sum of its kernels as measured and of its terms; what is missing is told."""

from __future__ import annotations

import gzip
import re
from itertools import product
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import engine_folder
from support.engine_folder import (
    WINDOW,
    decode_ms,
    gather_ms,
    gemm_ms,
    latent_ms,
    moe_ms,
    prompt_ms,
    reduce_ms,
    windowed_ms,
)
from support.plans import plan as a_plan

from cbsim.cost import engine_files, engine_tables
from cbsim.cost.engine_cost import Captured, EngineCost, captured, elementwise_bytes, fused_bytes
from cbsim.cost.engine_tables import EngineTables, Products, Share
from cbsim.cost.table import Attention, attention_work
from cbsim.errors import ScenarioError
from cbsim.policy.groups import FULL, Sight
from cbsim.policy.groups import Attention as Sliding
from cbsim.runs import assemble
from cbsim.scenario import catalog, scenario, shapes
from cbsim.scenario.costs import TableSettings

LLAMA = shapes.model("llama-3.1-8b")
EXPERTS = shapes.model("qwen3-30b-a3b")
LATENT = shapes.Latent(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
ENGINE = "vllm_0.1.0"
NS = 1e6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return engine_folder.make(tmp_path / "card")


def test_products_of_a_layer_are_those_of_a_gpus_share(folder: Path) -> None:
    """QKV, output, gate with up, down; a GPU of two has half of each. Times are linear in n k here, so that
    interpolation on a logarithmic scale is off by what it has to be off: between neighbours, never outside them."""
    tables = EngineTables(folder, ENGINE, LLAMA, Share(2))
    shapes_ = [(3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)]
    exact = 32 * sum(gemm_ms(256, n, k) for n, k in shapes_)
    assert tables.linear_ns(256) / NS == pytest.approx(exact, rel=0.35)
    assert tables.linear_ns(4096) > 10 * tables.linear_ns(256)


def test_what_was_measured_comes_back(folder: Path) -> None:
    tables = EngineTables(folder, ENGINE, LLAMA.model_copy(update={"hidden": 1024, "vocab": 8192}), Share())
    assert tables.head_ns(256) / NS == pytest.approx(gemm_ms(256, 8192, 1024))
    assert tables.attended[0].decode_ns(64, 1024) / NS == pytest.approx(32 * decode_ms(64, 1024, 32))
    assert tables.attended[0].prompt_ns(Attention(1024, 0, 0, 0, 0)) / NS == pytest.approx(32 * prompt_ms(1024))
    assert tables.reduce_ns(64, graph=True) == 0.0


def test_times_that_obey_a_power_law_come_back_at_every_shape() -> None:
    """In the grid or beyond it, with products of m n k 1e-6 ms."""
    grid = product((1, 8, 64), (32, 64, 256, 1024), (32, 64, 128))
    products = products_of({(m, n, k): m * n * k * 1e-6 for m, n, k in grid})
    for m, n, k in product((1, 5, 64, 1000), (40, 256, 5000), (32, 96, 200)):
        assert products.curve(n, k)(m) == pytest.approx(m * n * k * 1e-6)
    with pytest.raises(ScenarioError, match="gemm: no rows with n = 32 and k = 64, which the model's shape needs"):
        products_of({(1, 32, 32): 1.0, (1, 64, 64): 1.0}).curve(32, 64)


def products_of(times: dict[tuple[int, int, int], float]) -> Products:
    return Products(Path("gemm"), np.array(list(times)), np.array(list(times.values())))


GRID = st.lists(st.integers(1, 5000), min_size=2, max_size=4, unique=True).map(sorted)
AT = st.integers(1, 8000)


@settings(max_examples=40)
@given(grid=st.tuples(GRID, GRID, GRID), at=st.tuples(AT, AT, AT), more=st.tuples(AT, AT, AT))
def test_a_larger_product_takes_no_less(
    grid: tuple[list[int], ...], at: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    """Where the measured times never fall with m, n and k, neither do those between and beyond them; and a time inside
    the grid lies between the measured corners around it, and on a point is that point's."""

    def measured(m: int, n: int, k: int) -> float:
        return 0.003 + 1e-9 * m * n * k + 1e-5 * n

    products = products_of({(m, n, k): measured(m, n, k) for m, n, k in product(*grid)})
    m, n, k = at
    time, larger = products.curve(n, k)(m), products.curve(n + more[1], k + more[2])(m + more[0])
    assert time <= larger * (1 + 1e-12)
    inside = [min(max(x, axis[0]), axis[-1]) for x, axis in zip(at, grid, strict=True)]
    low = [max(a for a in axis if a <= x) for x, axis in zip(inside, grid, strict=True)]
    high = [min(a for a in axis if a >= x) for x, axis in zip(inside, grid, strict=True)]
    between = products.curve(inside[1], inside[2])(inside[0])
    assert measured(*low) * (1 - 1e-12) <= between <= measured(*high) * (1 + 1e-12)
    assert products.curve(low[1], low[2])(low[0]) == measured(*low)


def test_a_chunk_is_the_rest_of_its_prompt(folder: Path) -> None:
    """Linear in query-key pairs. A chunk of 300 behind 700 takes what 1,000 take above 700. By that two tokens behind
    two would take nearly nothing, but no chunk takes less than without a cache, or than a row that reads as much."""
    tables = EngineTables(folder, ENGINE, LLAMA, Share())

    def ms(prefill: int, cached: int = 0) -> float:
        return tables.attended[0].prompt_ns(Attention(prefill, cached, 0, 0, 0)) / NS / 32

    for tokens in (1, 100, 500, 2000):
        assert ms(tokens) == pytest.approx(prompt_ms(tokens))
    assert ms(6000, 10000) == pytest.approx(prompt_ms(16000) - prompt_ms(10000))
    assert ms(2, 2) == pytest.approx(prompt_ms(2))
    assert ms(2, 12000) == pytest.approx(decode_ms(1, 12002, 32))


@pytest.mark.parametrize(
    ("gpu", "decode_s", "prompt_ms"), [("h100", (93, 99.5), (182, 186)), ("h200", (69, 74.5), (180, 190))]
)
def test_sums_are_those_of_whole_runs(gpu: str, decode_s: tuple[float, float], prompt_ms: tuple[float, float]) -> None:
    """What a row means, checked by known sums over the layers: 8,192 steps of 32 requests take 97 to 99 s on an H100
    and 69 to 74 s on an H200, an 8K prefill 183 ms on an H100; products of 32 rows that take more than larger ones are
    read as these, 5 s less. A row counted for all heads, layers or GPUs, or per request, would be off by factors."""
    try:
        card = catalog.tables(f"public_measured/aiconfigurator/{gpu}_sxm")
    except ScenarioError as error:
        pytest.skip(f"no kernel tables: {error}")
    tables = EngineTables(card, "vllm_0.24.0", LLAMA, Share(), fastest=False)
    attention = sum(tables.attended[0].decode_ns(32, 17 + step) for step in range(0, 8192, 16)) * 16
    assert decode_s[0] < (attention + 8192 * (tables.linear_ns(32) + tables.head_ns(32))) / 1e9 < decode_s[1]
    prompt = tables.linear_ns(8192) + tables.attended[0].prompt_ns(Attention(8192, 0, 0, 0, 0))
    assert prompt_ms[0] < prompt / NS < prompt_ms[1]


def test_an_all_reduce_is_of_the_residual_stream_and_cheaper_in_a_graph(folder: Path) -> None:
    tables = EngineTables(folder, ENGINE, LLAMA, Share(2))
    for graph in (True, False):
        assert tables.reduce_ns(256, graph=graph) / NS == pytest.approx(reduce_ms(2**20, 2, graph))


def test_heads_that_were_not_measured_lie_between(folder: Path) -> None:
    """Of 6 query heads with 2 of keys and values, 4 and 8 were measured: half-way. Of 12 with 4, no fewer were."""
    six = LLAMA.model_copy(update={"heads": 6, "kv_heads": 2})
    half = EngineTables(folder, ENGINE, six, Share())
    assert half.attended[0].decode_ns(64, 1024) / NS == pytest.approx(32 * decode_ms(64, 1024, 6))
    with pytest.raises(
        ScenarioError, match=r"generation_attention.*no rows of 12 heads where .*heads = 4 \(found: 16, 32\)"
    ):
        EngineTables(folder, ENGINE, LLAMA.model_copy(update={"heads": 12, "kv_heads": 4}), Share())


def test_the_head_gathers_its_shares(folder: Path) -> None:
    model = LLAMA.model_copy(update={"hidden": 1024, "vocab": 16384})
    tables = EngineTables(folder, ENGINE, model, Share(2))
    assert tables.head_ns(16) / NS == pytest.approx(gemm_ms(16, 8192, 1024) + gather_ms(16 * 16384))


def test_an_outlier_of_attention_does_not_stand_for_its_neighbours(folder: Path) -> None:
    """64 rows over 1,024 tokens, measured as a second: no longer than 512 rows over as many, which stay as they are."""
    path = folder / f"generation_attention__{ENGINE}.csv.gz"
    point, text = "64,1,32,8,bfloat16,bfloat16,1023", gzip.decompress(path.read_bytes()).decode()
    line = f"{point},{decode_ms(64, 1024, 32)}\n"
    assert line in text
    path.write_bytes(gzip.compress(text.replace(line, f"{point},1000\n").encode()))
    tables = EngineTables(folder, ENGINE, LLAMA, Share())
    for rows in (64, 512):
        assert tables.attended[0].decode_ns(rows, 1024) / NS == pytest.approx(32 * decode_ms(512, 1024, 32))


def windowed(**change: object) -> shapes.ModelShape:
    """Heads of 64, a layer with a window after each that sees everything."""
    return LLAMA.model_copy(update={"head_dim": 64, "attention": ("full", f"sliding {WINDOW}"), **change})


def test_layers_with_windows_take_what_their_windows_hold(folder: Path) -> None:
    """Half of the layers each. Rows beyond the window take what rows at its end take; prompts go by the pairs in it."""
    full, sliding = EngineTables(folder, ENGINE, windowed(), Share()).attended
    assert (full.sees, sliding.sees) == (FULL, Sliding(Sight.SLIDING, WINDOW))
    plan = a_plan(64, 64 * 1023, ())
    for of, reads in ((full, 1024), (sliding, WINDOW)):
        work = attention_work(plan, of.sees)
        assert of.decode_ns(work.decodes, work.context + 1) / NS == pytest.approx(16 * decode_ms(64, reads, 32))
        prompt = of.prompt_ns(attention_work(a_plan(0, 0, ((0, 1024),)), of.sees)) / NS
        assert prompt == pytest.approx(16 * windowed_ms(1024, of.sees.span))


def test_rows_that_do_not_reach_a_windows_end_are_left_to_another_version(folder: Path) -> None:
    """... of the same engine, before other engines; a table of the version's own comes first where it has the rows."""
    engine_folder.make(folder, "vllm_0.3.0")
    engine_folder.heads(folder, "vllm_0.3.0", longest=64)
    engine_folder.heads(folder, "vllm_0.6.0", slower=6)
    engine_folder.heads(folder, "sglang_0.3.0", slower=9)
    (folder / f"generation_attention_heads__{ENGINE}.csv.gz").unlink()
    full, sliding = EngineTables(folder, "vllm_0.3.0", windowed(), Share()).attended
    assert full.decode_ns(64, 64) / NS == pytest.approx(16 * decode_ms(64, 64, 32))
    assert sliding.decode_ns(64, WINDOW) / NS == pytest.approx(6 * 16 * decode_ms(64, WINDOW, 32))
    for engine in ("vllm_0.6.0", "vllm_0.3.0"):
        (folder / f"generation_attention_heads__{engine}.csv.gz").unlink()
    _, sliding = EngineTables(folder, "vllm_0.3.0", windowed(), Share()).attended
    assert sliding.decode_ns(64, WINDOW) / NS == pytest.approx(9 * 16 * decode_ms(64, WINDOW, 32))


def test_latent_attention_is_the_fastest_engines_by_the_heads_of_a_gpu(folder: Path) -> None:
    """128 heads on 4 GPUs are 32 on each, whatever number of ranks the table names; 24 lie between. Of an engine's own
    tables alone, its own count."""
    engine_folder.make(folder, "vllm_0.2.0", slower=3.0)
    for heads, tensor, own in ((128, 4, 32), (24, 1, 24)):
        model = LLAMA.model_copy(update={"heads": heads, "kv_heads": 1, "head_dim": 576, "latent": LATENT})
        (of,) = EngineTables(folder, "vllm_0.2.0", model, Share(tensor)).attended
        assert of.decode_ns(64, 1024) / NS == pytest.approx(32 * latent_ms(64, 1024, own))
        assert of.prompt_ns(Attention(4096, 0, 0, 0, 0)) / NS == pytest.approx(32 * latent_ms(1, 4096, own))
        (of,) = EngineTables(folder, "vllm_0.2.0", model, Share(tensor), fastest=False).attended
        assert of.decode_ns(64, 1024) / NS == pytest.approx(3 * 32 * latent_ms(64, 1024, own))


GLM = shapes.model("glm-5")
DENSE = {"experts": 0, "experts_per_token": 0, "shared_intermediate": 0, "first_dense": 0, "dense_intermediate": 0}
GLM_DENSE = GLM.model_copy(update=DENSE | {"intermediate": 12288})
COLUMNS = "architecture,gemm_type,kv_cache_dtype,num_heads,batch_size,isl,step"
OF_GLM = ("GlmMoeDsaForCausalLM", "bfloat16", "bfloat16", 16)


def sparse_ms(tokens: float, context: float) -> float:
    """A layer's sparse attention with its products; the indexer reads all of the context, the rest 2,048 of it."""
    return 0.05 + 1e-3 * tokens + 2e-7 * tokens * min(context, 2048) + 1e-8 * tokens * context


def sparse(folder: Path, engine: str = "sglang_0.5.14", slower: float = 1.0) -> Path:
    """Modules of GLM-5: decoding rows in a graph, but for 128 of them; prompts of 0.8 ms of launches at least. Long
    contexts were measured with few rows only. Half the time is that of layers which take another's tokens.
    """
    engine_folder.make(folder, engine)
    names = ("dsa_generation_module", "dsa_context_module")
    decodes = [(b, 1, s, sparse_ms(b, s + 1)) for b in (1, 8, 64) for s in (1, 2047, 8191) if b * s < 2e5]
    decodes += [(128, 1, 1, 1.4), (128, 1, 2047, 1.4)]
    chunks = [(b, n, s) for b in (1, 4) for n in (64, 2048, 8192) for s in (0, 8192) if b * n <= 8192]
    prompts = [(b, n, s, max(0.8, sparse_ms(b * n, s + (n + 1) / 2))) for b, n, s in chunks]
    for name, cells in zip(names, (decodes, prompts), strict=True):
        rows = [(*OF_GLM, b, n, s, name, slower * ms) for b, n, s, ms in cells]
        rows += [(*OF_GLM, b, n, s, f"{name}_skip_indexer", slower * ms / 2) for b, n, s, ms in cells]
        engine_folder.write(folder / f"{name}__{engine}.csv.gz", f"{COLUMNS},op_name,latency_ms", rows)
    return folder


def test_sparse_attention_is_a_module_with_its_products(tmp_path: Path) -> None:
    """Of decoding rows and of chunks by tokens and their mean context. The products of attention are not counted again,
    and neither are the bytes between them: what is left are feed-forward layers and two residuals and norms.
    """
    model, tables = GLM_DENSE, EngineTables(sparse(tmp_path / "card"), "sglang_0.5.14", GLM_DENSE, Share(4))
    (of,) = tables.attended
    assert of.decode_ns(8, 2048) / NS == pytest.approx(78 * sparse_ms(8, 2048))
    assert tables.linear_ns(16) / NS == pytest.approx(
        78 * (gemm_ms(16, 6144, 6144) + gemm_ms(16, 6144, 3072)),
        rel=0.12,  # interpolated
    )
    between = elementwise_bytes(model, 4, modules=True)
    assert between == 78 * 2 * (8 * 6144 + 3 * 3072)
    assert elementwise_bytes(model, 4) - between == 78 * (2 * 2 * (64 * 64 / 4 + 576) + 2 * 576 + 132)
    fields = {"kind": "table", "path": "t", "engine": "sglang_0.5.14", "tensor_parallel": 4, "elementwise": 1.0}
    times = dict.fromkeys(("step_s", "layer_s", "row_s", "reduce_s"), 0.0)
    settings = TableSettings.model_validate(fields | times | {"decode_attention": 1.0})
    cost = EngineCost(tables, settings, model, bytes_ns=4000.0, captured=Captured(256))
    for plan, tokens, attention in (
        (a_plan(8, 8 * 2047), 8, sparse_ms(8, 2048)),
        (a_plan(0, 0, ((0, 8192),)), 8192, sparse_ms(8192, 4096.5)),
        (a_plan(0, 0, ((8192, 2048),) * 4), 8192, sparse_ms(8192, 8192 + 1024.5)),
        (a_plan(0, 0, ((0, 2048),)), 2048, sparse_ms(2048, 1024.5)),
        (a_plan(8, 8 * 2047, ((0, 8192),)), 8200, sparse_ms(8, 2048) + sparse_ms(8192, 4096.5)),
    ):
        graph, rows = tokens <= 256, plan.work.rows
        others = tables.linear_ns(tokens) + tables.head_ns(rows) + tokens * between / 4000
        others += (2 * 78 + 1) * tables.reduce_ns(tokens, graph=graph)
        assert cost.gpu_ns(plan, tokens)[1] - others == pytest.approx(78 * NS * attention, rel=1e-6)


def test_launches_of_a_sparse_module_are_not_paid_in_a_graph(tmp_path: Path) -> None:
    """128 decoding rows outside a graph take twice what 64 do; a chunk of 64 tokens takes the launches, in a graph that
    of 64 rows. Contexts beyond those measured add with the rows what they add to fewer.
    """
    (of,) = EngineTables(sparse(tmp_path / "card"), "sglang_0.5.14", GLM_DENSE, Share(4)).attended
    assert of.decode_ns(128, 2048) == pytest.approx(2 * of.decode_ns(64, 2048))
    longer = of.decode_ns(64, 8192) - of.decode_ns(64, 2048)
    assert longer == pytest.approx(8 * (of.decode_ns(8, 8192) - of.decode_ns(8, 2048)))
    work = Attention(64, 0, 0, 0, 0)
    assert of.prompt_ns(work, 64) == pytest.approx(78 * 0.8 * NS)
    assert of.prompt_ns(work, 64, graph=True) == of.decode_ns(64, 32.5)


def test_sparse_attention_of_another_version_and_of_widths_without_tables(tmp_path: Path) -> None:
    """A table whose rows are all of layers with an indexer has no op_name. Decoding rows are those of the version,
    prompts those of the newest.
    """
    folder = sparse(tmp_path / "card")
    engine_folder.make(folder, "sglang_0.5.10")
    rows = [(*OF_GLM, b, 1, s, 3 * sparse_ms(b, s + 1)) for b in (1, 8, 64) for s in (1, 2047)]
    engine_folder.write(folder / "dsa_generation_module__sglang_0.5.10.csv.gz", f"{COLUMNS},latency_ms", rows)
    (of,) = EngineTables(folder, "sglang_0.5.10", GLM_DENSE, Share(4)).attended
    assert of.decode_ns(8, 2048) / NS == pytest.approx(78 * 3 * sparse_ms(8, 2048))
    assert of.prompt_ns(Attention(8192, 0, 0, 0, 0), 8192) / NS == pytest.approx(78 * sparse_ms(8192, 4096.5))
    latent = GLM.latent.model_copy(update={"kv_rank": 256})
    with pytest.raises(ScenarioError, match=r"no tables of sparse attention of widths \(2048, 256, 192, 64, 256, 32,"):
        EngineTables(folder, "sglang_0.5.14", GLM_DENSE.model_copy(update={"latent": latent}), Share(4))


def test_a_step_of_glm_5_by_the_rows_as_published() -> None:
    """SGLang 0.5.14 on 8 B200, weights and cache in fp8: 64 rows behind 2,048 tokens took 0.1113 ms a layer, and a
    prompt of 8,192 tokens 2.3463.
    """
    try:
        folder = catalog.tables("public_measured/aiconfigurator/b200_sxm")
    except ScenarioError as error:
        pytest.skip(f"published tables not present: {error}")
    (of,) = EngineTables(
        folder, "sglang_0.5.14", GLM.model_copy(update={"weights_dtype": "fp8_block", "kv_dtype": "fp8"}), Share(8)
    ).attended
    assert of.decode_ns(64, 2049) / NS == pytest.approx(78 * 0.1113)
    assert of.prompt_ns(Attention(8192, 0, 0, 0, 0), 8192) / NS == pytest.approx(78 * 2.3463, rel=0.003)


def test_experts_in_mxfp4_take_eight_bits_where_the_engine_has_such_rows(folder: Path) -> None:
    """Else 16; and a shape that the version lacks is that of another version, then of another engine."""
    header = "moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,distribution"
    model, times = EXPERTS.model_copy(update={"experts_dtype": "mxfp4"}), {}

    def write(engine: str, *rows: tuple[str, int, float]) -> None:
        known = [(dtype, 64, 2048, 768, 8, 128, tp, 1, "balanced", ms) for dtype, tp, ms in rows]
        engine_folder.write(folder / f"moe__{engine}.csv.gz", f"{header},latency_ms", known)

    write("sglang_0.5.0", ("w4a8_mxfp4_mxfp8", 1, 1.0), ("w4a16_mxfp4", 1, 2.0))
    write(ENGINE, ("w4a16_mxfp4", 1, 3.0))
    write("vllm_0.2.0", ("bfloat16", 1, 4.0), ("w4a16_mxfp4", 2, 5.0))
    for engine, tensor in (("sglang_0.5.0", 1), ("sglang_0.5.0", 2), (ENGINE, 1), (ENGINE, 2), ("vllm_0.2.0", 1)):
        times[engine, tensor] = EngineTables(folder, engine, model, Share(tensor)).experts_ns(64) / NS / 48
    assert list(times.values()) == [1.0, 5.0, 3.0, 5.0, 3.0]
    with pytest.raises(ScenarioError, match=r"moe__vllm_0\.2\.0.*: no rows with moe_tp_size = 4 \(found: 2\)"):
        EngineTables(folder, "vllm_0.2.0", model, Share(4))


POINT = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


@given(times=st.dictionaries(POINT, st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_what_is_read_never_falls_with_work_and_stays_where_it_did_not(
    times: dict[tuple[int, int, int], float],
) -> None:
    """The least of what was measured at as much or more, pair by pair; on grids that are not full, too."""
    read = engine_tables._no_slower_than_more(times)
    for at, ms in read.items():
        assert ms == min(time for other, time in times.items() if all(map(le, at, other)))
    assert engine_tables._no_slower_than_more(read) == read


def change(path: Path, *lines: tuple[str, float]) -> None:
    """Give rows of a table, by their values before the time, other times."""
    text = gzip.decompress(path.read_bytes()).decode()
    for line, ms in lines:
        text, found = re.subn(rf"(?m)^({re.escape(line)},)[^,\n]*", rf"\g<1>{ms}", text)
        assert found, line
    path.write_bytes(gzip.compress(text.encode()))


def test_a_product_or_an_all_reduce_between_faster_larger_ones_is_no_slower_than_these(folder: Path) -> None:
    """On a B200 fp8 products of 16 rows or fewer take 32 to 58 us between neighbours of 13 to 31; its all-reduce of 8
    takes 26 us, and 17 of twice as many elements."""
    model = LLAMA.model_copy(update={"hidden": 1024, "vocab": 8192})
    change(folder / f"gemm__{ENGINE}.csv.gz", ("bfloat16,16,8192,1024", 0.009), ("bfloat16,256,8192,1024", 0.005))
    change(folder / f"custom_allreduce__{ENGINE}.csv.gz", ("bfloat16,2,128", 0.026), ("bfloat16,2,1048576", 0.017))
    assert EngineTables(folder, ENGINE, model, Share()).head_ns(16) / NS == pytest.approx(0.005)
    assert EngineTables(folder, ENGINE, model, Share(2)).reduce_ns(0, graph=True) / NS == pytest.approx(0.017)


def test_a_row_that_other_versions_contradict_is_read_as_they_say(folder: Path) -> None:
    """An all-reduce of 9.5 us, and at all larger sizes no less, where two later versions take 3.6 and 5.4. A version
    that is slower as a whole is believed, and so is a single one that nothing contradicts."""
    sizes = (128, 1024, 2**14, 2**20, 2**26)
    header = "allreduce_dtype,num_gpus,message_size,latency_ms"

    def write(version: str, *microseconds: float) -> None:
        rows = [("bfloat16", 4, size, us / 1e3) for size, us in zip(sizes, microseconds, strict=True)]
        engine_folder.write(folder / f"custom_allreduce__trtllm_{version}.csv.gz", header, rows)

    def us(version: str, model: shapes.ModelShape) -> float:
        return EngineTables(folder, f"trtllm_{version}", model, Share(4)).reduce_ns(1, graph=True) / 1e3

    engine_folder.make(folder, "trtllm_1.2.0")
    model, next_size = LLAMA.model_copy(update={"hidden": 1024}), LLAMA.model_copy(update={"hidden": 2**14})
    write("1.2.0", 3.0, 9.5, 9.6, 12, 700)
    assert us("1.2.0", model) == pytest.approx(9.5)
    write("1.3.0", 3.0, 3.6, 8.0, 12, 700)
    write("1.4.0", 3.0, 5.4, 8.0, 12, 700)
    assert us("1.2.0", model) == pytest.approx(4.5)
    assert us("1.2.0", next_size) == pytest.approx(9.6)
    write("1.4.0", 30, 54, 80, 120, 7000)
    assert us("1.4.0", model) == pytest.approx(54, rel=0.3)


def test_a_version_faster_than_all_engines_is_no_witness(folder: Path) -> None:
    """TensorRT-LLM 1.2.0rc5 reads the caches of 128 rows on a B200 in 173 us, which its memory needs 279 for; SGLang,
    vLLM and version 1.3.0rc20 take 300."""
    header = "kv_cache_dtype,num_heads,num_key_value_heads,batch_size,isl,step,latency_ms"
    for engine, last_us in (("trtllm_1.2.0", 173), ("trtllm_1.3.0", 303), ("sglang_0.5.9", 301), ("vllm_0.24.0", 302)):
        times = [(batch, us) for batch, us in ((1, 8), (4, 12), (16, 43), (128, last_us))]
        rows = [("bfloat16", 32, 8, batch, 1, 4095, us / 1e3) for batch, us in times]
        engine_folder.write(folder / f"generation_attention__{engine}.csv.gz", header, rows)
    path, required = folder / "generation_attention__trtllm_1.3.0.csv.gz", {"num_heads": 32, "num_key_value_heads": 8}
    assert engine_tables._believed(path, ("batch_size",), required)[128.0,] == 0.3015


@pytest.mark.parametrize("share", [Share(2, 1), Share(2, 2)])
def test_experts_are_looked_up_at_the_gpus_share(folder: Path, share: Share) -> None:
    tables = EngineTables(folder, ENGINE, EXPERTS, share)
    assert tables.experts_ns(64) / NS == pytest.approx(48 * moe_ms(64, 2))


def test_the_fastest_of_the_cards_engines_counts_for_products(folder: Path) -> None:
    """Tables taken with the host launching each kernel are too slow: another engine's can only mend that."""
    engine_folder.make(folder, "vllm_0.2.0", slower=3.0)
    quick, slow = (EngineTables(folder, engine, LLAMA, Share()) for engine in (ENGINE, "vllm_0.2.0"))
    own = EngineTables(folder, "vllm_0.2.0", LLAMA, Share(), fastest=False)
    assert slow.linear_ns(16) == quick.linear_ns(16)
    assert own.linear_ns(16) == pytest.approx(3 * quick.linear_ns(16))


def test_fewer_bits_take_no_longer_than_sixteen(folder: Path) -> None:
    """Block-quantised products that the host launched take 0.2 ms whatever their size; in 16 bits they take what they
    are worth. Of an engine's own tables alone nothing is doubted."""
    engine_folder.make(folder, launched_ms=0.2)
    blocks = LLAMA.model_copy(update={"weights_dtype": "fp8_block"})
    wide, narrow, own = (
        EngineTables(folder, ENGINE, model, Share(), fastest=fastest)
        for model, fastest in ((LLAMA, True), (blocks, True), (blocks, False))
    )
    assert narrow.linear_ns(1) == wide.linear_ns(1)
    assert own.linear_ns(1) / NS > 32 * 4 * 0.199


def test_a_step_is_the_sum_of_its_kernels_and_terms(folder: Path) -> None:
    """The formula of the module, term by term, for 64 decoding rows and a chunk of 192 tokens on two GPUs; also for a
    step of just the captured size."""
    tables = EngineTables(folder, ENGINE, LLAMA, Share(2))
    times = {"step_s": 7e-6, "layer_s": 3e-7, "row_s": 2e-8, "reduce_s": 1e-6, "elementwise": 2.0}
    factors = {"decode_attention": 1.5, "products": 1.1, "large_products": 1.3, "tensor_parallel": 2}
    settings = TableSettings.model_validate({"kind": "table", "path": str(folder), "engine": ENGINE} | times | factors)
    plan = a_plan(64, 64 * 1023, ((0, 192),))
    cost = EngineCost(tables, settings, LLAMA, bytes_ns=4000.0, captured=Captured(512))
    reduces = 2 * 32 + 1
    for tokens in (256, 512):
        kernels = 1.1 * tables.linear_ns(tokens) + 1.5 * tables.attended[0].decode_ns(64, 1024)
        kernels += tables.attended[0].prompt_ns(Attention(192, 0, 0, 0, 0)) + tables.head_ns(65)
        kernels += reduces * tables.reduce_ns(tokens, graph=True)
        added = 7000 + 32 * 300 + 65 * 20 + reduces * 1000 + 2 * tokens * elementwise_bytes(LLAMA, 2) / 4000
        assert cost.gpu_ns(plan, tokens) == (0, pytest.approx(kernels + added, abs=1), 0)
    larger = cost.gpu_ns(plan, 4096)[1] - cost.gpu_ns(plan, 513)[1]
    eager = reduces * (tables.reduce_ns(4096, graph=False) - tables.reduce_ns(513, graph=False))
    bytes_ns = 2 * (4096 - 513) * elementwise_bytes(LLAMA, 2) / 4000
    assert larger == pytest.approx(1.3 * (tables.linear_ns(4096) - tables.linear_ns(513)) + eager + bytes_ns, abs=3)


@pytest.mark.parametrize(("rows", "chunk", "share"), [(64, 0, 37 / 512), (16, 0, 0), (16, 192, 37 / 128), (2, 192, 1)])
def test_attention_waits_for_the_longest_row(folder: Path, rows: int, chunk: int, share: float) -> None:
    """8 KV heads: from 28 rows on, or beside a chunk, each context is left to one multiprocessor, and the longest row
    adds a share of what all would take at its length. Without skew, and where rows are as long, nothing is added."""
    of = EngineTables(folder, ENGINE, LLAMA, Share()).attended[0]
    work = Attention(chunk, 0, rows, 1023, 4095)
    mean, longest = of.decode_ns(rows, 1024), of.decode_ns(rows, 4096)
    assert of.rows_ns(work, skew=True) == pytest.approx(mean + share * (longest - mean))
    assert of.rows_ns(work, skew=False) == of.rows_ns(work._replace(longest=1023), skew=True) == mean
    assert of._replace(kv=0).rows_ns(work, skew=True) == mean


def test_a_fused_all_reduce_norms_the_residual_of_small_messages(folder: Path) -> None:
    """Up to the limit the bytes of residual and norm are not paid: twice a layer, both are read and written. A token's
    message is 8,192 bytes."""
    tables = EngineTables(folder, ENGINE, LLAMA, Share(2))
    fields = {"kind": "table", "path": str(folder), "engine": ENGINE, "tensor_parallel": 2, "elementwise": 2.0}
    settings, seen = TableSettings.model_validate(fields), Captured(512)
    usual, fused = (
        EngineCost(tables, settings, LLAMA, bytes_ns=4000.0, captured=seen, fused_bytes=limit) for limit in (0, 2**20)
    )
    residual = elementwise_bytes(LLAMA, 2) - elementwise_bytes(LLAMA, 2, fused=True)
    assert residual == 32 * 2 * 4 * 8192
    for tokens in (1, 128, 129):
        saved = usual.gpu_ns(a_plan(tokens, 0), tokens)[1] - fused.gpu_ns(a_plan(tokens, 0), tokens)[1]
        assert saved == pytest.approx(2 * tokens * residual / 4000 * (tokens <= 128), abs=1)


@pytest.mark.parametrize(
    ("card", "tensor", "more", "limit"),
    [
        ("h200-sxm", 1, {}, 0),
        ("h200-sxm", 4, {}, 2 * 2**20),
        ("h100-sxm", 8, {}, 2**19),
        ("b200", 8, {}, 2**20),
        ("b200", 8, {"fused_all_reduce_bytes": 8388608}, 8388608),
        ("b200", 4, {"engine": "trtllm"}, 8e6),
        ("b200", 2, {"fused_all_reduce": False}, 0),
    ],
)
def test_messages_are_fused_up_to_the_engines_limit(card: str, tensor: int, more: dict[str, Any], limit: float) -> None:
    """By card and GPUs, unless it is given; TensorRT-LLM's workspace is the same on all cards."""
    fields = {"kind": "table", "path": "x", "engine": "vllm", "tensor_parallel": tensor, "fused_all_reduce": True}
    settings = TableSettings.model_validate(fields | more)
    assert fused_bytes(scenario.load("worked_example", [f"hardware={card}"]), settings) == pytest.approx(
        limit, rel=1e-3
    )


def test_a_card_without_a_known_limit_needs_one() -> None:
    fields = {"kind": "table", "path": "x", "engine": "vllm", "tensor_parallel": 4, "fused_all_reduce": True}
    asked = scenario.load("worked_example", ["hardware=a100-80gb"])
    with pytest.raises(ScenarioError, match=r"cost\.fused_all_reduce_bytes: is required .* for 4 of NVIDIA A100"):
        fused_bytes(asked, TableSettings.model_validate(fields))


def test_decode_only_graphs_leave_steps_with_a_chunk_alone(folder: Path) -> None:
    """FULL_DECODE_ONLY: 64 decoding rows and a chunk of 192 tokens launch their all-reduces one by one, and take the
    factor of large products; a last token of a prompt is a row like any other."""
    graphs = "loop.cuda_graphs.vllm_cudagraph_mode=FULL_DECODE_ONLY"
    asked = scenario.load("worked_example", [graphs, "hardware=h100-sxm"])
    assert captured(asked) == Captured(512, decodes=True)
    tables = EngineTables(folder, ENGINE, LLAMA, Share(2))
    factors = {"large_products": 1.3, "tensor_parallel": 2}
    settings = TableSettings.model_validate({"kind": "table", "path": str(folder), "engine": ENGINE} | factors)
    whole, decodes = (
        EngineCost(tables, settings, LLAMA, bytes_ns=4000.0, captured=of) for of in (Captured(512), captured(asked))
    )
    mixed, rows = a_plan(64, 0, ((0, 192),)), a_plan(64, 0, ((191, 1),))
    longer = 0.3 * tables.linear_ns(256) + 65 * (tables.reduce_ns(256, graph=False) - tables.reduce_ns(256, graph=True))
    assert decodes.gpu_ns(mixed, 256)[1] - whole.gpu_ns(mixed, 256)[1] == pytest.approx(longer, abs=2)
    assert decodes.gpu_ns(rows, 72) == whole.gpu_ns(rows, 72)


def test_the_nearest_version_is_taken_and_said(folder: Path) -> None:
    for version in ("vllm_0.14.0", "vllm_0.24.0", "trtllm_1.2.0rc5"):
        engine_folder.make(folder, version)
    assert engine_files.nearest(folder, "vllm", "0.18.0") == "vllm_0.14.0"
    assert engine_files.nearest(folder, "vllm", "0.20.1") == "vllm_0.24.0"
    assert engine_files.nearest(folder, "vllm", None) == "vllm_0.24.0"
    assert engine_files.nearest(folder, "sglang", None) is None
    assert engine_files.meant(folder, "trtllm") == "trtllm_1.2.0rc5"
    with pytest.raises(ScenarioError, match=r"cost\.engine: got vllm_9\.9, expected one of .*vllm_0\.24\.0"):
        engine_files.meant(folder, "vllm_9.9")


@pytest.mark.parametrize(
    ("change", "share", "message"),
    [
        ({"head_dim": 96}, Share(), r"generation_attention_heads.*: no rows with head_dim = 96 \(found: 64\)"),
        ({"attention": ("sliding 128",)}, Share(), r"no rows with head_dim = 128 \(found: 64\)"),
        ({"head_dim": 64, "attention": ("sliding 99",)}, Share(), r"no rows with window_size = 99 \(found: 0, 128\)"),
        ({}, Share(3), r"cost\.tensor_parallel: got 3, must divide heads \(32\)"),
        ({}, Share(2, 2), r"cost\.expert_parallel: got 2, must be 1: Llama-3\.1-8B has no experts"),
        ({"weights_dtype": "int4"}, Share(), r"no products of int4_wo in the tables of vllm_0\.1\.0"),
        ({"kv_heads": 16}, Share(), r"num_key_value_heads = 16 \(found: 2, 4, 8\)"),
    ],
)
def test_what_no_table_holds_is_told(folder: Path, change: dict[str, object], share: Share, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        EngineTables(folder, ENGINE, LLAMA.model_copy(update=change), share)


def test_a_damaged_table_is_told_with_its_column(folder: Path) -> None:
    path = folder / f"gemm__{ENGINE}.csv.gz"
    engine_folder.write(path, "gemm_dtype,m,n,k,latency_ms", [("bfloat16", 1, 64, 64, "fast")])
    with pytest.raises(ScenarioError, match=r"gemm__vllm_0\.1\.0\.csv\.gz: latency_ms: holds what is no number"):
        EngineTables(folder, ENGINE, LLAMA, Share())
    for wrong in (0, -1, 1e308, "nan", "inf"):
        engine_folder.write(
            path, "gemm_dtype,m,n,k,latency_ms", [("bfloat16", 1, 64, 64, 1), ("bfloat16", 2, 64, 64, wrong)]
        )
        bound = re.escape(f"0.csv.gz:3: latency_ms: got {float(wrong):g}, must be > 0 and <= 3.6e+06, an hour")
        with pytest.raises(ScenarioError, match=bound):
            EngineTables(folder, ENGINE, LLAMA, Share())
    path.write_bytes(b"not a gzip file")
    with pytest.raises(ScenarioError, match=r"gemm__vllm_0\.1\.0\.csv\.gz: cannot be read"):
        EngineTables(folder, ENGINE, LLAMA, Share())


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ("engine: vllm", r"cost\.path: .*h100_sxm is of h100, but hardware\.name is 'NVIDIA H200 SXM 141GB'"),
        ("skew: true", r"cost\.engine: is required: .*h100_sxm holds tables of several engines"),
        ("engine: sglang", r"cost\.engine: got sglang, expected one of those that .*: vllm_0\.1\.0"),
    ],
)
def test_a_scenario_is_told_what_does_not_fit_its_tables(tmp_path: Path, cost: str, message: str) -> None:
    card = engine_folder.make(tmp_path / "h100_sxm")
    (card / "system.yaml").write_text("gpu: {}\n")
    gpu = "h200-sxm" if cost == "engine: vllm" else "h100-sxm"
    made = scenario.load("rates", [f"hardware={gpu}", f"cost={{kind: table, path: {card}, {cost}}}"])
    with pytest.raises(ScenarioError, match=message):
        assemble.cost_model(made)


def test_a_scheduler_that_caches_windows_whole_prices_them(folder: Path) -> None:
    """TensorRT-LLM counts its decode batch: the same steps on as many blocks, but layers with windows read less. What
    chunks hold a count does not say."""
    base = ["scheduler={name: trtllm}", "model=llama-3.1-8b", "model.head_dim=64", "loop={mode: async}"]
    base += [f"cost={{kind: table, path: {folder}, engine: {ENGINE}, decode_attention: 1}}"]
    seen = ("[full]", f"[full, sliding {WINDOW}]")
    whole, half = (scenario.load("rates", [*base, f"model.attention={each}"]) for each in seen)
    assert whole.options("async").num_blocks == half.options("async").num_blocks
    plan, (full, windows) = a_plan(64, 64 * 1023, ()), map(assemble.cost_model, (whole, half))
    saved = full.gpu_ns(plan, 64)[1] - windows.gpu_ns(plan, 64)[1]
    assert saved / NS == pytest.approx(16 * (decode_ms(64, 1024, 32) - decode_ms(64, WINDOW, 32)), abs=1e-5)
    with pytest.raises(ScenarioError, match=r"model\.attention: .*must be full or sliding with scheduler trtllm"):
        scenario.load("rates", [*base, f"model.attention=[full, chunked {WINDOW}]"])
    with pytest.raises(ScenarioError, match=r"model\.attention: .*must be full or linear with scheduler sglang"):
        scenario.load("rates", [*base, f"model.attention={seen[1]}", "scheduler={name: sglang}"])


def test_a_folder_without_tables_of_engines_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    made = scenario.load("rates", [f"cost={{kind: table, path: {tmp_path / 'empty'}, engine: vllm}}"])
    with pytest.raises(ScenarioError, match=r"cost\.engine: got vllm, but .*empty holds no tables of engines"):
        assemble.cost_model(made)


@pytest.mark.parametrize("path", ["kernels", "kernels/h100_sxm"])
def test_tables_as_csv_files_are_refused_with_what_to_use(tmp_path: Path, path: str) -> None:
    """A folder without a profile's meta.yaml, and the beginning of file names, which is no folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "h100_sxm_gemm_bf16.csv").write_text("m,n,k,latency_ms\n")
    made = scenario.load("rates", [f"cost={{kind: table, path: {tmp_path / path}}}"])
    with pytest.raises(ScenarioError, match=r"^cost\.path: .*kernels.*`python -m cbsim fetch-tables CARD`") as error:
        assemble.cost_model(made)
    assert "\n" not in str(error.value)
