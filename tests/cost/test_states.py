"""Layers with a state: kernels by tables, by a data sheet, and in the roofline with given efficiencies."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import engine_folder
from support.engine_folder import conv_ms, state_ms
from support.plans import plan as a_plan

from cbsim.cost.base import CpuCost
from cbsim.cost.curves import CurveTimes, sources
from cbsim.cost.engine_tables import EngineTables, Share
from cbsim.cost.roofline import Rates, RooflineCost, Weights
from cbsim.errors import ScenarioError
from cbsim.scenario import shapes
from cbsim.scenario.layers import Linear

LLAMA = shapes.model("llama-3.1-8b")
ENGINE = "vllm_0.1.0"
NS = 1e6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return engine_folder.make(tmp_path / "card")


HYBRID = LLAMA.model_copy(
    update={
        "attention": ("linear", "full"),
        "linear": Linear(rule="gated_delta", key_heads=2, value_heads=8, key_dim=128, value_dim=128),
    }
)


def test_a_layer_with_a_state_takes_its_two_kernels(folder: Path) -> None:
    """16 of 32 layers: the convolution of the fastest engine and the own rule by its fastest kernel, for 20 decoding
    rows and two chunks that count by their mean length; a chunk of one token is a decoding row. 6 heads lie between 4
    and 8; a version without the rule leaves it to one that has it."""
    engine_folder.make(folder, "sglang_0.5.0")
    engine_folder.make_states(folder, ENGINE, slower=5.0)
    engine_folder.make_states(folder, "sglang_0.5.0", rule=False)
    plan = a_plan(18, 0, ((0, 100), (7, 1), (500, 300), (9, 1)))
    exact = conv_ms(20, 4) + state_ms(20, 4) + conv_ms(400, 4) + 3 * state_ms(400, 4)
    for engine in (ENGINE, "sglang_0.5.0"):
        tables = EngineTables(folder, engine, HYBRID, Share(2))
        assert len(tables.attended) == 1
        assert tables.states_ns(plan.work) / NS == pytest.approx(16 * exact, rel=0.01)
    six = HYBRID.model_copy(update={"linear": HYBRID.linear.model_copy(update={"key_heads": 6, "value_heads": 6})})
    between = EngineTables(folder, ENGINE, six, Share()).states_ns(a_plan(16, 0).work)
    assert between / NS == pytest.approx(16 * (conv_ms(16, 6) + state_ms(16, 6)))
    alone = EngineTables(folder, ENGINE, HYBRID, Share(2), fastest=False).states_ns(a_plan(16, 0).work)
    assert alone / NS == pytest.approx(16 * (5 * conv_ms(16, 4) + state_ms(16, 4)))


def test_a_state_without_tables_takes_what_the_data_sheet_allows(folder: Path) -> None:
    """Other widths, as many values a key as were not measured, or Mamba-2: 32 rows read and write their states once."""
    engine_folder.make_states(folder, ENGINE)
    gpu, plan = shapes.hardware("h100-sxm"), a_plan(32, 0)
    for change in ({"key_dim": 64}, {"key_heads": 4}, {"rule": "mamba2"}):
        model = HYBRID.model_copy(update={"linear": HYBRID.linear.model_copy(update=change)})
        with pytest.raises(ScenarioError, match=r"no (rows|tables)"):
            EngineTables(folder, ENGINE, model, Share())
        moved = 32 * (2 * model.state_bytes() + model.linear.moved(1) * 2)
        exact = 5_000 + moved / gpu.memory_bandwidth_bytes_s * 1e9 / 0.85
        for tables in (
            EngineTables(folder, ENGINE, model, Share(), gpu=gpu),
            CurveTimes(sources(gpu), "vllm", gpu, model, 1),
        ):
            assert tables.states_ns(plan.work) == pytest.approx(16 * exact)


def test_states_are_read_and_written_once_a_request() -> None:
    """States of 1 MB: three rows of a token and a chunk of 30 move 8 MB at 20 GB/s, 0.4 ms; 30 tokens of 200 MFLOP take
    1.5 ms at 4 TFLOP/s, which is more than the chunk's 0.1 ms."""
    step, sizes = a_plan(0, 0, ((500, 1), (500, 1), (500, 1), (0, 30))), {"bytes": 2, "kv_bytes": 100_000}
    weights = Weights(linear=1000, head=0, hidden=0, attention_flop=4 * 10**6, decode_flop=4 * 10**6, **sizes)
    rates = Rates(flops_prefill=4e12, flops_decode=1e12, bytes_weights=1e10, bytes_kv=2e10, bytes_pcie=1e9)
    for flop, ns in ((0.0, 400_000), (2e8, 1_500_000 + 600_000)):
        least, states = ({"state_bytes": size, "state_flop": flop * (size > 1)} for size in (1e-12, 1e6))
        none, more = (
            RooflineCost(CpuCost({}), rates, weights._replace(**of), 0.0, 0.0).gpu_ns(step, 33)[1]
            for of in (least, states)
        )
        assert more - none == pytest.approx(ns, abs=2)
