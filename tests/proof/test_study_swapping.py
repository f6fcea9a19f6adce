"""The study `swap_or_recompute`: its closed form against the cost model, paper and the simulator."""

from __future__ import annotations

import json
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cbsim.cli import parser
from cbsim.draw.study import Study
from cbsim.policy.moves import Way
from cbsim.policy.plan import Chunk, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.proof.studies import swap_or_recompute
from cbsim.proof.studies.swap_or_recompute import GB, GPUS, MODELS, Load, Pair, Ran, scenario
from cbsim.proof.studies.swap_terms import BOTH_WAYS, ONE_WAY, Terms
from cbsim.scenario import catalog
from cbsim.server.assemble import copies, cost_model

NS = 1e9
PLACES = st.tuples(st.sampled_from(MODELS), st.sampled_from(GPUS))
WAYS = st.sampled_from([BOTH_WAYS, ONE_WAY])


def step_s(model: str, gpu: str, start: int, tokens: int, others: int) -> float:
    """The cost model's step of one chunk beside decoding rows of 100 tokens each."""
    chunk = Chunk(RequestSpec(0, "0", 0, 1, 1, 1), 0, start, tokens, (), 1)
    work = StepWork((chunk,), 0, others, others * 100, 100, tokens)
    return cost_model(scenario(model, gpu)).gpu_ns(StepPlan(0, work), tokens + others)[1] / NS


@given(place=PLACES, tokens=st.integers(1, 60_000), others=st.integers(0, 1500))
@settings(max_examples=60)
def test_recomputing_takes_what_the_roofline_says(place: tuple[str, str], tokens: int, others: int) -> None:
    """A chunk of everything and the next token against a row that finds everything, beside the same others."""
    extra = step_s(*place, 0, tokens + 1, others) - step_s(*place, tokens, 1, others)
    assert Terms.of(scenario(*place)).extra_s(tokens, others) == pytest.approx(extra, rel=1e-6, abs=3e-9)


@given(place=PLACES, link=st.floats(1e9, 200e9), others=st.integers(0, 3000), ways=WAYS)
@settings(max_examples=200)
def test_swapping_pays_beyond_the_root(place: tuple[str, str], link: float, others: int, ways: int) -> None:
    """Recomputing is the cheaper a little below it, swapping a little above: exactly where two tokens of attention take
    longer to compute than to read."""
    terms = Terms.of(scenario(*place))
    root = terms.tokens(link, others, ways)
    assume(root > 2 * terms.cached_s / terms.pair_s + 2)
    above, below = int(root * 1.01) + 1, int(root * 0.99)
    assert terms.extra_s(above, others) > terms.moved_s(above, link, ways)
    assert terms.extra_s(below, others) < terms.moved_s(below, link, ways)
    assert terms.link_bytes_s(above, others, ways) < link < terms.link_bytes_s(below, others, ways)


def test_the_closed_form_by_hand() -> None:
    """Llama-3.1-8B on an H100: 32 layers of 218.1 million weights, so 2 x 6.98e9 / (0.6 x 989.4e12) = 23.5 us a token;
    131,072 bytes of KV. Far beyond the weights' 4.9 ms and short of attention's square, 2 x 131,072 bytes over 23.5 us:
    11.1 GB/s. Half of it if one way is hidden; nothing is fast enough for the tokens that the weights hide."""
    terms = Terms.of(scenario())
    assert terms.linear_s == pytest.approx(23.5e-6, rel=2e-3)
    assert terms.weights_s == pytest.approx(4.9e-3, rel=2e-3)
    assert terms.kv_bytes == 131072
    busy = 1000
    assert terms.link_bytes_s(200, busy) == pytest.approx(11.1 * GB, rel=5e-3)
    assert terms.link_bytes_s(200, busy, ONE_WAY) == terms.link_bytes_s(200, busy) / 2
    assert terms.tokens(64 * GB, busy) < 1
    assert terms.link_bytes_s(100) > 1000 * GB
    assert Terms(0.0, 1e-9, 1.0, 0.0, 0.0, 1).link_bytes_s(100) == inf
    asked = scenario()
    moved = copies(asked).ns(Way.IN, 64) / NS
    assert terms.moved_s(1024, asked.hardware.pcie_bytes_s, ONE_WAY) == pytest.approx(moved, rel=1e-6)


