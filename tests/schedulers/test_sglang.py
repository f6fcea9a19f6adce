"""SGLang's scheduler: who waits for whom, who is overtaken for ever, what a client's change of mind leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import DEPTHS, Case, ran, sglang_cases, with_states
from support.helpers import Ask, Drive

from cbsim.policy.kind import SettingsError
from cbsim.policy.request import Finish, RequestSpec
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.sglang.scheduler import SglangScheduler
from cbsim.schedulers.sglang.settings import SglangOptions, SglangSettings, resolve

OPTIONS = SglangOptions(
    block_size=1, num_blocks=400, max_running_requests=2, chunked_prefill_size=-1, context_length=200
)
OTHERS = 40


def scheduler(**more: Any) -> SglangScheduler:
    return SglangScheduler(replace(OPTIONS, **more))


def spec(index: int, prompt: int, outputs: int, **fields: Any) -> RequestSpec:
    return RequestSpec(index, f"r{index:03}", 0, prompt, outputs, outputs, **fields)


def begun(drive: Drive) -> list[str]:
    """Ids in the order of their first rows."""
    seen: dict[str, None] = {}
    ran(drive, lambda plan, rows: seen.update(dict.fromkeys(row.spec.id for row in rows)))
    return list(seen)


def overtaken(victim: RequestSpec, others: list[RequestSpec], *, apart: int = 1, **more: Any) -> int:
    """How many of a steady stream, so many polls apart, get in before one that comes at its beginning."""
    asks = [Ask(victim, 2, None, None), *(Ask(other, apart * i, None, None) for i, other in enumerate(others))]
    order = begun(Drive(scheduler(max_running_requests=1, **more), asks, 1))
    return order.index(victim.id)


SHARED: dict[str, Any] = {"prefix": tuple(range(40)), "prefix_block_tokens": 1, "prefix_tokens": 40}


@pytest.mark.parametrize(
    ("victim", "other", "more"),
    [
        (spec(0, 40, 3), spec(1, 40, 4), {"schedule_policy": "lof"}),
        (spec(0, 41, 3), spec(1, 41, 3, **SHARED), {"schedule_policy": "lpm"}),
        (spec(0, 41, 3), spec(1, 41, 3, **SHARED), {"schedule_policy": "dfs-weight"}),
        (spec(0, 50, 3), spec(1, 10, 3), {"schedule_policy": "shortest-prefill-first"}),
        (spec(0, 40, 3), spec(1, 40, 3, priority=1), {"enable_priority_scheduling": True}),
    ],
    ids=["lof", "lpm", "dfs-weight", "shortest-prefill-first", "priorities"],
)
def test_who_is_overtaken_for_ever(victim: RequestSpec, other: RequestSpec, more: dict[str, Any]) -> None:
    """As long as better ones come, faster than they are served, it does not begin; first come, first served it would
    be among the first."""
    others = [replace(other, index=i, id=f"r{i:03}") for i in range(1, OTHERS)]
    assert overtaken(victim, others, **more) == OTHERS - 1
    assert overtaken(victim, others) <= 3


def test_a_long_prompt_has_its_turn_under_hrrn() -> None:
    """The more others have processed, the sooner it is its turn, if they do not pile up; shortest first it has none."""
    victim, others = spec(0, 50, 3), [spec(i, 10, 3) for i in range(1, OTHERS)]
    assert overtaken(victim, others, apart=4, schedule_policy="hrrn") < OTHERS // 2
    assert overtaken(victim, others, apart=4, schedule_policy="shortest-prefill-first") > OTHERS // 2


@DEPTHS
@given(case=sglang_cases("fcfs"))
@settings(max_examples=60)
def test_first_come_first_served(depth: int, case: Case) -> None:
    """Under fcfs without priorities requests begin in the order in which they came, whatever the budgets."""
    build, workload = case
    built = build()
    assert isinstance(built, SglangScheduler)
    options = replace(built.options, enable_priority_scheduling=False)
    drive = Drive(SglangScheduler(options), [ask for ask in workload if ask.cancelled is None], depth)
    order = begun(drive)
    assert order == [spec.id for spec in drive.requests]


@DEPTHS
def test_a_prompt_in_the_middle_and_a_decode_in_its_way(depth: int) -> None:
    """Decode rounds between the chunks of a long prompt fill the cache: the original aborts the one that decodes, here
    it gives way and ends later."""
    more = {"num_blocks": 60, "chunked_prefill_size": 8, "prefill_decode_interval": 6}
    asks = [Ask(spec(0, 8, 40), 0, None, None), Ask(spec(1, 36, 2), 0, None, None)]
    drive = ran(Drive(scheduler(**more, schedule_conservativeness=0.02), asks, depth))
    assert drive.requests[asks[0].spec].preemptions > 0
    assert {reason for _, reason in drive.finished} == {Finish.LENGTH}


def test_after_a_rest_the_share_kept_free_is_the_first_one_again() -> None:
    """It falls with every decode step; when all is over and a request arrives, passes have gone by without work."""
    idle = scheduler(prefill_decode_interval=3)
    drive = Drive(idle, [Ask(spec(0, 10, 20), 0, None, None)], 1)
    drive.run()
    assert idle.ratio < idle.options.first_ratio
    idle.add(spec(1, 10, 20))
    assert (idle.ratio, idle.hold) == (idle.options.first_ratio, 0)


@pytest.mark.parametrize(("room", "lasts"), [(32, False), (33, True)])
def test_memory_until_all_have_written_what_they_may(room: int, lasts: bool) -> None:
    """A prompt of 10 with a page beside it, 20 outputs, and a token that has to stay free: more than 32 of room."""
    waiting = scheduler(ignore_eos=True, disable_radix_cache=True)
    waiting.add(spec(0, 10, 20))
    entry = waiting.waiting.entries[0]
    entry.todo = 10
    assert waiting.make_prefill().lasts(entry, [], room) is lasts


def test_refusals_name_the_limit() -> None:
    """A prompt that leaves no room in a sequence, or no page of an empty cache, and a queue that is full."""
    assert scheduler().refusal(spec(0, 193, 1)) is None
    assert scheduler().refusal(spec(0, 194, 1)) == "prompt of 194 tokens, context_length allows 193"
    assert scheduler(num_blocks=100).refusal(spec(0, 94, 1)) == "prompt of 94 tokens, the cache allows 93"
    paged = scheduler(num_blocks=5, block_size=16)
    assert paged.refusal(spec(0, 63, 1)) is None
    assert paged.refusal(spec(0, 64, 1)) == "prompt of 64 tokens, the cache allows 63"
    full = scheduler(max_queued_requests=1)
    full.add(spec(0, 5, 5))
    assert full.refusal(spec(1, 5, 5)) == "1 requests wait, max_queued_requests is 1"


def test_a_full_queue_refuses_the_least_urgent() -> None:
    """With priorities a more urgent request takes the place of the least urgent that waits, of equals the last."""
    full = scheduler(max_queued_requests=2, enable_priority_scheduling=True)
    first, second, equal, urgent = (spec(i, 5, 5, priority=i // 3) for i in range(4))
    full.add(first)
    full.add(second)
    assert full.refusal(equal) == "2 requests wait, max_queued_requests is 2"
    assert full.refusal(urgent) is None
    full.add(urgent)
    assert full.requests.keys() == {first, urgent}
    assert full.refused == [(second, "2 requests wait, max_queued_requests is 2")]


@DEPTHS
def test_who_is_retracted_into_a_full_queue_is_refused(depth: int) -> None:
    """Two decode and run out of memory while one waits: the retracted one is refused, with what it has written."""
    more = {"num_blocks": 64, "max_queued_requests": 1, "schedule_conservativeness": 0.01}
    asks = [Ask(spec(i, 10, 40), 2 * i, None, None) for i in range(3)]
    drive = ran(Drive(scheduler(**more), asks, depth))
    (refused,) = drive.refused
    assert drive.requests[refused].finish is Finish.REFUSED
    assert 0 < drive.requests[refused].seen < 40
    assert {spec.id for spec, _ in drive.finished} == {ask.spec.id for ask in asks} - {refused.id}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("schedule_policy", {"schedule_policy": "lpm", "enable_priority_scheduling": True}),
        ("schedule_policy", {"schedule_policy": "shortest-prefill-first", "disable_radix_cache": True}),
        ("chunked_prefill_size", {"chunked_prefill_size": 0}),
    ],
)
def test_settings_that_contradict_each_other(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as error:
        SglangSettings(**given)
    assert error.value.field == field


@pytest.mark.parametrize(("interval", "passes"), [(1, 2), (4, 5), (30, 9)])
def test_arrivals_are_looked_for_every_so_many_passes(interval: int, passes: int) -> None:
    """While one request decodes, another one waits for the next look; once nothing decodes, it is found at once."""
    server = scheduler(scheduler_recv_interval=interval)
    asks = [Ask(spec(0, 8, 9), 0, None, None), Ask(spec(1, 8, 3), 5, None, None)]
    prefilled = list[int]()
    ran(Drive(server, asks, 1), lambda plan, rows: prefilled.append(plan.work.prefill_tokens))
    assert [step for step, tokens in enumerate(prefilled) if tokens] == [0, passes]


@given(
    seats=st.sampled_from([None, 1, 50, 200]),
    states=st.sampled_from([None, 7, 100]),
    ratio=st.floats(0.01, 20),
    size=st.sampled_from([1, 16, 64]),
    layers=st.integers(4, 30),
    fraction=st.floats(0.3, 0.95),
)
def test_states_take_memory_beside_the_tokens(
    seats: int | None, states: int | None, ratio: float, size: int, layers: int, fraction: float
) -> None:
    """States and one more, then as many blocks as fit; a place for each state at most. If nobody says how many states,
    they and the one more get their share of the memory. A cache that is given has states by the same share."""
    given = {"max_running_requests": seats, "max_mamba_cache_size": states, "mamba_full_memory_ratio": ratio}
    asked = SglangSettings(disable_radix_cache=True, chunked_prefill_size=4096, **given)
    site = with_states(size, layers, None, fraction)
    kept = sum(site.state_bytes for layer in range(layers) if layer % 4 < 3)
    token = sum(site.token_bytes for layer in range(layers) if layer % 4 == 3)
    left, most = site.blocks(4096, seats or 256, 1, 1), states or seats
    made = resolve(asked, site)
    number = made.max_mamba_cache_size or 0
    used = (number + 1) * kept + made.num_blocks * size * token
    assert left - size * token < used <= left
    assert number == most or abs((number + 1.5) * kept - left * ratio / (1 + ratio)) <= kept
    assert made.max_running_requests <= min(number, seats or number, made.pool_tokens // 2)
    again = resolve(asked, with_states(size, layers, made.num_blocks, fraction))
    assert again.num_blocks == made.num_blocks
    more = (again.max_mamba_cache_size or 0) - number
    assert again.max_mamba_cache_size == most or abs(more) <= 2 + ratio * (1 + size * token / kept)  # of what was left


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"disable_radix_cache": False}, "disable_radix_cache", "got false, must be true with linear layers"),
        (
            {"max_running_requests": 100_000},
            "max_running_requests",
            "got 100000: 100000 states of .* MB beside tokens in .* GB",
        ),
        ({"max_mamba_cache_size": 100_000}, "max_mamba_cache_size", "got 100000: 100000 states"),
    ],
)
def test_what_states_exclude_is_refused(given: dict[str, Any], field: str, words: str) -> None:
    """A tree of states is not modelled; states that leave no room for tokens are the server's error, too."""
    with pytest.raises(SettingsError, match=words) as raised:
        resolve(SglangSettings(**{"disable_radix_cache": True} | given), with_states(1))
    assert raised.value.field == field
    site = with_states(1)
    site.memory_fraction -= (site.blocks(16384, 256, 1, 1) - 2 * 10**7) / site.memory_bytes
    with pytest.raises(SettingsError, match=r"got 0\.9: 0 states of 1.* MB beside tokens in 0\.02 GB"):
        resolve(SglangSettings(disable_radix_cache=True, chunked_prefill_size=16384), site)
    with pytest.raises(SettingsError, match="got 8, must be null: no layer"):
        resolve(
            SglangSettings(max_mamba_cache_size=8),
            Place(shapes.model("tiny"), shapes.hardware("h100-sxm"), 2, 1, 0.9, None),
        )
