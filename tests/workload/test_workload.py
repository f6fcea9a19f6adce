"""Workloads: reproducible, with shared random numbers, and distributed as they and the data behind them say."""

import re
from collections import Counter
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import data

import cbsim
from cbsim.errors import ScenarioError
from cbsim.policy.request import RequestSpec
from cbsim.scenario import catalog, demand, scenario
from cbsim.scenario.scenario import Scenario
from cbsim.workload import csv_requests, generators, traces
from cbsim.workload.requests import Streams, Workload

BASE: dict[str, Any] = {
    "kind": "synthetic",
    "requests": 50,
    "prompt_tokens": {"lognormal": {"mean": 300, "sigma": 0.7, "low": 1, "high": 2000}},
    "output_tokens": {"uniform": {"low": 2, "high": 40}},
    "arrivals": {"kind": "poisson", "rate_per_s": 5},
    "priorities": [0, 1, 2],
}


VALUES = {"question": "?", "model": "llama-3.1-8b", "hardware": "h100-sxm"}


def made(changes: dict[str, Any] | None = None, seed: int = 1, **whole: Any) -> Workload:
    values = VALUES | {"seed": seed, "workload": whole or BASE | (changes or {})}
    return generators.build(Scenario.model_validate(values))


def rows(specs: list[RequestSpec]) -> list[tuple[int, ...]]:
    return [(s.index, s.arrival_ns, s.prompt_tokens, s.output_tokens, s.max_tokens, s.priority) for s in specs]


# -- reproducibility --------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_a_seed_gives_one_workload(seed: int) -> None:
    one, two = made(seed=seed), made(seed=seed)
    assert rows(one.open) == rows(two.open) and one.fingerprint() == two.fingerprint()
    assert made(seed=seed + 1).fingerprint() != one.fingerprint()


def test_golden_workload_never_changes() -> None:
    """Published numbers name a seed: the requests that it stands for may not drift with a refactoring."""
    first, second, third, *_ = rows(made().open)
    assert first == (0, 548471244, 1338, 18, 18, 0) and second == (1, 555886484, 509, 11, 11, 0)
    assert third == (2, 672923640, 97, 3, 3, 1)
    assert made().fingerprint() == "0a440a481f3e21b16643b857efd1c9b77e2b86edd8d6beeb5198b3306df7cf52"


def test_compared_scenarios_share_random_numbers() -> None:
    """Other arrivals leave lengths and priorities as they are, and other lengths leave arrivals as they are."""
    one, two = made().open, made({"arrivals": {"kind": "at_once"}}).open
    assert [row[2:] for row in rows(one)] == [row[2:] for row in rows(two)]
    three = made({"prompt_tokens": 7}).open
    assert [s.arrival_ns for s in one] == [s.arrival_ns for s in three]
    assert [s.output_tokens for s in one] == [s.output_tokens for s in three]


def test_rate_scales_the_same_arrivals() -> None:
    slow = made({"arrivals": {"kind": "poisson", "rate_per_s": 1}}).open
    fast = made({"arrivals": {"kind": "poisson", "rate_per_s": 10}}).open
    assert all(abs(a.arrival_ns - 10 * b.arrival_ns) <= 6 for a, b in zip(slow, fast, strict=True))


# -- distributions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_their_mean_and_cv(burstiness: float) -> None:
    """Theory: mean gap 1/rate, coefficient of variation 1/sqrt(burstiness). 20,000 gaps, so within 5 %."""
    arrivals = {"kind": "gamma", "rate_per_s": 10, "burstiness": burstiness}
    times = [s.arrival_ns for s in made({"requests": 20_000, "arrivals": arrivals}).open]
    gaps = np.diff(np.array([0, *times])) / 1e9
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_arrivals_begin_at_once() -> None:
    times = [s.arrival_ns for s in made({"arrivals": {"kind": "constant", "rate_per_s": 4}, "requests": 4}).open]
    assert times == [0, 250_000_000, 500_000_000, 750_000_000]


def test_lognormal_mean_is_the_mean_given() -> None:
    """Theory: 20,000 draws with sigma 0.5 have a standard error of 0.4 % of the mean."""
    length = {"lognormal": {"mean": 1000, "sigma": 0.5}}
    prompts = [s.prompt_tokens for s in made({"requests": 20_000, "prompt_tokens": length}).open]
    assert np.mean(prompts) == pytest.approx(1000, rel=0.015)


