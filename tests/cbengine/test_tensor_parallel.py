"""Ranks that share every layer say what one rank says, and none outlives another, or goes on without it."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.ranked import Meeting, Threaded, like_a_gpu, on_ranks, processes, threads
from support.engine.restless import Restless
from support.engine.served import (
    LOOPS,
    MS,
    Case,
    Run,
    cases,
    check_derived,
    check_texts,
    drawn_weights,
    server,
    shared,
    spec,
    speculating,
)
from support.engine.tiny_runs import MIXED, SAMPLED, TINY
from test_group_tables import MIXES
from test_group_tables import case as windowed_case
from test_search import SEARCHES, check_search, groups, load, requests, searching
from torch.nn.functional import linear

import cbengine
import cbsim
from cbengine import build
from cbengine.build import Setup
from cbengine.device.base import DeviceError
from cbengine.device.layout import Header
from cbengine.device.process import Process
from cbengine.driver import Engine
from cbengine.model import weights
from cbengine.model.kvcache import KvCache
from cbengine.model.ranks import Rank
from cbsim.runs import assemble, replan
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

PROCESS = Setup(device="process")


def some(count: int = 7) -> Workload:
    """Requests of three lengths; some begin alike."""
    lengths = ((13, 9), (12, 20), (30, 5))
    specs = [spec(i, *lengths[i % 3], arrival_ns=4 * MS * i, **(shared(0, 8) if i % 3 else {})) for i in range(count)]
    return Workload(specs, count)


def small(blocks: int = 12) -> Any:
    """A server whose cache is too small for its seats, on two ranks."""
    return on_ranks(server("vllm 0.33", 4, blocks, 64, 4, sharing=True))


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", ["vllm 0.33", "sglang", "static"])
@given(data=st.data())
@settings(max_examples=6)
def test_ranks_say_what_one_says(scheduler: str, loop: str, data: st.DataObject) -> None:
    """... with caches that are too small, shared prefixes and cancellations."""
    sizes, load = data.draw(cases(scheduler))
    run = Case(on_ranks(sizes), load).run(loop, device=threads)
    check_texts(run)
    check_derived(run, loop)
    for column in ("preempted", "cached_tokens"):
        if run.total(column):
            event(column)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", ["ngram", "own"])
def test_ranks_verify_drafts(drafter: str, loop: str) -> None:
    """Ranks speculate by looking up or by a model that they share, too; sampled texts are those of one rank without."""
    sizes, drawn = server("vllm 0.33", 4, 24, 64, 4, sharing=True), Setup(device="inline", sampling=SAMPLED)
    ranks = speculating(on_ranks(sizes), drafter)
    run = Run(ranks, loop, some(), device=threads)
    check_texts(run)
    if drafter == "own":
        assert sum(run.engine.accepted[1::2]) > 0
    alone = Run(sizes, loop, some(), drawn)
    assert Run(ranks, loop, some(), drawn, device=threads).texts == alone.texts


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", MIXES)
def test_ranks_of_layers_with_windows(name: str, loop: str) -> None:
    """From tables of groups of layers: the texts of one rank."""
    of = windowed_case(*MIXES[name])
    assert (
        Run(on_ranks(of.scenario), loop, of.load, device=threads).texts == windowed_case(*MIXES[name]).run(loop).texts
    )


def test_ranks_search() -> None:
    """Beams are ranked on every rank alike: texts and scores of generate."""
    run = Run(on_ranks(searching(3, 300)), "sync", load(requests(3, *SEARCHES)), device=threads)
    assert sum(check_search(texts) for texts in groups(run, 3)) <= 1


@pytest.mark.parametrize("driven", ["as GPUs are", "in place"])
@pytest.mark.parametrize("loop", LOOPS)
def test_kv_moves_on_all_ranks(loop: str, driven: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that sends blocks to the host and back and copies them for no reason; jobs among the moves."""

    made: list[Restless] = []

    def scheduler(sizes: Scenario, loop: str) -> Restless:
        made.append(Restless(sizes.options(loop), 5, calm=0.2))
        return made[-1]

    if driven == "as GPUs are":
        workers = build._workers
        monkeypatch.setattr(build, "_gpu", like_a_gpu)
        monkeypatch.setattr(build, "_workers", lambda plan, steps, _: workers(plan, steps, {}))
    with mock.patch.object(assemble, "scheduler", scheduler):
        run = Run(on_ranks(server("vllm", 4, 24, 64, 4, sharing=False)), loop, some(), PROCESS)
    check_texts(run)
    assert min(made[0].moved.values()) > 0


@pytest.mark.parametrize("loop", LOOPS)
def test_worker_processes_are_ranks(loop: str) -> None:
    """Two processes: preempted requests, prefix hits and requests with settings of their own; their plans derived."""
    settings = {"requests": MIXED, "sampling": SAMPLED}
    run = Run(small(), loop, some(), Setup(device="process", **settings))
    alone = Run(server("vllm 0.33", 4, 90, 64, 4, sharing=True), loop, some(), Setup(device="inline", **settings))
    assert run.texts == alone.texts
    assert run.total("preempted")
    assert run.total("cached_tokens")
    check_derived(run, loop)
    assert run.device.facts["ranks"] == 2
    assert run.device.facts["steps_with_equal_digests"] == len(run.steps)


