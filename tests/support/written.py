"""A run and its directory as tests write them: forty requests, some of them too long for the cache."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cbsim.machine import simulate
from cbsim.machine.driver import Machine
from cbsim.metrics import metrics
from cbsim.record import directory
from cbsim.record.directory import RunWriter
from cbsim.record.record import Record
from cbsim.record.tables import RequestTable, Steps, token_times
from cbsim.scenario.scenario import Scenario, dump
from cbsim.workload import generators

CLOCK = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


def scenario(**more: Any) -> Scenario:
    """Forty requests with a shared prefix, random lengths and arrivals; some are too long for the cache."""
    data: dict[str, Any] = {
        "question": "Does it come back?",
        "seed": 7,
        "model": "llama-3.1-8b",
        "hardware": "h200-sxm",
        "workload": {
            "kind": "synthetic",
            "requests": 40,
            "prompt_tokens": {"lognormal": {"mean": 300, "sigma": 1.0, "low": 16, "high": 4000}},
            "output_tokens": {"uniform": {"low": 1, "high": 150}},
            "arrivals": {"kind": "poisson", "rate_per_s": 100},
            "shared_prefix_tokens": 64,
        },
        "scheduler": {"name": "vllm", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 900},
        "kv_cache": {"num_blocks": 90, "block_size": 16},
        "cost": {"kind": "roofline"},
    }
    return Scenario.model_validate(data | more, context={"base": Path()})


def simulated(asked: Scenario, loop: str = "async") -> Machine:
    server = simulate.machine(asked, loop, generators.build(asked))
    simulate.run(server)
    return server


def write(out: Path, server: Machine, asked: Scenario) -> RunWriter:
    """A whole run directory, but for its figures."""
    writer = RunWriter.new(out, asked.name, "0123456789abcdef", CLOCK)
    writer.scenario(dump(asked))
    writer.json("env.json", {"command": "none"})
    rows, steps = tables(writer, server.record)
    summary = metrics.summarise(rows, steps, total_blocks=server.record.total_blocks)
    writer.json("summary.json", {"schema_version": directory.SCHEMA_VERSION} | summary)
    return writer


def tables(writer: RunWriter, record: Record) -> tuple[RequestTable, Steps]:
    """Write both tables of a record, and return them."""
    rows, steps = directory.contents(record)
    with writer.writing(steps, lambda: token_times(rows, steps)):
        return rows, steps


@pytest.fixture(scope="module")
def server() -> Machine:
    return simulated(scenario())


@pytest.fixture
def complete(server: Machine, tmp_path: Path) -> Path:
    """A run directory that is complete."""
    writer = write(tmp_path, server, scenario())
    writer.complete()
    return writer.path
