"""docs/fidelity.md says what the reports say, and the reports what the code computes.

`python tests/proof/test_fidelity_docs.py` writes the page's tables again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cbsim.draw.markdown import Table, table
from cbsim.proof.recorded import case
from cbsim.proof.recorded.reenactment import recorded, replay
from cbsim.proof.recorded.score import scores
from cbsim.proof.studies import fragmentation
from cbsim.scenario import catalog

PAGE = catalog.ROOT / "docs" / "fidelity.md"
REPORTS = catalog.ROOT / "reports" / "fidelity"
CASES = {"RTX4090__Llama-3.1-8B": "RTX 4090", "RTXPRO6000__Llama-3.1-8B": "RTX PRO 6000"}
RUNS = CASES | {"RTXPRO6000__Qwen3-30B-A3B-Instruct-2507": "two of it, Qwen3-30B-A3B"}
MARKS = ["scores", "ablation", "schedulers", "fragmentation", "assumptions"]
MARK = re.compile(rf"^<!-- ({'|'.join(MARKS)}) -->\n(?:\n(?:\|.*\n)+)?", re.MULTILINE)
STATISTICS = ("mean", "median", "p90", "p95", "p99")


def facts(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((REPORTS / name / "report.json").read_text())["data"]
    return data


def errors(entries: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    return {(one["metric"], one["statistic"]): one["error"] for one in entries}


def percent(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-0.00", "+0.00") + " %"


def score_table() -> Table:
    rows = []
    for name, title in RUNS.items():
        found = errors(facts(name)["errors"])
        rows += [
            (f"{title}, {metric.upper()}", *(percent(found[metric, s]) for s in STATISTICS))
            for metric in ("ttft", "tpot", "e2e")
        ]
        rows.append((f"{title}, makespan", percent(found["makespan", ""]), *[""] * 4))
    return Table("", ("Llama-3.1-8B, or another model, on", *STATISTICS), rows)


def ablation_table() -> Table:
    header = ["replayed with"]
    rows: dict[str, list[str]] = {}
    for name, title in RUNS.items():
        header += [f"{title}: TTFT", "TPOT", "E2E", "largest"]
        for one in facts(name)["ablation"]:
            found = errors(one["errors"])
            largest = max(abs(error) for (_, statistic), error in found.items() if statistic)
            means = [f"{100 * found[metric, 'mean']:+.1f}" for metric in ("ttft", "tpot", "e2e")]
            rows.setdefault(one["name"], []).extend((*means, f"{100 * largest:.1f}"))
    return Table("", header, [(name, *cells) for name, cells in rows.items()])


def scheduler_table() -> Table:
    header = ["policy, cost model"]
    rows: dict[str, list[str]] = {}
    for name, title in CASES.items():
        header += [f"{title}: TTFT", "TPOT", "E2E", "preemptions"]
        for one in facts("schedulers")["answers"]:
            if one["run"] == name:
                found = {(score[0], score[1]): score[-1] for score in one["scores"]}
                means = [f"{100 * found[metric, 'mean']:+.1f} %" for metric in ("ttft", "tpot", "e2e")]
                rows.setdefault(f"{one['policy']}, {one['cost']}", []).extend((*means, str(one["preemptions"])))
    return Table("", header, [(name, *cells) for name, cells in rows.items()])


def fragmentation_table() -> Table:
    header = ("percent of the KV memory (published)", "token states", "reserved for later", "never used", "all others")
    rows = []
    for one in facts("fragmentation")["runs"]:
        if one["assumption"] == fragmentation.PAPER:
            held, later, never, *others = one["shares"].values()
            cells = zip((held, later, never, sum(others)), fragmentation.PUBLISHED[one["system"]], strict=True)
            shown = (f"{100 * share:.1f}" + ("" if said is None else f" ({said})") for share, said in cells)
            rows.append((one["system"], *shown))
    return Table("", header, rows)


def assumption_table() -> Table:
    held: dict[str, dict[str, str]] = {}
    for one in facts("fragmentation")["runs"]:
        held.setdefault(one["assumption"], {})[one["system"]] = f"{100 * one['shares']['held']:.1f}"
        if one["assumption"] == fragmentation.RATE:
            batched = f"{one['running']:.2f} ({fragmentation.BATCHED[one['system']]:.2f})"
            held.setdefault(f"requests that run, at {fragmentation.RATE}", {})[one["system"]] = batched
    systems = tuple(fragmentation.SYSTEMS)
    rows = [(name, *(cells.get(system, "") for system in systems)) for name, cells in held.items()]
    return Table("", ("assumption", *systems), rows)


def rewritten(text: str) -> str:
    tables = (score_table, ablation_table, scheduler_table, fragmentation_table, assumption_table)
    made = dict(zip(MARKS, tables, strict=True))
    return MARK.sub(lambda m: f"<!-- {m[1]} -->\n\n" + "\n".join(table(made[m[1]]())[:-1]) + "\n", text)


def test_the_page_says_what_the_reports_say() -> None:
    """Its tables are made from reports/fidelity, each once."""
    text = PAGE.read_text()
    assert [mark[1] for mark in MARK.finditer(text)] == MARKS
    assert rewritten(text) == text, "run `python tests/proof/test_fidelity_docs.py`"


@pytest.mark.parametrize("name", CASES)
def test_the_readme_quotes_the_reports(name: str) -> None:
    """Its row of a case has the largest error that was published, and so has the page."""
    published = errors(facts(name)["errors"])
    largest = max(abs(error) for (_, statistic), error in published.items() if statistic)
    (row,) = re.findall(rf"^\| .* an {CASES[name]} \|.*$", (catalog.ROOT / "README.md").read_text(), re.MULTILINE)
    assert f"largest error {100 * largest:.2f} %" in row
    assert f"{100 * largest:.2f} % on the {CASES[name]}" in PAGE.read_text()


def test_the_page_says_what_the_modelled_device_measured() -> None:
    """Its table of bars: bounds, and how many scores are met."""
    report = (REPORTS.parent / "hardware" / "cpu-modelled" / "report" / "report.md").read_text()
    page = PAGE.read_text()
    for metric in ("async speed-up", "makespan", "output tokens/s", "TPOT p50", "TTFT p50", "GPU active"):
        rows = 2 if metric == "TPOT p50" else 1  # with p99, as many
        (cells,) = re.findall(rf"^\| {metric} \| within (.*?) \| (\d+) of (\d+) .*$", report, re.MULTILINE)
        bound, met, scores = cells[0], int(cells[1]), int(cells[2])
        assert re.search(rf"^\| {metric}.* \| {bound} \| {rows * met} of {rows * scores} \|", page, re.MULTILINE)


@pytest.mark.parametrize("name", RUNS)
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


if __name__ == "__main__":
    Path(PAGE).write_text(rewritten(PAGE.read_text()))
