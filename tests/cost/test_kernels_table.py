"""Tables of single kernels: what is measured comes back, what lies between lies between, errors name a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbsim.cost.engine_cost import table_cost
from cbsim.cost.kernels import Kernels, read_products
from cbsim.cost.table import Attention
from cbsim.errors import ScenarioError
from cbsim.policy.plan import StepPlan, StepWork
from cbsim.scenario import catalog, shapes
from cbsim.scenario.costs import TableSettings
from cbsim.scenario.shapes import ModelShape

MS = 1e6  # nanoseconds
GEMM, GENERATION, CONTEXT = "gemm", "generation_attention", "context_attention"
HEADER = "batch_size,isl,step,num_heads,num_key_value_heads,head_dim,latency_ms"
LLAMA = shapes.model("llama-3.1-8b")
TINY = LLAMA.model_copy(
    update={"layers": 3, "hidden": 96, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 200, "vocab": 5000}
)


def write(folder: Path, kernel: str, header: str, rows: Iterable[tuple[float, ...]]) -> None:
    lines = [header, *(",".join(map(repr, row)) for row in rows)]
    (folder / f"gpu_{kernel}_bf16.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def gemm(folder: Path, time_ms: Callable[[int, int, int], float]) -> None:
    grid = product((1, 8, 64), (32, 64, 256, 1024), (32, 64, 128))
    write(folder, GEMM, "m,n,k,latency_ms", ((m, n, k, time_ms(m, n, k)) for m, n, k in grid))


def decode_ms(rows: float, tokens: float) -> float:
    return 0.01 + 1e-5 * rows * tokens


def prompt_ms(tokens: float) -> float:
    return 0.02 + 1e-6 * tokens * (tokens + 1) / 2


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A GPU whose product takes m n k 1e-6 ms, and whose attention is linear in what it reads; 4 / 2 heads of 32."""
    gemm(tmp_path, lambda m, n, k: m * n * k * 1e-6)
    rows = [(b, 1, s, 4, 2, 32, decode_ms(b, 1 + s)) for b in (1, 8, 64) for s in (0, 99, 999) if b * s < 20_000]
    write(tmp_path, GENERATION, HEADER, rows)
    prompts = [(1, n, 0, 4, 2, 32, prompt_ms(n)) for n in (1, 100, 1000)]
    elsewhere = [(1, 100, 50, 4, 2, 32, 9.0), (2, 100, 0, 4, 2, 32, 9.0), (1, 100, 0, 8, 2, 32, 9.0)]
    write(tmp_path, CONTEXT, HEADER, prompts + elsewhere)
    return tmp_path / "gpu"


def decoding(rows: int, context: float) -> Attention:
    return Attention(0, 0, rows, context, context)


def prefill(tokens: float, cached: float = 0) -> Attention:
    return Attention(tokens, cached, 0, 0, 0)


def ms(tables: Kernels, work: Attention) -> float:
    """Attention of one layer."""
    return tables.attention_ns(work, skew=True) / MS / TINY.layers


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_layer_is_four_products(place: Path) -> None:
    """Products that take m n k 1e-6 ms obey a power law, so that every shape, in the grid or beyond it, takes that:
    QKV 96 x (128 + 64 + 64), output 128 x 96, gate and up 96 x 400, down 200 x 96, three layers; head 96 x 5000, once.
    """
    tables = Kernels(place, 1, TINY)
    weights = 96 * 256 + 128 * 96 + 96 * 400 + 200 * 96
    for tokens in (1, 5, 64, 1000):
        assert tables.linear_ns(tokens) == pytest.approx(3 * tokens * weights, rel=1e-9)
        assert tables.head_ns(tokens) == pytest.approx(tokens * 96 * 5000, rel=1e-9)
    assert tables.head_ns(0) == 0.0
    assert tables.experts_ns(64, 2) == 0.0


def test_tensor_parallel_gpus_share_every_product(tmp_path: Path, place: Path) -> None:
    """Columns of QKV, gate, up and the head, rows of the other two: with times in proportion to n k, half of each. The
    heads a GPU has must have been measured: two of them with 2 / 1 here."""
    write(tmp_path, GENERATION, HEADER, [(1, 1, 9, 2, 1, 32, 0.5)])
    write(tmp_path, CONTEXT, HEADER, [(1, 9, 0, 2, 1, 32, 0.25)])
    half = Kernels(place, 2, TINY)
    weights = 96 * 128 + 64 * 96 + 96 * 200 + 100 * 96
    assert half.linear_ns(7) == pytest.approx(3 * 7 * weights, rel=1e-9)
    assert half.head_ns(7) == pytest.approx(7 * 96 * 2500, rel=1e-9)
    assert ms(half, decoding(1, 9)) == 0.5
    assert ms(half, prefill(9)) == 0.25


