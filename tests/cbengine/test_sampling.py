"""Tokens are drawn from the distribution asked for, and each row's from its own logits and number alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.tiny_runs import peak_bytes

from cbengine import sampling
from cbengine.sampling import GOLDEN, Draws, Sampling, _mixed, request_seed, uniforms

torch.set_num_threads(1)
HOWS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=10),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.3, top_k=12, top_p=0.7),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_p=1e-9),
]


def draws(numbers: Any, hows: Sequence[Sampling]) -> Draws:
    """What a step says of its rows: a number and settings each."""
    columns = zip(*(how.on_device for how in hows), strict=True) if hows else ((), (), ())
    types = (torch.float32, torch.int32, torch.float64)
    told = (torch.tensor(list(c), dtype=kind, device=numbers.device) for c, kind in zip(columns, types, strict=True))
    return Draws(numbers, *told)


def sample(logits: Any, numbers: Any, how: Sampling) -> Any:
    """All rows with the same settings, as in a run where no request has its own."""
    if how.greedy:
        return sampling.sample(logits, None)
    return sampling.sample(logits, draws(numbers, [how] * len(logits)))


def distribution(logits: Any, how: Sampling) -> Any:
    """What should be drawn, in plain float64: softmax, then top-k, then the nucleus of what is left."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / how.temperature)
    order = np.argsort(-logits, kind="stable")
    order = order[: how.top_k or None]
    shares = weights[order] / weights[order].sum()
    before = np.cumsum(shares) - shares
    order, shares = order[before < how.top_p], shares[before < how.top_p]
    wanted = np.zeros(len(logits))
    wanted[order] = shares / shares.sum()
    return wanted


def numbers(count: int, seed: int = 3) -> Any:
    seeds = np.array([request_seed(seed, i) for i in range(count)], dtype=np.uint64)
    return torch.from_numpy(uniforms(seeds, np.arange(count)))


# -- greedy -----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_likeliest_token_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 1.0], [-math.inf, -math.inf, -3.0]])
    tokens = sample(logits, None, Sampling())
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [1, 0, 2]


@pytest.mark.parametrize("how", [Sampling(), *HOWS])
def test_a_row_with_a_nan_gives_no_token_and_leaves_the_others_alone(how: Sampling) -> None:
    logits = torch.randn((6, 33), generator=torch.Generator().manual_seed(0))
    whole = sample(logits, numbers(6), how)
    broken = logits.clone()
    broken[1, 32] = broken[4, 0] = math.nan
    assert sample(broken, numbers(6), how).tolist() == [-1 if i in (1, 4) else t for i, t in enumerate(whole.tolist())]


def test_a_row_without_a_distribution_gives_no_token() -> None:
    logits = torch.tensor([[math.inf, 0.0], [-math.inf, -math.inf], [0.0, -math.inf]])
    assert sample(logits, numbers(3), Sampling(temperature=1.0)).tolist() == [-1, -1, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-39])
def test_a_temperature_that_float32_cannot_hold_is_the_least_that_it_can(temperature: float) -> None:
    """It is no 0, which would make the row greedy in one place and drawn in another, nor a divisor that a device may
    flush to 0: with so little heat the likeliest token is drawn, of equals any.
    """
    how = Sampling(temperature=temperature)
    assert how.on_device[0] == float(torch.finfo(torch.float32).tiny)
    logits = torch.randn((5, 33), generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, numbers(5), how), logits.argmax(dim=-1).int())
    assert Sampling().on_device[0] == 0


