"""Prefix-cache hit rate by capacity: the LRU against other ways to count, and against the Mooncake paper.

The paper (FAST'25, Figure 9) gives twelve hit rates of its conversation trace. It does not say how much of a block is
shared where two prompts part, so its points must lie between counting whole blocks and counting the next block too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.cli.parser import main
from cbsim.proof.studies import cache_curve
from cbsim.proof.studies.cache_curve import curve
from cbsim.scenario import catalog
from cbsim.scenario.fields import ScenarioError
from cbsim.workload import traces
from cbsim.workload.traces import Arrival

B = traces.BLOCK_TOKENS
TRACE = "traces/mooncake/conversation_trace.jsonl"


def request(*hash_ids: int, short_by: int = 0) -> Arrival:
    """A prompt of whole blocks, less `short_by` tokens of the last one."""
    return Arrival(0, len(hash_ids) * B - short_by, 1, hash_ids)


@st.composite
def conversations(draw: st.DrawFn) -> list[Arrival]:
    """Prompts that share beginnings as Mooncake's do: equal ids if and only if all up to there is equal."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for _ in range(draw(st.integers(1, 25))):
        text = draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
        short_by = draw(st.sampled_from([0, 0, 100, B - 1]))
        paths = [tuple(text[: i + 1]) for i in range(len(text))]
        paths[-1] = (*paths[-1], -short_by) if short_by else paths[-1]
        rows.append(request(*(ids.setdefault(path, len(ids)) for path in paths), short_by=short_by))
    return rows


def rates(rows: Sequence[Arrival], *capacities: int, block_tokens: int = B) -> list[tuple[float, float]]:
    """(whole blocks, next block shared) by capacity, the infinite cache last."""
    return [point[1:] for point in curve(rows, capacities, block_tokens).points]


# -- properties -------------------------------------------------------------------------------------------------------


@given(conversations(), st.sampled_from([B, 2 * B, 3 * B]))
def test_rates_never_fall_with_capacity(rows: list[Arrival], block_tokens: int) -> None:
    """LRU is a stack algorithm: what a cache holds, a larger one holds too. So both curves rise, up to the infinite
    cache; and as sharing more of a block never finds less, one lies above the other.
    """
    points = rates(rows, *range(B, 40 * B, B), block_tokens=block_tokens)
    for low, high in points:
        assert 0 <= low <= high <= 1
    for curve_ in zip(*points, strict=True):
        assert list(curve_) == sorted(curve_)


@given(conversations(), st.integers(1, 30))
def test_hits_are_stack_distances(rows: list[Arrival], blocks: int) -> None:
    """A block is in an LRU of n blocks if fewer than n others were touched since it was (Mattson's stack distance)."""
    touched: list[int] = []
    hit_tokens = 0
    for row in rows:
        for depth, block in enumerate(row.hash_ids):
            since = touched[len(touched) - touched[::-1].index(block) :] if block in touched else range(blocks)
            if len(set(since)) >= blocks:
                break
            hit_tokens += min(B, row.prompt_tokens - depth * B)
        touched += reversed(row.hash_ids)
    assert rates(rows, blocks * B)[0][0] == hit_tokens / sum(row.prompt_tokens for row in rows)


@given(conversations())
def test_infinite_cache_finds_all_seen_before(rows: list[Arrival]) -> None:
    """Without eviction a block is found if any request before had it; its distinct blocks are all the room it takes."""
    low = high = 0
    for n, row in enumerate(rows):
        before = {block for other in rows[:n] for block in other.hash_ids}
        found = sum(block in before for block in row.hash_ids)
        low += min(row.prompt_tokens, found * B)
        high += min(row.prompt_tokens, (found + 1) * B) if n else 0
    total = sum(row.prompt_tokens for row in rows)
    enough = curve(rows, ()).distinct_blocks * B
    assert rates(rows, enough) == [(low / total, high / total)] * 2


@given(conversations(), st.integers(2, 4))
def test_larger_blocks_widen_the_bounds(rows: list[Arrival], many: int) -> None:
    """Without eviction larger blocks find less, and what they leave open is more."""
    ((low, high),), ((low_, high_),) = rates(rows), rates(rows, block_tokens=many * B)
    assert low_ <= low <= high <= high_


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_the_start_of_a_prompt_is_evicted_last() -> None:
    """A cache of two blocks keeps the first two of three: the same prompt finds 2/3 of itself the second time, and the
    block after these is the third. If the start were evicted first, nothing would be found.
    """
    twice = [request(1, 2, 3), request(1, 2, 3)]
    assert rates(twice, 2 * B) == [(2 / 6, 3 / 6), (3 / 6, 3 / 6)]


def test_a_hit_refreshes_the_whole_prefix() -> None:
    """1 2 is used again before 5 comes, so with three blocks 5 evicts 4 (touched before 2 and 1), and 1 2 is found."""
    rows = [request(1, 2), request(4), request(1, 2), request(5), request(1, 2)]
    assert rates(rows, 3 * B, 2 * B)[0][0] == 4 / 8
    assert rates(rows, 2 * B)[0][0] == 1 / 8 + 1 / 8  # 4 evicts 2, then 5 does: each time 1 alone is left


def test_found_is_what_has_no_hole_before_it() -> None:
    """A block found behind a missing one is of no use."""
    assert rates([request(2), request(1, 2)])[0] == (0, 1 / 3)


def test_a_short_last_block_counts_its_tokens() -> None:
    rows = [request(1, 2, short_by=500), request(1, 2, short_by=500), request(1, 3)]
    assert rates(rows)[0] == ((B + 12 + B) / (4 * B + 24), (B + 12 + 2 * B) / (4 * B + 24))


