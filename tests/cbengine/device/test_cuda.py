"""The CUDA device on a GPU: the texts are those of the CPU, and memory is given back or found to be too little."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from support.engine.peer_model import to_transformers
from support.engine.served import (
    DRAFTERS,
    INLINE,
    LOOPS,
    MS,
    SCHEDULERS,
    Run,
    asked,
    check_texts,
    drawn_weights,
    spec,
    speculating,
    steps,
)
from support.engine.tiny_runs import MIXED, SAMPLED, WAYS, tiny_load, tiny_run, tiny_server
from test_group_tables import MIXES
from test_group_tables import case as windowed_case
from test_moved_tokens import KINDS, case, restless
from test_search import SEARCHES, check_search, groups, load, searching
from test_search import requests as search_requests

from cbengine import build, servers
from cbengine.build import Setup
from cbengine.device.base import DeviceError
from cbengine.sampling import Sampling, SamplingSettings
from cbsim.record import invariants, optional_tables
from cbsim.workload.requests import Workload

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GRAPHS = {"graphs": True, "kernel by kernel": False}
each_graphs = pytest.mark.parametrize("graphs", GRAPHS.values(), ids=GRAPHS)
each_loop = pytest.mark.parametrize("loop", LOOPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def broken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that turn everything into NaN."""
    plan = build.executor_plan(asked("vllm"), "sync", [], INLINE)
    tensors = plan.tensors()
    tensors["model.norm.weight"].fill_(torch.nan)
    path = tmp_path_factory.mktemp("broken")
    to_transformers(plan.architecture, tensors).save_pretrained(path)
    return path


def on(folder: Path, graphs: bool = True, how: Sampling = WAYS["greedy"]) -> Setup:
    return Setup(device="cuda", weights=folder, sampling=how, cuda_graphs=graphs)


@pytest.mark.gpu
@GPU
@each_graphs
@each_loop
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_texts_are_those_of_the_cpu(scheduler: str, loop: str, graphs: bool, folder: Path) -> None:
    """Float32, every policy, replayed or launched one by one: all tokens are those of `generate` on a CPU."""
    run = tiny_run(scheduler, loop, on(folder, graphs))
    check_texts(run)
    assert bool(run.device.facts["captured_batches"]) == (graphs and scheduler != "static")


@pytest.mark.gpu
@GPU
@each_graphs
@each_loop
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_with_speculation_are_those_of_the_cpu(drafter: str, loop: str, graphs: bool, folder: Path) -> None:
    """Drafts are verified, looked up and computed on the device, in steps that are replayed or launched one by one."""
    setup = replace(on(folder, graphs), draft_weights=folder if drafter == "own" else None)
    run = Run(speculating(tiny_server("vllm 0.33"), drafter), loop, tiny_load(), setup)
    check_texts(run)
    assert bool(run.device.facts["captured_batches"]) == graphs
    if drafter == "own":
        assert optional_tables.summarise_drafts(run.engine.record.drafts)["acceptance_rate"] > 0.99


@pytest.mark.gpu
@GPU
@each_graphs
@each_loop
@pytest.mark.parametrize("name", MIXES)
def test_texts_of_layers_with_windows_are_those_of_the_cpu(name: str, loop: str, graphs: bool, tmp_path: Path) -> None:
    """From tables of groups, whose blocks others have as soon as nobody sees them."""
    of = windowed_case(*MIXES[name])
    plan = build.executor_plan(of.scenario, "sync", [], INLINE)
    to_transformers(plan.architecture, plan.tensors()).save_pretrained(tmp_path)
    gpu = Run(of.scenario, loop, of.load, on(tmp_path, graphs))
    cpu = windowed_case(*MIXES[name]).run(loop)
    assert bool(gpu.device.facts["captured_batches"]) == graphs
    assert gpu.texts == cpu.texts


