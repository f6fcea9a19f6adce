"""What the kernels take on sm_90, compiled without a GPU, and a cache that is filled so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the engine's extra: pip install -e '.[engine]'")
triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

from cbengine.first import precompile

HERE = Path(__file__).parents[1]
TABLE = json.loads((HERE / "kernel_resources.json").read_text(encoding="utf-8"))
SHARED, REGISTERS, WARP = 227 << 10, 65536, 32  # of a multiprocessor; threads


def run(script: str, cache: Path, *words: str) -> str:
    settled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settled |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, HERE / script, *words]
    done = subprocess.run(command, env=settled, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_kernels_take_what_the_table_says(tmp_path):
    """Registers, shared memory, spills and instructions change with a line of a kernel or a version of Triton: nobody
    should find that out on a GPU. Here those of one model; .ci/run compares all. Meant to change? `python
    tests/cbengine/compile_kernels.py --write`.
    """
    if triton.__version__ not in TABLE:
        pytest.skip(f"kernel_resources.json has no triton {triton.__version__}")
    run("compile_kernels.py", tmp_path, "--check", "--first")


@pytest.mark.parametrize("version", TABLE)
def test_programs_fit_a_multiprocessor(version):
    """Decode hides memory behind other programs: three a multiprocessor at width 128, six at 64; prefill has one and
    two. Where a loop spills, every iteration pays; a reduction for one request may spill once.
    """
    for name, used in TABLE[version].items():
        model, kernel = name.split(": ")
        wide = "3.2-1B" not in model
        if kernel in {"_decode", "_prefill"}:
            programs, warps = (3 if wide else 6, 4) if kernel == "_decode" else (1 if wide else 2, 8)
            assert used["shared"] * programs <= SHARED, name
            assert used["registers"] * programs * warps * WARP <= REGISTERS, name
            assert used["loops"], name
        assert used["spilt"] == 0 or (not used["loops"] and used["spilt"] <= 8), name


@pytest.mark.parametrize("version", TABLE)
def test_blocks_that_hold_tiles_save_instructions(version):
    """One table entry a tile instead of one a token, and no masks in the first loop."""
    for model in ("Llama-3.1-8B", "Llama-3.2-1B"):
        whole, across = (TABLE[version][f"{model}, blocks of {size}: _decode"]["loops"] for size in (256, 16))
        assert whole[0] < across[0]
        assert whole[0] < whole[1]
        assert across[0] < across[1]


@pytest.mark.timeout(600)
def test_a_filled_cache_is_all_that_the_engine_needs(tmp_path):
    """Filling it again adds no file, and neither does a step of the model: a GPU machine with the same Triton compiles
    nothing.
    """
    told = precompile.fill(tmp_path, ["tiny"], [16])
    assert [line.split(":")[0] for line in told] == ["Tiny, blocks of 16", "Tiny, blocks of 16, padded"]
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.suffix == ".cubin" for path in files)
    assert precompile.fill(tmp_path, ["tiny"], [16]) == told
    assert int(run("compile_engine.py", tmp_path)) > 0
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files


def test_every_launch_is_a_model_a_block_size_and_padding_or_none():
    told = [str(launches) for launches in precompile.every(["tiny"], [16, 256])]
    assert told == [f"Tiny, blocks of {size}{padded}" for size in (16, 256) for padded in ("", ", padded")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--models", "nosuch"], "--models: "),
        (["--block-sizes", "0"], "--block-sizes: got [0], must be from 1 to 65536"),
        (["--block-sizes", "99999999999999999999"], "must be from 1 to 65536"),
    ],
)
def test_bad_arguments(words, says, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        precompile.main([str(tmp_path), *words])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
