"""Whose traces can be compared. A family of traces more is one more entry here."""

from __future__ import annotations

from cbsim.proof.conformance import sarathi_reader, sglang_reader, transformers_reader, trtllm_reader, vllm_reader
from cbsim.proof.conformance.files import Line
from cbsim.proof.conformance.reader import Reader

READERS = (
    sarathi_reader.READER,
    sglang_reader.READER,
    trtllm_reader.READER,
    vllm_reader.READER,
    transformers_reader.READER,
)


def reader_of(header: Line) -> Reader | None:
    """Who reads the trace with this header, if anybody does."""
    return next((reader for reader in READERS if reader.reads(header)), None)
