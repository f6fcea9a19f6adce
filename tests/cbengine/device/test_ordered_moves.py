"""Moves of KV on the CUDA device, without a GPU: whatever order a GPU takes, the result is the same. Cache and host
tier are watched block by block; a missing wait is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from support.engine.ordered import Event, WholeTables, World, ordered
from support.engine.restless import Restless
from support.engine.served import INLINE, LOOPS, Run, check_texts
from test_moved_tokens import KINDS, case, restless
from test_ordered import call_buffers

from cbengine import build
from cbengine.device.cuda import Cuda
from cbsim.scenario.scenario import depth

each_loop = pytest.mark.parametrize("loop", LOOPS)
Plant = Callable[[Cuda], None]


def served(
    monkeypatch: pytest.MonkeyPatch,
    loop: str,
    *,
    graphs: bool = True,
    overlap: bool = True,
    patience: int = 2,
    plant: Plant = lambda _: None,
) -> tuple[Run, Restless, list[str]]:
    """A restless run on the stand-in, and what was out of order. A job is over when it has been asked of `patience`
    times.
    """
    with ordered() as world:

        def device(_: Any, loop: str, plan: Any, *__: Any) -> Cuda:
            made = Cuda(plan(), plan.capacity, depth(loop), graphs=graphs, overlap=overlap, random=False)
            share_out(world, made)
            world.running, world.patience = True, patience
            plant(made)
            return made

        monkeypatch.setattr(build, "ops", lambda _: WholeTables())
        run, scheduler = restless(lambda: Run(*case()[:1], loop, case().load, INLINE, device=device), 3)
    return run, scheduler, world.races


def share_out(world: World, device: Cuda) -> None:
    call_buffers(world, device)
    executor = device._executor
    assert executor._host is not None
    world.share_out("keys", executor._cache.keys, 1)
    world.share_out("values", executor._cache.values, 1)
    world.share_out("the host's", executor._host.blocks, 0)
    for stream, carrier in device._moves._carriers.items():
        world.call(f"{stream.name}'s staging", carrier._staging)  # type: ignore[attr-defined]


@each_loop
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernel by kernel"])
@pytest.mark.parametrize("overlap", [True, False], ids=["five streams", "one stream"])
def test_every_order_that_a_gpu_may_take_is_the_same(
    overlap: bool, graphs: bool, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each access of a block is ordered after those that it depends on; the tokens are those of `generate`."""
    run, scheduler, races = served(monkeypatch, loop, graphs=graphs, overlap=overlap)
    assert races == []
    assert all(scheduler.moved[kind] for kind in KINDS), scheduler.moved
    assert max(scheduler.late) >= 1
    assert not run.device.__dict__.get("_moves"), "given back"
    check_texts(run)


# -- planted ----------------------------------------------------------------------------------------------------------


def out_does_not_wait(device: Cuda) -> None:
    """... for the rows of its plan."""
    device._moves._out.wait_event = lambda event: None  # type: ignore[method-assign]


def in_does_not_wait(device: Cuda) -> None:
    """... for those of the plans before."""
    device._moves._in.wait_event = lambda event: None  # type: ignore[method-assign]


def nobody_waits_for_jobs(device: Cuda) -> None:
    before = device._moves.before_rows

    def deaf(plan: Any) -> None:
        queued, device._moves._queued = device._moves._queued, []
        before(plan)
        device._moves._queued = queued + device._moves._queued

    device._moves.before_rows = deaf  # type: ignore[method-assign]


def moves_are_told_too_early(device: Cuda) -> None:
    """Who asks is told that they are over, and knows nothing."""
    over = device._moves.over

    def early() -> Any:
        for queued in device._moves._queued:
            queued.end.query = lambda: True  # type: ignore[method-assign]
        return over()

    device._moves.over = early  # type: ignore[method-assign]


def in_order_moves_go_beside(device: Cuda) -> None:
    carry, moves = device._moves._carry, device._moves
    device._moves._carry = lambda step, listed, _: carry(step, listed, moves._out)  # type: ignore[method-assign]


def one_staging_block(device: Cuda) -> None:
    carriers = device._moves._carriers
    for carrier in carriers.values():
        carrier._staging = carriers[device._compute]._staging


FAULTS: dict[str, tuple[Plant, str]] = {
    "out does not wait": (out_does_not_wait, "nothing orders the two"),
    "in does not wait": (in_does_not_wait, "nothing orders the two"),
    "nobody waits for jobs": (nobody_waits_for_jobs, "nothing orders the two"),
    "told too early": (moves_are_told_too_early, "nothing orders the two"),
    "beside": (in_order_moves_go_beside, "nothing orders the two"),
    "one staging block": (one_staging_block, "staging"),
}


@each_loop
@pytest.mark.parametrize(("plant", "found"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(plant: Plant, found: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """... by block and stream, though here everything is computed at once and the tokens may be right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "elapsed_time", lambda event, later: (later.at - event.at) / 1e3)
        _, _, races = served(monkeypatch, loop, plant=plant)
    assert any(found in race for race in races), races[:5]


@each_loop
def test_times_are_those_of_the_moves(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin before they end, and each is told once."""
    told: list[Any] = []
    listed: set[int] = set()

    def plant(device: Cuda) -> None:
        moved, launch = device.moved, device.launch

        def noted(until_ns: int | None) -> Any:
            found = moved(until_ns)
            told.extend(found)
            return found

        def launching(slot: int, header: Any, plan: Any) -> None:
            listed.update([plan.step] if plan.transfers else [])
            launch(slot, header, plan)

        device.moved, device.launch = noted, launching  # type: ignore[method-assign]

    served(monkeypatch, loop, plant=plant)
    keys = [(moved.step, moved.at) for moved in told]
    assert len(set(keys)) == len(keys) > 20
    assert {step for step, _ in keys} == listed
    assert all(moved.start_ns <= moved.end_ns for moved in told)
