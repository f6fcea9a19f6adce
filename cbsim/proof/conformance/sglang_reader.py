"""Headers of SGLang's traces: which are compared."""

from __future__ import annotations

from pathlib import Path

from cbsim.proof.conformance.files import Line, fields, guarded, stem, workload
from cbsim.proof.conformance.reader import Case, Reader, not_modelled
from cbsim.proof.conformance.sglang_traces import CONFIG, VERSIONS, SglangReplay, unsupported


def case(trace: Path, header: Line) -> Case:
    version, loop, config = fields(trace, header, sglang=str, loop=str, config=dict)
    name = stem(trace).removesuffix(f".{loop}")
    skipped = None if version in VERSIONS else f"version {version} is not followed, only {', '.join(VERSIONS)}"
    skipped = skipped or unsupported(config) or not_modelled(config, CONFIG)
    if skipped:
        return Case(name, "sglang", version, loop, skipped=skipped)
    given = workload(trace, name)
    return Case(name, "sglang", version, loop, guarded(trace, lambda: SglangReplay(header, given)))


READER = Reader(lambda header: "sglang" in header, case)
