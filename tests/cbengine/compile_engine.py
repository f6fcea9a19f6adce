"""Compiles for sm_90, with no GPU, what a step of the tiny model launches; prints how many launches there were."""

from __future__ import annotations

import torch
from compile_kernels import compiled

from cbengine.model.architecture import Architecture
from cbengine.model.decoder import Model
from cbengine.model.kernels.triton_ops import TritonOps
from cbengine.model.kvcache import KvCache
from cbengine.model.ops import Rows
from cbengine.model.weights import expected
from cbsim.scenario import shapes

BLOCK_SIZE = 16


def step() -> None:
    """40 requests that decode and a chunk of nine tokens, through all layers."""
    architecture = Architecture(**dict(shapes.model("tiny")))
    tensors = {name: torch.zeros(shape) for name, shape in expected(architecture).items()}
    model = Model(architecture, tensors, TritonOps(132), 64)
    counts, places = torch.ones(42, dtype=torch.int32), torch.zeros(49, dtype=torch.int64)
    rows = Rows(torch.zeros(64, 37, dtype=torch.int32), counts[:41], counts[:41], counts, places, places, 40, 9)
    cache = KvCache(architecture, 5, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    model.forward(places, cache, rows)


if __name__ == "__main__":
    print(len(compiled(step)))