@pytest.mark.gpu
@GPU
@each_loop
@pytest.mark.parametrize("requests", [SamplingSettings(), MIXED], ids=["alike", "mixed"])
def test_replayed_or_launched_sampled_texts_are_the_same(loop: str, requests: SamplingSettings, folder: Path) -> None:
    gpu = [replace(on(folder, graphs, SAMPLED), requests=requests) for graphs in (True, False)]
    cpu = Setup(device="inline", sampling=SAMPLED, requests=requests)
    one, other, third = (tiny_run(SCHEDULERS[0], loop, setup).texts for setup in (*gpu, cpu))
    assert one == other == third


@pytest.mark.gpu
@GPU
@each_graphs
@each_loop
@pytest.mark.parametrize("streams", [True, False])
def test_moves_leave_no_trace(streams: bool, loop: str, graphs: bool, folder: Path) -> None:
    """Blocks copied, sent to the host and back, and swapped for no reason: the texts are those of `generate`. Moves
    take some time, and none is told before it is over.
    """
    given = case().scenario
    model = given.model.model_copy(update={"dtype": "float32"})
    loops = given.loop.model_copy(update={"streams": streams})
    given = given.model_copy(update={"model": model, "loop": loops})
    told: list[Any] = []

    def met(engine: Any) -> None:
        device = engine._device
        moved = device.moved
        device.moved = lambda until_ns: noted(moved(until_ns))

    def noted(found: list[Any]) -> list[Any]:
        told.extend((one, time.perf_counter_ns()) for one in found)
        return found

    run, scheduler = restless(lambda: Run(given, loop, case().load, on(folder, graphs), tick_ns=0, met=met), 3)
    check_texts(run)
    assert all(scheduler.moved[kind] for kind in KINDS if kind != "awaited"), scheduler.moved
    assert told
    assert all(one.start_ns < one.end_ns <= at + MS for one, at in told)


@pytest.mark.gpu
@GPU
@each_loop
@pytest.mark.parametrize("beams", [2, 5])
def test_searches_are_those_of_generate(beams: int, loop: str, folder: Path) -> None:
    """Texts, their order and scores, with blocks copied on the device."""
    given = searching(beams, 300, budget=20, texts=3 * beams)
    given = given.model_copy(update={"model": given.model.model_copy(update={"dtype": "float32"})})
    run = Run(given, loop, load(search_requests(beams, *SEARCHES)), on(folder, True), tick_ns=0)
    assert sum(check_search(texts) for texts in groups(run, beams)) <= 1
    assert not run.device.facts["captured_batches"]


@pytest.mark.gpu
@GPU
@each_graphs
@each_loop
@pytest.mark.parametrize("streams", [True, False])
def test_the_step_table_is_that_of_a_machine(streams: bool, loop: str, graphs: bool, folder: Path) -> None:
    """On the real clock. Asynchronous, a step computes before the one before it has been applied."""
    run = tiny_run(SCHEDULERS[0], loop, on(folder, graphs), 0, f"loop.streams={str(streams).lower()}")
    table, depth = run.steps, LOOPS.index(loop) + 1
    invariants.check(table, depth=depth, overlap=streams, total_blocks=200)
    assert (table.lane("compute")[table["rows"] > 0] > 0).all()
    overlapped = table["compute_start_ns"][1:] < table["update_end_ns"][:-1]
    assert overlapped.mean() > 0.5 if loop == "async" else not overlapped.any()


@pytest.mark.gpu
@GPU
@each_graphs
def test_runs_give_all_memory_back(graphs: bool, folder: Path, broken: Path) -> None:
    """Whether they finish, are cancelled or produce NaN; the first run of a process leaves cuBLAS its workspaces."""
    tiny_run(SCHEDULERS[0], "async", on(folder, graphs))
    before, kept = taken(), torch.cuda.memory_reserved()
    tiny_run(SCHEDULERS[0], "async", on(folder, graphs))
    assert taken() == before
    load = tiny_load()
    given_up = Workload(load.open, load.total, [(60 * MS, load.open[1]), (61 * MS, load.open[2])])
    run = Run(tiny_server(SCHEDULERS[0]), "async", given_up, setup=on(folder, graphs))
    assert run.statuses["aborted"] > 0
    assert taken() == before
    run = tiny_run(SCHEDULERS[0], "async", on(broken, graphs))
    assert run.statuses == {"failed": 7}
    assert taken() == before
    assert torch.cuda.memory_reserved() <= kept + (8 << 20)  # torch takes memory from the GPU in pieces