def test_a_decoding_row_attends_to_its_cache_and_itself(place: Path) -> None:
    """The table counts isl + step tokens, 1 + 99: that is a row with 99 cached tokens. Between points the lines of the
    plane meet; beyond the last length the line goes on (64 rows were measured to 100 tokens, from where it is that of
    the plane as well), and beyond the last number of rows too."""
    tables = Kernels(place, 1, TINY)
    assert ms(tables, decoding(8, 99)) == pytest.approx(decode_ms(8, 100), rel=1e-12)
    for rows, context in ((1, 0), (1, 549), (8, 3000), (36, 99), (64, 500), (100, 99)):
        assert ms(tables, decoding(rows, context)) == pytest.approx(decode_ms(rows, context + 1), rel=1e-9)
    assert [tables.longest(rows) for rows in (1, 9, 64, 65)] == [1000, 100, 100, 0]


def test_a_chunk_is_the_rest_of_its_prompt(place: Path) -> None:
    """Linear in query-key pairs. A chunk of 300 behind 700 takes what 1,000 take above 700. By that two tokens behind
    two would take nearly nothing, but no chunk takes less than without a cache, or than a row that reads as much. Other
    batch sizes, cached lengths and heads in the table say nothing about it."""
    tables = Kernels(place, 1, TINY)
    for tokens in (1, 100, 500, 2000):
        assert ms(tables, prefill(tokens)) == pytest.approx(prompt_ms(tokens), rel=1e-9)
    assert ms(tables, prefill(300, 700)) == pytest.approx(prompt_ms(1000) - prompt_ms(700), rel=1e-9)
    assert ms(tables, prefill(2, 2)) == pytest.approx(prompt_ms(2), rel=1e-9)
    assert ms(tables, prefill(2, 3000)) == pytest.approx(decode_ms(1, 3002), rel=1e-9)


def test_chunks_and_rows_of_a_step_add_up(place: Path) -> None:
    """Two kernels, one after the other; the wait for the longest row was not measured."""
    tables, mixed = Kernels(place, 1, TINY), Attention(100, 50, 8, 99, 99)
    assert ms(tables, mixed) == pytest.approx(ms(tables, prefill(100, 50)) + ms(tables, decoding(8, 99)), rel=1e-12)
    assert ms(tables, mixed._replace(longest=999)) == ms(tables, mixed)


def test_a_scenario_names_how_the_files_begin(place: Path) -> None:
    """kind table with a path that is no folder: single kernels, and the stated time a layer (0.1 ms, three of them)."""
    cost = table_cost(TINY, TableSettings(kind="table", path=str(place), layer_s=1e-4))
    plan = StepPlan(0, StepWork(decodes=8, decode_context=8 * 99, longest_context=99))
    tables = Kernels(place, 1, TINY)
    kernels = tables.linear_ns(8) + tables.head_ns(8) + tables.attention_ns(decoding(8, 99), skew=True)
    assert cost.gpu_ns(plan, 8) == (0, round(kernels + 0.3 * MS), 0)


# -- properties -------------------------------------------------------------------------------------------------------

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

    with TemporaryDirectory() as folder:
        rows = ((m, n, k, measured(m, n, k)) for m, n, k in product(*grid))
        write(Path(folder), GEMM, "m,n,k,latency_ms", rows)
        products = read_products(Path(folder) / f"gpu_{GEMM}_bf16.csv")
    m, n, k = at
    time, larger = products.curve(n, k)(m), products.curve(n + more[1], k + more[2])(m + more[0])
    assert time <= larger * (1 + 1e-12)
    inside = [min(max(x, axis[0]), axis[-1]) for x, axis in zip(at, grid, strict=True)]
    low = [max(a for a in axis if a <= x) for x, axis in zip(inside, grid, strict=True)]
    high = [min(a for a in axis if a >= x) for x, axis in zip(inside, grid, strict=True)]
    between = products.curve(inside[1], inside[2])(inside[0])
    assert measured(*low) * (1 - 1e-12) <= between <= measured(*high) * (1 + 1e-12)
    assert products.curve(low[1], low[2])(low[0]) == measured(*low)


@settings(max_examples=60)
@given(tokens=st.integers(1, 40_000), cached=st.integers(0, 40_000), more=st.integers(1, 40_000))
def test_more_to_read_takes_no_less(hopper: Callable[[str], Kernels], tokens: int, cached: int, more: int) -> None:
    """Chunks of an H100, over the whole measured range and beyond it: with a cache no less than without, nor than one
    row that reads as much; longer prompts no less than shorter ones, but for the 4 % by which 64 tokens were measured
    to be faster than 32."""
    tables = hopper("h100_sxm")
    alone, behind = (ms(tables, prefill(tokens, before)) for before in (0, cached))
    assert 0 < alone <= behind
    assert 0.96 * alone <= ms(tables, prefill(tokens + more))
    assert ms(tables, decoding(1, cached + tokens - 1)) <= behind or not cached


# -- the measured tables ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def hopper() -> Callable[[str], Kernels]:
    """Llama-3.1-8B on one of the measured GPUs."""
    try:
        found = {gpu: Kernels(catalog.tables(f"hopper_kernels/{gpu}"), 1, LLAMA) for gpu in ("h100_sxm", "h200_sxm")}
    except ScenarioError as error:
        pytest.skip(f"no kernel tables: {error}")
    return found.__getitem__


