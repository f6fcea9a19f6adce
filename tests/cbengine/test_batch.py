"""From plans to arrays: what a device is sent says what the plans say, in every row, slot, table entry and token.

The engine, its scheduler and its batches are real; the device is `oracle.Toy`, whose text is a hash of what each row
sees, behind `oracle.Checked`, which knows the rows from plans alone (`cbsim.policy.plan.Batch`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.oracle import check_toy_text, toy_run
from support.engine.served import (
    INLINE,
    LOOPS,
    MS,
    SCHEDULERS,
    VOCAB,
    Case,
    cases,
    check_derived,
    check_texts,
    server,
    shared,
    spec,
)

from cbengine import batch, build
from cbengine.batch import Batcher, Capacity, Sent
from cbengine.build import Setup
from cbengine.device.layout import Header, arrays
from cbengine.sampling import Sampling, SamplingSettings
from cbsim.workload.requests import Workload

HOWS = (
    Sampling(),
    Sampling(temperature=0.7, top_k=5, top_p=0.9),
    Sampling(temperature=1.3, top_p=0.05, seed=1),
    Sampling(temperature=2.0, top_k=1, seed=9),
)


VLLM = {
    "policy": ("fcfs", "fcfs", "priority"),
    "long_prefill_token_threshold": (0, 0, 3),
    "scheduler_reserve_full_isl": (True, False),
    "adaptive_long_prefill_threshold": (False, True),
    "watermark": (0.0, 0.0, 0.2),
    "prefill_schedule_interval": (1, 1, 3),
}
TRANSFORMERS = {"max_blocks_per_request": (32, 0, 2), "safety_margin": (0.0, 0.2)}


@st.composite
def odd_cases(draw: st.DrawFn, scheduler: str) -> Case:
    """A load on a server with any of its scheduler's options.

    With priorities vLLM preempts the youngest. Two of the same age may preempt each other for ever where prompts come
    in pieces and only pieces are reserved; so requests differ in age, and none follows another.
    """
    options: dict[str, tuple[object, ...]] = {}
    if scheduler.startswith("vllm "):
        options = dict(list(VLLM.items())[: 3 if "0.19" in scheduler else None])
    elif scheduler.startswith("transformers"):
        options = TRANSFORMERS
    chosen = {name: draw(st.sampled_from(values)) for name, values in options.items()}
    drawn = cases(scheduler, **chosen)
    aging = chosen.get("policy") == "priority"
    return draw(drawn.filter(lambda case: case.load.follow is None) if aging else drawn)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(data=st.data())
@settings(max_examples=16)
def test_arrays_say_what_plans_say(scheduler: str, loop: str, data: st.DataObject) -> None:
    """Random loads, caches, options, all greedy, all sampled, or each request as it likes: row by row; and every text
    is that of its request alone.
    """
    sampling = data.draw(st.sampled_from((Sampling(), Sampling(temperature=1.0))))
    case = data.draw(odd_cases(scheduler))
    ids = [one.id for one in case.load.specs()]
    own = data.draw(st.dictionaries(st.sampled_from(ids), st.sampled_from(HOWS)))
    setup = replace(INLINE, sampling=sampling, requests=SamplingSettings(own))
    run, checked = toy_run(case, loop, setup=setup)
    check_texts(run, check_toy_text)
    check_derived(run, loop)
    for column in ("preempted", "cached_tokens", "wasted_rows"):
        event(f"{column}: {run.total(column) > 0}")
    event(f"blocks replaced: {run.replaced > 0}")
    event(f"padded to a captured size: {checked.padded_rows > 0}")
    event(f"of their own: {len(own)} of {len(ids)}")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(data=st.data(), every=st.sampled_from((4, 10, 30)))
@settings(max_examples=8)
def test_ends_that_only_the_text_knows(scheduler: str, loop: str, every: int, data: st.DataObject) -> None:
    """A text ends with its first end token, wherever the request stands when that comes back: also when it has lost
    its blocks meanwhile, or has given its client's patience up. What was still in flight is nobody's.
    """
    ends, made = tuple(range(0, VOCAB, every)), build.architecture_of
    case = data.draw(odd_cases(scheduler))
    with mock.patch.object(build, "architecture_of", lambda *of: made(*of).model_copy(update={"end_tokens": ends})):
        run, _ = toy_run(case, loop, setup=replace(INLINE, end_tokens=True))
    for one, text in run.engine.sequences.items():
        check_toy_text(text)
        assert all(token not in ends for token in text.outputs[:-1])
        row = run.rows[one.index]
        if row.status == "stop" and len(text.outputs) < one.output_tokens:
            assert text.outputs[-1] in ends
        assert row.status == "aborted" or len(text.outputs) == sum(row.token_runs[1::2]) > 0
    check_derived(run, loop)
    event(f"stops: {run.statuses['stop'] > 0}")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", ["vllm", "transformers_fifo", "sglang"])
def test_updates_that_the_buffer_has_no_room_for(scheduler: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's buffer has so many table entries at most; further ones go with it on their own, and all are written
    before its rows are computed: in this process and in a worker.
    """
    monkeypatch.setattr(batch, "MOST_UPDATES", 2)
    specs = [spec(i, 30, 4, arrival_ns=3 * MS * i) for i in range(4)]
    case, sent = Case(server(scheduler, 4, 60, 64, 4, sharing=True), Workload(specs, 4)), []
    build_step = Batcher.build

    def noted(*given: Any) -> Sent:
        sent.append(build_step(*given))
        return sent[-1]

    monkeypatch.setattr(Batcher, "build", noted)
    run, _ = toy_run(case, loop)
    check_texts(run, check_toy_text)
    assert max(one.header.updates for one in sent) == 2
    assert any(one.excess is not None and one.excess.shape[1] > 4 for one in sent)
    for device in ("inline", "process") if scheduler == "vllm" else ("inline",):
        check_texts(case.run(loop, Setup(device=device)))


