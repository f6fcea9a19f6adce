"""Published numbers: what holds, what has drifted, and that nothing passes because it was not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import script

from cbsim.cli import parser as simulator
from cbsim.scenario import catalog, documents

published = script("published")
FILE = catalog.ROOT / "reports" / "published.yaml"
NUMBERS = documents.parse(FILE.read_text(), str(FILE), lines=False)["numbers"]
PAGES = "".join((catalog.ROOT / page).read_text() for page in ("README.md", "docs/analysis.md"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("runs")
    assert simulator.main(["run", "worked_example", "--out", str(out), "--quiet"]) == 0
    return sorted(map(str, out.iterdir()))


@pytest.mark.parametrize(
    ("loop", "expect", "status", "line"),
    [  # 42 ms a step and 32/42 of the time busy when synchronous: arithmetic, so it may be published exactly
        ("sync", "{tpot_s.p50: {value: 0.042, within: 0}}", 0, "tpot_s.p50 is 0.042"),
        ("async", "{tpot_s.p50: {value: 0.042, within: 0.001}}", 3, "tpot_s.p50 is 0.032"),
        ("never", "{makespan_s: {value: 42, within: 1}}", 3, "makespan_s is not there"),
        ("sync", "{slo.met: {value: 1, within: 1}}", 3, "slo.met is not there"),
    ],
)
def test_a_number_holds_or_has_drifted(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], loop: str, expect: str, status: int, line: str
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(f"numbers:\n- where: {{name: worked_example, loop.mode: {loop}}}\n  expect: {expect}\n")
    assert published.main(file, runs) == status
    word = "DRIFTED" if status else "ok     "
    assert f"{word}  worked_example, {loop}: {line}" in capsys.readouterr().out


def test_every_published_run_is_made_by_the_reports() -> None:
    """`.ci/reports` runs all that the list is about."""
    text = (catalog.ROOT / ".ci" / "reports").read_text()
    assert [one["where"]["name"] for one in NUMBERS if f"run {one['where']['name']} " not in text] == []


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
    for one in NUMBERS:
        if one["where"]["name"] != "worked_example":
            for metric, number in one["expect"].items():
                text = SHOWN[metric](number["value"])
                exact = f"{number['value']:.3%}".replace("%", " %")
                missing += [(one["where"], metric, text)] if text not in PAGES and exact not in PAGES else []
    assert not missing
