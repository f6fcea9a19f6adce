"""docs/fidelity.md and docs/studies.md say what the reports say, and the reports what the code computes.

`python tests/proof/test_fidelity_docs.py` writes the pages' tables again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fidelity_tables as trust
import pytest
import study_tables as studies
from fidelity_tables import LOGS, POINTS, cases, errors, facts, largest

from cbsim.draw.markdown import Table, table
from cbsim.proof.recorded import case
from cbsim.proof.recorded.reenactment import recorded, replay
from cbsim.proof.recorded.score import scores
from cbsim.proof.studies import fragmentation
from cbsim.scenario import catalog

DOCS = catalog.ROOT / "docs"
PAGES: Mapping[str, Mapping[str, Callable[[], Table]]] = {
    "fidelity.md": {
        "cases": trust.case_table,
        "points": trust.point_table,
        "built": trust.built_table,
        "coverage": trust.coverage_table,
        "logs": trust.log_table,
        "scores": trust.score_table,
    },
    "studies.md": {
        "ablation": studies.ablation_table,
        "schedulers": studies.scheduler_table,
        "fragmentation": studies.fragmentation_table,
        "assumptions": studies.assumption_table,
    },
}
OF_POINTS = ("points", "coverage", "built")  # of a report that may not be there
TEXT = ("cases",)  # whose columns are no numbers
MARK = re.compile(r"^<!-- ([\w-]+) -->\n(?:\n((?:\|.*\n)+))?", re.MULTILINE)


def made(page: str, mark: str) -> str:
    """The lines below a mark; none if there is no report to make them of."""
    if mark in OF_POINTS and not trust.path(POINTS).is_file():
        return ""
    lines = table(PAGES[page][mark]())[:-1]
    if mark in TEXT:
        lines[1] = "|---" * lines[0].count(" | ") + "|---|"
    return "\n".join(lines) + "\n"


def rewritten(page: str, text: str) -> str:
    def below(mark: re.Match[str]) -> str:
        lines = made(page, mark[1])
        return f"<!-- {mark[1]} -->\n" + (f"\n{lines}" if lines else "")

    return MARK.sub(below, text)


@pytest.mark.parametrize(("page", "mark"), [(page, mark) for page, marks in PAGES.items() for mark in marks])
def test_the_pages_say_what_the_reports_say(page: str, mark: str) -> None:
    """Each table is made from its report, and stands once. Without a report there is no table."""
    (there,) = [each[2] or "" for each in MARK.finditer((DOCS / page).read_text()) if each[1] == mark]
    assert there == made(page, mark), "run `python tests/proof/test_fidelity_docs.py`"
    if mark in OF_POINTS and not there:
        pytest.skip(f"{trust.path(POINTS).relative_to(catalog.ROOT)} is not there: .ci/reports published makes it")


@pytest.mark.parametrize("page", PAGES)
def test_every_mark_is_known(page: str) -> None:
    assert [mark[1] for mark in MARK.finditer((DOCS / page).read_text())] == list(PAGES[page])


@pytest.mark.parametrize("name", cases())
def test_the_readme_quotes_the_reports(name: str) -> None:
    """Its row of a recorded run has the largest error that was published."""
    published = f"largest error {100 * largest(errors(facts(name)['errors'])):.2f} %"
    text = (catalog.ROOT / "README.md").read_text()
    (row,) = re.findall(rf"^\| .* {re.escape(trust.title(name))} \|.*$", text, re.MULTILINE)
    assert published in row


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("published servers, dense, vLLM on H100 and H200", "dense, vLLM, H100 and H200"),
        ("dense, TensorRT-LLM on H200", "dense, TensorRT-LLM, H200"),
        ("mixture of experts, vLLM on H100 and H200", "experts, H100 and H200"),
    ],
)
def test_the_readme_quotes_the_points(row: str, name: str) -> None:
    """Mean errors and the number of points, as the report has them."""
    found = facts(POINTS)["classes"][name]
    text = (catalog.ROOT / "README.md").read_text()
    (line,) = re.findall(rf"^\| {re.escape(row)} \|.*$", text, re.MULTILINE)
    said = f"TPOT {100 * found['tpot']['mape']:.1f} %, TTFT {100 * found['ttft']['mape']:.1f} %"
    assert said in line and f"| {found['points']} points" in line


def test_the_page_says_what_the_modelled_device_measured() -> None:
    """Its table of bars: bounds, and how many scores are met."""
    report, page = trust.MODELLED.read_text(), (DOCS / "fidelity.md").read_text()
    for metric in ("async speed-up", "makespan", "output tokens/s", "TPOT p50", "TTFT p50", "GPU active"):
        rows = 2 if metric == "TPOT p50" else 1  # with p99, as many
        (cells,) = re.findall(rf"^\| {metric} \| within (.*?) \| (\d+) of (\d+) .*$", report, re.MULTILINE)
        bound, met, scores = cells[0], int(cells[1]), int(cells[2])
        assert re.search(rf"^\| {metric}.* \| {bound} \| {rows * met} of {rows * scores} \|", page, re.MULTILINE)


@pytest.mark.parametrize("name", cases())
def test_the_reports_say_what_the_code_computes(name: str) -> None:
    """The committed errors are those of a replay now: a change of policy, tables or priors has to publish its own."""
    place = catalog.data_folders()[-1] / "measured_vllm" / "cases" / name
    if not place.is_dir():
        pytest.skip("the recorded vLLM runs are not here: docs/data.md")
    found = case.read(place)
    now = scores(replay(found, found.scenario()).served, recorded(found))
    published = errors(facts(name)["errors"])
    assert {(one.metric, one.statistic): pytest.approx(one.error, abs=1e-12) for one in now} == published


def test_the_study_says_what_the_code_computes() -> None:
    """One of its runs, whole: what it held is what was published."""
    now = fragmentation._run(fragmentation.PAPER, "Orca (Max)")
    (published,) = [
        one
        for one in facts("fragmentation")["runs"]
        if (one["assumption"], one["system"]) == (fragmentation.PAPER, "Orca (Max)")
    ]
    assert now.shares._asdict() == pytest.approx(published["shares"], abs=1e-12)
    assert now.running == pytest.approx(published["running"], abs=1e-12)


# -- the tables of published servers, of a report by hand -------------------------------------------------------------


def point(system: str, error: float, peer: float | None, **others: Any) -> dict[str, Any]:
    """As report.json has one, with this error in every metric."""
    metrics = ("ttft", "tpot", "throughput")
    return {
        "stratum": f"{system} vllm MiniMax-M2.5 TP4 1024/1024",
        "source": "inferencex-db",
        "errors": dict.fromkeys(metrics, error),
        "peer_errors": None if peer is None else dict.fromkeys(metrics, peer),
        "interval_80": {
            metric: {"low": 0.9, "high": 1.25, "residuals": 30} if system == "h100_sxm" else None for metric in metrics
        },
        "terms": {"file": "vllm-experts", "curve": "c"},
        "outside_calibration": [],
    } | others


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of four points, three of which are predicted."""
    statistics = {metric: {"points": 2, "median": 0.0, "mape": 0.15, "p90": 0.2} for metric in ("ttft", "tpot")}
    statistics["throughput"] = statistics["tpot"]
    data = {
        "points": 1004,
        "predicted": [
            point("h100_sxm", 0.1, -0.3),
            point("h200_sxm", -0.2, None),
            point("b200_sxm", 0.5, 0.25, outside_calibration=["card b200_sxm"]),
        ],
        "not_built": {f"reason {number}": number for number in range(1, 11)} | {"apart": 946},
        "classes": {
            "experts, H100 and H200": {"points": 2, **statistics, "missed": ["h100_sxm: +10 %"]},
            "B200, no bars": {"points": 1, **statistics, "missed": []},
        },
        "coverage": {"vllm-experts": {"ttft": [8, 10], "tpot": [7, 10]}},
    }
    monkeypatch.setattr(trust, "REPORTS", tmp_path)
    (tmp_path / POINTS).mkdir()
    trust.path(POINTS).write_text(json.dumps({"data": data}))


