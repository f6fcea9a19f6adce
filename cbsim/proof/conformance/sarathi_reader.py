"""Headers of Sarathi-Serve's traces: which are compared."""

from __future__ import annotations

from pathlib import Path

from cbsim.proof.conformance.files import Line, fields, guarded, stem, workload
from cbsim.proof.conformance.reader import Case, Reader, not_modelled
from cbsim.proof.conformance.sarathi_traces import COMMIT, CONFIG, OPTIONS, SarathiReplay


def case(trace: Path, header: Line) -> Case:
    commit, config = fields(trace, header, sarathi=str, config=dict)
    scheduler, options = fields(trace, config, scheduler=str, options=dict)
    name, version = stem(trace), commit[:7]
    skipped = None if commit == COMMIT else f"commit {version} is not followed, only {COMMIT[:7]}"
    skipped = skipped or not_modelled(config, CONFIG) or not_modelled(options, OPTIONS)
    if skipped:
        return Case(name, "sarathi-serve", version, scheduler, skipped=skipped)
    given = workload(trace, name)
    replay = guarded(trace, lambda: SarathiReplay(header, given))
    return Case(name, "sarathi-serve", version, scheduler, replay, header={"effective": replay.effective})


READER = Reader(lambda header: "sarathi" in header, case)
