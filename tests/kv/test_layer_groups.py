"""vLLM's cache of several layer groups: layers to groups, rules in closed form, and, by plans alone, what lies in every
block: each row finds its own tokens wherever a group sees any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import DEPTHS, MOST_TOKENS, asks, check_ends
from support.group_contents import GroupDrive, sliding
from support.helpers import Ask

from cbsim.kv.group_pool import GroupPool
from cbsim.kv.layer_groups import GroupIndex, GroupRule, LayerKind, States, grouped, keeps_state, rules, units
from cbsim.policy.groups import FULL, Attention, LayerGroup, Sight
from cbsim.policy.kind import SettingsError
from cbsim.policy.request import RequestSpec
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VllmOptions, VllmSettings, least_blocks, longest_sequence, resolve
from cbsim.workload.scheduler_tests import ChainedKeys


def chunked(span: int) -> Attention:
    return Attention(Sight.CHUNKED, span)


# -- layers to groups -------------------------------------------------------------------------------------------------


def group_layers(layers: Sequence[Attention], **given: Any) -> list[tuple[int, ...]]:
    return [group.layers for group in grouped([LayerKind(one, 1) for one in layers], 16, **given).groups]


def test_kinds_make_groups_of_one_size() -> None:
    """As many layers as the rarer kind has; kinds that are about as frequent make one group each, and pages stay
    unused. Every layer is in exactly one group."""
    five_to_one = [sliding(64)] * 5 + [FULL]
    assert group_layers(five_to_one * 2) == [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]
    assert group_layers([FULL] * 2 + [sliding(64)] * 3) == [(0, 1), (2, 4), (3,)]
    assert group_layers([FULL] * 3 + [sliding(64)] * 4) == [(0, 1, 2), (3, 4, 5, 6)]
    assert group_layers([sliding(64)] * 4) == [(0, 1, 2, 3)]
    assert group_layers(five_to_one, together=True) == [(0, 1, 2, 3, 4, 5)]
    assert grouped([LayerKind(one, 8) for one in five_to_one * 8], 16).block_bytes == 8 * 8


def test_smaller_pages_hold_more_tokens() -> None:
    """All pages have the bytes of the largest; hits are multiples of all blocks, content is named by the smallest."""
    made = grouped([LayerKind(FULL, 64), LayerKind(sliding(96), 32)], 16)
    assert [group.block_size for group in made.groups] == [16, 32]
    assert made.block_bytes == 64
    assert units(made.groups) == (32, 16)
    with pytest.raises(ValueError, match="no multiple"):
        grouped([LayerKind(FULL, 64), LayerKind(sliding(96), 48)], 16)


def packed(*layers: tuple[Attention, int]) -> tuple[list[tuple[int, ...]], int]:
    """The layers of each group, and the bytes of a block, where the pages of a block lie side by side."""
    made = grouped([LayerKind(*layer) for layer in layers], 16, outermost=True)
    assert {group.block_size for group in made.groups} == {16}
    return [group.layers for group in made.groups], made.block_bytes


def test_pages_of_several_sizes_lie_side_by_side() -> None:
    """Layers that see alike are a group, pages of any size in it. Where they repeat a pattern of sizes, all groups have
    as many repetitions; without one a sliding group is no larger than the others, or than one of its pages."""
    window = sliding(64)
    assert packed((FULL, 4), (window, 4), (FULL, 2), (window, 4), (window, 4)) == ([(0, 2), (1,), (3,), (4,)], 6)
    assert packed((FULL, 2), (FULL, 2), (window, 4), (window, 4), (window, 4)) == ([(0, 1), (2,), (3,), (4,)], 4)
    assert packed((FULL, 3), (FULL, 3), (window, 2), (window, 2), (window, 2), (window, 2)) == (
        [(0, 1), (2, 4), (3, 5)],
        6,
    )
    assert packed((FULL, 4), (FULL, 2), *[(window, 4), (window, 2)] * 2) == ([(0, 1), (2, 3, 4, 5)], 12)
    assert packed((FULL, 4), (FULL, 4), (FULL, 2), (window, 4)) == ([(0, 1, 2), (3,)], 10)


@given(
    span=st.integers(1, 40),
    size=st.sampled_from([1, 2, 4]),
    flight=st.integers(1, 30),
    tokens=st.integers(1, MOST_TOKENS),
)
def test_no_request_holds_more_than_its_cap(span: int, size: int, flight: int, tokens: int) -> None:
    """Blocks between what left the window, with `flight` tokens unsettled, and the last token planned."""
    rule = GroupRule(LayerGroup(sliding(span), (0,), size), size, 0, flight, MOST_TOKENS)
    for settled in range(MOST_TOKENS):
        end = min(settled + flight, MOST_TOKENS)
        assert rule.blocks_for(end) - rule.gone(settled) <= rule.most
    assert rule.goes_at(rule.gone(tokens)) > tokens
    assert rule.gone(rule.goes_at(3)) == 4


def test_the_longest_sequence_that_fits() -> None:
    """It fits and one token more does not; what is given and does not fit is refused with both numbers."""
    groups = grouped([LayerKind(one, 1) for one in (FULL, sliding(64))], 16).groups
    most = longest_sequence(groups, 128, 60, None, 4096)
    assert least_blocks(groups, 128, most) <= 60 < least_blocks(groups, 128, most + 1)
    assert longest_sequence(groups, 128, 60, None, 100) == 100
    with pytest.raises(ValueError, match="got 4096, which needs 269 blocks in 2 layer groups, the cache has 60"):
        longest_sequence(groups, 128, 60, 4096, 8192)


WINDOWED = shapes.model("tiny").model_copy(update={"attention": ("sliding 64", "full")})
H100 = shapes.hardware("h100-sxm")


def place(blocks: int | None) -> Place:
    return Place(WINDOWED, H100, depth=2, block_size=16, memory_fraction=0.9, num_blocks=blocks)


def test_a_block_is_of_one_group_s_layers() -> None:
    """Where half the layers slide, blocks are half as large and the memory has twice as many."""
    options = resolve(VllmSettings(), place(None))
    assert [len(group.layers) for group in options.groups] == [WINDOWED.layers // 2] * 2
    whole = resolve(VllmSettings(disable_hybrid_kv_cache_manager=True), place(None))
    assert [group.attention for group in whole.groups] == [FULL]
    assert options.num_blocks // 2 == whole.num_blocks


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"version": "0.19"}, "version", "got 0.19, must be 0.33 if layers have windows"),
        ({"preemption_mode": "swap"}, "preemption_mode", "got swap, must be recompute"),
        ({"kv_connector": "simple_cpu"}, "kv_connector", "got simple_cpu, must be none"),
        ({"reserve_output": True}, "reserve_output", "got true, must be false"),
        ({"prefix_cache_retention_interval": 24}, "prefix_cache_retention_interval", "got 24, must be a multiple of"),
        ({"max_model_len": 100_000}, "max_model_len", r"got 100000, which needs 7,\d+ blocks in 2 layer groups"),
    ],
)
def test_what_is_not_followed_is_refused(given: dict[str, Any], field: str, words: str) -> None:
    """One line that names field, value and bound."""
    with pytest.raises(SettingsError, match=words) as raised:
        resolve(VllmSettings(**given), place(2000))
    assert raised.value.field == field


# -- contents ---------------------------------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn, size: int, *, caches: bool) -> tuple[LayerGroup, ...]:
    """Groups of a few layers of up to three kinds, not one of full ones; some with larger blocks or with states."""
    mixed = draw(st.booleans())
    states = st.builds(Attention, st.just(Sight.STATE), st.sampled_from([0, 1]))
    kept = States(size, 2 if mixed else draw(st.sampled_from([2, 3]))) if caches else States(MOST_TOKENS, 1)
    spans = st.builds(sliding, st.integers(1, 14))
    chunks = st.builds(chunked, st.sampled_from([4 * size, 8 * size]))
    pool = draw(st.lists(st.one_of(st.just(FULL), spans, chunks, states), min_size=1, max_size=3))
    kinds = [LayerKind(one, draw(st.sampled_from([1, 2])) if mixed else 1) for one in pool]
    kinds = list({kind.attention: kind for kind in kinds}.values())
    made = grouped([*draw(st.lists(st.sampled_from(kinds), max_size=5)), *kinds], size, states=kept).groups
    return made if any(group.attention != FULL for group in made) else (*made, LayerGroup(sliding(5), (9,), size))


@st.composite
def cases(draw: st.DrawFn, depth: int) -> tuple[VllmOptions, list[Ask]]:
    size, caches = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([True, True, True, False]))
    groups = draw(layers(size, caches=caches))
    states = any(keeps_state(group) for group in groups)
    is_chunked = draw(st.booleans()) or (states and caches)
    tokens = draw(st.integers(1, 30)) if is_chunked else draw(st.integers(MOST_TOKENS, 40))
    bounds = rules(groups, retention=0, in_flight=tokens * depth, longest=MOST_TOKENS)
    least = max(least_blocks(groups, tokens * depth, MOST_TOKENS), sum(rule.capped(MOST_TOKENS) for rule in bounds))
    made = VllmOptions(
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        block_size=size,
        num_blocks=1 + least + draw(st.integers(0, 2 * least)),
        max_model_len=MOST_TOKENS,
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=tokens,
        enable_chunked_prefill=is_chunked,
        enable_prefix_caching=caches,
        prefix_cache_retention_interval=draw(st.sampled_from([0, 0, None, 8 * size])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2])),
        async_scheduling=depth > 1,
        groups=groups,
    )
    return made, draw(asks(size))


@DEPTHS
def test_rows_find_what_their_layers_see(depth: int) -> None:
    """Any mix of windows and states, tight caches, shared prefixes, cancelled requests: contents, accounts, ends."""

    @given(case=cases(depth))
    def check(case: tuple[VllmOptions, list[Ask]]) -> None:
        made, workload = case
        drive = GroupDrive(VllmScheduler(made), workload, depth)
        drive.run()
        check_ends(drive)
        assert not drive.refused, "a server that starts can serve any request"

    check()


def told(index: int, text: Sequence[int], outputs: int, arrives: int) -> Ask:
    """A request with this prompt, which says the same whatever came before."""
    whole = [*text, *[500 + index] * outputs]
    keys = KEYS.of(whole)
    spec = RequestSpec(index, f"r{index}", 0, len(text), outputs, outputs, 0, keys, 1, len(whole))
    return Ask(spec, arrives, None, None, whole)


KEYS = ChainedKeys(1)
GROUPS = grouped([LayerKind(FULL, 1), LayerKind(sliding(8), 1)], 2).groups


def options(depth: int, **given: Any) -> VllmOptions:
    usual = {"block_size": 2, "num_blocks": 200, "max_model_len": 64, "max_num_seqs": 8, "groups": GROUPS}
    usual |= {"max_num_batched_tokens": 16, "async_scheduling": depth > 1}
    return VllmOptions(**usual | given)


@DEPTHS
def test_the_second_sibling_pins_what_the_third_finds(depth: int) -> None:
    """Three prompts with 20 tokens in common and a window of 8: the first keeps the window's blocks at its end only, so
    the second finds nothing but learns where texts part; its own pass keeps the run before that, and the third hits."""
    texts = [[*range(20), *range(100 * (i + 1), 100 * (i + 1) + 13)] for i in range(3)]
    workload = [told(i, text, 3, 12 * i) for i, text in enumerate(texts)]
    drive = GroupDrive(VllmScheduler(options(depth)), workload, depth)
    drive.run()
    check_ends(drive)
    assert [drive.requests[ask.spec].cached for ask in workload] == [0, 0, 20]


@DEPTHS
def test_a_window_is_all_that_a_long_answer_holds(depth: int) -> None:
    """40 tokens on, the full group has all 20 blocks of it and the sliding group those of its window; kept as one full
    group, nothing leaves."""
    scheduler = VllmScheduler(options(depth))
    pool = scheduler.pool
    assert isinstance(pool, GroupPool)
    held: list[list[int]] = []
    drive = GroupDrive(scheduler, [told(0, range(4), 40, 0)], depth)
    drive.on_step = lambda plan, rows: held.extend(
        [len(table.live) for table in pool.group_tables(scheduler.requests[row.spec])] for row in rows
    )
    drive.run()
    assert max(full for full, _ in held) == 22
    assert max(window for _, window in held[8:]) <= 4 + depth
    assert drive.inside.passed > 0


# -- faults -----------------------------------------------------------------------------------------------------------


@DEPTHS
def test_a_block_freed_a_step_too_early_is_found(depth: int) -> None:
    """A scheduler that takes the window for one step's tokens less than it is frees a block that is still seen."""
    short = tuple(replaced(group, -depth) for group in GROUPS)
    workload = [told(i, range(50 * i, 50 * i + 9), 30, i) for i in range(2)]
    GroupDrive(VllmScheduler(options(depth)), workload, depth, GROUPS).run()
    with pytest.raises(AssertionError, match="group 1, place"):
        GroupDrive(VllmScheduler(options(depth, groups=short)), workload, depth, GROUPS).run()