# -- drawn ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_rows_are_drawn_by_the_slice(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices bound the memory of a draw, and change no token. At its peak a slice holds DRAWN_BYTES a logit, beside the
    logits themselves.
    """
    logits, hows = torch.randn(rows, 4000), [HOWS[i % len(HOWS)] for i in range(rows)]
    given = draws(numbers(rows), hows)
    whole = sampling.sample(logits, given)
    monkeypatch.setattr(sampling, "SLICE", 3)
    sliced: list[Any] = []
    peak = peak_bytes(lambda: sliced.append(sampling.sample(logits, given)))
    assert torch.equal(sliced[0], whole)
    assert 0.9 <= peak / (min(rows, 3) * 4000 * sampling.DRAWN_BYTES) <= 1.02


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_tokens_are_drawn_from_the_distribution(how: Sampling) -> None:
    """Theory: Pearson's statistic of d + 1 cells has mean d and variance 2 d; five deviations are allowed."""
    count, logits = 40_000, 2 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    drawn = sample(logits.expand(count, -1), numbers(count), how)
    wanted = distribution(logits.numpy(), how)
    seen = np.bincount(drawn.numpy(), minlength=len(wanted))
    cells = wanted > 0
    assert not seen[~cells].any(), "a token outside top-k or the nucleus was drawn"
    large = wanted * count >= 5  # the statistic's distribution is no chi-square where few are expected
    expected = np.append(wanted[large], wanted[~large].sum()) * count
    found = np.append(seen[large], seen[~large].sum())
    statistic = float(((found - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())
    freedom = int((expected > 0).sum()) - 1
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom)


LOGITS = st.lists(st.sampled_from([-math.inf, -30.0, -1.5, 0.0, 0.0625, 1.0, 4.0]), min_size=1, max_size=9)


@given(LOGITS.filter(lambda row: max(row) > -math.inf), st.floats(0, 1, exclude_max=True, width=32), st.data())
def test_a_draw_inverts_the_cumulative_distribution(row: list[float], number: float, data: st.DataObject) -> None:
    """Of the tokens in order of likelihood, the one in whose share the number lies; ties in order of their ids."""
    how = Sampling(
        temperature=data.draw(st.sampled_from([0.1, 1.0, 3.0])),
        top_k=data.draw(st.integers(0, 10)),
        top_p=data.draw(st.sampled_from([0.05, 0.37, 0.93, 1.0])),
    )
    logits = torch.tensor([row])
    token = int(sample(logits, torch.tensor([number]), how))
    wanted = distribution(logits[0].numpy(), how)
    order = np.argsort(-logits[0].numpy(), kind="stable")
    after = float(wanted[order][: list(order).index(token) + 1].sum())
    assert wanted[token] > 0
    assert after - wanted[token] - 1e-6 <= number <= after + 1e-6


def test_the_largest_number_and_vocabulary_stay_in_range() -> None:
    """200,000 equally likely tokens: the last is reached by the largest number, and none beyond it."""
    logits, largest = torch.zeros((2, 200_000)), 1 - 2**-24
    drawn = sample(logits, torch.tensor([0.0, largest]), Sampling(temperature=1.0))
    assert drawn[0] == 0
    assert 199_980 < drawn[1] < 200_000


# -- rows with settings of their own ----------------------------------------------------------------------------------

settings_of_rows = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 1e-60, 0.01, 0.7, 1.0, 3.0, 1e300]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 10**30]),
    top_p=st.sampled_from([1.0, 1.0, 0.93, 0.37, 1e-9, 1e-300]),
)
ODD = st.sampled_from([-math.inf, math.inf, math.nan, -30.0, -1.5, 0.0, 0.0625, 1.0, 4.0])


@given(
    rows=st.lists(st.tuples(settings_of_rows, st.lists(ODD, min_size=5, max_size=5)), min_size=1, max_size=7),
    seed=st.integers(0, 99),
)
def test_a_row_of_a_mixed_batch_is_that_row_alone(rows: list[tuple[Sampling, list[float]]], seed: int) -> None:
    """Whatever the settings beside it; a greedy row says what it says where all are greedy, NaN and ties included."""
    hows, logits, drawn = [how for how, _ in rows], torch.tensor([row for _, row in rows]), numbers(len(rows), seed)
    mixed = sampling.sample(logits, draws(drawn, hows))
    assert mixed.dtype == torch.int32
    for i, how in enumerate(hows):
        alone = logits[i : i + 1], drawn[i : i + 1]
        assert mixed[i] == sampling.sample(alone[0], draws(alone[1], [how]))[0] == sample(*alone, how)[0]


WARPED = [*HOWS[:4], Sampling(temperature=0.05), Sampling(temperature=2.5, top_k=3, top_p=0.99), Sampling(0.9, 25, 0.2)]
NEAR = 1e-5  # of two cumulative sums in float32


