"""Compiles for sm_90, with no GPU, what `TritonOps` launches for a mixed step; prints as JSON the registers, the bytes
spilt and the bytes of shared memory of every kernel. Run as a script, since Triton's interpreter must be off.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from cbengine.kernels.ops import TritonOps
from cbengine.ops import Rows

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


def compiled(kernel: JITFunction, arguments: tuple, options: dict[str, int]) -> triton.compiler.CompiledKernel:
    """The kernel as a launch with these arguments specialises it: aligned pointers, sizes that 16 divides."""
    signature, constants, attributes = {}, {}, {}
    for at, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[at,] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = POINTERS[value.dtype] if is_tensor else {float: "fp32", int: "i32"}[type(value)]
        if not parameter.do_not_specialize and (is_tensor or (isinstance(value, int) and value % 16 == 0)):
            attributes[at,] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(kernel: triton.compiler.CompiledKernel) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return {"registers": int(registers), "spilt": int(stack), "shared": kernel.metadata.shared}


def launches(width: int, padded: bool) -> dict[str, dict[str, int]]:
    """Of a bf16 model with 8 groups of 4 query heads and blocks of 16 tokens, on 132 multiprocessors."""
    found: dict[str, dict[str, int]] = {}

    def run(self, *arguments, grid, warmup, **options):
        found[self.__name__] = resources(compiled(self, arguments, options))

    JITFunction.run = run
    ops, empty = TritonOps(132), torch.zeros(6, dtype=torch.int32)
    x, norm = torch.zeros(40, 4096).bfloat16(), torch.zeros(4096).bfloat16()
    cache, places = torch.zeros(4, 16, 8, width).bfloat16(), torch.zeros(40).long()
    tables = torch.zeros(8, 512, dtype=torch.int32)
    rows = Rows(tables, empty, empty, empty, places, places, 4, 18, empty if padded else None)
    qkv, rotation = torch.zeros(40, 48 * width).bfloat16(), torch.zeros(64, 2, width // 2)
    queries = ops.rotate_and_cache(qkv, rotation, (norm[:width], norm[:width]), 1e-5, cache, cache, rows)
    ops.attention(queries, cache, cache, rows)
    ops.rms_norm(x, norm, 1e-5)
    ops.add_rms_norm(x, x, norm, 1e-5)
    ops.silu_mul(torch.zeros(40, 2 * 14336).bfloat16())
    return found


if __name__ == "__main__":
    shipped = {"128": (128, False), "64": (64, False), "128 padded": (128, True)}
    print(json.dumps({name: launches(*shape) for name, shape in shipped.items()}))
