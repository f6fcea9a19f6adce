"""Cases that `score` cannot use: one message that names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import packs
from support.calls import call, refused
from support.packs import Pack

pytestmark = pytest.mark.usefixtures("elsewhere")

Spoil = Callable[[Pack], object]


def gone(name: str) -> Spoil:
    return lambda pack: (pack.folder / name).unlink()


def broken(name: str, text: str) -> Spoil:
    return lambda pack: (pack.folder / name).write_text(text)


def edited(name: str, **changes: Any) -> Spoil:
    return lambda pack: pack.edit(name, **changes)


def instance(**changes: Any) -> Spoil:
    """A field of the instance changed, by names with `__`."""
    return lambda pack: pack.edit("config.json", **{f"nodes__0__instances__0__{k}": v for k, v in changes.items()})


def blocks_unknown(**changes: Any) -> Spoil:
    """The size of the cache has to be derived, from changed fields."""

    def spoil(pack: Pack) -> None:
        pack.edit("meta.json", kv_cache__num_gpu_blocks=None)
        packs.memory_for(pack, 120)
        instance(**changes)(pack)

    return spoil


def differing(pack: Pack) -> None:
    one = json.loads((pack.folder / "config.json").read_text())["nodes"][0]["instances"][0]
    pack.edit("config.json", nodes=[{"instances": [one]}, {"instances": [one | {"tp_size": 2}]}])


def engine(**changes: Any) -> Spoil:
    """A field of what vLLM was asked for."""
    return lambda pack: pack.edit("meta.json", **{f"engine_kwargs__{name}": value for name, value in changes.items()})


BAD: dict[str, tuple[Spoil, Sequence[str]]] = {
    "no config": (gone("config.json"), ["config.json: cannot be read: No such file"]),
    "no requests": (gone("requests.jsonl"), ["requests.jsonl: cannot be read: No such file"]),
    "config is not JSON": (broken("config.json", "{"), ["config.json: not valid JSON"]),
    "meta is deep": (broken("meta.json", "[" * 100_000), ["meta.json: not valid JSON"]),
    "config is a list": (broken("config.json", "[]"), ["config.json: got [], expected a JSON object"]),
    "no nodes": (edited("config.json", nodes=[]), ["config.json: nodes: got 0 instances, expected one"]),
    "instances of text": (
        edited("config.json", nodes=[{"instances": ["a"]}]),
        ["config.json: nodes.0.instances.0: got 'a', expected fields"],
    ),
    "no model": (instance(model_name=None), ["config.json: nodes.0.instances.0.model_name: is required"]),
    "half a GPU": (instance(tp_size=0.5), ["nodes.0.instances.0.tp_size: got 0.5, expected a whole number"]),
    "instances that differ": (differing, ["config.json: nodes: got 2 instances, not all alike"]),
    "no tables of the degree": (instance(tp_size=2), ["bf16: holds no tables for tensor parallelism 2 (found: tp1)"]),
    "unknown GPU": (instance(hardware="TPU"), ["unknown hardware 'TPU'", "--hardware"]),
    "another model in meta": (edited("meta.json", model="me/Other"), ["model: got 'me/Other', expected me/Tiny"]),
    "servers that meta denies": (engine(data_parallel_size=2), ["data_parallel_size: got 2, expected 1"]),
    "a degree that meta denies": (engine(tensor_parallel_size=2), ["tensor_parallel_size: got 2, expected 1"]),
    "pipelines": (engine(pipeline_parallel_size=2), ["pipeline_parallel_size: got 2, expected 1"]),
    "a narrow cache": (engine(kv_cache_dtype="fp8"), ["kv_cache_dtype: got 'fp8', expected auto"]),
    "too many requests": (edited("meta.json", num_requests=10**6), ["num_requests: got 1000000, expected at most"]),
    "a cache of text": (edited("meta.json", kv_cache="x"), ["meta.json: kv_cache: got 'x', expected fields"]),
    "unknown model": (instance(model_name="me/Large"), ["no configuration of", "model 'me/Large' (known: Tiny)"]),
    "unknown size": (blocks_unknown(npu_mem=None), ["config.json: nodes.instances.npu_mem.mem_size: is required"]),
    "no room": (
        blocks_unknown(npu_mem__mem_size=0.0001),
        ["config.json: nodes.instances.npu_mem.mem_size: got 0.0001, expected more than", "of weights"],
    ),
    "unknown dataset": (edited("meta.json", dataset_path="a/tinny.jsonl"), ["got 'tinny'", "did you mean tiny?"]),
    "no version": (edited("meta.json", vllm_version=None), ["meta.json: vllm_version: is required"]),
    "a version of words": (edited("meta.json", vllm_version="main"), ["meta.json: vllm_version: got 'main'"]),
    "a seat more than tokens": (edited("meta.json", engine_kwargs__max_num_seqs=999), ["max_num_batched_tokens"]),
    "too small for a request": (
        edited("meta.json", kv_cache__num_gpu_blocks=3),
        ["request 0 cannot be served: prompt of 96 tokens, max_model_len is 32"],
    ),
    "no profile": (lambda pack: shutil.rmtree(pack.profile), ["bf16: no profile there of me/Tiny on RTX4090"]),
    "no layers": (edited("model_config/Tiny.json", num_hidden_layers=None), ["num_hidden_layers: got nothing"]),
    "no heads": (edited("model_config/Tiny.json", num_attention_heads=0), ["Tiny.json: num_attention_heads: got 0"]),
    "a type unknown": (edited("model_config/Tiny.json", torch_dtype="int3"), ["Tiny.json: torch_dtype: got 'int3'"]),
    "experts that are not profiled": (
        edited("model_config/Tiny.json", **packs.MOE),
        ["meta.yaml: architecture: got 'tiny'; either it or the model has experts"],
    ),
    "a request missing": (broken("requests.jsonl", "\n"), ["requests.jsonl: no request_id bench-0"]),
    "an empty series": (broken("timeseries.csv", "t,running,waiting,kv_cache_pct\n"), ["timeseries.csv: holds no row"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_case_that_cannot_be_used_is_one_message(name: str, pack: Pack) -> None:
    """File and field, exit status 2, no traceback."""
    spoil, words = BAD[name]
    spoil(pack)
    refused(call("score", pack.folder), 2, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("loop.mode=both", ["loop.mode: got 'both', expected sync or async"]),
        ("workload.limit=5", ["workload: got 5 requests, the recorded run has 40"]),
        ("kv_cache.num_blocks=3", ["cannot be served"]),
        ("kv_cache.blocks=3", ["--set kv_cache.blocks=3", "unknown field"]),
        ("cost.path=nowhere/at/all", ["cost.path: no folder of tables 'nowhere/at/all'"]),
    ],
)
def test_set_that_cannot_be_used(change: str, words: Sequence[str], pack: Pack) -> None:
    refused(call("score", pack.folder, "--set", change), 2, *words)


def test_servers_that_share_experts_need_tables(tmp_path: Path) -> None:
    """Only they know what an exchange costs."""
    made = packs.pack(tmp_path, ranks=2, moe=True)
    refused(call("score", made.folder, "--set", "cost.kind=constant", "--set", "cost.step_s=1"), 2, "cost.kind")


def test_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        refused(call("score", path), 2, f"{path}: no such folder")
