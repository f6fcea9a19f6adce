"""Runs are called by what sets them apart, and by no more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics.labels import labels, shortened, worded

VLLM = {"scheduler.name": "vllm", "scheduler.enable_chunked_prefill": True, "scheduler.long_threshold": 0}
FIFO = {"scheduler.name": "transformers_fifo", "scheduler.allow_block_sharing": True}


def told(*facts: dict[str, Any]) -> list[str]:
    return labels(facts, ["otherwise"] * len(facts))


def test_what_follows_from_the_scheduler_is_not_told() -> None:
    """Fields that only one scheduler has differ between both, but the name says as much."""
    assert told(VLLM, FIFO) == ["vllm", "transformers_fifo"]


def test_a_number_behind_a_name_stands_alone() -> None:
    many = [VLLM | {"scheduler.max_num_batched_tokens": n} for n in (512, 2048)]
    assert told(*many, FIFO) == ["vllm 512", "vllm 2048", "transformers_fifo"]
    fifo = [FIFO | {"scheduler.max_batch_tokens": n} for n in (512, 2048)]
    assert told(*many, *fifo) == ["vllm 512", "vllm 2048", "transformers_fifo 512", "transformers_fifo 2048"]


def test_two_numbers_have_their_names() -> None:
    runs = [
        VLLM | {"scheduler.seats": seats, "scheduler.tokens": tokens} for seats in (8, 16) for tokens in (512, 1024)
    ]
    assert told(*runs, FIFO)[:2] == ["vllm seats=8 tokens=512", "vllm seats=8 tokens=1024"]


def test_a_number_without_a_name_before_it_has_its_own() -> None:
    assert told({"workload.output_tokens": 8}, {"workload.output_tokens": 9}) == ["output_tokens=8", "output_tokens=9"]


def test_the_loop_and_the_world_stand_behind() -> None:
    runs = [{"n": n, "loop.mode": loop, "world": "simulated"} for n in (1, 2) for loop in ("sync", "async")]
    assert told(*runs) == ["n=1 sync", "n=1 async", "n=2 sync", "n=2 async"]
    assert told(runs[0], runs[0] | {"world": "measured"}) == ["simulated", "measured"]


def test_of_fields_that_change_together_the_one_that_says_most() -> None:
    """A scenario's own name first, then numbers; and no field beside it that says the same."""
    first, second = ({"a.flag": flag, "a.size": size} for flag, size in ((True, 3), (False, 4)))
    assert told(first, second) == ["size=3", "size=4"]
    assert told(first | {"name": "mine"}, second | {"name": "theirs"}) == ["mine", "theirs"]


def test_a_seed_is_told_if_nothing_else_differs() -> None:
    assert told({"seed": 1, "rate": 2}, {"seed": 2, "rate": 4}) == ["rate=2", "rate=4"]
    assert told(VLLM | {"seed": 1}, VLLM | {"seed": 2}, FIFO | {"seed": 3}) == [
        *("vllm seed=1", "vllm seed=2", "transformers_fifo seed=3")
    ]


def test_null_is_told_where_it_sets_apart() -> None:
    assert told(VLLM | {"a.length": None}, VLLM | {"a.length": 4}, FIFO) == ["vllm", "vllm 4", "transformers_fifo"]
    assert told({"a.length": None}, {"a.length": 4}) == ["length=null", "length=4"]


def test_a_part_that_one_run_lacks_is_not_there() -> None:
    """Fleets of which one hands requests over: the router of the other's hand-offs is not called null."""
    fleet = VLLM | {"fleet.router.name": "random"}
    apart = fleet | {"fleet.hand_off.router.name": "llmd"}
    assert told(fleet, apart) == ["no hand_off.router", "llmd"]


def test_names_of_fields_are_as_long_as_they_must_be() -> None:
    runs = [{"cost.cpu.plan.base_s": a, "cost.cpu.update.base_s": 1.0} for a in (1.0, 2.5)]
    assert told(*runs) == ["plan.base_s=1", "plan.base_s=2.5"]


def test_what_is_alike_is_numbered_and_a_run_alone_has_its_other_name() -> None:
    assert told(VLLM, FIFO, VLLM) == ["vllm", "transformers_fifo", "vllm #2"]
    assert told(VLLM) == ["otherwise"]
    assert labels([VLLM, VLLM], ["sync", "sync"]) == ["sync", "sync #2"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "none"),
        ([{"server": 0, "at_s": 1.0, "back_s": None}], "server 0 at_s 1"),
        ([{"server": 0, "at_s": 1}, {"server": 1, "at_s": 2.5}], "2: server 0 at_s 1; server 1 at_s 2.5"),
        ([{"count": 2, "server": {"model": "8b", "fast": True}}], "count 2 server model 8b fast true"),
        ([1, 2], "[1, 2]"),
        (None, "null"),
    ],
)
def test_objects_are_worded_without_marks_of_json(value: Any, words: str) -> None:
    assert worded(value) == words
    assert told({"a.of": value}, {"a.of": 7})[0] == (f"of={words}" if value is not None else "of=null")


def test_of_objects_in_lists_as_long_in_all_runs_what_differs_is_told() -> None:
    """A fleet's pools have many fields, most of them alike; lists of other lengths stay whole."""
    pools = [[{"name": "a", "count": count, "server": {"model": "m"}}, {"name": "b", "count": 1}] for count in (2, 3)]
    runs = [{"router.name": "llmd", "fleet.pools": each} for each in pools]
    runs += [{"router.name": "round_robin", "fleet.pools": pools[0]}]
    assert labels(runs, ["", "", ""]) == ["llmd 0.count=2", "llmd 0.count=3", "round_robin 0.count=2"]
    assert labels([{"fleet.failures": []}, {"fleet.failures": [{"server": 1}]}], ["", ""]) == [
        "failures=none",
        "failures=server 1",
    ]


def test_a_long_label_keeps_what_distinguishes_it() -> None:
    """Of those that begin alike the middle is cut, of others the end; a label is never longer than its bound."""
    common = ", ".join(f"field_{at} = {at}" for at in range(9))
    one, two, other = shortened([f"{common}, rate = 1, last", f"{common}, rate = 2, last", "x" * 90])
    assert one.endswith("rate = 1, last") and two.endswith("rate = 2, last") and one.startswith("field_0")
    assert max(map(len, (one, two, other))) <= 60 and other == "x" * 57 + "..."
    assert shortened(["abcdefghij", "abcdefghik", "b"], 8) == ["ab...hij", "ab...hik", "b"]
    assert shortened([*("short", "short")]) == ["short", "short #2"]
    assert len(told({"a.on": [{"server": at} for at in range(40)]}, {"a.on": []})[0]) == 60


VALUES = st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.sampled_from(["a", "b", "x/b"]), st.floats(0, 2))
FIELDS = st.sampled_from(["name", "scheduler.name", "loop.mode", "seed", "a.b", "c.b", "d", "cost.cpu.x"])


@given(st.lists(st.dictionaries(FIELDS, VALUES), max_size=8))
def test_every_label_is_there_once(facts: list[dict[str, Any]]) -> None:
    made = told(*facts)
    assert len(set(made)) == len(made) == len(facts)
    assert all(made)
