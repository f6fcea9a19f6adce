"""Where the KV memory goes: closed forms of the four servers, and what the study makes of their runs."""

from __future__ import annotations

import json

import pytest

from cbsim.draw.chart import Spans
from cbsim.draw.study import Study
from cbsim.proof.studies import fragmentation
from cbsim.proof.studies.fragmentation import BEST, FIRST, ORCA, PAPER, PUBLISHED, RATE, SYSTEMS, TALKS, _run
from cbsim.server.occupancy import Shares

EQUAL = ("workload.prompt_tokens=100", "workload.output_tokens=201")  # 300 tokens at the end, 200 on average


@pytest.fixture(scope="module")
def study() -> Study:
    """All of it, with a few requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fragmentation, "REQUESTS", 40)
        return fragmentation.study()


@pytest.mark.parametrize(
    ("system", "asked", "piece"),
    [("Orca (Max)", 2048, 2048), ("Orca (Pow2)", 100 + 256, 512), ("Orca (Oracle)", 301, 512)],
)
def test_equal_requests(system: str, asked: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many whole pieces as 15,728 tokens have, each with 200 tokens on average of 300. The mean is that of rounds in
    step, but for the one step in which a round has ended and its successors begin. What is left holds no piece; it
    is scattered if it has as many tokens as the next request asks for.
    """
    monkeypatch.setattr(fragmentation, "REQUESTS", 300)
    served = _run("equal", system, *EQUAL)
    pieces = 15_728 // piece
    assert served.running == pytest.approx(pieces, rel=0.02)
    left = 15_728 / pieces - piece
    apart = left * (15_728 - pieces * piece >= asked)
    wanted = Shares(200, 100, asked - 300, piece - asked, apart, left - apart)
    assert served.shares == pytest.approx([pieces * tokens / 15_728 for tokens in wanted], abs=0.01)


def test_the_study_has_every_run(study: Study) -> None:
    runs = study.data["runs"]
    assert len({(one["assumption"], one["system"]) for one in runs}) == len(runs) == 18
    for one in runs:
        assert sum(one["shares"].values()) == pytest.approx(1)
        assert (one["refused"] > 0) == (one["assumption"] == TALKS)
    held = {(one["assumption"], one["system"]): one["shares"]["held"] for one in runs}
    for assumption in (PAPER, FIRST, BEST, TALKS):
        shares = [held[assumption, system] for system in ORCA]
        assert shares == sorted(shares)
    rounded = {one["assumption"] for one in runs if one["shares"]["rounded"] and one["system"] in ORCA}
    assert rounded == {PAPER, TALKS, RATE}  # the others are not placed by buddies
    json.dumps(study.data, allow_nan=False)


def test_the_figure_stacks_the_table(study: Study) -> None:
    """A bar a server as simulated, which is whole, over one as published, which has the published parts."""
    (chart,) = study.charts
    (panel,) = chart.panels
    assert list(panel.rows) == [name for system in SYSTEMS for name in (system, f"{system}, published")]
    ends = [0.0] * len(panel.rows)
    for mark in panel.marks:
        assert isinstance(mark, Spans)
        for row, start, end in zip(mark.row.tolist(), mark.start, mark.end, strict=True):
            assert start == pytest.approx(ends[row])  # marks come in the order in which they are stacked
            ends[row] = end
    assert ends[::2] == pytest.approx([100.0] * 4)
    assert ends[1::2] == pytest.approx([sum(part or 0.0 for part in PUBLISHED[system]) for system in SYSTEMS])


def test_the_findings_name_the_numbers(study: Study) -> None:
    runs = {one["system"]: one for one in study.data["runs"] if one["assumption"] == PAPER}
    for system in SYSTEMS:
        said = f"{system} {runs[system]['shares']['held']:.1%} ({PUBLISHED[system].held} %)"
        assert said in study.findings[0]
    assert "8.85% of 15,728 tokens" in study.findings[1]
