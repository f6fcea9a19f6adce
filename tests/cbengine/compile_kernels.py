"""Registers, shared memory, spills and instructions of the kernels as compiled for sm_90, with no GPU.

    python tests/cbengine/compile_kernels.py            compile; print them as JSON
    python tests/cbengine/compile_kernels.py --check    and compare with kernel_resources.json
    python tests/cbengine/compile_kernels.py --write    and write this Triton's part of it

A script, since Triton's interpreter must be off. It needs torch, any version, and the Triton that is meant. With
TRITON_CACHE_DIR the compiled kernels stay in that folder, where a GPU machine with the same build of Triton finds them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from cbengine.model.kernels.triton_ops import TritonOps
from cbengine.model.ops import Rows
from cbsim.cost.fitted import MOST_SPLITS
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.scenario import shapes
from cbsim.scenario.shapes import ModelShape

TARGET = GPUTarget("cuda", 90, 32)
TABLE = Path(__file__).with_name("kernel_resources.json")
SLIDING, CHUNKED = Attention(Sight.SLIDING, 4096), Attention(Sight.CHUNKED, 8192)
SHIPPED = (
    ("llama-3.1-8b", 256, False),
    ("llama-3.1-8b", 16, False),
    ("llama-3.1-8b", 1, False),  # SGLang's pages of a token
    ("llama-3.1-8b", 256, True),
    ("llama-3.1-8b", 256, False, (SLIDING, CHUNKED)),
    ("llama-3.1-8b", 16, False, (SLIDING,)),  # the pages of layer groups
    ("llama-3.2-1b", 256, False),
    ("llama-3.2-1b", 16, False),
    ("qwen3-8b", 256, False),  # norms of queries and keys
)
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
JUMP = re.compile(r"(?:@!?U?P\d+ )?BRA\S*\s+(?:\S+, )?(0x[0-9a-f]+)")


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
    """What kernels are compiled for: a model, the blocks of its cache, whether rows may begin with padding, and what
    its layers see.
    """

    model: ModelShape
    block_size: int
    padded: bool
    sights: tuple[Attention, ...] = (FULL,)

    def __str__(self) -> str:
        padded = ", padded" if self.padded else ""
        return f"{self.model.name}, blocks of {self.block_size}{padded}"


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
    for sees in of.sights:
        ops.attention(queries, keys, values, replace(rows, decodes=0), sees)
        splits = 1
        while splits <= MOST_SPLITS:
            TritonOps(1, splits=splits).attention(queries[:1], keys, values, replace(rows, slots=rows.slots[:1]), sees)
            splits *= 2
    ops.silu_mul(torch.zeros(3, 2 * model.intermediate, dtype=dtype))


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


def label(of: Compiled) -> str:
    """The kernel's name, and what tells those of a name apart within a model."""
    known = of.constants | (of.constants["sizes"]._asdict() if "sizes" in of.constants else {})
    parts = f", {known['splits']} splits" if "splits" in known else ""
    parts += "".join(f", {name} {known[name]}" for name in ("sliding", "chunk") if known.get(name))
    return of.name + parts + (", added" if known.get("added") else "")


def resources(kernel) -> dict[str, int | list[int]]:
    """What a thread, a program and an issue slot pay: `loops` are the instructions of the innermost loops in order."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        used, listing = (_dumped(option, binary) for option in ("--dump-resource-usage", "--dump-sass"))
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", used).groups()
    code = [(int(at, 16), text) for at, text in INSTRUCTION.findall(listing)]
    jumps = [(int(to[1], 16), at) for at, text in code if (to := JUMP.match(text))]
    last = next(at for to, at in jumps if to == at)  # an endless jump to itself, then padding
    loops = sorted((to, at) for to, at in jumps if to < at < last)
    inner = [(to, at) for to, at in loops if not any(to <= a and b <= at and (to, at) != (a, b) for a, b in loops)]
    return {
        "registers": int(registers),
        "shared": kernel.metadata.shared,
        "spilt": int(stack),
        "instructions": sum(at < last for at, _ in code),
        "loops": [sum(to <= at <= end for at, _ in code) for to, end in inner],
    }


def _dumped(option: str, binary: Path) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, binary]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def found() -> dict[str, dict]:
    """Each kernel once, under the first launches that have it."""
    kernels: dict[str, tuple[str, object]] = {}
    for model, *how in SHIPPED:
        launches = Launches(shapes.model(model), *how)
        for one in compiled(partial(launch, launches)):
            kernels.setdefault(one.kernel.hash, (f"{launches}: {label(one)}", one.kernel))
    return {name: resources(kernel) for name, kernel in kernels.values()}


def differences(here: dict[str, dict], kept: dict[str, dict]) -> list[str]:
    names = dict.fromkeys([*kept, *here])
    return [
        f"{name}: kept {kept.get(name)}, now {here.get(name)}" for name in names if kept.get(name) != here.get(name)
    ]


def write(table: dict[str, dict]) -> None:
    """A kernel a line."""
    parts = []
    for version, kernels in sorted(table.items()):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(used)}" for name, used in kernels.items())
        parts.append(f" {json.dumps(version)}: {{\n{lines}\n }}")
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main(words: list[str]) -> int:
    here, table = found(), json.loads(TABLE.read_text(encoding="utf-8"))
    print(json.dumps({"triton": triton.__version__, "kernels": here}))
    if "--write" in words:
        write(table | {triton.__version__: here})
    kept = table.get(triton.__version__, {})
    wrong = differences(here, kept) if "--check" in words else []
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
