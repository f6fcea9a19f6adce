"""Compiles for sm_90, with no GPU, the stand-in's own kernel; prints as JSON the bytes that it spills for each type.
Run as a script, since Triton's interpreter must be off.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from cbengine.peer.standin.append import _append

INTEGERS = {"cached": "*i32", "tables": "*i32", "line": "i32", "slots": "*i32", "kv_tokens": "*i32"}
CONSTANTS = {"block_size": 256, "elements": 1024, "span": 1024}


def spilt(element: str) -> int:
    """Bytes a thread, for 8 heads of 128."""
    floats = dict.fromkeys(("k", "v", "keys", "values"), f"*{element}")
    signature = floats | INTEGERS | dict.fromkeys(CONSTANTS, "constexpr")
    attributes = {(at,): [["tt.divisibility", 16]] for at in range(len(floats))}
    constants = {(list(signature).index(name),): value for name, value in CONSTANTS.items()}
    source = triton.compiler.ASTSource(_append, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", report).group(1))


if __name__ == "__main__":
    print(json.dumps({element: spilt(element) for element in ("bf16", "fp16", "fp32")}))