@pytest.mark.usefixtures("by_hand")
def test_a_class_is_told_beside_the_other_tool_on_the_points_of_both() -> None:
    """Of two points of experts the other tool predicts one: ours is 10 % off there, theirs 30 %."""
    experts, newer = trust.point_table().rows
    spread = "15.0 % (20.0 %)"
    assert experts == ("experts, H100 and H200", "2", spread, spread, spread, "1", "1", *["10.0 %, 30.0 %"] * 2)
    assert newer == ("B200, no bars", "1", spread, spread, spread, "0", "1", *["50.0 %, 25.0 %"] * 2)


@pytest.mark.usefixtures("by_hand")
def test_intervals_and_reasons_are_told() -> None:
    """A point without an interval has no part in the typical one; reasons add up to what is not predicted."""
    assert trust.coverage_table().rows == [
        ("`vllm-experts`", "8 of 10", "-10 % to +25 %", "7 of 10", "-10 % to +25 %", "3", "1")
    ]
    header, rows = trust.built_table().header, trust.built_table().rows
    assert header[0] == "of 1,004 points"
    assert rows[:3] == [("predicted", "3"), ("apart", "946"), ("reason 10", "10")]
    assert rows[-1] == ("3 other reasons", "6")
    assert sum(int(count.replace(",", "")) for _, count in rows) == 1004


@pytest.mark.usefixtures("by_hand")
def test_your_case_has_the_errors_of_its_class() -> None:
    """A class without points says so."""
    dense, _, experts = trust._published()
    assert dense[2:4] == (trust.UNKNOWN, trust.UNKNOWN)
    assert experts[2:4] == ("15.0 %", "15.0 %")
    assert experts[4].startswith("mean of 2 points by InferenceX")


def test_the_logs_are_counted_as_their_report_does() -> None:
    """The means over all runs that were not looked at are those that the report found."""
    found = [errors(run["errors"]) for run in trust.unseen()]
    said = (trust.REPORTS / LOGS / "report.md").read_text()
    means = (
        f"{m.upper()} {sum(abs(each[m, 'mean']) for each in found) / len(found):.1%}" for m in ("ttft", "tpot", "e2e")
    )
    assert f"over the {len(found)} runs that were not looked at: {', '.join(means)}." in said


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(rewritten(page, (DOCS / page).read_text()))