@DEPTHS
def test_a_hit_that_ignores_the_window_is_found(depth: int) -> None:
    """A lookup that is content with the last block of a window: the rest of it is nowhere."""
    text = range(33)
    workload = [told(0, text, 3, 0), told(1, [*text[:30], 400, 401, 402], 3, 12)]
    GroupDrive(VllmScheduler(options(depth)), workload, depth).run()
    scheduler = VllmScheduler(options(depth))
    pool = scheduler.pool
    assert isinstance(pool, GroupPool)
    narrow = [replaced(group, 3 - group.attention.span) for group in GROUPS]
    pool._finder = GroupIndex(rules(narrow, retention=0, in_flight=16, longest=64), pool._index)
    with pytest.raises(AssertionError, match="a hit without a block that is seen"):
        GroupDrive(scheduler, workload, depth).run()


def replaced(group: LayerGroup, more: int) -> LayerGroup:
    """The group with another window."""
    attention = group.attention
    return group._replace(attention=attention if attention == FULL else sliding(attention.span + more))


def test_options_without_groups_are_a_plain_cache() -> None:
    """Nothing of this is in the way of layers that see everything."""
    assert not VllmScheduler(replace(options(1), groups=())).pool.groups
    together = grouped([LayerKind(FULL, 1), LayerKind(sliding(8), 1)], 2, together=True).groups
    assert not VllmScheduler(options(1, groups=together)).pool.groups