def taken() -> int:
    """Bytes in tensors."""
    gc.collect()
    return int(torch.cuda.memory_allocated())


@pytest.fixture
def fraction() -> Iterator[Any]:
    """Sets how much of the GPU this process may take."""
    yield torch.cuda.set_per_process_memory_fraction
    torch.cuda.set_per_process_memory_fraction(1.0)


WIDE = ("model.intermediate=16384", "model.hidden=256", "scheduler.max_num_batched_tokens=4096")


@pytest.mark.gpu
@GPU
@each_graphs
def test_a_step_too_large_for_the_memory_is_found_at_the_start(graphs: bool, fraction: Any) -> None:
    """Its 4,096 tokens need 0.8 gigabytes, a prompt half of that; the next run, with memory, finds nothing left of the
    attempt.
    """
    setup, wide = Setup(device="cuda", cuda_graphs=graphs), tiny_server("vllm", *WIDE)
    specs = [spec(i, 2000, 3) for i in range(6)]
    wide = wide.model_copy(update={"kv_cache": wide.kv_cache.model_copy(update={"num_blocks": 4000})})
    Run(wide, "async", Workload(list(specs), 6), setup=setup)
    before = taken()
    fraction((torch.cuda.memory_reserved() + 600e6) / torch.cuda.mem_get_info()[1])
    with pytest.raises(
        DeviceError, match=r"no memory for a step of 4096 query tokens in 6 rows: .+ asked for, .+ free"
    ):
        build.engine(build.adapted(wide, setup), "async", Workload(list(specs), 6), setup)
    fraction(1.0)
    assert taken() == before
    assert Run(wide, "async", Workload(list(specs), 6), setup=setup).statuses == {"length": 6}


@pytest.mark.gpu
@GPU
def test_a_step_that_finds_no_memory_ends_the_run(fraction: Any) -> None:
    """A chunk's 24 tokens need more than what is left over in torch's own pieces. What ran until then is in the record,
    and the memory is there again.
    """
    setup, server = Setup(device="cuda", cuda_graphs=False), tiny_server("vllm", *WIDE[:2])
    Run(server, "async", Workload([spec(0, 200, 5)], 1), setup=setup)
    before, seen = taken(), []

    def on_plan(plan: Any) -> None:
        seen.append(plan)
        if len(seen) == 5:
            torch.cuda.empty_cache()
            fraction(1e-6)

    engine, _ = build.engine(server, "async", Workload([spec(0, 200, 5)], 1), setup, on_plan=on_plan)
    with pytest.raises(DeviceError, match=r"no memory for a step of 24 query tokens in 1 rows: .+ asked for"):
        engine.run()
    engine.close()
    engine.close()
    fraction(1.0)
    assert len(steps(engine)) == 3  # the fourth was in flight
    assert taken() == before
    assert Run(server, "async", Workload([spec(0, 200, 5)], 1), setup=setup).statuses == {"length": 1}


@pytest.mark.gpu
@GPU
@each_graphs
def test_profile_shows_both_figures(graphs: bool, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The events' GPU-active, and that of the kernels which the profiler saw."""
    server = tiny_server(SCHEDULERS[0])
    load = Workload([spec(0, 8, 60)], 1)
    servers.maker(on(folder, graphs), 10)(server, "async", load).run(lambda _: None)
    said = capsys.readouterr().err
    assert "GPU active over steps 21 to 30: events " in said
    assert ", profiler " in said
