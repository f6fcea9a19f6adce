"""Headers of vLLM's traces: which are compared, and with which replay."""

from __future__ import annotations

from pathlib import Path

from cbsim.policy.schedulers.vllm_settings import VERSIONS
from cbsim.proof.conformance import offload_traces
from cbsim.proof.conformance.files import Line, fields, guarded, stem, workload
from cbsim.proof.conformance.reader import Case, Reader, not_followed, not_modelled
from cbsim.proof.conformance.vllm_traces import VllmReplay

OPTIONS = frozenset(
    [
        "block_size",
        "num_blocks",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "policy",
        "timing",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "enable_prefix_caching",
        "watermark",
        "prefill_schedule_interval",
        "scheduler_reserve_full_isl",
        "connector",
        "stop_when_done",
        "layers",
        "kv_bytes",
        "retention",
        "disable_hybrid",
    ]
)


def case(trace: Path, header: Line) -> Case:
    version, mode, config = fields(trace, header, vllm=str, mode=str, config=dict)
    name = stem(trace).removesuffix(f".{mode}")
    skipped = "speculation" if "spec" in config else not_followed(version, VERSIONS) or not_modelled(config, OPTIONS)
    skipped = skipped or guarded(trace, lambda: offload_traces.unsupported(config))
    if skipped:
        return Case(name, "vllm", version, mode, skipped=skipped)
    given = workload(trace, name)
    replay = guarded(trace, lambda: VllmReplay(header, given))
    said = {} if replay.effective is None else {"effective": replay.effective}
    return Case(name, "vllm", version, mode, replay, header=said)


def comparable(line: Line) -> Line:
    """The order of a set is nobody's, and null is for what is absent."""
    if line.get("ev") == "schedule" and isinstance(line.get("finished"), list):
        line["finished"] = sorted(line["finished"])
    if line.get("ev") == "summary" and isinstance(line.get("requests"), dict):
        given = line["requests"].items()
        line["requests"] = {request: {k: v for k, v in stats.items() if v is not None} for request, stats in given}
    return line


READER = Reader(lambda header: header.get("ev") == "header" and "vllm" in header, case, comparable)
