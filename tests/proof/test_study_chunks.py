"""The study `chunks`: published points are read as they are, and compared with a roofline that paper can check."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.cli import parser
from cbsim.proof.studies import chunks, sarathi
from cbsim.proof.studies.sarathi import SHARD, Answer, Point
from cbsim.scenario import catalog
from cbsim.scenario.fields import ScenarioError

FOLDER = "sarathi_osdi24"


def real(name: str) -> Path:
    """A published file, which is not shipped with the project."""
    try:
        return catalog.data(f"{FOLDER}/{name}")
    except ScenarioError as error:
        pytest.skip(f"published data not present: {error}")


def published(name: str, *columns: str) -> list[tuple[float, ...]]:
    with real(name).open(newline="") as file:
        return [tuple(float(row[column]) for column in columns) for row in csv.DictReader(file)]


# -- golden -----------------------------------------------------------------------------------------------------------


def test_published_points_are_read_as_they_are() -> None:
    """Seconds in figure 2, milliseconds in figure 9 and table 2; no row is dropped and none changed."""
    times = published("figure-2_decode.csv", "batch_size", "batch_execution_time")
    assert [(p.decodes, p.published_s) for p in sarathi.decodes()] == times
    times = published("figure-2_prefill.csv", "batch_num_tokens", "batch_execution_time")
    assert [(p.prompt, p.published_s) for p in sarathi.prefills()] == times
    times = published("figure-9_chunking-overhead.csv", "prefill_length", "chunk_size", "prefill_execution_time")
    assert [(p.prompt, p.chunk, p.published_s) for p in sarathi.chunked()] == [(*key, ms * 1e-3) for *key, ms in times]
    columns = "batch_num_prefill_tokens", "batch_num_decode_tokens", "batch_execution_time", "linear"
    times = published("table-2_results.csv", *columns)
    points = [(p.prompt, p.decodes, p.published_s, p.linear_s) for p in sarathi.hybrids()]
    assert points == [(*key, ms * 1e-3, linear_ms * 1e-3) for *key, ms, linear_ms in times]


def test_only_the_first_batch_of_the_prefill_run_is_cold() -> None:
    """Batch 0 of its run: 256 tokens took longer than 512."""
    real("figure-2_prefill.csv")
    assert [p.prompt for p in sarathi.prefills() if p.cold] == [256]


def test_our_ratio_to_the_unchunked_prompt_is_the_published_one() -> None:
    ratios = published("figure-9_chunking-overhead.csv", "prefill_execution_time_relative")
    assert [c.over_whole for c in sarathi.compared().chunked] == pytest.approx([ratio for (ratio,) in ratios])


def test_what_the_study_finds() -> None:
    """The roofline is right on chunks of 2,048, says nothing of smaller chunks, and is far below every decode batch."""
    real("table-2_results.csv")
    found = sarathi.compared()
    assert all(-0.04 < c.answer.error < 0.01 for c in found.chunked if c.answer.point.chunk == 2048)
    assert all(c.over_reference > 1.15 for c in found.chunked if c.answer.point.chunk < 2048)
    assert all(c.roofline_over_whole == pytest.approx(1, abs=1e-4) for c in found.chunked)
    assert all(-0.80 < a.error < -0.55 for a in found.decodes)
    assert all(abs(found.floored_s(a) / a.published_s - 1) < 0.18 for a in found.decodes)


# -- theory -----------------------------------------------------------------------------------------------------------


def test_roofline_of_a_decode_batch_by_hand() -> None:
    """One row on one of two GPUs: 16.73e9 weights of the layers and 32,000 x 7,168 of the head, 2 bytes each, read at
    0.85 x 1.935e12 bytes/s are 20.63 ms; 1,022 tokens of 60 x 4 x 128 x 4 bytes, at 0.7 of it, are 0.093 ms."""
    weights = 60 * (2 * 7168 * 128 * (28 + 4) + 3 * 7168 * 10240) + 32_000 * 7168
    seconds = 2 * weights / (0.85 * 1.935e12) + 1022 * 122_880 / (0.7 * 1.935e12)
    assert seconds == pytest.approx(20.72e-3, rel=1e-3)
    assert sarathi.roofline_s(sarathi.cost(), Point(0, 0, 1, 1021, 1)) == pytest.approx(seconds, rel=1e-4)


def test_roofline_of_a_prefill_by_hand() -> None:
    """2,048 tokens: 2 FLOP a weight and token at 0.6 x 311.9e12 FLOP/s are 366.3 ms, and 2,048 x 2,049 / 2 pairs of 4 x
    60 x 28 x 128 FLOP are 9.6 ms more; the head's 0.3 ms come once."""
    linear = 2 * 2048 * 60 * SHARD.layer_parameters / (0.6 * 3.119e14)
    attention = 2048 * 2049 / 2 * 4 * 60 * 28 * 128 / (0.6 * 3.119e14)
    assert linear == pytest.approx(366.3e-3, rel=1e-3) and attention == pytest.approx(9.64e-3, rel=1e-3)
    seconds = sarathi.roofline_s(sarathi.cost(), Point(2048, 2048, 0, 0, 1))
    assert seconds == pytest.approx(linear + attention, rel=2e-3)
    assert sarathi.linear_s(2048, prefill=True) == pytest.approx(linear)


