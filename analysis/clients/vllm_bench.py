"""What `vllm bench serve --save-result` writes: one JSON object; with `--save-detailed`, lists with an entry a request.

Requests are in the order in which they were issued, the failed ones among them, whose error is not empty. They carry
the header X-Request-Id: the value of `--request-id-prefix`, which the file does not have, and their number.
"""

from __future__ import annotations

import math

from analysis.clients.content import Client, Distribution, Measured, listed
from analysis.clients.fields import Fields

TOOL = "vllm bench serve"
NAMES = {"ttft_s": "ttft", "tpot_s": "tpot", "itl_s": "itl", "e2e_s": "e2el"}
STATISTICS = {"mean": "mean", "p50": "median", "p99": "p99"}
LISTS = ("ttfts", "itls", "input_lens", "output_lens", "errors")


def recognised(value: object) -> bool:
    return isinstance(value, dict) and {"total_output_tokens", "completed", "request_throughput"} <= value.keys()


def client(fields: Fields) -> Client:
    """Raises RunError for a file that is none of these."""
    if not any(name in fields.values for name in LISTS):
        return _sums(fields)
    measured, failed = _requests(fields)
    return listed(fields.path, TOOL, measured, failed, numbered=True)


def _sums(fields: Fields) -> Client:
    completed = fields.whole("completed")
    failed = fields.whole("failed") if "failed" in fields.values else 0
    tokens = fields.number("total_input_tokens"), fields.number("total_output_tokens")
    told = {measure: _told(fields, name) for measure, name in NAMES.items()}
    return Client(
        fields.path, TOOL, completed, failed, *tokens, told={name: each for name, each in told.items() if each}
    )


def _told(fields: Fields, name: str) -> Distribution:
    keys = {statistic: f"{word}_{name}_ms" for statistic, word in STATISTICS.items()}
    return {statistic: fields.number(key) / 1e3 for statistic, key in keys.items() if key in fields.values}


def _requests(fields: Fields) -> tuple[list[Measured], int]:
    errors = fields.entries("errors")
    count = len(errors)
    first, prompts, outputs = (fields.numbers(name, count) for name in ("ttfts", "input_lens", "output_lens"))
    gaps = fields.entries("itls")
    if len(gaps) != count:
        fields.bad("itls", gaps, f"a list of {count:,} lists")
    starts = fields.numbers("start_times", count) if "start_times" in fields.values else [math.nan] * count
    whole = fields.numbers("latencies", count) if "latencies" in fields.values else None
    measured = []
    for number in range(count):
        if errors[number]:
            continue
        own = Fields(fields.path, fields.place, {f"itls[{number}]": gaps[number]})
        own_gaps = own.numbers(f"itls[{number}]", len(gaps[number]) if isinstance(gaps[number], list) else 0)
        e2e = first[number] + sum(own_gaps) if whole is None else whole[number]
        tokens = outputs[number]
        tpot = (e2e - first[number]) / (tokens - 1) if tokens > 1 else math.nan
        measured.append(
            Measured("", number, starts[number], first[number], tpot, e2e, prompts[number], tokens, own_gaps)
        )
    return measured, count - len(measured)
