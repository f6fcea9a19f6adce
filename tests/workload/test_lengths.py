"""Distributions of lengths that come with the project: made from the data as they say, and how far off they are."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reference import data

import cbsim
from cbsim.errors import ScenarioError
from cbsim.scenario import catalog, demand
from cbsim.workload import csv_requests, generators
from cbsim.workload.requests import Streams

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


# -- in a scenario ----------------------------------------------------------------------------------------------------


def fields_of(**workload: Any) -> dict[str, Any]:
    fields = {"kind": "synthetic", "requests": 500} | workload
    return {"question": "?", "model": "llama-3.1-8b", "hardware": "h100-sxm", "seed": 3, "workload": fields}


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
