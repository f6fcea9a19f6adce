"""Sixteen runs in one report stay readable: names, one table, findings, differences, and nothing clipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.browser import chromium, needs_browser, show, window
from support.calls import simulated

from analysis.cli.parser import main as analysis
from analysis.page import report
from analysis.statistics import loading
from cbsim.draw.chart import series

BUDGETS = {"vllm": "max_num_batched_tokens", "transformers_fifo": "max_batch_tokens"}
TOKENS = (64, 128, 256, 512)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two schedulers, four budgets of tokens, both loops; service levels that some runs miss."""
    out = tmp_path_factory.mktemp("runs")
    made: list[Path] = []
    for name, budget in BUDGETS.items():
        for tokens in TOKENS:
            fields = ["workload.requests=40", "slo={ttft_s: 0.02}", f"scheduler={{name: {name}, {budget}: {tokens}}}"]
            made += simulated(out, "rates", *fields)
    return made


@pytest.fixture(scope="module")
def page(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "made"
    assert analysis(["report", *map(str, folders), "--out", str(out)]) == 0
    return out


def test_folders_of_other_settings_have_other_names(folders: list[Path]) -> None:
    assert "-sync-requests-40-slo-ttft_s-0.02-scheduler-vllm-max_num_batched_tokens-64-" in folders[0].name
    assert len({path.name.partition("-")[2].rpartition("-")[0] for path in folders}) == len(folders)


def test_one_table_findings_and_scenarios_as_differences(folders: list[Path]) -> None:
    made = report.build(loading.read(folders), "c")
    assert [table.title for table in made.tables] == ["Side by side"]
    assert len(made.tables[0].rows) == len(folders)
    assert len(made.findings) == 5
    assert [chart.key for chart in made.charts] == ["landscape", "pareto", "latency"]
    first, second = made.sources[0].scenario, made.sources[2].scenario
    assert first.count("\n") > 50
    assert second.splitlines() == ["# as vllm 64 sync but for", "scheduler:", "  max_num_batched_tokens: 128"]
    assert set(json.loads(made.sources[2].environment)) < set(json.loads(made.sources[0].environment))


def test_differences_name_what_is_missing() -> None:
    first = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert report.difference({"a": {"b": 1, "e": 3}, "d": [1]}, first) == {"a": {"e": 3, "c": None}}
    assert report.difference(first, first) == {}


def test_sixteen_styles_differ() -> None:
    assert len({series(index) for index in range(28)}) == 28


@needs_browser
def test_nothing_is_clipped(page: Path, tmp_path: Path) -> None:
    """At 1,280 pixels neither the page nor a table scrolls sideways, labels fit, and no backtick is shown."""
    sizes = "return [...document.querySelectorAll('html, .scroll')].map(e => e.scrollWidth - e.clientWidth)"
    texts = "return [...arguments[0].querySelectorAll('.ytick text')].map(e => e.getBoundingClientRect().left)"
    with chromium(tmp_path) as browser:
        window(browser, 1280)
        browser.get((page / "report.html").as_uri())
        assert max(browser.execute_script(sizes)) <= 0
        assert "`" not in browser.find_element("tag name", "body").text
        for chart in ("landscape", "latency"):
            box = show(browser, chart)
            assert min(browser.execute_script(texts, box)) >= box.rect["x"]
