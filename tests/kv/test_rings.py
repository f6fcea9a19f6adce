"""transformers' caches of layers with windows: groups and sizes by hand, and, by plans alone, what lies in every page:
each row finds the tokens that its layers see, also behind forks, stays on the host and rings that went round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from support.cases import DEPTHS, MOST_TOKENS, asks, check_ends
from support.examples import examples
from support.group_contents import GroupDrive, sliding
from support.helpers import Ask

from cbsim.kv.sectors import HostSectors
from cbsim.kv.table_pools import RingPool
from cbsim.policy.groups import FULL, Attention, pages_of
from cbsim.policy.kind import SettingsError
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import Direction
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.transformers.scheduler import TransformersScheduler
from cbsim.schedulers.transformers.scheduler_523 import KindsOfLayers
from cbsim.schedulers.transformers.settings import (
    FIFO,
    PREFILL_FIRST,
    TransformersOptions,
    TransformersSettings,
    cut,
    layer_groups,
    resolve,
)

Case = tuple[Callable[[], TransformersScheduler], list[Ask]]


# -- layers to groups -------------------------------------------------------------------------------------------------


def test_layers_are_cut_in_groups_or_kinds() -> None:
    """5.17: groups as large as divides every kind, in order of first appearance. 5.23: a group a kind, whose blocks are
    as many pages as its layers are times the smallest piece. Rings cover the window."""
    layers = [sliding(50), sliding(50), FULL, sliding(50), sliding(50), FULL]
    old, new = cut(layers, 16, "5.17"), cut(layers, 16, "5.23")
    assert [group.layers for group in old.groups] == [(0, 1), (3, 4), (2, 5)]
    assert [group.layers for group in new.groups] == [(0, 1, 3, 4), (2, 5)]
    assert [group.ring for group in old.groups] == [4, 4, 0]
    assert (old.layers, pages_of(old.groups), pages_of(new.groups)) == (2, [1, 1, 1], [2, 1])
    assert cut([FULL] * 4, 16, "5.23").groups == ()
    assert cut([sliding(64)] * 4, 16, "5.17").groups[0].layers == (0, 1, 2, 3)


def test_a_sector_is_whole_blocks_of_every_kind() -> None:
    """22 layers slide and 10 see all: pages of two layers, blocks of 11 and of 5, sectors of 55."""
    made = cut([*[sliding(512)] * 11, *[FULL] * 5] * 2, 256, "5.23")
    assert (made.layers, pages_of(made.groups), made.per_sector(1 << 20)) == (2, [11, 5], 55)
    assert cut([sliding(512)] * 3, 4, "5.23").per_sector(48) == 8  # 128 bytes is a unit, too


def place(attention: Sequence[str], **given: Any) -> Place:
    model = shapes.model("tiny").model_copy(update={"attention": tuple(attention), "layers": 6})
    usual = {"depth": 1, "block_size": 16, "memory_fraction": 0.9, "num_blocks": 120}
    return Place(model, shapes.hardware("h100-sxm"), **usual | given)


def test_windows_that_transformers_has_not_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"windows of \[32, 64\] tokens"):
        layer_groups(place(["sliding 64", "sliding 32", "full"]), "5.17")


def test_given_blocks_are_of_all_layers_in_523() -> None:
    """As recorded of 120 blocks of six layers: 180 sectors of four layers. 5.17 takes the number for its groups.
    Nothing is read by the fast path."""
    new = resolve(TransformersSettings(name=FIFO, version="5.23"), place(["sliding 50", "sliding 50", "full"]))
    assert (new.num_blocks, new.blocks_per_sector, new.pages) == (360, 2, [2, 1])
    old = resolve(TransformersSettings(name=FIFO), place(["sliding 50", "sliding 50", "full"]))
    assert (old.num_blocks, len(old.groups)) == (120, 3)
    assert old.max_blocks_per_request == new.max_blocks_per_request == 0


def test_smaller_blocks_make_more_of_them() -> None:
    """Groups of a third of the layers: about three times as many blocks in the same memory, by 5.17's equation."""
    hybrid, plain = (
        resolve(TransformersSettings(name=FIFO, max_batch_tokens=512), place(attention, num_blocks=None))
        for attention in (["sliding 50", "sliding 50", "full"], ["full"])
    )
    assert 2 < hybrid.num_blocks / plain.num_blocks < 3