def test_the_shard_is_half_of_yi_34b() -> None:
    """34.39e9 weights, of which only the norms are not shared out."""
    assert 2 * SHARD.parameters == pytest.approx(34.39e9, rel=1e-3)


def test_ridge_is_bytes_a_second_against_flop_a_second() -> None:
    """A weight is 2 bytes and 2 FLOP a token: 0.6 x 311.9e12 / (0.85 x 1.935e12) = 113.8 tokens."""
    assert sarathi.ridge_tokens(prefill=True) == pytest.approx(113.8, abs=0.1)


def test_filled_waves_by_hand() -> None:
    """1,024 tokens are 4 rows of tiles of 256 x 128: gate and up 640 tiles in 6 waves of 108, down and the output
    projection 224 in 3, q, k and v 144 in 2. Waves weighed by depth, of what all tiles would take evenly."""
    used = (7168 * 640 + 10240 * 224 + 7168 * 144 + 3584 * 224) / 108
    assert sarathi.filled(1024) == pytest.approx(used / (7168 * 6 + 10240 * 3 + 7168 * 2 + 3584 * 3))


def test_floor_finds_the_line_it_is_given() -> None:
    points = [Point(0, 0, rows, 1, 0.05 + 0.001 * rows) for rows in (1, 4, 32)]
    assert sarathi.floor(points) == pytest.approx((0.05, 0.001))


# -- property ---------------------------------------------------------------------------------------------------------


@given(prompt=st.integers(1, 20_000), chunk=st.integers(16, 20_000))
def test_chunks_cover_the_prompt_and_never_make_it_cheaper(prompt: int, chunk: int) -> None:
    """Steps follow each other without gap, the last one samples, and the roofline finds no gain in splitting."""
    point, whole = Point(prompt, chunk, 0, 0, 1), Point(prompt, prompt, 0, 0, 1)
    spans = [(c.start, c.tokens, c.outputs) for step in point.steps for c in step.work.chunks]
    assert [start for start, _, _ in spans] == list(range(0, prompt, chunk))
    assert sum(tokens for _, tokens, _ in spans) == prompt
    assert [outputs for _, _, outputs in spans] == [0] * (len(spans) - 1) + [1]
    model = sarathi.cost()
    assert sarathi.roofline_s(model, point) >= sarathi.roofline_s(model, whole) - 1e-9 * len(spans)


@given(published_s=st.floats(0.01, 10), roofline_s=st.floats(0.01, 10))
def test_error_and_the_efficiency_that_would_be_right(published_s: float, roofline_s: float) -> None:
    """Twice the time asked for is an error of +100%, and twice the efficiency would cure it."""
    answer = Answer(Point(1, 1, 0, 0, published_s), roofline_s)
    assert published_s * (1 + answer.error) == pytest.approx(roofline_s)
    assert roofline_s * 0.6 / answer.efficiency == pytest.approx(published_s)


@given(tokens=st.integers(1, 20_000))
def test_waves_are_never_more_than_full(tokens: int) -> None:
    assert 0 < sarathi.filled(tokens) <= 1


# -- command and bad input --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("drawn")
def test_the_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report, figures and JSON: 8 decode batches, 8 prefills, 16 chunked prompts, 3 steps of table 2."""
    real("figure-2_decode.csv")
    assert parser.main(["study", "chunks", "--out", str(tmp_path / "out"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [len(data[part]) for part in ("decode", "prefill", "chunked", "hybrid")] == [8, 8, 16, 3]
    assert "Wrong: the overhead of chunks" in (tmp_path / "out" / "report.md").read_text()
    assert {path.name for path in (tmp_path / "out" / "figures").glob("*.png")} == {
        "chunks_steps.png",
        "chunks_overhead.png",
    }


def test_absent_data_are_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(catalog, "data_folders", lambda: [Path("nowhere")])
    assert parser.main(["study", "chunks"]) == 2
    assert "figure-2_decode.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("", "expected the published (0, 0, 1)"),
        ("1,0.05\n2,0.05\n", "got None, expected the published (0, 0, 4)"),
        ("3,0.05\n", "got (0, 0, 3), expected the published (0, 0, 1)"),
        ("1,0\n", "batch_execution_time: got '0', expected a number > 0"),
        ("1,soon\n", "batch_execution_time: got 'soon', expected a number >= 0"),
        ("1.5,0.05\n", "batch_num_decode_tokens: got '1.5', expected a whole number"),
        ("1\n", "got 1 cells, expected 2"),
    ],
)
def test_a_file_that_is_not_the_published_one(
    rows: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be used is refused with file and field; nothing is compared with half of the points."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "figure-2_decode.csv").write_text(f"batch_num_decode_tokens,batch_execution_time\n{rows}")
    monkeypatch.setattr(catalog, "data_folders", lambda: [tmp_path])
    with pytest.raises(ScenarioError, match=r"figure-2_decode\.csv") as refused:
        chunks.study()
    assert says in str(refused.value)
