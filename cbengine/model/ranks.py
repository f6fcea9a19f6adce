"""Tensor parallelism: ranks, a process each, share every layer of a model.

Queries, keys, values, gate and up are cut by their outputs, o and down by their inputs. So a rank has its own heads and
their KV cache, and a layer needs two all-reduces: behind attention and behind the feed-forward part. Embeddings and
norms are whole on every rank. Each has a part of the vocabulary in the output layer; logits are gathered on all of
them. The ranks thus sample the same tokens from the same bits, and none has to tell another.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from cbsim.scenario.shapes import ModelShape

SHARED = ("heads", "kv_heads", "intermediate")  # fields of a shape of which each rank has an equal part
Shape = TypeVar("Shape", bound=ModelShape)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count` ranks. They meet by the file `store`, which none needs afterwards. `limit_s`: the longest that one
    waits for the others in a step.
    """

    index: int = 0
    count: int = 1
    store: str = ""
    limit_s: float = 60.0

    def part(self, whole: Shape) -> Shape:
        """Return the shape of what this rank computes of a model."""
        shares = {field: getattr(whole, field) // self.count for field in SHARED}
        return whole.model_copy(update=shares)

    def cut(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's part of a tensor, which has this shape."""
        part = tensor
        for axis, size in enumerate(shape):
            if size != tensor.shape[axis]:
                part = part.narrow(axis, self.index * size, size)
        return tensor if part is tensor else part.clone()

    def join(self, device: torch.device) -> Group:
        """Wait for the other ranks and return the group of all; on GPUs rank i has the i-th."""
        if self.count > 1:
            on_gpu = device.type == "cuda"
            if on_gpu:
                torch.cuda.set_device(self.index)
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # the driver ends who waits in vain
            else:  # the ranks are on one host: whatever its name resolves to, its own addresses do
                names = (name for _, name in socket.if_nameindex() if name.startswith("lo"))
                os.environ.setdefault("GLOO_SOCKET_IFNAME", next(names, "lo"))
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=dist.FileStore(self.store, self.count),  # type: ignore[attr-defined]
                rank=self.index,
                world_size=self.count,
                timeout=timedelta(seconds=self.limit_s),
                device_id=torch.device("cuda", self.index) if on_gpu else None,
            )
        return Group(self)


class Group:
    """What a rank exchanges with the others, on the current stream of a GPU; nothing if it is alone. `calls` have been
    made so far.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank, self.calls = rank, 0

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors; `x` may be overwritten."""
        if self.rank.count > 1:
            self.calls += 1
            dist.all_reduce(x)
        return x

    def share(self, head: Tensor) -> Tensor:
        """Return this rank's rows of the output layer [vocab, hidden]: as many on each, zeros at the end."""
        if self.rank.count == 1:
            return head
        each = -(-len(head) // self.rank.count)
        rows = head[self.rank.index * each :][:each]
        return pad(rows, (0, 0, 0, each - len(rows)))

    def gather(self, logits: Tensor, vocab: int) -> Tensor:
        """Return the logits [S, vocab] of all ranks' rows of the output layer."""
        if self.rank.count == 1:
            return logits
        self.calls += 1
        return torch.cat(self.parts(logits), dim=1)[:, :vocab]

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        parts = [torch.empty_like(x) for _ in range(self.rank.count)]
        dist.all_gather(parts, x)
        return parts


ALONE = Rank()
