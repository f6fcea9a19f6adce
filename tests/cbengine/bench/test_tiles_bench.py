"""The sweep of tiles, in Triton's interpreter: every variant answers or says why not, and the best comes first."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs the engine's extra: pip install -e '.[engine]'")
import interpreted  # noqa: F401 - skips this module where triton cannot run
from ragged import DEVICE

from cbengine.bench import tiles_bench, timing
from cbengine.bench.timing import Ceilings
from cbengine.model.kernels.tiles import DECODE, Tiles
from cbsim.scenario import shapes

MODEL = shapes.model("tiny")
BEST = Ceilings(bandwidth=1e9, rate=1e12)
OTHER = Tiles(16, 32, 4, 3)
IMPOSSIBLE = Tiles(16, 48, 4, 3)  # no power of two


@pytest.fixture(autouse=True)
def descending(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured later is faster; nothing is run to be timed."""
    times = iter(range(100, 0, -1))
    monkeypatch.setattr(timing, "timed", lambda act, device="cuda": float(next(times)))


def test_variants_of_decode_are_sorted_and_the_impossible_are_last() -> None:
    """Each has the default's answers; other tiles are tried first, then other splits with the default's tiles."""
    small = {"rows": 2, "contexts": (64, 300), "span": 0, "multiprocessors": 1}
    found = list(tiles_bench.decodes(MODEL, BEST, DEVICE, tiles=(OTHER, IMPOSSIBLE), splits=(2,), **small))
    shipped = DECODE[2, 64]
    for context, four in (("64", found[:4]), ("300", found[4:])):
        assert {variant.point for variant in four} == {f"decode, 2 x {context}"}
        assert [(v.cached, v.splits) for v in four] == [(shipped.cached, 2), (32, 0), (shipped.cached, 0), (48, 0)]
        assert [v.default for v in four] == [False, False, True, False]
        assert all(v.error is not None and v.error < tiles_bench.WRONG for v in four[:3])
        assert (four[3].seconds, four[3].error) == (None, None)
        assert four[3].failed in str(four[3])
        assert four[3].failed
        assert str(four[2]).endswith("the default")


def test_variants_of_prefill_are_held_against_the_default() -> None:
    found = list(tiles_bench.prefills(MODEL, BEST, DEVICE, points=((40, 0), (20, 30)), tiles=(OTHER,)))
    assert [(v.point, v.default) for v in found] == [
        *(("prefill, 40 over 0", False), ("prefill, 40 over 0", True)),
        *(("prefill, 20 over 30", False), ("prefill, 20 over 30", True)),
    ]
    assert all(v.error is not None and v.error < tiles_bench.WRONG for v in found)


def test_a_wrong_answer_is_marked() -> None:
    variant = tiles_bench.Variant("decode", 16, 64, 4, 5, 3, 0, default=False, seconds=1.0, share=0.5, error=0.1)
    assert "WRONG" in str(variant)


def test_the_sweep_stops_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tiles_bench.decodes(MODEL, BEST, DEVICE, rows=1, contexts=(64,), budget_s=0)) == []
    assert capsys.readouterr().err == "decode tiles, tokens: no time left for 64\n"
