"""What `bench` shows: figures as they are measured, bars, what is missing. No test asserts a speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from served import SHAPE  # noqa: E402

from cbengine import bench, build, commands  # noqa: E402
from cbengine.bench import Figure  # noqa: E402
from cbengine.build import Setup  # noqa: E402
from cbengine.errors import MissingError, UsageError  # noqa: E402
from cbengine.ops import TorchOps  # noqa: E402
from cbsim import scenario  # noqa: E402
from cbsim.metrics import Steps  # noqa: E402
from cbsim.record import PHASES, STEP_COLUMNS  # noqa: E402
from cbsim.runs import Maker  # noqa: E402

torch.set_num_threads(1)
MODEL = scenario.load("tiny_cpu", [f"model.{field}={value}" for field, value in SHAPE.items()]).model
INLINE = Setup(device="inline")


def table(count: int, **columns: Any) -> Steps:
    """Steps with the given columns; the others are 0."""
    values = np.zeros((count, len(STEP_COLUMNS)), dtype=np.int64)
    for column, value in columns.items():
        values[:, STEP_COLUMNS.index(column)] = value
    return Steps(values)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_a_figure_says_whether_its_bar_holds() -> None:
    assert str(Figure("device copy", 3.04, "TB/s")).split() == ["device", "copy", "3.04", "TB/s"]
    assert str(Figure("a", 1, "ms", "<= 2", True)).endswith("bar <= 2  ok")
    assert str(Figure("a", 3, "ms", "<= 2", False)).endswith("bar <= 2  MISSED")
    assert str(Figure("a", 3, "s", "<= 2 (H100)")).endswith("bar <= 2 (H100)")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, for those who only ask whether there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_every_figure_is_printed_before_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A call that is killed at a time limit has shown what it had."""
    seen = []

    def measured(out: Path, serve: Any, quick: bool) -> Any:
        for name in ("first", "second"):
            seen.append(capfd.readouterr().out)
            yield Figure(name, 1.0, "s")

    monkeypatch.setattr(bench, "on_gpu", measured)
    assert bench.bench("cuda", tmp_path, commands.maker, quick=True, as_json=False) == 0
    assert [text.split()[:1] for text in seen] == [[], ["first"]]
    assert capfd.readouterr().out.split()[0] == "second"


