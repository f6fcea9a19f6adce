"""The known servers behind runs of llm-d-benchmark, as scenarios; or the reason why too little is known for one.

The runs of 2025-05 used vLLM 0.8.5: prefix caching, chunked prefill, no asynchronous loop, and for a server on a GPU
of 70 GiB or more, A100s included, 8,192 query tokens a step and 1,024 requests (vLLM pull requests 17073 and 17885).
Sizes of the KV cache follow from the memory.

Terms and fronts are costs that no table holds. `elementwise` and `row_s` were calibrated on other servers, those of
scenarios/terms/vllm-experts.yaml, and rounded; that file has been made again since. Each other one is calibrated on the
runs named in `CALIBRATED`, and on no other. The A100 needs no `layer_s` and `reduce_s`: only one engine was tabulated
on it, whose small kernels are slow enough to include the gaps between them. For the H100 the runs determine only the
sum of `layer_s` and `reduce_s`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cbsim.measured.recorded.case import CPU
from cbsim.measured.request_logs.log import REQUESTS, Key
from cbsim.scenario import scenario
from cbsim.scenario.scenario import Scenario

TABLES = "public_measured/aiconfigurator"
SCENARIOS = ("sharegpt", "short_input")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment of Llama-3.1-70B in bfloat16 on pairs of GPUs. `front_s` is the time in network and HTTP between
    client and server. It has `replicas` servers behind a Kubernetes service, or one at rates above `alone_above`.
    """

    hardware: str
    tables: str
    engine: str
    longest: int
    front_s: float
    terms: Mapping[str, float]
    replicas: int = 1
    alone_above: float | None = None

    def servers(self, key: Key) -> int:
        alone = self.alone_above is not None and key.scenario == "sharegpt" and key.qps > self.alone_above
        return 1 if alone else self.replicas

    def scenario(self, folder: Path, key: Key, overrides: Sequence[str]) -> Scenario:
        """Return the scenario of one of its servers. Raises ScenarioError."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{key.run.rpartition('/')[2]}-{key.scenario}-{key.qps:g}")
        data: dict[str, Any] = {
            "name": name,
            "question": f"How near does the simulator come to the requests of {key}?",
            "model": "llama-3.1-70b",
            "hardware": self.hardware,
            "workload": {"kind": "csv", "path": str((folder / REQUESTS).resolve())},
            "scheduler": {
                "name": "vllm",
                "version": "0.19",
                "max_num_seqs": 1024,
                "max_num_batched_tokens": 8192,
                "max_model_len": self.longest,
            },
            "kv_cache": {"block_size": 16, "memory_fraction": 0.95},
            "loop": {"mode": "sync", "cuda_graphs": {"padding": "vllm"}},
            "cost": {
                "kind": "table",
                "path": f"{TABLES}/{self.tables}",
                "engine": self.engine,
                "tensor_parallel": 2,
                "cpu": CPU,
                **self.terms,
            },
        }
        return scenario.parse(data, name, overrides)


ELSEWHERE = {"elementwise": 1.5, "row_s": 24e-6}
A100_TERMS = MappingProxyType({**ELSEWHERE, "large_products": 1.2})
H100_TERMS = MappingProxyType({**ELSEWHERE, "large_products": 1.1, "layer_s": 25e-6, "reduce_s": 7e-6})
A100: dict[str, Any] = {"hardware": "a100-80gb", "tables": "a100_sxm", "engine": "vllm_0.14.0", "longest": 20_000}
A100 |= {"front_s": 0.015, "terms": A100_TERMS}
H100 = Deployment("h100-sxm", "h100_sxm", "vllm_0.19.0", 10_000, 0.0105, H100_TERMS, replicas=2, alone_above=16.0)
PAIR_OF_A100S = "openshift/exp-2/vllm-70b-2replicas"
PAIR_OF_H100S = "openshift/exp-3/H100/vllm-standalone-llama-3-70b-2replicas-H100"
BUILT = {
    "openshift/exp-0/vllm-70b": Deployment(**A100),
    "openshift/exp-0/baseline-llm-d-70b": Deployment(**A100),
    PAIR_OF_A100S: Deployment(**A100, replicas=2),
    PAIR_OF_H100S: H100,
}
NOT_BUILT = {
    "*/exp-0/lmcache*": "LMCache keeps KV in the CPU's memory, by rules that are not simulated",
    "*/exp-2/llm-d*": "LMCache and the llm-d picker; requests are lost",
    "*/exp-3/H100/llm-d*": "LMCache, some with the llm-d picker; requests are lost",
    "*/exp-4/*": "Llama-4-Scout: attention in chunks, which the kernel tables do not hold",
    "*/lmbenchmark*": "the card is not recorded",
    "*": "nothing is known of its servers",
}
ALONE = "that one server is left above 16/s"
CALIBRATED = {
    Key("openshift/exp-0/vllm-70b", "sharegpt", 0.5): "large_products of the A100",
    Key(PAIR_OF_A100S, "short_input", 0.5): "front of the A100; that layer_s and reduce_s are 0",
    Key(PAIR_OF_H100S, "sharegpt", 4.0): "large_products of the H100",
    Key(PAIR_OF_H100S, "short_input", 0.5): "front, layer_s and reduce_s of the H100",
    **{Key(PAIR_OF_H100S, "sharegpt", qps): ALONE for qps in (24.0, 36.0, 40.0)},
}
"""The values that were chosen by means of a run, whose errors are therefore no predictions."""


def missing(key: Key, requests: int, prompts: int) -> str | None:
    """Return why a run of `requests` requests cannot be built, None if it can. `prompts` counts those of `sharegpt`."""
    if key.run not in BUILT:
        return next(reason for pattern, reason in NOT_BUILT.items() if fnmatch(key.run, pattern))
    if key.scenario not in SCENARIOS:
        return f"what prompts of {key.scenario} share is not known"
    if key.scenario == "sharegpt" and requests != prompts:
        return f"{requests} of {prompts} requests are recorded"
    return None