# -- what layers see, against every query token's own list -------------------------------------------------------------

attentions = st.one_of(
    st.just(FULL), st.builds(Attention, st.sampled_from((Sight.SLIDING, Sight.CHUNKED)), st.integers(1, 9))
)


def sees(attention: Attention, place: int) -> set[int]:
    """Places that the query token at `place` attends to."""
    if attention.sight is Sight.SLIDING:
        return {i for i in range(place + 1) if place - i < attention.span}
    if attention.sight is Sight.CHUNKED:
        return {i for i in range(place + 1) if i // attention.span == place // attention.span}
    return set(range(place + 1))


@given(attention=attentions, start=st.integers(0, 30), tokens=st.integers(1, 30))
def test_what_query_tokens_see(attention: Attention, start: int, tokens: int) -> None:
    """Pairs, tokens read, and those that nobody sees from here on."""
    lists = [sees(attention, place) for place in range(start, start + tokens)]
    assert attention.pairs(start, tokens) == sum(map(len, lists))
    assert attention.seen(start, tokens) == len(set.union(*lists))
    assert attention.gone(start) == min(sees(attention, start))


# -- states -----------------------------------------------------------------------------------------------------------

STATE = Attention(Sight.STATE)
QWEN3_NEXT = {"rule": "gated_delta", "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}


def with_linear(linear: dict[str, Any], **fields: Any) -> shapes.ModelShape:
    """A model of these layers beside attention of two KV heads of 256."""
    shape = shapes.model("tiny").model_dump() | {"layers": 8, "heads": 16, "kv_heads": 2, "head_dim": 256}
    shape |= {"attention": ("linear", "linear", "linear", "full"), "linear": linear, "dtype": "bfloat16"}
    return shapes.ModelShape.model_validate(shape | fields)


def solved(model: shapes.ModelShape, gpus: int = 1, blocks: int | None = 2000, **given: Any) -> VllmOptions:
    site = Place(model, H100, depth=2, block_size=16, memory_fraction=0.9, num_blocks=blocks, gpus=gpus)
    return resolve(VllmSettings(**given), site)


def test_a_page_of_attention_holds_a_state() -> None:
    """As for Qwen3-Next-80B: blocks of 544 tokens on one GPU, of 272 on four, where a KV head is copied. States within,
    of its kernel for Hopper, need multiples of 64. Without prefixes a state's block is the whole sequence."""
    model = with_linear(QWEN3_NEXT)
    assert model.state_bytes() == 3 * 8192 * 2 + 32 * 128 * 128 * 2
    assert [solved(model, gpus, state_checkpoints=False).block_size for gpus in (1, 4)] == [544, 272]
    found, alone = solved(model), solved(model, enable_prefix_caching=False)
    assert (found.block_size, alone.block_size) == (576, 544)
    assert [group.states for group in found.groups] == [3, 3, 3, 0]
    assert [group.states for group in alone.groups] == [1, 1, 1, 0]
    assert {group.block_size for group in alone.groups[:3]} == {model.max_position}
    assert solved(with_linear(QWEN3_NEXT | {"rule": "kda", "key_heads": 32, "state_dtype": None})).block_size > 1000
    latent = {"kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    mla = with_linear(QWEN3_NEXT, latent=latent, kv_heads=1, head_dim=576)
    assert solved(mla, state_checkpoints=False).block_size == 1024  # a multiple of 128


@given(data=st.data())
def test_states_are_as_large_as_a_recount(data: st.DataObject) -> None:
    """Bytes of a state, the least block whose page holds it, every layer in one group, and the blocks in the memory."""
    tensor = data.draw(st.sampled_from([1, 2, 4]), label="tensor")
    rule = data.draw(st.sampled_from(["gated_delta", "kda", "mamba2"]), label="rule")
    keys = data.draw(st.sampled_from([1, 4, 8] if rule == "mamba2" else [4, 8]), label="keys")
    values, conv = data.draw(st.sampled_from([8, 16]), label="values"), data.draw(st.integers(1, 5), label="conv")
    key, value = (data.draw(st.sampled_from([16, 32, 96]), label=name) for name in ("key", "value"))
    kept = data.draw(st.sampled_from([None, "float32", "bfloat16"]), label="type")
    linear = {"rule": rule, "key_heads": keys, "value_heads": values, "key_dim": key, "value_dim": value}
    pattern = data.draw(st.lists(st.sampled_from(["linear", "full", "sliding 64"]), max_size=6), label="layers")
    pattern += ["linear", "full"]
    model = with_linear(linear | {"conv": conv, "state_dtype": kept}, attention=tuple(pattern), layers=2 * len(pattern))
    groups = tensor if keys % tensor else keys  # of mamba2, copied
    channels = [*range(0, values * value, tensor), *range(0, 2 * groups * key, tensor)]
    numbers = sum(1 for _ in range(0, values, tensor) for _ in range(value) for _ in range(key))
    width = {"float32": 4, "bfloat16": 2}[kept or ("float32" if rule == "kda" else "bfloat16")]
    assert model.state_bytes(tensor) == len(channels) * (conv - 1) * 2 + numbers * width
    made = solved(model, tensor, None, state_checkpoints=False)
    token = 2 * 256 * 2 * (2 // tensor or 1)
    fits = next(size for size in range(16, 1 << 20, 16) if size * token >= model.state_bytes(tensor))
    assert made.block_size == fits
    assert sorted(layer for group in made.groups for layer in group.layers) == [*range(model.layers)]
    site = Place(model, H100, 2, 16, 0.9, None, tensor)
    most = max(len(group.layers) for group in made.groups)
    beside = model.shard_bytes(tensor) + shapes.VLLM_RUNTIME_BYTES
    beside += shapes.activation_bytes(model, made.max_num_batched_tokens, made.max_num_seqs)
    assert made.num_blocks == (int(site.memory_bytes * 0.9) - beside) // (most * fits * token)


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"version": "0.19"}, "version", "got 0.19, must be 0.33 if layers have states"),
        ({"kv_connector": "offloading", "cpu_bytes_to_use": 1 << 30}, "kv_connector", "got offloading, must be none"),
        ({"preemption_mode": "swap"}, "preemption_mode", "got swap, must be recompute"),
        ({"disable_hybrid_kv_cache_manager": True}, "disable_hybrid_kv_cache_manager", "got true, must be false"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill", "got false, must be true"),
        (
            {"prefix_cache_retention_interval": 16},
            "prefix_cache_retention_interval",
            r"a multiple of the block \(576\)",
        ),
    ],
)
def test_what_states_exclude_is_refused(given: dict[str, Any], field: str, words: str) -> None:
    """In one line. vLLM refuses the last three itself; the others are not followed."""
    with pytest.raises(SettingsError, match=words) as raised:
        solved(with_linear(QWEN3_NEXT), **given)
    assert raised.value.field == field


def with_states(blocks: int, size: int = 2) -> tuple[LayerGroup, ...]:
    return grouped([LayerKind(one, 1) for one in (STATE, STATE, FULL)], 2, states=States(size, blocks)).groups


def test_layers_with_states_make_groups_like_others() -> None:
    """States of several kinds are groups apart. A page is as large as the others' however small the state, and where
    the pages of a block lie side by side, a group has no more states than fit beside the others."""
    assert [group.layers for group in with_states(2)] == [(0,), (1,), (2,)]
    assert group_layers([*[STATE] * 3, FULL] * 12) == [
        *(tuple(at for at in range(48) if at % 4 < 3)[first::3] for first in range(3)),
        tuple(range(3, 48, 4)),
    ]
    assert group_layers([STATE, Attention(Sight.STATE, 1), FULL]) == [(0,), (1,), (2,)]
    made = grouped([LayerKind(STATE, 5), LayerKind(FULL, 16), LayerKind(sliding(9), 8)], 4, states=States(4, 3))
    assert [(group.block_size, group.states) for group in made.groups] == [(4, 3), (4, 0), (8, 0)]
    assert made.block_bytes == 16
    assert packed(*[(STATE, 4)] * 4, (FULL, 4), (FULL, 2), (FULL, 2)) == ([(0, 2), (1, 3), (4, 5, 6)], 8)


@DEPTHS
@pytest.mark.parametrize("blocks", [2, 3])
def test_states_are_found_at_boundaries(depth: int, blocks: int) -> None:
    """A prompt ends rows where later ones may go on: before its last token, and, once seen, where texts part. With a
    third block the row goes on and leaves that state within. The same prompt again finds all but its last token."""
    texts = [[*range(20), *range(100 * (i + 1), 100 * (i + 1) + 13)] for i in range(3)]
    workload = [told(i, text, 3, 12 * i) for i, text in enumerate([*texts, texts[0]])]
    scheduler = VllmScheduler(options(depth, groups=with_states(blocks), max_num_batched_tokens=64))
    drive, rows = GroupDrive(scheduler, workload, depth), list[tuple[str, int, int]]()
    drive.on_step = lambda plan, listed: rows.extend((row.spec.id, row.start, row.tokens) for row in listed)
    drive.run()
    check_ends(drive)
    assert [drive.requests[ask.spec].cached for ask in workload] == [0, 0, 20, 32]
    prompts = [row for row in rows if row[2] > 1]
    whole = {2: [("r0", 0, 32), ("r1", 0, 20), ("r1", 20, 12)], 3: [("r0", 0, 33), ("r1", 0, 20), ("r1", 20, 13)]}
    assert prompts[:3] == whole[blocks]
    assert bool(drive.inside.states_within) == (blocks == 3)


@DEPTHS
def test_without_prefixes_a_request_has_one_state(depth: int) -> None:
    """However long it is; rows end where the budget does."""
    scheduler = VllmScheduler(options(depth, groups=with_states(1, 64), enable_prefix_caching=False))
    drive, held = GroupDrive(scheduler, [told(0, range(21), 9, 0)], depth), list[list[int]]()
    pool = scheduler.pool
    assert isinstance(pool, GroupPool)
    drive.on_step = lambda plan, rows: held.extend(
        [len(table) for table in pool.tables_of(scheduler.requests[row.spec])] for row in rows
    )
    drive.run()
    assert {tuple(each[:2]) for each in held} == {(1, 1)}
    assert [each[2] for each in held][:2] == [8, 11]


@DEPTHS
@pytest.mark.parametrize(("blocks", "budget"), [(2, 31), (3, 80)], ids=["rows end anywhere", "in the same step"])
def test_a_state_that_is_not_there_is_found(depth: int, blocks: int, budget: int) -> None:
    """A pool that takes states for windows: a row ends within a block, whose state is then not that of its boundary; a
    prompt goes on from a state that a row of the same step is only about to compute."""
    workload = [told(i, [*range(32), 400 + i], 3, 0) for i in range(2)]
    scheduler = VllmScheduler(options(depth, groups=with_states(blocks), max_num_batched_tokens=budget))
    GroupDrive(VllmScheduler(scheduler.options), workload, depth).run()
    assert isinstance(scheduler.pool, GroupPool)
    scheduler.pool._states = []
    with pytest.raises(AssertionError, match="group 0, state behind"):
        GroupDrive(scheduler, workload, depth).run()
