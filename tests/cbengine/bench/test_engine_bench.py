"""What `speed` shows: figures as they are measured, bars, what is missing. No test asserts a speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from served import SHAPE

from cbengine import build, servers
from cbengine.bench import attention_bench, engine_bench, timing
from cbengine.bench.figures import Budget, Figure, FindingGroup, shown
from cbengine.build import Setup
from cbengine.errors import MissingError, UsageError
from cbengine.model.ops import TorchOps
from cbsim.results.metrics import Steps
from cbsim.results.record import PHASES, STEP_COLUMNS
from cbsim.scenario import scenario
from cbsim.server.running import Maker

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

    def measured() -> Iterator[Figure]:
        for name in ("first", "second"):
            seen.append(capfd.readouterr().out)
            yield Figure(name, 1.0, "s")

    monkeypatch.setattr(engine_bench, "on_gpu", lambda out, serve, quick: [FindingGroup("all", measured)])
    assert engine_bench.bench("cuda", tmp_path, servers.maker, quick=True, as_json=False) == 0
    assert [text.split()[:1] for text in seen] == [[], ["first"]]
    assert capfd.readouterr().out.split()[0] == "second"


@pytest.mark.usefixtures("gpu")
def test_json_is_one_list_on_stdout_and_the_lines_are_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = [Figure("first", 1.0, "s"), Figure("second", 2.0, "x", ">= 2", True)]
    monkeypatch.setattr(engine_bench, "on_gpu", lambda out, serve, quick: [FindingGroup("all", lambda: figures)])
    assert engine_bench.bench("cuda", tmp_path, servers.maker, quick=True, as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[1] == {"name": "second", "value": 2.0, "unit": "x", "bar": ">= 2", "holds": True}
    assert [line.split()[0] for line in err.splitlines()] == ["first", "second"]


@pytest.mark.usefixtures("gpu")
def test_a_group_that_fails_is_told_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What it found before it failed stands; the exit status says that something is missing."""

    def failing() -> Iterator[Figure]:
        yield Figure("before", 1.0, "s")
        raise RuntimeError("no memory\nfor details see the log")

    groups = [FindingGroup("engine", failing), FindingGroup("peer", lambda: [Figure("after", 2.0, "s")])]
    monkeypatch.setattr(engine_bench, "on_gpu", lambda out, serve, quick: groups)
    assert engine_bench.bench("cuda", tmp_path, servers.maker, quick=True, as_json=False) == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["before", "after"]
    assert err.splitlines() == ["failed: engine: RuntimeError: no memory"]


def test_an_interrupt_ends_the_bench() -> None:
    def interrupted() -> Iterator[Figure]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        shown([FindingGroup("a", interrupted), FindingGroup("b", pytest.fail)], as_json=False)


def test_each_group_keeps_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file a group; none where nothing was found."""
    groups = [FindingGroup("first", lambda: [Figure("a", 1.0, "s")]), FindingGroup("second", list)]
    assert shown(groups, as_json=False, keep=tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["first.jsonl"]
    assert json.loads((tmp_path / "kept" / "first.jsonl").read_text().splitlines()[0])["name"] == "a"


def test_a_budget_names_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A point that was begun is finished; nothing is begun when the time is over."""
    now = iter([0.0, 4.0, 9.0, 10.0, 11.0])
    assert list(Budget(10.0, lambda: next(now)).left([1, 2, 4, 8], "rows")) == [1, 2]
    assert capsys.readouterr().err == "rows: no time left for 4, 8\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs to find no CUDA device")
def test_a_gpu_that_is_not_there_is_missed(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="--device cuda: torch finds no CUDA device here"):
        engine_bench.bench("cuda", tmp_path, servers.maker, quick=True, as_json=False)


def test_cpu_work_is_the_median_of_full_steps_without_waiting() -> None:
    """Phases take 1, 2, 3 ... microseconds and the batch is full in three of four steps; one of them was disturbed."""
    columns: dict[str, Any] = {"decode_rows": [32, 32, 32, 5]}
    for i, phase in enumerate(PHASES):
        columns[f"{phase}_end_ns"] = [1000 * (i + 1)] * 3 + [10**9]
    steps = table(4, **columns)
    steps.table[1, STEP_COLUMNS.index("update_end_ns")] = 10**8
    figure = engine_bench.cpu_work("CPU a step", steps, 32)
    assert figure.value == pytest.approx(sum((1, 2, 3, 5)) / 1000)
    assert (figure.unit, figure.bar, figure.holds) == ("ms", "<= 0.5", True)


