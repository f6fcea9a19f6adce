"""Registers, shared memory, spills and instructions of the kernels as compiled for sm_90, with no GPU.

    python tests/cbengine/compile_kernels.py            compile; print them as JSON
    python tests/cbengine/compile_kernels.py --check    and compare with kernel_resources.json
    python tests/cbengine/compile_kernels.py --check --first   of the first model and block size only
    python tests/cbengine/compile_kernels.py --write    and write this Triton's part of it

A script, since Triton's interpreter must be off. It needs torch, any version, and the Triton that is meant.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import triton

from cbengine.first.precompile import Compiled, Launches, compiled, launch
from cbsim.scenario import shapes

TABLE = Path(__file__).with_name("kernel_resources.json")
SHIPPED = (
    ("llama-3.1-8b", 256, False),
    ("llama-3.1-8b", 16, False),
    ("llama-3.1-8b", 256, True),
    ("llama-3.2-1b", 256, False),
    ("llama-3.2-1b", 16, False),
    ("qwen3-8b", 256, False),  # norms of queries and keys
)
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
JUMP = re.compile(r"(?:@!?U?P\d+ )?BRA\S*\s+(?:\S+, )?(0x[0-9a-f]+)")


def label(of: Compiled) -> str:
    """The kernel's name, and what tells those of a name apart within a model."""
    parts = f", {of.constants['splits']} splits" if "splits" in of.constants else ""
    return of.name + parts + (", added" if of.constants.get("added") else "")


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


def found(shipped: Sequence[tuple[str, int, bool]] = SHIPPED) -> dict[str, dict]:
    """Each kernel once, under the first launches that have it."""
    kernels: dict[str, tuple[str, object]] = {}
    for model, block_size, padded in shipped:
        launches = Launches(shapes.model(model), block_size, padded)
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
    here, table = found(SHIPPED[: 1 if "--first" in words else None]), json.loads(TABLE.read_text(encoding="utf-8"))
    print(json.dumps({"triton": triton.__version__, "kernels": here}))
    if "--write" in words:
        write(table | {triton.__version__: here})
    kept = table.get(triton.__version__, {})
    if "--first" in words:
        kept = {name: kept[name] for name in list(kept)[: len(here)]}  # in the order of SHIPPED
    wrong = differences(here, kept) if "--check" in words else []
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