def test_a_result_says_its_ranks(tmp_path: Path) -> None:
    """The front door takes their number; the scenario of its directory is simulated with as many, and derives again."""
    few = {"workload.requests": 4, "loop.mode": "async", "model.layers": 1}
    measured = cbengine.run("tiny_cpu", "process", changes=few, tensor_parallel=2)
    assert measured.scenario.gpus == 2
    folder = measured.save(tmp_path)
    assert json.loads((folder / "env.json").read_text())["ranks"] == 2
    derived, recorded, difference = replan.rederive(folder)
    assert derived == recorded > 0
    assert difference is None
    simulated = cbsim.run(folder / "scenario.resolved.yaml")
    assert simulated.scenario.gpus == 2
    assert simulated.summary["output_tokens"] == measured.summary["output_tokens"]


def test_what_a_rank_keeps() -> None:
    """Equal parts of all matrices of a layer, and of its KV; parts side by side are the whole."""
    cpu, kept = torch.device("cpu"), [Rank(index, 2) for index in range(2)]
    whole = weights.random(TINY, 1, torch.float32, cpu)
    parts = [weights.random(TINY, 1, torch.float32, cpu, rank) for rank in kept]
    for name, tensor in whole.items():
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        cut = parts[0][name].shape != tensor.shape
        assert cut == ("_proj" in name)
        assert torch.equal(torch.cat([part[name] for part in parts], axis) if cut else parts[1][name], tensor)
    sizes = 9, 4, torch.float32
    assert 2 * KvCache.bytes_for(kept[0].part(TINY), *sizes) == KvCache.bytes_for(TINY, *sizes)


def test_logits_are_those_of_the_vocabulary() -> None:
    """... which two ranks do not divide: the padding of the last one's part is no token."""
    head, hidden, meeting = torch.randn(199, 8), torch.randn(3, 8), Meeting(2)
    ranks = [Threaded(Rank(index, 2), meeting) for index in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(lambda group: group.gather(linear(hidden, group.share(head)), 199), ranks):
            torch.testing.assert_close(logits, linear(hidden, head))


# -- what ends them ---------------------------------------------------------------------------------------------------


def left(device: Process, store: Path) -> list[object]:
    """What a device that was closed has left of its workers and files."""
    device.close()
    return [*(worker for worker in device._workers if worker.is_alive()), *store.parent.iterdir()]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["between steps", "in a step", "before it is ready"])
def test_a_dead_rank_ends_the_run(when: str, rank: int, tmp_path: Path) -> None:
    """... naming the rank that died, though the other one may say first that it lacks its part."""
    faults = ("", "dies in a step") if rank else ("dies in a step", "")

    def killing(engine: Engine) -> None:
        def killed(now_ns: int) -> None:
            if engine.record.step_count == 3 and when == "between steps":
                os.kill(engine._device._workers[rank].pid, signal.SIGKILL)

        engine.run = partial(engine.run, killed)

    made, device = [], processes(faults if when == "in a step" else ("", ""), str(tmp_path / "ranks"))

    def kept(*of: Any) -> Process:
        plan, ranks = of[2], [Rank(index, 2, str(tmp_path / "ranks")) for index in range(2)]
        if when == "before it is ready":
            first, other = (partial(os._exit, 9) if each.index == rank else plan.of(each) for each in ranks)
            return Process(first, plan.capacity, 1, [other])
        made.append(device(*of))
        return made[0]

    code = "ended with exit code 9" if when == "before it is ready" else "was killed by signal 9"
    with pytest.raises(DeviceError, match=rf"^the worker process of rank {rank} {code}$"):
        Run(small(), "async", some(), PROCESS, device=kept, met=killing)
    for each in made:
        (tmp_path / "ranks").unlink(missing_ok=True)
        assert not left(each, tmp_path / "ranks")


def test_a_rank_that_leaves_an_all_reduce_out(tmp_path: Path) -> None:
    """The next exchange then does not fit, or one rank waits for what never comes: its limit ends that."""
    device = processes(("", "skips"), str(tmp_path / "ranks"), limit_s=2.0)
    with pytest.raises(DeviceError) as error:
        Run(small(), "async", some(), PROCESS, device=device)
    assert re.match(r"the worker process of rank [01] failed: |rank 1 has not received", str(error.value))


def test_a_rank_that_gets_another_plan(tmp_path: Path) -> None:
    """... says so by its digest, with the step."""

    class Other:
        """A rank's pipe, which changes the fifth step."""

        def __init__(self, pipe: Any) -> None:
            self._pipe, self._step = pipe, 0

        def send(self, step: Any) -> None:
            self._step += 1
            slot, lengths, packed, excess = step
            self._pipe.send((slot, Header(*lengths)._replace(live=7), packed, excess) if self._step == 5 else step)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._pipe, name)

    def met(engine: Engine) -> None:
        engine._device._pipes[1] = Other(engine._device._pipes[1])

    with pytest.raises(
        DeviceError, match=r"^rank 1 has not received and computed what rank 0 has in step 4 of this run"
    ):
        Run(small(), "sync", some(), PROCESS, met=met)


# -- on GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernel by kernel"])
@pytest.mark.parametrize("loop", LOOPS)
def test_gpus_are_ranks(loop: str, graphs: bool, tmp_path: Path) -> None:
    """All-reduces by NCCL, captured or not: the texts are those of generate, sampled ones those of one GPU."""
    given_weights = Setup(device="cuda", weights=drawn_weights(tmp_path), cuda_graphs=graphs)
    check_texts(Run(small(), loop, some(), given_weights))
    sampled = replace(given_weights, sampling=SAMPLED)
    alone = Run(server("vllm 0.33", 4, 90, 64, 4, sharing=True), loop, some(), sampled)
    assert Run(small(), loop, some(), sampled).texts == alone.texts