# -- contents ---------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, version: str) -> Case:
    """A scheduler of one window, with layers that see all or without, on a cache of little more than a request."""
    size, window = draw(st.sampled_from([1, 3, 4])), sliding(draw(st.integers(1, 14)))
    layers = [window, *draw(st.lists(st.sampled_from([window, FULL]), max_size=5))]
    made = cut(draw(st.permutations(layers)), size, version)
    per = made.per_sector(128) if version == "5.23" else 1
    least = sum((MOST_TOKENS // size + 2) * pages for pages in pages_of(made.groups))
    least = -(-least // per) + len(made.groups) if version == "5.23" else least
    options = TransformersOptions(
        name=draw(st.sampled_from([FIFO, PREFILL_FIRST])),
        version=version,
        block_size=size,
        num_blocks=draw(st.integers(least, 3 * least)) * per,
        max_batch_tokens=draw(st.integers(1, 30)),
        max_requests_per_batch=draw(st.integers(1, 8)),
        max_blocks_per_request=0,
        safety_margin=draw(st.sampled_from([0.0, 0.0, 0.2])),
        allow_block_sharing=draw(st.booleans()),
        host_blocks=draw(st.sampled_from([0, 0, least // 2, 2 * least])) * per,
        blocks_per_sector=per,
        groups=made.groups,
    )
    return partial(KindsOfLayers if version == "5.23" else TransformersScheduler, options), draw(asks(size))


VERSIONS = pytest.mark.parametrize("version", ["5.17", "5.23"])


@VERSIONS
@DEPTHS
def test_rows_find_what_their_layers_see(version: str, depth: int) -> None:
    """Forks, cancels of anybody at any time, a host of a few blocks: contents, accounts and ends."""

    @given(case=cases(version))
    @examples(50)
    def check(case: Case) -> None:
        build, workload = case
        drive = GroupDrive(build(), workload, depth)
        drive.run()
        check_ends(drive)
        assert not drive.refused, "the cache holds the longest request"

    check()


# -- by hand ----------------------------------------------------------------------------------------------------------


def scheduler(version: str, blocks: int, layers: Sequence[Attention], **changes: Any) -> TransformersScheduler:
    made = cut(layers, 4, version)
    usual = {"max_batch_tokens": 32, "max_requests_per_batch": 8, "max_blocks_per_request": 0, "safety_margin": 0.0}
    usual |= {"allow_block_sharing": True, "blocks_per_sector": made.per_sector(128) if version == "5.23" else 1}
    options = TransformersOptions(
        name=FIFO, version=version, block_size=4, num_blocks=blocks, groups=made.groups, **usual | changes
    )
    return (KindsOfLayers if version == "5.23" else TransformersScheduler)(options)


def told(index: int, prompt: int, outputs: int) -> Ask:
    return Ask(RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs), 0, None, None, range(prompt + outputs))


@VERSIONS
def test_a_ring_does_not_grow(version: str) -> None:
    """A window of 8 tokens takes two blocks of 4, however long the answer; layers that see all take all."""
    policy = scheduler(version, 40, [sliding(8), FULL])
    lengths: list[list[int]] = []
    drive = GroupDrive(policy, [told(0, 5, 30)], 1)
    drive.on_step = lambda plan, rows: lengths.extend(
        [len(table) for table in policy.pool.tables_of(policy.requests[row.spec])] for row in rows
    )
    drive.run()
    assert lengths[-1] == [2, 9]
    assert max(ring for ring, _ in lengths) == 2


@VERSIONS
def test_only_windows_charge_what_they_see(version: str) -> None:
    """A row of sliding layers reads a window at most, so more of them fit a step's budget of reads."""
    policy = scheduler(version, 40, [sliding(8)] * 2)
    drive = GroupDrive(policy, [told(0, 30, 30)], 1)
    drive.run()
    (request,) = drive.requests.values()
    assert policy._reads(request) == policy.options.window == 8
    assert scheduler(version, 40, [sliding(8), FULL])._reads(request) == request.computed > 8


def test_the_host_counts_again_what_it_lacks_after_reclaiming() -> None:
    """Where the original does not, and may die of it: two kinds, whose blocks came back in another order."""
    host = HostSectors(8, [2, 1], 2)
    first = host.take([2, 3])
    assert first == [[2, 3], [0, 2, 3]]  # sectors 3 and 2 are of the first kind, 1 and 0 of the other
    host.give(first)
    assert host.take([4, 0]) == [[0, 1, 2, 3], []]
    host.check()
    assert host.take([0, 1]) is None


def test_prefixes_are_not_looked_up() -> None:
    """With a window no prompt finds another's blocks; equal blocks of layers that see all are one in 5.17."""
    policy = scheduler("5.17", 60, [sliding(8), FULL])
    keys = {"prefix": (7,), "prefix_block_tokens": 12, "prefix_tokens": 12}
    specs = [RequestSpec(i, f"r{i}", 0, 12, 4, 4, **keys) for i in range(2)]
    drive = GroupDrive(policy, [Ask(spec, 0, None, None, range(16)) for spec in specs], 1)
    drive.run()
    assert all(request.cached == 0 for request in drive.requests.values())
    assert drive.inside.replaced == 3  # of the second request, each once the prompts of both have completed
    pool = policy.pool
    assert isinstance(pool, RingPool)
    assert pool.keyed == 3


# -- faults -----------------------------------------------------------------------------------------------------------


@VERSIONS
@pytest.mark.parametrize("way", [Direction.COPY, Direction.OUT, Direction.IN])
def test_moves_that_are_not_made_are_found(version: str, way: Direction) -> None:
    """Each kind of move matters: without it some row reads what is not its own."""

    @seed(1)  # swaps are rare among random cases
    @given(case=cases(version))
    @settings(max_examples=300, database=None, phases=[Phase.generate])
    def look(case: Case) -> None:
        build, workload = case
        drive = GroupDrive(build(), workload, 1)
        rows = drive.inside.rows

        def without(plan: StepPlan) -> list[Row]:
            lost = [move for move in plan.transfers if move.direction is way]
            made = rows(plan)
            for move in lost:
                for place_written in move.written:
                    drive.inside.held[place_written] = {}
            return made

        drive.inside.rows = without  # type: ignore[method-assign]
        drive.run()

    with pytest.raises(AssertionError, match="group"):
        look()