def test_lengths_keep_their_bounds() -> None:
    length = {"lognormal": {"mean": 100, "sigma": 2, "low": 50, "high": 150}}
    specs = made({"requests": 2000, "prompt_tokens": length, "output_tokens": {"uniform": {"low": 3, "high": 5}}}).open
    assert {s.output_tokens for s in specs} == {3, 4, 5}
    assert min(s.prompt_tokens for s in specs) == 50 and max(s.prompt_tokens for s in specs) == 150
    assert {s.priority for s in specs} == {0, 1, 2}


def test_empirical_lengths(tmp_path: Path) -> None:
    assert {s.prompt_tokens for s in made({"prompt_tokens": {"empirical": {"values": [3, 9]}}}).open} == {3, 9}
    (tmp_path / "c.csv").write_text("a,b\n1,7\n2,8\n")
    sample = {"empirical": {"path": str(tmp_path / "c.csv"), "column": "b"}}
    assert {s.prompt_tokens for s in made({"prompt_tokens": sample}).open} == {7, 8}


# -- what a request says ----------------------------------------------------------------------------------------------


def test_early_stops_are_a_surprise() -> None:
    """The scheduler knows max_tokens only; without stop_early it knows the true end."""
    assert all(s.max_tokens == s.output_tokens for s in made().open)
    early = made({"stop_early": True}).open
    assert {s.max_tokens for s in early} == {max(s.output_tokens for s in early)}
    capped = made({"stop_early": True, "max_tokens": 10}).open
    assert {s.max_tokens for s in capped} == {10} and max(s.output_tokens for s in capped) == 10


def test_shared_prefix_is_shared_block_by_block() -> None:
    """40 tokens in common fill two blocks of 16: those have one key in all requests, the third is each one's own."""
    a, b = made({"shared_prefix_tokens": 40, "prompt_tokens": 100, "requests": 2}).open
    assert [a.block_key(i, 16) == b.block_key(i, 16) for i in range(3)] == [True, True, False]
    (short,) = made({"shared_prefix_tokens": 40, "prompt_tokens": 17, "requests": 1}).open
    assert short.shared_blocks(16) == 1


@pytest.mark.parametrize("samples", [1, 2])
def test_several_shared_prefixes(samples: int) -> None:
    """Three prefixes of 32 tokens, each of a third of 900 requests within five standard deviations; nothing else is
    shared, but by samples of one request, and all other numbers are those of a single prefix.
    """
    one = {"shared_prefix_tokens": 32, "prompt_tokens": 64, "requests": 900, "samples": samples}
    single, several = made(one).open[::samples], made(one | {"shared_prefixes": 3}).open[::samples]
    begins = Counter(tuple(spec.block_key(at, 16) for at in range(2)) for spec in several)
    assert len(begins) == 3
    assert max(abs(count - 300) for count in begins.values()) < 5 * sqrt(900 * 1 / 3 * 2 / 3)
    assert len({spec.block_key(2, 16) for spec in several}) == 900
    for a, b in zip(single, several, strict=True):
        assert (a.id, a.arrival_ns, a.prompt_tokens, a.output_tokens, a.prefix_tokens) == (
            (b.id, b.arrival_ns, b.prompt_tokens, b.output_tokens, b.prefix_tokens)
        )