def test_measured_points_come_back(hopper: Callable[[str], Kernels]) -> None:
    """Lines of the H100's files, copied: no arithmetic may touch a point of the grid."""
    products = read_products(catalog.tables("hopper_kernels/h100_sxm").with_name("h100_sxm_gemm_bf16.csv"))
    assert products.curve(32, 32)(1) == 0.002599999929467837
    assert products.curve(32, 64)(1) == 0.0026026666164398193
    assert products.curve(6144, 4096)(32) == 0.023747555083698694
    tables = hopper("h100_sxm")
    for work, latency_ms in (
        (decoding(32, 1023), 0.059818665186564125),
        (decoding(32, 8191), 0.35434667269388836),
        (decoding(1, 65535), 0.11713600158691406),
        (prefill(8192), 0.9122186501820883),
        (prefill(16), 0.012373333175977072),
    ):
        assert tables.attention_ns(work, skew=True) == pytest.approx(32 * MS * latency_ms, rel=1e-12)


@pytest.mark.parametrize(
    ("gpu", "decode_s", "prompt_ms"), [("h100_sxm", (97, 99.5), (182, 186)), ("h200_sxm", (69, 74.5), (180, 190))]
)
def test_sums_are_those_of_whole_runs(
    hopper: Callable[[str], Kernels], gpu: str, decode_s: tuple[float, float], prompt_ms: tuple[float, float]
) -> None:
    """What a row means, checked by known sums over the layers: 8,192 steps of 32 requests take 97 to 99 s on an H100
    and 69 to 74 s on an H200, an 8K prefill 183 ms on an H100. A row counted for all heads, layers or GPUs, or per
    request, would be off by factors."""
    tables = hopper(gpu)
    attention = sum(tables.attention_ns(decoding(32, 16 + step), skew=True) for step in range(0, 8192, 16)) * 16
    linear = 8192 * (tables.linear_ns(32) + tables.head_ns(32))
    assert decode_s[0] < (attention + linear) / 1e9 < decode_s[1]
    prompt = tables.linear_ns(8192) + tables.attention_ns(prefill(8192), skew=True)
    assert prompt_ms[0] < prompt / MS < prompt_ms[1]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [GEMM, GENERATION, CONTEXT])
def test_each_of_the_files_is_needed(place: Path, kernel: str) -> None:
    file = place.with_name(f"gpu_{kernel}_bf16.csv")
    file.unlink()
    with pytest.raises(ScenarioError, match=f"^{file}: cannot be read: No such file") as error:
        Kernels(place, 1, TINY)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kernel", "content", "says"),
    [
        (GEMM, "m,n,latency_ms\n1,2,3\n", r":1: no column k; expected m, n, k, latency_ms, found m, n, latency_ms"),
        (GEMM, "m,n,k,latency_ms\n1,2,3,fast\n", r":2: latency_ms: got 'fast', expected a number >= 0"),
        (GEMM, "m,n,k,latency_ms\n", ": holds no rows"),
        (GEMM, "m,n,k,latency_ms\n1,32,256,1\n1,512,64,1\n", ": no rows with n = 32 and k = 64, which the model"),
        (GENERATION, "batch_size,isl\n1,1\n", ":1: no column step"),
        (GENERATION, f"{HEADER}\n", ": holds no rows"),
        (GENERATION, f"{HEADER}\n1,1,1,32,8,128,1\n1,1,1,4,2,64,1\n", r"found: 4 query and 2 KV heads of 64; 32 query"),
        (CONTEXT, f"{HEADER}\n1,1,-1,4,2,32,1\n", ":2: step: got '-1', expected a number >= 0"),
        (CONTEXT, f"{HEADER}\n2,1,0,4,2,32,1\n", "with batch_size 1 and step 0"),
    ],
)
def test_what_cannot_be_used_is_named(place: Path, kernel: str, content: str, says: str) -> None:
    """File first, line where there is one, what it says and what would do."""
    file = place.with_name(f"gpu_{kernel}_bf16.csv")
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ScenarioError, match=says) as error:
        Kernels(place, 1, TINY)
    assert str(error.value).startswith(str(file))


@pytest.mark.parametrize(
    ("change", "tensor", "says"),
    [
        ({"weights_dtype": "fp8"}, 1, r"model\.weights_dtype: got fp8, must be null"),
        ({"experts": 8, "experts_per_token": 2}, 1, "cost.path: got .*, which holds no experts, and Llama.* has 8"),
        ({"dtype": "float32"}, 1, "model.dtype: got float32, must be bfloat16 or float16"),
        ({}, 4, r"cost.tensor_parallel: got 4, must divide heads \(4\) and kv_heads \(2\)"),
        ({"heads": 8, "kv_heads": 4}, 1, "no rows of 8 query and 4 KV heads of 32 a GPU"),
    ],
)
def test_models_that_were_not_measured_are_refused(
    place: Path, change: dict[str, object], tensor: int, says: str
) -> None:
    model = ModelShape.model_validate(TINY.model_dump() | change)
    with pytest.raises(ScenarioError, match=says):
        Kernels(place, tensor, model)
