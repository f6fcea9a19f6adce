"""Warm-ups: they fit the buffers, meet every way to split a row, and are steps that a model can compute."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.tiny_runs import WAYS, capacities, tiny_executor

from cbengine.batch import Capacity
from cbengine.device.cuda import warm_ups
from cbengine.device.layout import arrays
from cbengine.sampling import Sampling
from cbsim.policy.captures import captured_sizes


@given(
    capacity=capacities, reach=st.integers(2, 400), graphs=st.booleans(), random=st.booleans(), beams=st.integers(0, 4)
)
def test_warm_ups_fit_the_buffers_and_the_last_is_the_largest_step(
    capacity: Capacity, reach: int, graphs: bool, random: bool, beams: int
) -> None:
    """All rows sample, and together they have all the query tokens that slots can take. Searches have steps of whole
    ones.
    """
    capacity = capacity._replace(beams=beams)
    done = list(warm_ups(capacity, reach, graphs=graphs, random=random))
    searches = [header for header, _ in done if header.beams]
    assert bool(searches) == (0 < beams <= capacity.rows)
    assert all(header.sampling % beams == 0 for header in searches)
    assert max((header.rows for header in searches), default=0) in (0, capacity.rows // max(beams, 1) * beams)
    for header, values in done:
        assert len(values) == header.size <= capacity.staging
        assert header.sampling == header.rows <= capacity.sampling
        assert header.tokens <= max(capacity.tokens, capacity.rows)
        step = arrays(values, header)
        counts = np.diff(step.starts)
        assert counts.tolist() == step.kv_tokens.tolist()
        assert 1 <= counts.min() <= counts.max() == header.longest <= reach
        assert (counts[: header.decodes] == 1).all()
    last = done[-1][0]
    assert last.rows == capacity.rows
    assert last.tokens == capacity.tokens or last.longest == reach
    assert {header.padded for header, _ in done} == ({False} if graphs else {False, True})


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@given(most=st.integers(1, 1100))
@settings(max_examples=60)
def test_warm_ups_meet_every_way_to_split_a_row(kv_heads: int, most: int) -> None:
    """The kernel that joins the parts of a row is compiled for each number of parts: none is left for the run."""
    ops = pytest.importorskip(
        "cbengine.model.kernels.triton_ops", reason="the kernels are written in Triton"
    ).TritonOps(132)
    capacity = Capacity(slots=most, width=4, rows=most, tokens=most + 64)
    met = {
        ops._splits(header.decodes * kv_heads)
        for header, _ in warm_ups(capacity, 64, graphs=False, random=False)
        if header.decodes
    }
    captured = {ops._splits(size * kv_heads) for size in captured_sizes(most)}
    needed = {ops._splits(rows * kv_heads) for rows in range(1, most + 1)}
    assert needed <= met
    assert needed <= captured | {1}


@given(capacity=capacities, reach=st.integers(200, 400), random=st.booleans())
def test_warm_ups_mix_prefill_and_decode_at_every_size(capacity: Capacity, reach: int, random: bool) -> None:
    """A library of matrix products loads its kernels when a size is first met: sizes double from 64 query tokens up to
    the budget, with decoding rows beside chunks where there are two rows; no table is updated.
    """
    met = [header for header, _ in warm_ups(capacity, reach, graphs=True, random=random)][:-1]
    assert all((header.decodes > 0) == (capacity.rows > 1) and header.further > 0 for header in met)
    assert (64 << len(met)) >= capacity.tokens
    roomy = [header.tokens for header in met if header.tokens < reach]
    assert roomy == [64 << i for i in range(len(roomy))]


@given(capacity=capacities, reach=st.integers(2, 400), random=st.booleans(), drafts=st.integers(1, 64))
def test_warm_ups_verify_as_many_drafts_as_a_row_may_have(
    capacity: Capacity, reach: int, random: bool, drafts: int
) -> None:
    """No row is a decode row; the last step has as many drafts as its tokens allow."""
    capacity = capacity._replace(drafts=drafts)
    for header, values in warm_ups(capacity, reach, graphs=False, random=random):
        assert len(values) == header.size <= capacity.staging
        assert header.results <= capacity.results
        verifies = arrays(values, header).verifies
        assert (header.decodes, header.most_drafts, header.verified) == (0, drafts, verifies.sum())
        counts = np.diff(arrays(values, header).starts)
        assert (verifies == np.minimum(counts - 1, drafts)).all()


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_warm_ups_are_steps_that_a_model_can_compute(how: Sampling) -> None:
    """Places, positions and tables are within bounds, every row gets a token, and no slot but scratch is touched."""
    capacity = Capacity(slots=3, width=2, rows=3, tokens=70)
    executor, cache = tiny_executor(capacity)
    for header, values in warm_ups(capacity, executor.reach, graphs=False, random=not how.greedy):
        step = arrays(torch.from_numpy(values), header)
        executor.update_tables(step)
        tokens = executor.run(step, header)
        assert tokens.shape == (header.sampling,)
        assert int(tokens.min()) >= 0
    assert not cache.keys[:, : cache.scratch].any()
    assert not executor._last[: capacity.slots].any()