@pytest.mark.parametrize("shared", [0, 24, 1000])
def test_samples_have_one_prompt_and_outputs_of_their_own(shared: int) -> None:
    """Sent together, behind each other, with prompts that are found block by block; other requests' are not."""
    changes = {"samples": 3, "shared_prefix_tokens": shared, "prompt_tokens": {"uniform": {"low": 40, "high": 90}}}
    plain, sampled = made(changes | {"samples": 1}), made(changes)
    specs = list(sampled.open)
    assert sampled.total == len(specs) == 150
    for i, first in enumerate(specs[::3]):
        samples = specs[3 * i : 3 * i + 3]
        assert [s.id for s in samples] == [f"{k}_{i}" for k in range(3)]
        assert [s.sample_of for s in samples] == [None, first, first]
        assert {(s.arrival_ns, s.prompt_tokens, s.priority) for s in samples} == {
            (plain.open[i].arrival_ns, plain.open[i].prompt_tokens, plain.open[i].priority)
        }
        assert {s.shared_blocks(16) for s in samples} == {first.prompt_tokens // 16}
        other = specs[(3 * i + 3) % 150]
        for block in range(min(first.prompt_tokens, other.prompt_tokens) // 16):
            keys = {s.block_key(block, 16) for s in samples}
            assert len(keys) == 1 and keys.isdisjoint([other.block_key(block, 16)]) == (16 * (block + 1) > shared)
    assert len({s.output_tokens for s in specs[:12]}) > 4
    assert sampled.fingerprint() == made(changes).fingerprint() != plain.fingerprint()


def test_a_sample_is_found_by_its_number() -> None:
    """Made anew, it is the same request, and a sample of the same one."""
    workload = made({"samples": 4})
    for spec in list(workload.arriving())[:9]:
        again = workload.find(spec.index)
        assert again is not None
        assert rows([again]) == rows([spec])
        assert (again.id, again.prefix, again.prefix_tokens) == (spec.id, spec.prefix, spec.prefix_tokens)
        assert (again.sample_of and again.sample_of.id) == (spec.sample_of and spec.sample_of.id)


def test_samples_with_lengths_drawn_together() -> None:
    """A prompt, and as many outputs as it has samples."""
    values = {"kind": "synthetic", "requests": 30, "lengths": "sharegpt", "samples": 2}
    specs = list(made(None, **values).open)
    assert [a.prompt_tokens for a in specs[::2]] == [b.prompt_tokens for b in specs[1::2]]
    assert [a.output_tokens for a in specs[::2]] != [b.output_tokens for b in specs[1::2]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (0, "workload.samples: got 0, must be >= 1"),
        (10_001, "workload.samples: got 10001, must be <= 10000"),
        (10_000, "workload.samples: got 10,000, must be <= 1,000 for 100,000 requests"),
    ],
)
def test_samples_are_bounded(samples: int, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        scenario.parse(VALUES | {"workload": BASE | {"requests": 100_000, "samples": samples}}, "here")


# -- requests that follow others --------------------------------------------------------------------------------------


def test_closed_loop_sends_the_next_when_one_ends() -> None:
    """Never more than `users` in progress, every request sent once, in order, think_s after an end."""
    w = made({"requests": 7, "arrivals": {"kind": "closed_loop", "users": 3, "think_s": 2}})
    assert [(s.index, s.arrival_ns) for s in w.open] == [(0, 0), (1, 0), (2, 0)] and w.total == 7
    fingerprint, sent = w.fingerprint(), []
    for end, spec in enumerate([*w.open, *w.open, *w.open]):
        sent += w.on_finish(spec, end * 10**9)
    assert [(s.index, s.arrival_ns) for s in sent] == [(3 + i, (i + 2) * 10**9) for i in range(4)]
    assert w.fingerprint() == fingerprint  # of what was asked, not of what is left


def test_a_user_waits_for_all_samples() -> None:
    """Two users and three requests of two samples: the third is sent, both samples at once, when a user has both."""
    w = made({"requests": 3, "samples": 2, "arrivals": {"kind": "closed_loop", "users": 2, "think_s": 1}})
    specs = list(w.open)
    assert [(s.index, s.arrival_ns) for s in specs] == [(0, 0), (1, 0), (2, 0), (3, 0)] and w.total == 6
    assert not w.on_finish(specs[0], 0) and not w.on_finish(specs[3], 10**9)
    first, second = w.on_finish(specs[1], 2 * 10**9)
    assert [(s.index, s.arrival_ns) for s in (first, second)] == [(4, 3 * 10**9), (5, 3 * 10**9)]
    assert second.sample_of is first
    assert not w.on_finish(specs[2], 4 * 10**9)


AGENTIC = """\
{"session_id":"a","input_length":1030,"output_length":10,"hash_ids":[0,1,2],"timestamp":0.0,"group_id":1}
{"session_id":"a","input_length":600,"output_length":20,"hash_ids":[3,4],"delay":1500.5}
{"session_id":"b","input_length":1024,"output_length":5,"hash_ids":[0,1],"timestamp":250.0,"group_id":1}
"""


def test_agentic_turns_carry_the_conversation(tmp_path: Path) -> None:
    """A turn's prompt is all that was said before and its new tokens; its delay counts from the last turn's end. It
    finds all full blocks of the first, its output included; the other session the first 1,024.
    """
    (tmp_path / "t.jsonl").write_text(AGENTIC)
    w = made(kind="agentic", path=str(tmp_path / "t.jsonl"))
    assert w.total == 3 and [(s.id, s.arrival_ns) for s in w.open] == [("a/0", 0), ("b/0", 250_000_000)]
    first, other = w.open
    (second,) = w.on_finish(first, 10**9)
    assert (second.id, second.arrival_ns, second.prompt_tokens) == ("a/1", 2_500_500_000, 1030 + 10 + 600)
    assert w.on_finish(second, 2 * 10**9) == [] and w.on_finish(other, 10**9) == []
    for size in (16, 256, 512):
        full = (1030 + 10) // size
        assert [first.block_key(i, size) for i in range(full)] == [second.block_key(i, size) for i in range(full)]
        both = 1024 // size
        assert [first.block_key(i, size) for i in range(both)] == [other.block_key(i, size) for i in range(both)]
    assert other.block_key(64, 16) != first.block_key(64, 16)


# -- traces -----------------------------------------------------------------------------------------------------------


def test_mooncake_spread_keeps_cell_and_order() -> None:
    """Timestamps sit on a 3 s grid. Spread arrivals stay in the 3 s after their stamp, in file order, by the seed."""
    path = str(data("traces/mooncake/conversation_trace.jsonl"))
    given_rows = traces.mooncake(Path(path), 3000)
    whole: dict[str, Any] = {"kind": "mooncake", "path": path, "limit": 3000}
    moved = made(**whole).open
    assert [s.index for s in moved] == list(range(3000))
    for row, spec in zip(given_rows, moved, strict=True):
        assert -10_000_000 <= spec.arrival_ns - row.arrival_ns < 3_010_000_000
    assert len({s.arrival_ns for s in moved}) > 2990
    assert made(seed=2, **whole).fingerprint() != made(**whole).fingerprint()
    unspread = made(**whole, spread=False).open
    assert [s.arrival_ns for s in unspread] == [r.arrival_ns for r in given_rows]


def test_mooncake_real_times_are_not_spread() -> None:
    trace = [traces.Arrival(at * 10**6, 5, 1, (0,)) for at in (0, 1234, 3000)]
    assert traces.spread(trace, np.random.default_rng(0)) == trace


def test_time_scale_stretches_arrivals() -> None:
    path = str(data("traces/azure2023/AzureLLMInferenceTrace_conv.csv"))
    one = made(kind="azure", path=path, limit=20).open
    two = made(kind="azure", path=path, limit=20, time_scale=2).open
    assert [2 * s.arrival_ns for s in one] == [s.arrival_ns for s in two]


def test_length_traces_get_generated_arrivals() -> None:
    path = str(data("traces/sharegpt_lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"))
    w = made(kind="lengths", path=path, limit=30, arrivals={"kind": "closed_loop", "users": 4})
    assert len(w.open) == 4 and w.total == 30 and w.open[0].prompt_tokens == 74


# -- distributions of lengths that come with the project ---------------------------------------------------------------

SHAREGPT = "traces/sharegpt_lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"


@pytest.fixture(scope="module")
def sharegpt() -> np.ndarray:
    """Prompt and output lengths of the data, a row each."""
    return np.array(csv_requests.lengths(data(SHAREGPT))).T


def fitted(prompts: np.ndarray, outputs: np.ndarray) -> tuple[list[int], list[list[int]]]:
    """The method: quantiles of the prompts at steps of 1 %; requests sorted by prompt, in ten groups of equal size,
    and quantiles of each group's outputs at steps of 5 %. All linear between data, rounded."""

    def quantiles(values: np.ndarray, steps: int) -> list[int]:
        return np.rint(np.quantile(values, np.linspace(0, 1, steps + 1))).astype(int).tolist()

    groups = np.array_split(np.argsort(prompts, kind="stable"), 10)
    return quantiles(prompts, 100), [quantiles(outputs[group], 20) for group in groups]


def test_sharegpt_is_made_as_it_says(sharegpt: np.ndarray) -> None:
    table = demand.length_table("sharegpt")
    prompts, outputs = fitted(*sharegpt)
    assert list(table.prompt_tokens) == prompts
    assert [list(group) for group in table.output_tokens] == outputs


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """Kolmogorov's: the largest difference of two distribution functions."""
    at = np.unique(np.concatenate([one, two]))
    below = [np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (one, two)]
    return float(np.abs(below[0] - below[1]).max())


def correlation(one: np.ndarray, two: np.ndarray) -> float:
    """Spearman's, ties in the order of rows."""
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (one, two)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_errors_of_sharegpt_against_the_data(sharegpt: np.ndarray) -> None:
    """200,000 draws, whose own noise is 1.63 / sqrt(200,000) = 0.4 % at the 1 % level: docs/data.md says the bounds."""
    drawn = generators.draw_pairs("sharegpt", 200_000, Streams.of(1))
    for original, made in ((sharegpt[0], drawn[0]), (sharegpt[1], drawn[1]), (sharegpt.sum(0), drawn[0] + drawn[1])):
        assert distance(original, made) < 0.01
        assert made.mean() == pytest.approx(original.mean(), rel=0.01)
        assert np.quantile(made, [0.5, 0.9, 0.99]) == pytest.approx(np.quantile(original, [0.5, 0.9, 0.99]), rel=0.015)
    assert correlation(*drawn) == pytest.approx(correlation(*sharegpt), abs=0.01)


def fields_of(**workload: Any) -> dict[str, Any]:
    return VALUES | {"seed": 3, "workload": {"kind": "synthetic", "requests": 500} | workload}


@pytest.mark.parametrize("name", catalog.names(demand.LENGTH_TABLES))
def test_a_name_is_all_it_takes(name: str) -> None:
    """Lengths lie within the table, together within its bound, and are the seed's."""
    table = demand.length_table(name)
    one, two = (generators.build(cbsim.load(fields_of(lengths=name))) for _ in range(2))
    assert one.fingerprint() == two.fingerprint()
    for spec in one.specs():
        assert table.prompt_tokens[0] <= spec.prompt_tokens <= table.prompt_tokens[-1]
        assert spec.output_tokens >= 1 and spec.prompt_tokens + spec.output_tokens <= table.most_tokens
    page = (catalog.ROOT / "docs" / "data.md").read_text()
    assert f"`lengths: {name}`" in page


def test_arrivals_leave_the_lengths_as_they_are() -> None:
    one = generators.build(cbsim.load(fields_of(lengths="sharegpt"))).specs()
    poisson = fields_of(lengths="sharegpt", arrivals={"kind": "poisson", "rate_per_s": 3})
    two = generators.build(cbsim.load(poisson)).specs()
    assert [(s.prompt_tokens, s.output_tokens) for s in one] == [(s.prompt_tokens, s.output_tokens) for s in two]


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"lengths": "sharegtp"}, "workload.lengths: got 'sharegtp', expected one of sharegpt; did you mean sharegpt?"),
        ({"lengths": 3}, "workload.lengths: got 3, expected one of sharegpt"),
        ({"prompt_tokens": 3}, "workload.output_tokens: is required, or `lengths`"),
        ({"lengths": "sharegpt", "prompt_tokens": 3}, "workload.prompt_tokens: is given by lengths (sharegpt) too"),
    ],
)
def test_lengths_are_said_once(workload: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        cbsim.load(fields_of(**workload))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_of_lengths_is_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("name: x\nsource: y\nmost_tokens: 9\nprompt_tokens: [1, 3, 2]\noutput_tokens: [[1, 2]]\n")
    with pytest.raises(ScenarioError, match=r"bad.yaml:4: prompt_tokens: got 2 after 3, expected quantiles in order"):
        demand.length_table(str(file))


def test_the_example_of_the_documentation_loads(tmp_path: Path) -> None:
    page = (catalog.ROOT / "docs" / "scenarios.md").read_text()
    block = re.search(r"^```yaml\n([^`]*lengths: sharegpt[^`]*)^```$", page, re.MULTILINE)
    assert block
    (tmp_path / "mine.yaml").write_text(block[1])
    assert generators.build(cbsim.load(tmp_path / "mine.yaml")).total == 500
