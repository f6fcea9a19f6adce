"""Published numbers: what holds, what has drifted, and that nothing passes because it was not looked at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analysis.cli import parser, published
from analysis.cli.published import Finding, Number
from analysis.statistics import loading
from cbsim.cli import parser as simulator
from cbsim.scenario import catalog
from cbsim.scenario.fields import ScenarioError

FILE = catalog.ROOT / "reports" / "published.yaml"
PAGES = "".join((catalog.ROOT / page).read_text() for page in ("README.md", "docs/analysis.md"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("runs")
    assert simulator.main(["run", "worked_example", "--out", str(out), "--quiet"]) == 0
    return sorted(out.iterdir())


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_worked_example_holds(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """42 ms a step and 32/42 of the time busy when synchronous: arithmetic, so it may be published exactly."""
    file = write(
        tmp_path / "p.yaml",
        "numbers:\n- where: {name: worked_example, loop.mode: sync}\n"
        "  expect: {tpot_s.p50: {value: 0.042, within: 0}, gpu_active: {value: 0.7619, within: 1e-4}}\n",
    )
    assert parser.main(["drift", str(file), *map(str, runs)]) == 0
    assert "2 of 2 published numbers hold" in capsys.readouterr().out


def test_a_drift_is_named(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path / "p.yaml",
        "numbers:\n- where: {name: worked_example}\n  expect: {tpot_s.p50: {value: 0.042, within: 0.001}}\n",
    )
    assert parser.main(["drift", str(file), *map(str, runs)]) == 3  # sync holds, async has 32 ms
    said = capsys.readouterr().out
    assert re.search(r"DRIFTED .*worked_example: tpot_s.p50 is 0.032, published 0.042 within 0.001", said)


@pytest.mark.parametrize("where", ["{name: another}", "{name: worked_example, loop.mode: never}"])
def test_a_number_without_its_run_has_drifted(runs: list[Path], where: str, tmp_path: Path) -> None:
    numbers = f"numbers:\n- where: {where}\n  expect: {{makespan_s: {{value: 42, within: 1}}}}\n"
    (finding,) = published.compared(published.read(write(tmp_path / "p.yaml", numbers)), loading.read(runs))
    assert finding.value is None
    assert not finding.holds


def test_the_bound_is_part_of_the_tolerance() -> None:
    number = Number(value=2.0, within=0.5)
    assert Finding("r", "m", number, 2.5).holds
    assert Finding("r", "m", number, 1.5).holds
    assert not Finding("r", "m", number, 2.5000001).holds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("numbers:\n- where: {}\n  expect: {makspan_s: {value: 1, within: 0}}\n", r"p.yaml:3: .*makespan_s"),
        ("numbers:\n- where: {}\n  expect: {makespan_s: {value: 1, within: -1}}\n", r"within: got -1, must be >= 0"),
        ("numbers:\n- where: {}\n  expect: {makespan_s: {value: 1}}\n", r"within: is required"),
        ("numbers: 3\n", r"p.yaml:1: numbers: got 3"),
        ("numbers: []\n", r"p.yaml:1: numbers: .*needs at least 1"),
        ("numbers:\n- where: {nam: x}\n  expect: {}\n", r"p.yaml:2: .*where: got nam, needs the scenario's `name`"),
        ("nombers: []\n", r"unknown field; did you mean numbers\?"),
    ],
)
def test_a_broken_file_is_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=says):
        published.read(write(tmp_path / "p.yaml", text))


def test_every_published_run_is_made_by_the_reports() -> None:
    """`.ci/reports` runs all that the list is about."""
    script = (catalog.ROOT / ".ci" / "reports").read_text()
    assert [
        one.where["name"] for one in published.read(FILE).numbers if f"run {one.where['name']} " not in script
    ] == []


SHOWN = {
    "ttft_s.p99": lambda value: f"{value:.3g} s",
    "makespan_s": lambda value: f"{value:.1f} s",
    "gpu_active": lambda value: f"{value:.1%}".replace("%", " %"),
    "output_tokens_per_s": lambda value: f"{value:,.0f}",
    "padding_share": lambda value: f"{value:.1%}".replace("%", " %"),
}


def test_the_pages_show_the_published_numbers() -> None:
    """Every value that is held against runs is the one that a page prints; the worked example is arithmetic."""
    missing = []
    for one in published.read(FILE).numbers:
        if one.where["name"] != "worked_example":
            for metric, number in one.expect.items():
                text = SHOWN[metric](number.value)
                exact = f"{number.value:.3%}".replace("%", " %")
                missing += [(one.where, metric, text)] if text not in PAGES and exact not in PAGES else []
    assert not missing
