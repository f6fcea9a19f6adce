"""The tables of docs/ are those that `python -m reports.doc_tables` makes of the reports; the README quotes them."""

from __future__ import annotations

import re

import pytest
from support.reference import data

from cbsim.measured.recorded import case
from cbsim.measured.recorded.score import recorded, replay, scores
from cbsim.scenario import catalog
from reports import doc_tables
from reports.doc_tables import POINTS, cases, errors, facts, largest, title
from reports.page import MARK


@pytest.mark.parametrize("name", doc_tables.PAGES)
def test_the_pages_have_the_tables_of_the_reports(name: str) -> None:
    page = (catalog.ROOT / name).read_text()
    assert [mark[1] for mark in MARK.finditer(page)] == list(doc_tables.PAGES[name])
    assert page == doc_tables.page_of(name), "run `python -m reports.doc_tables`"


@pytest.mark.parametrize("name", cases())
def test_the_readme_quotes_the_recorded_runs(name: str) -> None:
    """Its row of a recorded run has the largest error that was published."""
    text = (catalog.ROOT / "README.md").read_text()
    (row,) = re.findall(rf"^\| .* {re.escape(title(name))} \|.*$", text, re.MULTILINE)
    assert f"largest error {100 * largest(errors(facts(name)['errors'])):.2f} %" in row


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("published servers, dense, vLLM on H100 and H200", "dense, vLLM, H100 and H200"),
        ("dense, TensorRT-LLM on H200", "dense, TensorRT-LLM, H200"),
        ("mixture of experts, vLLM on H100 and H200", "experts, H100 and H200"),
        ("dense, vLLM and TensorRT-LLM on B200", "dense, B200"),
        ("mixture of experts, vLLM on B200 and B300", "experts, B200 and B300"),
        ("DeepSeek-R1, Kimi-K2.5: vLLM, SGLang, TensorRT-LLM on H200, B200, B300", "latent attention with experts"),
        ("gpt-oss-120b: vLLM, TensorRT-LLM on H100, H200, B200", "gpt-oss"),
        ("Qwen3.5-397B-A17B: SGLang on H200, B200, B300", "linear attention"),
        ("GLM-5: SGLang on H200, B200, B300", "sparse latent attention"),
        ("data-parallel attention: vLLM and TensorRT-LLM on H200, B200, B300", "data-parallel attention"),
        ("servers whose flags are unknown", "flags unknown, no bars"),
    ],
)
def test_the_readme_quotes_the_points(row: str, name: str) -> None:
    """Mean errors and the number of points, as the report has them."""
    numbers = facts(POINTS)["classes"][name]
    text = (catalog.ROOT / "README.md").read_text()
    (line,) = re.findall(rf"^\| {re.escape(row)} \|.*$", text, re.MULTILINE)
    quoted = f"TPOT {100 * numbers['tpot']['mape']:.1f} %, TTFT {100 * numbers['ttft']['mape']:.1f} %"
    assert quoted in line and f"| {numbers['points']} points" in line


@pytest.mark.parametrize("name", cases())
def test_the_reports_say_what_the_code_computes(name: str) -> None:
    """The committed errors are those of a replay now: a change of policy, tables or priors has to publish its own."""
    of = case.read(data(f"measured_vllm/cases/{name}/meta.json").parent)
    now = scores(replay(of, of.scenario()).served, recorded(of))
    published = errors(facts(name)["errors"])
    assert {(one.metric, one.statistic): pytest.approx(one.error, abs=1e-12) for one in now} == published


def test_the_bars_of_recorded_runs() -> None:
    """Where vLLM recorded the size of its cache, every mean and percentile is within 1 %. Where it is derived, the mean
    TTFT is within 3 %, TPOT and E2E within 1 % (LLMServingSim: 4.0, 1.0 and 1.8 %).
    """
    found, derived = (errors(facts(f"{name}__Llama-3.1-8B")["errors"]) for name in ("RTX4090", "RTXPRO6000"))
    assert len(found) == 16
    assert {name: error for name, error in found.items() if abs(error) > 0.01} == {}
    assert abs(derived["ttft", "mean"]) < 0.03
    assert abs(derived["tpot", "mean"]) < 0.01 > abs(derived["e2e", "mean"])
