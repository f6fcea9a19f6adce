"""What `cbsim capacity --json` prints: every probe is drawn and told, and nothing else passes for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.cli.parser import main
from analysis.page import capacity_report
from cbsim.draw.chart import Area, Level, Points, Whiskers
from cbsim.errors import RunError

LOADS = {
    4.0: (0.05, True),
    8.0: (0.1, True),
    16.0: (0.9, True),
    16.6: (1.0, None),
    17.0: (1.4, False),
    32.0: (9.0, False),
}


def answer() -> dict[str, Any]:
    """A search that found 16 to 17; one load lost requests and has no interval."""
    probes: list[dict[str, Any]] = [
        {
            "value": value,
            "replicates": 4,
            "requests": 400,
            "holds": holds,
            "reason": None if holds else "ttft.p99<=1s",
            "values": [{"condition": "ttft.p99<=1s", "mean": mean, "low": 0.8 * mean, "high": 1.2 * mean}],
        }
        for value, (mean, holds) in LOADS.items()
    ]
    probes.append({"value": 64.0, "replicates": 4, "requests": 99, "holds": False, "reason": "lost", "values": []})
    return {
        "name": "rates",
        "loop": "async",
        "field": "workload.arrivals.rate_per_s",
        "unit": "requests/s",
        "reason": "TTFT p99 exceeds 1.00 s",
        "holds": 16.0,
        "fails": 17.0,
        "confidence": 0.95,
        "replicates": 28,
        "requests": 2499,
        "conditions": ["ttft.p99<=1s"],
        "binds": {"word": "queue", "sentences": ["seats: all are taken"]},
        "monotone": True,
        "notices": [],
        "probes": probes,
    }


def file(folder: Path, given: Any) -> Path:
    path = folder / "capacity.json"
    path.write_text(json.dumps(given))
    return path


def test_probes_are_drawn_with_their_verdicts_the_limit_and_the_interval(tmp_path: Path) -> None:
    found = capacity_report.read(file(tmp_path, answer()))
    whole, near = capacity_report.figure(found).panels
    drawn = {mark.name: mark.x.tolist() for mark in whole.marks if isinstance(mark, Points)}
    assert drawn == {"holds": [4, 8, 16], "fails": [17, 32], "undecided": [16.6]}
    (shade,) = (mark for mark in whole.marks if isinstance(mark, Area))
    assert shade.x.tolist() == [16, 17]
    assert [mark.y for mark in whole.marks if isinstance(mark, Level)] == [1.0]
    whiskers = [mark for mark in whole.marks if isinstance(mark, Whiskers)]
    columns = [[*mark.at, *mark.low, *mark.high] for mark in whiskers if len(mark.at) == 1]
    assert columns == [pytest.approx([16.6, 0.8, 1.2])]
    reach = sorted(pair for mark in whiskers for pair in zip(mark.low, mark.high, strict=True))
    assert reach == [pytest.approx((0.8 * mean, 1.2 * mean)) for mean, _ in LOADS.values()]
    assert sorted(x for mark in near.marks if isinstance(mark, Points) for x in mark.x) == [16, 16.6, 17]


def test_the_report_says_the_answer_what_binds_and_every_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = answer() | {"monotone": False, "notices": ["32 fails and 40, which is more load, holds"]}
    assert main(["report", str(file(tmp_path, given)), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Holds 16 requests/s; at 17, TTFT p99 exceeds 1.00 s, with 95% confidence." in text
    assert "What binds: queue; seats: all are taken." in text and "there is no single capacity" in text
    assert "32 fails and 40, which is more load, holds" in text
    for value in (*LOADS, 64.0):
        assert f"| {value:g} | " in text
    assert (tmp_path / "out" / "figures" / "capacity.png").read_bytes().startswith(b"\x89PNG")
    assert "Holds 16 requests/s" in capsys.readouterr().out


def test_no_latency_is_below_zero(tmp_path: Path) -> None:
    """Answers of older files may have intervals that begin below 0; a load that only pilots saw is not decided."""
    given = answer()
    given["probes"][1]["values"][0]["low"] = -0.5
    given["probes"][0] |= {"holds": None, "likely": True}
    found = capacity_report.read(file(tmp_path, given))
    (whole, *_) = capacity_report.figure(found).panels
    assert min(low for mark in whole.marks if isinstance(mark, Whiskers) for low in mark.low) == 0.0
    drawn = {mark.name: mark.x.tolist() for mark in whole.marks if isinstance(mark, Points)}
    assert drawn["likely holds"] == [4]
    assert "-" not in capacity_report.build(found, "").tables[0].rows[2][4]
    still = capacity_report.figure(capacity_report.read(file(tmp_path, given | {"confidence": None})))
    assert "there are no intervals" in still.caption


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((None, 4.0), "No load that was tried holds; at 4, TTFT p99 exceeds 1.00 s"),
        ((32.0, None), "Holds 32 requests/s; none of the loads that were tried fails"),
    ],
)
def test_a_search_without_an_end_says_so(tmp_path: Path, ends: tuple[Any, Any], said: str) -> None:
    path = file(tmp_path, answer() | {"holds": ends[0], "fails": ends[1]})
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    assert said in (tmp_path / "out" / "report.md").read_text()
    (panel,) = capacity_report.figure(capacity_report.read(path)).panels
    assert not any(isinstance(mark, Area) for mark in panel.marks)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"probes": []}, "probes: got [], needs at least 1 entries"),
        ({"probes": [1]}, "probes[0]: got 1, expected fields"),
        ({"holds": "many"}, "holds: got 'many', expected a number"),
        ({"conditions": "x"}, "conditions: got 'x', expected a list"),
        ({"conditions": ["x"]}, "conditions: 'x': expected METRIC<VALUE"),
        ({"field": None}, "field: got nothing, expected text"),
        ({"probes": [{"value": 1, "values": 3}]}, "probes[0].values: got 3, expected a list"),
        ({"probes": [{"value": 1, "holds": [1]}]}, "probes[0].holds: got [1], expected true or false"),
    ],
)
def test_another_object_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    path = file(tmp_path, answer() | changes)
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err and str(path) in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", "{", "1"])
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RunError, match=r"a\.json: (not valid JSON|got .*, expected a JSON object)"):
        capacity_report.read(tmp_path / "a.json")
