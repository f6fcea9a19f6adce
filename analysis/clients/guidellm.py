"""What GuideLLM writes as JSON: benchmarks, each with the requests that succeeded, and how many failed.

`response_id` is the id of the answer that a request got. Its `inter_token_latency_ms` is what is called TPOT here; its
`time_per_output_token_ms` has the first token in it and is not read. It keeps no times of single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from analysis.clients.content import Client, Measured, listed
from analysis.clients.fields import Fields

TOOL = "GuideLLM"
FAILED = ("errored", "incomplete")


def recognised(value: object) -> bool:
    about = value.get("metadata") if isinstance(value, dict) else None
    return isinstance(about, dict) and "guidellm_version" in about


def client(fields: Fields) -> Client:
    """All benchmarks of a file together. Raises RunError for a file that is none of these."""
    measured: list[Measured] = []
    failed = 0
    for benchmark in fields.objects("benchmarks"):
        requests = benchmark.object("requests")
        measured += _measured(requests, len(measured) + failed)
        failed += sum(len(requests.entries(name)) for name in FAILED if requests.values.get(name) is not None)
    return listed(fields.path, TOOL, measured, failed)


def _measured(requests: Fields, before: int) -> Iterator[Measured]:
    for number, request in enumerate(requests.objects("successful"), before):
        yield Measured(
            key=request.text("response_id"),
            number=number,
            start_s=request.maybe("request_start_time"),
            ttft_s=request.maybe("time_to_first_token_ms") / 1e3,
            tpot_s=request.maybe("inter_token_latency_ms") / 1e3,
            e2e_s=request.number("request_latency"),
            prompt_tokens=request.maybe("prompt_tokens"),
            output_tokens=request.maybe("output_tokens"),
        )