@pytest.mark.usefixtures("gpu")
def test_json_is_one_list_on_stdout_and_the_lines_are_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = [Figure("first", 1.0, "s"), Figure("second", 2.0, "x", ">= 2", True)]
    monkeypatch.setattr(bench, "on_gpu", lambda out, serve, quick: iter(figures))
    assert bench.bench("cuda", tmp_path, commands.maker, quick=True, as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[1] == {"name": "second", "value": 2.0, "unit": "x", "bar": ">= 2", "holds": True}
    assert [line.split()[0] for line in err.splitlines()] == ["first", "second"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs to find no CUDA device")
def test_a_gpu_that_is_not_there_is_missed(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="--device cuda: torch finds no CUDA device here"):
        bench.bench("cuda", tmp_path, commands.maker, quick=True, as_json=False)


def test_cpu_work_is_the_median_of_full_steps_without_waiting() -> None:
    """Phases take 1, 2, 3 ... microseconds and the batch is full in three of four steps; one of them was disturbed."""
    columns: dict[str, Any] = {"decode_rows": [32, 32, 32, 5]}
    for i, phase in enumerate(PHASES):
        columns[f"{phase}_end_ns"] = [1000 * (i + 1)] * 3 + [10**9]
    steps = table(4, **columns)
    steps.table[1, STEP_COLUMNS.index("update_end_ns")] = 10**8
    figure = bench.cpu_work("CPU a step", steps, 32)
    assert figure.value == pytest.approx(sum((1, 2, 3, 5)) / 1000)
    assert (figure.unit, figure.bar, figure.holds) == ("ms", "<= 0.5", True)


def test_the_floor_reads_each_weight_once_a_step_and_what_is_cached() -> None:
    """An embedding is looked up, not read, unless it is the output layer, too."""
    steps = table(3, context_tokens=[0, 10, 20])
    table_bytes = MODEL.vocab * MODEL.hidden * MODEL.dtype_bytes
    assert bench.least_bytes(MODEL, steps) == 3 * (MODEL.weight_bytes - table_bytes) + 30 * MODEL.kv_bytes_per_token
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    assert bench.least_bytes(tied, steps) == 3 * tied.weight_bytes + 30 * tied.kv_bytes_per_token


def test_attention_has_a_bar_where_there_is_enough_to_read() -> None:
    assert [bench.attention_share(context, 0.86).holds for context in bench.CONTEXTS] == [None, None, True, True]
    assert bench.attention_share(8192, 0.84).holds is False


# -- the parts of a GPU's bench, on a CPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("context", [16, 40, 64])
def test_the_rows_of_the_attention_bench_are_a_decode_step(context: int) -> None:
    """Every row's own token lies at the end of its last block, and tables name each block once."""
    tables = torch.randperm(3 * -(-context // 16)).view(3, -1)
    rows = bench.decoding(tables, context)
    assert rows.decodes == len(rows.slots) == 3
    assert sorted(rows.tables.flatten().tolist()) == list(range(tables.numel()))
    for row in range(3):
        position = int(rows.kv_tokens[row]) - 1
        assert int(rows.positions[row]) == position
        assert int(rows.kv_places[row]) == int(rows.tables[row, position // 16]) * 16 + position % 16


def test_device_and_attention_figures_can_be_measured() -> None:
    read, seconds = bench.decode_attention(TorchOps(), MODEL, 3, 64, "cpu", span=0)
    assert read == 2 * 3 * 64 * MODEL.kv_heads * MODEL.head_dim * 2
    assert seconds > 0
    assert bench.copy_bandwidth(1 << 12, "cpu") > 0
    assert bench.matrix_rate(16, "cpu") > 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """8k_b32 on a model of two layers."""
    load = scenario.load
    shape = [
        *(f"model.{field}={value}" for field, value in SHAPE.items()),
        "kv_cache={block_size: 256, num_blocks: 70}",
    ]
    monkeypatch.setattr(
        scenario, "load", lambda name, sets=(): load(name, [*sets, *shape, "scheduler.max_batch_tokens=512"])
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_the_engine_s_figures(loop: str, tmp_path: Path) -> None:
    """Seconds, floor, GPU-active and the CPU's work, without bars at another length."""
    found = list(bench.engine(tmp_path, commands.maker, INLINE, loop, 6, 1e9))
    assert [figure.name.partition(": ")[2] for figure in found] == [
        *("seconds", "floor at the copy's bandwidth", "GPU active", "CPU a step"),
    ]
    assert all(figure.value > 0 for figure in found)
    assert [figure.bar for figure in found] == ["", "", "", "<= 0.5"]


@pytest.mark.usefixtures("small")
def test_a_peer_that_cannot_run_is_told_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its asynchronous batches need a package that few have; then there is no ratio, and all else is there."""

    def serve(setup: Setup, peer: bool) -> Maker:
        def make(asked: Any, loop: str, workload: Any) -> Any:
            if peer and loop == "async":
                raise UsageError("loop.mode: async: transformers needs flash attention")
            return commands.maker(setup)(asked, loop, workload)

        return make

    found = list(bench.against_peer(tmp_path, serve, INLINE, 3))
    assert [figure.name for figure in found] == [
        "cbengine, 3 tokens, async: tokens/s",
        "cbengine, 3 tokens, sync: tokens/s",
        "transformers, 3 tokens, sync: tokens/s",
        "cbengine over transformers, sync",
    ]
    assert "transformers, 3 tokens, async: loop.mode: async: transformers needs flash" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_a_failure_of_ours_is_no_missing_peer(tmp_path: Path) -> None:
    def serve(setup: Setup, peer: bool) -> Maker:
        def make(asked: Any, loop: str, workload: Any) -> Any:
            raise UsageError("no such weights")

        return make

    with pytest.raises(UsageError, match="no such weights"):
        list(bench.against_peer(tmp_path, serve, INLINE, 3))


@pytest.mark.usefixtures("small")
def test_the_order_of_a_gpu_s_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Device, kernel, the asynchronous run, the peer, and the longest part that may be cut off last."""
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 3e12)
    monkeypatch.setattr(bench, "matrix_rate", lambda: 8e14)
    monkeypatch.setattr(bench, "launch_latency", lambda: 1e-5)
    monkeypatch.setattr(bench, "decode_attention", lambda *_: (100, 1e-9))
    monkeypatch.setattr(bench, "LENGTH", 4)
    monkeypatch.setattr(build, "ops", lambda device: TorchOps())
    monkeypatch.setattr(bench, "Setup", lambda device: INLINE)
    monkeypatch.setattr(bench, "against_peer", lambda *_: iter([Figure("peer", 1.0, "x")]))
    names = [figure.name for figure in bench.on_gpu(tmp_path, commands.maker, False)]
    assert names[0] == "device copy, read and write"
    assert names[-5:-3] == ["peer", "8k_b32, 4 tokens, sync: seconds"]
    assert "8k_b32, 4 tokens, async: seconds" in names[:-5]
    assert len(names) == 3 + 4 + 4 + 1 + 4


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_the_cpu_s_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batch sizes, two policies, two loops, each held to a bar."""
    steady = bench._steady
    monkeypatch.setattr(bench, "BAR_CPU_S", {2: 0.5e-3, 5: 1.5e-3})
    monkeypatch.setattr(bench, "_steady", lambda rows, policy, steps: steady(rows, policy, 20))
    found = list(bench.on_cpu(tmp_path, commands.maker, True))
    assert len({figure.name for figure in found}) == len(found) == 8
    assert all(figure.value > 0 and figure.bar for figure in found)


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_figures_on_a_gpu() -> None:
    """They are numbers, and no kernel reads faster than a copy, give or take."""
    bandwidth = bench.copy_bandwidth(1 << 28)
    assert bandwidth > 0
    assert bench.matrix_rate(1024) > 0
    assert bench.launch_latency(10) > 0
    model = scenario.load("8k_b32").model
    read, seconds = bench.decode_attention(build.ops("cuda"), model, 8, 1024)
    assert 0 < read / seconds < 2 * bandwidth
    bench.give_back()
    assert bench.bar_seconds() in (None, *bench.BAR_RUN_S.values())
