"""The first contact with a GPU: `pytest tests/gpu -x -rs` says within minutes whether a machine can be used.

Without a CUDA device the same tests run on the CPU, on plain torch and smaller shapes; what needs a GPU is skipped.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

GPU = torch.cuda.is_available()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test computes: the GPU if there is one, else the CPU."""
    if request.param == "cuda" and not GPU:
        pytest.skip("no CUDA device")
    if request.param == "cpu" and GPU:
        pytest.skip("there is a CUDA device: the CPU rehearses nothing")
    return str(request.param)


@pytest.fixture
def cuda() -> str:
    """For tests that no CPU can rehearse."""
    if not GPU:
        pytest.skip("no CUDA device")
    return "cuda"