@given(seed=st.integers(0, 10_000))
def test_rows_draw_from_what_the_warpers_of_transformers_leave(seed: int) -> None:
    """A draw inverts the cumulative distribution in order of likelihood. So each token is drawn for the numbers just
    inside the edges of its share of what transformers' temperature, top-k and top-p leave, and for none outside: the
    probabilities are theirs, up to NEAR. Rows of all settings are in one batch.
    """
    warpers = pytest.importorskip("transformers").generation.logits_process
    logits = 2 * torch.randn((len(WARPED), 40), generator=torch.Generator().manual_seed(seed))
    rows: list[tuple[int, float, int]] = []  # (row of the logits, number, token that it draws)
    for i, how in enumerate(WARPED):
        scores = warpers.TemperatureLogitsWarper(how.temperature)(None, logits[i : i + 1])
        if how.top_k:
            scores = warpers.TopKLogitsWarper(how.top_k)(None, scores)
        if how.top_p < 1:
            scores = warpers.TopPLogitsWarper(how.top_p)(None, scores)
        shares, tokens = scores.double().softmax(-1)[0].sort(descending=True)
        edges = shares.cumsum(0).tolist()
        for low, high, token in zip([0.0, *edges], edges, tokens.tolist(), strict=False):
            rows += [(i, edge, token) for edge in (low + NEAR, high - NEAR) if high - low > 2 * NEAR]
    at, edges, wanted = zip(*rows, strict=True)
    drawn = draws(torch.tensor(edges, dtype=torch.float32), [WARPED[i] for i in at])
    assert sampling.sample(logits[list(at)], drawn).tolist() == list(wanted)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_mix_is_splitmix64() -> None:
    """Golden: the published first outputs of the generator seeded with 1234567."""
    states = (np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * np.uint64(GOLDEN)).astype(np.uint64)
    assert _mixed(states.view(np.int64)).view(np.uint64).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_numbers_are_uniform_and_distinct() -> None:
    """Theory: Pearson's statistic of 256 equal cells; neighbours in seed and in position are uncorrelated."""
    seeds = np.array([request_seed(0, i) for i in range(300)], dtype=np.uint64)
    grid = uniforms(np.repeat(seeds, 500), np.tile(np.arange(500), 300)).reshape(300, 500)
    assert grid.dtype == np.float32
    assert grid.min() >= 0
    assert grid.max() < 1
    seen = np.bincount((grid.ravel() * 256).astype(int), minlength=256)
    statistic = float(((seen - grid.size / 256) ** 2).sum() / (grid.size / 256))
    assert abs(statistic - 255) <= 5 * math.sqrt(2 * 255)
    # 2**24 values: n numbers repeat about n**2 / 2**25 times
    repeats = grid.size - len(np.unique(grid))
    assert abs(repeats - grid.size**2 / 2**25) <= 5 * math.sqrt(grid.size**2 / 2**25)
    for one, other in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) <= 5 / math.sqrt(one.size)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 2))
def test_a_number_belongs_to_its_seed_and_position(seed: int, position: int) -> None:
    alone = uniforms(np.array([seed], dtype=np.uint64), np.array([position]))
    among = uniforms(np.array([7, seed], dtype=np.uint64), np.array([position + 1, position], dtype=np.int32))
    assert alone[0] == among[1]
    assert uniforms(np.array([], dtype=np.uint64), np.array([], dtype=np.int64)).shape == (0,)


def test_requests_have_seeds_of_their_own() -> None:
    seeds = {request_seed(seed, index) for seed in range(50) for index in range(200)}
    assert len(seeds) == 50 * 200
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert request_seed(2**70 + 1, 3) == request_seed(2**70 + 1, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, "sampling.temperature: got -0.5, expected a finite number >= 0"),
        ({"temperature": math.inf}, "sampling.temperature: got inf, expected a finite number >= 0"),
        ({"temperature": math.nan}, "sampling.temperature: got nan, expected"),
        ({"temperature": "hot"}, "sampling.temperature: got 'hot', expected"),
        ({"temperature": True}, "sampling.temperature: got True, expected"),
        ({"top_k": -1}, "sampling.top_k: got -1, expected a whole number >= 0"),
        ({"top_k": 2.5}, "sampling.top_k: got 2.5, expected a whole number >= 0"),
        ({"top_p": 0}, "sampling.top_p: got 0, expected a number > 0 and <= 1"),
        ({"top_p": 1.01}, "sampling.top_p: got 1.01, expected a number > 0 and <= 1"),
        ({"top_p": None}, "sampling.top_p: got None, expected"),
        ({"seed": -3}, "sampling.seed: got -3, expected a whole number >= 0"),
    ],
)
def test_what_cannot_be_asked_for_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Sampling(**fields)
    assert str(raised.value).startswith(message)
