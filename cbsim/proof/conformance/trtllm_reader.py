"""Headers of the traces of TensorRT-LLM's schedulers, which are of classes restated from its text."""

from __future__ import annotations

from pathlib import Path

from cbsim.proof.conformance.files import Line, fields, guarded, stem, workload
from cbsim.proof.conformance.reader import Case, Reader, not_modelled
from cbsim.proof.conformance.trtllm_traces import CONFIG, TrtllmReplay, unsupported


def case(trace: Path, header: Line) -> Case:
    commit, config = fields(trace, header, tensorrt_llm_commit=str, config=dict)
    name, version = stem(trace), f"{commit[:7]} restated"
    skipped = not_modelled(config, CONFIG) or guarded(trace, lambda: unsupported(config))
    if skipped:
        return Case(name, "trtllm", version, "sync", skipped=skipped)
    given = workload(trace, name)
    return Case(name, "trtllm", version, "sync", guarded(trace, lambda: TrtllmReplay(header, given)))


READER = Reader(lambda header: "tensorrt_llm_commit" in header, case)
