"""Fills Triton's cache for sm_90 without a GPU: the launches of the engine, compiled and not run.

`python -m cbengine.first.precompile DIR` is a process of its own: Triton decides on import whether it
interprets, and keeps its driver. A machine finds what is in DIR, named by TRITON_CACHE_DIR, if its Triton is
the same build.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from cbengine.model.kernels.triton_ops import MOST_SPLITS, TritonOps
from cbengine.model.ops import Rows
from cbsim.scenario import shapes
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.shapes import ModelShape

MODELS = ("llama-3.1-8b", "llama-3.2-1b", "tiny")
BLOCK_SIZES = (16, 256)
LARGEST_BLOCK = 65536
TARGET = GPUTarget("cuda", 90, 32)


class TargetAlone:
    """As much of a driver as compiling needs: a target, but no device."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int | None = None) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Launches:
    """What kernels are compiled for: a model, the blocks of its cache, and whether rows may begin with padding."""

    model: ModelShape
    block_size: int
    padded: bool

    def __str__(self) -> str:
        padded = ", padded" if self.padded else ""
        return f"{self.model.name}, blocks of {self.block_size}{padded}"


def every(models: Iterable[str], block_sizes: Iterable[int]) -> list[Launches]:
    """All launches of these models, by name or path of their files."""
    return [
        Launches(shapes.model(name), block_size, padded)
        for name, block_size, padded in product(models, block_sizes, (False, True))
    ]


class Compiled(NamedTuple):
    """One launch: the kernel's name, the constants it was compiled for, and what came out."""

    name: str
    constants: dict[str, Any]
    kernel: Any


def compiled(act: Callable[[], object]) -> list[Compiled]:
    """Every launch of `act`, compiled for the target or found in Triton's cache, and not run. The driver stays: from
    here on this process can launch nothing.
    """
    kernels, plain_run = [], JITFunction.run

    def run(self: JITFunction, *arguments: Any, grid: Any, **options: Any) -> None:
        kernel = plain_run(self, *arguments, grid=grid, **(options | {"warmup": True}))
        given = zip(self.params, arguments, strict=True)
        kernels.append(Compiled(self.__name__, {p.name: value for p, value in given if p.is_constexpr}, kernel))

    driver.set_active(TargetAlone())
    JITFunction.run = run
    try:
        act()
    finally:
        JITFunction.run = plain_run
    return kernels


def launch(of: Launches) -> None:
    """Everything that a step launches, for a decode and a chunk, with every number of splits."""
    model, dtype = of.model, getattr(torch, of.model.dtype)
    x, norm = torch.zeros(3, model.hidden, dtype=dtype), torch.zeros(model.hidden, dtype=dtype)
    (keys, values), rows = inputs(of)
    ops, eps = TritonOps(1), 1e-5
    ops.rms_norm(x, norm, eps)
    ops.add_rms_norm(x, x, norm, eps)
    width = model.head_dim
    qkv = torch.zeros(3, (model.heads + 2 * model.kv_heads) * width, dtype=dtype)
    norms = (torch.zeros(width, dtype=dtype), torch.zeros(width, dtype=dtype)) if model.qk_norm else None
    queries = ops.rotate_and_cache(qkv, torch.zeros(4, 2, width // 2), norms, eps, keys, values, rows)
    for sees in dict.fromkeys(model.layer_attention):
        ops.attention(queries, keys, values, replace(rows, decodes=0), sees)
        splits = 1
        while splits <= MOST_SPLITS:
            TritonOps(1, splits=splits).attention(queries[:1], keys, values, replace(rows, slots=rows.slots[:1]), sees)
            splits *= 2
    ops.silu_mul(torch.zeros(3, 2 * model.intermediate, dtype=dtype))


def launch_tiles(of: Launches) -> None:
    """Attention with every other tile that `speed --only tiles` tries; one that cannot be compiled is left out."""
    from cbengine.bench.tiles_bench import DECODE_TILES, PREFILL_TILES

    (keys, values), rows = inputs(of)
    queries = torch.zeros(3, of.model.heads, of.model.head_dim, dtype=keys.dtype)
    tried = [(TritonOps(1, decode=cut), queries[:1], replace(rows, slots=rows.slots[:1])) for cut in DECODE_TILES]
    tried += [(TritonOps(1, prefill=cut), queries, replace(rows, decodes=0)) for cut in PREFILL_TILES]
    for ops, queried, row_table in tried:
        with suppress(OutOfResources):
            ops.attention(queried, keys, values, row_table)


def inputs(of: Launches) -> tuple[tuple[Tensor, Tensor], Rows]:
    """A cache, and a decode with a chunk on it. Sizes that kernels read from the device, or that only the grid depends
    on, are the least there are.
    """
    model, dtype = of.model, getattr(torch, of.model.dtype)
    keys, values = torch.zeros(2, 2, of.block_size, model.kv_heads, model.head_dim, dtype=dtype)
    counts, places = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    rows = Rows(
        tables=torch.zeros(3, 4, dtype=torch.int32),
        slots=counts[:2],
        kv_tokens=counts[:2],
        starts=counts[:3],
        positions=places,
        kv_places=places,
        decodes=1,
        longest=2,
        first=counts[:2] if of.padded else None,
    )
    return (keys, values), rows


def fill(folder: Path, models: Sequence[str] = MODELS, block_sizes: Sequence[int] = BLOCK_SIZES) -> list[str]:
    """Compile into `folder` what a GPU would compile for these models; what was compiled for, one line each. Raises
    CalledProcessError.
    """
    words = ["--models", *models, "--block-sizes", *map(str, block_sizes)]
    done = subprocess.run(
        [sys.executable, "-m", "cbengine.first.precompile", folder, *words],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cbengine.first.precompile", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the cache to fill")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help=f"({' '.join(MODELS)})")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=BLOCK_SIZES, metavar="N", help="(16 256)")
    parser.add_argument("--tiles", action="store_true", help="also what `speed --only tiles` tries, blocks of 256")
    arguments = parser.parse_args(argv)
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        for name in arguments.models:
            shapes.model(name)
    except OSError as error:
        parser.error(f"{arguments.folder}: {error.strerror or error}")
    except ScenarioError as error:
        parser.error(f"--models: {error}")
    if not all(1 <= size <= LARGEST_BLOCK for size in arguments.block_sizes):
        parser.error(f"--block-sizes: got {arguments.block_sizes}, must be from 1 to {LARGEST_BLOCK}")
    os.environ["TRITON_CACHE_DIR"] = str(arguments.folder.resolve())
    wanted = [(of, launch) for of in every(arguments.models, arguments.block_sizes)]
    if arguments.tiles:
        wanted += [(of, launch_tiles) for of in every(arguments.models[:1], (256,)) if not of.padded]
    print(json.dumps([f"{of}: {len(compiled(partial(act, of)))} launches" for of, act in wanted]))


if __name__ == "__main__":
    main()
