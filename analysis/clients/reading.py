"""A client's file, recognised by what is in it."""

from __future__ import annotations

from pathlib import Path

from analysis.clients import aiperf, guidellm, vllm_bench
from analysis.clients.content import Client
from analysis.clients.fields import Fields, parsed, read
from cbsim.results.directory import RunError

KNOWN = "what aiperf (JSONL, JSON, CSV), vllm bench serve (JSON) or GuideLLM (JSON) writes"


def client(path: Path) -> Client:
    """Raises RunError naming file, field, value and what is allowed."""
    measured = _client(path)
    if not measured.succeeded:
        raise RunError(f"{path}: no request in it has succeeded", file=path)
    return measured


def _client(path: Path) -> Client:
    text = read(path)
    if text.startswith(aiperf.HEAD):
        return aiperf.table(path, text)
    value = parsed(text)
    if aiperf.is_line(parsed(text.lstrip().partition("\n")[0])):
        return aiperf.lines(path, text)
    for tool, made in ((aiperf, aiperf.statistics), (vllm_bench, vllm_bench.client), (guidellm, guidellm.client)):
        if tool.recognised(value):
            return made(Fields(path, "", value))
    if vllm_bench.recognised(parsed(text.lstrip().partition("\n")[0])):
        raise RunError(f"{path}: holds several results, must be 1: write without --append-result", file=path)
    raise RunError(f"{path}: expected {KNOWN}; it is none of these", file=path)