def test_a_cache_without_a_block_shares_nothing() -> None:
    """512 tokens are one block, 511 none; and the first request has nothing to share with."""
    twice = [request(1), request(1)]
    assert rates(twice, B - 1, B) == [(0, 0), (0.5, 0.5), (0.5, 0.5)]
    assert rates([request(1)]) == [(0, 0)]


def test_two_blocks_as_one() -> None:
    """With blocks of 1,024 tokens, 1 2 3 is two blocks, 1 2 and a short one; 1 4 shares no whole block with it."""
    rows = [request(1, 2, 3), request(1, 2, 5), request(1, 4)]
    found = curve(rows, (2 * B,), 2 * B)
    assert found.distinct_blocks == 4 and found.block_tokens == 2 * B
    assert [point[1:] for point in found.points] == [(2 / 8, 5 / 8)] * 2


# -- the paper --------------------------------------------------------------------------------------------------------


def shared(path: str) -> Path:
    try:
        return catalog.data(path)
    except ScenarioError as error:
        pytest.skip(f"public trace not present: {error}")


def test_all_points_of_the_paper_lie_between() -> None:
    paper = json.loads(shared("traces/mooncake/fast25_figure9.json").read_text())["conversation"]
    found = curve(traces.mooncake(shared(TRACE)), [capacity for capacity, _ in paper])
    assert len(paper) == 12
    for (capacity, published), point in zip(paper, found.points, strict=False):
        assert point.capacity_tokens == capacity
        assert point.whole_blocks < published < point.next_block_shared
    assert [round(rate, 3) for rate in found.points[-1][1:]] == [0.374, 0.414]
    assert (found.requests, found.prompt_tokens, found.distinct_blocks) == (12_031, 144_793_823, 182_790)


# -- the command ------------------------------------------------------------------------------------------------------


def written(folder: Path, *rows: Arrival) -> str:
    path = folder / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=False))) + "\n" for row in rows))
    return str(path)


def test_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path, request(1, 2, 3), request(1, 2, 4))
    assert main(["cache-curve", trace, "--capacities", "512,1.024e3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("2 requests, 3,072 prompt tokens, 4 distinct blocks of 512")
    assert [line.split() for line in lines[3:]] == [
        ["512", "16.67%", "33.33%"],
        ["1,024", "33.33%", "50.00%"],
        ["infinite", "33.33%", "50.00%"],
    ]


def test_prints_json_for_a_trace_of_the_data_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no infinity: the infinite cache has capacity null. Left out, capacities are those of the paper."""
    written(tmp_path, request(1, 2), request(1, 2))
    monkeypatch.setenv("CBSIM_DATA", str(tmp_path))
    assert main(["cache-curve", "trace.jsonl", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    points = told.pop("points")
    assert told == {
        "trace": "trace.jsonl",
        "requests": 2,
        "prompt_tokens": 4 * B,
        "block_tokens": B,
        "distinct_blocks": 2,
    }
    assert [point["capacity_tokens"] for point in points] == [*cache_curve.PAPER_TOKENS, None]
    assert points[-1] == {"capacity_tokens": None, "whole_blocks": 0.5, "next_block_shared": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacities", "1e5,1e4"], "--capacities: got 10,000 after 100,000, expected each larger"),
        (["--capacities", "1e4,10000"], "--capacities: got 10,000 after 10,000, expected each larger"),
        (["--capacities", "0,1e4"], "--capacities: got '0', expected whole numbers of tokens from 1 to 1,000,000,000"),
        (["--capacities=-5"], "--capacities: got '-5'"),
        (["--capacities", "0.5"], "--capacities: got '0.5'"),
        (["--capacities", "1e16"], "--capacities: got '1e16'"),
        (["--capacities", "9" * 400], "--capacities: got '999"),
        (["--capacities", "1e4,inf"], "--capacities: got 'inf', expected whole numbers of tokens"),
        (["--capacities", "nan"], "--capacities: got 'nan'"),
        (["--capacities", "1e4,"], "--capacities: got ''"),
        (["--capacities", ""], "--capacities: got ''"),
        (["--capacities", "many"], "--capacities: got 'many'"),
        (["--block-tokens", "0"], "--block-tokens: got 0, expected a multiple of 512"),
        (["--block-tokens", "-512"], "--block-tokens: got -512, expected a multiple of 512"),
        (["--block-tokens", "16"], "--block-tokens: got 16, expected a multiple of 512"),
        (["--block-tokens", str(512 * 10**20)], "--block-tokens: got 51200000"),
    ],
)
def test_options_that_cannot_be_used(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache-curve", written(tmp_path, request(1)), *options]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"cbsim: {message}") and told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n', ":1: hash_ids: got nothing, expected 1 whole"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ":1: not valid JSON"),
        ('{"session_id": "a", "delay": 3}\n', ":1: timestamp: is missing"),
        ("[1, 2]\n", ":1: row: got [1, 2], expected a JSON object"),
    ],
)
def test_files_that_are_no_mooncake_traces(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert main(["cache-curve", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and message in told.err and told.err.count("\n") == 1


@pytest.mark.parametrize("name", ["none.jsonl", "."])
def test_no_such_trace(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is no trace either. The message names every place that was looked at."""
    monkeypatch.setenv("CBSIM_DATA", str(tmp_path))
    assert main(["cache-curve", name]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"cbsim: TRACE: no file {name!r}, looked at {name}; ") and str(tmp_path) in told
