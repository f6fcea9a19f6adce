"""Headers of transformers' traces: which are compared, and with which replay."""

from __future__ import annotations

from pathlib import Path

from cbsim.policy.schedulers.transformers_settings import VERSIONS
from cbsim.proof.conformance.files import Line, fields, guarded, stem, workload
from cbsim.proof.conformance.reader import Case, Reader, not_followed, not_modelled
from cbsim.proof.conformance.transformers_523_traces import SectorsReplay
from cbsim.proof.conformance.transformers_kind_traces import KindsReplay, RingsReplay, settled
from cbsim.proof.conformance.transformers_traces import TransformersReplay
from cbsim.workload.scheduler_tests import unsupported

OPTIONS = frozenset(
    [
        "block_size",
        "num_blocks",
        "max_batch_tokens",
        "scheduler_type",
        "allow_block_sharing",
        "max_blocks_per_request",
        "safety_margin",
        "max_requests_per_batch",
        "cpu_offload_space",
    ]
)


def case(trace: Path, header: Line) -> Case:
    (resolved,) = fields(trace, header, resolved=dict)
    (version,) = fields(trace, resolved, transformers=str)
    name, mode = stem(trace), "async" if resolved.get("async") else "sync"
    skipped = not_followed(version, VERSIONS)
    if skipped:
        return Case(name, "transformers", version, mode, skipped=skipped)
    given = workload(trace, name)
    (cb,) = fields(trace, given, cb=dict)
    skipped = not_modelled(cb, OPTIONS) or guarded(trace, lambda: unsupported(given))
    if skipped:
        return Case(name, "transformers", version, mode, skipped=skipped)
    kind = _replay(version, given)
    return Case(name, "transformers", version, mode, guarded(trace, lambda: kind(header, given)))


def _replay(version: str, given: Line) -> type[TransformersReplay]:
    """By version, and by whether there are other layers than those that see all."""
    new = version.startswith("5.23.")
    if set(given.get("model", {}).get("layer_types") or ()) - {"full_attention"}:
        return KindsReplay if new else RingsReplay
    return SectorsReplay if new else TransformersReplay


READER = Reader(lambda header: header.get("header") is True, case, settled)