@pytest.mark.parametrize(("prompt", "link"), [(1024, 12 * GB), (1024, 16 * GB), (4096, 8 * GB), (4096, 64 * GB)])
def test_a_pair_takes_what_the_closed_form_says(prompt: int, link: float) -> None:
    """Within 50 us of 3 to 80 ms: the copies of the inputs to the device."""
    pair = Pair.of(prompt, link)
    assert pair.saved_s == pytest.approx(pair.closed_s, abs=50e-6)
    assert (pair.saved_s > 0) == (link > Terms.of(scenario()).link_bytes_s(pair.tokens))


def test_the_docs_say_what_the_report_says() -> None:
    """The section of docs/studies.md, number by number: closed forms from the code, runs from the report's data."""
    page = (catalog.ROOT / "docs" / "studies.md").read_text()
    said = " ".join(page[page.index("## Swap or recompute") :].split())
    data = json.loads((catalog.ROOT / "reports/fidelity/swap_or_recompute/report.json").read_text())["data"]
    terms, loads = Terms.of(scenario()), data["loads"]
    assert f"over 64 GB/s swapping pays from {terms.tokens(64 * GB):.0f} tokens on" in said
    assert f"over 16 GB/s from {terms.tokens(16 * GB):.0f}." in said
    links = [terms.link_bytes_s(tokens) / GB for tokens in (1024, 8192, 32768)]
    assert "{:.1f} GB/s at 1,024 tokens, {:.1f} at 8,192 and {:.1f} at 32,768".format(*links) in said
    assert f"Of {len(data['pairs'])} simulated pairs" in said
    assert all((pair["saved_s"] > 0) == (pair["closed_s"] > 0) for pair in data["pairs"])
    off = [abs(pair["saved_s"] - pair["closed_s"]) for pair in data["pairs"] if pair["tokens"] > 512]
    assert f"within {1e3 * max(off):.2f} ms" in said
    gains, order = [100 * load["gain"] for load in loads], [100 * (load["gain"] - load["closed"]) for load in loads]
    assert f"{min(gains):+.1f} to {max(gains):+.1f} % of the time" in said
    often = [Ran(*load["swap"]).preemptions / load["requests"] for load in loads]
    assert f"{min(often):.1f} to {max(often):.1f} preemptions a request" in said
    assert f"{min(order):+.1f} to {max(order):+.1f} points" in said


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer runs."""
    monkeypatch.setattr(swap_or_recompute, "PROMPTS", (1024,))
    monkeypatch.setattr(swap_or_recompute, "LINKS", (8 * GB, 64 * GB))
    monkeypatch.setattr(swap_or_recompute, "LOADS", ((128, 256, 12),))
    monkeypatch.setattr(swap_or_recompute, "LOAD_LINKS", (1 * GB, 64 * GB))


@pytest.mark.usefixtures("small")
def test_what_the_study_says(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Its findings count what its data hold, and the data of batches are whole: what one rule moves, the other computes
    again."""
    study: Study = swap_or_recompute.study()
    assert "in 2 of 2 runs" in study.findings[1]
    assert [pair["saved_s"] > 0 for pair in study.data["pairs"]] == [False, True]
    for row in study.data["loads"]:
        swap, recompute = Ran(*row["swap"]), Ran(*row["recompute"])
        assert swap.preemptions > 0 < recompute.preemptions
        assert (swap.recomputed, recompute.moved) == (0, 0)
        assert swap.moved > 0 < recompute.recomputed
        load = Load(*(row[name] for name in Load._fields[:4]), swap, recompute)
        assert (row["gain"], row["closed"]) == (load.gain, load.closed)
        assert load.closed == pytest.approx(load.gain, abs=0.05)
    assert len(study.tables[0].rows) == len(MODELS) * len(GPUS)
    json.dumps(study.data, allow_nan=False)
    assert parser.main(["study", "swap_or_recompute", "--out", f"{tmp_path}/out"]) == 0
    assert "one preempted once" in capsys.readouterr().out