def test_the_floor_reads_each_weight_once_a_step_and_what_is_cached() -> None:
    """An embedding is looked up, not read, unless it is the output layer, too."""
    steps = table(3, context_tokens=[0, 10, 20])
    table_bytes = MODEL.vocab * MODEL.hidden * MODEL.dtype_bytes
    assert (
        engine_bench.least_bytes(MODEL, steps) == 3 * (MODEL.weight_bytes - table_bytes) + 30 * MODEL.kv_bytes_per_token
    )
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    assert engine_bench.least_bytes(tied, steps) == 3 * tied.weight_bytes + 30 * tied.kv_bytes_per_token


# -- the parts of a GPU's bench, on a CPU -----------------------------------------------------------------------------


def test_the_device_s_figures_can_be_measured() -> None:
    assert timing.copy_bandwidth(1 << 12, "cpu") > 0
    assert timing.matrix_rate(16, "cpu") > 0


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
    found = list(engine_bench.engine(tmp_path, servers.maker, INLINE, loop, 6, lambda: 1e9))
    assert [figure.name.partition(": ")[2] for figure in found] == [
        *("seconds", "GPU active", "CPU a step", "floor at the copy's bandwidth"),
    ]
    assert all(figure.value > 0 for figure in found)
    assert [figure.bar for figure in found] == ["", "", "<= 0.5", ""]


@pytest.mark.usefixtures("small")
def test_a_peer_that_cannot_run_is_told_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its asynchronous batches need a package that few have; then there is no ratio, and all else is there."""

    def serve(setup: Setup, peer: bool) -> Maker:
        def make(asked: Any, loop: str, workload: Any) -> Any:
            if peer and loop == "async":
                raise UsageError("loop.mode: async: transformers needs flash attention")
            return servers.maker(setup)(asked, loop, workload)

        return make

    found = list(engine_bench.against_peer(tmp_path, serve, INLINE, 3))
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
        list(engine_bench.against_peer(tmp_path, serve, INLINE, 3))


@pytest.mark.usefixtures("small")
def test_the_order_of_a_gpu_s_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Device, kernel, the asynchronous run, the peer, and the longest part that may be cut off last."""
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 3e12)
    monkeypatch.setattr(timing, "matrix_rate", lambda: 8e14)
    monkeypatch.setattr(timing, "launch_latency", lambda: 1e-5)
    monkeypatch.setattr(timing, "launch_and_wake", lambda *, blocking: 1e-4 if blocking else 1e-5)
    monkeypatch.setattr(attention_bench, "decodes", lambda *_: iter([Figure("attention", 1.0, "%")]))
    monkeypatch.setattr(engine_bench, "LENGTH", 4)
    monkeypatch.setattr(build, "ops", lambda device: TorchOps())
    monkeypatch.setattr(engine_bench, "Setup", lambda device: INLINE)
    monkeypatch.setattr(engine_bench, "against_peer", lambda *_: iter([Figure("peer", 1.0, "x")]))
    groups = engine_bench.on_gpu(tmp_path, servers.maker, False)
    names = [figure.name for group in groups for figure in group.measure()]
    assert names[0] == "device copy, read and write"
    assert names[-5:-3] == ["peer", "8k_b32, 4 tokens, sync: seconds"]
    assert "8k_b32, 4 tokens, async: seconds" in names[:-5]
    assert len(names) == 5 + 1 + 4 + 1 + 4
    assert [group.name for group in engine_bench.on_gpu(tmp_path, servers.maker, True)][-1] == "peer"


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_the_cpu_s_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batch sizes, two policies, two loops, each held to a bar."""
    steady = engine_bench._steady
    monkeypatch.setattr(engine_bench, "BAR_CPU_S", {2: 0.5e-3, 5: 1.5e-3})
    monkeypatch.setattr(engine_bench, "_steady", lambda rows, policy, steps: steady(rows, policy, 20))
    found: list[Any] = [one for group in engine_bench.on_cpu(tmp_path, servers.maker, True) for one in group.measure()]
    assert len({figure.name for figure in found}) == len(found) == 8
    assert all(figure.value > 0 and figure.bar for figure in found)


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_figures_on_a_gpu() -> None:
    """They are numbers, and no kernel reads faster than a copy, give or take."""
    bandwidth = timing.copy_bandwidth(1 << 28)
    assert bandwidth > 0
    assert timing.matrix_rate(1024) > 0
    assert timing.launch_latency(10) > 0
    case = attention_bench.decode_case(scenario.load("8k_b32").model, 8, 1024)
    assert 0 < case.read_bytes / case.seconds(build.ops("cuda")) < 2 * bandwidth
    timing.give_back()
    assert engine_bench.bar_seconds() in (None, *engine_bench.BAR_RUN_S.values())
