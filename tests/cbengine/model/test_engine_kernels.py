"""The whole engine on Triton's kernels, in the interpreter: the same tokens as on plain torch."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="the kernels need Triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: test_cuda.py runs the kernels on it", allow_module_level=True)

from cbengine import build
from cbengine.build import Setup
from cbengine.model.kernels.triton_ops import TritonOps
from cbsim.scenario import scenario
from cbsim.workload import generators

SMALL = (
    *("model.layers=1", "model.vocab=256", "model.hidden=64", "model.heads=4", "model.head_dim=16"),
    *("model.intermediate=128", "workload.requests=3", "workload.output_tokens=4", "kv_cache.num_blocks=12"),
    "workload.prompt_tokens={uniform: {low: 17, high: 40}}",
)


def tokens(loop: str, *overrides: str) -> list[list[int]]:
    """Every request's outputs."""
    asked = scenario.load("tiny_cpu", [*SMALL, *overrides])
    engine, _ = build.engine(asked, loop, generators.build(asked), Setup(device="inline"))
    engine.run()
    engine.check_returned()
    return [sequence.outputs for sequence in engine.sequences.values()]


@pytest.mark.parametrize(
    ("loop", "overrides"),
    [
        ("async", ("scheduler.max_num_batched_tokens=24", "scheduler.max_num_seqs=4")),  # chunks beside decodes
        ("sync", ("scheduler.name=static",)),  # left padding: cached tokens that nobody may see
    ],
)
def test_kernels_and_plain_torch_say_the_same(
    loop: str, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(loop, *overrides)
    monkeypatch.setattr(build, "ops", lambda _: TritonOps(4))
    assert tokens(loop, *overrides) == expected
    assert all(len(said) == 4 for said in expected)
