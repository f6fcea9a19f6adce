"""A Grafana dashboard for vLLM: every series that its queries name is there, with every label that they use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from prometheus_client.parser import text_string_to_metric_families

from cbsim.http.app import App
from cbsim.http.metrics import VllmMeter
from cbsim.virtual.server import IN_PROCESS, virtual

DASHBOARD = json.loads((Path(__file__).parent / "vllm_dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ZERO = {"num_preemptions_total", "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"}
ZERO |= {"admission_rejections_total", "prefix_cache_hits_total", "kv_cache_usage_perc"}


def test_queries_of_a_dashboard_have_their_series() -> None:
    """After a few requests all but those that count nothing then have a value that is not 0."""
    server = virtual("tiny_cpu")
    server.app = App(server.backend, IN_PROCESS, VllmMeter(server.backend))

    async def client() -> None:
        async with server.openai() as openai:
            for _ in range(3):
                await openai.completions.create(model=server.model, prompt="hello", max_tokens=4)

    server.run(client())
    exposition = server.backend.meter.exposition()
    assert exposition is not None
    labels, values = dict[str, set[str]](), dict[str, float]()
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
            values[sample.name] = values.get(sample.name, 0) + sample.value
    named = 0
    for query in [*QUERIES, *(variable["query"] for variable in DASHBOARD["templating"]["list"])]:
        grouped = {*re.findall(r"by\((\w+)\)", query)}
        for name, selector in re.findall(r"vllm:(\w+)(?:\{([^}]*)\})?", query):
            used = grouped | {*re.findall(r"(\w+)=", selector)}
            assert used <= labels.get(f"vllm:{name}", set()), (name, used)
            assert name in ZERO or values[f"vllm:{name}"] > 0, name
            named += 1
    assert named > 30
