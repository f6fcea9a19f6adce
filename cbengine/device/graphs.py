"""CUDA graphs: work of fixed shape, captured once and replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

WARM_UPS = 2  # runs before a capture, and replays after it
T = TypeVar("T")


class Graph(NamedTuple):
    """A captured decode step: the graph, its inputs, its outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    tokens: Tensor


@cache
def streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    """Return streams for kernels, copies in and copies out. They are the same in every run of a process, because cuBLAS
    keeps a workspace for each stream that it has ever computed on.
    """
    return torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()


def captured(act: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture `act` as a graph; return it and what `act` returned: tensors that every replay writes again.

    `act` is run before on the same stream, so that what happens only once (compiling, loading, workspaces) is not
    captured; the graph is replayed after, because its first launch uploads it. Raises what `act` raises.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            act()
    graph, first = torch.cuda.CUDAGraph(), None
    try:  # on the stream already, since a capture that cannot be ended leaves its own stream current
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
            try:
                result = act()
            except Exception as error:
                first = error
                raise
    except Exception:
        if first is not None:  # ending the capture then fails, too, and hides the cause
            raise first from None
        raise
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            graph.replay()
    return graph, result