CROWD = [spec(i, 8, 2, arrival_ns=(100 * MS if i else 0), **shared(0, 8)) for i in range(20)]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS[2:4])
def test_more_requests_than_blocks(scheduler: str, loop: str) -> None:
    """A request whose whole prompt is cached runs without a block of its own: transformers may have more requests
    under way than the cache has blocks, and each needs a slot.
    """
    run, _ = toy_run(Case(server(scheduler, 4, 6, 64, 1024, sharing=True), Workload(list(CROWD), 20)), loop)
    check_texts(run, check_toy_text)
    assert int(run.steps["rows"].max()) > 6


@given(
    header=st.builds(
        lambda rows, decodes, *sizes, **how: Header(rows, min(decodes, rows), 0, *sizes, **how)._replace(
            longest=1, further=rows - min(decodes, rows)
        ),
        *(st.integers(0, 69), st.integers(0, 69), st.integers(0, 100), st.just(1), st.just(0), st.integers(0, 82)),
        random=st.booleans(),
        padded=st.booleans(),
        beams=st.sampled_from((0, 3)),
    )
)
def test_every_step_fits_its_buffer(header: Header) -> None:
    """Arrays lie one after the other without gaps, and the longest of all are those that the buffer is made for."""
    sizes = Capacity(slots=7, width=11, rows=5, tokens=100, beams=3)
    assert header.size <= sizes.staging
    assert header.results <= sizes.results
    assert header.results == (3 if header.beams else 1) * header.sampling
    step = arrays(np.arange(sizes.staging), header)
    assert np.concatenate(step).tolist() == list(range(header.size))
    assert tuple(map(len, step)) == tuple(header.lengths)


def test_a_workload_nobody_sends() -> None:
    """No request: no step, and sizes that a device can allocate."""
    run, _ = toy_run(Case(server("vllm", 4, 6, 64, 4, sharing=True), Workload([], 0)), "async")
    assert len(run.steps) == 0
